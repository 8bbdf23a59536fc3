"""The other hosts of a slice, as this one reaches them."""

from __future__ import annotations

import socket
import threading
import time

from .checks import check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

REACH_LIMIT_S = 3.0


def check_peers(peers: list[Json], timeout_s: float = REACH_LIMIT_S) -> list[Json]:
    """Connect to all of them at once; a finding for each that cannot be reached, or one for all."""
    # A name that no server resolves keeps its thread longer than the limit; it is waited for no longer.
    reasons: list[str | None] = [f"no answer within {timeout_s:g} s"] * len(peers)

    def reach(index: int, host: str, port: int) -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except socket.timeout:
            pass
        except OSError as error:
            reasons[index] = str(error.strerror or error)
        else:
            reasons[index] = None

    deadline = time.monotonic() + timeout_s + 0.2
    threads = [
        threading.Thread(target=reach, args=(index, peer["host"], peer["port"]), daemon=True)
        for index, peer in enumerate(peers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found = [
        check(
            "peers",
            f"cannot reach {peer['name']} ({peer['host']}:{peer['port']}): {reason}",
            "see that it is up, and that the firewall lets the slice's hosts reach each other on all ports",
        )
        for peer, reason in zip(peers, list(reasons))
        if reason is not None
    ]
    return found or [check("peers", f"reaches all of {len(peers)} peers")]
