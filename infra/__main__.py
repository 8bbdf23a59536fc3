"""What `pulumi preview` and `pulumi up` run."""

import sys

from infra.pulumi_program import ConfigurationRefused, declare

LOGGED = 32
"""The exit code after which Pulumi's language host adds no error of its own."""

try:
    declare()
except ConfigurationRefused:
    sys.exit(LOGGED)
