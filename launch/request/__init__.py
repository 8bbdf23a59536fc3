"""A request for a run: its job or command, options, variables and secrets, checked and turned into a plan."""
