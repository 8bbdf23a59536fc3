"""What each host is told, worked out before anything is done: pure, so that it can be read and compared in tests."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from contracts import run_directory
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.process_environment import Platform, ProcessEnvironment
from contracts.ranks import Spec, rank_variables, ranks_that_share
from launch.targets import ACCESSES, Container, Plan, Target

MIN_FREE_BYTES = 512 * 2**20
"""Least free space on a host's disks before a run is started: room for checkpoints, logs and the data cache."""
MAX_CLOCK_OFFSET_S = 5.0
LOCK_FILE = "/tmp/libtpu_lockfile"
HOME = "~"

_ALL_FRAMEWORKS = ("tokenizers", "safetensors", "tyro", "tensorboard")
MODULES_OF_FRAMEWORK = {
    "jax": ("jax", "flax", "optax", "orbax.checkpoint", *_ALL_FRAMEWORKS),
    "pytorch": ("torch", "transformers", *_ALL_FRAMEWORKS),
    "pytorch_xla": ("torch", "torch_xla", "transformers", *_ALL_FRAMEWORKS),
    "tensorflow": ("tensorflow", "tf_keras", *_ALL_FRAMEWORKS),
}
"""What the job's interpreter must be able to import, by framework; looked for, not loaded."""
MODULES_OF_JOB = {"serve": ("starlette", "uvicorn", "prometheus_client")}
"""And what some need besides."""


JOIN_LIMIT_S = {"cpu": 180.0, "gpu": 180.0, "tpu": 600.0}
"""By platform, from the start until all are in the group: the first start of a TPU's runtime takes minutes."""


def _python_remedy(target: Target, framework: str) -> str:
    if framework != "jax":
        return "install it there, or leave --python out"
    if target.capabilities.shares_files and target.python == sys.executable:
        return "`make install`"
    runtime = " --runtime bare" if framework in target.inventory.images else ""
    return target.capabilities.python_remedy.format(stack=target.name, runtime=runtime)


PER_CHIP = "per-chip"
RANK_A_CHIP = ("pytorch", "pytorch_xla")
"""Frameworks of which a job has one process for each TPU chip or GPU; of others, one drives all of its host."""


def processes_per_host(text: str, target: Target, framework: str) -> int:
    """Return how many processes --processes-per-host means.

    Raises:
        RequestError: it is no number, or so many cannot share the chips of a host.
    """
    chips = target.slice.devices_per_host if target.platform != "cpu" else None
    if text == PER_CHIP:
        if chips is None:
            raise RequestError(
                f"--processes-per-host {PER_CHIP}: a {target.platform} host has no chips; give a number"
            )
        return chips
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:4]) <= 256 and len(text) < 4):
        raise RequestError(
            f"--processes-per-host {text}: must be a whole number from 1 to 256, or {PER_CHIP}"
        )
    count = int(text)
    fitting = ranks_that_share(chips, framework) if target.platform == "tpu" and chips else (count,)
    if count not in fitting:
        raise RequestError(
            f"--processes-per-host {count}: a host of {target.slice.name} has {chips} chips, which "
            f"{', '.join(map(str, fitting))} processes of {framework} can share"
        )
    return count


def ranks_of_job(framework: str, target: Target, requested: str | None) -> int:
    """Return how many processes of a job a host starts.

    requested: as --processes-per-host says it; None: the framework's own number.

    Raises:
        RequestError: a job of this framework cannot have so many there.
    """
    if framework not in RANK_A_CHIP:
        if requested not in (None, "1"):
            raise RequestError(
                f"--processes-per-host {requested}: one process of a {framework} job drives all devices of its host; "
                "leave it out"
            )
        return 1
    if target.platform == "cpu":
        return processes_per_host(requested or "1", target, framework)
    count, chips = processes_per_host(requested or PER_CHIP, target, framework), target.slice.devices_per_host
    if count > chips or (count < chips and target.platform == "tpu"):
        raise RequestError(
            f"--processes-per-host {requested}: a process of a {framework} job has one chip, and a host of "
            f"{target.slice.name} has {chips}; leave it out"
        )
    return count


