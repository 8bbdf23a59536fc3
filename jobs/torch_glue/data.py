"""The rows of torch_glue are those of jobs/glue."""

from jobs.glue.data import problems

__all__ = ["problems"]
