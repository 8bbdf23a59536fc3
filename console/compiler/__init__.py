"""The TPU compiler on this machine: what a training step needs on a slice, and steps compiled before there is one."""
