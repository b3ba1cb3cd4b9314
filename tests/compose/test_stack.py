"""The stack in containers, on real vLLM: what a client sees, through restarts and kills of every container."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollgrid import Client

from tests.support.waiting import wait_until

from .project import ROOT, Project

RUN = "compose"
SAMPLING = {"max_tokens": 12, "temperature": 1.0}
LONG = {"max_tokens": 1024, "temperature": 1.0, "ignore_eos": True}
SERVERS = ("nats", "valkey", "seaweedfs")
SERVICES = ("checkpoint-sync", "trajectory-logger", "scorer", "sampler", "ingest")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def client(project: Project) -> Client:
    return Client(project.url, api_key=project.key)


def inside(project: Project, program: str) -> Any:
    """What a program of `inside.py` prints in ingest's container."""
    source = (Path(__file__).with_name("inside.py")).read_bytes()
    answer = project.compose("exec", "--no-TTY", "ingest", "python", "-", program, stdin=source)
    return json.loads(answer.splitlines()[-1])


def test_every_container_is_healthy_and_unprivileged(project: Project) -> None:
    found = project.containers()
    assert set(found) == {*SERVERS, *SERVICES, "volumes"}
    volumes = found.pop("volumes")
    assert volumes["State"]["ExitCode"] == 0
    for name, container in found.items():
        host = container["HostConfig"]
        assert container["State"]["Health"]["Status"] == "healthy", name
        assert not container["Config"]["User"].startswith("0:"), name
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert not host["CapAdd"], name
        published = [binding["HostIp"] for ports in (host["PortBindings"] or {}).values() for binding in ports]
        assert set(published) <= {"127.0.0.1"}, name


def test_no_secret_is_in_an_environment_an_argument_or_an_image(project: Project) -> None:
    secrets = [path.read_text().strip() for path in project.secrets.rglob("*") if path.is_file()]
    plain = [text for text in secrets if "\n" not in text]
    containers = project.containers().values()
    images = {container["Image"] for container in containers}
    seen = json.dumps([container["Config"] for container in containers])
    seen += project.engine.docker("inspect", *images)
    assert not [text for text in plain if text in seen]


def test_rollouts_by_the_cli_are_scored(project: Project, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "3+4=", "answer": "7"}\n')
    argv = [str(Path(sys.executable).with_name("rollgrid")), "rollouts", "submit", str(tasks), "-n", "4", "--json"]
    argv += ["--max-tokens", "8", "--scorer", "exact_match", "--run", RUN, "--idempotency-key", "by-the-cli"]
    env = {**os.environ, "ROLLGRID_URL": project.url, "ROLLGRID_API_KEY": project.key}
    answer = subprocess.run(argv, check=False, capture_output=True, text=True, env=env, timeout=120)
    assert answer.returncode == 0, answer.stderr
    events = [json.loads(line) for line in answer.stdout.splitlines()]
    groups = [event for event in events if event["event"] == "group"]
    assert len(groups) == 2
    scores = [score for group in groups for entry in group["entries"] for score in entry["scores"]]
    assert len(scores) == 8
    assert all(score["value"] in (0.0, 1.0) for score in scores)


def test_one_of_many_conditional_writes_wins(project: Project) -> None:
    first, *others = inside(project, "conditional")
    assert first == 200
    assert set(others) == {412}


def test_a_restart_of_every_container_loses_nothing(project: Project, client: Client) -> None:
    """In turn, while a batch is in hand; what had closed is still there, and the batch ends whole."""
    before = [group.id for group in client.submit(["a", "b"], n=2, sampling=SAMPLING, run=RUN).groups(timeout=120)]
    batch = client.submit(["c", "d", "e", "f"], n=16, sampling=LONG, run=RUN, deadline_s=600)
    _wait_for_the_sampler(client)
    for name in ("sampler", *SERVERS, *(name for name in SERVICES if name != "sampler")):
        project.compose("restart", "--timeout", "30", name)
    project.up()
    _ends_whole(batch.groups(timeout=300), 4, 16)
    assert set(before) <= {group.id for group in client.trajectories(RUN, follow=False, timeout=60)}


