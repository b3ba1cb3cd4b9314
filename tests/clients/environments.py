"""Environments of the clients under test, apart from each other and from rollgrid's own.

    python -m tests.clients.environments [NAME...]  makes them, or all, at once
    python -m tests.clients.environments --lock     resolves requirements/*.in again into *.txt

They live in `.venv-clients/` (or `ROLLGRID_CLIENT_ENVIRONMENTS`).  A stamp holds the digest of what
each was made from: with nothing to do a run ends at once.  Each file is named and checked by its hash,
but torch's (locks/torch-cpu.txt): where this environment has that very build its files are linked, which
takes a second instead of twenty and no disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements")
CLIENTS = ("inspect", "textarena", "trl", "verifiers")
TRAINERS = ("trl",)
"""They get torch as well, as a trainer's environment has it."""
SDK = {
    "textarena": ("libs/contracts", "libs/episodes", "libs/sdk"),
    "trl": ("libs/contracts", "libs/weights", "libs/episodes", "libs/sdk"),
}
"""Whose environments have rollgrid's SDK, and of what."""
TORCH = ROOT / "locks" / "torch-cpu.txt"
TORCH_INDEX = os.environ.get("ROLLGRID_TORCH_INDEX")
"""As for scripts/setup.sh, which knows the usual one."""
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
    sources = [wanted]
    sources += [TORCH] if client in TRAINERS else []
    sources += [ROOT / member / "pyproject.toml" for member in SDK.get(client, ())]
    made_from = b"".join(source.read_bytes() for source in sources) + sys.version.encode() + str(folder).encode()
    digest = hashlib.sha256(made_from).hexdigest()
    stamp = folder / "made-from"
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    _run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input")
    # complete and pinned: pip has nothing to resolve
    # Bytecode of all there is would take longer than the tests: what is imported is compiled then.
    install = (*pip, "install", "--quiet", "--no-deps", "--no-compile")
    _run(*install, "--require-hashes", "--requirement", str(wanted))
    if client in TRAINERS:
        _add_torch(folder, install)
    if client in SDK:
        _run(*install, "--no-build-isolation", *(f"--editable={ROOT / member}" for member in SDK[client]))
    _run(*pip, "check")
    stamp.write_text(digest)
    print(f"clients: {client} made in {time.monotonic() - started:.0f} s")


def _add_torch(folder: Path, install: tuple[str, ...]) -> None:
    """The pinned CPU build: this environment's files under second names, else pip's."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.distribution("torch")
        if f"torch=={torch.version}" in TORCH.read_text().splitlines():
            _link(
                torch, Path(_run(str(folder / "bin" / "python"), "-c", "import site; print(site.getsitepackages()[0])"))
            )
            return
    index = ("--extra-index-url", TORCH_INDEX) if TORCH_INDEX else ()
    _run(*install, *index, "--requirement", str(TORCH))


def _link(distribution: importlib.metadata.Distribution, target: Path) -> None:
    for file in distribution.files or ():
        source = Path(str(file.locate()))
        if ".." in file.parts or not source.exists():  # commands; bytecode that is not there
            continue
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target / file)
        except OSError:  # another file system
            shutil.copy2(source, target / file)


def _run(*command: str) -> str:
    """What it printed, stripped."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def make_all(clients: Iterable[str] = CLIENTS) -> None:
    """These environments, at once; one that fails is the failure of the whole."""
    failures: list[BaseException] = []

    def make(client: str) -> None:
        try:
            environment(client)
        except BaseException as error:  # handed to the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=make, args=(client,)) for client in clients]
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
    options += ["--excludes", str(ROOT / "locks" / "excluded.txt")]  # torch, above all
    for client in CLIENTS:
        files = [str(REQUIREMENTS / f"{client}.in"), "--output-file", str(REQUIREMENTS / f"{client}.txt")]
        _run(sys.executable, "-m", "uv", "pip", "compile", *options, *files)


if __name__ == "__main__":
    if sys.argv[1:] == ["--lock"]:
        lock()
    else:
        make_all(sys.argv[1:] or CLIENTS)
