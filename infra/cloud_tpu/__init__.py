"""Slices that the Cloud TPU API v2 makes: queued resources (https://cloud.google.com/tpu/docs/reference/rest/v2).

`tpu_request` is pure. Only `tpu_client` speaks to Google. `queued_resources` is the `SliceApi` over both.
"""
