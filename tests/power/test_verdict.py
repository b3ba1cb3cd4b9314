"""The verdict on a power cut is not believed until it has caught each planted loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from rollgrid_contracts import codec
from rollgrid_contracts.columns import manifest_key

from tests.chaos.checker import ArchivedRange, Close, Evidence, check
from tests.chaos.journal import Accepted, Delivered
from tests.chaos.test_checker import GROUPS, KEY, RUN, TENANT, N, archived, close, closed

from .verdict import After, Before, figures, survived, undelivered
from .witness import ReadClose, ReadManifest, Witnessed, read


def as_read(one: Close) -> ReadClose:
    return ReadClose(
        sequence=one.sequence,
        subject=one.subject,
        stamp=f"2030-01-01T00:00:{one.sequence:02d}Z",
        headers=dict(one.headers),
        data=codec.encode(one.record),
    )


CLOSES = [close(sequence, closed(group)) for sequence, group in enumerate(GROUPS, 1)]
READ = {one.sequence: as_read(one) for one in CLOSES}
FIRST, SECOND = manifest_key(1), manifest_key(3)


def before() -> Before:
    """Four groups accepted, three closes read, two of them delivered, one manifest seen."""
    delivered = [
        Delivered(at=104, reader="r", run=RUN, cursor=one.sequence, group_id=one.record.group_id) for one in CLOSES[:2]
    ]
    witnessed = Witnessed({number: READ[number] for number in (1, 2, 3)}, {FIRST: "digest-1"}, 1)
    return Before(dict.fromkeys(GROUPS, N), delivered, witnessed)


def copy() -> After:
    """Sequence 1 is purged and archived, 2 is both stored and archived, 3 is stored, the fourth group is a job."""
    ranges = [ArchivedRange(FIRST, 1, 2, tuple(map(archived, CLOSES[:2])))]
    accepted = Accepted(at=101, tenant=TENANT, run=RUN, key=KEY, group_ids=GROUPS, n=N, deadline=200)
    evidence = Evidence([accepted, *before().delivered], CLOSES[1:3], ranges, 2, 3)
    return After(evidence, {number: READ[number] for number in (2, 3)}, {FIRST: "digest-1"}, frozenset(GROUPS[2:]))


def test_a_cut_that_took_nothing_is_believed() -> None:
    assert survived(before(), copy()) == []
    counted = figures(before(), copy(), [])
    assert (counted.accepted, counted.in_flight, counted.closes_read, counted.purged_to) == (4, 1, 3, 1)
    assert (counted.jobs_on_copy, counted.resurrected, counted.lost) == (2, 1, 0)


def without_job(after: After) -> After:
    return after._replace(jobs=frozenset())


def without_close(after: After) -> After:
    """The newest close is gone, and its group is a job again: it would be closed twice."""
    evidence = after.evidence._replace(closes=after.evidence.closes[:1], last_sequence=2)
    return after._replace(evidence=evidence, stored={2: READ[2]})


def with_other_bytes(after: After) -> After:
    other = msgspec.structs.replace(READ[3], data=codec.encode(closed(GROUPS[2], closed_at=111.0)))
    return after._replace(stored={2: READ[2], 3: other})


def with_another_time(after: After) -> After:
    """The same bytes, stored anew at the sequence of what was lost."""
    return after._replace(stored={2: READ[2], 3: msgspec.structs.replace(READ[3], stamp="2030-01-01T00:01:00Z")})


def with_another_group_there(after: After) -> After:
    return after._replace(stored={2: READ[2], 3: as_read(close(3, closed(GROUPS[3])))})


def without_manifest(after: After) -> After:
    return after._replace(evidence=after.evidence._replace(archive=[]), manifests={})


def with_another_manifest(after: After) -> After:
    return after._replace(manifests={FIRST: "digest-2"})


def without_object(after: After) -> After:
    """The manifest is there and the object it names is not whole."""
    part = after.evidence.archive[0]._replace(problem="the object's digest is not the manifest's")
    return after._replace(evidence=after.evidence._replace(archive=[part]))


def purged_unarchived(after: After) -> After:
    evidence = after.evidence._replace(closes=CLOSES[:0], first_sequence=4)
    return after._replace(evidence=evidence, stored={})


def purged_inside(after: After) -> After:
    """A hole behind the stream's beginning, in the range of a manifest that does not name it."""
    whole = after.evidence.archive[0]
    evidence = after.evidence._replace(archive=[whole._replace(groups=whole.groups[1:])], first_sequence=1)
    return after._replace(evidence=evidence)


def archived_otherwise(after: After) -> After:
    """The archive's row of a purged close is not what was read."""
    part = after.evidence.archive[0]
    rows = part.groups[0].samples
    group = part.groups[0]._replace(samples=(rows[0]._replace(reward=0.0), *rows[1:]))
    return after._replace(evidence=after.evidence._replace(archive=[part._replace(groups=(group, *part.groups[1:]))]))


def archived_ahead(after: After) -> After:
    """A manifest covers a close that the stream has lost: another one will get its sequence."""
    ahead = ArchivedRange(SECOND, 3, 4, (archived(CLOSES[2]), archived(CLOSES[3])))
    return after._replace(evidence=after.evidence._replace(archive=[*after.evidence.archive, ahead]))


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (without_job, "is not closed nor held as a job"),
        (without_close, "neither stored nor archived there now"),
        (with_other_bytes, "is stored now"),
        (with_another_time, "is stored now"),
        (with_another_group_there, "is stored now"),
        (without_manifest, "was read before the cut and is gone"),
        (with_another_manifest, "is not the manifest"),
        (without_object, "digest is not the manifest's"),
        (purged_unarchived, "in no object of the archive"),
        (purged_inside, "in no object of the archive"),
        (archived_otherwise, "archived"),
        (archived_ahead, "has come to 3 only"),
    ],
)
def test_i11_a_planted_loss_is_found(plant: Callable[[After], After], told: str) -> None:
    found = [str(violation) for violation in survived(before(), plant(copy()))]
    assert any(told in violation for violation in found), found


def test_a_delivered_close_must_be_at_its_cursor() -> None:
    moved = before()._replace(
        delivered=[Delivered(at=104, reader="r", run=RUN, cursor=3, group_id=GROUPS[0])],
        witnessed=Witnessed({}, {}, 1),
    )
    assert [violation.group for violation in survived(moved, copy())] == [GROUPS[0]]


def test_in_the_end_a_job_is_no_substitute_for_a_close() -> None:
    ended = copy()._replace(jobs=None)
    assert [violation.group for violation in survived(before(), ended)] == [GROUPS[3]]


def test_a_close_redone_after_the_cut_is_a_second_close() -> None:
    """The checker's part: the copy lost nothing, but the resurrected job was closed again."""
    again = close(4, closed(GROUPS[2]))
    evidence = copy().evidence._replace(closes=[*CLOSES[1:3], again], last_sequence=4)
    assert any("closed 2 times" in str(violation) for violation in check(evidence))


def test_the_iterator_must_reach_everything() -> None:
    assert {violation.group for violation in undelivered(copy().evidence)} == {GROUPS[2], GROUPS[3]}


def test_a_torn_line_is_no_claim(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = [codec.encode(line, codec.JSON) + b"\n" for line in (READ[1], ReadManifest(key=FIRST, sha256="x"), READ[2])]
    path.write_bytes(b"".join(lines)[:-5])
    assert read(path) == Witnessed({1: READ[1]}, {FIRST: "x"}, 1)
