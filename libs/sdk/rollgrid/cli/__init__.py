"""The `rollgrid` command.

`main` builds the command tree lazily: only the module of the command that was typed is imported,
and none at all for `--help` beyond reading their one-line descriptions (see `app`).
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `rollgrid` script; never returns."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"the command line needs {error.name}: pip install 'rollgrid[cli]'") from error
    run()
