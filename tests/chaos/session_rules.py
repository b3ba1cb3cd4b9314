"""What must hold of sessions after a storm: their trees, what was answered of them, how they ended.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollgrid_contracts import ids
from rollgrid_contracts.episodes import MAIN_BRANCH, TurnNode
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.trajectories import Entry, GroupClosed

from .journal import Line, SessionClosed, TurnReplied

Found = tuple[str, str, str]
"""Promise, name, what is wrong: the fields of a `Violation`."""


def trees_hold(record: GroupClosed, entry: Entry) -> Iterable[Found]:
    """I5, I6: each turn once, behind a turn that was sampled before it, on a branch that exists."""
    name = ids.sample_id(record.group_id, entry.sample.index)
    if entry.session is None:
        if entry.turns or entry.branches:
            yield "I5", name, "has turns and no session"
        return
    if entry.session != ids.session_id(record.group_id, entry.sample.index):
        yield "I5", name, f"was played in {entry.session}, which is another sample's"
    numbers = [turn.turn for turn in entry.turns]
    for number in sorted({number for number in numbers if numbers.count(number) > 1}):
        yield "I6", name, f"turn {number} is there {numbers.count(number)} times"
    if numbers != sorted(numbers):
        yield "I5", name, f"turns {numbers} are not in their order"
    if entry.sample.token_ids:
        yield "I5", name, "has tokens beside those of its turns"
    branches = {MAIN_BRANCH, *(fork.branch for fork in entry.branches)}
    nodes = {turn.turn for turn in entry.turns if turn.status is SampleStatus.SUCCEEDED}
    for turn in entry.turns:
        yield from _stands(name, turn, branches, nodes)


def _stands(name: str, turn: Sample, branches: set[str], nodes: set[int]) -> Iterable[Found]:
    node = turn.node or TurnNode()
    if node.branch not in branches:
        yield "I5", name, f"turn {turn.turn} is on branch {node.branch}, which nobody forked"
    if node.parent is not None and (node.parent not in nodes or node.parent >= turn.turn):
        yield "I6", name, f"turn {turn.turn} goes on behind {node.parent}, which is no turn before it"
    if turn.status is not SampleStatus.SUCCEEDED and not turn.token_ids:
        yield "I5", name, f"turn {turn.turn} {turn.status.value} without a token and is kept"


def answers_are_recorded(journal: Sequence[Line], records: Mapping[str, GroupClosed]) -> Iterable[Found]:
    """I2: what a turn was answered with is that turn in the record; one key is one turn."""
    named: dict[str, int] = {}
    for line in journal:
        if not isinstance(line, TurnReplied):
            continue
        name = ids.turn_id(line.group_id, line.index, line.turn)
        if named.setdefault(line.key, line.turn) != line.turn:
            yield "I2", name, f"key {line.key!r} was turn {named[line.key]} before"
        record = records.get(line.group_id)
        if record is None:
            continue  # that it is missing is said elsewhere
        entry = next((entry for entry in record.entries if entry.sample.index == line.index), None)
        turns = {turn.turn: turn for turn in entry.turns} if entry else {}
        found = turns.get(line.turn)
        if found is None or found.status is not SampleStatus.SUCCEEDED:
            yield "I2", name, f"was answered and is recorded as {found.status if found else 'nothing'}"
        elif (found.token_ids, found.logprobs) != (line.token_ids, line.logprobs):
            yield "I2", name, f"answered {line.token_ids}, recorded {found.token_ids}"


def ends_are_as_told(journal: Sequence[Line], records: Mapping[str, GroupClosed]) -> Iterable[Found]:
    """I1: a session whose close was acknowledged has succeeded with that reward and every turn it had then."""
    for line in journal:
        record = records.get(line.group_id) if isinstance(line, SessionClosed) else None
        if record is None or not isinstance(line, SessionClosed):
            continue
        name = ids.sample_id(line.group_id, line.index)
        entry = next((entry for entry in record.entries if entry.sample.index == line.index), None)
        if entry is None or entry.sample.status is not SampleStatus.SUCCEEDED:
            yield (
                "I1",
                name,
                f"was closed by its caller and is recorded as {entry.sample.status if entry else 'nothing'}",
            )
            continue
        if entry.posted != line.reward or (not line.scored and entry.reward != line.reward):
            yield "F", name, f"was closed with {line.reward}, recorded {entry.posted} and {entry.reward}"
        turns = [turn.turn for turn in entry.turns if turn.status is SampleStatus.SUCCEEDED]
        if len(turns) != line.turns:
            yield "I1", name, f"had {line.turns} turns when it was closed, and has {turns}"
