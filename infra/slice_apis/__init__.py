"""How a slice is had from one of Google's APIs, whichever it is: `infra.cloud_tpu` or `infra.compute`.

`lifecycle` is what happens to a slice, `zone_search` in which of several zones, `slice_api` what both need of an API,
`lifecycles` which API it is. `plugin` is the process in which Pulumi runs it; `infra.queued_resource`,
`infra.compute_slice`, `infra.node_workers` and `infra.stack_identity` are what Pulumi sees of it, and stay where they
are: users' state names them by module. May import `infra.naming` and `infra.documents`; knows nothing of
configurations. The keeper and `fab recover` use the same lifecycle.
"""
