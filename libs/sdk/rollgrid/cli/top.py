"""`rollgrid top`: the fleet, live: workers, queues, ledger, samples, scorer, door."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from rollgrid.client import Client
from rollgrid.discovery import Endpoint, resolve
from rollgrid.errors import Unreachable
from rollgrid.stack.home import find_stack
from rollgrid.transport import Retries

from .fleet_reading import Door, Reading, frame, scrape
from .fleet_view import draw
from .output import JsonOption, UrlOption, connect, emit
from .table import wide_console

LEASE_S = 3.2
"""Workers count in their leases, which they renew every three seconds: two looks closer together see no speed."""
REMEMBERED = 5
"""Earlier looks over which a worker's speed is measured."""


def top(
    url: UrlOption = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print one frame, end.")] = False,
    metrics: Annotated[
        list[str] | None, typer.Option("--metrics", help="NAME=URL of a service's metrics door; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The fleet, live.  q quits.

    Workers, queues and the ledger's lease come from the server (admin key); counts and speeds beside
    them from the services' /metrics, which are known for the stack on this machine.
    """
    endpoint = resolve(url)
    doors = _doors(endpoint, metrics or [])
    if once or not (sys.stdout.isatty() or as_json):
        with connect(url) as client:
            _print(_frame_now(client, doors, interval), endpoint, as_json)
        return
    # a look that fails is only repeated at the next one
    with Client(url, retries=Retries(budget_s=0.0)) as client:
        if as_json:
            _stream(client, doors, interval)
        else:
            _live(client, doors, endpoint, interval)


def _doors(endpoint: Endpoint, given: list[str]) -> list[Door]:
    """The server's own door, the services of the stack on this machine if it is that server, and those named."""
    doors = [Door(name="ingest", url=endpoint.url, key=endpoint.api_key)]
    stack = find_stack()
    if stack is not None and stack.url == endpoint.url:
        services = [part for part in stack.parts if part.kind == "service" and part.name != "ingest"]
        doors += [Door(name=part.name, url=part.url) for part in services]
    for text in given:
        name, equals, url = text.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{text!r} is not NAME=URL", param_hint="--metrics")
        doors.append(Door(name=name, url=url.rstrip("/").removesuffix("/metrics")))
    return doors


def look(client: Client, doors: list[Door]) -> Reading:
    """Raises Unreachable, RollgridAPIError."""
    fleet = client.fleet()
    return Reading(at=time.time(), fleet=fleet, metrics=scrape(doors))


def _frame_now(client: Client, doors: list[Door], interval: float) -> dict[str, Any]:
    first = look(client, doors)
    time.sleep(max(interval, LEASE_S))
    return frame(look(client, doors), [first])


def _print(found: dict[str, Any], endpoint: Endpoint, as_json: bool) -> None:
    if as_json:
        emit({"url": endpoint.url, **found})
    else:
        wide_console().print(draw(found, endpoint.url))


def _stream(client: Client, doors: list[Door], interval: float) -> None:
    """One object a look; while the door is away, objects that say so."""
    history: deque[Reading] = deque(maxlen=REMEMBERED)
    while True:
        try:
            now = look(client, doors)
        except Unreachable as error:
            emit({"at": time.time(), "away": str(error)})
        else:
            emit(frame(now, history))
            history.append(now)
        time.sleep(interval)


def _live(client: Client, doors: list[Door], endpoint: Endpoint, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    screen = wide_console()
    history: deque[Reading] = deque(maxlen=REMEMBERED)
    shown: dict[str, Any] | None = None
    with _keys() as quit_asked, Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = look(client, doors)
            except Unreachable as error:
                away = f"{error}"
                old = Text(f"the door is away: {away}; looking again every {interval:g} s, q quits", style="bold red")
                live.update(old if shown is None else draw(shown, endpoint.url, away), refresh=True)
            else:
                shown = frame(now, history)
                history.append(now)
                live.update(draw(shown, endpoint.url), refresh=True)
            if quit_asked(interval):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives `asked(seconds)`: waits so long, True as soon as q (or the end of input) comes."""
    if sys.platform == "win32" or not sys.stdin.isatty():  # Ctrl-C ends it
        yield _slept
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def asked(seconds: float) -> bool:
        due = time.monotonic() + seconds
        while (left := due - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0] and os.read(terminal, 1) in (b"q", b"Q", b""):
                return True
        return False

    try:
        yield asked
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False
