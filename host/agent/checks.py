"""What preflight looks at: interpreter, directories, disks, port and clock."""

from __future__ import annotations

import errno

from .proc import described, holders, parse_listeners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def check(name: str, message: str, remedy: str | None = None) -> Json:
    """One finding; what needs a remedy is not in order."""
    return {"name": name, "ok": remedy is None, "message": message, "remedy": remedy}


def check_port(port: int, proc_root: str) -> Json:
    import socket

    with socket.socket() as listener:
        # A port in TIME_WAIT is free to those who listen with this option, as the coordinator does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
            listener.listen(1)
        except OSError as error:
            reason = str(error.strerror)
            taken = error.errno == errno.EADDRINUSE
        else:
            return check("port", f"port {port} is free")
    if not taken:
        return check("port", f"port {port} cannot be used: {reason}", "choose another port")
    sockets: list[str] = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{proc_root}/net/{table}", encoding="ascii") as file:
                sockets += parse_listeners(file.read(), port)
        except (OSError, ValueError, IndexError):
            continue
    held_by = sorted({pid for found in holders(sockets, proc_root).values() for pid in found})
    message = f"port {port} is taken by {described(held_by, proc_root)}"
    return check("port", message, "stop that process, or choose another port")


def check_clock(offset_s: float, limit_s: float) -> Json:
    message = f"the clock is {offset_s:+.2f} s from the launching machine's"
    if abs(offset_s) <= limit_s:
        return check("clock", message)
    return check(
        "clock", f"{message}; the limit is {limit_s:g} s", "turn on time synchronisation on both machines"
    )
