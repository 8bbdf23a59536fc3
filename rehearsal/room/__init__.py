"""A rehearsal that is up: one daemon that holds simulator, engine and hosts, and the way to talk to it.

    python -m rehearsal.room FOLDER --hosts 2       the daemon; `fab rehearsal up` starts it in the background

begin.py starts and ends it from outside · room.py what it holds · hosts.py nodes become machines · stack.py the real
program on the real engine, wanted.py with which configuration · door.py how it is asked · typed.py what is typed behind
pulumi · repertoire.py, acts.py what can befall it · person.py what is typed behind `fab rehearsal`.
"""
