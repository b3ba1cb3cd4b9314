"""A session as ingest knows it at one moment, and how it is kept in fields of a Redis hash (`session_lua`).

An `Episode` is a snapshot: nobody changes one, a later read makes another.  The tree is the fold of the stream; what
stands beside it (open turns, the next number) is ingest's own bookkeeping of turns that have not ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.episodes import SessionEnded, SessionForked, SessionOpened, SessionTerms, VersionHold
from rollgrid_contracts.jobs import VersionRule
from rollgrid_episodes.node import Lost, Node
from rollgrid_episodes.tree import Tree

from .session_events import Recorded


class OpenTurn(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A turn that was begun and has not ended.

    `token` names the call that began it; `job_seq` is its RG_JOBS sequence, 0 until it is known to be stored.
    """

    deadline: float
    branch: str
    parent: int | None = None
    token: str = ""
    began_at: float = 0.0
    job_seq: int = 0


def encoded(turn: OpenTurn) -> bytes:
    """As Redis keeps it: JSON, which its scripts read too."""
    return codec.encode(turn, codec.JSON)


@dataclass(frozen=True, slots=True)
class Episode:
    """`open_turns` may hold turns past their deadline, which no longer hold their branch; `at` is what is folded.

    `closed` says that the group was found closed without an end of this session in the stream.
    """

    tree: Tree
    opened: SessionOpened
    generation: str
    at: int
    next_turn: int = 0
    last_active: float = 0.0
    closed: bool = False
    open_turns: Mapping[int, OpenTurn] = field(default_factory=dict)

    @property
    def terms(self) -> SessionTerms:
        return self.opened.terms

    @property
    def ended(self) -> SessionEnded | None:
        return self.tree.ended

    @property
    def until(self) -> float:
        """The deadline of the session's group, UNIX seconds; infinite when it has none."""
        return self.terms.deadline or float("inf")

    @property
    def keeps(self) -> int | None:
        """The one version that its turns run on: the first turn's where it is pinned, else the one that was asked for."""
        terms, nodes = self.terms, self.tree.nodes
        if terms.hold is VersionHold.PIN and nodes and (spans := nodes[min(nodes)].sample.version_spans):
            return spans[-1].version
        return terms.weights_value if terms.weights_rule == VersionRule.EXACT.value else None

    def over(self, now: float) -> bool:
        """Whether no further turn can begin: it has ended, or its group has."""
        return self.ended is not None or self.closed or now >= self.until

    @property
    def expires_at(self) -> float:
        """When the session ends by itself if nothing happens until then."""
        return min(self.last_active + self.terms.ttl_s, self.until)

    def live_turns(self, now: float) -> dict[int, OpenTurn]:
        """Turns that are under way and hold their branch."""
        return {turn: open_turn for turn, open_turn in self.open_turns.items() if open_turn.deadline > now}


Fields = dict[str, bytes | str | int | float]


def fields_of(tree: Tree, events: Sequence[Recorded], before: Tree | None = None) -> Fields:
    """The hash fields of what `tree` learnt from `events` beyond `before` (None: of all it knows)."""
    assert tree.opened is not None
    since = 0 if before is None else before.events_to
    found: Fields = {"at": tree.events_to}
    if before is None:
        found["opened"] = codec.encode(tree.opened)
    found |= {f"n:{n.turn}:{n.seq}": codec.encode(n) for n in tree.nodes.values() if n.seq > since}
    found |= {f"l:{n.turn}:{n.seq}": codec.encode(n) for n in tree.lost.values() if n.seq > since}
    for seq, event, _ in events:
        if isinstance(event, SessionForked) and tree.forks.get(event.branch) == event:
            found.setdefault(f"f:{event.branch}:{seq}", codec.encode(event))
    if tree.ended is not None:
        found["ended"] = codec.encode(tree.ended)
    return found


def generation_of(fields: Mapping[str, bytes]) -> bytes:
    """Who made a hash, whatever else can be read of it."""
    return fields.get("gen", b"")


def episode_of(fields: Mapping[str, bytes], known: Episode | None) -> Episode:
    """The episode that a hash holds.  Its pieces that `known` has already may be left out of `fields`.

    Raises msgspec.DecodeError, LookupError or ValueError when it is no fold.
    """
    generation, at = fields["gen"].decode(), int(fields["at"])
    if known is not None and known.generation != generation:
        known = None
    nodes = dict(known.tree.nodes) if known else {}
    lost = dict(known.tree.lost) if known else {}
    forks = dict(known.tree.forks) if known else {}
    open_turns: dict[int, OpenTurn] = {}
    for name, value in fields.items():
        kind, _, rest = name.partition(":")
        if kind == "n":
            node = codec.decode(value, Node)
            nodes[node.turn] = node
        elif kind == "l":
            ended_turn = codec.decode(value, Lost)
            lost[ended_turn.turn] = ended_turn
        elif kind == "f":
            fork = codec.decode(value, SessionForked)
            forks[fork.branch] = fork
        elif kind == "o":
            turn = codec.decode(value, OpenTurn, codec.JSON)
            job_seq = int(fields.get(f"d:{rest}", turn.job_seq))
            open_turns[int(rest)] = msgspec.structs.replace(turn, job_seq=job_seq)
    opened = codec.decode(fields["opened"], SessionOpened)
    ended = codec.decode(fields["ended"], SessionEnded) if "ended" in fields else None
    tree = Tree.restore(
        opened=opened,
        forks=forks.values(),
        nodes=nodes.values(),
        ended=ended,
        lost=lost.values(),
        events_to=at,
    )
    return Episode(
        tree=tree,
        opened=opened,
        generation=generation,
        at=at,
        next_turn=int(fields["next"]),
        last_active=float(fields["last"]),
        closed="closed" in fields,
        open_turns=open_turns,
    )


def folded(episode: Episode, events: Sequence[Recorded]) -> Tree:
    """A tree of its own that has folded `events` too; the episode's stays as it is."""
    tree = copy_of(episode.tree)
    for seq, event, _ in events:
        tree.apply(seq, event)
    return tree


def copy_of(tree: Tree) -> Tree:
    return Tree.restore(
        opened=tree.opened,
        forks=tree.forks.values(),
        nodes=tree.nodes.values(),
        ended=tree.ended,
        lost=tree.lost.values(),
        events_to=tree.events_to,
    )


class Recent:
    """Episodes lately read, so that Redis need not send their turns again.  `tokens` bounds them together."""

    def __init__(self, tokens: int) -> None:
        self._bound, self._held = tokens, 0
        self._episodes: OrderedDict[tuple[str, str], Episode] = OrderedDict()

    def get(self, tenant: str, session: str) -> Episode | None:
        return self._episodes.get((tenant, session))

    def put(self, episode: Episode) -> Episode:
        key = (episode.opened.tenant, episode.opened.session)
        self.drop(*key)
        self._episodes[key] = episode
        self._held += _weight(episode)
        while self._held > self._bound:
            self.drop(*next(iter(self._episodes)))
        return episode

    def drop(self, tenant: str, session: str) -> None:
        gone = self._episodes.pop((tenant, session), None)
        if gone is not None:
            self._held -= _weight(gone)


def _weight(episode: Episode) -> int:
    """Tokens, and what a turn weighs beside them."""
    return episode.tree.tokens + 256 * (1 + len(episode.tree.nodes))
