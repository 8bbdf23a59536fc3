"""`fab` as a person types it: the commands in the order they are met, answers at once, mistakes as messages."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError, Unreachable
from fabfile.command import Command
from fabfile.command_line import main, options_after_dashes
from fabfile.command_options import flag, options
from fabfile.commands import COMMANDS
from fabfile.slips import Line
from launch.hosts import HostError, HostsError
from launch.jobs import CHECKOUT
from launch.jobs import find as find_job
from launch.jobs import names as job_names
from tests.processes import all_end

Fab = Callable[..., Any]

HEAVY = ("jax", "flax", "optax", "orbax", "numpy", "tyro", "tokenizers", "tensorboard", "torch")
ROOMS = ("launch", "backends", "console", "keeper", "infra", "jobs")


def loading(names: tuple[str, ...]) -> str:
    """A program that is `fab`, and says in the end which of these it has loaded."""
    return f"""
import atexit, sys
from fabfile.command_line import main
atexit.register(lambda: print("loaded:", *(name for name in {names!r} if name in sys.modules)))
main()
"""


def test_the_commands_are_listed_under_headings_each_in_one_line_and_the_five_to_begin_with_come_first(
    fab: Fab,
) -> None:
    headings = [line for line in fab("--list").out.splitlines() if line.endswith(":")]
    listed = [line.split(maxsplit=1) for line in fab("--list").out.splitlines() if line.startswith("  ")]
    assert headings[0] == "Begin with these five:"
    assert [words[0] for words in listed[:5]] == ["jobs", "train", "status", "logs", "stop"]
    assert [words[0] for words in listed] == [*COMMANDS]
    assert all(len(words) == 2 and words[1].endswith(".") for words in listed)


@pytest.mark.parametrize(("word", "said"), [("status", "no runs yet in "), ("accelerators", "type ")])
def test_what_only_looks_loads_nothing_heavy_and_changes_nothing(
    tmp_path: Path, word: str, said: str
) -> None:
    places = {"TPU_STACK_RUNS": str(tmp_path / "runs"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = called(CHECKOUT, sys.executable, "-c", loading(HEAVY), word, **places)
    assert (done.returncode, done.stdout.startswith(said)) == (0, True), done.stderr
    assert done.stdout.endswith("loaded:\n")
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_commands_loads_nothing_of_what_they_do() -> None:
    done = called(CHECKOUT, sys.executable, "-c", loading(ROOMS), "--list")
    assert (done.returncode, done.stdout.endswith("loaded:\n")) == (0, True), done.stdout[-300:] + done.stderr


HAVE_STEPS = " and ".join(name for name in job_names() if "--steps" in find_job(name).options())


@pytest.mark.parametrize(
    ("typed", "value", "remedy"),
    [
        ("train --job nope", '--job: "nope"', "choose one of flax_mlm, jax_hello"),
        ("train", "--job: ", "fab train --workdir ~/my-project -- python train.py"),
        ("train --workdir /no/such -- ls", "--workdir /no/such: ", "no such folder"),
        ("train --job jax_hello --workdir . --progress log --framework jax", "--workdir . and --progress log: ",
         "leave one"),
        ("train --resume latest --framework jax", "--framework jax: ", "leave it out"),
        ("train --progress log", "--progress log: ", "--workdir"),
        ("train --job jax_hello -- --steps x --model --batch-size --save-every 0 y=1",
         "--steps x: must be a whole number\n--model: there is no such option\n--batch-size: needs a value\ny 1: ",
         "fab jobs --job jax_hello"),
        ("train --job jax_hello --framework pytorch", "--framework pytorch: ", "choose one of jax"),
        ("train --job flax_mlm --hosts two", "--hosts two: ", "from 1 to 64"),
        ("train --job jax_hello --args '--steps 20' -- --steps 20", "--args '--steps 20' and -- --steps 20: ", "twice"),
        ("accelerators --generation v7", '--generation: "v7"', "v5e, v5p, v6e"),
        ("predict latest @/no/such", "@/no/such: ", "double the @"),
        ("stop", "no run is active", "fab runs"),
        ("put /no/such /tmp", "/no/such: ", "no such file"),
        ("get .. /tmp", "..: ", "name the folder itself"),
        ("ssh", "the hosts are this machine", "--stack"),
        ("runs --runs s3://b/runs", "--runs s3://b/runs: ", "gs://BUCKET/"),
        ("dashboard --runs gs://", "--runs gs://: ", "gs://BUCKET/"),
        ("build --framework cobol", '--framework: "cobol"', "choose one of"),
        ("build --platform gpu", '--platform: "gpu"', "choose one of tpu, cpu"),
        ("push", "--stack: ", "pulumi stack ls"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_value_and_remedy_and_exit_code_2(
    fab: Fab, typed: str, value: str, remedy: str
) -> None:
    done = fab(*shlex.split(typed))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {value}") and remedy in done.err


@pytest.mark.parametrize(
    ("typed", "value", "meant"),
    [
        ("trian", '"trian" is not a command', "`fab train`"),
        ("zzz", '"zzz" is not a command', "fab --list"),
        ("--job x train", "--job: ", "fab train --job"),
        ("train --steps 200", f"`fab train` has no option --steps; --steps is an option of {HAVE_STEPS}",
         "\n  fab train --job JOB -- --steps 200\n"),
        ("train --job jax_hello --setps 200 --hosts 3", "`fab train` has no option --setps",
         "\n  fab train --job jax_hello --hosts 3 -- --steps 200\n"),
        ("train --args --steps 9 --job x", "--args ", "\n  fab train --job x -- --steps 9\n"),
        ("train --args --detach", "--args needs a value", ""),
        ("logs -f -l", "-l needs a value", ""),
        ("logs --follow=yes", "--follow=yes: ", "leave it out"),
        ("logs -fx", "`fab logs` has no option -fx", "fab help logs"),
        ("recover latest --run=b", "--run: is given twice", "leave one out"),
        ("train -job flax_mlm", "`fab train` has no option -job", "--job?"),
        ("train --job jax_hello -- --hosts 3", "--hosts is an option of `fab train`", ""),
        ("compare", "`fab compare` needs RUNs", ""),
        ("compare a b --sweep c", "--sweep c: ", "leave a b out"),
        ("queue move one first", "fab queue move one: ", "at least 1"),
        ("train flax_mlm", '"flax_mlm" is not a command', "--job flax_mlm?"),
        ("train --workdir x --dry-run python train.py -- -v", '"python" is not a command',
         "\n  fab train --workdir x --dry-run -- python train.py -v\n"),
        ("train --job jax_hello --send .env", "--send .env: ", "of your own"),
        ("train --job jax_hello --keep-hours 3", "--keep-hours 3: ", "--keep"),
        ("serve latest --lengths 16 --port 0", "`fab serve` has no option --lengths",
         "\n  fab serve latest --port 0 -- --lengths 16\n"),
        ("zombies", "--stack local: ", "Pulumi stack"),
        ("logs my-run", '"my-run": there is no run in ', ""),
        ("ssh 1", "1: ", "--host"),
        ("help trian", '"trian" is not a command', "`fab train`"),
        ("--dry train", "`fab` has no option --dry", "fab help"),
        ("queue move", "fab queue move: ", "fab queue cancel ENTRY"),
        ("train latest", '"latest" is not a command', "--resume latest?"),
        ("train --workdir x --dry-run python train.py --job y", '"python" is not a command', "fab help train"),
        ("train --job jax_hello --detach --max-restarts 3", "--detach --max-restarts 3: ", ""),
        ("train a/own.py --lr 3", "`fab train` has no option --lr; the script's come after --:",
         "\n  fab train a/own.py -- --lr 3\n"),
        ("train --job jax_hello --no-install", "--no-install: ", "of your own"),
        ("train none.py -- --name x", "none.py: there is no such script here", ""),
        ("status a b", "b: `fab status` takes one RUN", ""),
        ("train --flip", "`fab train` has no option --flip; --flip is an option of tf_images", "fab train --job tf"),
        ("train —job x", "—job: ", "em dash"),
        ("train --job “x”", "“x”: ", "quotation mark"),
        ("deploy verfy", '"verfy" is not a command', "`verify`?"),
        ("run --group ls -l", '"ls" is not a command', "\n  fab run --group -- ls -l\n"),
        ("status -- ls", "-- ls: ", "`fab train`"),
        ("predict", "`fab predict` needs RUN", ""),
        ("put --force here", "`fab put` needs TARGET", ""),
        ("put --nonsense", "`fab put` has no option --nonsense", "needs SOURCE"),
        ("recover --stackk", "`fab recover` has no option --stackk", "--stack?"),
    ],
)  # fmt: skip
def test_a_slip_ends_with_2_and_says_what_was_meant(fab: Fab, typed: str, value: str, meant: str) -> None:
    done = fab(*typed.split())
    assert done.code == 2
    assert done.err.startswith(f"error: {value}") and meant in done.err


@pytest.mark.parametrize("typed", [("rm", ""), ("stop", ""), ("stop", "--run="), ("put", "a", "")])
def test_an_empty_value_is_refused_and_never_taken_for_the_default(fab: Fab, typed: tuple[str, ...]) -> None:
    """As where a shell's variable is not set: `fab stop "$RUN"` would stop whatever runs."""
    done = fab(*typed)
    assert (done.code, "its value is empty; give one" in done.err) == (2, True), done.err
    assert fab("train", "--job", "jax_hello", "--dry-run", "--args", "").code == 0


