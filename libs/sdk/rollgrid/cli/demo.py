"""`rollgrid demo`: from nothing to real rollouts, with one command."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgrid.client import Client
from rollgrid.results import Group
from rollgrid.stack.archive import ArchiveFile, fetch_batch
from rollgrid.stack.home import Home, StackState
from rollgrid.stack.supervisor import stop_stack

from .demo_report import draw, figures, interesting, print_trajectory, rewards_table
from .demo_tasks import DATASETS, demo_tasks
from .output import Exit, JsonOption, emit
from .progress import followed
from .table import wide_console
from .tally import Tally
from .up import STOP_TIMEOUT_S, make_config, start_detached

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = "rollgrid-demo"
PICTURE = "demo.png"
PARQUET = "parquet"
DEADLINE_S = 1800.0
ARCHIVE_TIMEOUT_S = 30.0
TEMPERATURE, MAX_TOKENS = 0.8, 48


def demo(
    tasks: Annotated[int, typer.Option(min=1, help=f"Tasks, from {', '.join(DATASETS)}.")] = 32,
    n: Annotated[int, typer.Option("-n", min=1, help="Samples per task.")] = 8,
    engine: Annotated[str, typer.Option(help="vllm | scripted")] = "vllm",
    model: Annotated[str | None, typer.Option(help="Model; default SmolLM2-135M-Instruct on vllm.")] = None,
    samplers: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto | float32 | bfloat16")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the tasks; the samples are unseeded.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the picture, the Parquet and the stack's data.")] = Path(FOLDER),
    as_json: JsonOption = False,
) -> None:
    """Prepare a small real model, start a stack of its own, sample, score, report, stop."""
    screen = wide_console(stderr=as_json)
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    home = Home((out / "stack").absolute())
    work = demo_tasks(tasks, seed)
    config = make_config(engine=engine, model=model, samplers=samplers, dtype=dtype, say=screen.print)
    screen.print(
        f"starting NATS, Valkey, S3, {samplers} sampler on {engine} ({config.policy}, {config.dtype}) and the rest …"
    )
    try:
        state = start_detached(home, config, screen)
        screen.print(f"ready after {time.monotonic() - started:.1f} s of set-up at {state.url}")
        groups, tally = _sample(state, work, n, screen)
        archive = _report(state, home, out, groups, tally, screen)
    finally:
        screen.print("stopping …")
        stop_stack(home, STOP_TIMEOUT_S)
    screen.print(
        f"stopped. Kept in {out}/: the picture, the Parquet files and the stack's data; "
        f"ROLLGRID_HOME={home.root} rollgrid up serves them again; delete the folder when done."
    )
    if as_json:
        emit({**figures(tally, groups), "picture": str(out / PICTURE), "parquet": [str(file.path) for file in archive]})
    if tally.failed:
        raise typer.Exit(Exit.SAMPLES_FAILED)


def _sample(state: StackState, work: list[dict[str, Any]], n: int, screen: Console) -> tuple[list[Group], Tally]:
    """Submit everything as one batch and read the groups as they close."""
    tally = Tally()
    with Client(state.url, state.api_key) as client:
        batch = client.submit(
            work, n=n, sampling={"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE}, scorers=["reasoning_gym"],
            run="demo", policy=state.policy, deadline_s=DEADLINE_S,
        )  # fmt: skip
        screen.print(f"submitted {len(work)} tasks with n={n} as batch {batch.batch_id}")
        groups = list(followed(batch, batch.groups(), tally, len(work) * n, screen))
    tally.ended_at = time.time()
    return groups, tally


def _report(
    state: StackState, home: Home, out: Path, groups: list[Group], tally: Tally, screen: Console
) -> list[ArchiveFile]:
    numbers = tally.summary()
    draw(groups, tally, out / PICTURE)
    shutil.rmtree(out / PARQUET, ignore_errors=True)
    archive = fetch_batch(
        home, state, os.environ, out / PARQUET, groups[0].batch_id, len(groups), timeout_s=ARCHIVE_TIMEOUT_S
    )
    screen.rule("samples")
    screen.print("by status   " + ", ".join(f"{count} {status}" for status, count in tally.samples.items()))
    screen.print(rewards_table(groups))
    screen.print(
        f"{tally.tokens} tokens sampled in {numbers['elapsed_s']:.1f} s: [bold]{numbers['tokens_per_s']:.0f} tokens/s[/]; "
        f"latency p50 {numbers['latency_p50_s']:.1f} s, p95 {numbers['latency_p95_s']:.1f} s (all submitted at once)"
    )
    screen.rule("one trajectory in full")
    print_trajectory(screen, *interesting(groups))
    screen.rule("where it is")
    for file in archive:
        screen.print(f"Parquet  s3://{file.bucket}/{file.key}  {file.rows} rows", soft_wrap=True)
    if archive:
        screen.print(f"         copied to {out / PARQUET}; read them with", soft_wrap=True)
        code = f"import pyarrow.parquet as pq; print(pq.read_table('{out / PARQUET}').to_pylist()[0])"
        screen.print(f'         python -c "{code}"', soft_wrap=True)
    else:
        screen.print("Parquet  not archived yet; it will be at the next start")
    screen.print(f"picture  {out / PICTURE}")
    return archive
