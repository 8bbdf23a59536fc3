"""Which Pulumi command line is taken, and how one is built: with a Go of the tests' own that compiles nothing."""

import stat
from pathlib import Path

import pytest

from tools import go, pulumi_cli
from tools.pulumi_cli import PulumiCliError

WANTED = pulumi_cli.wanted_version()

GO = r"""#!/bin/sh
case "$1" in
  env) echo go1.26.8 ;;
  list) echo "$SDK" ;;
  build)
    echo build >> "$BUILDS"
    if [ -n "$GO_FAILS" ]; then
      for n in $(seq 1 30); do echo "line $n" >&2; done
      exit 1
    fi
    while [ "$1" != "-o" ]; do shift; done
    printf '#!/bin/sh\necho v%s\n' "$BUILT_VERSION" > "$2"
    chmod +x "$2" ;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def pulumi(folder: Path, version: str) -> Path:
    return script(folder / "pulumi", f"#!/bin/sh\necho {version}\n")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A machine with Go and without Pulumi."""
    script(tmp_path / "go" / "go", GO)
    for name, folder in pulumi_cli.SCRIPTS.items():
        (tmp_path / "sdk" / folder).mkdir(parents=True)
        (tmp_path / "sdk" / folder / name).write_text("#!/bin/sh\n")
    return {
        "PATH": f"{tmp_path / 'go'}:/usr/bin:/bin",
        "HOME": str(tmp_path / "home"),
        "SDK": str(tmp_path / "sdk"),
        "BUILDS": str(tmp_path / "builds"),
        "BUILT_VERSION": WANTED,
    }


@pytest.fixture
def said() -> list[str]:
    return []


def builds(tmp_path: Path) -> int:
    path = tmp_path / "builds"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_new_enough_pulumi_on_path_is_taken_with_its_scripts_behind_a_link_too(
    tmp_path: Path, environ: dict[str, str], said: list[str]
) -> None:
    real = pulumi(tmp_path / "opt", "v99.0.0")
    script(tmp_path / "opt" / pulumi_cli.DYNAMIC, "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pulumi").symlink_to(real)
    environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
    found = pulumi_cli.find_or_build(environ, said.append)
    assert (found.command, found.version) == (tmp_path / "bin" / "pulumi", "99.0.0")
    assert (found.dynamic_folder, found.language_host) == (tmp_path / "opt", None)
    host = script(tmp_path / "bin" / pulumi_cli.LANGUAGE_HOST, "")
    assert pulumi_cli.find_or_build(environ, said.append).language_host == host
    assert (builds(tmp_path), said) == (0, [])


@pytest.mark.parametrize(
    ("answer", "dynamic", "reason"),
    [
        ("v3.100.0", True, "is pulumi 3.100.0, and"),
        ("nonsense", True, "is no pulumi that answers"),
        (f"v{WANTED}", False, "beside it or on PATH"),
    ],
)
def test_a_pulumi_that_will_not_do_is_left_aside_with_the_reason(
    tmp_path: Path, environ: dict[str, str], said: list[str], answer: str, dynamic: bool, reason: str
) -> None:
    pulumi(tmp_path / "bin", answer)
    if dynamic:
        script(tmp_path / "bin" / pulumi_cli.DYNAMIC, "")
    environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
    found = pulumi_cli.find_or_build(environ, said.append)
    assert found.folder == pulumi_cli.cache_home(environ)
    assert reason in said[0]


def test_a_build_that_fails_or_is_of_another_version_leaves_nothing_and_the_next_one_starts_anew(
    environ: dict[str, str], said: list[str]
) -> None:
    home = pulumi_cli.cache_home(environ)
    (home.with_name(f"{home.name}.new")).mkdir(parents=True)  # of a build that was killed
    for wrong, shown in (
        ({"GO_FAILS": "yes"}, "(?s)line 11\n.*line 30\n.*GOPROXY"),
        ({"BUILT_VERSION": "1.2.3"}, r"answers '1\.2\.3'"),
    ):
        with pytest.raises(PulumiCliError, match=shown):
            pulumi_cli.find_or_build({**environ, **wrong}, said.append)
        assert [path.suffix for path in home.parent.iterdir()] == [".lock"]
    assert pulumi_cli.find_or_build(environ, said.append).folder == home


def test_a_go_is_found_in_its_usual_place_and_without_one_the_error_says_what_to_install(
    tmp_path: Path, environ: dict[str, str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(go, "OTHER_PLACES", (str(tmp_path / "go" / "go"),))
    assert pulumi_cli.find_go({**environ, "PATH": "/nonexistent"}) == str(tmp_path / "go" / "go")
    monkeypatch.setattr(go, "OTHER_PLACES", ())
    with pytest.raises(PulumiCliError, match=f"{WANTED} or newer, or Go 1.21 or newer.*too old"):
        pulumi_cli.find_or_build({**environ, "PATH": "/nonexistent"}, said.append)
    script(tmp_path / "old" / "go", "#!/bin/sh\necho go1.19.8\n")
    with pytest.raises(PulumiCliError, match=r"old/go \(go1\.19\.8\)"):
        pulumi_cli.find_or_build({**environ, "PATH": str(tmp_path / "old")}, said.append)
