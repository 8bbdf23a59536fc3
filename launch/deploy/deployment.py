"""The steps of one host, carried out there in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from launch.deploy.answers import Answer, Outcome, Reader
from launch.deploy.steps import Step, to_json
from launch.errors import HostError
from launch.transport import Stream, Transport

RUNNER = Path(__file__).with_name("runner.py")
PYTHON = "python3"
LIMIT_S = 3600.0
SHELLS_LONGEST = 120_000
"""Bytes of one argument that Linux takes (MAX_ARG_STRLEN is 131,072), with room for the shell's quotes."""


class Deployment:
    """The steps of one host, carried out there in one go; `show` is given each answer as it comes."""

    def __init__(
        self,
        host: str,
        wanted: Sequence[Step],
        show: Callable[[Answer], None],
        error: HostError | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._host, self._wanted, self._show, self._error, self._limit_s = host, wanted, show, error, limit_s
        self._reader, self._ended = Reader(), list[Answer]()
        self._future: Future[int | None] | None = None

    def begin(self, transport: Transport) -> Deployment:
        """Start, unless it is known already that this will not do."""
        request = to_json(self._wanted)
        assert len(request) < SHELLS_LONGEST, "more steps than one argument holds"
        argv = [PYTHON, "-S", "-E", "-c", RUNNER.read_text(encoding="utf-8"), request]
        if self._error is None:
            try:
                self._future = transport.stream(argv, self._take, timeout_s=self._limit_s)
            except (OSError, HostError) as error:
                self._error = self._of(error)
        return self

    def outcome(self) -> Outcome:
        """What became of the host; waits for it."""
        if self._future is not None:
            try:
                self._error = self._missing(self._future.result())
            except (OSError, HostError) as error:
                self._error = self._of(error)
        return Outcome(host=self._host, answers=tuple(self._ended), error=self._error)

    def end(self) -> None:
        """Break it off where it has not ended; the next deployment goes on from there."""
        if self._future is not None:
            self._future.cancel()

    def _take(self, stream: Stream, data: bytes) -> None:
        for answer in self._reader.take(stream, data):
            self._show(answer)
            if answer.state != "doing":
                self._ended.append(answer)

    def _of(self, error: OSError | HostError) -> HostError:
        if isinstance(error, HostError):
            return HostError(host=self._host, reason=error.reason, remedy=error.remedy)
        return HostError(host=self._host, reason=str(error))

    def _missing(self, code: int | None) -> HostError | None:
        """Why there are no more answers, where there should be."""
        if len(self._ended) == len(self._wanted):
            return None
        after = f"after {self._ended[-1].step}" if self._ended else "before the first step"
        if code is None:
            reason = f"was not done within {self._limit_s:.0f} s, it ended {after}"
            return HostError(host=self._host, reason=reason)
        said = self._reader.last_words
        return HostError(
            host=self._host,
            reason=f"ended {after} with exit code {code}" + (f": {said}" if said else ""),
            remedy="`fab deploy` again; what was done is found done",
        )
