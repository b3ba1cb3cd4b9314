"""The lock of the services: exact versions with hashes, from what the members' pyproject files ask for.

`write` collects the requirements into `locks/*.in`, resolves all of them once (so that the engine and
the services agree) and writes `locks/*.txt`.  `check` proves offline that the files are in step.
Already locked versions stay where they still fit; `write --upgrade` takes the newest.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
EXCLUDES = LOCKS / "excluded.txt"
PYTHON = "3.11"

BUILD, SERVICES, ENGINE_CPU = "build", "services", "engine-cpu"
FILES = (BUILD, SERVICES, ENGINE_CPU)

ENGINE_EXTRAS = {("rollgrid-sampler", "cpu"), ("rollgrid", "models")}
"""Extras that need torch: they are locked with the engine."""
UNLOCKED_EXTRAS = {("rollgrid-sampler", "cuda"), ("rollgrid", "trl")}
"""The CUDA engine is never in one environment with the CPU one and brings its own torch; trainers have
environments of their own (tests/clients/requirements)."""

FOREIGN = re.compile(r"://|--(?:extra-)?index-url|--find-links|/(?:home|root|opt|work|tmp|usr)/")
"""Marks of the machine that made a file; none may be committed."""


def main() -> int:
    """Run one command; the exit code says whether the lock is in step."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="is the lock in step with the pyproject files? offline")
    write = commands.add_parser("write", help="resolve and write the lock")
    write.add_argument("--upgrade", action="store_true", help="take the newest versions")
    arguments = parser.parse_args()
    if arguments.command == "write":
        write_lock(upgrade=arguments.upgrade)
    problems = find_problems()
    for problem in problems:
        print(f"lock: {problem}", file=sys.stderr)
    if problems:
        print("lock: run `make lock`", file=sys.stderr)
    return 1 if problems else 0


def read_toml(path: Path) -> dict[str, Any]:
    """Read one pyproject file."""
    return tomllib.loads(path.read_text())


def requirements() -> dict[str, list[str]]:
    """What each lock file must satisfy, third-party only, sorted and without repeats."""
    groups = read_toml(ROOT / "pyproject.toml")["dependency-groups"]
    wanted: dict[str, set[str]] = {
        BUILD: set(groups["build"]),
        SERVICES: set(groups["dev"]),
        ENGINE_CPU: set(groups["torch-runtime"]),
    }
    for path in sorted([*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]):
        project = read_toml(path)["project"]
        wanted[SERVICES].update(project["dependencies"])
        for extra, asked in project.get("optional-dependencies", {}).items():
            if (project["name"], extra) in UNLOCKED_EXTRAS:
                continue
            wanted[ENGINE_CPU if (project["name"], extra) in ENGINE_EXTRAS else SERVICES].update(asked)
    return {name: sorted(line for line in lines if not line.startswith("rollgrid")) for name, lines in wanted.items()}


def render_input(lines: list[str]) -> str:
    """Text of a .in file."""
    return "".join(f"{line}\n" for line in ["# Collected from the pyproject files by `make lock`.", *lines])


def inputs_digest() -> str:
    """Digest of everything a resolution starts from."""
    digest = hashlib.sha256()
    for path in [*(LOCKS / f"{name}.in" for name in FILES), EXCLUDES]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def entries(text: str) -> dict[str, list[str]]:
    """Blocks of a requirements file (a pin with its hash lines) by distribution name."""
    found: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text):
        if match := re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==", block):
            found.setdefault(match[1].lower(), []).append(block.rstrip("\n"))
    return found


def compile_requirements(*arguments: str | Path) -> str:
    """Resolve with uv, leaving out what locks/excluded.txt names; no host names or paths in the answer."""
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON,
        "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--excludes", str(EXCLUDES),
        *map(str, arguments),
    ]  # fmt: skip
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def write_lock(*, upgrade: bool) -> None:
    """Write locks/*.in and locks/*.txt out of one resolution."""
    for name, lines in requirements().items():
        (LOCKS / f"{name}.in").write_text(render_input(lines))
    inputs = {name: LOCKS / f"{name}.in" for name in FILES}
    with tempfile.TemporaryDirectory() as scratch:
        everything = Path(scratch) / "everything.txt"
        if not upgrade:  # uv prefers the versions that it finds in its output file
            everything.write_text("".join(path.read_text() for path in sorted(LOCKS.glob("*.txt")) if path != EXCLUDES))
        compile_requirements(*inputs.values(), "--output-file", everything)
        taken: set[str] = set()
        for name in FILES:
            text = compile_requirements(inputs[name], "--constraints", everything, "--generate-hashes")
            fresh = {key: blocks for key, blocks in entries(text).items() if key not in taken}
            taken |= fresh.keys()
            body = "\n".join(block for key in sorted(fresh) for block in fresh[key])
            (LOCKS / f"{name}.txt").write_text(f"# inputs sha256:{inputs_digest()}\n{body}\n")


def find_problems() -> list[str]:
    """Everything that is out of step, without any network."""
    # Part of the development tools, so not there while a bare machine is being set up.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    problems: list[str] = []
    excluded = {line for line in EXCLUDES.read_text().splitlines() if line and not line.startswith("#")}
    pins: dict[str, list[str]] = {}
    for name in FILES:
        path = LOCKS / f"{name}.txt"
        if not path.exists():
            return [*problems, f"locks/{name}.txt is missing"]
        text = path.read_text()
        if not text.startswith(f"# inputs sha256:{inputs_digest()}\n"):
            problems.append(f"locks/{name}.txt was not made from the present locks/*.in")
        if FOREIGN.search(text):
            problems.append(f"locks/{name}.txt names an address or a folder of the machine that made it")
        for key, blocks in entries(text).items():
            if key in pins:
                problems.append(f"{key} is pinned twice")
            if key in excluded:
                problems.append(f"{key} must not be installed (locks/excluded.txt)")
            if not all("--hash=sha256:" in block for block in blocks):
                problems.append(f"{key} in locks/{name}.txt has no hash")
            pins[key] = [re.split(r"[\s;\\]", block.partition("==")[2], maxsplit=1)[0] for block in blocks]
    for name, lines in requirements().items():
        if (LOCKS / f"{name}.in").read_text() != render_input(lines):
            problems.append(f"locks/{name}.in is not what the pyproject files ask for")
        for line in lines:
            wanted = Requirement(line)
            key = canonicalize_name(wanted.name)
            if key in excluded:
                continue
            if not any(wanted.specifier.contains(version, prereleases=True) for version in pins.get(key, [])):
                problems.append(f"{line} is not met by locks/*.txt ({pins.get(key, 'not pinned')})")
    return problems


if __name__ == "__main__":
    sys.exit(main())
