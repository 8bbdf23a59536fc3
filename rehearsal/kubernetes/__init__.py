"""A real Kubernetes on this machine: its own programs, built once from their Go modules.

credentials.py who may ask the API server · control_plane.py etcd, API server, controllers and DNS, and how they are
started as processes of this machine · cluster.py the same as containers of a rehearsal, with nodes · nodes.py a node:
a kubelet over containerd in a container.
"""
