"""What runs are started on: this machine, hosts over SSH (`vm/`), node pools of a Kubernetes cluster (`pods/`)."""