def preflight(plan: Plan, process_id: int, *, now_s: float) -> dict[str, Any]:
    """Return the agent's preflight request for one host. Every host has to reach the first one."""
    target, is_exclusive = plan.target, not plan.target.capabilities.shares_host
    name, host, port = target.addresses[0]
    request: dict[str, Any] = {
        "python": target.python,
        "python_remedy": _python_remedy(target, plan.framework),
        "modules": [*MODULES_OF_FRAMEWORK[plan.framework], *MODULES_OF_JOB.get(plan.job, ())]
        if plan.command is None
        else [],
        **({"free_ports": _ports_of_host(plan)} if plan.finds_peers_by_rank else {}),
        "platform": target.platform,
        "run_dir": _local_path(plan.run_dir),
        "cache_dir": target.cache_dir,
        "mount": target.mount,
        "min_free_bytes": MIN_FREE_BYTES,
        "peers": [{"name": name, "host": host, "port": port}] if is_exclusive and process_id else [],
        "alone": is_exclusive,
        "time": now_s,
        "max_clock_offset_s": MAX_CLOCK_OFFSET_S,
        "bundle": plan.bundle_sha256,
    }
    if target.stand_in_devices is not None:
        request |= {"device_globs": list(target.stand_in_devices), "lockfiles": [LOCK_FILE]}
    if plan.container is not None:  # all mounts but those that the launch itself makes
        mounts = [*plan.container.mounts, *plan.container.read_only_mounts]
        request["container"] = {"image": plan.container.image, "mounts": mounts}
    return request


def settled(plan: Plan, facts: Sequence[Mapping[str, Any]], *, token: str) -> Plan:
    """Return the plan with what the preflight found: free ports of the first host, and each host's home directory."""
    coordinator_port, liveness_port, *rank_ports = facts[0]["free_ports"]
    # Hosts that are one machine have one address, so the first one's answer serves all.
    count, shared = plan.ranks_per_host, plan.target.capabilities.shares_host
    free = [
        rank_ports[index * count :] if shared else fact["free_ports"][2:] for index, fact in enumerate(facts)
    ]
    return dataclasses.replace(
        plan,
        rank_ports=tuple(tuple(ports[:count]) for ports in free) if plan.finds_peers_by_rank else (),
        coordinator_port=coordinator_port,
        liveness_port=liveness_port,
        liveness_token=token,
        homes=tuple(fact["home"] for fact in facts),
    )


STAND_IN_PORT = 1


def with_stand_in_ports(plan: Plan) -> Plan:
    """Return the plan as if it were settled, with STAND_IN_PORT for every port that a preflight chooses."""
    ports = [STAND_IN_PORT] * (2 + plan.ranks_per_host * plan.processes)
    return settled(plan, [{"free_ports": ports, "home": HOME}] * plan.processes, token="")


PYTHON_OPTIONS = ("-P", "-u", "-m")
"""-P: the code is the bundle's, not whatever lies in the working directory."""


def start(plan: Plan, process_id: int) -> dict[str, Any]:
    """Return the agent's start request for one process."""
    log = run_directory.log(plan.attempt, process_id)
    local_dir = _local_path(plan.run_dir)
    return {
        **plan.process(process_id),
        "argv": [
            plan.at_home(process_id, plan.target.python) if plan.container is None else "python",
            *PYTHON_OPTIONS,
            *_module(plan, process_id),
        ],
        "env": environment(plan, process_id),
        "cwd": _cwd(plan),
        "log_path": f"{local_dir}/{log}"
        if local_dir
        else f"{plan.target.agent_root}/runs/{plan.run_id}/{log}",
        "run_dir": local_dir,
        "num_processes": plan.processes,
        "cpus": list(cpus) if (cpus := plan.target.cpus[process_id]) is not None else None,
        "liveness_host": plan.target.coordinator_host,
        "liveness_port": plan.liveness_port,
        "liveness_token": plan.liveness_token,
        **({"worker_env": worker} if (worker := _worker_variables(plan, process_id)) else {}),
        **({"secrets": values} if (values := secret_values(plan)) else {}),
        "hang_floor_s": plan.hang_floor_s,
        "heartbeat_limit_s": plan.heartbeat_limit_s,
        **(
            {}
            if plan.budget is None
            else {"budget_s": plan.budget.left_s, "budget_reason": plan.budget.reason}
        ),
        **({} if plan.target.slice.ends_s is None else {"slice_ends_s": plan.target.slice.ends_s}),
        **_container(plan, process_id),
    }


