"""One fully filled example of everything that crosses a process boundary, and its smallest form.

Golden bytes are made of these, so an example never changes; a new message or field gets a new one.
"""

from __future__ import annotations

from typing import Any

from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import (
    SessionEnded,
    SessionForked,
    SessionOpened,
)
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import (
    CancelWork,
    DrainWorker,
    GroupStatus,
    LedgerAnswer,
    LedgerQuery,
)
from rollgrid_contracts.jobs import (
    OpenEpisode,
    SampleGroup,
    SamplingParams,
)
from rollgrid_contracts.samples import (
    GroupsCancelled,
    Sample,
    SamplesFinished,
    SampleStatus,
)
from rollgrid_contracts.scoring import SamplesScored
from rollgrid_contracts.trajectories import (
    CloseReason,
    Entry,
    GroupClosed,
)

from tests.contract.examples.fleet import FLEET
from tests.contract.examples.parts import (
    BATCH,
    GROUP,
)
from tests.contract.examples.sessions import SESSIONS
from tests.contract.examples.weights import WEIGHTS
from tests.contract.examples.work import WORK

FULL: dict[str, Any] = {**WORK, **SESSIONS, **WEIGHTS, **FLEET}
"""Every field set to something that is not its default."""

MINIMAL: dict[str, Any] = {
    "sample_group.min": SampleGroup(
        tenant="a",
        run="r",
        batch_id=BATCH,
        group_id=GROUP,
        n=1,
        indexes=(0,),
        policy="p",
        pool="q",
        prompt_token_ids=TokenIds.of([1]),
        sampling=SamplingParams(max_tokens=1),
        created_at=0.5,
        deadline=1.5,
    ),
    "samples_finished.failed": SamplesFinished(
        tenant="a",
        run="r",
        batch_id=BATCH,
        group_id=GROUP,
        n=1,
        policy="p",
        job_seq=1,
        samples=(
            Sample(
                index=0,
                status=SampleStatus.FAILED,
                error=ErrorInfo(code=ErrorCode.POISON, message="killed its worker", boundary=Boundary.ENGINE),
            ),
        ),
    ),
    "group_closed.rejected": GroupClosed(
        tenant="a",
        run="_rejected",
        batch_id="",
        group_id=GROUP,
        n=1,
        policy="",
        reason=CloseReason.REJECTED,
        created_at=0.5,
        closed_at=1.5,
        error=ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="not msgpack"),
        entries=(Entry(sample=Sample(index=0, status=SampleStatus.FAILED)),),
    ),
    "ledger_query.batch": LedgerQuery(batch_id=BATCH),
    "ledger_answer.unknown": LedgerAnswer(epoch=1, groups=(GroupStatus(group_id=GROUP, known=False),)),
}

ALL: dict[str, Any] = {**FULL, **MINIMAL}

UNIONS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (SampleGroup | OpenEpisode, ("sample_group", "open_episode")),
    (CancelWork | DrainWorker, ("cancel_work", "drain_worker")),
    (
        SamplesFinished | SamplesScored | GroupsCancelled | SessionOpened | SessionForked | SessionEnded,
        ("samples_finished", "samples_scored", "groups_cancelled", "session_forked", "session_ended"),
    ),
)
"""What travels on one subject and is told apart by its tag."""