def test_killed_servers_keep_what_they_acknowledged(project: Project, client: Client) -> None:
    _ends_whole(client.submit(["g"], n=2, sampling=SAMPLING, run=RUN).groups(timeout=120), 1, 2)
    stored = inside(project, "objects")
    batch = client.submit(["h", "i", "j", "k"], n=16, sampling=LONG, run=RUN, deadline_s=600)
    _wait_for_the_sampler(client)
    project.compose("kill", *SERVERS)
    project.up()
    _ends_whole(batch.groups(timeout=300), 4, 16)
    found = inside(project, "objects")
    assert stored
    assert {key: found.get(key) for key in stored} == stored


def test_a_killed_sampler_s_work_is_done_by_the_next(project: Project, client: Client) -> None:
    batch = client.submit(["l", "m", "n", "o"], n=16, sampling=LONG, run=RUN, deadline_s=600)
    _wait_for_the_sampler(client)
    project.compose("kill", "sampler")
    assert project.containers()["sampler"]["State"]["ExitCode"] == 137
    assert not batch.status().done
    project.up("sampler")
    _ends_whole(batch.groups(timeout=300), 4, 16)


def test_a_crashed_service_comes_back_by_itself(project: Project, client: Client) -> None:
    everything = "import os, signal; os.kill(-1, signal.SIGKILL)"
    started = project.containers()["scorer"]["State"]["StartedAt"]
    project.compose("exec", "--no-TTY", "scorer", "python", "-c", everything, may_fail=True)
    project.up("scorer")
    again = project.containers()["scorer"]
    assert again["RestartCount"] == 1
    assert again["State"]["StartedAt"] > started
    groups = client.submit(["p"], n=2, sampling=SAMPLING, scorers=["exact_match"], run=RUN).groups(timeout=120)
    _ends_whole(groups, 1, 2)


def test_the_openai_suite_passes(project: Project) -> None:
    """The half of the suite that asks rollgrid; what needs the processes of a stack of its own is skipped there."""
    env = {**os.environ, "ROLLGRID_SUITE_URL": project.url, "ROLLGRID_SUITE_KEY": project.key}
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "tests/openai_suite",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not vllm-serve",
    ]
    answer = subprocess.run(argv, check=False, capture_output=True, text=True, env=env, cwd=ROOT, timeout=600)
    assert answer.returncode == 0, answer.stdout[-8000:]
    assert int(re.search(r"(\d+) passed", answer.stdout)[1]) >= 20  # type: ignore[index]


def test_the_queue_examples_run(project: Project) -> None:
    """As a tenant's own NATS user: a batch is published, its trajectories are followed."""
    env = {**os.environ, "NATS_URL": f"nats://127.0.0.1:{project.nats_port}", "TENANT": "local", "NATS_USER": "local"}
    env["NATS_PASSWORD"] = (project.tenant / "nats_password").read_text()
    said = [
        subprocess.run(
            [sys.executable, f"examples/{name}.py", *arguments],
            check=True, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120,
        ).stdout
        for name, *arguments in (("queue_publish", "by-queue", "step-1"), ("queue_follow", "2"))
    ]  # fmt: skip
    assert json.loads(said[0])["stream"] == "RG_SUBMIT"
    groups = [json.loads(line) for line in said[1].splitlines()]
    assert [group["run"] for group in groups] == ["by-queue"] * 2
    assert all(len(group["tokens"]) == 4 and all(group["tokens"]) for group in groups)


def test_every_container_ends_by_itself(project: Project) -> None:
    """SIGTERM reaches each program, which drains and says 0."""
    project.compose("stop", timeout_s=180.0)
    codes = {name: container["State"]["ExitCode"] for name, container in project.containers().items()}
    assert codes == dict.fromkeys(codes, 0)


def _wait_for_the_sampler(client: Client) -> None:
    """It has begun with what was submitted."""
    wait_until(lambda: any(worker.busy for worker in client.fleet().workers), 60, "a busy sampler", every_s=0.1)


def _ends_whole(groups: Any, expected: int, n: int) -> None:
    found = list(groups)
    assert len(found) == expected
    for group in found:
        assert [sample.status.value for sample in group.samples] == ["succeeded"] * n, group
