"""What jobs on PyTorch share: the group, its devices, checkpoints, profiles."""
