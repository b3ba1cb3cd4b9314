"""The table of a stack's parts, as `up` and `status` show it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollgrid.stack.home import PartState, StackState

from .output import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 160

STYLES = {"ready": "green", "starting": "yellow", "waiting": "dim", "stopping": "yellow", "stopped": "dim"}


def wide_console(*, stderr: bool = False) -> Console:
    """A console that does not cut a table to 80 columns where there is no terminal."""
    screen = console(stderr=stderr)
    if not screen.is_terminal:
        screen.width = max(screen.width, PIPE_WIDTH)
    return screen


def parts_table(parts: tuple[PartState, ...], notes: dict[str, str] | None = None) -> Table:
    """One row a part: state, where it is, version, restarts, and what is wrong or worth knowing."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("part", "state", "at", "pid", "version", "restarts", ""):
        table.add_column(heading, overflow="fold" if not heading else "ellipsis", no_wrap=bool(heading))
    for part in parts:
        state = part.state if part.process or part.state != "ready" else "external"
        note = "; ".join(f"{name}: {cause}" for name, cause in part.problems.items()) or (notes or {}).get(
            part.name, ""
        )
        table.add_row(
            part.name,
            Text(state, style=STYLES.get(part.state, "red")),
            part.url.partition("://")[2],
            str(part.process.pid) if part.process else "",
            part.version,
            str(part.restarts) if part.restarts else "",
            Text(note, style="" if part.state == "ready" else "dim"),
        )
    return table


def welcome(state: StackState) -> str:
    """What to do next, once the stack is ready."""
    took = state.ready_at - state.started_at
    return f"""\
[bold green]ready[/] after {took:.1f} s: [bold]{state.url}/v1[/]   engine {state.engine}, policy {state.policy}

  export ROLLGRID_URL={state.url} ROLLGRID_API_KEY={state.api_key}
  curl -s $ROLLGRID_URL/v1/completions -H "Authorization: Bearer $ROLLGRID_API_KEY" -H 'Content-Type: application/json' \\
    -d '{{"model": "{state.policy}", "prompt": "The capital of France is", "max_tokens": 16}}'
"""


def uptime(state: StackState) -> str:
    seconds = int(time.time() - state.started_at)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