@pytest.mark.parametrize(
    "typed",
    ["help recover", "recover --help", "-h recover", "runs recover latest --stack dev -h"],
)
def test_help_of_a_command_is_shown_however_it_is_asked_for(fab: Fab, typed: str) -> None:
    done = fab(*typed.split())
    assert done.code == 0
    assert done.out.startswith("Usage: fab recover RUN [--options]\n\nRestore the slice")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_examples_that_it_takes_before_the_options(fab: Fab, name: str) -> None:
    help_text = fab("help", name).out
    examples, _, options = help_text.partition("\nExamples:\n  ")[2].partition("\n\n")
    assert examples and options
    for example in examples.splitlines():
        program, *words = shlex.split(example)
        place = words.index("--") if "--" in words else len(words)
        line = Line(words[:place], words[place + 1 :], COMMANDS, options_after_dashes)
        line.check()
        assert (program, [call.name for call in line.calls]) == ("fab", [name])
        COMMANDS[name].read(line.calls[0].as_kwargs, line.after)


def test_a_completion_script_is_printed_for_bash_zsh_and_fish(fab: Fab) -> None:
    scripts = [fab("--print-completion-script", shell).out for shell in ("bash", "zsh", "fish")]
    assert all("--complete -- " in script for script in scripts)
    refused = fab("--print-completion-script", "tcsh")
    assert refused.code == 2 and "bash, fish, zsh" in refused.err


