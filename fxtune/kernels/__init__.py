"""Operators of torch.library and their plain references, nothing else."""
