"""From an inventory and a job to processes on every host: targets, transport, bundle, plan, rollout, runs, recover.

It may import `infra.inventory` and, of jobs, `jobs.runtime.run_directory`, `.errors` and `.cache`;
a job's config and data by name. `fabfile` imports it; no framework is loaded here."""
