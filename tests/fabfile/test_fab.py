"""`fab` as a person types it: the commands in the order they are met, answers at once, mistakes as messages."""

from __future__ import annotations

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
from fabfile.command_line import main
from fabfile.commands import COMMANDS
from fabfile.options import flag, options
from fabfile.slips import Line
from launch.hosts import HostError, HostsError
from launch.jobs import CHECKOUT, image_frameworks
from launch.jobs import find as find_job
from launch.jobs import names as job_names
from tests.launch.processes import all_end

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


KNOWN, JOBS = ", ".join(image_frameworks()), ", ".join(job_names())
HAVE_STEPS = " and ".join(name for name in job_names() if "--steps" in find_job(name).options())
NO_FRAMEWORK = f'--framework: "cobol" is not a framework; choose one of {KNOWN}'


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("train --job nope", f'--job: "nope" is not a job; choose one of {JOBS}'),
        (
            "train",
            (
                f"--job: say what to train; choose one of {JOBS}, or name the folder of a "
                "command of your own, as in: fab train --workdir ~/my-project -- python train.py"
            ),
        ),
        ("train --workdir /no/such -- ls", "--workdir /no/such: there is no such folder"),
        (
            "train --job jax_hello --workdir . --progress log --framework jax",
            (
                "--workdir . and --progress log: only for a command of your own, and --job jax_hello brings its own; "
                "leave one of the two out"
            ),
        ),
        (
            "train --resume latest --framework jax",
            "--framework jax: --resume latest goes on as that run began; leave it out",
        ),
        (
            "train --progress log",
            (
                "--progress log: only for a command of your own; name its folder with --workdir, and the command "
                "after --"
            ),
        ),
        (
            "train --job jax_hello -- --steps x --model --batch-size --save-every 0 y=1",
            (
                "--steps x: must be a whole number\n--model: there is no such option\n--batch-size: needs a value\n"
                "y 1: is no option\nall options: fab jobs --job jax_hello"
            ),
        ),
        (
            "train --job jax_hello --framework pytorch",
            "--framework pytorch: the job jax_hello does not run on it; choose one of jax",
        ),
        (
            "train --job flax_mlm --hosts two",
            "--hosts two: must be a whole number from 1 to 64 on this machine",
        ),
        (
            "train --job jax_hello --args '--steps 20' -- --steps 20",
            (
                "--args '--steps 20' and -- --steps 20: the job's options are given twice; write them all in one of "
                "the two places"
            ),
        ),
        ("logs --lines -5", "--lines -5: must be a whole number of at least 0"),
        (
            "accelerators --generation v7",
            '--generation: "v7" is not a TPU generation; choose one of v2, v3, v4, v5e, v5p, v6e, tpu7x',
        ),
        (
            "predict latest @/no/such",
            "@/no/such: No such file or directory; name a text file after @, or double the @ of a text",
        ),
        ("stop", "no run is active; `fab runs` lists them all"),
        ("run --timeout 0 -- ls", "--timeout 0: must be a whole number of at least 1"),
        ("put /no/such /tmp", "/no/such: there is no such file on this machine"),
        ("get .. /tmp", "..: name the folder itself, so that its copy has a name"),
        ("ssh", "the hosts are this machine, which needs no SSH; say --stack as well"),
        ("ssh --host x", "--host x: must be a whole number of at least 0"),
        ("dashboard --port 65536", "--port 65536: must be a whole number from 0 to 65535"),
        ("serve latest --port 99999", "--port 99999: must be a whole number from 0 to 65535"),
        (
            "runs --runs s3://b/runs",
            "--runs s3://b/runs: must be a folder, or a bucket of Cloud Storage (gs://BUCKET/…), not s3://",
        ),
        ("dashboard --runs gs://", "--runs gs://: names no bucket; write gs://BUCKET/…"),
        ("ssh-config", "the hosts are this machine, which needs no SSH; say --stack as well"),
        ("build --framework cobol", NO_FRAMEWORK),
        ("push --framework cobol --stack dev", NO_FRAMEWORK),
        ("build --platform gpu", '--platform: "gpu" is not a platform of images; choose one of tpu, cpu'),
        ("push", "--stack: say to which stack's repository; `pulumi stack ls` lists them"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(fab: Fab, typed: str, said: str) -> None:
    assert fab(*shlex.split(typed)) == (2, "", f"error: {said}\n")


STEPS = "`fab train` has no option {}; --steps is an option of {}, and a job's options come after --:\n  "
SERVERS = "`fab serve` has no option {0}; {0} is an option of the server, and the server's options come after --:\n  "
QUOTES = "--args takes the job's options as one word, in quotes; without quotes they come after --:\n  "
NO_ARGUMENT = '"{}" is not a command, nor an argument of `fab {}`; '


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trian", '"trian" is not a command; did you mean `fab train`?'),
        ("help trian", '"trian" is not a command; did you mean `fab train`?'),
        ("zzz", '"zzz" is not a command; `fab --list` lists them'),
        ("--dry train", "`fab` has no option --dry; `fab help` lists those it has"),
        ("--job x train", "--job: the command comes first, its options after it: fab train --job …"),
        (
            "train --steps 200",
            STEPS.format("--steps", HAVE_STEPS) + "fab train --job JOB -- --steps 200",
        ),
        (
            "train --job jax_hello --setps 200 --hosts 3",
            STEPS.format("--setps", "jax_hello") + "fab train --job jax_hello --hosts 3 -- --steps 200",
        ),
        (
            "train --resume latest -steps=200 -- --log-every 5",
            STEPS.format("-steps", HAVE_STEPS) + "fab train --resume latest -- --steps=200 --log-every 5",
        ),
        ("train --args --steps 9 --job x", QUOTES + "fab train --job x -- --steps 9"),
        ("train --args --detach", "--args needs a value: the job's own options in one word"),
        ("train -a --steps 9 --job x", QUOTES + "fab train --job x -- --steps 9"),
        ("logs -f -l", "-l needs a value: how many of the last lines"),
        ("logs --follow=yes", "--follow=yes: --follow has no value; leave it out"),
        ("recover -xyz", "`fab recover` has no option -xyz; `fab help recover` lists those it has"),
        ("recover latest --run=b", "--run: is given twice; leave one out"),
        ("train --job x --detatch", "`fab train` has no option --detatch; did you mean --detach?"),
        ("train --job jax_hello -- --hosts 3", "--hosts is an option of `fab train`, not of the job"),
        ("submit --job jax_hello -- --hosts 3", "--hosts is an option of `fab submit`, not of the job"),
        (
            "submit --job jax_hello --steps 9",
            STEPS.replace("train", "submit").format("--steps", "jax_hello")
            + "fab submit --job jax_hello -- --steps 9",
        ),
        ("compare", "`fab compare` needs RUNs to compare"),
        ("compare a b --sweep c", "--sweep c: compares all its runs; leave a b out"),
        ("queue move", "fab queue move: write fab queue, fab queue work, fab queue cancel ENTRY …, or"),
        ("queue move one first", "fab queue move one: must be a whole number of at least 1"),
        ("train flax_mlm", NO_ARGUMENT.format("flax_mlm", "train") + "did you mean --job flax_mlm?"),
        ("jobs flax_mlm", NO_ARGUMENT.format("flax_mlm", "jobs") + "did you mean --job flax_mlm?"),
        ("train latest", NO_ARGUMENT.format("latest", "train") + "did you mean --resume latest?"),
        (
            "train --workdir x --dry-run python train.py --job y",
            NO_ARGUMENT.format("python", "train") + "`fab help train` shows what it takes",
        ),
        (
            "train --workdir x --dry-run python train.py -- -v",
            NO_ARGUMENT.format("python", "train")
            + "a command of your own comes after --:\n  fab train --workdir x --dry-run -- python train.py -v\n",
        ),
        (
            "submit python train.py",
            NO_ARGUMENT.format("python", "submit")
            + "a command of your own comes after --:\n  fab submit --workdir . -- python train.py\n",
        ),
        (
            "train --job jax_hello --send .env",
            "--send .env: only for a command of your own, and --job jax_hello b",
        ),
        (
            "train --job jax_hello --keep-hours 3",
            "--keep-hours 3: is for a run that a keeper keeps; add --keep, or",
        ),
        (
            "train --job jax_hello --keep-attempts 3",
            "--keep-attempts 3: is for a run that a keeper keeps; add --ke",
        ),
        (
            "train --job jax_hello --detach --max-restarts 3",
            "--detach --max-restarts 3: a run is started again only",
        ),
        (
            "serve latest --lengths 16 --port 0",
            SERVERS.format("--lengths") + "fab serve latest --port 0 -- --lengths 16",
        ),
        (
            "serve --length=16 latest",
            "`fab serve` has no option --length; --lengths is an option of the server",
        ),
        (
            "zombies",
            "--stack local: Pulumi did not make it, so nothing says what is its own; name a Pulumi stack with",
        ),
        ("train -job flax_mlm", "`fab train` has no option -job; did you mean --job?"),
        ("train --job", "--job needs a value: the job to train"),
        ("logs my-run", '"my-run": there is no run in '),
        (
            "status a b",
            "b: `fab status` takes one RUN, and another one is named: fab status [RUN] [--options]",
        ),
        ("status a --run b", "--run: is given twice; leave one out"),
        ("train --job x --job y", "--job: is given twice; leave one out"),
        (
            "ssh 1",
            "1: a shell of a run is for pods, and these hosts have shells whatever runs; name one with --host",
        ),
        ("train --secret x", "`fab train` has no option --secret; `fab help train` lists those it has"),
        ("train --pip x", "`fab train` has no option --pip; `fab help train` lists those it has"),
        (
            "train --flip",
            STEPS.replace("--steps", "--flip").format("--flip", "tf_images") + "fab train --job tf",
        ),
        (
            "train --job jax_hello --flip",
            "`fab train` has no option --flip; `fab help train` lists those it has",
        ),
        (
            "train --workdir . --steps 9 -- ls",
            "`fab train` has no option --steps; `fab help train` lists those it",
        ),
        ("compare --run x", "`fab compare` has no option --run; `fab help compare` lists those it has"),
        ("train —job x", "—job: begins with — (em dash), as copied from a page; type two hyphens: --job"),
        (
            "train --job “x”",
            "“x”: begins with “ (left double quotation mark), which a shell does not read as a quote",
        ),
        (
            "train --job jax_hello -- —steps 3",
            "—steps: begins with — (em dash), as copied from a page; type two hyph",
        ),
        ("logs -fx", "`fab logs` has no option -fx; `fab help logs` lists those it has"),
        ("deploy verfy", NO_ARGUMENT.format("verfy", "deploy") + "did you mean `verify`?"),
        (
            "run --group ls -l",
            NO_ARGUMENT.format("ls", "run")
            + "a command for the hosts comes after --:\n  fab run --group -- ls -l",
        ),
        (
            "status -- ls",
            "-- ls: only `fab train`, `fab compare`, `fab predict`, `fab serve`, `fab submit`, `fab sweep`, `fab q",
        ),
        (
            "predict latest",
            "`fab predict` needs INPUT (a text, a question, or the path of a picture): fab predict RUN I",
        ),
        ("predict", "`fab predict` needs RUN (a run of `fab runs`: its id, "),
        ("predict latest a --secnd b", "`fab predict` has no option --secnd; did you mean --second?"),
        ("recover", "`fab recover` needs RUN (a run of `fab runs`: its id, "),
        ("recover --detatch", "`fab recover` has no option --detatch; did you mean --detach?"),
        ("put --force here", "`fab put` needs TARGET (the path on the hosts"),
    ],
)
def test_a_slip_ends_with_2_and_says_what_was_meant(fab: Fab, typed: str, meant: str) -> None:
    done = fab(*typed.split())
    assert done.code == 2
    assert done.err.startswith(f"error: {meant}")


