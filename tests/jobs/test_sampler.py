"""The sampler of a host: a process of its own that ends with its parent, and harms nothing whatever it meets."""

import concurrent.futures
import contextlib
import dataclasses
import glob
import json
import os
import signal
import struct
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import psutil
import pytest

from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory, host_samples
from jobs.runtime.monitoring import sampler
from jobs.runtime.monitoring.host_samples import read
from jobs.runtime.storage.bucket_files import BucketFiles
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PARENT = """
import os, time
from contracts import process_environment
from jobs.runtime.monitoring import sampler
sampler.start(process_environment.read(os.environ))
memory = b"x" * (64 * 2**20)
time.sleep(600)
"""


@contextlib.contextmanager
def parent(environment: ProcessEnvironment) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, as the first rank of a host, with its sampler."""
    told = {**os.environ, **environment.variables(), sampler.INTERVAL: "0.1"}
    process = subprocess.Popen([sys.executable, "-c", PARENT], env=told, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def points(directory: RunDirectory, host: int) -> list[float]:
    found = read(directory.read_json(host_samples(host)))
    return [] if found is None else found.recorded("time")


def test_a_host_is_sampled_from_attempt_to_attempt_until_the_process_that_started_the_sampler_is_killed(
    environment: ProcessEnvironment, tmp_path: Path
) -> None:
    control = tmp_path / "control"
    control.mkdir()
    (control / "heartbeat.json").write_text('{"step": 7}')
    environment = dataclasses.replace(environment, attempt=0, control_dir=str(control))
    directory, host = RunDirectory(environment.run_dir), environment.host
    before: list[float] = []
    for attempt in (0, 1):
        again = dataclasses.replace(environment, attempt=attempt)
        with parent(again) as process:
            least = len(before) + 3
            until(lambda least=least: len(points(directory, host)) >= least)  # type: ignore[misc]
            (child,) = psutil.Process(process.pid).children()
            assert child.nice() == min(os.nice(0) + sampler.NICENESS, 19)
            process.send_signal(signal.SIGKILL)
            until(lambda child=child: not child.is_running(), 5)  # type: ignore[misc]
        assert points(directory, host)[: len(before)] == before
        before = points(directory, host)
    found = read(directory.read_json(host_samples(host)))
    assert found is not None and set(found.recorded("step")) == {7.0}
    assert all(0 <= value <= 100 for value in found.recorded("cpu_pct"))
    assert (
        64
        < found.recorded("run_memory_mib")[-1]
        < found.recorded("memory_mib")[-1]
        < found.capacity["memory_mib"]
    )
    assert not any("pct" in name and name != "cpu_pct" for name in found.points), (
        "a host without devices has no values"
    )
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = glob.glob(f"{directory.url}/tensorboard/hosts/{host}/*")
    events = [event for file in files for event in EventFileLoader(file).Load()]
    # A sample's event is written behind the host's file, so each kill may have cost one.
    assert len(files) == 2 and len(events) >= len(before) - 2
    assert {value.tag for event in events for value in event.summary.value} >= {
        "host/cpu_pct",
        "host/memory_mib",
    }
    assert {event.step for event in events} == {7}


def test_a_sampler_that_cannot_be_started_is_said_and_changes_nothing(
    environment: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    sampler.start(environment)
    assert "this host is not sampled" in capsys.readouterr().out
    sampler.start(dataclasses.replace(environment, num_processes=4, ranks_per_host=2, local_rank=1))
    assert capsys.readouterr().out == ""


def test_a_bucket_is_written_to_now_and_then_only(
    environment: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(BucketFiles, "write", lambda _self, path, _data: written.append(path))
    monkeypatch.setattr(BucketFiles, "write_new", lambda _self, _path, _data: None)
    monkeypatch.setattr(BucketFiles, "move", lambda _self, _path, to: written.append(to))
    monkeypatch.setattr(BucketFiles, "read", lambda _self, paths: [None for _ in paths])
    now_s = 1e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    record = sampler.Record(dataclasses.replace(environment, run_dir="memory://b/run"), 10.0)
    for _ in range(120):
        now_s += 10
        record.add({"cpu_pct": 1.0}, {}, [])
    assert sum(path.endswith("hosts/host-1.json") for path in written) == 40
    assert sum("/tensorboard/hosts/1/" in path for path in written) == len({*written}) - 1 == 2


DEVICES = """
import json, os, sys, time
from jobs.runtime.monitoring import sampler
sampler.RESTART_S = 0.2
HOW = {how!r}
def make_reader():
    if HOW == "raises":
        raise OSError("no driver")
    def read():
        if HOW == "aborts" and len(open("readings").read()) >= 3:
            os.abort()
        if HOW == "hangs":
            time.sleep(600)
        open("readings", "a").write(".")
        return [dict(duty_pct=50.0)]
    return read
