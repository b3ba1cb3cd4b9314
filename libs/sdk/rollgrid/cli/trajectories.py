"""`rollgrid trajectories`: read what has ended."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import itertools
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from .output import JsonOption, UrlOption, connect, console, emit, usage_error

if TYPE_CHECKING:
    from rollgrid.cursor import CursorFile
    from rollgrid.results import Group, Sample

app = typer.Typer(no_args_is_help=True, help="Read finished groups: tail, show, rewards, export.")

CursorOption = Annotated[int, typer.Option("--cursor", help="Only what closed behind this cursor; 0: everything.")]
CursorFileOption = Annotated[
    pathlib.Path | None, typer.Option(help="Resume from this file and store in it how far reading got.")
]


class Format(enum.StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


def _start(cursor: int, file: pathlib.Path | None) -> int | CursorFile:
    from rollgrid.cursor import CursorFile

    if file is not None and cursor:
        raise usage_error("give --cursor or --cursor-file, not both", "--cursor")
    return cursor if file is None else CursorFile(file)


@app.command()
def tail(
    run: Annotated[str, typer.Argument(help="Run to read.")],
    cursor: CursorOption = 0,
    cursor_file: CursorFileOption = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more.")] = True,
    limit: Annotated[int | None, typer.Option(help="Stop after so many groups.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to follow, then exit 5.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the groups of RUN as they close, oldest first."""
    with connect(url) as client:
        groups = client.trajectories(run, cursor=_start(cursor, cursor_file), follow=follow, timeout=timeout)
        with contextlib.closing(groups):
            for group in itertools.islice(groups, limit):
                if as_json:
                    emit(group.to_dict())
                else:
                    print(one_line(group), flush=True)


def one_line(group: Group) -> str:
    """cursor, group, counts, tokens, mean reward and the beginning of the prompt, on one line."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    counts = " ".join(f"{count} {status}" for status, count in group.counts.items())
    reward = f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"
    tokens = sum(len(sample) for sample in group.samples)
    prompt = group.closed.prompt_text or f"{len(group.prompt_ids)} prompt ids"
    return f"{group.cursor}  {group.id}  {counts}  {tokens} tokens  reward {reward}  {_short(prompt)}"


def _short(text: str, width: int = 48) -> str:
    line = repr(text)[1:-1]
    return line if len(line) <= width else line[: width - 1] + "…"


@app.command()
def show(
    group_id: Annotated[str, typer.Argument(help="Group to show.")],
    index: Annotated[int | None, typer.Option(help="Only the sample with this index.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print one closed group in full."""
    with connect(url) as client:
        group = client.group(group_id)
    if index is not None and not 0 <= index < group.n:
        raise usage_error(f"{group_id} has indexes 0 to {group.n - 1}", "--index")
    if as_json:
        emit(group.to_dict())
        return
    chosen = group.samples if index is None else (group.samples[index],)
    for line in itertools.chain(_head(group), *(_sample_lines(sample) for sample in chosen)):
        print(line)


def _head(group: Group) -> Iterable[str]:
    closed = group.closed
    yield f"group     {group.id}  (batch {group.batch_id}, run {group.run}, cursor {group.cursor})"
    yield f"policy    {closed.policy}   closed: {group.reason.value} after {closed.closed_at - closed.created_at:.2f} s"
    if closed.error is not None:
        yield f"error     {closed.error.code.value}: {closed.error.message}"
    if closed.prompt_text is not None:
        yield f"prompt    {closed.prompt_text}"
    yield f"          {len(group.prompt_ids)} tokens"
    if closed.task:
        yield f"task      {closed.task}"


def _sample_lines(sample: Sample) -> Iterable[str]:
    reward = "-" if sample.reward is None else f"{sample.reward:.4f}"
    scored = "" if sample.score_status is None else f" ({sample.score_status.value})"
    ended = "" if sample.finish_reason is None else f", {sample.finish_reason.value}"
    spans = " ".join(f"v{span.version}[{span.start}:{span.end}]" for span in sample.spans)
    yield ""
    yield f"[{sample.index}] {sample.status.value}{ended}  {len(sample)} tokens  reward {reward}{scored}  {spans}"
    if sample.error is not None:
        yield f"    {sample.error.code.value}: {sample.error.message}"
    if sample.text:
        yield from (f"    {line}" for line in sample.text.splitlines())
    if len(sample):
        yield f"    logprob sum {float(sample.logprobs.sum()):.4f}, ids {sample.token_ids[:16].tolist()}"
    for score in sample.scores:
        value = "-" if score.value is None else f"{score.value:.4f}"
        yield f"    {score.scorer}: {value} ({score.status.value}){f' {score.detail}' if score.detail else ''}"


@app.command()
def rewards(
    run: Annotated[str, typer.Argument(help="Run whose posted rewards to read.")],
    cursor: CursorOption = 0,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to follow, then exit 5.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what has been posted onto the groups of RUN, oldest first."""
    with (
        connect(url) as client,
        contextlib.closing(client.rewards(run, cursor=cursor, follow=follow, timeout=timeout)) as posts,
    ):
        for post in posts:
            if as_json:
                emit(post.to_dict())
                continue
            for reward in post.rewards:
                turns = " ".join("-" if value is None else f"{value:g}" for value in reward.turn_values)
                value = turns if reward.value is None else f"{reward.value:g}"
                detail = f"  {_short(reward.detail)}" if reward.detail else ""
                named = f"{reward.name} ({reward.kind})"
                print(f"{post.cursor}  {post.group_id}.{reward.index}  {named}  {value}{detail}", flush=True)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Run to export.")],
    output: Annotated[pathlib.Path, typer.Option("-o", "--output", help="File to write.")],
    form: Annotated[Format | None, typer.Option("--format", help="Default: by the file's ending, else jsonl.")] = None,
    cursor: CursorOption = 0,
    posted: Annotated[bool, typer.Option("--rewards/--no-rewards", help="Join posted rewards into the rows.")] = True,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write everything that has closed in RUN to a file: JSON lines (a group each) or Parquet (a sample each, of a session a path each)."""
    from rollgrid import export as writer
    from rollgrid.rewards import Standing

    if importlib.util.find_spec("pyarrow") is None and output.suffix == ".parquet":
        raise usage_error("Parquet needs pyarrow: pip install 'rollgrid[export]'", "--output")
    chosen = form or (Format.PARQUET if output.suffix == ".parquet" else Format.JSONL)
    with connect(url) as client:
        standing = Standing(client.rewards(run, cursor=cursor)) if posted else None
        groups = client.trajectories(run, cursor=cursor, follow=False)
        written = (writer.to_parquet if chosen is Format.PARQUET else writer.to_jsonl)(groups, output, posted=standing)
    unit = "rows" if chosen is Format.PARQUET else "groups"
    if as_json:
        emit({"path": str(output), "format": chosen.value, unit: written})
    else:
        console(stderr=True).print(f"{written} {unit} in {output}")
