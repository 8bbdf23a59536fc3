"""The processes of one host: their supervisor, environment, secrets, and how they join."""
