"""The checks of `rollgrid doctor`: each says what it found and, when something is missing, how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from rollgrid.models.catalog import RECIPES

from . import binaries
from .home import find_home, find_stack
from .processes import port_is_free
from .services import DEFAULT_PORT

GIB = 1024**3
ENGINE_TIMEOUT_S = 180
SETUP = "make setup"
SERVICES = ("ingest", "sampler", "scorer", "trajectory_logger", "checkpoint_sync")
TORCHVISION_TRAP = (
    "torchvision (or torchaudio, torchcodec) in this environment does not fit torch's CPU build: "
    "pip uninstall -y torchvision torchaudio torchcodec"
)


class Level(StrEnum):
    """`note` is for what is optional, `warn` for what works badly; only `fail` stops a stack."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    level: Level
    found: str
    fix: str = ""


def run_checks(*, with_engine: bool = True) -> list[Check]:
    """All checks in the order a newcomer meets them."""
    checks: list[Callable[[], Check]] = [
        _system, _python, _packages, _nats, _valkey, _s3, _cores, _memory, _shared_memory, _disk, _files, _port, _model,
    ]  # fmt: skip
    if with_engine:
        checks.append(_engine)
    return [check() for check in (*checks, _gpu, _docker)]


def _system() -> Check:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform != "linux" or not Path("/proc/self/stat").exists():
        return Check(
            name="system", level=Level.FAIL, found=system,
            fix="the services run on Linux (a virtual machine or a container will do); the client runs anywhere",
        )  # fmt: skip
    return Check(name="system", level=Level.OK, found=system)


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] != (3, 11):
        return Check(name="python", level=Level.NOTE, found=found, fix="the lock and the tests are of Python 3.11")
    return Check(name="python", level=Level.OK, found=found)


def _packages() -> Check:
    wanted = [f"rollgrid_{name}" for name in SERVICES] + ["nats", "redis", "boto3", "reasoning_gym"]
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        return Check(
            name="packages", level=Level.FAIL, found=f"missing: {', '.join(missing)}",
            fix=f"{SETUP} installs the services and what they need (a client alone needs only `pip install rollgrid`)",
        )  # fmt: skip
    return Check(
        name="packages", level=Level.OK, found=f"rollgrid {importlib.metadata.version('rollgrid')}, all services"
    )


def _nats() -> Check:
    return _server("nats", "NATS_URL", binaries.nats_server, binaries.NATS_MINIMUM)


def _valkey() -> Check:
    return _server("valkey", "REDIS_URL", binaries.valkey_server, (6,))


def _s3() -> Check:
    return _server("s3", "S3_ENDPOINT", binaries.weed, binaries.WEED_MINIMUM)


def _server(name: str, variable: str, locate: Callable[[], Path], minimum: tuple[int, ...]) -> Check:
    if os.environ.get(variable) or os.environ.get(f"ROLLGRID_{variable}"):
        return Check(
            name=name, level=Level.OK, found=f"the one in ${variable}; `rollgrid up` tries a real operation on it"
        )
    try:
        program = locate()
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being found is the finding
        return Check(name=name, level=Level.FAIL, found=str(error), fix=f"{binaries.HINT}, or set {variable}")
    version = binaries.version(program)
    if not version:
        return Check(
            name=name, level=Level.FAIL, found=f"{program} does not run here", fix=f"{binaries.HINT}, or set {variable}"
        )
    if binaries.version_tuple(version) < minimum:
        needed = ".".join(map(str, minimum))
        return Check(
            name=name, level=Level.FAIL, found=f"{program} is {version}", fix=f"{needed} or newer: {binaries.HINT}"
        )
    return Check(name=name, level=Level.OK, found=f"{version} at {program}")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return Check(
            name="cores", level=Level.WARN, found=str(cores),
            fix="the engine and the rest of the stack share one core: slow, and best with --engine scripted",
        )  # fmt: skip
    return Check(name="cores", level=Level.OK, found=str(cores))


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available < 2 * GIB:
        return Check(
            name="memory", level=Level.FAIL, found=found, fix="the stack without an engine takes about 1.5 GiB"
        )
    if memory.available < 6 * GIB:
        return Check(
            name="memory", level=Level.WARN, found=found,
            fix="with vLLM on the CPU and a small model count on 5 GiB; --engine scripted takes 1.5",
        )  # fmt: skip
    return Check(name="memory", level=Level.OK, found=found)


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108 - it is about this very folder
    except OSError as error:
        return Check(name="shared memory", level=Level.WARN, found=str(error), fix="vLLM needs /dev/shm")
    if free < 128 * 1024 * 1024:
        return Check(
            name="shared memory", level=Level.WARN, found=f"{free / 2**20:.0f} MiB free in /dev/shm",
            fix="vLLM's processes talk through it; in Docker: --shm-size 1g or --ipc host",
        )  # fmt: skip
    return Check(name="shared memory", level=Level.OK, found=f"{free / GIB:.1f} GiB free in /dev/shm")


