"""Judges a history: the client's journal against the trajectory stream and the archive.  Pure.

It knows nothing of how the services work, only the promises (design section 7):

I1  every accepted sample has exactly one terminal entry in exactly one GroupClosed
I2  one key, one set of ids; the reply equals the record
I3  the manifests cover each GroupClosed exactly once, and their digests match
I5  a group closes with exactly n entries
and the iterator's own: each closed group of its run once, in order, none left out.  Sessions: `session_rules`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.subjects import run_of_trajectory
from rollgrid_contracts.topology import Header
from rollgrid_contracts.trajectories import CloseReason, GroupClosed

from .journal import Accepted, Attempted, CancelAsked, Delivered, Line, Posted, Refused, Replied, Taken
from .session_rules import answers_are_recorded, ends_are_as_told, trees_hold

CLOCK_SLACK_S = 1.0


class Close(NamedTuple):
    """One message of RG_TRAJECTORIES."""

    sequence: int
    subject: str
    headers: Mapping[str, str]
    record: GroupClosed


class ArchivedTurn(NamedTuple):
    """One row of the turns dataset."""

    turn: int
    parent: int | None
    observation: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class ArchivedSample(NamedTuple):
    sample_index: int
    status: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float | None
    turns: tuple[ArchivedTurn, ...] = ()


class ArchivedGroup(NamedTuple):
    sequence: int
    group_id: str
    samples: tuple[ArchivedSample, ...]


class StoredPost(NamedTuple):
    """Rewards posted onto a group, in the stream or the archive."""

    sequence: int
    group_id: str


class ArchivedRange(NamedTuple):
    """One manifest: the sequences it covers, and what its Parquet object really holds.

    `problem` is what kept the object from being read, or how it differs from its manifest's digest.
    """

    manifest: str
    first_sequence: int
    last_sequence: int
    groups: tuple[ArchivedGroup, ...]
    problem: str | None = None
    posts: tuple[StoredPost, ...] = ()


class Evidence(NamedTuple):
    """Everything an outsider can see after the storm.

    `first_sequence` is the oldest one the stream still holds, `last_sequence` its newest ever.
    """

    journal: Sequence[Line]
    closes: Sequence[Close]
    archive: Sequence[ArchivedRange]
    first_sequence: int = 1
    last_sequence: int = 0
    posts: Sequence[StoredPost] = ()


class Expectation(NamedTuple):
    """What the storm allows.  `failures`: entries may be `failed`; `archived`: the archiver has caught up."""

    failures: bool = False
    archived: bool = True
    iterated: bool = True
    archive_whole_stream: bool = True
    all_let_in: bool = True


class Violation(NamedTuple):
    promise: str
    group: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise} {self.group}: {self.what}"


def check(evidence: Evidence, expect: Expectation | None = None) -> list[Violation]:
    """Every broken promise; empty when the history holds."""
    expect = expect or Expectation()
    return [
        *accepted_groups_close_once(evidence),
        *nothing_is_invented(evidence),
        *(good_requests_are_let_in(evidence.journal) if expect.all_let_in else ()),
        *groups_are_whole(evidence.closes),
        *archived_groups_are_whole(evidence),
        *statuses_have_a_cause(evidence, expect),
        *keys_name_one_batch(evidence.journal),
        *replies_equal_records(evidence),
        *(archive_covers_once(evidence, expect) if expect.archived else ()),
        *(iterators_see_all_once(evidence) if expect.iterated else ()),
        *posts_are_kept_once(evidence, expect),
        *sessions_hold(evidence),
    ]


# -- I1 -----------------------------------------------------------------------------------------------


def closes_of(evidence: Evidence) -> dict[str, set[int]]:
    """Group → sequences of its closes, from the stream and, where that was purged, the archive."""
    found: dict[str, set[int]] = defaultdict(set)
    for close in evidence.closes:
        found[close.record.group_id].add(close.sequence)
    for part in evidence.archive:
        for group in part.groups:
            found[group.group_id].add(group.sequence)
    return found


def accepted_groups_close_once(evidence: Evidence) -> Iterable[Violation]:
    closed = closes_of(evidence)
    for line in evidence.journal:
        if isinstance(line, Accepted):
            for group in line.group_ids:
                if not closed.get(group):
                    yield Violation("I1", group, f"accepted at {line.at:.3f} under key {line.key!r} and never closed")
    for group, sequences in closed.items():
        if len(sequences) > 1:
            yield Violation("I1", group, f"closed {len(sequences)} times, at {sorted(sequences)}")


def archived_groups_are_whole(evidence: Evidence) -> Iterable[Violation]:
    """A group has as many rows as it was accepted with samples, each index once."""
    wanted = {group: line.n for line in evidence.journal if isinstance(line, Accepted) for group in line.group_ids}
    for part in evidence.archive:
        for group in part.groups:
            indexes = [sample.sample_index for sample in group.samples]
            if group.group_id in wanted and indexes != list(range(wanted[group.group_id])):
                yield Violation("I5", group.group_id, f"accepted with n={wanted[group.group_id]}, archived {indexes}")


def nothing_is_invented(evidence: Evidence) -> Iterable[Violation]:
    """A close belongs to something the client at least tried to submit."""
    known = {group for line in evidence.journal if isinstance(line, Accepted) for group in line.group_ids}
    for line in evidence.journal:
        if isinstance(line, Attempted):
            known |= {ids.group_id(line.tenant, line.run, line.key, position) for position in range(line.groups)}
    for group in closes_of(evidence):
        if group not in known:
            yield Violation("I1", group, "closed although nobody submitted it")


def good_requests_are_let_in(journal: Sequence[Line]) -> Iterable[Violation]:
    """The storm's requests are all well formed: no final verdict on them but yes."""
    accepted = {line.key for line in journal if isinstance(line, Accepted | Posted | Taken)}
    last: dict[str, Line] = {line.key: line for line in journal if isinstance(line, Attempted | Refused)}
    for key, line in last.items():
        if key not in accepted:
            yield Violation("door", key, f"was never let in; the last word was {line}")


