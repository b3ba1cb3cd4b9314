"""The durable cursor: what a crash leaves behind, and whose it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rollgrid import CursorFile
from rollgrid.errors import CursorMismatch


def test_absent_is_the_beginning_and_a_commit_is_read_back(tmp_path: Path) -> None:
    file = CursorFile(tmp_path / "cursor")
    assert file.read("run:r") == 0
    file.commit(41, "run:r")
    file.commit(42, "run:r")
    assert CursorFile(tmp_path / "cursor").read("run:r") == 42
    assert os.listdir(tmp_path) == ["cursor"]  # nothing beside it


def test_another_scope_is_refused(tmp_path: Path) -> None:
    CursorFile(tmp_path / "cursor").commit(42, "run:r")
    with pytest.raises(CursorMismatch, match="run:r, not of batch:b1"):
        CursorFile(tmp_path / "cursor").read("batch:b1")


@pytest.mark.parametrize("content", [b"", b"{", b"42", b'{"cursor": 1}', b'{"schema": 1, "scope": "", "cursor": "x"}'])
def test_a_damaged_file_is_an_error_not_a_fresh_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cursor").write_bytes(content)
    with pytest.raises(CursorMismatch, match="not a cursor file"):
        CursorFile(tmp_path / "cursor").read("run:r")


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cursor").write_text('{"schema": 2, "scope": "run:r", "cursor": 1}')
    with pytest.raises(CursorMismatch, match="newer"):
        CursorFile(tmp_path / "cursor").read("run:r")


def test_every_batches_commits_until_flush(tmp_path: Path) -> None:
    file = CursorFile(tmp_path / "cursor", every=3)
    file.commit(1)
    file.commit(2)
    assert file.read() == 0
    file.commit(3)
    assert file.read() == 3
    file.commit(4)
    file.flush()
    assert file.read() == 4


def test_a_kill_while_committing_leaves_an_old_or_a_new_cursor(tmp_path: Path) -> None:
    """SIGKILL at arbitrary moments of a tight commit loop: always readable, never backwards."""
    path = tmp_path / "cursor"
    program = (
        "import sys; from rollgrid import CursorFile; file = CursorFile(sys.argv[1]); at = file.read('run:r')\n"
        "print('ready', flush=True)\n"
        "while True: at += 1; file.commit(at, 'run:r'); print(at, flush=True)"
    )
    last = 0
    for kills in range(1, 6):
        process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(1 + 7 * kills):  # a different moment each time
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in process.communicate()[0].split() if line.isdigit()]
        at = CursorFile(path).read("run:r")
        assert at >= max([last, *acknowledged[:-1]])
        last = at
