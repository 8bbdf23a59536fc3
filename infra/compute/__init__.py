"""Slices that Compute Engine makes: managed instance groups of TPU machines, or single instances.

`request` is pure. Only `client` speaks to Google. `groups` is the `infra.slice_apis.slice_api.SliceApi` over both.
"""