@pytest.mark.parametrize(
    "typed",
    ["help recover", "recover --help", "-h recover", "recover latest --stack dev -h", "runs recover --help"],
)
def test_help_of_a_command_is_shown_however_it_is_asked_for(fab: Fab, typed: str) -> None:
    done = fab(*typed.split())
    assert done.code == 0
    assert done.out.startswith("Usage: fab recover RUN [--options]\n\nRestore the slice")


def test_an_option_in_quotes_with_its_value_is_told_to_be_two_words(fab: Fab) -> None:
    done = fab("train", "--job", "jax_hello", "--steps 3")
    assert (done.code, done.err) == (2, "error: --steps 3: is one word; write it without the quotes\n")


def test_a_jobs_options_are_shown_with_their_defaults(fab: Fab) -> None:
    text = fab("train", "--job", "flax_mlm", "--", "--help").out
    assert "flax_mlm  (framework jax)" in text and "--sequence-length INT" in text
    assert text == fab("jobs", "--job", "flax_mlm").out
    assert all(text == fab(each, "--job", "flax_mlm", "--", "--help").out for each in ("submit", "sweep"))
    assert "--batch-sizes STR" in fab("serve", "latest", "--", "--help").out


def test_each_job_has_a_line_that_says_what_it_does_and_on_what(fab: Fab) -> None:
    listed = fab("jobs").out.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == job_names()
    (torch,) = (line for line in listed if line.startswith("torch_glue "))
    assert "  pytorch or pytorch_xla  Fine-tuning of RoBERTa or BERT in PyTorch: " in torch
    assert all(len(line) <= 160 for line in listed)


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
        "logs --lines -5 -f",
        "logs -f --run latest",
        "logs latest -fl3",
        "run -- ls -- -l",
        "recover --run latest",
        "recover latest --stack dev",
        "put a b --force",
        "predict x -",
        "predict --run x status -- -x",
        "queue move 3 first --priority -2",
        "sweep --grid a=1 --grid b=2,3 --job x",
        "deploy verify",
    ],
)
def test_what_is_right_is_not_taken_for_a_slip(typed: str) -> None:
    assert not checked(typed).help_of


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


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("fab help >&-", 0, ""),
        ("fab runs >&- 2>&-", 0, ""),
        ("fab help >/dev/full", 1, "error: No space left on device\n"),
        ("fab zzz 2>/dev/full", 2, ""),
        ("fab accelerators | true", 0, ""),
        ("fab help | true", 0, ""),
        ("PYTHONIOENCODING=ascii fab help train >/dev/null", 0, ""),
        ("COLUMNS=1 fab help notify >/dev/null", 0, ""),
        ("mkdir gone; cd gone; rmdir ../gone; fab runs", 2,
         "error: the folder that you are in was removed; `cd` to another one\n"),
    ],
)  # fmt: skip
def test_what_a_shell_can_do_to_a_command_is_no_traceback(
    tmp_path: Path, line: str, code: int, said: str
) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {
        "TPU_STACK_RUNS": str(tmp_path / "runs"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": path,
    }
    done = called(tmp_path, "bash", "-o", "pipefail", "-c", line, **places)
    assert (done.returncode, done.stdout + done.stderr) == (code, said)


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
