"""`rollgrid weights`: publish versions of a policy, see where they stand, go back."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from .output import JsonOption, UrlOption, connect, console, emit, usage_error
from .weights_size import size

if TYPE_CHECKING:
    from rollgrid.answers import Policy, Version, VersionList
    from rollgrid.weights_live import PublishedVersion

app = typer.Typer(no_args_is_help=True, help="Versions of a policy's weights.")
app.command()(size)

PolicyArgument = Annotated[str, typer.Argument(help="The policy.")]
VersionArgument = Annotated[int, typer.Argument(help="Its number; 0 is the base.", min=0)]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the workers run it.")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds to wait for the workers.", min=0)]
MinWorkersOption = Annotated[int | None, typer.Option(help="So many workers are enough; default all.", min=1)]


@app.callback()
def weights() -> None:
    """Versions of a policy's weights."""


@app.command()
def publish(
    policy: PolicyArgument,
    source: Annotated[
        pathlib.Path, typer.Argument(help="Folder with *.safetensors, one file, or an adapter's folder.")
    ],
    kind: Annotated[str | None, typer.Option(help="full, lora, delta or auto; default what the folder holds.")] = None,
    step: Annotated[int | None, typer.Option(help="Kept with the version.")] = None,
    version: Annotated[int | None, typer.Option(help="Its number; default the next free one.", min=1)] = None,
    base_version: Annotated[
        int | None, typer.Option(help="Full version an adapter sits on; default the newest.")
    ] = None,
    adapter_config: Annotated[pathlib.Path | None, typer.Option(help="If it is not beside the adapter.")] = None,
    upload: Annotated[str | None, typer.Option(help="Name of this publication: again is the same version.")] = None,
    next_within_s: Annotated[float | None, typer.Option(help="Promise: the next version comes within.")] = None,
    canary: Annotated[int, typer.Option(help="So many workers first.", min=0)] = 0,
    canary_s: Annotated[float, typer.Option(help="They must run it for so long.", min=0)] = 0.0,
    at_once: Annotated[int, typer.Option(help="Then so many at a time; 0 is all.", min=0)] = 0,
    deadline_s: Annotated[float, typer.Option(help="Everywhere by then; 0 is the server's own.", min=0)] = 0.0,
    on_deadline: Annotated[str, typer.Option(help="Else: alarm or roll_back.")] = "alarm",
    wait: WaitOption = True,
    timeout: TimeoutOption = 600.0,
    min_workers: MinWorkersOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Upload SOURCE and make it the next version of POLICY."""
    asked = {
        "canary": canary, "canary_s": canary_s, "at_once": at_once, "deadline_s": deadline_s, "on_deadline": on_deadline,
    }  # fmt: skip
    rollout = asked if canary or at_once or deadline_s or on_deadline != "alarm" else None
    if not source.exists():
        raise usage_error(f"there is no {source}", "SOURCE")
    if canary_s and not canary:
        raise usage_error("is how long the canaries must run it, and --canary names none", "--canary-s")
    started = time.monotonic()
    with connect(url) as client, _bar(policy, source, as_json) as sent:
        published = client.weights.publish(
            policy, source, kind=kind, step=step, version=version, base_version=base_version, upload=upload,
            adapter_config=adapter_config, next_within_s=next_within_s, rollout=rollout, sent=sent,
        )  # fmt: skip
        _committed(published, time.monotonic() - started, as_json)
        if wait:
            _wait(published, timeout, min_workers, as_json)


@app.command("list")
def list_command(policy: PolicyArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """The versions that are kept, and how many workers run each."""
    with connect(url) as client:
        found = client.weights.versions(policy)
        running = _running(client.policy(policy))
    if as_json:
        for version in found.data:
            emit({**msgspec.to_builtins(version), "workers": running.get(version.version, 0)})
        return
    _table(found, running)


@app.command()
def show(policy: PolicyArgument, version: VersionArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Where one version stands, and why it was refused or went back."""
    with connect(url) as client:
        found = client.weights.version(policy, version)
    if as_json:
        emit(found)
        return
    out = console()
    out.print(f"[bold]{policy}@{version}[/]  {found.status}")
    for title, value in _facts(found):
        out.print(f"  {title:<15}{value}", markup=False, soft_wrap=True)


@app.command()
def rollback(
    policy: PolicyArgument,
    version: VersionArgument,
    wait: WaitOption = True,
    timeout: TimeoutOption = 600.0,
    min_workers: MinWorkersOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to a version that ran before, until something newer than everything so far is published."""
    with connect(url) as client:
        published = client.weights.rollback(policy, version)
        if as_json:
            emit({"event": "rolled_back", "policy": policy, "version": version})
        else:
            console().print(f"[bold]{policy}@{version}[/] is desired again")
        if wait:
            _wait(published, timeout, min_workers, as_json)


def _committed(published: PublishedVersion, seconds: float, as_json: bool) -> None:
    if as_json:
        emit(
            {
                "event": "committed",
                "policy": published.policy,
                "version": published.version,
                "seconds": round(seconds, 3),
            }
        )
    else:
        console().print(f"[bold]{published.policy}@{published.version}[/] committed after {seconds:.1f} s")


def _wait(published: PublishedVersion, timeout: float, min_workers: int | None, as_json: bool) -> None:
    started = time.monotonic()
    with console(stderr=True).status(f"{published.policy}@{published.version}: waiting for the workers"):
        published.wait_live(timeout, min_workers=min_workers)
    seconds = time.monotonic() - started
    if as_json:
        emit({"event": "live", "policy": published.policy, "version": published.version, "seconds": round(seconds, 3)})
    else:
        console().print(f"[bold]{published.policy}@{published.version}[/] is live after another {seconds:.1f} s")


@contextmanager
def _bar(policy: str, source: pathlib.Path, as_json: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar over the bytes of all files on stderr; with --json none."""
    if as_json:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    known: dict[str, tuple[int, int]] = {}
    err = console(stderr=True)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task(f"{policy} ← {source.name}", total=None)

        def sent(name: str, done: int, size: int) -> None:
            known[name] = (done, size)
            counted = list(known.values())
            progress.update(bar, completed=sum(c[0] for c in counted), total=sum(c[1] for c in counted))

        yield sent


def _running(policy: Policy) -> dict[int, int]:
    """Workers by the versions that they have loaded."""
    counts: dict[int, int] = {}
    for worker in policy.workers:
        for number in {
            one.version for one in worker.loaded if (one.tenant, one.policy) == (policy.tenant, policy.policy)
        }:
            counts[number] = counts.get(number, 0) + 1
    return counts


def _table(found: VersionList, running: dict[int, int]) -> None:
    from rich.table import Table

    from .table import wide_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("version", "kind", "on", "status", "step", "size", "workers", "committed"):
        table.add_column(
            heading, justify="right" if heading in ("version", "on", "step", "size", "workers") else "left"
        )
    for version in found.data:
        on = str(version.base_version) if version.kind in ("lora", "delta") else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.committed_at)) if version.committed_at else ""
        cells: list[Any] = [version.version, version.kind, on, version.status, version.step, _size(version.bytes)]
        cells += [running.get(version.version, 0), when]
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    out = wide_console()
    out.print(table)
    if found.rollout is not None:
        told = f"{found.rollout.version} is being rolled out over {found.rollout.previous}"
        out.print(f"{told}: {', '.join(found.rollout.workers) or 'no worker yet'}", markup=False)


def _facts(version: Version) -> Iterator[tuple[str, object]]:
    for name, value in msgspec.to_builtins(version).items():
        if name in ("policy", "version", "status", "error") or value is None:
            continue
        yield name, _size(value) if name == "bytes" else value
    if version.error is not None:
        yield "code", version.error.code
        yield "why", version.error.message
        for name in ("field", "limit"):
            if (value := getattr(version.error, name)) is not None:
                yield name, value


def _size(count: int | None) -> str:
    if not count:
        return ""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
