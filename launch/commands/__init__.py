"""The commands other than training, one module for each group; a command returns its exit code."""