def test_a_jobs_options_are_shown_with_their_defaults(fab: Fab) -> None:
    text = fab("train", "--job", "flax_mlm", "--", "--help").out
    assert "flax_mlm  (framework jax)" in text and "--sequence-length INT" in text
    assert text == fab("jobs", "--job", "flax_mlm").out
    assert all(text == fab(each, "--job", "flax_mlm", "--", "--help").out for each in ("submit", "sweep"))
    assert "--batch-sizes STR" in fab("serve", "latest", "--", "--help").out


JOB_X = {"job": {"x": ["--anything"]}, "server": {"the server": ["--lengths"]}}


def checked(typed: str) -> Line:
    words = shlex.split(typed)
    place = words.index("--") if "--" in words else len(words)
    line = Line(words[:place], words[place + 1 :], COMMANDS, JOB_X.__getitem__)
    line.check()
    return line


@pytest.mark.parametrize(
    "typed",
    [
        'train --args "--steps 2" --job x',
        "train --args --steps=2 --hosts 0-3,5 -dj x",
        "train --job x -- --anything 3 -h",
        "train --job=x --max-restarts=3 --detach",
        "train --workdir . -- python train.py --name a --hosts 3",
        "train --name status --job x",
        "train own/script.py --hosts 2 -- --name x",
        "logs --lines -5 -f",
        "logs -f --run latest",
        "logs latest -fl3",
        "run -- ls -- -l",
        "recover --run latest",
        "recover latest --stack dev",
        "recover latest --stack hosts.json --platform cpu --python python3.12",
        "put a b --force",
        "predict x -",
        "predict --run x status -- -x",
        "queue move 3 first --priority -2",
        "sweep --grid a=1 --grid b=2,3 --job x",
        "deploy verify",
    ],
)
def test_what_is_right_is_not_taken_for_a_slip(typed: str) -> None:
    assert not checked(typed).help_command


