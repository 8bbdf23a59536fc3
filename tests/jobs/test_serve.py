"""The server: batches of the rows that wait, and which requests it refuses."""

import contextlib
import dataclasses
import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import RequestError
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import SERVING
from jobs.runtime.prediction import TEXT, Answer, Encoded, Guess, Row, lengths
from jobs.serve.batching import Shapes, choose
from jobs.serve.config import Config, problems
from jobs.serve.server import Inputs, Server, batch_shapes, read_inputs, warm
from tests.waiting import until

JSON = {"content-type": "application/json"}
SHAPES = Shapes(sizes=(1, 4, 16), lengths=(8, 16, 32))


class Panic(BaseException):
    """What libraries in Rust raise; no `except Exception` catches it."""


class Counting:
    """A model that counts words, which a test can hold back."""

    task, takes, longest = "text-classification", TEXT, 32
    example = "one", None

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.batches: list[tuple[int, int, int]] = []

    def encode(self, given: str | bytes, second: str | None) -> Encoded:
        assert isinstance(given, str)
        words = given.split()
        if second is not None or not 1 <= len(words) <= self.longest:
            raise RequestError(f"{len(words)} words, and --second: leave it out")

        def answers(outputs: Sequence[int]) -> list[Answer]:
            return [Answer(best=[Guess(text=str(each), probability=None)]) for each in outputs]

        return Encoded(rows=[Row(length=len(words), values=words)], answers=answers)

    def compute(self, rows: Sequence[Row], size: int, length: int) -> list[int]:
        self.free.wait(20)
        words = [row.values[0] for row in rows]
        if "explode" in words:
            raise ValueError("a shape that does not fit")
        if "blame" in words:
            raise RequestError("cannot be read")
        if "panic" in words:
            raise Panic("a library's panic")
        if "lose" in words:
            return []
        assert len(rows) <= size and all(row.length <= length for row in rows)
        self.batches.append((len(rows), size, length))
        return [len(row.values) for row in rows]


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def send(self, body: object, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", "/v1/predict", data, {**JSON, **(headers or {})})

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(text) if "json" in told.get("content-type", "") else text, told
        finally:
            connection.close()

    def count(self, text: str) -> str:
        status, told, _ = self.send({"inputs": [text]})
        assert status == 200, told
        return str(told["answers"][0]["best"][0]["text"])


type Start = Callable[..., tuple[Client, Server, Counting]]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []

    def begin(token: str | None = None, **options: Any) -> tuple[Client, Server, Counting]:
        limits: dict[str, Any] = {
            "port": 0,
            "most_body_mib": 1,
            "most_waiting": 8,
            "most_inputs": 4,
        }
        config = Config(job="counting", **{**limits, **options})
        model = Counting()
        server = Server(model, config, batch_shapes(config, model), name="run-1", token=token)
        servers.append(server)
        return Client(server.start()[1]), server, model

    yield begin
    for server in servers:
        if server.is_alive:
            server.stop()


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        ([3], ([0], 1, 8)),
        ([3, 4], ([0, 1], 4, 8)),
        ([3, 30, 4, 17], ([0, 2], 4, 8)),  # a longer one waits for a batch of its own
        ([30, 3, 17, 9], ([0, 1, 2, 3], 4, 32)),  # two fill places that would be padding
        ([30, 3], ([0], 1, 32)),  # but make no batch larger
        ([8] * 20, ([*range(16)], 16, 8)),
        ([17] * 5 + [1] * 12, ([*range(16)], 16, 32)),
    ],
)
def test_a_batch_has_the_oldest_row_those_of_its_length_and_shorter_ones_where_they_cost_nothing(
    waiting: list[int], chosen: tuple[list[int], int, int]
) -> None:
    assert choose(waiting, SHAPES) == chosen


def test_lengths_double_up_to_the_models_longest_and_options_choose_others() -> None:
    assert lengths(512) == (16, 32, 64, 128, 256, 512) and lengths(100) == (16, 32, 64, 100)
    assert lengths(1) == (1,) and lengths(16) == (16,)
    chosen = [batch_shapes(Config(lengths=text), Counting()).lengths for text in ("", "8", "8,500", "400")]
    assert chosen == [(16, 32), (8,), (8, 32), (32,)]
    wrong = Config(batch_sizes="1,x", lengths="0", most_inputs=0, wait_s=0, port=-1, address="0.0.0.0")
    named = [each.partition(" ")[0] for each in problems(wrong, devices=1)]
    assert named == ["--batch-sizes", "--lengths", "--most-inputs", "--wait-s", "--port", "--address"]


