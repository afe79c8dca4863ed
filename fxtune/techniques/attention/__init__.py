"""Attention kernels, and attention that keeps packed documents apart."""
