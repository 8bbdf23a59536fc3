"""From an inventory and a job to processes on every host: targets, hosts, plan, launch, runs.

It may import `contracts`, `infra.catalogue` and, of jobs, `jobs.runtime.cache`, `.bucket_files` and `.report.render`;
a job's config and data by name. `backends`, `console` and `fabfile` import it; no framework is loaded here."""
