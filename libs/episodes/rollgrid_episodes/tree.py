"""The tree of one session: a fold of its events in stream order.  Pure; whoever folds the same events has the same tree.

First finish per turn wins, whoever made it; branches end in any order.  Whatever is at or before `events_to` changes
nothing.  No cap is held here, and nothing is judged but what the stream says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import MAIN_BRANCH, SessionEnded, SessionForked, SessionOpened, SessionTerms
from rollgrid_contracts.samples import Sample, SamplesFinished

from .node import Branch, Lost, Node, answer_of, counts, place_of

SessionEvent = SessionOpened | SamplesFinished | SessionForked | SessionEnded

NOT_OPENED = "session is not open"
OTHER = "not of this session"
DUPLICATE = "duplicate"
ENDED = "session has ended"
NO_PARENT = "parent is no node"
NO_BRANCH = "branch is unknown"


class Tree:
    """Folded state of one session."""

    def __init__(self) -> None:
        self.opened: SessionOpened | None = None
        self.ended: SessionEnded | None = None
        self.nodes: dict[int, Node] = {}
        self.lost: dict[int, Lost] = {}
        self.forks: dict[str, SessionForked] = {}
        self.branches: dict[str, Branch] = {MAIN_BRANCH: Branch(name=MAIN_BRANCH)}
        self.children: dict[int | None, list[int]] = {}
        """Turns behind a turn (None: at the root), lowest first."""
        self.events_to = 0
        self.tokens = 0
        """Ids of all nodes, those that paths share counted once."""
        self._depths: dict[int, int] = {}

    @classmethod
    def restore(
        cls,
        *,
        opened: SessionOpened | None,
        forks: Iterable[SessionForked] = (),
        nodes: Iterable[Node] = (),
        ended: SessionEnded | None = None,
        lost: Iterable[Lost] = (),
        events_to: int = 0,
    ) -> Tree:
        """The tree whose pieces these are, in whatever order they were kept.  Raises KeyError when one is missing."""
        tree = cls()
        tree.opened, tree.ended, tree.events_to = opened, ended, events_to
        for fork in forks:
            tree._add_fork(fork)
        for node in sorted(nodes, key=lambda node: node.turn):  # a parent's number is below its child's
            tree._add_node(node)
        tree.lost = {turn.turn: turn for turn in lost}
        return tree

    # -- folding ------------------------------------------------------------------------------

    def apply(self, seq: int, event: SessionEvent) -> str | None:
        """Fold one event of the session's subject; why it is superseded, or None when it counts.

        An event at or before `events_to` has been folded: nothing changes, and the answer is as it was.
        """
        if seq <= self.events_to:
            return None if self._counted(seq, event) else self._verdict(event) or DUPLICATE
        self.events_to = seq
        why = self._verdict(event)
        if why is None:
            self._fold(seq, event)
        return why

    def _counted(self, seq: int, event: SessionEvent) -> bool:
        """Whether the event at `seq`, folded before, is part of the tree."""
        if isinstance(event, SamplesFinished):
            sample = self.own(event)
            won = None if sample is None else self.nodes.get(sample.turn) or self.lost.get(sample.turn)
            return won is not None and won.seq == seq
        if isinstance(event, SessionForked):
            return self.forks.get(event.branch) == event
        return event in (self.opened, self.ended)

    def _verdict(self, event: SessionEvent) -> str | None:
        if isinstance(event, SessionOpened):
            return None if self.opened in (None, event) else DUPLICATE
        if self.opened is None:
            return NOT_OPENED
        if isinstance(event, SamplesFinished):
            return self._verdict_of_finish(event)
        if event.session != self.opened.session:
            return OTHER
        if isinstance(event, SessionEnded):
            return None if self.ended in (None, event) else ENDED
        if event.branch in self.branches:
            return None if self.forks.get(event.branch) == event else DUPLICATE
        if self.ended is not None:
            return ENDED
        return None if event.parent is None or event.parent in self.nodes else NO_PARENT

    def _verdict_of_finish(self, event: SamplesFinished) -> str | None:
        sample = self.own(event)
        if sample is None:
            return OTHER
        if sample.turn in self.nodes or sample.turn in self.lost:
            return DUPLICATE
        if self.ended is not None:
            return ENDED
        place = place_of(sample)
        if place.branch not in self.branches:
            return NO_BRANCH
        return None if place.parent is None or place.parent in self.nodes else NO_PARENT

    def _fold(self, seq: int, event: SessionEvent) -> None:
        if isinstance(event, SessionOpened):
            self.opened = event
        elif isinstance(event, SessionEnded):
            self.ended = event
        elif isinstance(event, SessionForked):
            self._add_fork(event)
        elif (sample := self.own(event)) is not None:
            self._finish(seq, sample)

    def _finish(self, seq: int, sample: Sample) -> None:
        turn = sample.turn
        if counts(sample):
            self._add_node(Node(turn=turn, seq=seq, sample=sample))
            return
        place = place_of(sample)
        detail = None if sample.error is None else sample.error.message
        self.lost[turn] = Lost(
            turn=turn, seq=seq, status=sample.status, branch=place.branch, parent=place.parent, detail=detail
        )

    def _add_fork(self, fork: SessionForked) -> None:
        self.forks[fork.branch] = fork
        if fork.branch not in self.branches:
            self.branches[fork.branch] = Branch(
                name=fork.branch, parent=fork.parent, reason=fork.reason, head=fork.parent
            )

    def _add_node(self, node: Node) -> None:
        place, turn = node.node, node.turn
        self.nodes[turn] = node
        siblings = self.children.setdefault(place.parent, [])
        siblings.append(turn)
        siblings.sort()
        self.tokens += len(place.observation) + len(node.sample.token_ids)
        self._depths[turn] = 1 if place.parent is None else self._depths[place.parent] + 1
        branch = self.branches[place.branch]
        held = self.nodes.get(branch.head) if branch.head is not None else None
        if held is None or held.node.branch != branch.name or held.turn < turn:
            self.branches[place.branch] = msgspec.structs.replace(branch, head=turn)

    def own(self, event: SamplesFinished) -> Sample | None:
        """The turn in `event` that is this session's, its place in the tree filled in."""
        opened = self.opened
        if opened is None or event.group_id != opened.group_id:
            return None
        if event.session is not None and event.session.session != opened.session:
            return None
        sample = next((sample for sample in event.samples if sample.index == opened.index), None)
        if sample is None or sample.node is not None or event.session is None:
            return sample
        return msgspec.structs.replace(sample, turn=event.session.turn, node=event.session.node)

    # -- reading ------------------------------------------------------------------------------

    @property
    def terms(self) -> SessionTerms | None:
        return None if self.opened is None else self.opened.terms

    @property
    def next_turn(self) -> int:
        """The lowest number above every turn that has ended."""
        return max((*self.nodes, *self.lost), default=-1) + 1

    @property
    def depth(self) -> int:
        """Turns of the longest path."""
        return max(self._depths.values(), default=0)

    def leaves(self) -> tuple[int, ...]:
        """Turns behind which there is none, lowest first."""
        return tuple(sorted(turn for turn in self.nodes if not self.children.get(turn)))

    def path(self, turn: int | None) -> tuple[Node, ...]:
        """The nodes from the root down to `turn`, it included; none for None.  Raises KeyError when it is no node."""
        found: list[Node] = []
        while turn is not None:
            node = self.nodes[turn]
            found.append(node)
            turn = node.node.parent
        return tuple(reversed(found))

    def token_ids(self, turn: int | None) -> TokenIds:
        """Every id from the root to the last that `turn` sampled: what the next turn's prompt begins with."""
        return TokenIds(b"".join(n.node.observation.packed + n.sample.token_ids.packed for n in self.path(turn)))

    def mask(self, turn: int | None) -> bytes:
        """One byte per id of `token_ids(turn)`: 1 where it was sampled, 0 where it was observed."""
        parts = (bytes(len(n.node.observation)) + b"\1" * len(n.sample.token_ids) for n in self.path(turn))
        return b"".join(parts)

    def messages(self, turn: int | None) -> tuple[dict[str, Any], ...]:
        """The conversation down to `turn`, the answers as they were returned included."""
        found: list[dict[str, Any]] = []
        for node in self.path(turn):
            found += node.node.messages
            found.append(answer_of(node.sample))
        return tuple(found)
