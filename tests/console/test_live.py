"""Stack traces of several ranks are printed once where they are equal."""

from console import live

PY_SPY = """Thread 10 (idle): "MainThread"
    wait (libc.so.6)
    step (train.py:{line})
    0x7f00{pid} (?)
Thread 11 (active): "loader"
    read (data.py:3)
"""
BY_PYTHON = """Thread 0x00007f (most recent call first):
  File "a.py", line 1 in step

Current thread 0x00008f (most recent call first):
  File "b.py", line 2 in write
"""


def test_equal_stacks_are_shown_once_with_their_ranks_main_threads_first() -> None:
    def process(rank: int | None, line: int) -> dict[str, object]:
        text = PY_SPY.format(line=line, pid=rank) if rank is not None else BY_PYTHON
        return {"rank": rank, "text": text}

    lines = {0: 7, 1: 7, 2: 9, 3: 7}
    traces = [trace for rank, line in lines.items() for trace in live.traces(0, process(rank, line))]
    traces += live.traces(4, process(None, 0))
    assert list(live.grouped(traces)) == [
        ("ranks 0-1,3: MainThread", "    wait (libc.so.6)\n    step (train.py:7)\n    0x… (?)"),
        ("rank 2: MainThread", "    wait (libc.so.6)\n    step (train.py:9)\n    0x… (?)"),
        ("ranks 0-3: loader", "    read (data.py:3)"),
        ("host 4: a thread", '  File "a.py", line 1 in step'),
        ("host 4: a thread", '  File "b.py", line 2 in write'),
    ]
