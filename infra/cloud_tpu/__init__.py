"""Slices that the Cloud TPU API v2 makes: queued resources (https://cloud.google.com/tpu/docs/reference/rest/v2).

`request` is pure. Only `client` speaks to Google. `queued_resources` is the `infra.slice_apis.slice_api.SliceApi` over
both. `infra.slices` takes the API's words of `request`.
"""
