"""Hosts over SSH: one connection a host, opened on first use, pinned to its key and used by everything.

`access` says how a host is reached, `connections` opens and keeps, `transport` is what the rest of launch sees.
Imports of ours: launch.transport, launch.errors, launch.beside, contracts.inventory.
"""
