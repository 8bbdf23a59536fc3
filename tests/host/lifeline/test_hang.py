"""A run that hangs is ended with what every process was doing, and a bucket gets to know it all."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.host.lifeline.hosts import LIVE, SIZE, Hosts


def test_a_stopped_process_is_found_and_its_run_is_hung_with_the_stacks_of_all(hosts: Hosts) -> None:
    answering = """
import faulthandler
faulthandler.register(signal.SIGUSR1, file=open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "a"))
"""
    follow = """
stopped = run_dir + "/stopped"
for number in range(1, 10**6):
    while os.path.exists(stopped) and number > 30:
        beat_again()
    beat("stepping", number)
    if number == 30: say("up")
    time.sleep(0.05)
"""
    again = """
def beat_again():
    path = os.environ["RUN_CONTROL_DIR"] + "/heartbeat.json"
    with open(path) as file:
        found = json.load(file)
    with open(path + ".new", "w") as file:
        json.dump(dict(found, time=time.time()), file)
    os.replace(path + ".new", path)
    time.sleep(0.5)
"""
    hosts.start_all(answering + again + follow, hang_floor_s=7)
    hosts.kill(2, signal.SIGSTOP)
    (hosts.run_dir / "stopped").touch()
    entries = hosts.ended()
    result = hosts.result()
    assert (result["outcome"], result["failed_host"]) == ("hung", 2)
    assert result["error"].startswith("host 2 stood still at step ")
    assert f"{hosts.run_dir}/stacks/0" in result["error"]
    texts = [(hosts.run_dir / f"stacks/0/host-{rank}.txt").read_text() for rank in range(SIZE)]
    assert all("beat_again" in texts[rank] for rank in (0, 1, 3))
    assert "did not answer SIGUSR1" in texts[2]
    assert "T (stopped)" in texts[2]
    assert entries[0]["reason"].startswith("stopped because the run hung: host 2 stood still")
    beats = [hosts.agents[rank].heartbeat(rank) for rank in range(SIZE)]
    assert {beat["state"] for beat in beats} == {"failed"}
    assert [beat["exit_code"] for beat in beats] == [76, 76, None, 76]
    assert beats[2]["message"].startswith("host 2 stood still at step ")


def test_in_a_bucket_the_supervisors_deliver_heartbeats_logs_and_the_result(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    hosts = Hosts(tmp_path, bucket, size=2)
    for folder in ("heartbeats", "logs/0"):
        (bucket / folder).mkdir(parents=True)
    for rank, script in enumerate((LIVE, "step(8); sys.exit(3)")):
        request = hosts.agents[rank].start_request("", rank)
        env = {**request["env"], "RUN_DIR": f"file://{bucket}", "PYTHONPATH": str(Path(__file__).parents[3])}
        log = str(tmp_path / f"host-{rank}.log")
        hosts.start(rank, script, run_dir=None, env=env, log_path=log)
    hosts.ended()
    assert hosts.result()["error"].startswith("host 1: exit code 3")
    assert hosts.agents[0].heartbeat(0)["exit_code"] == 76
    assert hosts.agents[1].heartbeat(1)["message"] == "exit code 3: up"
    assert [(bucket / f"logs/0/host-{rank}.log").read_text() for rank in range(2)] == ["up\n", "up\n"]
