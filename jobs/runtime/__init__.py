"""What every job shares: process environment, metrics, checkpoints, preemption, data cache.

May be imported from every job; `launch` may import `cache` and `report.render`.
Imports `contracts`, no job and nothing of `fabfile`, `launch`, `host` or `infra`.
"""
