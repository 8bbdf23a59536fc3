"""The task about the rehearsal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from contracts.errors import DONE, RequestError
from fabfile.command import task
from fabfile.command_options import argument, flag, number, option, options, whole_number

if TYPE_CHECKING:
    from rehearsal.daemon.cli import UpRequest


PROVISIONINGS = ("queued", "compute")


@options
class Rehearsal:
    action: str = argument(
        "up, down, status, env, acts; or an act such as kill, cut, preempt (`fab rehearsal acts` lists them)"
    )
    hosts: int = option("how many hosts `up` makes (default: 2)", whole_number(1), default=2)
    docker: bool = flag("with `up`: hosts with Docker, and an image registry")
    kubernetes: bool = flag("with `up`: a cluster of real Kubernetes, and its nodes as the slice")
    slices: int = option(
        "with `--kubernetes`: the hosts as so many slices, and JobSet's controller",
        whole_number(1),
        default=1,
    )
    queue: str = option("with `--kubernetes`: Kueue, and a queue of this name", default="")
    keeper: bool = flag("with `up`: a gateway with a keeper")
    provisioning: str = option(
        "with `up`: queued, a slice of the Cloud TPU API, or compute, one of Compute Engine", default="queued"
    )
    host: str = option('the target of a fault: a host\'s index or name, or "share"', default="")
    amount: float | None = option("the amount of a fault: seconds or milliseconds", number)
    zone: str = option("where chips run out, of a slice with several zones", default="")
    for_good: bool = flag("a host that is killed is not started again")

    def up(self) -> UpRequest:
        """Return what `up` makes. Raises RequestError: the options contradict each other."""
        from rehearsal.daemon.cli import UpRequest

        if self.kubernetes and (self.docker or self.keeper):
            raise RequestError("--kubernetes: a cluster needs no --docker, and has no keeper; leave them out")
        if not self.kubernetes and (self.slices > 1 or self.queue):
            raise RequestError(
                "--slices, --queue: a rehearsal on hosts has one slice and no queue; add --kubernetes"
            )
        if self.provisioning not in PROVISIONINGS:
            raise RequestError(f"--provisioning {self.provisioning}: choose {' or '.join(PROVISIONINGS)}")
        if self.kubernetes and self.provisioning != "queued":
            raise RequestError(
                "--provisioning: a cluster has node pools instead; leave it or --kubernetes out"
            )
        return UpRequest(
            hosts=self.hosts,
            kind="kubernetes" if self.kubernetes else "docker" if self.docker else "plain",
            keeper=self.keeper,
            slices=self.slices,
            queue=self.queue,
            provisioning="compute" if self.provisioning == "compute" else "queued",
        )


@task("fab rehearsal up --hosts 2", "fab rehearsal kill --host 1")
def rehearsal(args: Rehearsal) -> int:
    """Run a simulated cloud on this machine, and inject faults."""
    from rehearsal.daemon.cli import carry_out
    from rehearsal.daemon.fault_commands import FaultRequest
    from rehearsal.state import RehearsalError

    def say(line: str) -> None:
        print(line, flush=True)

    fault = FaultRequest(host=args.host, amount=args.amount, zone=args.zone, for_good=args.for_good)
    try:
        carry_out(args.action, os.environ, say, request=args.up(), fault=fault)
    except RehearsalError as error:
        raise RequestError(str(error)) from None
    return DONE
