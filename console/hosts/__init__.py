"""Commands on a slice's hosts: run a command, copy files, a shell, a notebook, host keys, a check of the devices."""