def _disk() -> Check:
    folder = find_home()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free for {folder}"
    if not os.access(existing, os.W_OK):
        return Check(
            name="disk", level=Level.FAIL, found=f"{existing} is not writable", fix="set ROLLGRID_HOME elsewhere"
        )
    if free < 2 * GIB:
        return Check(name="disk", level=Level.FAIL, found=found, fix="free some, or set ROLLGRID_HOME to another disk")
    if free < 12 * GIB:
        return Check(
            name="disk", level=Level.WARN, found=found,
            fix="the streams may grow to 9 GiB before work is refused; set ROLLGRID_HOME to another disk",
        )  # fmt: skip
    return Check(name="disk", level=Level.OK, found=found)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Check(name="open files", level=Level.WARN, found=f"{soft} (at most {hard})", fix="ulimit -n 4096")
    return Check(name="open files", level=Level.OK, found=str(soft))


def _port() -> Check:
    stack = find_stack()
    if stack is not None:
        return Check(name="stack", level=Level.OK, found=f"one runs here: {stack.url}")
    if not port_is_free(DEFAULT_PORT):
        return Check(
            name="port", level=Level.NOTE, found=f"{DEFAULT_PORT} is taken by another program",
            fix="`rollgrid up` takes another one and says which; --port chooses",
        )  # fmt: skip
    return Check(name="port", level=Level.OK, found=f"{DEFAULT_PORT} is free; the servers take free ones")


def _model() -> Check:
    recipe = RECIPES["smollm2-135m"]
    if recipe.folder(recipe.dtype).is_dir():
        return Check(name="model", level=Level.OK, found=f"{recipe.name} is prepared")
    missing = [f"{module} ({how})" for module, how in recipe.needs.items() if importlib.util.find_spec(module) is None]
    if missing:
        return Check(
            name="model", level=Level.WARN, found=f"{recipe.name} cannot be made: {', '.join(missing)}",
            fix="or give a folder of your own: rollgrid up --model PATH",
        )  # fmt: skip
    return Check(
        name="model", level=Level.NOTE, found=f"{recipe.name} is not prepared yet",
        fix="`rollgrid up` makes it on first use (half a minute), or now: rollgrid models prepare",
    )  # fmt: skip


def _engine() -> Check:
    if importlib.util.find_spec("vllm") is None:
        return Check(
            name="engine", level=Level.WARN, found="vLLM is not installed",
            fix=f"{SETUP} (CPU wheel) or ROLLGRID_ENGINE=cuda {SETUP}; --engine scripted and openai_http work without",
        )  # fmt: skip
    code = (
        "import torch, vllm; from vllm.v1.engine.async_llm import AsyncLLM; from vllm.platforms import current_platform;"
        "print(vllm.__version__, torch.__version__, current_platform.device_type or 'no device')"
    )
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S,
            env=os.environ | quiet,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(
            name="engine",
            level=Level.WARN,
            found=f"vLLM does not import within {ENGINE_TIMEOUT_S} s",
            fix="a slow disk?",
        )
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        trap = "torchvision" in answer.stderr or "torchaudio" in answer.stderr or "torchcodec" in answer.stderr
        fix = (
            TORCHVISION_TRAP
            if trap
            else f"{SETUP} installs a fitting set; python -c 'import vllm' shows the whole error"
        )
        return Check(name="engine", level=Level.FAIL, found=f"vLLM does not import: {last[:200]}", fix=fix)
    version, torch, device = answer.stdout.strip().splitlines()[-1].split(maxsplit=2)
    return Check(name="engine", level=Level.OK, found=f"vLLM {version} on torch {torch}, device {device}")


def _gpu() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check(name="GPU", level=Level.NOTE, found="none", fix="not needed: small models run on the CPU")
    answer = subprocess.run(
        [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
        check=False, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    if answer.returncode != 0:
        return Check(
            name="GPU", level=Level.NOTE, found="nvidia-smi finds none", fix="check the driver if there is one"
        )
    return Check(name="GPU", level=Level.OK, found="; ".join(answer.stdout.strip().splitlines()) + " (--device cuda)")


def _docker() -> Check:
    program = shutil.which("docker")
    if program is None:
        return Check(name="docker", level=Level.NOTE, found="none", fix="only deploy/compose.yaml needs it")
    answer = subprocess.run([program, "info"], check=False, capture_output=True, text=True, timeout=20)
    if answer.returncode != 0:
        return Check(
            name="docker", level=Level.NOTE, found="installed, not running", fix="only deploy/compose.yaml needs it"
        )
    return Check(name="docker", level=Level.OK, found=program)
