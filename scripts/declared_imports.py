"""Every third-party package that a member imports is declared in that member's own pyproject file.

One environment holds all members, so a missing declaration would only be seen by whoever installs one
of them alone.  Imports under TYPE_CHECKING are for the checker and need no declaration.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WITH_ENGINE = {"torch"}
"""Comes with either engine and is locked by itself (locks/torch-cpu.txt)."""


def main() -> int:
    """Print what is imported and not declared; 1 if there is any."""
    providers = packages_distributions()
    problems: list[str] = []
    for pyproject in sorted([*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]):
        declared = declared_names(pyproject)
        for source in sorted(pyproject.parent.rglob("*.py")):
            for package in sorted({name.partition(".")[0] for name in imports(ast.parse(source.read_text()))}):
                if package in sys.stdlib_module_names or package in WITH_ENGINE:
                    continue
                if not declared & {normal(name) for name in providers.get(package, [package])}:
                    problems.append(
                        f"{source.relative_to(ROOT)} imports {package}: declare it in {pyproject.parent.name}"
                    )
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared_names(pyproject: Path) -> set[str]:
    """The member itself, its dependencies and those of its extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [project["name"], *project["dependencies"]]
    for extra in project.get("optional-dependencies", {}).values():
        lines += extra
    return {normal(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in lines}


def imports(node: ast.AST) -> Iterator[str]:
    """Absolute imports below a node, wherever they stand, except under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module
        else:
            yield from imports(child)


if __name__ == "__main__":
    sys.exit(main())
