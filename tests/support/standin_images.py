"""Base images for an engine that reaches no image registry: the official names, made from what this machine has.

    python -m tests.support.standin_images      # into the engine that DOCKER_HOST names

The servers are the binaries of the wheels in this environment, in images with the entry points, paths
and users of the official ones (a busybox userland, as theirs is); Python's is a debootstrap of Debian
with this machine's CA bundle, package configuration and torch wheel.  So deploy/compose.yaml runs as
it is.  Names and tags are read from it.  An image of that name which is not a stand-in stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.servers import binary, valkey_binary

ROOT = Path(__file__).resolve().parents[2]
COMPOSE, DOCKERFILE = ROOT / "deploy" / "compose.yaml", ROOT / "deploy" / "images" / "Dockerfile"
LABEL = "rollgrid.standin"
PACKAGES = ("ca-certificates", "python3.11", "python3-distutils", "python3.11-venv")
ENVIRONMENT = re.compile(r"PIP_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

NATS_ENTRY = """#!/bin/sh
case "${1:--}" in -*) set -- nats-server "$@" ;; esac
exec "$@"
"""
VALKEY_ENTRY = """#!/bin/sh
case "$1" in -* | *.conf) set -- valkey-server "$@" ;; esac
umask 0077
exec "$@"
"""
WEED_ENTRY = """#!/bin/sh
exec /usr/bin/weed "$@"
"""
FILER_TOML = '[leveldb2]\nenabled = true\ndir = "/data/filerldb2"\n'


def main() -> int:
    """Make what is missing, or was made by another version of this file."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    for name, make in images().items():
        if _label(name) in (recipe, "official"):
            continue
        with tempfile.TemporaryDirectory(prefix="rollgrid-standin-") as folder:
            root = Path(folder) / "root"
            root.mkdir()
            changes = make(root)
            _import(root, name, [*changes, f"ENV PATH={PATH}", f"LABEL {LABEL}={recipe}"])
        print(f"made {name}", flush=True)
    return 0


def images() -> dict[str, Callable[[Path], list[str]]]:
    """Every official image by the name and tag that the project's files use, and what makes its stand-in."""
    compose, dockerfile = COMPOSE.read_text(), DOCKERFILE.read_text()
    return {
        _found(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile): make_python,
        _found(r"image: (nats:\S+)$", compose): make_nats,
        _found(r"image: (valkey/valkey:\S+)$", compose): make_valkey,
        _found(r"image: (chrislusf/seaweedfs:\S+)$", compose): make_seaweedfs,
    }


def make_nats(root: Path) -> list[str]:
    _userland(root)
    _put(Path(binary("nats-server")), root / "usr/local/bin/nats-server")
    _script(root / "usr/local/bin/docker-entrypoint.sh", NATS_ENTRY)
    return ['ENTRYPOINT ["docker-entrypoint.sh"]', 'CMD ["nats-server", "--config", "/etc/nats/nats-server.conf"]']


def make_valkey(root: Path) -> list[str]:
    _userland(root)
    server = Path(valkey_binary())
    _put(server, root / "usr/local/bin/valkey-server")
    for library in _libraries(server):
        _put(library.resolve(), root / library.relative_to("/"))
    (root / "data").mkdir(mode=0o1777)
    _script(root / "usr/local/bin/docker-entrypoint.sh", VALKEY_ENTRY)
    return ['ENTRYPOINT ["docker-entrypoint.sh"]', 'CMD ["valkey-server"]', "WORKDIR /data"]


def make_seaweedfs(root: Path) -> list[str]:
    _userland(root)
    _put(Path(binary("weed")), root / "usr/bin/weed")
    (root / "data").mkdir()
    (root / "etc/seaweedfs").mkdir()
    (root / "etc/seaweedfs/filer.toml").write_text(FILER_TOML)
    _script(root / "entrypoint.sh", WEED_ENTRY)
    return ['ENTRYPOINT ["/entrypoint.sh"]', "WORKDIR /data", "VOLUME /data"]


