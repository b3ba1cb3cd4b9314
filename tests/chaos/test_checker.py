"""The checker is not believed until it has caught each planted violation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed

from tests.chaos.checker import (
    ArchivedGroup,
    ArchivedRange,
    ArchivedSample,
    Close,
    Evidence,
    Expectation,
    StoredPost,
    check,
)
from tests.chaos.journal import (
    Accepted,
    Attempted,
    CancelAsked,
    Delivered,
    Journal,
    Line,
    Posted,
    Refused,
    Replied,
    RepliedSample,
    read,
)

TENANT, RUN, KEY, N = "acme", "run-1", "k1", 3
GROUPS = tuple(ids.group_id(TENANT, RUN, KEY, position) for position in range(4))


def sample(index: int, **changes: Any) -> Sample:
    whole: dict[str, Any] = {
        "status": SampleStatus.SUCCEEDED,
        "token_ids": TokenIds.of([index, 7]),
        "logprobs": Floats.of([-0.5, -0.25]),
        "finish_reason": FinishReason.LENGTH,
        "version_spans": (VersionSpan(version=0, start=0, end=2),),
    }
    return Sample(index=index, **{**whole, **changes})


def closed(group: str, **changes: Any) -> GroupClosed:
    whole: dict[str, Any] = {
        "tenant": TENANT,
        "run": RUN,
        "batch_id": "b",
        "n": N,
        "policy": "p",
        "reason": CloseReason.COMPLETE,
        "created_at": 100.0,
        "closed_at": 110.0,
        "deadline": 200.0,
        "entries": tuple(
            Entry(sample=sample(index), reward=1.0, score_status=ScoreStatus.SCORED) for index in range(N)
        ),
    }
    return GroupClosed(group_id=group, **{**whole, **changes})


def close(sequence: int, record: GroupClosed) -> Close:
    headers = {"Rg-Group": record.group_id, "Rg-Counts": f"succeeded={record.n},failed=0,cancelled=0,expired=0"}
    return Close(sequence, subjects.trajectories(record.tenant, record.run), headers, record)


def archived(one: Close) -> ArchivedGroup:
    return ArchivedGroup(
        one.sequence,
        one.record.group_id,
        tuple(
            ArchivedSample(
                e.sample.index, e.sample.status.value, tuple(e.sample.token_ids), tuple(e.sample.logprobs), e.reward
            )
            for e in one.record.entries
        ),
    )


def good() -> Evidence:
    closes = [close(sequence, closed(group)) for sequence, group in enumerate(GROUPS, 1)]
    journal: list[Line] = [
        Attempted(at=100, tenant=TENANT, run=RUN, key=KEY, groups=4, n=N),
        Accepted(at=101, tenant=TENANT, run=RUN, key=KEY, group_ids=GROUPS, n=N, deadline=200),
        Accepted(at=102, tenant=TENANT, run=RUN, key=KEY, group_ids=GROUPS, n=N, deadline=200),
        Replied(
            at=103,
            group_id=GROUPS[0],
            samples=(
                RepliedSample(
                    index=1, token_ids=TokenIds.of([1, 7]), logprobs=Floats.of([-0.5, -0.25]), finish_reason="length"
                ),
            ),
        ),
        *(Delivered(at=104, reader="r", run=RUN, cursor=c.sequence, group_id=c.record.group_id) for c in closes),
    ]
    archive = [
        ArchivedRange("m1", 1, 2, tuple(map(archived, closes[:2]))),
        ArchivedRange("m2", 3, 4, tuple(map(archived, closes[2:]))),
    ]
    return Evidence(journal, closes, archive, 1, 4)


def replaced(evidence: Evidence, sequence: int, **changes: Any) -> Evidence:
    """The same history with one close altered, in stream and archive alike."""
    changed = [
        close(c.sequence, msgspec.structs.replace(c.record, **changes)) if c.sequence == sequence else c
        for c in evidence.closes
    ]
    by_sequence = {c.sequence: c for c in changed}
    archive = [
        part._replace(groups=tuple(archived(by_sequence[group.sequence]) for group in part.groups))
        for part in evidence.archive
    ]
    return evidence._replace(closes=changed, archive=archive)


def entries(*samples: Sample) -> tuple[Entry, ...]:
    return tuple(Entry(sample=one, reward=1.0, score_status=ScoreStatus.SCORED) for one in samples)


def lost_group(e: Evidence) -> Evidence:
    return e._replace(closes=e.closes[:3], archive=[e.archive[0], ArchivedRange("m2", 3, 3, e.archive[1].groups[:1])])


def closed_twice(e: Evidence) -> Evidence:
    again = close(5, e.closes[0].record)
    part = ArchivedRange("m3", 5, 5, (archived(again),))
    return e._replace(closes=[*e.closes, again], archive=[*e.archive, part], last_sequence=5)


def closed_twice_once_only_in_the_archive(e: Evidence) -> Evidence:
    part = ArchivedRange("m3", 5, 5, (archived(close(5, e.closes[0].record)),))
    return e._replace(archive=[*e.archive, part], last_sequence=5)


def invented(e: Evidence) -> Evidence:
    ghost = close(5, closed("gnobodysubmittedthis00000"))
    part = ArchivedRange("m3", 5, 5, (archived(ghost),))
    return e._replace(closes=[*e.closes, ghost], archive=[*e.archive, part], last_sequence=5)


def key_with_two_names(e: Evidence) -> Evidence:
    other = Accepted(at=1, tenant=TENANT, run=RUN, key=KEY, group_ids=GROUPS[::-1], n=N, deadline=200)
    return e._replace(journal=[*e.journal, other])


def another_reply(e: Evidence, **changes: Any) -> Evidence:
    (reply,) = [line for line in e.journal if isinstance(line, Replied)]
    bad = msgspec.structs.replace(reply, samples=(msgspec.structs.replace(reply.samples[0], **changes),))
    return e._replace(journal=[*e.journal, bad])


def answered_without_record(e: Evidence) -> Evidence:
    (reply,) = [line for line in e.journal if isinstance(line, Replied)]
    return e._replace(journal=[*e.journal, msgspec.structs.replace(reply, group_id="gother")])


def archive_gap(e: Evidence) -> Evidence:
    return e._replace(archive=e.archive[:1])


def archive_overlap(e: Evidence) -> Evidence:
    wide = ArchivedRange("m2", 2, 4, (*e.archive[0].groups[1:], *e.archive[1].groups))
    return e._replace(archive=[e.archive[0], wide])


def archive_missing_row(e: Evidence) -> Evidence:
    return e._replace(archive=[e.archive[0], e.archive[1]._replace(groups=e.archive[1].groups[:1])])


def archive_short_group(e: Evidence) -> Evidence:
    """The stream no longer holds it, so the archive alone must be whole."""
    first = e.archive[0].groups[0]
    short = e.archive[0]._replace(groups=(first._replace(samples=first.samples[:2]), e.archive[0].groups[1]))
    return e._replace(closes=e.closes[2:], archive=[short, e.archive[1]], first_sequence=3)


def archived_reply_differs(e: Evidence) -> Evidence:
    changed = another_reply(e, token_ids=TokenIds.of([1, 8]))
    return changed._replace(closes=e.closes[2:], first_sequence=3)


def archive_altered(e: Evidence) -> Evidence:
    first = e.archive[0].groups[0]
    changed = first._replace(samples=(first.samples[0]._replace(reward=None), *first.samples[1:]))
    return e._replace(archive=[e.archive[0]._replace(groups=(changed, e.archive[0].groups[1])), e.archive[1]])


def archive_broken_digest(e: Evidence) -> Evidence:
    return e._replace(archive=[e.archive[0]._replace(problem="sha256 differs"), e.archive[1]])


def purged_unarchived(e: Evidence) -> Evidence:
    return e._replace(closes=e.closes[2:], archive=e.archive[1:], first_sequence=3)


def delivered_twice(e: Evidence) -> Evidence:
    return e._replace(journal=[*e.journal, e.journal[-1]])


def never_delivered(e: Evidence) -> Evidence:
    return e._replace(journal=e.journal[:-1])


def cursor_back(e: Evidence) -> Evidence:
    *rest, last = e.journal
    assert isinstance(last, Delivered)
    return e._replace(journal=[*rest, msgspec.structs.replace(last, cursor=1)])


def wrong_order(e: Evidence) -> Evidence:
    *rest, third, fourth = e.journal
    assert isinstance(third, Delivered)
    assert isinstance(fourth, Delivered)
    swapped = (
        msgspec.structs.replace(third, group_id=fourth.group_id),
        msgspec.structs.replace(fourth, group_id=third.group_id),
    )
    return e._replace(journal=[*rest, *swapped])


def on_a_foreign_subject(e: Evidence) -> Evidence:
    return e._replace(closes=[e.closes[0]._replace(subject=subjects.trajectories("evil", RUN)), *e.closes[1:]])


def header_of_another(e: Evidence) -> Evidence:
    return e._replace(closes=[e.closes[0]._replace(headers={"Rg-Group": GROUPS[1]}), *e.closes[1:]])


def counts_that_lie(e: Evidence) -> Evidence:
    headers = {"Rg-Group": GROUPS[0], "Rg-Counts": "succeeded=2,failed=1,cancelled=0,expired=0"}
    return e._replace(closes=[e.closes[0]._replace(headers=headers), *e.closes[1:]])


def turned_away(e: Evidence) -> Evidence:
    attempt = Attempted(at=1, tenant=TENANT, run=RUN, key="k9", groups=1, n=N)
    refusal = Refused(at=2, key="k9", status=404, code="model_not_found")
    return e._replace(journal=[*e.journal, attempt, refusal])


DOCTORED: dict[str, tuple[str, Callable[[Evidence], Evidence]]] = {
    "a lost group": ("I1", lost_group),
    "a group closed twice": ("I1", closed_twice),
    "a second close only the archive remembers": ("I1", closed_twice_once_only_in_the_archive),
    "a close nobody submitted": ("I1", invented),
    "a missing entry": ("I5", lambda e: replaced(e, 2, entries=entries(sample(0), sample(1)))),
    "a doubled index": ("I5", lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(1)))),
    "entries out of order": ("I5", lambda e: replaced(e, 2, entries=entries(sample(1), sample(0), sample(2)))),
    "ids without logprobs": (
        "I5",
        lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(2, logprobs=Floats.of([-1.0])))),
    ),
    "tokens without a version": (
        "I4",
        lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(2, version_spans=()))),
    ),
    "spans with a hole": (
        "I4",
        lambda e: replaced(
            e,
            2,
            entries=entries(sample(0), sample(1), sample(2, version_spans=(VersionSpan(version=0, start=1, end=2),))),
        ),
    ),
    "a reward for an unscored sample": (
        "F",
        lambda e: replaced(
            e,
            2,
            entries=(
                *entries(sample(0), sample(1)),
                Entry(sample=sample(2), reward=0.0, score_status=ScoreStatus.VERIFIER_ERROR),
            ),
        ),
    ),
    "success without a finish reason": (
        "I5",
        lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(2, finish_reason=None))),
    ),
    "a failure nobody caused": (
        "I1",
        lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(2, status=SampleStatus.FAILED))),
    ),
    "a cancellation nobody asked for": (
        "I1",
        lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(2, status=SampleStatus.CANCELLED))),
    ),
    "an expiry before the deadline": (
        "I1",
        lambda e: replaced(e, 2, entries=entries(sample(0), sample(1), sample(2, status=SampleStatus.EXPIRED))),
    ),
    "an accepted group rejected later": ("I1", lambda e: replaced(e, 2, reason=CloseReason.REJECTED)),
    "one key, two names": ("I2", key_with_two_names),
    "a reply with other tokens": ("I2", lambda e: another_reply(e, token_ids=TokenIds.of([1, 8]))),
    "a reply with other logprobs": ("I2", lambda e: another_reply(e, logprobs=Floats.of([-0.5, -0.26]))),
    "a reply with another reason": ("I2", lambda e: another_reply(e, finish_reason="stop")),
    "a reply of a sample that is not recorded": ("I2", lambda e: another_reply(e, index=9)),
    "a reply without a record": ("I2", answered_without_record),
    "a close in no manifest": ("I3", archive_gap),
    "manifests that overlap": ("I3", archive_overlap),
    "a covered close without its row": ("I3", archive_missing_row),
    "an archived group without an entry": ("I5", archive_short_group),
    "a reply that differs from the archive": ("I2", archived_reply_differs),
    "an archived reward that differs": ("I3", archive_altered),
    "an object that is not its digest": ("I3", archive_broken_digest),
    "a purge before the archive": ("I3", purged_unarchived),
    "a group delivered twice": ("iterator", delivered_twice),
    "a group never delivered": ("iterator", never_delivered),
    "a cursor that went back": ("iterator", cursor_back),
    "another order than the stream's": ("iterator", wrong_order),
    "a record on another tenant's subject": ("I7", on_a_foreign_subject),
    "another group's header": ("I5", header_of_another),
    "counts that lie": ("I5", counts_that_lie),
    "a good request turned away": ("door", turned_away),
}


def test_a_good_history_holds() -> None:
    assert check(good()) == []


@pytest.mark.parametrize("name", DOCTORED)
def test_a_planted_violation_is_found(name: str) -> None:
    promise, doctor = DOCTORED[name]
    found = check(doctor(good()))
    assert promise in {violation.promise for violation in found}, found


def test_a_purged_stream_is_no_violation_where_the_archive_has_it() -> None:
    evidence = good()
    assert check(evidence._replace(closes=evidence.closes[2:], first_sequence=3), Expectation(iterated=False)) == []


def test_what_was_asked_for_is_no_violation() -> None:
    cancelled = entries(sample(0), sample(1), sample(2, status=SampleStatus.CANCELLED))
    evidence = replaced(good(), 2, entries=cancelled)
    counts = {"Rg-Group": GROUPS[1], "Rg-Counts": "succeeded=2,failed=0,cancelled=1,expired=0"}
    closes = [c._replace(headers=counts) if c.sequence == 2 else c for c in evidence.closes]
    asked = CancelAsked(at=101, group_ids=(GROUPS[1],))
    assert check(evidence._replace(closes=closes, journal=[*evidence.journal, asked])) == []


def test_failures_are_no_violation_where_the_storm_causes_them() -> None:
    failed = entries(sample(0), sample(1), sample(2, status=SampleStatus.FAILED))
    evidence = replaced(good(), 2, entries=failed)
    counts = {"Rg-Group": GROUPS[1], "Rg-Counts": "succeeded=2,failed=1"}
    closes = [c._replace(headers=counts) if c.sequence == 2 else c for c in evidence.closes]
    assert check(evidence._replace(closes=closes), Expectation(failures=True)) == []


def test_an_unanswered_attempt_may_have_closed_or_not() -> None:
    evidence = good()
    never_answered = [line for line in evidence.journal if not isinstance(line, Accepted)]
    open_door = Expectation(all_let_in=False)
    assert check(evidence._replace(journal=never_answered), open_door) == []
    attempt = Attempted(at=1, tenant=TENANT, run=RUN, key="lost", groups=2, n=N)
    assert check(evidence._replace(journal=[*evidence.journal, attempt]), open_door) == []


def test_a_journal_survives_a_torn_last_line(tmp_path: Any) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for line in good().journal:
        journal.write(line)
    journal.close()
    with (tmp_path / "journal.jsonl").open("ab") as out:
        out.write(b'{"type":"accep')
    assert read(tmp_path / "journal.jsonl") == good().journal


# -- posted rewards -----------------------------------------------------------------------------------


def with_posts(stored: list[StoredPost], archived_posts: list[StoredPost], journal: list[Line]) -> list[str]:
    manifest = ArchivedRange("m", 1, 9, (), None, tuple(archived_posts))
    evidence = Evidence(journal, (), (manifest,), 1, 9, stored)
    return [violation.promise for violation in check(evidence, Expectation(iterated=False))]


POST = StoredPost(5, GROUPS[0])
CLAIM = Posted(at=1.0, key="r1", group_id=GROUPS[0], cursor=5)


def test_posts_that_are_kept_once_break_nothing() -> None:
    assert with_posts([POST], [POST], [CLAIM]) == []
    assert with_posts([], [POST], [CLAIM, CLAIM]) == [], "purged, and acknowledged again under its key"


@pytest.mark.parametrize(
    ("stored", "archive", "journal", "promise"),
    [
        ([], [], [CLAIM], "I1"),
        ([StoredPost(5, GROUPS[1])], [StoredPost(5, GROUPS[1])], [CLAIM], "I1"),
        ([POST], [], [CLAIM], "I3"),
        ([POST], [StoredPost(5, GROUPS[1])], [CLAIM], "I3"),
        ([POST], [POST, POST], [CLAIM], "I3"),
        ([POST], [POST, StoredPost(12, GROUPS[0])], [CLAIM], "I3"),
        ([POST], [POST], [CLAIM, msgspec.structs.replace(CLAIM, key="r2")], "I2"),
        ([POST, StoredPost(6, GROUPS[0])], [POST, StoredPost(6, GROUPS[0])], [CLAIM], "I2"),
    ],
)
def test_a_lost_doubled_or_altered_post_is_found(
    stored: list[StoredPost], archive: list[StoredPost], journal: list[Line], promise: str
) -> None:
    assert promise in with_posts(stored, archive, journal)
