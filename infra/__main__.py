"""What `pulumi preview` and `pulumi up` run."""

from infra.program import declare

declare()
