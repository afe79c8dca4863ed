"""torch.compile and CUDA graphs."""