# -- I5 -----------------------------------------------------------------------------------------------


def groups_are_whole(closes: Iterable[Close]) -> Iterable[Violation]:
    for close in closes:
        record = close.record
        indexes = [entry.sample.index for entry in record.entries]
        if indexes != list(range(record.n)):
            yield Violation("I5", record.group_id, f"has indexes {indexes} for n={record.n}")
        if run_of_trajectory(close.subject) != (record.tenant, record.run):
            yield Violation("I7", record.group_id, f"of {record.tenant}/{record.run} lies on {close.subject}")
        if close.headers.get(Header.GROUP.value) != record.group_id:
            yield Violation("I5", record.group_id, f"travels under the headers {dict(close.headers)}")
        counts = close.headers.get(Header.COUNTS.value)
        if counts is not None and parse_counts(counts) != count(record):
            yield Violation("I5", record.group_id, f"says {counts} and holds {count(record)}")
        for entry in record.entries:
            for sample in (entry.sample, *entry.turns):
                yield from samples_are_whole(record, sample)
            if entry.session is not None and not record.scorers:
                continue  # its reward is the caller's
            if (entry.reward is not None) != (entry.score_status is not None and entry.score_status.has_value):
                yield Violation("F", record.group_id, f"reward {entry.reward} with status {entry.score_status}")


def samples_are_whole(record: GroupClosed, sample: Sample) -> Iterable[Violation]:
    length = len(sample.token_ids)
    name = ids.sample_id(record.group_id, sample.index)
    if len(sample.logprobs) != length:
        yield Violation("I5", name, f"{length} ids with {len(sample.logprobs)} logprobs")
    covered = 0
    for span in sample.version_spans:
        if span.start != covered or span.end <= span.start:
            yield Violation("I4", name, f"spans {sample.version_spans} are not one after the other")
            return
        covered = span.end
    if sample.status is SampleStatus.SUCCEEDED and covered != length:
        yield Violation("I4", name, f"spans cover {covered} of {length} tokens")
    if sample.status is SampleStatus.SUCCEEDED and sample.finish_reason is None:
        yield Violation("I5", name, "succeeded without a finish reason")


def sessions_hold(evidence: Evidence) -> Iterable[Violation]:
    records = {close.record.group_id: close.record for close in evidence.closes}
    for record in records.values():
        for entry in record.entries:
            yield from (Violation(*found) for found in trees_hold(record, entry))
    for rule in (answers_are_recorded, ends_are_as_told):
        yield from (Violation(*found) for found in rule(evidence.journal, records))


def parse_counts(text: str) -> dict[str, int]:
    pairs = (part.split("=") for part in text.split(",") if part)
    return {name: int(number) for name, number in pairs if int(number)}


def count(record: GroupClosed) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for entry in record.entries:
        found[entry.sample.status.value] += 1
    return dict(found)


# -- statuses -----------------------------------------------------------------------------------------


