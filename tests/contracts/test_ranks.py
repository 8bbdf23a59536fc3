"""What a rank finds in its environment, by framework and platform; and the host's part of a command as one argument."""

import dataclasses
import json

import pytest

from contracts import process_environment
from contracts.errors import RequestError
from contracts.ranks import Ranks, Spec, decoded, rank_variables

HOST = process_environment.ProcessEnvironment(
    run_id="command-20261120-214500-abcd",
    run_dir="/runs/one",
    job="command",
    framework="jax",
    attempt=0,
    num_processes=2,
    process_id=1,
    coordinator="10.0.0.1:4000",
    platform="cpu",
    cache_dir="/cache",
    local_devices=1,
    peak_flops_per_s=None,
    control_dir="/agent/runs/one/0-1",
)
HOSTS = ("10.0.0.1", "10.0.0.2")
TWO_EACH = Ranks(hosts=HOSTS, ports=((5000, 5001), (6000, 6001)), per_host=2)
CHIPS = Ranks(hosts=HOSTS, ports=((1, 2, 3, 4),) * 2, per_host=4, topology="2x4")
TORCH = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "NODE_RANK": "1",
}
CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
JAX = {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": "10.0.0.1:4000"}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "0.0;tcp://10.0.0.1:4000",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
WORKERS = ["10.0.0.1:5000", "10.0.0.1:5001", "10.0.0.2:6000", "10.0.0.2:6001"]
TF_CONFIG = {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 3}}
LIBTPU = {
    "TPU_VISIBLE_CHIPS": "1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "2,4,1",
    "TPU_PROCESS_ADDRESSES": ",".join(f"{host}:{port}" for host in HOSTS for port in range(8476, 8480)),
    "TPU_PROCESS_PORT": "8477",
    "CLOUD_TPU_TASK_ID": "5",
}
SLICE_BUILDER = ",".join(f"{host}:{port}" for host in HOSTS for port in range(8070, 8074))


@pytest.mark.parametrize(
    ("framework", "platform", "ranks", "own"),
    [
        ("jax", "cpu", TWO_EACH, {**JAX, **OPEN_MPI, **CPU}),
        ("jax", "gpu", TWO_EACH, {**JAX, **OPEN_MPI, "JAX_PLATFORMS": "cuda"}),
        # On a TPU JAX finds the others by the machine's own metadata.
        ("jax", "tpu", CHIPS, {**JAX, "JAX_PLATFORMS": "tpu,cpu", **LIBTPU}),
        ("pytorch", "cpu", TWO_EACH, {**CPU}),
        ("pytorch", "gpu", TWO_EACH, {}),
        (
            "pytorch",
            "tpu",
            CHIPS,
            {"TORCH_TPU_SLICEBUILDER_ADDRESSES": SLICE_BUILDER, "TORCH_TPU_TOPOLOGY": "2,4,1"},
        ),
        ("pytorch_xla", "tpu", CHIPS, {"PJRT_DEVICE": "TPU", **LIBTPU}),
        ("pytorch_xla", "cpu", TWO_EACH, {"PJRT_DEVICE": "CPU", **CPU}),
        (
            "tensorflow",
            "cpu",
            TWO_EACH,
            {
                "TF_CONFIG": json.dumps(TF_CONFIG),
                "TPU_SKIP_MDS_QUERY": "1",
                **CPU,
            },
        ),
    ],
)
def test_a_rank_finds_what_its_framework_s_own_launcher_would_have_set(
    framework: str, platform: process_environment.Platform, ranks: Ranks, own: dict[str, str]
) -> None:
    changed = {"framework": framework, "platform": platform}
    host = process_environment.read(
        {**HOST.variables(), **{f"RUN_{name.upper()}": text for name, text in changed.items()}}
    )
    rank = {
        "RANK": str(ranks.per_host + 1),
        "WORLD_SIZE": str(ranks.size),
        "LOCAL_WORLD_SIZE": str(ranks.per_host),
    }
    numbers = {
        "RUN_PROCESS_ID": rank["RANK"],
        "RUN_NUM_PROCESSES": rank["WORLD_SIZE"],
        "RUN_LOCAL_RANK": "1",
        "RUN_RANKS_PER_HOST": str(ranks.per_host),
    }
    found = rank_variables(host, ranks, 1)
    assert found == {**host.variables(), **numbers, **TORCH, **rank, **own}
    told = process_environment.read(found)
    assert (told.process_id, told.local_rank, told.host, told.hosts) == (ranks.per_host + 1, 1, 1, 2)


