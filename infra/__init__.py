"""What `pulumi up` declares on Google Cloud: one component a file, pure rules and data apart from them.

It may import pulumi, pulumi-gcp and Google's client libraries, and nothing of launch, jobs, host or fabfile.
Others import `infra.catalogue`, which needs only the standard library; `backends.vm.ensure` and the keeper also what
makes a slice (`cloud_tpu`) under its lease (`lease`, `documents`)."""