def secret_values(plan: Plan) -> dict[str, str]:
    """Return the secrets whose values the launcher has to hand over; the hosts read the others."""
    return {name: secret.value for name, secret in plan.secrets.items() if secret.value is not None}


def _ports_of_host(plan: Plan) -> int:
    """How many free ports a host is asked for: of the coordinator, of the liveness server, of each rank."""
    return 2 + plan.ranks_per_host * (plan.processes if plan.target.capabilities.shares_host else 1)


def _module(plan: Plan, process_id: int) -> list[str]:
    """The module that Python runs, and its arguments."""
    job = [f"jobs.{plan.job}", *plan.arguments]
    if plan.command is None and plan.ranks_per_host == 1 and not plan.secrets:
        return job
    python = plan.target.python if plan.command is None else plan.command.python
    spec = Spec(
        words=("python", *PYTHON_OPTIONS, *job),
        ranks=plan.ranks,
        python=plan.at_home(process_id, python) if plan.container is None else None,
        secrets={name: secret.source for name, secret in plan.secrets.items() if secret.value is None},
    )
    if plan.command is not None:
        spec = dataclasses.replace(
            spec,
            words=plan.arguments,
            folder=plan.at_home(process_id, _bundle(plan, plan.command.folder_sha256)),
            work=plan.at_home(process_id, _work(plan, process_id)),
            layer=plan.at_home(process_id, _layer(plan, process_id)) if plan.command.has_layer else None,
            packages=plan.at_home(process_id, _bundle(plan, packages))
            if (packages := plan.command.packages_sha256)
            else None,
            progress=plan.command.progress,
        )
    return ["jobs.runtime.ranks.rank_supervisor", spec.encoded()]


def _bundle(plan: Plan, sha256: str) -> str:
    return f"{plan.target.agent_root}/bundles/{sha256}"


def _work(plan: Plan, process_id: int) -> str:
    """The folder that a host's ranks run in, the same in every attempt."""
    return f"{plan.target.agent_root}/runs/{plan.run_id}/work-{process_id}"


def _layer(plan: Plan, process_id: int) -> str:
    """The folder of the environment that a host's ranks get, the same in every attempt."""
    return f"{plan.target.agent_root}/runs/{plan.run_id}/venv-{process_id}"


def _cwd(plan: Plan) -> str:
    """Return the working directory; a container has no home directory and starts where it may write."""
    if plan.command is not None:
        return plan.code_dir
    if plan.container is None or plan.cwd != HOME:
        return plan.cwd
    return _local_path(plan.run_dir) or plan.target.cache_dir


def _container(plan: Plan, process_id: int) -> dict[str, Any]:
    """Return what the agent is told of the container that the process runs in; nothing if it runs bare."""
    if plan.container is None:
        return {}
    code = [plan.code_dir]
    mounts, run_dir = [*plan.container.mounts, plan.target.cache_dir], _local_path(plan.run_dir)
    if run_dir is not None and not any(f"{run_dir}/".startswith(f"{path}/") for path in mounts):
        mounts.append(run_dir)
    if plan.command is not None:
        mounts.append(_work(plan, process_id))
        if plan.command.has_layer:
            mounts.append(_layer(plan, process_id))
        code += [_bundle(plan, sha256) for sha256 in plan.command.bundles]
    return {
        "container": {
            "image": plan.container.image,
            "platform": plan.target.platform,
            "mounts": mounts,
            "read_only_mounts": [*code, *plan.container.read_only_mounts],
            "shm_bytes": SHM_BYTES,
            "access": plan.container.access,
        }
    }


def _local_path(run_dir: str) -> str | None:
    """Return the run directory if it is a path on the host; None if it is in a bucket."""
    return None if is_url(run_dir) else run_dir