def test_all_words_behind_the_run_of_predict_are_inputs_even_the_names_of_commands() -> None:
    line = checked("runs --all predict latest 'a b' --second status status --json - -- -5 --json")
    runs, predict = line.calls
    assert (runs.name, runs.as_kwargs["all"], predict.name) == ("runs", True, "predict")
    assert {"run": "latest", "second": "status", "json": True}.items() <= predict.as_kwargs.items()
    assert line.after == ["a b", "status", "-", "-5", "--json"]


def test_every_mistake_of_a_line_is_answered_at_once(fab: Fab) -> None:
    done = fab("train", "--job", "jax_hello", "--detatch", "--hostz", "3", "--steps", "9", "--foo")
    no_option = "`fab train` has no option"
    assert (done.code, done.err.splitlines()) == (
        2,
        [
            f"error: {no_option} --detatch; did you mean --detach?",
            f"{no_option} --hostz; did you mean --hosts?",
            f"{no_option} --foo; `fab help train` lists those it has",
            f"{no_option} --steps; --steps is an option of jax_hello, and a job's options come after --:",
            "  fab train --job jax_hello --detach --hosts 3 -- --steps 9 --foo",
        ],
    )
    done = fab("train", "--job", "jax_hello", "--steps 3")
    assert (done.code, done.err) == (2, "error: --steps 3: is one word; write it without the quotes\n")
    done = fab("train", "--job", "jax_hello", "--track", "aim", "--max-usd", "0", "--wait", "x")
    assert (done.code, [line.partition(":")[0] for line in done.err.splitlines()]) == (
        2,
        ["error", "--max-usd 0", "--wait x"],
    )


def test_a_wrong_value_of_a_later_command_is_answered_before_the_first_begins(fab: Fab) -> None:
    assert fab("runs", "logs", "--lines", "x")[:2] == (2, "")


