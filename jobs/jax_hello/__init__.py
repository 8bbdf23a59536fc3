"""The smallest job that has everything: a network learns a curve, and a stopped run goes on exactly."""

STACK = "jax"
