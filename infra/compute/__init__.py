"""Slices that Compute Engine makes: managed instance groups of TPU machines, or single instances.

`compute_request` is pure. Only `compute_client` speaks to Google. `groups` is the `SliceApi` over both.
"""
