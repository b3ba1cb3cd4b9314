"""Finished groups as a trainer sees them: thin, zero-copy views over `GroupClosed`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from rollgrid_contracts import codec
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.failures import ErrorInfo
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, SampleStatus
from rollgrid_contracts.samples import Sample as SampleRecord
from rollgrid_contracts.scoring import Score, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed

if TYPE_CHECKING:
    from .answers import StandingReward
    from .paths import Path

Ids = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]


_NO_IDS = TokenIds()


def _ids(packed: TokenIds) -> Ids:
    return np.frombuffer(packed.packed, dtype="<u4")


def _floats(packed: Floats) -> Logprobs:
    return np.frombuffer(packed.packed, dtype="<f4")


class Sample:
    """One member of a group, ended.  Arrays are read-only views of the received bytes.

    `reward` is None when any scorer asked for gave no number (`score_status` says why): a failure is
    never 0.  `spans` say which checkpoint version computed which tokens.
    """

    __slots__ = ("__dict__", "cursor", "entry", "group_id", "prompt")

    def __init__(self, entry: Entry, group_id: str = "", cursor: int = 0, prompt: TokenIds = _NO_IDS) -> None:
        """`group_id`, `cursor` and `prompt` are those of the group it belongs to."""
        self.entry = entry
        self.group_id = group_id
        self.cursor = cursor
        self.prompt = prompt

    @property
    def record(self) -> SampleRecord:
        return self.entry.sample

    @property
    def index(self) -> int:
        return self.entry.sample.index

    @property
    def status(self) -> SampleStatus:
        return self.entry.sample.status

    @property
    def ok(self) -> bool:
        """Succeeded: it has tokens and, per token, a logprob."""
        return self.entry.sample.status is SampleStatus.SUCCEEDED

    @functools.cached_property
    def token_ids(self) -> Ids:
        """Sampled ids, shape (tokens,), dtype uint32; EOS and stop tokens stay in."""
        return _ids(self.entry.sample.token_ids)

    @functools.cached_property
    def logprobs(self) -> Logprobs:
        """Natural log-probability of each sampled token, shape (tokens,), dtype float32."""
        return _floats(self.entry.sample.logprobs)

    @property
    def text(self) -> str | None:
        return self.entry.sample.text

    @property
    def reward(self) -> float | None:
        return self.entry.reward

    @property
    def score_status(self) -> ScoreStatus | None:
        return self.entry.score_status

    @property
    def scores(self) -> tuple[Score, ...]:
        return self.entry.scores

    @property
    def turn_values(self) -> dict[str, tuple[float | None, ...]]:
        """Values per turn of those scorers that gave any, by the scorer's name; None = no verdict on that turn."""
        return {score.scorer: score.turn_values for score in self.entry.scores if score.turn_values}

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return self.entry.sample.version_spans

    @property
    def versions(self) -> tuple[int, ...]:
        """The checkpoint versions that produced any token, of any turn, in order of first use."""
        return self.entry.versions

    @property
    def oldest_version(self) -> int | None:
        """None without a token."""
        return min(self.versions, default=None)

    @property
    def newest_version(self) -> int | None:
        """None without a token."""
        return max(self.versions, default=None)

    @property
    def staleness(self) -> int | None:
        """Positions by which `oldest_version` was behind the desired one when the group closed; None = no token, or unknown.

        What has come since then is in `Group.staleness`.
        """
        return self.entry.staleness

    @property
    def fingerprint(self) -> str | None:
        """What the weights of the last token's version were found to compute."""
        return self.entry.sample.weight_fingerprint

    @property
    def fingerprint_confirmed(self) -> bool:
        """A process that loaded the version from nothing found the same."""
        return self.entry.sample.fingerprint_confirmed

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.entry.sample.finish_reason

    @property
    def error(self) -> ErrorInfo | None:
        return self.entry.sample.error

    @property
    def session(self) -> str | None:
        """The session that played it; None: it is a single generation."""
        return self.entry.session

    @functools.cached_property
    def turns(self) -> tuple[SampledTurn, ...]:
        """Its turns in the order of their numbers, all branches; none where it is a single generation."""
        return tuple(SampledTurn(self.entry, turn, self.group_id, self.cursor) for turn in self.entry.turns)

    def paths(self) -> tuple[Path, ...]:
        """Root→leaf paths of its tree, by their leaf's turn; a single generation is one.

        Turns that paths share are in each; `Path.first` says in which one they are trained.
        """
        from .paths import paths_of

        return paths_of(self.entry, self.prompt)

    def __len__(self) -> int:
        return len(self.entry.sample.token_ids)

    def __repr__(self) -> str:
        return f"Sample(index={self.index}, status={self.status.value}, tokens={len(self)}, reward={self.reward})"


