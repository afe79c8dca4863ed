"""Processes and devices: ranks, mesh and collectives."""
