"""What runs on each host of a slice: the package agent, and the loader that brings it there.

It may import the standard library of Python 3.8 and nothing else, nothing of ours either.
Nobody imports it: the launching side speaks to it in JSON over stdin and stdout."""
