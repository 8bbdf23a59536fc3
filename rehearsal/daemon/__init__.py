"""A rehearsal that is up: one daemon that holds simulator, engine and hosts, and the way to talk to it.

cli.py what is typed behind `fab rehearsal` · daemon.py the daemon's process and what it holds · control_socket.py how
it is asked · fault_commands.py what goes wrong on purpose · node_machines.py nodes become machines ·
rehearsal_stack.py the real program on the real engine, configured for so many hosts.
"""
