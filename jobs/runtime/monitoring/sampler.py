"""Reads what a host and its devices do, every ten seconds, in a process of its own.

`python -m jobs.runtime.monitoring.sampler`: the first rank of each host starts it (`start`), and it ends with that
process. It writes hosts/host-<i>.json and tensorboard/hosts/<i>/ in the run directory. It never opens a device, but
reads a GPU's driver (NVML) and libtpu's monitoring. Failures go to sampler.log in the control directory and do not end
the run. It imports little, as it must not cost what it measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contracts import process_environment as process_environment
from contracts import run_directory
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory
from jobs.runtime.monitoring.heartbeat import LOCAL
from jobs.runtime.monitoring.host_samples import HostSamples, Values, read
from jobs.runtime.storage.bucket_files import files_of

INTERVAL, INTERVAL_S = "TPU_STACK_SAMPLE_S", 10.0
"""The variable by which tests take samples more often; seconds between two samples."""
FIRST_S = 2.0
"""After the start: a short run has samples too."""
BUCKET_PERIOD_S, BUCKET_EVENTS_PERIOD_S = 30.0, 600.0
"""Between two writes into a bucket, which bills each; of TensorBoard's each is a file, as a bucket cannot append."""
LOOK_PERIOD_S = 1.0
RESTART_S, STALE_S = 300.0, 30.0
"""Before the reader of devices is started again after its end; before its values are too old."""
NICENESS = 10
LOG, LOG_LIMIT_BYTES = "sampler.log", 256 * 1024
MIB = 2**20
PR_SET_PDEATHSIG = 1


def start(environment: ProcessEnvironment) -> None:
    """Start this host's sampler, from the main thread of the host's first rank; a failure changes nothing."""
    if environment.local_rank != 0:
        return
    path = os.path.join(environment.control_dir, LOG) if environment.control_dir else os.devnull
    command = [sys.executable, "-P", "-m", "jobs.runtime.monitoring.sampler", str(os.getpid())]
    try:
        with open(path, "ab") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    except OSError as error:
        print(f"tpu-stack: this host is not sampled: {error}", flush=True)
        return
    child.returncode = 0  # it ends by itself; without this Python warns that nobody waits for it


def main(parent: int) -> None:
    """Sample until the process `parent` has ended."""
    end_with(parent, signal.SIGTERM)
    os.nice(NICENESS)
    environment = process_environment.read(os.environ)
    interval_s = float(os.environ.get(INTERVAL) or INTERVAL_S)
    make_reader = {"gpu": gpu_reader, "tpu": tpu_reader}.get(environment.platform)
    devices = None if make_reader is None else Devices(make_reader, interval_s)
    host, record = Host(environment, parent), Record(environment, interval_s)
    due_s = time.monotonic() + min(FIRST_S, interval_s)
    while True:
        while (left_s := due_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_PERIOD_S))
            if os.getppid() != parent:
                return
        due_s = max(due_s + interval_s, time.monotonic())
        try:
            if os.fstat(2).st_size > LOG_LIMIT_BYTES:
                os.ftruncate(2, 0)
            values, capacity = host.sample()
            device_values = devices.latest() if devices is not None else []
            together, device_capacity = summary(device_values)
            record.add({**values, **together}, {**capacity, **device_capacity}, device_values)
        except Exception as error:  # a bucket's library has kinds of its own; the next sample may succeed
            say(error)


