"""The technique `compile`: torch.compile and CUDA graphs."""
