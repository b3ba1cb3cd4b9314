"""How long a refresh takes: payload × cadence × workers × bandwidth, for full versions, adapters and deltas (A51).  Pure.

A version goes from the trainer to the object store, from there once to every node, is rebuilt there
(deltas only), and is loaded; generation stands still for the last of these alone.  A full or LoRA
version is checked by its digest while it arrives, which costs no time of its own here.
"""

from __future__ import annotations

from typing import NamedTuple

from rollgrid_contracts.checkpoints import CheckpointKind

BITS_PER_CHANGE = 7.3
"""Of a delta, per changed element: on SmolLM2 measured 6.7 at a learning rate of 1e-5, 7.2 at 3e-6 (`make bench-delta`)."""
LORA_BITS = 16


class Fleet(NamedTuple):
    """Where versions have to go.  Rates are bits a second; `store_rate` is what all nodes share (0 = no bound)."""

    nodes: int
    uplink_rate: float
    node_rate: float
    store_rate: float = 0.0
    cadence_s: float = 0.0
    """Seconds between two versions; 0 = no cadence is given."""


class Speeds(NamedTuple):
    """Bytes of the full state a second on one node.  The defaults are for planning; measure yours."""

    rebuild: float = 0.4e9
    """One core: copying the base, applying a delta, digest of the result."""
    load: float = 0.8e9
    """The engine's own load of a full state (vLLM on a CPU); a LoRA's is its bytes at the same rate."""


class Refresh(NamedTuple):
    """What one version costs.  Seconds."""

    kind: CheckpointKind
    bytes: int
    upload_s: float
    fetch_s: float
    rebuild_s: float
    load_s: float
    total_s: float
    """From the publisher's call to the first token on the slowest node, without queueing."""
    cadence_share: float
    """The busiest link's time over the cadence; above 1 versions pile up.  0 without a cadence."""


def refresh(kind: CheckpointKind, payload: int, full: int, fleet: Fleet, speeds: Speeds = Speeds()) -> Refresh:  # noqa: B008
    """The parts of one refresh with `payload` bytes to send, of a model of `full` bytes.

    Raises ValueError for a fleet without nodes or a rate that is not positive.
    """
    if fleet.nodes < 1 or min(fleet.uplink_rate, fleet.node_rate) <= 0 or min(payload, full) < 0:
        raise ValueError("nodes, rates and sizes must be positive")
    upload = 8 * payload / fleet.uplink_rate
    shared = 8 * payload * fleet.nodes / fleet.store_rate if fleet.store_rate > 0 else 0.0
    fetch = max(8 * payload / fleet.node_rate, shared)
    rebuild = full / speeds.rebuild if kind is CheckpointKind.DELTA else 0.0
    load = (payload if kind is CheckpointKind.LORA else full) / speeds.load
    busiest = max(upload, fetch, rebuild + load)
    return Refresh(
        kind=kind,
        bytes=payload,
        upload_s=upload,
        fetch_s=fetch,
        rebuild_s=rebuild,
        load_s=load,
        total_s=upload + fetch + rebuild + load,
        cadence_share=busiest / fleet.cadence_s if fleet.cadence_s > 0 else 0.0,
    )


def delta_bytes(elements: int, changed_share: float) -> int:
    """What a delta comes to when this share of the elements changes; measured bytes are better where there are any."""
    if not 0 <= changed_share <= 1 or elements < 0:
        raise ValueError("the changed share is not in 0..1")
    return round(elements * changed_share * BITS_PER_CHANGE / 8)


def adapter_bytes(matrices: list[tuple[int, int]], rank: int) -> int:
    """A LoRA of that rank on matrices of these shapes, in 16 bits."""
    return sum(rank * (rows + columns) for rows, columns in matrices) * LORA_BITS // 8
