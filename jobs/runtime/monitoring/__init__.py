"""Measurements of a run: metrics, heartbeats, profiles, and samples of its hosts."""
