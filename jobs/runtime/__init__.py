"""What every job shares and needs no framework: process environment, metrics, preemption, data cache, report. What
needs a framework is in a folder of its name: `jax/`. Data and files are in `storage/`, what a run says of itself in
`monitoring/`, the processes of a host in `ranks/`.

May be imported from every job; `launch` may import `storage.cache` and `report.render`.
Imports `contracts`, no job and nothing of `fabfile`, `launch`, `host` or `infra`.
"""