def test_what_waits_while_the_model_computes_is_answered_together_each_with_its_own(start: Start) -> None:
    client, server, model = start(most_waiting=64)
    warm(model, server.batcher.shapes, lambda: None)
    assert [shape[1:] for shape in model.batches] == server.batcher.shapes.all
    model.batches.clear()
    model.free.clear()
    texts = ["word " * (1 + n % 30) for n in range(33)]
    with ThreadPoolExecutor(34) as pool:
        first = pool.submit(client.count, "one")
        until(lambda: server.batcher.busy_since_s is not None)
        others = [pool.submit(client.count, text) for text in texts]
        until(lambda: server.batcher.waiting == 33)
        model.free.set()
        assert (first.result(), [each.result() for each in others]) == (
            "1",
            [str(len(text.split())) for text in texts],
        )
    assert sum(rows for rows, _, _ in model.batches) == 34 and len(model.batches) <= 6
    status, text, _ = client.request("GET", "/metrics")
    assert status == 200 and 'serve_requests_total{status="200"} 34.0' in text
    assert client.request("GET", "/v1/models")[1]["models"][0]["lengths"] == [16, 32]


GOOD = b'{"inputs": ["one two"]}'


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 422, "the body is no JSON"),
        (b"[" * 100_000, 422, "the body is no JSON"),
        (b'{"inputs": ["\xff"]}', 422, "the body is no JSON"),
        (b"[]", 422, "must be a JSON object"),
        ({"inputs": ["a"], "input": 1}, 422, "must be a JSON object"),
        ({"inputs": []}, 422, '"inputs" must be a list of 1 to 4'),
        ({"inputs": ["a"] * 5}, 422, '"inputs" must be a list of 1 to 4'),
        ({"inputs": ["a", 1]}, 422, "inputs[1] must be a text"),
        ({"inputs": ["a" * 100_001]}, 422, "inputs[0] has 100,001 characters, and at most 100,000 are taken"),
        (b'{"inputs": ["\\ud800"]}', 422, "inputs[0] has half of a surrogate pair"),
        ({"inputs": ["a", "b " * 33]}, 422, 'inputs[1]: 33 words, and "second": leave it out'),
        ({"inputs": ["a"], "second": 3}, 422, '"second" must be a text'),
        (b" " * (2**20 + 1), 413, "Content Too Large"),
        (b" " * (6 * 2**20), 413, "Content Too Large"),
        ({"inputs": ["explode"]}, 500, "the model has failed: ValueError"),
        ({"inputs": ["explode", "explode now"]}, 500, "the model has failed: ValueError"),
        ({"inputs": ["lose"]}, 500, "the model has failed: ValueError"),
        ({"inputs": ["blame"]}, 422, "cannot be read"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_input_and_the_limit(
    start: Start, body: object, status: int, said: str
) -> None:
    client, _, _ = start()
    found, told, _ = client.send(body)
    assert (found, said in (told["error"] if status != 413 else told)) == (status, True), told
    assert client.count("one two") == "2"


def test_an_input_that_fits_no_shape_is_refused_with_the_lengths_there_are(start: Start) -> None:
    client, _, _ = start(lengths="8,16")
    status, told, _ = client.send({"inputs": ["one", "word " * 17]})
    assert status == 422
    assert told["error"].startswith(
        "inputs[1]: has 17 tokens, and this server takes at most 16 (--lengths 8,16)"
    )
    assert client.count("word " * 16) == "16"


def test_an_input_on_which_the_model_fails_takes_no_other_one_of_its_batch_along(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    client, server, model = start()
    model.free.clear()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(client.count, "one")
        until(lambda: server.batcher.busy_since_s is not None)
        texts = ["one two", "explode", "blame", "one two three"]
        others = [pool.submit(client.send, {"inputs": [text]}) for text in texts]
        until(lambda: server.batcher.waiting == 4)
        model.free.set()
        assert [each.result()[0] for each in others] == [200, 500, 422, 200] and first.result() == "1"
    assert client.request("GET", "/healthz")[:2] == (200, {"status": "ok"})
    assert "never retrieved" not in capfd.readouterr().err


def test_a_batcher_that_ends_answers_what_waits_and_is_a_failure_of_the_server(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    client, server, _ = start()
    assert server.failure is None
    status, told, _ = client.send({"inputs": ["panic"]})
    assert (status, "its log says which" in told["error"]) == (503, True)
    assert client.send({"inputs": ["one"]})[0] == 503
    assert client.request("GET", "/healthz")[:2] == (503, {"status": server.failure})
    assert server.failure == "what forms batches has ended: Panic: a library's panic"
    assert "Panic: a library's panic" in capfd.readouterr().err


SERVES = """
from jobs.runtime import process
from jobs.serve import config, serve
from tests.jobs.test_serve import Counting

serve.load = lambda *_: Counting()
process.main(config.Config, serve.serve)
"""


@pytest.mark.slow
def test_a_server_whose_batcher_ends_is_a_failed_run_with_the_reason(environment: ProcessEnvironment) -> None:
    root = Path(__file__).parents[2]
    environment = dataclasses.replace(environment, num_processes=1, process_id=0)
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, "--port", "0"],
        env={**os.environ, **environment.variables(), "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            serving = Path(environment.run_dir) / SERVING
            until(lambda: process.poll() is not None or serving.exists(), limit_s=60)
            client = Client(json.loads(serving.read_text())["port"])
            assert client.send({"inputs": ["panic"]})[0] == 503
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1
    assert said.endswith("error: what forms batches has ended: Panic: a library's panic\n"), said


def test_with_a_token_only_who_names_it_is_answered_but_for_the_health(start: Start) -> None:
    client, _, _ = start(token="correct-horse-battery")
    for value in ("", "Bearer", "Bearer wrong", "Basic correct-horse-battery", "Bearer \xff"):
        status, told, headers = client.send(json.loads(GOOD), {"authorization": value})
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), value
        assert "correct" not in json.dumps(told)
    named = {"authorization": "Bearer correct-horse-battery", "host": "elsewhere"}
    assert client.send(json.loads(GOOD), named)[0] == 200
    assert client.request("GET", "/healthz")[:2] == (200, {"status": "ok"})
    assert client.request("GET", "/metrics")[0] == 401


def test_when_too_much_waits_more_is_refused_and_a_stop_answers_what_is_under_way(start: Start) -> None:
    client, server, model = start(wait_s=1)
    model.free.clear()
    with ThreadPoolExecutor(16) as pool:
        under_way = pool.submit(client.count, "one")
        until(lambda: server.batcher.busy_since_s is not None)
        waiting = [pool.submit(client.send, {"inputs": ["a"] * 4}) for _ in range(2)]
        until(lambda: server.batcher.waiting == 8)
        status, told, headers = client.send({"inputs": ["a"]})
        assert (status, headers["retry-after"] >= "1") == (429, True), told
        for each in waiting:  # the model is too slow for them, and they take their rows along
            status, told, headers = each.result()
            assert (status, told["error"]) == (503, "no answer within 1 s")
        assert server.batcher.waiting == 0 and under_way.exception() is not None
        until(lambda: "one batch for" in client.request("GET", "/healthz")[1]["status"])
        model.free.set()
        until(lambda: server.batcher.busy_since_s is None)
        model.free.clear()
        last = pool.submit(client.count, "one two")
        until(lambda: server.batcher.busy_since_s is not None)
        stop = pool.submit(server.stop)
        until(lambda: is_refused(client))
        model.free.set()
        stop.result()
        assert last.result() == "2"


def is_refused(client: Client) -> bool:
    try:
        client.request("GET", "/healthz")
    except ConnectionError:
        return True
    return False


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BODIES = st.one_of(
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({"inputs": VALUES}, optional={"second": VALUES}).map(
        lambda value: json.dumps(value).encode()
    ),
    st.binary(max_size=200),
    st.integers(0, len(GOOD) - 1).map(lambda end: GOOD[:end]),
)


@given(body=BODIES, takes=st.sampled_from(["text", "picture"]))
@settings(max_examples=500, deadline=None)
def test_a_body_is_read_or_refused_whatever_it_is(body: bytes, takes: str) -> None:
    with contextlib.suppress(RequestError):
        assert isinstance(read_inputs(body, Config(), takes), Inputs)