LARGE_PAGES = "glibc.malloc.hugetlb=1"
"""Asks the system for memory in large pages. XLA on CPU takes memory for the results of each step and frees it
afterwards; in pages of 4 KiB the system clears and hands over hundreds of thousands of them in every step, which was a
fifth to a third of its time (`docs/benchmarks.md`, "A training step compared with `transformers`"). Another C library
than glibc, and a system that gives no large pages (/sys/kernel/mm/transparent_hugepage/enabled), pass over it."""
KEPT_MEMORY = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
"""Keeps what is freed for the next step: for PyTorch, which frees each result by itself. Of what XLA takes, pieces that
were not used again came to several times what a step needs."""


def tunables_on_cpu(framework: str) -> dict[str, str]:
    """Return the variable that sets how a job's process on a CPU takes memory."""
    tunables = (LARGE_PAGES, KEPT_MEMORY) if framework == "pytorch" else (LARGE_PAGES,)
    return {"GLIBC_TUNABLES": ":".join(tunables)}


def environment(plan: Plan, process_id: int) -> dict[str, str]:
    """Return the process environment (contract 2) of one process, where Python finds the code, and the user's own
    variables."""
    path = plan.at_home(process_id, plan.code_dir)
    if plan.command is not None and (user_path := plan.env.get("PYTHONPATH")):
        path += os.pathsep + user_path  # the ranks get what follows the first folder
    return {**plan.env, **_launcher_variables(plan, process_id), "PYTHONPATH": path}


def launcher_names(plan: Plan) -> set[str]:
    """Return the names of the variables that the launcher sets for a rank of the plan, before it is settled."""
    plan = with_stand_in_ports(plan)
    names = {*_launcher_variables(plan, 0), *rank_variables(_process_environment(plan, 0), plan.ranks, 0)}
    return names if plan.command is not None else {*names, "PYTHONPATH"}


def _launcher_variables(plan: Plan, process_id: int) -> dict[str, str]:
    variables = _process_environment(plan, process_id)
    has_one_rank = plan.finds_peers_by_rank and plan.command is None and plan.ranks_per_host == 1
    return {
        **(rank_variables(variables, plan.ranks, 0) if has_one_rank else variables.variables()),
        # Whatever the host's own setting: without bytecode, each start compiles some 1,500 modules.
        "PYTHONDONTWRITEBYTECODE": "",
        **(tunables_on_cpu(plan.framework) if plan.target.platform == "cpu" and plan.command is None else {}),
        **_variables_between_groups(plan, process_id),
    }


COMPUTE_ORIGINS = ("group", "instance")
"""As `contracts.inventory.Slice.origin` begins where Compute Engine made the slice."""


def _hosts_of_group(plan: Plan) -> int | None:
    """The hosts of each group of a slice that Compute Engine made; None: there are no TPUs, or another API made it."""
    slice_spec = plan.target.slice
    if plan.target.platform != "tpu" or slice_spec.origin.partition(" ")[0] not in COMPUTE_ORIGINS:
        return None
    return len(slice_spec.hosts) // slice_spec.count


def _variables_between_groups(plan: Plan, process_id: int) -> dict[str, str]:
    """What connects the groups of a multislice, which know nothing of each other; the Cloud TPU API tells its own.

    Names: `jax/_src/clusters/cloud_tpu_cluster.py` (JAX 0.12).
    """
    hosts, count = _hosts_of_group(plan), plan.target.slice.count
    if hosts is None or count == 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": plan.target.coordinator_host,
        "MEGASCALE_NUM_SLICES": str(count),
        "MEGASCALE_SLICE_ID": str(process_id // hosts),
    }


def _worker_variables(plan: Plan, process_id: int) -> dict[str, str]:
    """What the TPU runtime is told of a host's place in its group, for a host whose metadata server does not know it.

    Names: `jax/_src/clusters/cloud_tpu_cluster.py` (JAX 0.12).
    """
    hosts = _hosts_of_group(plan)
    if hosts is None:
        return {}
    first = process_id // hosts * hosts
    members = plan.target.slice.hosts[first : first + hosts]
    return {
        "TPU_WORKER_ID": str(process_id - first),
        "TPU_WORKER_HOSTNAMES": ",".join(host.internal_address for host in members),
    }


