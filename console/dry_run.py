"""What `fab train --dry-run` prints: what each host or the cluster is told, the image, what would be sent, what an hour
costs."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator

import yaml

from contracts.process_environment import read as read_environment
from contracts.ranks import decoded, rank_variables
from launch import plan as plans
from launch import pricing
from launch.code.bundles import TITLES, left_out_lines
from launch.output import counted
from launch.request.run_request import Planned
from launch.targets import Target


def lines(planned: Planned, target: Target) -> Iterator[str]:
    """Return the lines; the same plan gives the same lines."""
    documents = planned.launcher.documents(planned.plan)
    plan = planned.plan if documents else plans.with_stand_in_ports(planned.plan)
    yield f"run {plan.run_id}, attempt {plan.attempt}, in {plan.run_dir}"
    hosts = counted(plan.processes, "host")
    yield f"target {target.name}: slice {target.slice.name} ({target.slice.accelerator_type}), {hosts}"
    price = (
        pricing.an_hour(target.slice) if target.capabilities.is_billed else "nothing, this machine is yours"
    )
    yield f"cost: {price}"
    if plan.budget is not None:
        yield plan.budget.text
    image = (
        f"none: the processes run bare, with {plan.command.python if plan.command else plan.target.python}"
        if plan.container is None
        else plan.container.image
    )
    yield f"image {image}"
    if plan.command is None:
        yield f"job {plan.job} on {plan.framework}, {counted(plan.ranks_per_host, 'process')} a host"
    yield from planned.notes
    for title, bundle in zip(TITLES, planned.bundles, strict=False):
        yield f"{title}: {len(bundle.names)} files, {len(bundle.archive) / 1024:,.0f} KiB packed, {bundle.sha256[:12]}"
    for bundle in planned.bundles[2:]:
        yield f"your packages: {len(bundle.archive) / 1024:,.0f} KiB packed, {bundle.sha256[:12]}"
    yield from left_out_lines(planned.bundles)
    if documents:
        yield from yaml.dump_all(documents, Dumper=_Plainly, sort_keys=False, width=sys.maxsize).splitlines()
        return
    for index, (name, address, _) in enumerate(target.addresses):
        request = plans.start(plan, index)
        yield f"host {name} ({address})"
        if plan.command is None and plan.ranks_per_host == 1:
            yield f"  runs  {shlex.join(request['argv'])}"
            yield from _variables(request["env"])
            continue
        spec = decoded(request["argv"][-1])
        yield f"  runs  {shlex.join(spec.words)}"
        if spec.work is not None:
            yield f"  in    {spec.work}"
        for local_rank in range(spec.ranks.per_host):
            variables = rank_variables(read_environment(request["env"]), spec.ranks, local_rank)
            yield from _variables({**plan.env, **dict.fromkeys(plan.secrets, "***"), **variables})


class _Plainly(yaml.SafeDumper):  # type: ignore[misc]
    """Writes each value where it is used, and a program as it is read."""

    def ignore_aliases(self, _data: object) -> bool:
        return True

    def text(self, value: str) -> object:
        return self.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Plainly.add_representer(str, _Plainly.text)


def _variables(variables: dict[str, str]) -> Iterator[str]:
    yield "  with"
    for name, value in variables.items():
        shown = "PORT" if name == "MASTER_PORT" else re.sub(rf":{plans.STAND_IN_PORT}\b", ":PORT", value)
        yield f"    {name}={shown}"
