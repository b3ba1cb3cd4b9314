"""`rollgrid top` against a running fleet: one frame for scripts, a live screen for people, a door that is away."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rollgrid import Client

from tests.support.processes import free_port
from tests.support.stack import POLICY, Stack

PROGRAM = [sys.executable, "-c", "from rollgrid.cli import main; main()", "top"]
PATIENCE_S = 40.0


def environment(url: str, **more: str) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("ROLLGRID_")}
    return {**clean, "ROLLGRID_URL": url, "COLUMNS": "140", "LINES": "50", "TERM": "xterm", **more}


def metrics_options(pipe: Stack) -> list[str]:
    return [
        option for name, process in pipe.services.items() if name != "ingest"
        for option in ("--metrics", f"{name}={process.health_url}")
    ]  # fmt: skip


def test_one_frame_for_a_script_shows_the_whole_fleet(pipe: Stack, client: Client) -> None:
    batch = client.submit(["hi"] * 3, n=2, sampling={"max_tokens": 4}, run="top", policy=POLICY)
    assert len(list(batch.groups(timeout=60))) == 3
    options = ["--once", "--json", "--interval", "0.5", *metrics_options(pipe)]
    done = subprocess.run([*PROGRAM, *options], env=environment(pipe.url), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    frame = json.loads(done.stdout)
    assert {worker["worker"][:7] for worker in frame["workers"]} == {"sampler"}
    assert {tuple(worker["loaded"]) for worker in frame["workers"]} == {(f"{POLICY}@0",)}
    assert sum(worker["samples_total"] for worker in frame["workers"]) >= 6
    assert all(worker["tokens_per_s"] is not None for worker in frame["workers"])
    assert {queue["stream"] for queue in frame["queues"]} >= {"RG_JOBS", "RG_SAMPLES", "RG_TRAJECTORIES"}
    assert frame["ledger"]["epoch"] >= 1
    assert frame["ledger"]["open_groups"] == 0
    assert frame["samples"]["statuses"]["succeeded"] >= 6
    assert frame["samples"]["useful_per_s"] is not None
    assert frame["ingest"]["requests_per_s"] > 0  # its own looks
    assert set(frame["services"]) == set(pipe.services)


def test_without_the_services_doors_the_frame_comes_from_the_fleet_alone(pipe: Stack) -> None:
    done = subprocess.run([*PROGRAM, "--once"], env=environment(pipe.url), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("sampler-", f"{POLICY}@0", "RG_JOBS", "ledger", "open 0 jobs"):
        assert word in done.stdout, done.stdout


def test_a_door_that_is_away_is_said_in_one_line_with_its_exit_code() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    env = environment(url, ROLLGRID_PATIENCE_S="0.2")
    done = subprocess.run([*PROGRAM, "--once"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert url in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, url: str, *options: str) -> None:
        self.control, inner = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, *options], stdin=inner, stdout=inner, stderr=inner, env=environment(url), close_fds=True
        )
        os.close(inner)
        self.seen = ""

    def read_until(self, word: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while word not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{word!r} was never shown: {self.seen[-3000:]!r}"
            if select.select([self.control], [], [], left)[0]:
                self.seen += os.read(self.control, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self.control, key.encode())


@contextlib.contextmanager
def terminal(url: str, *options: str) -> Iterator[Terminal]:
    found = Terminal(url, *options)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(10)
        os.close(found.control)


def test_a_person_sees_the_fleet_live_and_quits_with_q(pipe: Stack) -> None:
    with terminal(pipe.url, "--interval", "0.3", *metrics_options(pipe)) as screen:
        for word in ("rollgrid top", "sampler-", "RG_JOBS", "memory"):
            screen.read_until(word)
        screen.press("x")  # no key of ours
        screen.press("q")
        screen.read_until("\x1b[?1049l")  # the terminal is given back
        assert screen.process.wait(20) == 0


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_live_a_door_that_is_away_is_looked_for_again(flags: tuple[str, ...]) -> None:
    with terminal(f"http://127.0.0.1:{free_port()}", "--interval", "0.2", *flags) as screen:
        screen.read_until('"away"' if flags else "the door is away")
        seen = len(screen.seen)
        screen.seen = ""
        screen.read_until('"away"' if flags else "away")
        assert seen
        assert screen.process.poll() is None
