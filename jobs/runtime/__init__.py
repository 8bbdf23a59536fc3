"""What every job shares: process environment, run directory, metrics, checkpoints, preemption, data cache.

May be imported from every job; `launch` may import `run_directory`, `errors`, `cache` and `report.render`.
Imports no job and nothing of `fabfile`, `launch`, `host` or `infra`.
"""
