"""The variables that a user gives a run: how they are read, which are refused, and that the ranks get the others."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from backends.local.local_backend import on_this_machine
from contracts import process_environment
from contracts.errors import RequestError
from contracts.ranks import decoded
from jobs.runtime.ranks.rank_supervisor import variables
from launch import plan as plans
from launch.request.run_environment import (
    LONGEST_VALUE,
    check,
    read,
    read_secrets,
    require_references,
    secrets_again,
)
from launch.targets import Container, OwnCommand, Plan, Secret

SHELL = {"SHELLED": "from the shell"}
COMMAND = OwnCommand(folder_sha256="cd" * 32, python="/env/bin/python", progress=None, has_layer=False)


def make_plan(
    env: Mapping[str, str],
    framework: str = "jax",
    *,
    of_command: bool = True,
    container: Container | None = None,
) -> Plan:
    return Plan(
        target=on_this_machine(hosts="2", platform="cpu"),
        run_id="command-20261120-214500-abcd",
        job="command" if of_command else "flax_mlm",
        framework=framework,
        run_dir="/runs/one",
        cwd="/",
        bundle_sha256="ab" * 32,
        container=container,
        command=COMMAND if of_command else None,
        env=env,
    )


def test_options_win_over_files_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text('# comment\nexport A="x # y"\nB=1\nC=\nSHELLED\n')
    second.write_text("B=2\n")
    assert read(["D=a=b", "B=3"], [str(first), str(second)], SHELL) == {
        "A": "x # y",
        "B": "3",
        "C": "",
        "D": "a=b",
        "SHELLED": "from the shell",
    }
    assert read(["SHELLED=mine"], [], SHELL) == {"SHELLED": "mine"}


def test_all_that_is_no_variable_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "torn").write_text('A B\nC="not closed\n')
    (tmp_path / "latin").write_bytes(b"A=\xff\n")
    files = [str(tmp_path / name) for name in ("torn", "latin", "none")]
    long = "x" * (LONGEST_VALUE + 1)
    with pytest.raises(RequestError) as refused:
        read(["1A=b", "", "UNSET", f"LONG={long}", "NUL=a\0b", "HF_TOKEN=hf_abcdef"], files, SHELL)
    lines = str(refused.value).splitlines()
    beginnings = [
        f"--env-file {files[0]}, line 1: is neither",
        f"--env-file {files[0]}, line 2: is neither",
        f"--env-file {files[1]}: is not UTF-8; name a text file of lines NAME=VALUE or NAME",
        f"--env-file {files[2]}: cannot be read: No such file",
        "--env 1A: a name has",
        "--env : a name has",
        "--env UNSET: UNSET is not set in this shell",
        "--env HF_TOKEN: HF_TOKEN names a secret",
        "--env LONG: the value has 32,769 characters",
        "--env NUL: the value has a NUL",
    ]
    assert len(lines) == len(beginnings)
    for beginning in beginnings:
        assert any(line.startswith(beginning) for line in lines), beginning


@pytest.mark.parametrize("framework", ["jax", "pytorch", "pytorch_xla", "tensorflow"])
@pytest.mark.parametrize("of_command", [True, False])
def test_what_is_not_refused_reaches_every_rank_as_it_was_given(framework: str, of_command: bool) -> None:
    """Gives every name that the launcher could set, and drops those that are refused."""
    free = make_plan({}, framework, of_command=of_command)
    names = {"FOO", "PYTHONPATH", "OMP_NUM_THREADS", "RUN_OF_MINE", *plans.launcher_names(free)}
    allowed = {}
    for name in names:
        try:
            check(make_plan({name: "mine"}, framework, of_command=of_command))
        except RequestError:
            continue
        allowed[name] = "mine"
    assert {"FOO", "OMP_NUM_THREADS"} <= allowed.keys()
    assert ("PYTHONPATH" in allowed) == of_command
    assert not {"RUN_OF_MINE", "RUN_DIR", "PYTHONDONTWRITEBYTECODE"} & allowed.keys()

    given = make_plan(allowed, framework, of_command=of_command)
    count = plans.preflight(given, 0, now_s=1.0).get("free_ports", 2)
    facts = [{"free_ports": list(range(100, 100 + count)), "home": "/root"}] * 2
    start = plans.start(plans.settled(given, facts, token="t"), 1)
    environment = start["env"]
    if of_command:
        spec = decoded(start["argv"][-1])
        environment = variables(spec, process_environment.read(environment), 0, environment, cpus=2)
    assert {name: environment[name] for name in allowed} == allowed


def test_a_container_is_not_given_what_would_steer_the_client_that_starts_it() -> None:
    box = Container(image="sha256:" + "0" * 64)
    names = {"LD_PRELOAD": "x", "HOME": "/x", "DOCKER_HOST": "x", "FOO": "x"}
    with pytest.raises(RequestError) as refused:
        check(make_plan(names, container=box))
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == [
        "--env LD_PRELOAD",
        "--env HOME",
        "--env DOCKER_HOST",
    ]
    check(make_plan(names))


def test_secrets_come_from_the_shell_from_files_and_from_secret_manager(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text('KEY="line one\nline two"\n')
    secrets = read_secrets(["SHELLED", "MANAGED=sm://my-project/name/3"], [str(file)], SHELL)
    assert secrets == {
        "KEY": Secret(source=f"file:{file}", value="line one\nline two"),
        "SHELLED": Secret(source="shell", value="from the shell"),
        "MANAGED": Secret(source="sm://my-project/name/3"),
    }
    assert "from the shell" not in repr(secrets)
    sources = {name: secret.source for name, secret in secrets.items()}
    assert secrets_again(sources, {}, SHELL) == secrets
    assert (
        secrets_again(sources, {"KEY": Secret(source="shell", value="newer!")}, SHELL)["KEY"].value
        == "newer!"
    )
    with pytest.raises(RequestError, match="KEY, SHELLED: the keeper starts the run without you"):
        require_references(sources, "the keeper")
    require_references({"MANAGED": sources["MANAGED"]}, "the keeper")
    file.write_text("OTHER=abcdefgh\n")
    with pytest.raises(RequestError) as refused:
        secrets_again(sources, {}, {})
    assert "has no KEY" in str(refused.value) and "SHELLED is not set in this shell" in str(refused.value)


def test_a_secret_that_is_none_is_refused_without_its_value(tmp_path: Path) -> None:
    (tmp_path / "torn").write_text("A hunter2 B\n")
    options = ["UNSET", "TYPED=hunter2!!", "SHORT", "1A=sm://my-project/name", "MANAGED=sm://my-project"]
    with pytest.raises(RequestError) as refused:
        read_secrets(options, [str(tmp_path / "torn")], {"SHORT": "hunt"})
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"--secret-file {tmp_path / 'torn'}, line 1",
        "--secret UNSET",
        "--secret TYPED=…",
        "--secret 1A=…",
        "--secret MANAGED=…",
        "--secret SHORT",
    ]
    assert "hunt" not in str(refused.value)
