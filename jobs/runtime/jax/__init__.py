"""What jobs in JAX share: the group, devices, checkpoints, compiled programs, traces. Imports nothing itself."""
