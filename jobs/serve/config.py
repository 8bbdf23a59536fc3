from __future__ import annotations

import dataclasses

from jobs.runtime.prediction import SIZES

MIB = 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Serve the export of a run over HTTP; `fab serve RUN` says all that is needed."""

    job: str = ""
    """Whose export it is."""
    run: str = ""
    """The id of the run."""
    export: str = ""
    """The export: a folder that the host sees, or a URL."""
    address: str = "127.0.0.1"
    """Where to listen; on another than loopback a token is needed."""
    port: int = 8000
    """The port; 0: a free one."""
    token_file: str | None = None
    """A file with the token that requests have to name."""
    batch_sizes: str = ",".join(map(str, SIZES))
    """How many rows batches have."""
    lengths: str = ""
    """The lengths that rows are padded to, in tokens (default: a few up to the model's longest)."""
    most_waiting: int = 256
    """Rows that wait for the model at most; then requests are answered with 429."""
    most_inputs: int = 64
    """Inputs of a request at most."""
    most_body_mib: int = 8
    """MiB of a request at most."""
    most_characters: int = 100_000
    """Characters of a text at most."""
    most_connections: int = 1000
    """Connections at a time; others are answered with 503."""
    wait_s: float = 30.0
    """Seconds that a request waits for its answer."""
    stop_s: int = 20
    """Seconds for the requests under way when the server is stopped."""


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address."""
    return address in LOOPBACK


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 1,4,16, ascending. Raises ValueError: it is none."""
    values = tuple(sorted({int(number) for number in text.split(",")}))
    if values[0] < 1:
        raise ValueError(text)
    return values


def problems(config: Config, *, devices: int) -> list[str]:  # noqa: ARG001 - one model on one device
    messages = []
    for name in ("batch_sizes", "lengths"):
        text = getattr(config, name)
        try:
            numbers(text or "1")
        except ValueError:
            messages.append(
                f'--{name.replace("_", "-")} {text}: must be numbers of at least 1, such as "1,4,16"'
            )
    for name, value in vars(config).items():
        if name.startswith("most_") and value < 1:
            messages.append(f"--{name.replace('_', '-')} {value}: must be at least 1")
        if name.endswith("_s") and value <= 0:
            messages.append(f"--{name.replace('_', '-')} {value}: must be more than 0")
    if not 0 <= config.port < 2**16:
        messages.append(f"--port {config.port}: must be a port, or 0 for a free one")
    if not is_loopback(config.address) and config.token_file is None:
        messages.append(
            f"--address {config.address}: is not loopback, so a token is needed; name its file with --token-file"
        )
    return messages
