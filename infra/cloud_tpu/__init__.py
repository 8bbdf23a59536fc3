"""What our dynamic providers do with the Cloud TPU API v2 (https://cloud.google.com/tpu/docs/reference/rest/v2).

`wanted`, `request`, `states`, `changes`, `mistakes` are pure. `client` speaks to Google and nothing else does;
`lifecycle` is what happens to a queued resource. `infra.queued_resource` and `infra.node_workers` are what Pulumi
sees of it. May import `infra.naming`; knows nothing of configurations and slices. `infra.slices` takes the API's words
of `request`. Nobody else imports from here.
"""
