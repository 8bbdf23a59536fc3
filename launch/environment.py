"""The environment that a job's process is started in: contract 2, and what has to be said before its Python begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.plan import Plan

ON_CPU = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Asks the system for memory in large pages. XLA on CPU takes memory for the results of each step and frees it
afterwards; in pages of 4 KiB the system clears and hands over hundreds of thousands of them in every step, which was a
fifth to a third of its time (`docs/benchmarks.md`, "A training step beside those of `transformers`"). Another C library
than glibc, and a system that gives no large pages (/sys/kernel/mm/transparent_hugepage/enabled), pass over it. Keeping
the memory instead (mallopt(3)) was faster by a few per cent, but pieces of it that were not used again came to several
times what a step needs."""


def of(plan: Plan, process_id: int) -> dict[str, str]:
    """Contract 2 for one process, and where Python finds the code."""
    return {
        "RUN_ID": plan.run_id,
        "RUN_DIR": plan.run_dir,
        "RUN_JOB": plan.job,
        "RUN_FRAMEWORK": plan.stack,
        "RUN_ATTEMPT": str(plan.attempt),
        "RUN_NUM_PROCESSES": str(plan.processes),
        "RUN_PROCESS_ID": str(process_id),
        "RUN_COORDINATOR": plan.coordinator,
        "RUN_PLATFORM": plan.platform,
        "RUN_CACHE_DIR": plan.at_home(process_id, plan.cache_dir),
        **({"RUN_LOCAL_DEVICES": str(plan.local_devices)} if plan.local_devices is not None else {}),
        **({"RUN_PEAK_FLOPS_PER_S": str(plan.peak_flops_per_s)} if plan.peak_flops_per_s is not None else {}),
        "PYTHONPATH": plan.at_home(process_id, f"{plan.agent_root}/bundles/{plan.bundle_sha256}"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **(ON_CPU if plan.platform == "cpu" else {}),
    }
