"""A program that runs a tracker's library, under the interpreter that has it, for `console.track`.

A request is a line of JSON on standard input, {"verb": …, "content": …}; the answer is one on standard output,
{"ok": …} or {"error": text}. The library's own output goes to standard error.

    begin    find or create the tracker's run; {"address", "id", "steps": the last step of each metric that it has}
    settings, metrics, files      send these; what the tracker has already is not sent twice
    end      the attempt's outcome and its final metrics
"""

from __future__ import annotations

import contextlib
import glob
import json
import netrc
import os
import re
import shutil
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]  # nothing of this checkout is on the path of the interpreter that has the library

LIMIT_S = "10"
"""For one answer over the network; `console.track` tries again."""
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000
"""Of one request to MLflow, and of one value."""
TAG = "tpu_stack.run"
"""The tag by which MLflow finds a run again."""
STATUS = {"done": "FINISHED", "stopped": "KILLED", "preempted": "KILLED"}


class Mlflow:
    """A run in MLflow's tracking server or database. folder: of a store on this machine, if none is named."""

    is_spent = False
    """Whether only a new process can continue after an error."""

    def __init__(self, folder: str) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", LIMIT_S)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        own = f"sqlite:///{folder}/mlflow.db"
        uri = os.environ.setdefault("MLFLOW_TRACKING_URI", own)
        if uri == own:
            os.makedirs(folder, exist_ok=True)
        self._artifacts = f"file://{urllib.parse.quote(folder)}/artifacts" if uri == own else None
        from mlflow import MlflowClient

        self._client, self._address, self._id = MlflowClient(), public(uri), ""

    def begin(self, run: Mapping[str, Any]) -> Json:
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME") or run["job"]
        experiment = client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment else client.create_experiment(name, self._artifacts)
        )
        runs = client.search_runs([experiment_id], f"tags.`{TAG}` = '{run['run_id']}'", max_results=1)
        if not runs:
            tags = {TAG: run["run_id"], **run["tags"]}
            runs = [client.create_run(experiment_id, int(1000 * run["created_s"]), tags, run["name"])]
        self._id = runs[0].info.run_id
        client.update_run(self._id, status="RUNNING")
        latest = runs[0].data._metric_objs  # `data.metrics` without the steps
        steps = {metric.key: metric.step for metric in latest}
        return {"address": self._address, "id": self._id, "steps": steps}

    def settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        texts = {valid_name(name): short_text(value)[:LONGEST_PARAM] for name, value in settings.items()}
        params = self._client.get_run(self._id).data.params  # MLflow never changes a parameter
        new = [Param(name, text) for name, text in texts.items() if name not in params]
        changed = [RunTag(f"resumed with {n}", t) for n, t in texts.items() if params.get(n, t) != t]
        for at in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self._id, params=new[at : at + MOST_PARAMS])
        self._client.log_batch(self._id, tags=changed)

    def metrics(self, lines: Sequence[tuple[int, float, Mapping[str, float]]]) -> None:
        from mlflow.entities import Metric

        points = [
            Metric(valid_name(name), value, int(1000 * time_s), step)
            for step, time_s, values in lines
            for name, value in values.items()
        ]
        for at in range(0, len(points), MOST_METRICS):
            self._client.log_batch(self._id, metrics=points[at : at + MOST_METRICS])

    def files(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            if os.path.isdir(path):
                self._client.log_artifacts(self._id, path, name)
            else:
                self._client.log_artifact(self._id, path)

    def end(self, ended: Mapping[str, Any]) -> None:
        self._client.set_tag(self._id, "outcome", ended["outcome"])
        self.metrics([(ended["step"], ended["time_s"], ended["final"])])
        self._client.set_terminated(
            self._id, STATUS.get(ended["outcome"], "FAILED"), int(1000 * ended["time_s"])
        )


class Wandb:
    """A run in Weights & Biases or, without a key, in a folder for `wandb sync`.

    W&B confirms what it has only at the end of a session, so each session sends everything. W&B itself skips the steps
    that it has, and the folder is replaced.
    """

    def __init__(self, folder: str) -> None:
        os.environ.setdefault("WANDB_DIR", folder)
        os.environ.setdefault("WANDB_DATA_DIR", folder)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if not has_key():
            os.environ["WANDB_MODE"] = "offline"
        os.makedirs(os.environ["WANDB_DIR"], exist_ok=True)
        self._run: Any = None
        self._run_id = ""
        self._steps: dict[str, int] = {}

    @property
    def is_spent(self) -> bool:
        return self._run is not None

    def begin(self, run: Mapping[str, Any]) -> Json:
        if self._run is not None and os.environ.get("WANDB_MODE") == "offline":
            self._run.finish()  # another attempt, which repeats steps: a new folder, with its values of them
            self._run, self._steps = None, {}
        if self._run is None:
            self._run_id = run["run_id"]
            self._start(run)
        address = self._run.url or os.path.dirname(self._run.dir)
        return {"address": public(address), "id": self._run_id, "steps": self._steps}

    def _start(self, run: Mapping[str, Any]) -> None:
        import wandb

        if os.environ.get("WANDB_MODE") == "offline":
            for old in glob.glob(
                f"{glob.escape(os.environ['WANDB_DIR'])}/wandb/offline-run-*-{run['run_id']}"
            ):
                shutil.rmtree(old)
        private = {"x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "tpu-stack",
            id=run["run_id"],
            name=run["name"],
            group=run["job"],
            config={"tags": run["tags"]},
            resume="allow",
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_save_requirements=False,
                init_timeout=3 * float(LIMIT_S),
                **private,
            ),
        )

    def settings(self, settings: Mapping[str, Any]) -> None:
        self._run.config.update(settings, allow_val_change=True)

    def metrics(self, lines: Sequence[tuple[int, float, Mapping[str, float]]]) -> None:
        for step, time_s, values in lines:
            self._run.log({**values, "_timestamp": time_s}, step=step)
            self._steps |= dict.fromkeys(values, step)

    def files(self, paths: Mapping[str, str]) -> None:
        import wandb

        for name, path in paths.items():
            if os.path.isdir(path):
                artifact = wandb.Artifact(f"{self._run_id}-{name}", "model")
                artifact.add_dir(path)
                self._run.log_artifact(artifact)
            else:  # a copy: W&B would take a link to it for the file
                copy = shutil.copy(path, self._run.dir)
                self._run.save(copy, base_path=self._run.dir, policy="now")

    def end(self, ended: Mapping[str, Any]) -> None:
        self._run.summary.update({"outcome": ended["outcome"], **ended["final"]})
        self._run.finish(exit_code=0 if ended["outcome"] == "done" else 1)


TRACKERS: dict[str, type[Mlflow | Wandb]] = {"mlflow": Mlflow, "wandb": Wandb}


def has_key() -> bool:
    """Whether there is a key for W&B, in the environment or in ~/.netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def public(address: str) -> str:
    """Return an address without the user and password that may be in it."""
    parts = urllib.parse.urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else address


def valid_name(name: str) -> str:
    """Return a name that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


def short_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, folder = sys.argv[1:]
    tracker: Mlflow | Wandb | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: Json
        try:
            tracker = tracker or TRACKERS[name](folder)
            answer = {"ok": getattr(tracker, request["verb"])(request["content"])}
        except Exception as error:  # each library has exceptions of its own
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "error" in answer and tracker is not None and tracker.is_spent:
            break


if __name__ == "__main__":
    main()
