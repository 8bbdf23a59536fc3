"""The server of an export under load on loopback, beside `transformers`' pipeline behind the same server.

    .venv/bin/python -m bench.server_load EXPORT …

EXPORT is the export of a run of flax_mlm. Both servers are up at a time and are measured by turns, round after round:
one request at a time, then 16 clients; then at 70 % of what those got, with random arrivals. What counts is the median
of the rounds' ratios. `--requests 50000` measures the memory over so many requests instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.runtime.prediction import ON_CPU, TEXT, Answer, Encoded, Guess, Request, Row, answer
from jobs.serve.config import Config
from jobs.serve.server import Server, batch_shapes, warm

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, LOAD = 16, 0.7
TEXTS = 256
MASK = "<mask>"
START_LIMIT_S = 600
OURS, PIPELINE = "fab serve", "pipeline"


class Pipeline:
    """`transformers`' fill-mask pipeline as a predictor. batch_size: that it is told; 0: the whole batch."""

    task, takes, longest = "fill-mask", TEXT, 1
    example = f"Return {MASK}.", None

    def __init__(self, export: Path, batch_size: int) -> None:
        from transformers import pipeline

        self._ask, self._batch_size = pipeline("fill-mask", model=str(export)), batch_size

    def encode(self, options: str | bytes, _second: str | None) -> Encoded:
        def answers(outputs: Sequence[Any]) -> list[Answer]:
            return [
                Answer(best=[Guess(text=guess["token_str"], probability=guess["score"]) for guess in output])
                for output in outputs
            ]

        return Encoded(rows=[Row(length=1, values=options)], answers=answers)

    def compute(self, rows: Sequence[Row], _size: int, _length: int) -> list[Any]:
        results = self._ask([row.values for row in rows], batch_size=self._batch_size or len(rows))
        return list(results) if isinstance(results[0], list) else [results]


def child(kind: str, export: Path, batch_size: int) -> None:
    """Serve until standard input ends."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpu-stack"
    if kind == PIPELINE:
        predictor: Any = Pipeline(export, batch_size)
    else:
        from jobs.flax_mlm.predict import load

        predictor = load(export, cache)
    config = Config(job=kind, port=0)
    shapes = batch_shapes(config, predictor)
    warm(predictor, shapes, lambda: None)
    server = Server(predictor, config, shapes, name=kind, token=None)
    print(server.start()[1], flush=True)
    sys.stdin.read()
    server.stop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    process: subprocess.Popen[str]
    port: int

    @property
    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    @property
    def cpu_s(self) -> float:
        """Processor time so far, which other programs on the machine change less than they change a rate."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(kind: str, export: Path, batch_size: int = 0) -> Iterator[Serving]:
    from backends.local import environments
    from launch.plan import ON_CPU as LARGE_PAGES

    framework = "pytorch" if kind == PIPELINE else "jax"
    environments.ensure(framework, lambda text: print(text, file=sys.stderr))
    arguments = [kind, str(export), "--batch-size", str(batch_size)]
    with subprocess.Popen(
        [str(environments.environment_python(framework)), "-m", "bench.server_load", "--child", *arguments],
        cwd=ROOT,
        env={**os.environ, **LARGE_PAGES, **ON_CPU, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield Serving(process=process, port=int(process.stdout.readline()))
        finally:
            process.stdin.close()


def texts() -> list[str]:
    """Lines of the standard library's documentation, a word of each hidden; always the same."""
    modules = [
        __import__(name) for name in ("argparse", "asyncio", "json", "os", "random", "shutil", "subprocess")
    ]
    results = (
        inspect.getdoc(value) or ""
        for module in modules
        for value in vars(module).values()
        if callable(value)
    )
    lines = sorted({line.strip() for text in results for line in text.splitlines()})
    drawn = random.Random(0)
    chosen = drawn.sample([line for line in lines if 4 <= len(line.split()) <= 12 and line.isascii()], TEXTS)
    masked = []
    for line in chosen:
        arguments = line.replace("<", "").split(" ")
        arguments[drawn.randrange(len(arguments))] = MASK
        masked.append(" ".join(arguments))
    return masked


def requests(batch: Sequence[str]) -> Iterator[bytes]:
    head = (
        "POST /v1/predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "
    )
    bodies = [json.dumps({"inputs": [text]}) for text in batch]
    return itertools.cycle([f"{head}{len(body)}\r\n\r\n{body}".encode() for body in bodies])


class Connection(asyncio.Protocol):
    """A connection that asks one thing at a time; `done` is told of each answer."""

    def __init__(self) -> None:
        self._found, self._began_s, self.done = b"", 0.0, lambda _seconds: None  # type: Any, float, Any

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self, request: bytes, done: Callable[[float], None]) -> None:
        self.done, self._began_s = done, time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._found += data
        head, end, body = self._found.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.partition(b"content-length: ")[2].split(b"\r")[0]):
            assert head.startswith(b"HTTP/1.1 200"), self._found
            self._found = b""
            self.done(time.perf_counter() - self._began_s)

    def close(self) -> None:
        self._transport.close()


async def connect(port: int) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return protocol