def make_python(root: Path) -> list[str]:
    """Debian with its own Python 3.11, reached as in the official image."""
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    text = sources.read_text() if sources.exists() else Path("/etc/apt/sources.list").read_text()
    mirror = _found(r"^(?:URIs:|deb) (\S+)", text)
    suite = _found(r"^VERSION_CODENAME=(\S+)$", Path("/etc/os-release").read_text())
    _run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(root), mirror)
    for cached in (root / "var/cache/apt/archives").glob("*.deb"):
        cached.unlink()
    shutil.rmtree(root / "var/lib/apt/lists")
    for name in ("python", "python3", "python3.11"):
        (root / "usr/local/bin" / name).symlink_to("/usr/bin/python3.11")
    _machine(root, sources)
    environment = {name: value for name, value in os.environ.items() if ENVIRONMENT.fullmatch(name)}
    return ['CMD ["python3"]', *(f"ENV {name}={value}" for name, value in environment.items())]


def _machine(root: Path, sources: Path) -> None:
    """What lets this machine reach its package sources: certificates, apt's and pip's configuration, wheels on disk."""
    _put(Path("/etc/ssl/certs/ca-certificates.crt"), root / "etc/ssl/certs/ca-certificates.crt")
    if sources.exists():
        (root / "etc/apt/sources.list").unlink()
        _put(sources, root / "etc/apt/sources.list.d" / sources.name)
    for part in Path("/etc/apt/apt.conf.d").iterdir():
        if re.search(r"^Acquire", part.read_text(), re.MULTILINE):
            _put(part, root / "etc/apt/apt.conf.d" / part.name)
    configuration = Path("/etc/pip.conf")
    if configuration.exists():
        lines = configuration.read_text().splitlines()
        # folders of this machine would only be looked for in vain
        kept = [line for line in lines if "file:" not in line]
        (root / "etc/pip.conf").write_text("\n".join(kept) + "\n")
    torch = _found(r"^(torch==\S+)$", (ROOT / "locks/torch-cpu.txt").read_text()).replace("==", "-")
    for folder in map(Path, os.environ.get("PIP_FIND_LINKS", "").split()):
        for wheel in folder.glob(f"{torch}-cp311-*.whl"):
            _put(wheel, root / wheel.relative_to("/"))


def _userland(root: Path) -> None:
    """A static busybox under all its names: the shell and wget that entry points and health checks use."""
    busybox = shutil.which("busybox")
    if busybox is None or _libraries(Path(busybox)):
        raise FileNotFoundError("a static busybox is needed: apt-get install busybox-static")
    for folder in ("bin", "etc", "usr/bin", "usr/local/bin", "var", "root", "dev", "proc", "sys"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    _put(Path(busybox), root / "bin/busybox")
    for applet in _run(busybox, "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")


def _libraries(program: Path) -> list[Path]:
    """The shared libraries of a program, its loader included."""
    answer = subprocess.run(["ldd", str(program)], check=False, capture_output=True, text=True)
    return [Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", answer.stdout, re.MULTILINE)]


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _import(root: Path, name: str, changes: list[str]) -> None:
    tar = subprocess.Popen(["tar", "-c", "-C", str(root), "."], stdout=subprocess.PIPE)
    options = [argument for change in changes for argument in ("--change", change)]
    subprocess.run(["docker", "import", *options, "-", name], check=True, stdin=tar.stdout, stdout=subprocess.DEVNULL)
    if tar.wait(60):
        raise RuntimeError(f"tar of {root} failed")


def _label(name: str) -> str | None:
    """The recipe a stand-in was made by, "official" for any other image of that name, None without one."""
    form = f'{{{{ index .Config.Labels "{LABEL}" }}}}'
    answer = subprocess.run(
        ["docker", "image", "inspect", "-f", form, name], check=False, capture_output=True, text=True
    )
    if answer.returncode:
        return None
    return answer.stdout.strip().replace("<no value>", "") or "official"


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise LookupError(f"nothing matches {pattern}")
    return match[1]


def _run(*argv: str) -> str:
    answer = subprocess.run(argv, check=False, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"{argv[0]} failed\n{answer.stdout[-2000:]}\n{answer.stderr[-2000:]}")
    return answer.stdout


if __name__ == "__main__":
    sys.exit(main())
