"""`fab deploy`: what every host needs before a run, found or made, and said.

steps says what there is to do (pure), runner carries it out on a host, answers and report say how it went.
"""
