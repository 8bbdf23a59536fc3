"""The simulator as a program: serves until it is interrupted.

python -m rehearsal.tpu_api --port 8470 --capacity us-central1-a:v5litepod:spot=64
"""

import argparse
import signal
import sys
import threading

from rehearsal.tpu_api import Delays, TpuApi


def main(arguments: list[str] | None = None) -> int:
    """Serve until interrupted. Returns the exit code: 0, or 2 where the request was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m rehearsal.tpu_api", description="A simulator of the Cloud TPU API v2."
    )
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; 0 takes a free one (default)")
    parser.add_argument(
        "--capacity",
        action="append",
        default=[],
        metavar="ZONE:PREFIX:TIER=CHIPS",
        help="again for each pool",
    )
    parser.add_argument(
        "--quota", action="append", default=[], metavar="ZONE:PREFIX:TIER=CHIPS", help="again for each pool"
    )
    parser.add_argument(
        "--other-chips", type=int, metavar="CHIPS", help="capacity of every other pool (default: no end)"
    )
    parser.add_argument(
        "--delay-factor",
        type=float,
        default=1.0,
        help="how much longer everything takes (default 1: seconds)",
    )
    options = parser.parse_args(arguments)
    try:
        api = TpuApi(
            capacity=_chips(options.capacity),
            quota=_chips(options.quota),
            other_chips=options.other_chips,
            delays=Delays().scaled(options.delay_factor),
            port=options.port,
        )
    except (ValueError, OSError, OverflowError) as error:
        print(f"rehearsal.tpu_api: {error}", file=sys.stderr)
        return 2
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    with api:
        said = "a simulator of the Cloud TPU API v2 (not Google, no TPU behind it)"
        print(
            f"rehearsal: {said} at {api.url}; control at {api.url}/_control/alive; Ctrl-C ends it", flush=True
        )
        done.wait()
    return 0


def _chips(texts: list[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        pool, equals, chips = text.partition("=")
        if not equals or not chips.isdecimal():
            raise ValueError(
                f"{text!r}: write ZONE:PREFIX:TIER=CHIPS, such as us-central1-a:v5litepod:spot=64"
            )
        found[pool] = int(chips)
    return found


if __name__ == "__main__":
    sys.exit(main())
