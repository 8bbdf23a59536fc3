"""`fab doctor`: everything that can be wrong, from this machine to a device of the last host, each with its remedy.

`check` is what a check finds; `workstation` and `slice_hosts` are the checks, from near to far; `doctor` shows them.
"""
