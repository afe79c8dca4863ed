"""Liger's fused kernels."""