@pytest.mark.parametrize("hosts", [1, 2])
def test_tensorflow_finds_a_cluster_from_two_ranks_on(hosts: int) -> None:
    """With a TF_CONFIG of one worker a script that asks for it would train as part of a cluster."""
    workers = tuple(f"10.0.0.{host + 1}" for host in range(hosts))
    ranks = dataclasses.replace(TWO_EACH, hosts=workers, per_host=1, ports=((4000,),) * hosts)
    changed = {"RUN_FRAMEWORK": "tensorflow", "RUN_NUM_PROCESSES": str(hosts), "RUN_PROCESS_ID": "0"}
    host = process_environment.read({**HOST.variables(), **changed})
    assert ("TF_CONFIG" in rank_variables(host, ranks, 0)) == (hosts == 2)


def test_ranks_that_do_not_fill_hosts_are_refused() -> None:
    wrong = {"RUN_RANKS_PER_HOST": "2", "RUN_LOCAL_RANK": "0"}
    with pytest.raises(RequestError, match=r"RUN_LOCAL_RANK \(0\) RUN_PROCESS_ID \(1\) modulo it"):
        process_environment.read({**HOST.variables(), **wrong})
    with pytest.raises(RequestError, match=r"RUN_NUM_PROCESSES \(2\) must be a multiple"):
        process_environment.read(
            {**HOST.variables(), **wrong, "RUN_RANKS_PER_HOST": "3", "RUN_LOCAL_RANK": "1"}
        )


@pytest.mark.parametrize(
    ("topology", "hosts", "per_host", "chips", "block", "processes"),
    [
        ("2x2x2", 2, 2, "2,3", "1,2,1", "2,1,2"),
        ("4x4", 4, 4, "1", "1,1,1", "4,4,1"),
        ("2x4", 1, 2, "4,5,6,7", "2,2,1", "1,2,1"),
        ("2x4", 1, 8, "1", "1,1,1", "2,4,1"),
    ],
)
def test_ranks_that_share_the_chips_of_a_host_see_their_own_and_fill_the_slice(
    topology: str, hosts: int, per_host: int, chips: str, block: str, processes: str
) -> None:
    ranks = Ranks(
        hosts=("h",) * hosts, ports=(tuple(range(per_host)),) * hosts, per_host=per_host, topology=topology
    )
    host = process_environment.read({**HOST.variables(), "RUN_PLATFORM": "tpu", "RUN_PROCESS_ID": "0"})
    found = rank_variables(host, ranks, 1)
    assert found["TPU_VISIBLE_CHIPS"] == chips
    assert (found["TPU_CHIPS_PER_PROCESS_BOUNDS"], found["TPU_PROCESS_BOUNDS"]) == (block, processes)


def test_one_rank_a_host_has_all_of_its_chips() -> None:
    one = Ranks(hosts=HOSTS, ports=((1,), (2,)), topology="2x4")
    host = process_environment.read({**HOST.variables(), "RUN_PLATFORM": "tpu"})
    assert not [name for name in rank_variables(host, one, 0) if name.startswith(("TPU_", "CLOUD_TPU_"))]


def test_a_host_s_part_of_a_command_comes_through_a_command_line_as_it_was() -> None:
    spec = Spec(words=("sh", "-c", 'echo "ä\n'), folder="/b/1", work="/w", ranks=TWO_EACH, progress="log")
    assert decoded(spec.encoded()) == spec
