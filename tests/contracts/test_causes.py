"""What frameworks print before they end is turned into one sentence: what is wrong, where, and what to do."""

import pytest

from contracts.causes import cause, free_space

ABSL = "E1125 22:56:28.346668 12269 add_port.cc:83] Failed to add port to server: No address added out of total 1 "
BOUND = "Error in bind for address '[::]:{0}': Address already in useError in bind for address '0.0.0.0:{0}': Address"
TORCH_BIND = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 4000, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
REGISTER = (
    "F1125 22:54:43.65 6823 client.h:86] Terminating process because the JAX distributed service has fatal errors. "
    "absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: /xla.coordination.CoordinationService/RegisterTask\n"
    "*** Check failure stack trace: ***\n    @     0x7f1473cf81b4  absl::lts_20260526::log_internal"
)
BARRIER = "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0."
STORE = (
    "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined."
)
CLIENT = "The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 4000)."

MET = "port 4000, at which the ranks meet (10.0.0.1:4000), was taken by another process after the preflight; start the "


@pytest.mark.parametrize(
    ("printed", "absent", "expected"),
    [
        (ABSL + BOUND.format(4000) + "\nThread 0x7f (most recent call first):", "", MET),
        (TORCH_BIND, "", MET),
        ("jax.errors.JaxRuntimeError: UNKNOWN: Failed to start RPC server", "", MET),
        (ABSL + BOUND.format(8080), "", "port 8080 is taken on this host; end the process that has it, or use another"),
        (
            REGISTER,
            "rank 1 had not joined",
            "rank 1 had not joined when jax.distributed.initialize gave up, after 5 min (initialization_timeout=",
        ),
        (BARRIER, "", "not every rank had joined when jax.distributed.initialize gave up, after 5 min"),
        (STORE, "", "3 of 4 ranks had joined when init_process_group gave up, after 601 s (timeout=…); let every"),
        (STORE, "rank 2 had not joined", "rank 2 had not joined when init_process_group gave up, after 601 s"),
        (CLIENT, "", "nobody answered at 10.0.0.1:4000, where rank 0 listens, when init_process_group gave up, after"),
        ("OSError: [Errno 28] No space left on device: '/dev/x/y'", "", "the disk is full: /dev/x/y has "),
        ("OSError: [Errno 28] No space left on device", "", "the disk is full: / has "),
        ("[3] MemoryError", "", "it ran out of memory; "),
        ("[1] ModuleNotFoundError: No module named 'einops'", "", "the module einops is not there; "),
        ("RuntimeError: nccl2 requires at least one CUDA device", "", "its ranks meet over NCCL, which needs GPUs, "),
        (
            "with an unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>) to a Tensor.",
            "",
            "Keras 3 cannot fit ",
        ),
        ("could not find registered transfer manager for platform Host -- check", "", "this TensorFlow, "),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "", "it ran out of memory; "),
        ("ValueError: the address is not in use, and there is space left", "", None),
        ("grpc: DEADLINE_EXCEEDED: a bucket does not answer", "", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_the_end_of_a_process_is_explained_by_what_it_printed(
    printed: str, absent: str, expected: str | None
) -> None:
    found = cause(printed, coordinator="10.0.0.1:4000", places=["/"], absent=absent, waited="5 min")
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(expected), found
        assert "\n" not in found


def test_a_disk_is_named_once_and_a_bucket_is_no_disk() -> None:
    named = free_space(["/proc/..", "/etc", "gs://bucket/run"])
    assert named.startswith("/proc/.. has ")
    assert "/etc" not in named and "gs://" not in named
    assert free_space(["gs://bucket/run"]) == "gs://bucket/run"
