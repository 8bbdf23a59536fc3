"""What our dynamic providers do with the Cloud TPU API v2 (https://cloud.google.com/tpu/docs/reference/rest/v2).

`request` is pure. Only `client` speaks to Google. `lifecycle` is what happens to a queued resource, `zones` in which of
several zones. `plugin` is the process that Pulumi runs it in. `infra.queued_resource`, `infra.node_workers` and
`infra.stack_identity` are what Pulumi sees of it. May import `infra.naming` and `infra.documents`; knows nothing of
configurations and slices. `infra.slices` takes the API's words of `request`, `infra.offered` the
credentials, the keeper the client and the lifecycle. Nobody else imports from here.
"""
