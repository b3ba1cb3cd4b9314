"""What may be killed: only what is provably ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rollgrid.stack import processes
from rollgrid.stack.processes import MARK, ProcessId

from tests.support.waiting import wait_until

SLEEPER = "import time\nwhile True: time.sleep(1)"
WITH_CHILD = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\n"
    "print(child.pid, flush=True)\n"
    "while True: time.sleep(1)"
)
REAPER = Path(processes.__file__).with_name("reaper.py")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "part.log"


@pytest.fixture
def started(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    child = processes.start(
        [sys.executable, "-c", WITH_CHILD], env=dict(os.environ) | {MARK: "run-1"}, cwd=Path("/"), log=log,
        with_parent=signal.SIGKILL,
    )  # fmt: skip
    try:
        wait_until(lambda: len(log.read_text().split()) == 1, 20, "the part has a child")
        yield child
    finally:
        processes.end_session(child.pid)
        child.wait(10)


def identity(pid: int) -> ProcessId:
    found = processes.identify(pid)
    assert found is not None
    return found


def test_a_process_is_told_from_a_later_one_with_its_number() -> None:
    me = processes.this_process()
    assert me.alive
    assert not msgspec.structs.replace(me, started=me.started + 1).alive
    assert not msgspec.structs.replace(me, boot="another boot").alive


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    process = identity(child.pid)
    wait_until(lambda: not process.alive, 20, "it ends without being reaped")
    assert child.wait(5) == 0


def test_a_session_is_ended_with_its_children(started: subprocess.Popen[bytes], log: Path) -> None:
    child = int(log.read_text())
    assert sorted(processes.session_members(started.pid)) == sorted([started.pid, child])
    started.kill()
    started.wait(10)
    assert processes.end_session(started.pid) == [child]
    wait_until(lambda: not processes.session_members(started.pid), 30, "the session is empty")


def test_leftovers_are_found_after_their_leader_and_foreign_processes_never(
    started: subprocess.Popen[bytes], log: Path
) -> None:
    leader, child = identity(started.pid), int(log.read_text())
    assert sorted(processes.leftovers([leader], "run-1")) == sorted([leader.pid, child])
    # The number has been reused by another program: neither it nor its children are ours.
    another = msgspec.structs.replace(leader, started=leader.started - 1)
    assert processes.leftovers([another], "run-2") == []
    started.kill()
    started.wait(10)
    assert processes.leftovers([leader], "run-1") == [child]
    assert processes.leftovers([leader], "run-2") == []
    assert processes.leftovers([msgspec.structs.replace(leader, boot="before the reboot")], "run-1") == []


def test_a_part_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    parent_code = (
        "import os, signal, sys, time\nfrom pathlib import Path\nfrom rollgrid.stack import processes\n"
        f"child = processes.start([sys.executable, '-c', {SLEEPER!r}], env=dict(os.environ), cwd=Path('/'),"
        f" log=Path({str(log)!r}), with_parent=signal.SIGKILL)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = identity(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert processes.wait_end(child, 10)


def test_a_program_that_cannot_run_says_so_in_the_log(log: Path) -> None:
    child = processes.start(["/no/such/program"], env={}, cwd=Path("/"), log=log, with_parent=signal.SIGKILL)
    assert child.wait(20) == 127
    assert "cannot run /no/such/program" in log.read_text()


@pytest.mark.parametrize("word", ["", "done\n"])
def test_the_reaper_ends_the_sessions_of_a_supervisor_that_went_without_a_word(
    started: subprocess.Popen[bytes], word: str
) -> None:
    reaper = subprocess.Popen([sys.executable, "-I", "-S", str(REAPER)], stdin=subprocess.PIPE, text=True)
    assert reaper.stdin is not None
    reaper.stdin.write(f"+{os.getsid(0)} 9\n-{os.getsid(0)}\n+{started.pid} {int(signal.SIGTERM)}\n{word}")
    reaper.stdin.close()
    assert reaper.wait(20) == 0
    assert bool(processes.session_members(started.pid)) == bool(word)


def test_foreign_children_are_ended_by_signal_then_force() -> None:
    stubborn = subprocess.Popen(
        [sys.executable, "-c", "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\n" + SLEEPER],
        stdout=subprocess.PIPE,
    )
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    started = time.monotonic()
    processes.end_all([stubborn.pid], 0.2)
    assert time.monotonic() - started < 20
    assert stubborn.wait(5) == -signal.SIGKILL
    stubborn.stdout.close()