open("readings", "w").close()
devices = sampler.Devices(make_reader, 0.05)
found = [devices.latest() for _ in range(24) if not time.sleep(0.05)]
print(json.dumps([found[-1], len(open("readings").read())]))
"""


@pytest.mark.parametrize(
    ("how", "latest", "least"),
    [
        ("answers", [{"duty_pct": 50.0}], 5),
        ("aborts", [{"duty_pct": 50.0}], 3),
        ("hangs", [], 0),
        ("raises", [], 0),
    ],
)
def test_devices_that_cannot_be_read_keep_nothing_waiting(
    tmp_path: Path, how: str, latest: list[dict[str, float]], least: int
) -> None:
    command = [sys.executable, "-c", DEVICES.format(how=how)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=20, check=True
    )
    found, readings = json.loads(done.stdout)
    assert (found, readings >= least) == (latest, True)


MIB = 2**20


def test_a_gpu_is_asked_what_it_can_tell_and_those_that_the_run_does_not_see_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NVMLError(Exception):
        pass

    def memory(handle: object) -> object:
        if handle == "GPU-b":
            raise NVMLError
        return types.SimpleNamespace(used=15 * MIB, total=80 * MIB)

    pynvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=90 if handle == 2 else 10),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4 if handle == 2 else 8 | 4,
        nvmlClocksThrottleReasonHwSlowdown=8,
        nvmlClocksThrottleReasonHwThermalSlowdown=64,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=128,
        nvmlClocksThrottleReasonSwThermalSlowdown=32,
    )
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-b")
    found = sampler.gpu_reader()()
    assert found == [
        {"duty_pct": 90, "hbm_mib": 15, "hbm_total_mib": 80, "throttled_pct": 0.0},
        {"duty_pct": 10, "throttled_pct": 100.0},
    ]
    assert sampler.summary(found) == (
        {"duty_pct": 50, "duty_least_pct": 10, "throttled_pct": 100, "hbm_mib": 15},
        {"hbm_mib": 80},
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(sampler.gpu_reader()()) == 4


@pytest.fixture
def libtpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What libtpu's monitoring answers with: texts, as its descriptions have them."""
    answers: dict[str, list[str]] = {}
    monitoring = types.SimpleNamespace(
        list_supported_metrics=lambda: [*answers],
        get_metric=lambda name: types.SimpleNamespace(data=lambda: answers[name]),
    )
    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    monkeypatch.setitem(sys.modules, "libtpu.sdk", types.SimpleNamespace(tpumonitoring=monitoring))
    monkeypatch.setenv(sampler.TPU_PORTS, "1")
    return answers


def test_a_tpu_is_asked_by_libtpus_monitoring(libtpu: dict[str, list[str]]) -> None:
    libtpu |= {
        "tensorcore_util": ["40.00", "20.00"],
        "duty_cycle_pct": ["95.00", "85.00"],
        "hbm_capacity_total": [str(1000 * MIB), str(1000 * MIB)],
        "hbm_capacity_usage": [str(10 * MIB), str(900 * MIB)],
        "tpu_throttle_score": ["0-0", "1-2"],
        "idle_duration": [],
    }
    found = sampler.tpu_reader()()
    assert found[1] == {
        "tensorcore_pct": 20.0, "duty_pct": 85.0, "hbm_mib": 900.0, "hbm_total_mib": 1000.0, "throttled_pct": 20.0,
    }  # fmt: skip
    together, most = sampler.summary(found)
    assert together == {
        "tensorcore_pct": 30.0, "duty_pct": 90.0, "duty_least_pct": 85.0, "hbm_mib": 900.0, "throttled_pct": 20.0,
    }  # fmt: skip
    assert most == {"hbm_mib": 1000.0}


@contextlib.contextmanager
def metric_service(metrics: Mapping[str, bytes]) -> Iterator[int]:
    """A gRPC server that answers as libtpu's does."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        name = request[2:].decode()
        if name not in metrics:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such metric")
        return metrics[name]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handler = grpc.method_handlers_generic_handler(
            "tpu.monitoring.runtime.RuntimeMetricService",
            {"GetRuntimeMetric": grpc.unary_unary_rpc_method_handler(answer)},
        )
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def varint(value: int) -> bytes:
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])


def message(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def metric(device: int, gauge: bytes) -> bytes:
    """A Metric of tpu_metric_service.proto: its attribute with the device, a timestamp, its gauge."""
    attribute = message(1, message(1, b"device-id") + message(2, bytes([3 << 3, device])))
    return attribute + message(2, bytes([1 << 3, 99])) + message(3, gauge)


def response(*metrics: bytes) -> bytes:
    return message(1, message(1, b"a.name") + b"".join(message(3, each) for each in metrics))


def test_an_older_tpu_is_asked_at_libtpus_port_and_a_chip_that_is_two_devices_is_said_of_both(
    libtpu: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(mib: int) -> bytes:
        return bytes([2 << 3]) + varint(mib * MIB)

    metrics = {
        "tpu.runtime.tensorcore.dutycycle.percent": response(
            metric(1, bytes([1 << 3 | 1]) + struct.pack("<d", 99.5)),
            metric(0, bytes([1 << 3 | 1]) + struct.pack("<d", 0)),
        ),
        "tpu.runtime.hbm.memory.usage.bytes": response(*(metric(core, whole(core)) for core in range(4))),
        "tpu.runtime.hbm.memory.total.bytes": response(*(metric(core, whole(16_384)) for core in range(4))),
    }
    libtpu["hbm_capacity_usage"] = []  # it knows the name, and has no value yet
    with metric_service(metrics) as port:
        monkeypatch.setenv(sampler.TPU_PORTS, str(port))
        found = sampler.tpu_reader()()
    assert [each["duty_pct"] for each in found] == [0.0, 0.0, 99.5, 99.5]
    assert [each["hbm_mib"] for each in found] == [0.0, 1.0, 2.0, 3.0]
    assert {each["hbm_total_mib"] for each in found} == {16_384.0} and "tensorcore_pct" not in found[0]
