"""What people want of runs, and from a request to processes on every host: targets, requests, plans, launches, runs.

It may import `contracts`, `infra.catalogue` and, of jobs, `jobs.runtime.storage` and `jobs.runtime.report.render`; a
job's config and data by name. `backends`, `console` and `fabfile` import it; no framework is loaded here."""