def statuses_have_a_cause(evidence: Evidence, expect: Expectation) -> Iterable[Violation]:
    """Expired only past its deadline, cancelled only when asked, failed only when the storm allows."""
    asked = {group for line in evidence.journal if isinstance(line, CancelAsked) for group in line.group_ids}
    for close in evidence.closes:
        record = close.record
        if record.reason is CloseReason.REJECTED:
            yield Violation("I1", record.group_id, f"was rejected after it was let in: {record.error}")
        for entry in record.entries:
            status, name = entry.sample.status, ids.sample_id(record.group_id, entry.sample.index)
            if status is SampleStatus.EXPIRED and record.closed_at < record.deadline - CLOCK_SLACK_S:
                yield Violation("I1", name, f"expired {record.deadline - record.closed_at:.1f} s before its deadline")
            if status is SampleStatus.CANCELLED and record.group_id not in asked:
                yield Violation("I1", name, "cancelled although nobody asked")
            if status is SampleStatus.FAILED and not expect.failures:
                yield Violation("I1", name, f"failed: {entry.sample.error}")


# -- I2 -----------------------------------------------------------------------------------------------


def keys_name_one_batch(journal: Iterable[Line]) -> Iterable[Violation]:
    named: dict[tuple[str, str], tuple[str, ...]] = {}
    for line in journal:
        if isinstance(line, Accepted):
            first = named.setdefault((line.tenant, line.key), line.group_ids)
            if first != line.group_ids:
                yield Violation("I2", line.group_ids[0], f"key {line.key!r} named {first} before")


def replies_equal_records(evidence: Evidence) -> Iterable[Violation]:
    records = {close.record.group_id: close.record for close in evidence.closes}
    archived = {group.group_id: group for part in evidence.archive for group in part.groups}
    for line in evidence.journal:
        if not isinstance(line, Replied):
            continue
        record = records.get(line.group_id)
        if record is None:
            yield from reply_equals_archive(line, archived.get(line.group_id))
            continue
        entries = {entry.sample.index: entry.sample for entry in record.entries}
        for sample in line.samples:
            recorded = entries.get(sample.index)
            name = ids.sample_id(line.group_id, sample.index)
            if recorded is None:
                yield Violation("I2", name, "was answered and is not in its record")
            elif recorded.status is not SampleStatus.SUCCEEDED:
                yield Violation("I2", name, f"was answered and is recorded as {recorded.status}")
            elif (recorded.token_ids, recorded.logprobs) != (sample.token_ids, sample.logprobs):
                yield Violation("I2", name, f"answered {sample.token_ids}, recorded {recorded.token_ids}")
            elif recorded.finish_reason is None or recorded.finish_reason.value != sample.finish_reason:
                yield Violation("I2", name, f"answered {sample.finish_reason}, recorded {recorded.finish_reason}")


def reply_equals_archive(line: Replied, group: ArchivedGroup | None) -> Iterable[Violation]:
    """For records that the stream holds no more."""
    if group is None:
        yield Violation("I2", line.group_id, "was answered and has no record")
        return
    rows = {sample.sample_index: sample for sample in group.samples}
    for sample in line.samples:
        row = rows.get(sample.index)
        if row is None or row.status != SampleStatus.SUCCEEDED.value:
            yield Violation("I2", ids.sample_id(line.group_id, sample.index), f"was answered and is archived as {row}")
        elif (TokenIds.of(row.token_ids), Floats.of(row.logprobs)) != (sample.token_ids, sample.logprobs):
            yield Violation("I2", ids.sample_id(line.group_id, sample.index), f"answered {sample}, archived {row}")


# -- I3 -----------------------------------------------------------------------------------------------


def archive_covers_once(evidence: Evidence, expect: Expectation) -> Iterable[Violation]:
    covered: dict[int, str] = {}
    archived: dict[int, ArchivedGroup] = {}
    for part in sorted(evidence.archive, key=lambda part: part.first_sequence):
        if part.problem:
            yield Violation("I3", part.manifest, part.problem)
        for sequence in range(part.first_sequence, part.last_sequence + 1):
            if sequence in covered:
                yield Violation("I3", part.manifest, f"covers {sequence}, as {covered[sequence]} does")
            covered[sequence] = part.manifest
        for group in part.groups:
            if not part.first_sequence <= group.sequence <= part.last_sequence:
                yield Violation("I3", group.group_id, f"at {group.sequence} lies outside {part.manifest}")
            if group.sequence in archived:
                yield Violation("I3", group.group_id, f"is archived twice at {group.sequence}")
            archived[group.sequence] = group
    closes = {close.sequence: close for close in evidence.closes}
    for sequence in sorted(set(range(1, evidence.last_sequence + 1)) - set(covered)):
        if sequence in closes and expect.archive_whole_stream:
            yield Violation("I3", closes[sequence].record.group_id, f"at {sequence} is in no manifest")
        elif sequence < evidence.first_sequence:
            yield Violation("I3", str(sequence), "was purged from the stream before it was archived")
    for sequence, close in closes.items():
        if sequence in covered:
            yield from same_group(close, archived.get(sequence))


