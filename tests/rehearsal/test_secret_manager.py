"""The simulated Secret Manager gives hosts the secrets of its folder, and tells a launch which ones it lacks."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from contracts.errors import RequestError
from contracts.host_interface import SECRET_MANAGER
from jobs.runtime.ranks.secret_values import take
from launch.request.run_environment import check_references
from launch.targets import Secret
from rehearsal.simulator.http_server import SimulatorServer
from rehearsal.simulator.secret_manager import SecretManager


def test_a_secret_of_the_folder_is_read_by_hosts_and_one_that_is_not_there_is_refused_at_a_launch(
    tmp_path: Path,
) -> None:
    (tmp_path / "my-project").mkdir()
    (tmp_path / "my-project" / "token").write_text("hunter2!\n")
    sources = {
        "TOKEN": "sm://my-project/token",
        "OTHER": "sm://my-project/gone",
        "OLD": "sm://my-project/token/7",
    }
    secrets = {name: Secret(source=source) for name, source in sources.items()}
    with SimulatorServer({"/": SecretManager(tmp_path)}) as simulator:
        environ = {SECRET_MANAGER: simulator.url}
        assert take({"TOKEN": sources["TOKEN"]}, environ) == {"TOKEN": "hunter2!"}
        with pytest.raises(
            RequestError, match="--secret OTHER=sm://my-project/gone: Secret Manager answers 404"
        ):
            take({"OTHER": sources["OTHER"]}, environ)
        with pytest.raises(RequestError) as refused:
            check_references({**secrets, "SHELLED": Secret(source="shell", value="hunter2!")}, environ)
        assert re.findall(r"--secret (\w+)=", str(refused.value)) == ["OTHER", "OLD"]
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(f"{environ[SECRET_MANAGER]}/v1/projects/my-project/secrets")
        assert json.load(answer.value)["error"]["status"] == "UNIMPLEMENTED"
        (tmp_path / "my-project" / "gone").write_text("back again")
        check_references({"OTHER": secrets["OTHER"]}, environ)
    check_references(secrets, environ)  # nobody answers: the hosts may know more
