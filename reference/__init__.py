"""The readable side: loops, eager PyTorch, nothing else."""
