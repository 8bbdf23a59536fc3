"""A command: a Fabric task that gets its options as one object, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fabric.tasks
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext

from contracts.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    UNAVAILABLE,
    WRONG_REQUEST,
    RequestError,
    exit_code_for,
    os_error_reason,
    remedy_for,
)
from fabfile.command_options import Positionals, declared, declared_positionals, read
from fabfile.selector import opened

if TYPE_CHECKING:
    from launch.targets import Target

STDOUT = 1


class Command(fabric.tasks.Task):  # type: ignore[misc]  # Fabric has no types
    """A Fabric task of one parameter, `args`, a class of `fabfile.command_options`. Its function returns the exit code.

    examples: command lines that its help shows. outlives_signals: whether what it does goes on when it is ended, unless
    by Ctrl-C (docs/operations.md).
    """

    def __init__(
        self, function: Callable[[Any], int], examples: Sequence[str] = (), *, outlives_signals: bool = False
    ) -> None:
        super().__init__(function, name=function.__name__.replace("_", "-"), positional=())
        self.options: type = inspect.get_annotations(function, eval_str=True)["args"]
        self.positionals: Positionals | None = declared_positionals(self.options)
        self.examples = tuple(examples)
        self.outlives_signals = outlives_signals

    def get_arguments(self) -> list[Argument]:
        """Return Invoke's arguments. An option has the first letter of its name that is free, and -h is --help."""
        fields = dict(declared(self.options))
        taken, arguments = {"h", "-"}, []
        for field, option in fields.items():
            name = field.replace("_", "-")
            letters = [letter for letter in name if letter not in taken][:1]
            taken.update(letters)
            arguments.append(
                Argument(
                    names=[name, *letters],
                    kind=option.kind,
                    default=False if option.kind is bool else None,
                    help=option.help,
                    positional=option.place == "required",
                    attr_name=field if field != name else None,  # Invoke loops where both are the same
                )
            )
        return arguments

    @functools.cached_property
    def parser_context(self) -> ParserContext:
        return ParserContext(str(self.name), args=self.get_arguments())

    @property
    def optional_argument(self) -> str | None:
        """The option that may be typed without its name, and need not be there at all."""
        return next((name for name, option in declared(self.options) if option.place == "optional"), None)

    @property
    def summary(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def text(self) -> str:
        return inspect.getdoc(self.body) or ""

    @property
    def usage(self) -> str:
        """How it is typed: "fab recover RUN [--options]"."""
        places = [str(argument.name).upper() for argument in self.parser_context.positional_args]
        places += [f"[{self.optional_argument.upper()}]"] if self.optional_argument else []
        usages = [self.positionals.usage] if self.positionals else []
        last = (
            ["[--options]", *usages]
            if self.positionals and self.positionals.needs is None
            else [*usages, "[--options]"]
        )
        return " ".join(["fab", str(self.name), *places, *last])

    def read(self, typed: Mapping[str, Any], positionals: Sequence[str]) -> Any:
        """Return its options. Raises RequestError: with every value that is wrong."""
        return read(self.options, typed, positionals if self.positionals else ())

    def __call__(self, _context: object, args: Any) -> None:
        """Carry it out, and end the process unless that went well."""
        stacks: dict[str, Target] = {}
        opened.set(stacks)
        signals = contextlib.nullcontext() if self.outlives_signals else signals_as_ctrl_c()

        def carry_out() -> int:
            with signals:
                return int(self.body(args))

        code = exit_code(carry_out)
        _name_idle_slices(stacks.values())
        if code:
            sys.exit(code)


def task(*examples: str, outlives_signals: bool = False) -> Callable[[Callable[[Any], int]], Command]:
    """Make a function a command of `fab`, whose help shows these command lines."""
    return functools.partial(Command, examples=examples, outlives_signals=outlives_signals)


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Take the signals of a service manager, `timeout` or a closed terminal as Ctrl-C within it, so that nothing is
    left behind. A signal that is ignored (nohup) stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(carry_out: Callable[[], int]) -> int:
    """Carry something out, and return its exit code; a known error becomes a message, and its code.

    Exit codes: 0 done; 1 the job failed; 2 the request was wrong, nothing was started; 69 something outside was away;
    130 interrupted.
    """
    try:
        code = carry_out()
        sys.stdout.flush()  # what cannot be written is found here, and not at the end of Python
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except RequestError as error:
        return _complain(f"error: {error}", exit_code_for(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # the reader of our output went away
        return DONE
    except OSError as error:
        remedy = f" → {remedy_for(error)}" if error.filename else ""
        return _complain(f"error: {os_error_reason(error)}{remedy}", FAILED)
    except Exception as error:
        from launch.hosts import HostError, HostsError  # a command without hosts has none of these

        if not isinstance(error, HostError | HostsError):
            raise
        is_outage = isinstance(error, HostError) and error.is_outage
        return _complain(f"error: {error}", UNAVAILABLE if is_outage else WRONG_REQUEST)
    return code


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # where it cannot be written, the exit code says it
        print(message, file=sys.stderr, flush=True)
    return code


def _name_idle_slices(targets: Iterable[Target]) -> None:
    """Say on standard error which slices of the stacks that the task was about cost and are not used."""
    for target in targets:
        from console import idle

        with contextlib.suppress(OSError, KeyboardInterrupt):
            for line in idle.remarks(target):
                print(line, file=sys.stderr)
