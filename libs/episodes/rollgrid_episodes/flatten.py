"""Root→leaf paths of a closed session, as trainers read them: one sequence each, exact concatenations of its nodes.

Nodes that paths share are in each of them; `TurnSpan.first` (and `train_mask`) say in which one a trainer takes them,
so that each sampled token is trained once.  A missing reward stays None; it is never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import MAIN_BRANCH
from rollgrid_contracts.samples import Sample
from rollgrid_contracts.trajectories import Entry

from .node import counts, place_of


class TurnSpan(NamedTuple):
    """Completion ids [start, end) were sampled by `turn`.  `first`: no earlier path holds this turn."""

    turn: int
    start: int
    end: int
    branch: str
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePath:
    """One path.  All per-token fields have an item per completion id.

    `mask` is a byte each: 1 sampled, 0 observed; there `logprobs` are 0.0 and `versions` -1.  `rewards` are 0.0 but
    at the last id of a turn that has a value of its own, and at the last sampled id, where `reward` is added.
    """

    index: int
    branch: str
    """That of its leaf."""
    prompt_ids: TokenIds
    completion_ids: TokenIds
    mask: bytes
    logprobs: Floats
    versions: tuple[int, ...]
    rewards: Floats
    reward: float | None
    spans: tuple[TurnSpan, ...]

    @property
    def turns(self) -> tuple[int, ...]:
        return tuple(span.turn for span in self.spans)

    @property
    def train_mask(self) -> bytes:
        """`mask` without the turns that an earlier path holds."""
        found = bytearray(len(self.mask))
        for span in self.spans:
            if span.first:
                found[span.start : span.end] = b"\1" * (span.end - span.start)
        return bytes(found)


def paths(entry: Entry, prompt_ids: TokenIds | None = None) -> tuple[EpisodePath, ...]:
    """The paths of `entry`, by their leaf's turn.  One that no session played is one path behind its group's `prompt_ids`.

    Raises ValueError when logprobs or version spans do not fit the ids.
    """
    if not entry.turns and entry.session is None:
        return (_path(entry, [entry.sample], set(), prompt_ids or TokenIds()),) if counts(entry.sample) else ()
    nodes = {sample.turn: sample for sample in entry.turns if counts(sample)}
    inner = {place_of(sample).parent for sample in nodes.values()}
    seen: set[int] = set()
    return tuple(_path(entry, _line(nodes, leaf), seen) for leaf in sorted(nodes) if leaf not in inner)


def _line(nodes: dict[int, Sample], leaf: int) -> list[Sample]:
    line = [nodes[leaf]]
    while (parent := place_of(line[-1]).parent) is not None:
        line.append(nodes[parent])
    return line[::-1]


def _path(entry: Entry, line: Sequence[Sample], seen: set[int], prompt_ids: TokenIds | None = None) -> EpisodePath:
    ids, mask, logprobs = bytearray(), bytearray(), bytearray()
    versions: list[int] = []
    spans: list[TurnSpan] = []
    prompt = place_of(line[0]).observation if prompt_ids is None else prompt_ids
    for i, sample in enumerate(line):
        place, sampled = place_of(sample), len(sample.token_ids)
        observed = len(place.observation) if i else 0
        ids += (place.observation.packed if i else b"") + sample.token_ids.packed
        mask += bytes(observed) + b"\1" * sampled
        logprobs += bytes(4 * observed) + _logprobs(sample)
        versions += [-1] * observed + _versions(sample)
        spans.append(TurnSpan(sample.turn, len(mask) - sampled, len(mask), place.branch, sample.turn not in seen))
        seen.add(sample.turn)
    return EpisodePath(
        index=entry.sample.index,
        branch=spans[-1].branch if spans else MAIN_BRANCH,
        prompt_ids=prompt,
        completion_ids=TokenIds(bytes(ids)),
        mask=bytes(mask),
        logprobs=Floats(bytes(logprobs)),
        versions=tuple(versions),
        rewards=_rewards(entry, bytes(mask), spans),
        reward=entry.reward,
        spans=tuple(spans),
    )


def _logprobs(sample: Sample) -> bytes:
    if len(sample.logprobs) != len(sample.token_ids):
        raise ValueError(f"turn {sample.turn}: {len(sample.token_ids)} ids, {len(sample.logprobs)} logprobs")
    return sample.logprobs.packed


def _versions(sample: Sample) -> list[int]:
    found = [version for version, start, end in _spans(sample) for _ in range(end - start)]
    if len(found) != len(sample.token_ids):
        raise ValueError(f"turn {sample.turn}: {len(sample.token_ids)} ids, version spans over {len(found)}")
    return found


def _spans(sample: Sample) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sample.version_spans]


def _rewards(entry: Entry, mask: bytes, spans: Sequence[TurnSpan]) -> Floats:
    """A turn that sampled nothing has no id that could carry its value."""
    found = [0.0] * len(mask)
    for span in spans:
        if span.end > span.start:
            found[span.end - 1] += entry.turn_rewards.get(span.turn, 0.0)
    if entry.reward is not None and (last := mask.rfind(1)) >= 0:
        found[last] += entry.reward
    packed: Floats = Floats.of(found)
    return packed