def _process_environment(plan: Plan, process_id: int) -> ProcessEnvironment:
    target, peak = plan.target, plan.target.peak_flops_per_s
    bucket = target.inventory.storage.bucket_url
    return ProcessEnvironment(
        run_id=plan.run_id,
        run_dir=plan.run_dir,
        job=plan.job,
        framework=plan.framework,
        attempt=plan.attempt,
        num_processes=plan.processes,
        process_id=process_id,
        coordinator=plan.coordinator,
        platform=cast(Platform, target.platform),
        cache_dir=plan.at_home(process_id, target.cache_dir),
        local_devices=target.cpu_devices if target.platform == "cpu" else None,
        peak_flops_per_s=round(peak * target.devices) if peak else None,
        control_dir=None,  # the agent says it
        shared_cache=f"{bucket}/cache" if bucket and not target.capabilities.hosts_outlive_runs else None,
    )


RUNTIMES = ("bare", "docker")
SHM_BYTES = 8 * 2**30
"""Of /dev/shm, which data loaders share; memory is taken only as it is filled. Docker's own 64 MiB is too little."""


def choose_container(
    target: Target,
    framework: str,
    runtime: str | None,
    before: Mapping[str, Any] | None = None,
    access: str | None = None,
) -> Container | None:
    """Choose what the processes of a framework run in on this target; None: bare.

    runtime: as --runtime says it. Without it a run is resumed as it was started (`before`, its run.json), and a new one
    runs in the image that the inventory has for it, if it has one. access: as --container-access says it;
    without it as the run was started, and a new one with only the devices.

    Raises:
        RequestError: there is no such runtime or access, no image, or an access without a container.
    """
    if access not in (None, *ACCESSES):
        raise RequestError(
            f'--container-access: "{access}" is not an access; choose one of {", ".join(ACCESSES)}'
        )
    if runtime not in (None, *RUNTIMES):
        raise RequestError(f'--runtime: "{runtime}" is not a runtime; choose one of {", ".join(RUNTIMES)}')
    image: str | None
    if runtime is None and before is not None:
        image = before["image"] if before["runtime"] == "docker" else None
    elif runtime == "docker":
        image = _built_image(target, framework)
    else:
        image = target.inventory.images.get(framework) if runtime is None else None
    if image is None:
        if access is not None:
            raise RequestError(
                f"--container-access {access}: the processes run in no container here; add --runtime docker, "
                "or leave it out"
            )
        return None
    share = target.inventory.storage.nfs_mount
    return Container(
        image=image,
        mounts=() if share is None else (share,),
        access=access or (before or {}).get("container_access") or ACCESSES[0],
    )


def container_hint(container: Container | None, platform: str) -> str | None:
    """Return what to try if the processes of a TPU run did not form a group; None if it would not help."""
    if container is None or platform != "tpu" or container.access == "privileged":
        return None
    return (
        "if the logs say that the TPU did not initialise: in a container it has its device nodes and nothing more; "
        "`--container-access privileged` gives it all that the host's root may (docs/images.md)"
    )


def _built_image(target: Target, framework: str) -> str:
    """Return the image that was built here or pushed. Raises RequestError: there is none."""
    if target.backend.environments is not None:
        return target.backend.environments.image(framework, target.platform)
    if framework not in target.inventory.images:
        raise RequestError(
            f"--runtime docker: the stack {target.name} has no image of {framework}; "
            f"`fab build --framework {framework}`, "
            f"`fab push --stack {target.name} --framework {framework}`, then `pulumi up`"
        )
    return target.inventory.images[framework]


def container_with_files(container: Container, config: Mapping[str, Any], cwd: str) -> Container:
    """Return the container with the working directory and the files that the job's options name mounted.

    Raises:
        RequestError: an option names a file by "~", which is another folder in there.
    """
    texts = [value.removeprefix("file://") for value in config.values() if isinstance(value, str)]
    for text in texts:
        if text.startswith("~") and os.path.exists(os.path.expanduser(text)):
            raise RequestError(f"{text} means another folder in a container; write its path out")
    named = {os.path.normpath(os.path.join(cwd, text)) for text in texts if text and "\0" not in text}
    outside = sorted(path for path in named if os.path.exists(path) and not Path(path).is_relative_to(cwd))
    return dataclasses.replace(container, read_only_mounts=(cwd, *outside))
