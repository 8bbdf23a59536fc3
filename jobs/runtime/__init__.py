"""What every job shares: process environment, run directory, metrics, checkpoints, preemption, data cache.

May be imported from every job; `launch` may import `run_directory`, `cache` and `report.render`.
Imports `contracts`, no job and nothing of `fabfile`, `launch`, `host` or `infra`.
"""
