"""Attention kernels, and documents that cannot see each other."""
