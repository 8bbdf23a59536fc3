"""Training jobs, one package each with the same files, and `runtime`, which is what every job shares.

A job may import `contracts`, `jobs.runtime` and its framework; nothing of another job, fabfile, launch, infra or host.
The launching side may import `jobs.runtime.storage.cache` and `jobs.runtime.report.render`; it loads a job's config
and data by name."""
