"""Hosts over SSH: one connection a host, opened on first use, pinned to its key and used by everything.

`access` says how a host is reached and why it cannot be, `connection` opens and keeps, `transport` is what the rest
of launch sees.
"""
