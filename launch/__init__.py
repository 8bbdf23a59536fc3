"""From an inventory and a job to processes on every host: targets, transport, bundle, plan, rollout, runs.

It may import `infra.inventory`, `infra.catalogue` and, of jobs, `jobs.runtime.run_directory`, `.errors`, `.cache`
and `.report.render`; a job's config and data by name. `fabfile` imports it; no framework is loaded here."""
