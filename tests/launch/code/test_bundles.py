"""What is sent of a folder: every file as it is, without secrets, and what is left out is named with its reason."""

import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from contracts.run_directory import CODE, FOLDER, RunDirectory
from host.agent.storage.host_files import write_file
from host.agent.storage.staged_bundles import bundle_dir, stage, unpack
from infra.documents import ABSENT, Documents
from launch import jobs
from launch.code import bundles
from launch.code.bundles import (
    FOLDER_SECRET,
    Bundle,
    archive,
    bundle_folder,
    is_secret,
    left_out_lines,
    named_in,
)

KEY = b"-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----\n"
ACCOUNT = b'{"type": "service_account", "project_id": "p", "private_key": "x"}'

HARMLESS_NAMES = """
    .env.template sample.env environment.yml env.py .ssh/known_hosts tokenization.py keys.py monkey
"""
SECRET_NAMES = """
    .env deploy/.ENV.local .env~ .envrc prod.env .aws/credentials home/.aws/credentials .ssh/id_rsa
    id_ed25519 id_ecdsa_sk.bak .netrc _netrc .pypirc .npmrc .git-credentials
    .config/gcloud/legacy_credentials/a@b/adc.json .config/gcloud/credentials.db
    application_default_credentials.json client_secret_123.json .kube/config gke-kubeconfig.yaml
    .docker/config.json .huggingface/token .cache/huggingface/token token hf_token.txt
    .streamlit/secrets.toml kaggle.json server.key store.p12
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"") for name in SECRET_NAMES.split()),
        ("server.pem", KEY),
        ("notes.txt", b"see\n" + KEY),
        ("key.yaml", b"key: |\n  -----BEGIN PRIVATE KEY-----\n  MIIE\n"),
        ("settings.py", rb'KEY = "-----BEGIN PRIVATE KEY-----\nMIIEpAIBAAKCAQEA"'),
        ("open", b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjE\n"),
        ("secret.asc", b"-----BEGIN PGP PRIVATE KEY BLOCK-----\r\n\r\nlQdG\r\n"),
        ("robot.json", ACCOUNT),
        ("spaced.json", b"\xef\xbb\xbf\n" + ACCOUNT.replace(b": ", b" :\n")),
        ("adc.json", b'{"refresh_token": "1//x", "type": "authorized_user"}'),
        ("aws.ini", b"[default]\naws_secret_access_key = wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY\n"),
        ("cluster.yaml", b"users:\n- user:\n    client-key-data: LS0tLS1CRUdJTiBSU0EgUFJJ\n"),
        ("login", b"hf_abcdefghijklmnopqrstuvwxyzABCDEFGH\n"),
    ],
)
def test_a_secret_is_recognised_by_its_name_or_its_content(name: str, content: bytes) -> None:
    assert is_secret(name, content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"") for name in HARMLESS_NAMES.split()),
        (".env.example", b"TOKEN=\n"),
        (".ssh/id_rsa.pub", b"ssh-rsa AAAA"),
        (".aws/config", b"[default]\nregion = us-central1\n"),
        ("ca.pem", b"-----BEGIN CERTIFICATE-----\nMIID\n"),
        ("public.key", b"-----BEGIN PUBLIC KEY-----\nMIIB\n"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}'),
        ("tokens.txt", b"[PAD]\n[UNK]\n"),
        ("special_tokens_map.json", b"{}"),
        ("pem.py", b'MARKER = ("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----")\n'),
        ("reader.py", b"aws_secret_access_key = os.environ['AWS_SECRET_ACCESS_KEY']\n"),
        ("README.md", b'A key has `"type": "service_account"` and a `"private_key"`.\n'),
        ("account.json", b'{"type": "service_account", "name": "p"}'),
        ("secrets.json.example", b"{}"),
        ("commit.txt", b"da39a3ee5e6b4b0d3255bfef95601890afd80709\n"),
    ],
)
def test_a_harmless_file_is_not_taken_for_a_secret(name: str, content: bytes) -> None:
    assert not is_secret(name, content)


def write(folder: Path, **files: bytes) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, timeout=30, capture_output=True)


@pytest.mark.parametrize("is_checkout", [True, False])
def test_secrets_of_a_folder_are_left_out_and_named_unless_they_are_asked_for(
    tmp_path: Path, is_checkout: bool
) -> None:
    folder = tmp_path / "project"
    secrets = {".env": b"A=1", ".aws/credentials": b"x", "deploy.pem": KEY}
    write(
        folder,
        **secrets,
        **{"train.py": b"", ".env.example": b"A="},
        **{".gitignore": b"hidden\n", "hidden": KEY},
    )
    (folder / "link.txt").symlink_to(folder / ".env")
    if is_checkout:
        git(folder, "init", "-q")
        git(folder, "add", "-A")
    sent = bundle_folder(folder)
    assert sent.names == {"train.py", ".env.example", ".gitignore"}
    assert [*left_out_lines([archive({}), sent])] == [
        f"not sent of your folder: .aws/credentials, .env, deploy.pem, link.txt ({FOLDER_SECRET})",
        f"not sent of your folder: hidden (1 file, {len(KEY)} B) (git ignores it; `--send hidden` sends it)",
    ]
    asked = named_in(folder, [".env,deploy.pem", str(folder / "hidden"), ".env"])
    assert asked == (".env", "deploy.pem", "hidden")
    sent = bundle_folder(folder, asked)
    assert {".env", "deploy.pem", "hidden"} <= sent.names
    assert sent.left_out == dict.fromkeys([".aws/credentials", "link.txt"], FOLDER_SECRET)
    for wrong, said in (
        ("nope", "there is no such file"),
        ("nope/[*][*]", "matches no file"),
        ("../x", "is not in"),
    ):
        with pytest.raises(RequestError, match=f"--send {wrong}: {said}"):
            named_in(folder, [wrong.replace("[*]", "*")])


def test_folders_and_patterns_send_what_git_ignores_but_no_secret(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            ".gitignore": b"data/\nout\n__pycache__/\n",
            "train.py": b"",
            "out": b"x" * 2048,
            "data/.env": b"A=1",
        },
        **{
            "data/shakespeare/train.bin": b"1",
            "data/shakespeare/val.bin": b"22",
            "data/__pycache__/x.pyc": b"",
        },
    )
    sent = bundle_folder(tmp_path)
    assert sent.names == {".gitignore", "train.py"}
    assert sent.ignored == {"data/": (3, 6), "out": (1, 2048)}
    assert [*left_out_lines([archive({}), sent])] == [
        "not sent of your folder: out (1 file, 2.0 KiB), data/ (3 files, 6 B) (git ignores it; `--send out` sends it)"
    ]
    for text, pattern in (
        ("data", "data/**"),
        ("data/**", "data/**"),
        ("data/*/train.bin", "data/*/train.bin"),
    ):
        assert named_in(tmp_path, [text]) == (pattern,)
    sent = bundle_folder(tmp_path, ["data/**"])
    assert sent.names == {".gitignore", "train.py", "data/shakespeare/train.bin", "data/shakespeare/val.bin"}
    assert sent.left_out == {"data/.env": FOLDER_SECRET}
    assert sent.ignored == {"out": (1, 2048)}
    assert bundle_folder(tmp_path, ["data/.env", "data/*/train.bin"]).names > {"data/.env"}


def test_secrets_of_the_checkout_are_not_in_the_code_that_is_sent(tmp_path: Path) -> None:
    write(tmp_path, **{"jobs/one/__main__.py": b"", "jobs/one/.env": b"A=1", "host/robot.json": ACCOUNT})
    sent = jobs.bundle(tmp_path)
    assert sent.names == {"jobs/one/__main__.py"}
    assert [*left_out_lines([sent])] == [
        "not sent of our code: host/robot.json, jobs/one/.env (may hold a secret)"
    ]


@pytest.mark.parametrize("is_checkout", [True, False])
def test_what_cannot_be_sent_is_named_with_its_reason_and_every_name_travels(
    tmp_path: Path, is_checkout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    odd = [os.fsdecode(b"caf\xe9.txt"), "line\nbreak", "é", "-rf", " ", "a" * 200 + "/" + "b" * 200]
    write(folder, **{name: name.encode(errors="surrogateescape") for name in odd})
    write(folder, **{"sub/inner.py": b"", "sub/.gitignore": b"*.tmp\n", "sub/x.tmp": b"", "bare/file": b""})
    write(folder, **{"closed/file": b"", "ignored/file": b"", ".gitignore": b"ignored\n"})
    write(folder, **{"some/a.tmp": b"", "some/b": b""})
    git(folder / "sub", "init", "-q")
    git(folder / "bare", "init", "-q", "--bare", ".git")  # no work tree: looked at by itself
    (folder / "inside").symlink_to("sub/inner.py")
    (folder / "outside").symlink_to(tmp_path / "elsewhere")
    write(tmp_path, elsewhere=b"elsewhere")
    for link, to in {"dangling": "nowhere", "circle": "circle", "up": "..", "proc": "/proc/self/mem"}.items():
        (folder / link).symlink_to(to)
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "some" / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(folder)
        server.bind("socket")
    if is_checkout:
        git(folder, "init", "-q")
        git(folder, "submodule", "--quiet", "add", str(_repository(tmp_path / "library")), "vendor")
        git(folder, "submodule", "--quiet", "deinit", "--force", "vendor")
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if str(path).endswith("/closed"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr("os.scandir", closed)
    sent = bundle_folder(folder)
    submodules = {"vendor": "a submodule that is not checked out; `git submodule update --init` does that"}
    assert sent.left_out == {
        "dangling": "a link to nothing",
        "circle": "cannot be read: Too many levels of symbolic links",
        "up": "a link to a folder",
        "proc": "cannot be read: Input/output error",
        "pipe": "a named pipe",
        "some/pipe": "a named pipe",
        "socket": "a socket",
        "closed": "cannot be read: Permission denied",
        **(submodules if is_checkout else {}),
    }
    plain = [
        "sub/inner.py",
        "sub/.gitignore",
        "bare/file",
        "inside",
        "outside",
        ".gitignore",
        "some/b",
        "some/a.tmp",
    ]
    assert sent.names == {*odd, *plain, *([".gitmodules"] if is_checkout else [])}
    monkeypatch.undo()
    (tmp_path / "archive").write_bytes(sent.archive)
    unpack(str(tmp_path / "archive"), str(tmp_path / "there"))
    for name in odd:
        assert (tmp_path / "there" / name).read_bytes() == name.encode(errors="surrogateescape")
    assert (tmp_path / "there" / "outside").read_bytes() == b"elsewhere"
    assert not (tmp_path / "there" / "outside").is_symlink()
    assert Bundle.from_text(sent.text, sent.sha256) == sent


def _repository(folder: Path) -> Path:
    write(folder, **{"library.py": b""})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a")
    return folder


def test_a_large_folder_is_compressed_in_pieces_and_is_the_same_bundle_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{number}.bin": bytes([number]) * 700 for number in range(9)}
    whole = archive(files)
    monkeypatch.setattr(bundles, "LARGE_BYTES", 1000)
    packed = archive(files)
    assert packed == archive(files)
    assert packed.sha256 != whole.sha256  # of several members
    (tmp_path / "packed").write_bytes(packed.archive)
    unpack(str(tmp_path / "packed"), str(tmp_path / "tree"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "tree").iterdir()} == files


def test_a_fabignore_leaves_out_tracked_files_and_those_of_submodules_and_of_repositories_inside(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "project"
    write(
        folder,
        **{"train.py": b"", "docs/a.md": b"four", "docs/b/c.md": b"", "keep.bin": b"", "a\n.bin": b"12"},
    )
    write(folder, **{"part/.fabignore": b"/only.here\n", "part/only.here": b"1", "part/b/only.here": b""})
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "submodule", "--quiet", "add", str(_repository(tmp_path / "library")), "vendor/one")
    git(folder, "submodule", "--quiet", "add", str(_repository(tmp_path / "gone")), "vendor/gone")
    git(folder, "submodule", "--quiet", "deinit", "--force", "vendor/gone")
    write(folder, **{"nested/inner.py": b"", "nested/data/x": b"123", ".env": b"A=b"})
    git(folder / "nested", "init", "-q")
    (folder / "link").symlink_to("docs")
    assert {"docs/a.md", "vendor/one/library.py", "nested/data/x"} < bundle_folder(folder).names
    assert {*bundle_folder(folder).left_out} == {"link", "vendor/gone", ".env"}
    rules = [
        "docs/",
        "*.bin",
        "!keep.bin",
        "/vendor/*/library.py",
        "nested/data",
        "vendor/gone/",
        "link",
        ".env",
    ]
    write(folder, **{".fabignore": "\n".join(rules).encode()})
    sent = bundle_folder(folder)
    ours = {".fabignore", "part/.fabignore", ".gitmodules"}
    assert sent.names == {*ours, "train.py", "keep.bin", "part/b/only.here", "nested/inner.py"}
    assert sent.left_out == {}
    assert sent.fab_ignored == {
        "docs/": (2, 4),
        "a\n.bin": (1, 2),
        "vendor/": (1, 0),
        "nested/data/": (1, 3),
        ".env": (1, 3),
        "part/only.here": (1, 1),
    }
    (line,) = left_out_lines([archive({}), sent])
    assert line == (
        "not sent of your folder: docs/ (2 files, 4 B), .env (1 file, 3 B), nested/data/ (1 file, 3 B) and 3 more "
        "(.fabignore names it; `--send 'docs/**'` sends it)"
    )
    sent = bundle_folder(folder, ["docs/**", ".env"])
    assert sent.names > {"docs/a.md", "docs/b/c.md", ".env"}
    assert {"docs/", ".env"} & sent.fab_ignored.keys() == set()


def test_others_cannot_read_a_bundle_on_a_host_in_a_run_directory_or_in_a_queue(tmp_path: Path) -> None:
    sent = archive({"train.py": b""})
    request = {
        "root": str(tmp_path),
        "sha256": sent.sha256,
        "archive_base64": sent.text,
        "archive_path": None,
    }
    request |= {"offset": None, "size_bytes": None}
    stage(request)
    there = Path(bundle_dir(str(tmp_path), sent.sha256))
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    there.chmod(0o755)  # as an earlier version left it
    stage(request)
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    run = RunDirectory(str(tmp_path / "run"))
    run.write_text(CODE, sent.text)
    write_file({"path": run.path(FOLDER), "text": sent.text, "offset": None})
    run.write_text("run.json", "{}")
    Documents(str(tmp_path / "queue")).write("bundles/one.json", {}, version=ABSENT)
    paths = [Path(run.path(CODE)), Path(run.path(FOLDER)), tmp_path / "queue" / "bundles" / "one.json"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600] * 3
    assert stat.S_IMODE(Path(run.path("run.json")).stat().st_mode) & 0o044
