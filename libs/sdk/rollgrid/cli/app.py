"""The command tree.  A command is found by name and its module imported only when it is needed.

To add a command: write `cli/<module>.py` with a function or a `typer.Typer` under the given
attribute, and add its row to `COMMANDS`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, NamedTuple

import typer

from .output import guarded


class Command(NamedTuple):
    """`attribute` of `rollgrid.cli.<module>`: a function (a command) or a `typer.Typer` (a group)."""

    module: str
    attribute: str
    panel: str


_STACK = "The stack on this machine"
_WORK = "Work"

COMMANDS = {
    "up": Command("up", "up", _STACK),
    "down": Command("up", "down", _STACK),
    "status": Command("status", "status", _STACK),
    "doctor": Command("doctor", "doctor", _STACK),
    "top": Command("top", "top", _STACK),
    "models": Command("models", "app", _STACK),
    "demo": Command("demo", "demo", _STACK),
    "rollouts": Command("rollouts", "app", _WORK),
    "sessions": Command("sessions", "app", _WORK),
    "trajectories": Command("trajectories", "app", _WORK),
    "verify": Command("verify", "app", _WORK),
    "rewards": Command("rewards", "app", _WORK),
    "weights": Command("weights", "app", _WORK),
    "tenants": Command("tenants", "app", _STACK),
}


def _register(root: typer.Typer, name: str) -> None:
    """Add command `name`; one whose module this installation lacks is left out."""
    command = COMMANDS[name]
    full_name = f"rollgrid.cli.{command.module}"
    try:
        module = importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name != full_name:
            raise
        return
    found = getattr(module, command.attribute)
    if isinstance(found, typer.Typer):
        root.add_typer(found, name=name, rich_help_panel=command.panel)
    else:
        root.command(name, rich_help_panel=command.panel)(found)


def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Rollouts for teams that own their RL trainer.

    Which server: --url, else $ROLLGRID_URL, else the stack running on this machine.  The key: $ROLLGRID_API_KEY.
    """
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("rollgrid"))
        raise typer.Exit


def build(argv: list[str]) -> typer.Typer:
    """The tree for this command line: the typed command alone, or all of them for help and mistakes."""
    root = typer.Typer(
        name="rollgrid", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    root.callback(invoke_without_command=True)(_root)
    typed = next((word for word in argv if not word.startswith("-")), None)
    for name in [typed] if typed in COMMANDS else COMMANDS:
        _register(root, name)
    return root


def run() -> None:
    """Parse `sys.argv` and run; exits with one of `output.Exit`."""
    with guarded():
        build(sys.argv[1:])()
