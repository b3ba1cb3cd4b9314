"""`rollgrid rollouts`: submit tasks, watch, ask, cancel."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from .output import Exit, JsonOption, UrlOption, connect, console, emit, parse_json_object, usage_error

if TYPE_CHECKING:
    from rollgrid.client import Batch
    from rollgrid.results import Group

    from .tally import Tally

app = typer.Typer(no_args_is_help=True, help="Submit tasks and follow them.")

_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_TASK_FIELDS = (
    *_PROMPT_FIELDS, "n", "sampling", "scorers", "deadline_s", "tools", "chat_template_kwargs", "add_special_tokens",
    "task", "metadata",
)  # fmt: skip


def read_tasks(path: str) -> list[Any]:
    """The tasks of a JSON-lines file ("-" is stdin): one text, id list, message list or object a line.

    An object has one of `prompt`, `messages`, `prompt_token_ids`, and may have the other fields of a
    task (docs/reference/http.md); fields that are none of those are added to its `task`, where scorers
    find them: {"prompt": "2+2=", "answer": "4"}.
    """
    try:
        lines = (sys.stdin if path == "-" else open(path, encoding="utf-8")).readlines()  # noqa: SIM115 read at once
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(str(error), "PROMPTS") from error
    tasks = [_task(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise usage_error(f"{path} holds no task", "PROMPTS")
    return tasks


def _task(line: str, number: int) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise usage_error(f"line {number} is not JSON: {error}", "PROMPTS") from error
    if isinstance(value, (str, list)):
        return value
    if not isinstance(value, dict) or sum(field in value for field in _PROMPT_FIELDS) != 1:
        raise usage_error(f"line {number} has not exactly one of {', '.join(_PROMPT_FIELDS)}", "PROMPTS")
    extra = {name: item for name, item in value.items() if name not in _TASK_FIELDS}
    kept = {name: item for name, item in value.items() if name in _TASK_FIELDS}
    own = kept.get("task") or {}
    if not isinstance(own, dict):
        raise usage_error(f"line {number}: task is not an object", "PROMPTS")
    return {**kept, "task": {**own, **extra}} if extra else kept


def read_scorer(text: str) -> Any:
    """A scorer as typed: its type, or a JSON object with type, name, params, weight, gate, timeout_s."""
    return parse_json_object(text, "--scorer") if text.lstrip().startswith("{") else text


@app.command()
def submit(
    prompts: Annotated[str, typer.Argument(help="JSON lines, one task each; - for stdin.", metavar="PROMPTS")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to sample per sample.")],
    n: Annotated[int, typer.Option("-n", help="Samples per task.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 = all tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of every group; unseeded without.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    sampling: Annotated[str, typer.Option(help="More sampling fields under vLLM's names, a JSON object.")] = "{}",
    scorer: Annotated[
        list[str] | None, typer.Option(help="Scorer type, or a JSON object with type, params, weight…; repeatable.")
    ] = None,
    run: Annotated[str, typer.Option(help="The run the results belong to.")] = "default",
    policy: Annotated[str | None, typer.Option(help="Policy (model) to sample from; may be left out if one.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds until what is missing expires.")] = None,
    priority: Annotated[str | None, typer.Option(help="interactive, normal or bulk.")] = None,
    metadata: Annotated[str | None, typer.Option(help="JSON object, returned untouched.")] = None,
    weights: Annotated[
        str | None, typer.Option(help='Versions that may serve: {"min_version": 3}, exact_version, max_staleness.')
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="One version makes each group.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Same key and tasks: the same batch, never twice.")
    ] = None,
    cursor_file: Annotated[
        pathlib.Path | None, typer.Option(help="Resume reading here after a stop (with --idempotency-key).")
    ] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="Also write groups, JSON lines.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for the groups.")] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds to follow; default: the deadline.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit the tasks in PROMPTS, n samples each, and follow them until every group has ended.

    With --json: one object {"event": "accepted" | "group" | "summary", …} a line.
    """
    values: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    values |= {} if seed is None else {"seed": seed}
    values |= {"stop": stop} if stop else {}
    tasks = read_tasks(prompts)
    _check_files(cursor_file, output)
    with connect(url) as client:
        batch = client.submit(
            tasks, n=n, sampling=values | parse_json_object(sampling, "--sampling"),
            scorers=[read_scorer(text) for text in scorer or ()], run=run, policy=policy, deadline_s=deadline,
            priority=priority, metadata=parse_json_object(metadata, "--metadata") if metadata else None,
            weights=parse_json_object(weights, "--weights") if weights else None, pin=pin,
            idempotency_key=idempotency_key,
        )  # fmt: skip
        accepted = {"batch_id": batch.batch_id, "run": batch.run, "groups": len(tasks), "samples": batch.samples}
        if as_json:
            emit({"event": "accepted", **accepted, "cursor": batch.cursor, "group_ids": batch.group_ids})
        else:
            console(stderr=True).print(
                f"accepted {batch.batch_id}: {len(tasks)} tasks, {batch.samples} samples, run {batch.run}"
            )
        if follow:
            _follow(batch, batch.samples, cursor_file, output, timeout, as_json)
        elif not as_json:
            print(batch.batch_id)


