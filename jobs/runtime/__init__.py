"""What every job shares and needs no framework: process environment, metrics, preemption, data cache, report. What
needs a framework is in a folder of its name: `jax/`.

May be imported from every job; `launch` may import `cache` and `report.render`.
Imports `contracts`, no job and nothing of `fabfile`, `launch`, `host` or `infra`.
"""
