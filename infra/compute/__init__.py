"""Slices that Compute Engine makes: managed instance groups of TPU machines, or single instances.

`request` is pure. Only `client` speaks to Google. `groups` is the `infra.slice_api.SliceApi` over both; what happens to
a slice is `infra.cloud_tpu.lifecycle`, as with queued resources.
"""
