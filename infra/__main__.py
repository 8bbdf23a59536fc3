"""What `pulumi preview` and `pulumi up` run."""

from infra.pulumi_program import declare

declare()