class SampledTurn(Sample):
    """One turn of a sample that was played in a session; `reward` is the turn's own, as it was given at the close."""

    def __init__(self, episode: Entry, turn: SampleRecord, group_id: str, cursor: int) -> None:
        super().__init__(Entry(sample=turn, reward=episode.turn_rewards.get(turn.turn)), group_id, cursor)

    @property
    def number(self) -> int:
        """Counted over the whole session, all branches."""
        return self.record.turn

    @property
    def node(self) -> TurnNode:
        """Its place in the tree: parent, branch, why it forked, and the messages that the caller added."""
        return self.record.node or TurnNode()

    @functools.cached_property
    def observation_ids(self) -> Ids:
        """What the caller added before it, shape (tokens,), dtype uint32."""
        return _ids(self.node.observation)

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """As the sampler's parser read them."""
        return () if self.record.parsed is None else self.record.parsed.tool_calls

    def __repr__(self) -> str:
        return f"SampledTurn({self.number}, branch={self.node.branch!r}, tokens={len(self)}, reward={self.reward})"


class Group:
    """One finished task: `n` samples ordered by index, and the cursor behind it.

    Resume reading after this group with `cursor`.  `closed` is the whole wire record.
    """

    __slots__ = ("__dict__", "closed", "cursor", "posted_rewards", "staleness")

    def __init__(
        self,
        closed: GroupClosed,
        cursor: int = 0,
        posted_rewards: tuple[StandingReward, ...] = (),
        staleness: int | None = None,
    ) -> None:
        self.closed = closed
        self.cursor = cursor
        self.staleness = staleness
        """Positions by which the group's oldest version was behind the desired one when the server handed it out;
        None without a token, and where it did not come from a page (`Sample.staleness` is the record's own)."""
        self.posted_rewards = posted_rewards
        """What stood posted onto the group when `Client.group` fetched it; iterators leave it empty."""

    @property
    def id(self) -> str:
        return self.closed.group_id

    @property
    def batch_id(self) -> str:
        return self.closed.batch_id

    @property
    def run(self) -> str:
        return self.closed.run

    @property
    def position(self) -> int:
        """Index of the task in the submitted list."""
        return self.closed.position

    @property
    def n(self) -> int:
        return self.closed.n

    @property
    def reason(self) -> CloseReason:
        return self.closed.reason

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that made any token of any sample, oldest first."""
        return tuple(sorted({version for entry in self.closed.entries for version in entry.versions}))

    @functools.cached_property
    def prompt_ids(self) -> Ids:
        """The ids the model really saw, shape (prompt tokens,), dtype uint32."""
        return _ids(self.closed.prompt_token_ids)

    @functools.cached_property
    def samples(self) -> tuple[Sample, ...]:
        prompt = self.closed.prompt_token_ids
        return tuple(Sample(entry, self.id, self.cursor, prompt) for entry in self.closed.entries)

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Rewards by index, shape (n,); NaN where there is none."""
        return np.array([math.nan if e.reward is None else e.reward for e in self.closed.entries], dtype=np.float64)

    @property
    def label(self) -> str | None:
        """The caller's own name of a group of sessions."""
        return self.closed.label

    @property
    def task(self) -> dict[str, Any]:
        return self.closed.task

    @property
    def metadata(self) -> dict[str, Any]:
        return self.closed.metadata

    @property
    def counts(self) -> dict[str, int]:
        """Samples by status, the statuses that occur only."""
        counts: dict[str, int] = {}
        for entry in self.closed.entries:
            counts[entry.sample.status.value] = counts.get(entry.sample.status.value, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible: the wire record (arrays as lists) and the cursor.

        Fields at their default are left out, but `position` and, in every entry, `reward` (None = null).
        """
        record: dict[str, Any] = codec.to_builtins(self.closed)
        entries = [{"reward": None, **entry} for entry in record["entries"]]
        return {"cursor": self.cursor, "position": self.position, **record, "entries": entries}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Group:
        """The inverse of `to_dict`; raises msgspec.ValidationError."""
        cursor = record.get("cursor", 0)
        if not isinstance(cursor, int):
            raise msgspec.ValidationError("cursor is not an integer")
        return cls(codec.from_builtins({k: v for k, v in record.items() if k != "cursor"}, GroupClosed), cursor)

    def __len__(self) -> int:
        return len(self.closed.entries)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __repr__(self) -> str:
        return f"Group(id={self.id!r}, run={self.run!r}, position={self.position}, {self.counts}, cursor={self.cursor})"
