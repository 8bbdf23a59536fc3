"""A rehearsal that is up: one daemon that holds simulator, engine and hosts, and the way to talk to it.

    python -m rehearsal.daemon FOLDER --hosts 2     the daemon; `fab rehearsal up` starts it in the background

cli.py what is typed behind `fab rehearsal` · daemon.py what the daemon holds · control_socket.py how it is asked ·
fault_commands.py what goes wrong on purpose · node_machines.py nodes become machines · rehearsal_stack.py the real
program on the real engine, configuration.py for how many hosts.
"""