@app.command()
def follow(
    batch_id: Annotated[str, typer.Argument(help="Id that `submit` printed.")],
    cursor_file: Annotated[pathlib.Path | None, typer.Option(help="Where to resume, and to store how far.")] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="Also write groups, JSON lines.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to follow; default: the deadline.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a batch that was submitted before."""
    with connect(url) as client:
        batch = client.batch(batch_id)
        _follow(batch, batch.status().samples, cursor_file, output, timeout, as_json)


def _follow(
    batch: Batch,
    samples: int,
    cursor_file: pathlib.Path | None,
    output: pathlib.Path | None,
    timeout: float | None,
    as_json: bool,
) -> None:
    from rollgrid.cursor import CursorFile

    from .progress import followed
    from .tally import Tally

    tally = Tally()
    groups = batch.groups(cursor=CursorFile(cursor_file) if cursor_file else None, timeout=timeout)
    seen = followed(batch, groups, tally, samples, console(stderr=True))
    with contextlib.closing(groups), _sink(output, durable=cursor_file is not None) as write:
        for group in seen:
            write(group)
            if as_json:
                emit({"event": "group", **group.to_dict()})
    _summarise(tally, as_json)
    if tally.failed:
        raise typer.Exit(Exit.SAMPLES_FAILED)


def _check_files(cursor_file: pathlib.Path | None, output: pathlib.Path | None) -> None:
    """Refuse files that cannot be used while nothing is submitted yet.  Raises CursorMismatch, OSError, usage errors."""
    from rollgrid.cursor import CursorFile

    if cursor_file is not None:
        CursorFile(cursor_file).read()
    for path, option in ((cursor_file, "--cursor-file"), (output, "--output")):
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise usage_error(f"{path} cannot be written", option)


@contextlib.contextmanager
def _sink(path: pathlib.Path | None, *, durable: bool) -> Iterator[Callable[[Group], None]]:
    """Appends groups to `path` as JSON lines; `durable` ones are on disk before their cursor is committed."""
    import msgspec

    if path is None:
        yield lambda group: None
        return
    with open(path, "a+b") as file:
        _drop_torn_line(file)

        def write(group: Group) -> None:
            file.write(msgspec.json.encode(group.to_dict()) + b"\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())

        yield write


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut what a crash left behind the last whole line: that group comes again."""
    end = file.seek(0, os.SEEK_END)
    kept = end
    while kept:
        start = max(0, kept - 65536)
        file.seek(start)
        newline = file.read(kept - start).rfind(b"\n")
        if newline >= 0:
            kept = start + newline + 1
            break
        kept = start
    if kept != end:
        file.truncate(kept)


def _summarise(tally: Tally, as_json: bool) -> None:
    summary = tally.summary()
    if as_json:
        emit({"event": "summary", **summary})
        return
    print(f"samples   {', '.join(f'{count} {status}' for status, count in summary['samples'].items()) or 'none'}")
    print(f"tokens    {summary['tokens']} in {summary['elapsed_s']:.1f} s ({summary['tokens_per_s']:.0f}/s)")
    if summary["reward_mean"] is not None or summary["null_rewards"]:
        mean = "-" if summary["reward_mean"] is None else f"{summary['reward_mean']:.3f}"
        print(f"reward    {mean} over {summary['rewards']} samples, {summary['null_rewards']} without")
    if summary["latency_p50_s"] is not None:
        print(f"latency   p50 {summary['latency_p50_s']:.2f} s, p95 {summary['latency_p95_s']:.2f} s")
    for code, count in summary["errors"].items():
        print(f"error     {count} x {code}")


@app.command()
def status(
    batch_id: Annotated[str, typer.Argument(help="Id that `submit` printed.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how far a batch is."""
    with connect(url) as client:
        progress = client.batch(batch_id).status()
    if as_json:
        emit(progress)
        return
    print(f"batch     {progress.batch_id} (run {progress.run}){' done' if progress.done else ''}")
    print(f"groups    {progress.closed} of {progress.groups} closed")
    counts = ", ".join(f"{count} {name}" for name, count in progress.counts.items() if count)
    print(f"samples   {progress.finished} of {progress.samples} generated{f' ({counts})' if counts else ''}")


@app.command()
def cancel(
    batch_id: Annotated[str, typer.Argument(help="Id that `submit` printed.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End what has not ended; those samples close as cancelled."""
    with connect(url) as client:
        client.batch(batch_id).cancel()
    if as_json:
        emit({"event": "cancelled", "batch_id": batch_id})
    else:
        print(f"cancelled {batch_id}")
