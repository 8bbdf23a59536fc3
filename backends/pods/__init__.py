"""Runs on node pools of a Kubernetes cluster: manifests from a plan, pods that are made, looked at and removed."""
