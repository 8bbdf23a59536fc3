"""A `docker` on PATH for what no engine can be made to do: a registry that refuses, a daemon that comes up late."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

PROGRAM = """#!{python} -SE
import json, sys
with open({rules!r}) as file:
    rules = json.load(file)
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
line = " ".join(sys.argv[1:])
for rule in rules:
    if line.startswith(rule["begins"]):
        code, out, complaint = rule["answers"].pop(0) if len(rule["answers"]) > 1 else rule["answers"][0]
        with open({rules!r}, "w") as file:
            json.dump(rules, file)
        sys.stdout.write(out)
        sys.stderr.write(complaint)
        sys.exit(code)
sys.exit("no rule for " + line)
"""


class FakeDocker:
    """Answers calls by how they begin; of several answers each is given once, the last for ever."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "bin").mkdir()
        self._rules, self._calls, self._program = folder / "rules", folder / "calls", folder / "bin/docker"
        self._calls.touch()
        names = {"python": sys.executable, "rules": str(self._rules), "calls": str(self._calls)}
        self._program.write_text(PROGRAM.format(**names))
        self._program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder / "bin"))

    def answers(self, rules: dict[str, list[tuple[int, str, str]]]) -> None:
        self._rules.write_text(json.dumps([{"begins": each, "answers": rules[each]} for each in rules]))

    def calls(self, begins: str = "") -> list[str]:
        lines = [" ".join(json.loads(line)) for line in self._calls.read_text().splitlines()]
        return [line for line in lines if line.startswith(begins)]
