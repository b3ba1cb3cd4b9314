"""`rollgrid weights size`: what a refresh would take for full, delta and LoRA, beside what the fleet has measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rollgrid.errors import ConfigurationError

from .output import JsonOption, UrlOption, connect, console, emit, usage_error

if TYPE_CHECKING:
    from rollgrid_weights.sizing import Fleet, Refresh

    from rollgrid.answers import Policy, VersionList

MBIT = 1e6


class Payload(NamedTuple):
    kind: str
    bytes: int
    source: str


class Measured(NamedTuple):
    """A version that runs: seconds from its commit until the last worker had it."""

    version: int
    kind: str
    bytes: int | None
    seconds: float


def size(
    policy: Annotated[str, typer.Argument(help="The policy: its versions' sizes and its workers are taken.")],
    uplink_mbit: Annotated[float, typer.Option(help="From the trainer, Mbit/s.", min=0.001)] = 1000.0,
    node_mbit: Annotated[float, typer.Option(help="From S3 to each node, Mbit/s.", min=0.001)] = 1000.0,
    store_mbit: Annotated[float, typer.Option(help="From S3 to all nodes together; 0 is no bound.", min=0)] = 0.0,
    nodes: Annotated[int, typer.Option(help="Nodes; 0 is the workers there are.", min=0)] = 0,
    cadence_s: Annotated[float, typer.Option(help="Seconds between two versions; 0 is not said.", min=0)] = 0.0,
    full_bytes: Annotated[int, typer.Option(help="Instead of the newest full version's.", min=0)] = 0,
    delta_bytes: Annotated[int, typer.Option(help="Instead of the kept deltas' mean.", min=0)] = 0,
    lora_bytes: Annotated[int, typer.Option(help="Instead of the newest adapter's.", min=0)] = 0,
    changed_share: Annotated[float, typer.Option(help="Of the elements, per step: sizes a delta.", min=0, max=1)] = 0.0,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time from publish to first new token, by formula and as measured (docs/reference/weights.md)."""
    from rollgrid_contracts.checkpoints import CheckpointKind

    try:
        from rollgrid_weights import sizing
        from rollgrid_weights.sizing import Fleet
    except ImportError as error:
        raise ConfigurationError(f"sizes are worked out by rollgrid's extra `deltas`: {error}") from error
    with connect(url) as client:
        versions, live = client.weights.versions(policy), client.policy(policy)
    given = {"full": full_bytes, "delta": delta_bytes, "lora": lora_bytes}
    payloads = list(_payloads(versions, given, changed_share))
    full = next((one.bytes for one in payloads if one.kind == "full"), 0)
    if not full:
        raise usage_error("is needed: no full version is kept that would say it", "--full-bytes")
    fleet = Fleet(
        nodes=nodes or max(1, len(live.workers)), uplink_rate=uplink_mbit * MBIT, node_rate=node_mbit * MBIT,
        store_rate=store_mbit * MBIT, cadence_s=cadence_s,
    )  # fmt: skip
    planned = [(one, sizing.refresh(CheckpointKind(one.kind), one.bytes, full, fleet)) for one in payloads]
    measured = list(_measured(versions, live))
    if as_json:
        for one, found in planned:
            emit({"event": "planned", "source": one.source, **found._asdict(), "kind": one.kind})
        for seen in measured:
            emit({"event": "measured", **seen._asdict()})
        return
    _print(planned, measured, fleet)


def _payloads(versions: VersionList, given: dict[str, int], changed_share: float) -> Iterator[Payload]:
    from rollgrid_weights import sizing

    full = given["full"] or _newest(versions, "full")
    if full:
        yield Payload("full", full, "given" if given["full"] else "newest version")
    deltas = [one.bytes for one in versions.data if one.kind == "delta" and one.bytes]
    if given["delta"]:
        yield Payload("delta", given["delta"], "given")
    elif changed_share:
        yield Payload("delta", sizing.delta_bytes(full // 2, changed_share), f"{changed_share:.2%} of the elements")
    elif deltas:
        yield Payload("delta", round(statistics.mean(deltas)), f"mean of {len(deltas)} versions")
    lora = given["lora"] or _newest(versions, "lora")
    if lora:
        yield Payload("lora", lora, "given" if given["lora"] else "newest version")


def _newest(versions: VersionList, kind: str) -> int:
    return next((one.bytes for one in reversed(versions.data) if one.kind == kind and one.bytes), 0)


def _measured(versions: VersionList, live: Policy) -> Iterator[Measured]:
    """Of versions that were applied after their commit; one that a worker loaded at its start says nothing."""
    for one in versions.data:
        loaded = [
            held.loaded_at
            for worker in live.workers
            for held in worker.loaded
            if (held.tenant, held.policy, held.version) == (live.tenant, live.policy, one.version)
            and worker.started_at < (one.committed_at or 0.0)
        ]
        if loaded and one.committed_at:
            yield Measured(one.version, one.kind or "", one.bytes, max(loaded) - one.committed_at)


def _print(planned: list[tuple[Payload, Refresh]], measured: list[Measured], fleet: Fleet) -> None:
    from rich.table import Table

    from .table import wide_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("kind", "bytes", "from", "upload s", "fetch s", "rebuild s", "load s", "total s", "of the cadence"):
        table.add_column(heading, justify="left" if heading in ("kind", "from") else "right")
    for payload, found in planned:
        seconds = (found.upload_s, found.fetch_s, found.rebuild_s, found.load_s, found.total_s)
        share = f"{found.cadence_share:.0%}" if fleet.cadence_s else ""
        table.add_row(payload.kind, f"{payload.bytes:,}", payload.source, *(f"{value:.2f}" for value in seconds), share)
    out = wide_console()
    out.print(table)
    for seen in measured:
        told = f"measured: version {seen.version} ({seen.kind}) was on its last worker {seen.seconds:.2f} s after its commit"
        console().print(told, markup=False, soft_wrap=True)
