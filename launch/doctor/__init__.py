"""`fab doctor`: everything that can be wrong, from this machine to a device of the last host, each with its remedy.

finding is what a check answers; machine, keys, cloud, stack, hosts and storage are the checks, from near to far.
"""
