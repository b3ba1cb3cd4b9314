"""Judges a power cut: what the outside knew before it, against what is there afterwards.  Pure.

I11  accepted work, closed groups, posted rewards and manifested archives survive, and nothing had left the
     stream before its archive was durable.
What must hold of any history (I1-I5) is the checker's (`tests.chaos.checker`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rollgrid_contracts import subjects

from tests.chaos.checker import ArchivedGroup, Evidence, Violation, closes_of, same_group
from tests.chaos.journal import Accepted, Delivered

from .witness import ReadClose, Witnessed


class Before(NamedTuple):
    """What the outside had been told when the power failed.  `accepted` maps a group to its samples."""

    accepted: Mapping[str, int]
    delivered: Sequence[Delivered]
    witnessed: Witnessed

    @property
    def closed(self) -> set[str]:
        """Groups whose close had been read, at the stream or through the door."""
        read = {close.group_id for close in self.witnessed.closes.values()}
        return read | {line.group_id for line in self.delivered}


class After(NamedTuple):
    """What is there.  `jobs` are the groups of RG_JOBS; None once everything should have closed."""

    evidence: Evidence
    stored: Mapping[int, ReadClose]
    manifests: Mapping[str, str]
    jobs: frozenset[str] | None


class Figures(NamedTuple):
    """Counts of groups, of closes and of manifests, for the report."""

    accepted: int
    in_flight: int
    closes_read: int
    delivered: int
    manifests: int
    closes_on_copy: int
    purged_to: int
    jobs_on_copy: int
    resurrected: int
    lost: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())


def figures(before: Before, copy: After, lost: Sequence[Violation]) -> Figures:
    """`resurrected` groups are closed and held as a job: the job's last ack was not flushed."""
    jobs = copy.jobs or frozenset()
    return Figures(
        accepted=len(before.accepted),
        in_flight=len(set(before.accepted) - before.closed),
        closes_read=len(before.witnessed.closes),
        delivered=len(before.delivered),
        manifests=len(before.witnessed.manifests),
        closes_on_copy=copy.evidence.last_sequence,
        purged_to=copy.evidence.first_sequence - 1,
        jobs_on_copy=len(jobs),
        resurrected=len(jobs & set(closes_of(copy.evidence))),
        lost=len(lost),
    )


def survived(before: Before, after: After) -> list[Violation]:
    """Everything that the cut took; empty when the promise holds."""
    return [
        *lost_work(before, after),
        *lost_closes(before, after),
        *lost_deliveries(before, after),
        *lost_manifests(before, after),
        *purged_too_early(after),
        *archived_ahead(after),
    ]


def undelivered(evidence: Evidence) -> Iterator[Violation]:
    """The iterator reaches every accepted group over the cut, also what the stream no longer holds."""
    seen = {line.group_id for line in evidence.journal if isinstance(line, Delivered)}
    for line in evidence.journal:
        if isinstance(line, Accepted):
            for group in line.group_ids:
                if group not in seen:
                    yield Violation("iterator", group, f"accepted under key {line.key!r}, never delivered")


def lost_work(before: Before, after: After) -> Iterator[Violation]:
    """A group that was accepted is closed, or its job is still there."""
    known = set(closes_of(after.evidence)) | (after.jobs or frozenset())
    for group in before.accepted:
        if group not in known:
            what = "closed" if after.jobs is None else "closed nor held as a job"
            yield Violation("I11", group, f"was accepted before the cut and is not {what}")


def lost_closes(before: Before, after: After) -> Iterator[Violation]:
    """A close or post that was read is where it was: the same bytes in the stream, or the same in the archive."""
    archived, posts = archived_groups(after.evidence), archived_posts(after.evidence)
    for sequence, was in before.witnessed.closes.items():
        now = after.stored.get(sequence)
        if now is not None:
            if now != was:
                yield Violation(
                    "I11", was.group_id, f"was read at {sequence}, where {now.group_id} is stored now: {now}"
                )
        elif posts.get(sequence) == was.group_id and subjects.is_rewards(was.subject):
            continue
        elif sequence not in archived:
            yield Violation("I11", was.group_id, f"was read at {sequence}, neither stored nor archived there now")
        else:
            yield from same_group(was.close(), archived[sequence])


def lost_deliveries(before: Before, after: After) -> Iterator[Violation]:
    """A close that the iterator has yielded is at its cursor."""
    there = {sequence: close.group_id for sequence, close in after.stored.items()}
    there |= {sequence: group.group_id for sequence, group in archived_groups(after.evidence).items()}
    for line in before.delivered:
        if there.get(line.cursor) != line.group_id:
            yield Violation(
                "I11", line.group_id, f"was delivered at {line.cursor}, which is {there.get(line.cursor)} now"
            )


def lost_manifests(before: Before, after: After) -> Iterator[Violation]:
    """A manifest that was read is unchanged, and the object it names is whole."""
    problems = {part.manifest: part.problem for part in after.evidence.archive}
    for key, sha256 in before.witnessed.manifests.items():
        if key not in after.manifests:
            yield Violation("I11", key, "was read before the cut and is gone")
        elif after.manifests[key] != sha256:
            yield Violation("I11", key, "is not the manifest that was read before the cut")
        elif problems.get(key, "is not listed") is not None:
            yield Violation("I11", key, f"{problems.get(key, 'is not listed')}")


def purged_too_early(after: After) -> Iterator[Violation]:
    """What the stream no longer holds is in an object of the archive, by its sequence."""
    archived = archived_groups(after.evidence).keys() | archived_posts(after.evidence).keys()
    for sequence in range(1, after.evidence.last_sequence + 1):
        if sequence not in after.stored and sequence not in archived:
            yield Violation("I11", str(sequence), "is in the stream no more and in no object of the archive")


def archived_ahead(after: After) -> Iterator[Violation]:
    """No manifest covers a sequence that the stream has yet to give away."""
    for part in after.evidence.archive:
        if part.last_sequence > after.evidence.last_sequence:
            newest = after.evidence.last_sequence
            yield Violation("I11", part.manifest, f"covers {part.last_sequence}; the stream has come to {newest} only")


def archived_groups(evidence: Evidence) -> dict[int, ArchivedGroup]:
    return {group.sequence: group for part in evidence.archive for group in part.groups}


def archived_posts(evidence: Evidence) -> dict[int, str]:
    """Groups of the posted rewards in the archive, by sequence."""
    return {post.sequence: post.group_id for part in evidence.archive for post in part.posts}


def report(violations: Iterable[Violation], most: int = 20) -> str:
    listed = [str(violation)[:400] for violation in violations]
    return "\n".join([f"{len(listed)} broken promises", *listed[:most]])
