"""The rows of torch_glue are those of jobs/glue."""

from jobs.glue.pretrained import problems

__all__ = ["problems"]
