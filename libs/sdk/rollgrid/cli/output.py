"""What every command shares: where text goes, how failures end, what the exit code says.

Results go to stdout, everything else (progress, hints, errors) to stderr.  With `--json`, stdout is
one JSON object per line and nothing else; a failure is then an object on stderr.
"""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer

from rollgrid.errors import (
    ConfigurationError,
    DeadlineExceeded,
    GroupOpen,
    RollgridAPIError,
    RollgridError,
    Unreachable,
    VersionEnded,
)

if TYPE_CHECKING:
    from rich.console import Console

    from rollgrid.client import Client


class Exit(enum.IntEnum):
    """Exit codes (docs/reference/cli.md)."""

    OK = 0
    BUG = 1  # Python's own, for an exception nobody expected
    USAGE = 2  # typer's own, and local files that cannot be used
    UNREACHABLE = 3
    REFUSED = 4
    TIMEOUT = 5
    SAMPLES_FAILED = 6
    CHECK_FAILED = 7
    INTERRUPTED = 130


JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout, nothing else.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Server; default $ROLLGRID_URL, else the stack running here.")
]


def emit(record: object) -> None:
    """One line of JSON on stdout, flushed, so that a pipe sees it at once."""
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def connect(url: str | None) -> Client:
    """A client that gives up on a silent server soon: somebody waits at a terminal."""
    from rollgrid.client import Client
    from rollgrid.discovery import patience_s
    from rollgrid.transport import Retries

    return Client(url, retries=Retries(budget_s=patience_s()))


def usage_error(message: str, parameter: str | None = None) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=parameter)


def parse_json_object(text: str, parameter: str) -> dict[str, Any]:
    """The object in `text`; raises a usage error naming `parameter`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise usage_error(f"not JSON: {error}", parameter) from error
    if not isinstance(value, dict):
        raise usage_error("not a JSON object", parameter)
    return value


def _code(error: RollgridError) -> Exit:
    if isinstance(error, (RollgridAPIError, GroupOpen, VersionEnded)):
        return Exit.REFUSED
    if isinstance(error, DeadlineExceeded):
        return Exit.TIMEOUT
    if isinstance(error, ConfigurationError):
        return Exit.USAGE
    return Exit.UNREACHABLE if isinstance(error, Unreachable) else Exit.BUG


def _report(error: RollgridError) -> None:
    if "--json" in sys.argv:
        record = {"error": {"type": type(error).__name__, "message": str(error)}}
        if isinstance(error, (RollgridAPIError, VersionEnded)):
            record["error"] |= {
                name: value
                for name in ("code", "field", "limit", "status", "retryable", "request_id", "version")
                if (value := getattr(error, name, None)) is not None
            }
        print(json.dumps(record), file=sys.stderr)
        return
    print(f"rollgrid: {error}", file=sys.stderr)
    if isinstance(error, Unreachable):
        print("Is it running?  `rollgrid status` shows the stack on this machine.", file=sys.stderr)


@contextmanager
def guarded() -> Iterator[None]:
    """Turn what the SDK raises into one clear line and an exit code."""
    try:
        yield
    except RollgridError as error:
        _report(error)
        raise SystemExit(int(_code(error))) from None
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    except BrokenPipeError:
        # The reader of a pipe (head) has gone: nothing is wrong, and nothing may be written at exit.
        _reader_left()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer's own way of ending for it
            _reader_left()
        raise
    except OSError as error:
        if error.filename is None:
            raise
        _report(ConfigurationError(f"{error.filename}: {error.strerror}"))
        raise SystemExit(int(Exit.USAGE)) from None


def _reader_left() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(int(Exit.OK)) from None
