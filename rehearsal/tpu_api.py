"""A simulator of the Cloud TPU API v2 on loopback, to rehearse with. It is not Google's service and makes no TPU.

In a test:      with TpuApi() as api: … api.url … api.control.preempt("my-node")
For a person:   python -m rehearsal.tpu_api --port 8470 --capacity us-central1-a:v5litepod:spot=64
"""

import argparse
import functools
import signal
import sys
import threading
from types import TracebackType

from rehearsal import queue_life
from rehearsal.clock import Clock
from rehearsal.cloud import Cloud, Delays
from rehearsal.control import Control
from rehearsal.faults import Faults
from rehearsal.hardware import Hardware, Paper
from rehearsal.methods import Methods
from rehearsal.offers import Offers
from rehearsal.pools import Limits, Pool
from rehearsal.server import Server


class TpuApi:
    """The simulator, from `with` to the end of its block. `url` is the API's endpoint, `control` the other side.

    capacity, quota: chips by pool, "ZONE:PREFIX:TIER"; all other pools have `other_chips`, None for no end.
    hardware: what stands behind the workers; None: nothing.
    """

    def __init__(
        self,
        *,
        capacity: dict[str, int] | None = None,
        quota: dict[str, int] | None = None,
        other_chips: int | None = None,
        delays: Delays | None = None,
        clock: Clock | None = None,
        hardware: Hardware | None = None,
        port: int = 0,
    ) -> None:
        has = {Pool.parse(pool): chips for pool, chips in (capacity or {}).items()}
        may = {Pool.parse(pool): chips for pool, chips in (quota or {}).items()}
        cloud = Cloud(
            clock=clock or Clock(),
            delays=delays or Delays(),
            capacity=Limits(has, other_chips),
            quota=Limits(may, None),
            hardware=hardware or Paper(),
        )
        cloud.on_capacity(functools.partial(queue_life.grant, cloud))
        faults = Faults()
        self.control = Control(cloud, faults)
        methods = Methods(cloud, Offers(has))
        self._server = Server(port, cloud=cloud, methods=methods, control=self.control, faults=faults)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="tpu-api", daemon=True
        )

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT"""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "TpuApi":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._thread.join()


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