def say(error: object) -> None:
    with contextlib.suppress(OSError):  # the log's disk is full
        print(f"{time.strftime('%F %T')} {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def end_with(parent: int, signum: int) -> None:
    """Have the system end this process when its parent ends; elsewhere than on Linux, loops look for the parent."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)


class Host:
    """Reads processors, memory, disks and network by psutil."""

    def __init__(self, environment: ProcessEnvironment, parent: int) -> None:
        import psutil

        self._psutil, run = psutil, psutil.Process(parent)
        self._run = (run.parent() if environment.ranks_per_host > 1 else None) or run
        self._places = {"root_free_mib": "/"}
        if environment.run_dir.startswith("/"):
            self._places["disk_free_mib"] = environment.run_dir
        self._beat_path = os.path.join(environment.control_dir or "", LOCAL)
        psutil.cpu_percent()
        self._counted = self._count()

    def sample(self) -> tuple[dict[str, float | None], dict[str, float]]:
        """The values, and the most that some can be. Rates are since the last call."""
        memory = self._psutil.virtual_memory()
        values: dict[str, float | None] = {
            "cpu_pct": self._psutil.cpu_percent(),
            "memory_mib": (memory.total - memory.available) / MIB,
            "run_memory_mib": self._run_memory() / MIB,
            "step": self._step(),
        }
        capacity = {"memory_mib": memory.total / MIB}
        for name, place in self._places.items():
            with contextlib.suppress(OSError):
                usage = self._psutil.disk_usage(place)
                values[name], capacity[name] = usage.free / MIB, (usage.free + usage.used) / MIB
        before, self._counted = self._counted, self._count()
        passed_s, received, sent = (now - then for now, then in zip(self._counted, before, strict=True))
        if passed_s > 0 and received >= 0 and sent >= 0:  # counters are smaller when a network card has gone
            values |= {"received_mib_s": received / MIB / passed_s, "sent_mib_s": sent / MIB / passed_s}
        return values, capacity

    def _count(self) -> tuple[float, int, int]:
        """The time, and bytes received and sent by all network cards; what a host says to itself is left out."""
        cards = [card for name, card in self._psutil.net_io_counters(pernic=True).items() if name != "lo"]
        return (
            time.monotonic(),
            sum(card.bytes_recv for card in cards),
            sum(card.bytes_sent for card in cards),
        )

    def _run_memory(self) -> int:
        """Resident bytes of all processes of the run on this host but the sampler."""
        total = 0
        for process in [self._run, *self._run.children(recursive=True)]:
            with contextlib.suppress(self._psutil.Error):
                if os.getpid() not in (process.pid, process.ppid()):
                    total += process.memory_info().rss
        return total

    def _step(self) -> int | None:
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            open(self._beat_path, "rb") as file,
        ):
            return int(json.load(file)["step"])
        return None


class Record:
    """Writes samples into the run directory: the host's file, and TensorBoard's."""

    def __init__(self, environment: ProcessEnvironment, interval_s: float) -> None:
        run_dir = environment.run_dir
        self._directory = RunDirectory(run_dir, files_of(run_dir), attempt=environment.attempt)
        self._name = run_directory.host_samples(environment.host)
        self._samples = HostSamples(host=environment.host, interval_s=interval_s)
        self._has_read = environment.attempt == 0
        self._has_steps = environment.job != run_directory.OWN_COMMAND
        self._events, self._began_s = b"", time.time()
        name = f"events.out.tfevents.{int(self._began_s)}.{os.uname().nodename}.{os.getpid()}"
        self._events_name = f"{run_directory.HOST_EVENTS}/{environment.host}/{name}"
        self._put_s, self._put_events_s = 0.0, self._began_s

    def add(self, values: Values, capacity: Mapping[str, float], devices: Sequence[Values]) -> None:
        """Add a sample, and write what is due.

        Raises:
            OSError: the run directory cannot be written; a bucket's library has kinds of its own.
        """
        now_s = time.time()
        if not self._has_read:  # the points of earlier attempts are kept
            self._samples = read(self._directory.read_json(self._name)) or self._samples
            self._has_read = True
        self._samples = self._samples.added(now_s, values, capacity=capacity, devices=devices)
        is_remote = self._directory.is_remote
        if not is_remote or now_s - self._put_s >= BUCKET_PERIOD_S:
            self._put_s = now_s
            self._directory.write_text(self._name, json.dumps(vars(self._samples), separators=(",", ":")))
        step = int(values.get("step") or 0) if self._has_steps else int(now_s - self._began_s)
        self._events += event(now_s, step, values)
        if not is_remote or now_s - self._put_events_s >= BUCKET_EVENTS_PERIOD_S:
            self._put_events_s, data, self._events = now_s, self._events, b""
            self._put_events(f"{self._events_name}.{int(now_s)}" if is_remote else self._events_name, data)

    def _put_events(self, name: str, data: bytes) -> None:
        path = self._directory.path(name)
        if self._directory.is_remote:
            files_of(path).write(path, data)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            end, written = file.tell(), 0
            with contextlib.suppress(OSError):
                written = file.write(data)
            if written != len(data):  # the disk is full, and TensorBoard reads nothing behind a torn record
                file.truncate(end)


def event(time_s: float, step: int, values: Values) -> bytes:
    """A record of TensorBoard's event file. Its own writer costs five times as much to import as its messages."""
    import google_crc32c
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    known_values = {name: value for name, value in values.items() if value is not None and name != "step"}
    scalars = [Summary.Value(tag=f"host/{name}", simple_value=value) for name, value in known_values.items()]
    data: bytes = Event(wall_time=time_s, step=step, summary=Summary(value=scalars)).SerializeToString()

    def with_checksum(piece: bytes) -> bytes:  # masked, as TFRecord files have it
        crc = google_crc32c.value(piece)
        return piece + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    return with_checksum(struct.pack("<Q", len(data))) + with_checksum(data)


Reader = Callable[[], list[Values]]
"""Answers with what each device does now."""


class Devices:
    """Reads devices in a child process: a library that hangs or aborts takes nothing else along."""

    def __init__(self, make_reader: Callable[[], Reader], interval_s: float) -> None:
        self._make_reader, self._interval_s = make_reader, interval_s
        self._child, self._pipe, self._started_s, self._rest = 0, 0, -RESTART_S, b""
        self._latest: list[Values] = []
        self._latest_s = 0.0

    def latest(self) -> list[Values]:
        """What was read last, of each device; nothing where that is too long ago."""
        now_s = time.monotonic()
        if not self._child and now_s - self._started_s >= RESTART_S:
            self._start(now_s)
        while self._child:
            try:
                data = os.read(self._pipe, 64 * 1024)
            except BlockingIOError:
                break
            if not data:
                os.close(self._pipe)
                os.waitpid(self._child, 0)
                self._child = 0
            *lines, self._rest = (self._rest + data).split(b"\n")
            if lines:
                self._latest, self._latest_s = json.loads(lines[-1]), now_s
        return self._latest if now_s - self._latest_s <= self._interval_s + STALE_S else []

    def _start(self, now_s: float) -> None:
        self._started_s, self._rest, parent = now_s, b"", os.getpid()
        self._pipe, writing = os.pipe()
        os.set_blocking(self._pipe, False)
        self._child = os.fork()
        if self._child:
            os.close(writing)
            return
        try:
            end_with(parent, signal.SIGKILL)
            read_devices = self._make_reader()
            while os.getppid() == parent:
                os.write(writing, json.dumps(read_devices()).encode() + b"\n")
                time.sleep(self._interval_s)
        except Exception as error:  # the driver or the library is missing, or of an unknown version
            say(error)
        finally:
            os._exit(1)


def summary(devices: Sequence[Values]) -> tuple[dict[str, float], dict[str, float]]:
    """What a host's devices come to, and the most that it can be; see `host_samples.COLUMNS`."""
    columns = {
        name: [value for device in devices if (value := device.get(name)) is not None]
        for name in ("duty_pct", "tensorcore_pct", "throttled_pct", "idle_s")
    }
    host_values = {
        name: max(values) if name in ("throttled_pct", "idle_s") else sum(values) / len(values)
        for name, values in columns.items()
        if values
    }
    if len(columns["duty_pct"]) > 1:
        host_values["duty_least_pct"] = min(columns["duty_pct"])
    memories = [(device.get("hbm_mib"), device.get("hbm_total_mib")) for device in devices]
    pairs = [(used, total) for used, total in memories if used is not None and total]
    if not pairs:
        return host_values, {}
    used, total = max(pairs, key=lambda pair: pair[0] / pair[1])
    return {**host_values, "hbm_mib": used}, {"hbm_mib": total}


def gpu_reader() -> Reader:
    """Read GPUs by NVML: those that CUDA_VISIBLE_DEVICES names, or all."""
    import pynvml as nvml

    nvml.nvmlInit()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(nvml.nvmlDeviceGetCount())) if named is None else filter(None, named.split(","))
    handles = [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]
    kinds = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
    slowed = sum(getattr(nvml, f"nvmlClocksThrottleReason{kind}") for kind in kinds)

    def read_one(handle: Any) -> Values:
        values: dict[str, float | None] = {}
        with contextlib.suppress(nvml.NVMLError):  # some GPUs lack one of these
            values["duty_pct"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            values |= {"hbm_mib": memory.used / MIB, "hbm_total_mib": memory.total / MIB}
        with contextlib.suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            values["throttled_pct"] = 100.0 if reasons & slowed else 0.0
        return values

    return lambda: [read_one(handle) for handle in handles]


TPU_METRICS = {
    "tensorcore_pct": ("tensorcore_util", None, 1.0),
    "duty_pct": ("duty_cycle_pct", "tpu.runtime.tensorcore.dutycycle.percent", 1.0),
    "hbm_mib": ("hbm_capacity_usage", "tpu.runtime.hbm.memory.usage.bytes", 1 / MIB),
    "hbm_total_mib": ("hbm_capacity_total", "tpu.runtime.hbm.memory.total.bytes", 1 / MIB),
    "throttled_pct": ("tpu_throttle_score", None, 10.0),
    "idle_s": ("idle_duration", None, 1.0),
}
"""Its name in libtpu's monitoring, at libtpu's port, and what to multiply it by. Source: tpu-info 0.14, and what libtpu
0.0.50 says in `tpumonitoring.get_metric(name).description()`; a throttle score of 1 to 10 means by 10 to 100 %."""
TPU_PORTS, TPU_PORT = "TPU_RUNTIME_METRICS_PORTS", "8431"


def tpu_reader() -> Reader:
    """Read TPUs by libtpu's monitoring; what that does not tell, as in older versions, at libtpu's port."""
    supported, at_port = set(), tpu_port_reader()
    try:
        from libtpu.sdk import tpumonitoring

        supported = {*tpumonitoring.list_supported_metrics()}
    except Exception as error:  # it is not there, or not for this Python
        say(error)

    def column(name: str, port_name: str | None) -> list[float]:
        if name in supported:
            with contextlib.suppress(Exception):  # nothing is known while no program is loaded
                # "20.00", and of the throttle score "1-0": the device, a dash, its value
                if values := [
                    float(text.rpartition("-")[2]) for text in tpumonitoring.get_metric(name).data()
                ]:
                    return values
        return [] if port_name is None else at_port(port_name)

    def read_all() -> list[Values]:
        columns = {
            ours: [scale * value for value in column(name, port_name)]
            for ours, (name, port_name, scale) in TPU_METRICS.items()
        }
        count = max(map(len, columns.values()))
        # A chip of v2 and v3 is two devices: the value of a chip counts for both.
        return [
            {name: values[index * len(values) // count] for name, values in columns.items() if values}
            for index in range(count)
        ]

    return read_all


def tpu_port_reader() -> Callable[[str], list[float]]:
    """Return what reads one metric of all devices at the ports on which processes with a TPU answer gRPC.

    The numbers are those of the fields in tpu_metric_service.proto of tpu-info.
    """
    import grpc
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    method = "/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"
    ports = (os.environ.get(TPU_PORTS) or TPU_PORT).split(",")
    asks = [grpc.insecure_channel(f"localhost:{port}").unary_unary(method) for port in ports]

    def inside(message: bytes, *path: int) -> list[Any]:
        messages: list[Any] = [message]
        for number in path:
            fields = [field for inner in messages for field in UnknownFieldSet(Empty.FromString(inner))]
            messages = [field.data for field in fields if field.field_number == number]
        return messages

    def read_one(name: str) -> list[float]:
        values: list[tuple[int, float]] = []
        for ask in asks:
            with contextlib.suppress(grpc.RpcError):  # no process with a TPU, or it has no such metric
                answer = ask(b"\n" + bytes([len(name)]) + name.encode(), timeout=LOOK_PERIOD_S)
                for metric in inside(answer, 1, 3):
                    device = sum(inside(metric, 1, 2, 3))
                    floats = [
                        struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in inside(metric, 3, 1)
                    ]
                    values += [(device, value) for value in floats or inside(metric, 3, 2)]
        return [value for _, value in sorted(values)]

    return read_one


if __name__ == "__main__":
    main(int(sys.argv[1]))
