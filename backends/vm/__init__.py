"""Hosts over SSH: one connection a host, opened on first use, pinned to its key and used by everything; and what
`fab deploy` prepares on each of them.

`access` says how a host is reached and why it cannot be, `connection` opens and keeps, `transport` is what the rest
sees. `steps` and `python_environment` say what there is to prepare (pure), `deploy` has it done on every host and
reports.
"""
