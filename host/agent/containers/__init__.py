"""Processes in Docker containers: the docker command, the pull of an image, the start of a container."""
