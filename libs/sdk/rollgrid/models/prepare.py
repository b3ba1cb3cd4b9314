"""Make a model's folder once: in a process of its own, checked, and visible whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollgrid.errors import ConfigurationError

from .catalog import Recipe, recipe

MANIFEST = "rollgrid-model.json"
SILENT: Callable[[str], None] = lambda _: None  # noqa: E731


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What was made: sizes and sha256 of every file."""

    name: str
    revision: str
    dtype: str
    seconds: float
    sizes: dict[str, int]
    sha256: dict[str, str]


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """`made` is False when the folder was there already."""

    name: str
    path: Path
    dtype: str
    bytes: int
    made: bool
    seconds: float


def prepare(
    name: str, dtype: str | None = None, *, verify: bool = True, say: Callable[[str], None] = SILENT
) -> Prepared:
    """The folder of model `name`, made on first use; `verify` recomputes the digests of one that is there.

    Safe to call from several processes at once.

    Raises:
        ConfigurationError: unknown name, a package is missing, or the conversion failed.
    """
    wanted = recipe(name)
    dtype = dtype or wanted.dtype
    if dtype not in wanted.dtypes:
        raise ConfigurationError(f"{name} is made in {' or '.join(wanted.dtypes)}, not in {dtype}")
    folder = wanted.folder(dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        manifest = _intact(folder, verify)
        made = manifest is None
        if manifest is None:
            _check_needs(wanted)
            say(f"preparing {wanted.name} in {folder} (once)")
            manifest = _make(wanted, dtype, folder)
    return Prepared(
        name=name, path=folder, dtype=dtype, bytes=sum(manifest.sizes.values()), made=made, seconds=manifest.seconds
    )


def _intact(folder: Path, verify: bool) -> Manifest | None:
    """The manifest of a folder whose files are what was made; None when it must be made (again)."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    for name, size in manifest.sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
        if verify and _sha256(path) != manifest.sha256[name]:
            return None
    return manifest


def _check_needs(wanted: Recipe) -> None:
    missing = {module: how for module, how in wanted.needs.items() if importlib.util.find_spec(module) is None}
    if missing:
        lines = "; ".join(f"{module} ({how})" for module, how in missing.items())
        raise ConfigurationError(f"model {wanted.name} cannot be made here, packages are missing: {lines}")


def _make(wanted: Recipe, dtype: str, folder: Path) -> Manifest:
    started = time.monotonic()
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        answer = subprocess.run(
            [sys.executable, "-m", wanted.module, str(unfinished), dtype],
            check=False, env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if answer.returncode != 0:
            raise ConfigurationError(f"making {wanted.name} failed:\n{answer.stdout[-4000:]}")
        files = sorted(path for path in unfinished.iterdir() if path.is_file())
        manifest = Manifest(
            name=wanted.name,
            revision=wanted.revision,
            dtype=dtype,
            seconds=round(time.monotonic() - started, 1),
            sizes={path.name: path.stat().st_size for path in files},
            sha256={path.name: _sha256(path) for path in files},
        )
        (unfinished / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        unfinished.chmod(0o755)
        for path in unfinished.iterdir():
            path.chmod(0o644)
        _sync(unfinished)
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
