"""What runs on each host of a slice: the package agent, and the loader that brings it there with the contracts.

It may import `contracts` and the standard library of Python 3.10, and nothing else. Nobody imports it: the launching
side speaks to it in JSON over stdin and stdout."""
