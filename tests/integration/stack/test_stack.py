"""`rollgrid up`: everything starts, a killed part comes back, what was accepted is finished, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator

import pytest
from rollgrid.stack.home import find_stack

from tests.integration.stack.stack_process import ROLLGRID, Stack, living, sessions_of, stack
from tests.support.processes import free_port
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PARTS = ("nats", "valkey", "s3", "checkpoint-sync", "trajectory-logger", "scorer", "sampler-0", "ingest")
SLOW_TOKENS = {
    "ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "20",
    "ROLLGRID_SAMPLER_SCRIPTED_EOS_RATE": "0",
    "ROLLGRID_NATS_ACK_WAIT_S": "5",
}
"""16 tokens take 0.8 s: there is work in flight when a part is killed, and it is soon delivered again."""


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    with stack(**SLOW_TOKENS) as found:
        found.up()
        yield found


def test_status_shows_every_part_ready_with_its_queues(running: Stack) -> None:
    report = running.status()
    assert report["ready"]
    assert [part["name"] for part in report["parts"]] == list(PARTS)
    assert {part["state"] for part in report["parts"]} == {"ready"}
    versions = {part["name"]: part["version"] for part in report["parts"]}
    assert all(versions[name][0].isdigit() for name in ("nats", "valkey", "s3"))
    assert report["workers"][0]["loaded"][0]["version"] == 0
    assert "RG_JOBS" in report["queues"]
    assert running.run("status").returncode == 0


def test_secrets_are_private_and_never_in_a_command_line(running: Stack) -> None:
    for name in ("credentials.json", "stack.json", "conf/nats.conf", "conf/valkey.conf", "conf/keys.json"):
        assert stat.S_IMODE((running.home / name).stat().st_mode) == 0o600, name
    assert stat.S_IMODE(running.home.stat().st_mode) == 0o700
    secrets = json.loads((running.home / "credentials.json").read_text())
    command_lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not [
        name
        for name in ("nats_password", "redis_password", "s3_secret_key", "api_key")
        if secrets[name] in command_lines
    ]
    assert secrets["redis_password"] not in json.dumps(running.status())


def test_the_servers_listen_on_loopback_only(running: Stack) -> None:
    pids = {str(pid) for pid in running.state().pids.values()}
    listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout.splitlines()
    ours = [line.split()[3] for line in listening if any(f"pid={pid}," in line for pid in pids)]
    assert len(ours) >= len(PARTS)
    assert all(address.startswith("127.0.0.1:") for address in ours)


def test_a_second_up_says_that_one_runs(running: Stack) -> None:
    again = running.run("up", "--engine", "scripted")
    assert again.returncode != 0
    assert "already runs" in again.stderr


@pytest.mark.parametrize("name", PARTS)
def test_a_killed_part_comes_back_and_the_batch_completes(running: Stack, name: str) -> None:
    running.wait_ready()
    with running.client() as client:
        batch = client.submit(
            [{"prompt": f"task {i}", "task": {"answer": "x"}} for i in range(12)], n=4, policy="tiny",
            sampling={"max_tokens": 16}, scorers=["exact_match"], run=f"kill-{name}",
        )  # fmt: skip
        victim = running.process(name)
        assert victim is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: running.process(name) not in (None, victim), 60, f"{name} runs again")
        groups = list(batch.groups(timeout=120))
        assert sorted(group.position for group in groups) == list(range(12))
        assert {tuple(group.counts.items()) for group in groups} == {(("succeeded", 4),)}
    running.wait_ready()
    assert not living([victim.pid])
    events = [json.loads(line) for line in (running.home / "logs" / "events.log").read_text().splitlines()]
    seen = [(event["event"], event["level"]) for event in events if event.get("part") == name]
    assert ("part_restarting", "warning") in seen
    assert seen.index(("part_restarting", "warning")) < max(i for i, line in enumerate(seen) if line[0] == "part_ready")


def test_down_leaves_no_process_and_up_goes_on_with_what_was_open() -> None:
    with stack(**SLOW_TOKENS) as found:
        state = found.up()
        with found.client() as client:
            batch = client.submit(["one", "two"], n=2, policy="tiny", sampling={"max_tokens": 900}, run="kept")
        supervisor, sessions = state.supervisor, sessions_of(state)
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not living(sessions), 20, "all parts die with their supervisor")
        assert find_stack(found.home) is None
        again = found.up()
        assert again.api_key == state.api_key
        with found.client() as client:
            client.batch(batch.batch_id).cancel()
            done = client.submit(["three"], n=1, policy="tiny", sampling={"max_tokens": 4}, run="kept")
            assert [group.counts for group in done.groups(timeout=60)] == [{"succeeded": 1}]
            kept = {group.id: group.counts for group in client.trajectories("kept", follow=False)}
        assert [kept[group_id] for group_id in batch.group_ids] == [{"cancelled": 2}] * 2
        answer = found.down()
        assert answer.returncode == 0
        assert not living(sessions_of(again))
        assert not again.supervisor.alive
        assert not (found.home / "stack.json").exists()
        assert found.run("status").returncode != 0


def test_ctrl_c_drains_in_front_and_a_leftover_state_file_is_no_stack() -> None:
    with stack() as found:
        front = subprocess.Popen(
            [ROLLGRID, "up", "--engine", "scripted", "--port", str(free_port()), "--json"],
            env=found.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=found.home.parent,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert front.stdout is not None
            ready = json.loads(front.stdout.readline())
            assert find_stack(found.home) is not None
            front.send_signal(signal.SIGINT)
            assert front.wait(90) == 0
            assert not living(list(ready["pids"].values()))
        finally:
            front.kill()
            front.communicate()


def test_a_part_that_cannot_start_fails_the_start_with_its_log() -> None:
    with stack(ROLLGRID_SCORER_WORKERS="none") as found:
        answer = found.run("up", "--engine", "scripted", "--detach")
        assert answer.returncode != 0
        assert "scorer cannot be started" in answer.stderr
        assert "workers" in answer.stderr
        assert find_stack(found.home) is None
