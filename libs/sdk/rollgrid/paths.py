"""Root→leaf paths of an episode as numpy: one sequence each, with which of its tokens the policy sampled."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.trajectories import Entry
from rollgrid_episodes.flatten import EpisodePath, TurnSpan, paths

Mask = npt.NDArray[np.bool_]


class Path:
    """One path; arrays have an item per completion id unless they say otherwise, and are read-only views where they can be.

    The completion begins behind the first observation: turns of the policy and, between them, what was observed.
    """

    __slots__ = ("__dict__", "record")

    def __init__(self, record: EpisodePath) -> None:
        self.record = record

    @functools.cached_property
    def prompt_ids(self) -> npt.NDArray[np.uint32]:
        """What the first turn saw, shape (prompt tokens,)."""
        return np.frombuffer(self.record.prompt_ids.packed, dtype="<u4")

    @functools.cached_property
    def completion_ids(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.record.completion_ids.packed, dtype="<u4")

    @functools.cached_property
    def mask(self) -> Mask:
        """True where the policy sampled, False where it observed."""
        return np.frombuffer(self.record.mask, dtype=np.bool_)

    @functools.cached_property
    def first(self) -> Mask:
        """`mask` without the turns that an earlier path of the episode holds: each sampled token is in one `first`."""
        return np.frombuffer(self.record.train_mask, dtype=np.bool_)

    @functools.cached_property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """0 where it was observed."""
        return np.frombuffer(self.record.logprobs.packed, dtype="<f4")

    @functools.cached_property
    def versions(self) -> npt.NDArray[np.int64]:
        """Checkpoint version per token, -1 where it was observed."""
        return np.array(self.record.versions, dtype=np.int64)

    @functools.cached_property
    def rewards(self) -> npt.NDArray[np.float32]:
        """A turn's own reward on its last token, and the episode's on the last sampled one; else 0."""
        return np.frombuffer(self.record.rewards.packed, dtype="<f4")

    @functools.cached_property
    def turn_numbers(self) -> npt.NDArray[np.int64]:
        """Which turn sampled each token, -1 where it was observed."""
        found = np.full(len(self), -1, dtype=np.int64)
        for span in self.record.spans:
            found[span.start : span.end] = span.turn
        return found

    @property
    def reward(self) -> float | None:
        """The episode's; None is never 0."""
        return self.record.reward

    @property
    def branch(self) -> str:
        """That of its leaf."""
        return self.record.branch

    @property
    def turns(self) -> tuple[int, ...]:
        """Numbers of its turns, from the root to the leaf."""
        return self.record.turns

    @property
    def spans(self) -> tuple[TurnSpan, ...]:
        """Where each turn lies in the completion."""
        return self.record.spans

    def __len__(self) -> int:
        return len(self.record.mask)

    def __repr__(self) -> str:
        return f"Path(branch={self.branch!r}, turns={self.turns}, tokens={len(self)}, reward={self.reward})"


def paths_of(entry: Entry, prompt_ids: TokenIds) -> tuple[Path, ...]:
    """The paths of one sample, by their leaf's turn; a single generation is one path behind its group's prompt."""
    return tuple(Path(path) for path in paths(entry, prompt_ids))
