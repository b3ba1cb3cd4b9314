"""`rollgrid doctor`: what this machine lacks for a stack of its own, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer

from rollgrid.stack.checks import Check, Level, run_checks

from .output import Exit, JsonOption, console, emit

_SIGNS = {
    Level.OK: "[green]ok[/]  ",
    Level.NOTE: "[dim]note[/]",
    Level.WARN: "[yellow]warn[/]",
    Level.FAIL: "[bold red]FAIL[/]",
}


def doctor(
    as_json: JsonOption = False,
    engine: Annotated[bool, typer.Option(help="Import the engine in a process of its own (some seconds).")] = True,
) -> None:
    """Check this machine; exit code 0 when `rollgrid up` can work."""
    checks = run_checks(with_engine=engine)
    failed = [check for check in checks if check.level is Level.FAIL]
    if as_json:
        emit({"ok": not failed, "checks": checks})
    else:
        _print(checks)
    if failed:
        raise typer.Exit(Exit.UNREACHABLE)


def _print(checks: list[Check]) -> None:
    screen = console()
    for check in checks:
        screen.print(f"{_SIGNS[check.level]}  [bold]{check.name}[/]  {check.found}", soft_wrap=True)
        if check.fix and check.level is not Level.OK:
            screen.print(f"      {check.fix}", style="dim", soft_wrap=True, markup=False)
    failed = sum(check.level is Level.FAIL for check in checks)
    screen.print(
        f"[bold red]{failed} of {len(checks)} checks failed[/]"
        if failed
        else "[bold green]this machine can run a stack[/]"
    )
