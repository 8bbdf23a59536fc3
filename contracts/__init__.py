"""What the parts tell each other: the inventory, the process environment, the run directory, and errors.

It may import the standard library of Python 3.10 and nothing else, nothing of ours either. Everything may import it:
it is part of the code that jobs run from, and of the agent that is sent to hosts.
"""