def posts_are_kept_once(evidence: Evidence, expect: Expectation) -> Iterable[Violation]:
    """Each acknowledged post is where its cursor says, once; each archived post is the stored one."""
    archived: dict[int, StoredPost] = {}
    for part in evidence.archive:
        for post in part.posts:
            if not part.first_sequence <= post.sequence <= part.last_sequence or post.sequence in archived:
                yield Violation(
                    "I3", post.group_id, f"post {post.sequence} is archived twice or outside {part.manifest}"
                )
            archived[post.sequence] = post
    stored = {post.sequence: post for post in evidence.posts}
    covered = {n for part in evidence.archive for n in range(part.first_sequence, part.last_sequence + 1)}
    for sequence, post in stored.items():
        if expect.archived and (sequence in covered or expect.archive_whole_stream) and archived.get(sequence) != post:
            yield Violation("I3", post.group_id, f"post {sequence} is archived as {archived.get(sequence)}")
    claimed: dict[int, str] = {}
    for line in evidence.journal:
        if isinstance(line, Posted):
            found = stored.get(line.cursor) or archived.get(line.cursor)
            if found is None or found.group_id != line.group_id:
                yield Violation(
                    "I1", line.group_id, f"post {line.key!r} was acknowledged at {line.cursor}, which is {found}"
                )
            if claimed.setdefault(line.cursor, line.key) != line.key:
                yield Violation("I2", line.group_id, f"{line.cursor} was acknowledged to two keys")
    keys = [line.key for line in evidence.journal if isinstance(line, Posted)]
    if keys and len({**stored, **archived}) > len(set(keys)) and expect.all_let_in:
        yield Violation("I2", "posts", f"{len({**stored, **archived})} posts are kept of {len(set(keys))} keys")


def same_group(close: Close, group: ArchivedGroup | None) -> Iterable[Violation]:
    record = close.record
    if group is None:
        yield Violation("I3", record.group_id, f"at {close.sequence} is covered by a manifest and not in its object")
        return
    if group.group_id != record.group_id:
        yield Violation("I3", record.group_id, f"is archived at {close.sequence} as {group.group_id}")
        return
    wanted = [
        (
            entry.sample.index,
            entry.sample.status.value,
            entry.sample.token_ids,
            entry.sample.logprobs,
            entry.reward,
            [
                (
                    turn.turn,
                    turn.node.parent if turn.node else None,
                    turn.node.observation if turn.node else TokenIds(),
                    turn.token_ids,
                    turn.logprobs,
                )
                for turn in entry.turns
            ],
        )
        for entry in record.entries
    ]
    got = [
        (
            s.sample_index,
            s.status,
            TokenIds.of(s.token_ids),
            Floats.of(s.logprobs),
            s.reward,
            [
                (t.turn, t.parent, TokenIds.of(t.observation), TokenIds.of(t.token_ids), Floats.of(t.logprobs))
                for t in s.turns
            ],
        )
        for s in sorted(group.samples, key=lambda s: s.sample_index)
    ]
    if got != wanted:
        yield Violation("I3", record.group_id, f"archived {got}, closed {wanted}")


# -- the iterator ---------------------------------------------------------------------------------------


def iterators_see_all_once(evidence: Evidence) -> Iterable[Violation]:
    """Each reader yields every close of its run once, in stream order, over its own restarts."""
    closes: dict[str, list[Close]] = defaultdict(list)
    for close in sorted(evidence.closes, key=lambda close: close.sequence):
        closes[close.record.run].append(close)
    readers: dict[tuple[str, str], list[Delivered]] = defaultdict(list)
    for line in evidence.journal:
        if isinstance(line, Delivered):
            readers[line.reader, line.run].append(line)
    for (reader, run), lines in readers.items():
        wanted = [close.record.group_id for close in closes[run]]
        got = [line.group_id for line in lines]
        twice = sorted({group for group in got if got.count(group) > 1})
        for group in twice:
            yield Violation("iterator", group, f"delivered {got.count(group)} times to {reader}")
        for group in wanted:
            if group not in got:
                yield Violation("iterator", group, f"never reached {reader} of {run}")
        cursors = [line.cursor for line in lines]
        if cursors != sorted(cursors):
            yield Violation("iterator", run, f"{reader}'s cursor went back: {cursors}")
        if not twice and [group for group in got if group in set(wanted)] != [g for g in wanted if g in set(got)]:
            yield Violation("iterator", run, f"{reader} saw another order than the stream's")