def called(cwd: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_installed_fab_works_wherever_it_is_called_but_not_on_another_checkouts_code(
    tmp_path: Path,
) -> None:
    (script,) = (each for each in distribution("tpu-stack").entry_points if each.name == "fab")
    assert script.load() is main
    installed = str(Path(sys.executable).with_name("fab"))
    done = called(tmp_path, installed, "runs", TPU_STACK_RUNS=str(tmp_path / "runs"))
    assert (done.stdout.partition(";")[0], done.returncode) == (f"no runs yet in {tmp_path / 'runs'}", 0)
    odd = tmp_path / os.fsdecode(b"\xe9")  # the terminal takes UTF-8 only
    odd.touch()
    done = called(tmp_path, installed, "put", odd.name, "copy", PYTHONIOENCODING="utf-8:strict")
    assert (done.stdout.partition(":")[0], done.returncode) == (r"\udce9 to 1 host", 0)
    for file in ("other/fabfile/command_line.py", "other/launch/jobs.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    done = called(tmp_path / "other/launch", installed, "runs")
    said = (
        f"error: this `fab` starts the code of {CHECKOUT}, and you are in another checkout, {tmp_path}/other"
    )
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, said)
    done = called(CHECKOUT, sys.executable, "-m", "fabric", "status", "--", "ls")
    said = "error: -- ls: only `fab train`, "
    assert (done.returncode, done.stderr[: len(said)]) == (2, said), "Fabric's own `fab` hands over to it"


INTERRUPTED = """
import signal, sys
class AtImport:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, AtImport())
from fabfile.command_line import fab
fab(["runs"])
"""


@pytest.mark.parametrize("imported", ["invoke", "launch.hosts", "console"])
def test_ctrl_c_while_a_command_starts_is_no_traceback(imported: str) -> None:
    done = called(CHECKOUT, sys.executable, "-c", INTERRUPTED, imported)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# --- on this machine as two hosts ----------------------------------------------------------------------------------


def test_words_arrive_on_every_host_as_they_were_typed_and_one_word_is_a_line_of_shell(fab: Fab) -> None:
    typed = ["a b", "$HOME", "'", "*", "", "--", "-H"]
    shown = "".join(f"<{word}>" for word in typed)
    assert fab("run", "--group", "--", "printf", "<%s>", *typed) == (0, f"[0-1] {shown}\n", "")
    for line in (["--", "cd / && pwd; exit 3"], ["--command", "cd / && pwd; exit 3"]):
        done = fab("run", *line)
        assert sorted(done.out.splitlines()) == ["[0] /", "[1] /"]
        assert (done.err, done.code) == ("exit codes: [0-1] 3\n", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_or_the_end_of_the_command_here_ends_it_on_every_host(tmp_path: Path, number: int) -> None:
    line = f"echo $$ >> {tmp_path}/pids; echo begun; exec sleep 600"
    fab = [sys.executable, "-c", "from fabfile.command_line import main; main()"]
    environment = {key: value for key, value in os.environ.items() if key != "TPU_STACK"}
    with subprocess.Popen(
        [*fab, "run", "--", line], cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert [running.stdout.readline()[4:] for _ in range(2)] == ["begun\n"] * 2
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        running.send_signal(number)
        assert running.wait(30) == 130
    assert len(pids) == 2
    assert all_end(pids)


# --- how a task ends -----------------------------------------------------------------------------------------------


WRONG = HostError(host="w-0", reason="gone", remedy="start it")


@options
class Nothing:
    quietly: bool = flag("say nothing")


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (RequestError("no such thing"), 2, "error: no such thing\n"),
        (Unreachable("the bucket is away"), 69, "error: the bucket is away\n"),
        (WRONG, 2, "error: w-0: gone → start it\n"),
        (HostError(host="gs://b", reason="no answer", is_outage=True), 69, "error: gs://b: no answer\n"),
        (HostsError("preflight failed:", [WRONG]), 2, "error: preflight failed:\n  w-0: gone → start it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_every_known_ending_has_its_exit_code_and_its_message(
    ending: int | BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @Command
    def command(args: Nothing) -> int:
        if isinstance(ending, BaseException):
            raise ending
        return ending

    if code == 0:
        command(None, Nothing())
    else:
        with pytest.raises(SystemExit) as stop:
            command(None, Nothing())
        assert stop.value.code == code
    assert capsys.readouterr().err == said


def test_a_bug_is_not_hidden_behind_a_message() -> None:
    @Command
    def do_it(args: Nothing) -> int:
        """Do it."""
        raise ZeroDivisionError

    assert (do_it.name, do_it.summary) == ("do-it", "Do it."), "as `fab` lists it"
    with pytest.raises(ZeroDivisionError):
        do_it(None, Nothing())
