"""`rollgrid rewards`: post rewards onto what has ended."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonOption, UrlOption, connect, emit, parse_json_object, usage_error

if TYPE_CHECKING:
    from rollgrid.answers import Posted

app = typer.Typer(no_args_is_help=True, help="Post rewards onto finished groups.")

NONE = "-"
"""Stands for a turn without a verdict."""


@app.callback()
def rewards() -> None:
    """Post rewards onto finished groups (`rollgrid trajectories rewards` reads them)."""


@app.command()
def post(
    group_id: Annotated[str | None, typer.Argument(help="Group to post onto.")] = None,
    index: Annotated[int, typer.Option(help="Sample of the group.")] = 0,
    value: Annotated[float | None, typer.Option(help="The reward.")] = None,
    turns: Annotated[str | None, typer.Option(help="One reward per turn, by commas; - where there is none.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the reward; a later one replaces it.")] = None,
    kind: Annotated[str | None, typer.Option(help="scalar, pass_rate, judge, turns or your own word.")] = None,
    detail: Annotated[str | None, typer.Option(help="A remark.")] = None,
    source: Annotated[str | None, typer.Option(help="Who says so.")] = None,
    file: Annotated[
        pathlib.Path | None, typer.Option("-f", "--file", help="JSON lines {group_id, rewards, metadata}; - for stdin.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post one reward onto GROUP_ID, or those of a file of JSON lines."""
    if (group_id is None) == (file is None):
        raise usage_error("give a group, or --file", "GROUP_ID")
    if file is None and (value is None) == (turns is None):
        raise usage_error("give --value or --turns", "--value")
    with connect(url) as client:
        if group_id is not None:
            rewards = [{"index": index, **_value(value, turns)}]
            _show(client.post_rewards(group_id, rewards, name=name, kind=kind, detail=detail, source=source), as_json)
            return
        for line in _lines(file):
            posted = client.post_rewards(
                line["group_id"],
                line["rewards"],
                source=line.get("source", source),
                metadata=line.get("metadata"),
                idempotency_key=line.get("idempotency_key"),
            )
            _show(posted, as_json)


def _value(value: float | None, turns: str | None) -> dict[str, Any]:
    if turns is None:
        return {"value": value}
    try:
        return {"turn_values": [None if part.strip() == NONE else float(part) for part in turns.split(",")]}
    except ValueError as error:
        raise usage_error(f"{turns!r} is not a list of numbers", "--turns") from error


def _lines(file: pathlib.Path | None) -> Iterator[dict[str, Any]]:
    text = sys.stdin.read() if file is None or str(file) == NONE else file.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        record = parse_json_object(line, "--file")
        if not isinstance(record.get("group_id"), str) or not isinstance(record.get("rewards"), list):
            raise usage_error(f"line {number} lacks group_id or rewards: {json.dumps(record)[:80]}", "--file")
        yield record


def _show(posted: Posted, as_json: bool) -> None:
    if as_json:
        emit(posted)
    else:
        print(f"{posted.cursor}  {posted.group_id}{'  (posted before)' if posted.duplicate else ''}", flush=True)
