"""Environments of the clients under test, apart from each other and from rollgrid's own.

    python -m tests.clients.environments            makes all of them, at once
    python -m tests.clients.environments --lock     resolves requirements/*.in again into *.txt

They live in `.venv-clients/` (or `ROLLGRID_CLIENT_ENVIRONMENTS`).  A stamp holds the digest of what
each was made from: with nothing to do a run ends at once.  Each file is named and checked by its hash.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements")
CLIENTS = ("inspect", "verifiers")
BUILD_S = 900.0


def environment(client: str) -> Path:
    """The folder of this client's environment, made or finished first where that is needed."""
    if client not in CLIENTS:
        raise ValueError(f"no client {client!r}; there are {CLIENTS}")
    folder = Path(os.environ.get("ROLLGRID_CLIENT_ENVIRONMENTS") or ROOT / ".venv-clients") / client
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        _make(client, folder)
    return folder


def _make(client: str, folder: Path) -> None:
    wanted = REQUIREMENTS / f"{client}.txt"
    digest = hashlib.sha256(wanted.read_bytes() + sys.version.encode() + str(folder).encode()).hexdigest()
    stamp = folder / "made-from"
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    _run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input")
    # complete and pinned: pip has nothing to resolve
    _run(*pip, "install", "--quiet", "--no-deps", "--require-hashes", "--requirement", str(wanted))
    _run(*pip, "check")
    stamp.write_text(digest)
    print(f"clients: {client} made in {time.monotonic() - started:.0f} s")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def make_all() -> None:
    """Every environment; one that fails is the failure of the whole."""
    failures: list[BaseException] = []

    def make(client: str) -> None:
        try:
            environment(client)
        except BaseException as error:  # handed to the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=make, args=(client,)) for client in CLIENTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def lock() -> None:
    """Resolve again, for any platform, without addresses of the machine that does it."""
    options = ["--quiet", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate"]
    options += ["--no-emit-index-url", "--no-emit-find-links", "--generate-hashes"]
    for client in CLIENTS:
        files = [str(REQUIREMENTS / f"{client}.in"), "--output-file", str(REQUIREMENTS / f"{client}.txt")]
        _run(sys.executable, "-m", "uv", "pip", "compile", *options, *files)


if __name__ == "__main__":
    if sys.argv[1:] == ["--lock"]:
        lock()
    else:
        make_all()
