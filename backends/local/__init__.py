"""This machine as hosts, and the environments of frameworks that are made on it."""
