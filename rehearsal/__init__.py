"""A cloud on this machine, to rehearse with: a simulator of the Cloud TPU API v2. Nothing here is Google's service.

It may import `infra.catalogue` and nothing else of ours, and Google's API client for the discovery document it ships.
Nobody may import it but tests and `fabfile`."""