async def closed(port: int, clients: int, seconds: float, limit: float = float("inf")) -> list[float]:
    """Each client asks again as soon as it is answered; the seconds of each answer, of `seconds` in all."""
    pending, took, over = requests(texts()), [], asyncio.Event()
    until_s, open_now = time.perf_counter() + seconds, [await connect(port) for _ in range(clients)]
    under_way = clients

    def answered(connection: Connection, second: float) -> None:
        nonlocal under_way
        took.append(second)
        if time.perf_counter() < until_s and len(took) + clients <= limit:
            connection.ask(next(pending), lambda answer: answered(connection, answer))
            return
        under_way -= 1
        if not under_way:
            over.set()

    for connection in open_now:
        connection.ask(next(pending), lambda answer, connection=connection: answered(connection, answer))  # type: ignore[misc]
    await over.wait()
    for connection in open_now:
        connection.close()
    return took


async def arriving(port: int, rate: float, seconds: float) -> list[float]:
    """Requests arrive at random, whether or not others are answered; the seconds of each answer."""
    pending, took, drawn = requests(texts()), [], random.Random(1)
    free = [await connect(port) for _ in range(4 * CLIENTS)]
    everyone, next_s = list(free), time.perf_counter()
    until_s = next_s + seconds

    def ask(connection: Connection, late_s: float) -> None:
        def answered(second: float) -> None:
            took.append(second + late_s)
            free.append(connection)

        connection.ask(next(pending), answered)

    while next_s < until_s:
        next_s += drawn.expovariate(rate)
        if (pause_s := next_s - time.perf_counter()) > 0:
            await asyncio.sleep(pause_s)
        while not free:
            await asyncio.sleep(0.0005)
        ask(free.pop(), 0.0)
    while len(free) < len(everyone):
        await asyncio.sleep(0.01)
    for connection in everyone:
        connection.close()
    return took


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def ask_all(port: int) -> list[list[float]]:
    """The probabilities that a server answers with."""
    from urllib.request import ProxyHandler, Request, build_opener

    opener, served = build_opener(ProxyHandler({})), []
    for begin in range(0, TEXTS, 64):
        body = json.dumps({"inputs": texts()[begin : begin + 64]}).encode()
        request = Request(f"http://127.0.0.1:{port}/v1/predict", body, {"content-type": "application/json"})
        with opener.open(request) as results:
            served += [
                [guess["probability"] for guess in connection["best"]]
                for connection in json.load(results)["answers"]
            ]
    return served


def furthest(connection: list[list[float]], reference: list[list[float]]) -> float:
    return max(
        abs(a - b)
        for mine, theirs in zip(connection, reference, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def compare(export: Path, rounds: int, seconds: float) -> None:
    print(f"{export}: {rounds} rounds of {seconds:g} s", flush=True)
    from jobs.flax_mlm.predict import load

    with (
        serving(OURS, export) as ours,
        serving(PIPELINE, export) as batched,
        serving(PIPELINE, export, 1) as single,
    ):
        served = ask_all(ours.port)
        direct = answer(load(export, Path.home() / ".cache/tpu-stack"), Request(inputs=tuple(texts())))
        probabilities = [[guess.probability or 0 for guess in one_answer.best] for one_answer in direct]
        print(f"  furthest from fab predict {furthest(served, probabilities):.1e}")
        print(f"  furthest from the pipeline {furthest(served, ask_all(batched.port)):.1e}")
        results: dict[str, list[float]] = {}

        def note(name: str, value: float) -> None:
            results.setdefault(name, []).append(value)

        for place in range(rounds + 1):
            connection = len(asyncio.run(closed(ours.port, 1, seconds))) / seconds
            rates, cpu_ms = [], []
            for server in (ours, batched, single):
                began_s = server.cpu_s
                count = len(asyncio.run(closed(server.port, CLIENTS, seconds)))
                rates.append(count / seconds)
                cpu_ms.append(1000 * (server.cpu_s - began_s) / count)
            rate, *peers = rates
            loaded = asyncio.run(arriving(ours.port, LOAD * rate, seconds))
            if place == 0:
                continue  # to get warm
            note("one at a time, requests/s", connection)
            note("16 clients, requests/s", rate)
            note("16 clients, pipeline in batches", peers[0])
            note("16 clients, pipeline one by one", peers[1])
            note("16 clients, processor ms a request", cpu_ms[0])
            note("pipeline in batches, the same", cpu_ms[1])
            note("16 clients / one at a time", rate / connection)
            note("16 clients / the better pipeline", rate / max(peers))
            p50, p99 = percentile(loaded, 0.5), percentile(loaded, 0.99)
            note("at 70 %, p50 ms", 1000 * p50)
            note("at 70 %, p99 ms", 1000 * p99)
            note("at 70 %, p99 / p50", p99 / p50)
    for name, values in results.items():
        print(
            f"  {name:<34} {statistics.median(values):9.2f}   ({min(values):.2f} to {max(values):.2f})",
            flush=True,
        )


def memory(export: Path, count: int) -> None:
    with serving(OURS, export) as ours:
        for done in range(0, count + 1, count // 10):
            if done:
                asyncio.run(closed(ours.port, CLIENTS, 3600, count // 10))
            print(f"{export}: {done:,} requests, {ours.rss_mib:.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("exports", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], Path(options.child[1]), options.batch_size)
        return
    for export in options.exports:
        if options.requests:
            memory(export, options.requests)
        else:
            compare(export, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
