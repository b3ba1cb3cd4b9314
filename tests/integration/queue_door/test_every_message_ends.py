"""Done-when 3 and I1: whatever is published ends in exactly one place, and nothing is dropped in silence.

Bodies are made by hypothesis out of right ones, one part at a time, so that they fail at every depth.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from rollgrid_contracts import ids, subjects, topology
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.trajectories import CloseReason

from tests.support.stack import TENANT, Stack
from tests.support.waiting import until

from .queue import PROMPT, Closed, Queue, body, queue_of

BATCH = 60
"""Messages of one example: each example is a round trip through the stack."""

ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.integers(-3, 600), max_size=4),
    st.dictionaries(st.text(max_size=4), st.floats(), max_size=2),
    st.recursive(st.none(), lambda inner: st.lists(inner, min_size=1, max_size=1), max_leaves=80),
)
FIELDS = [
    "run",
    "tasks",
    "n",
    "sampling",
    "model",
    "metadata",
    "deadline_s",
    "priority",
    "weights",
    "rights",
    "scorers",
]
FIELDS += ["record_format", "cache_salt", "engagement_id", "unheard_of", "user"]
TASK_FIELDS = ["prompt", "messages", "prompt_token_ids", "n", "sampling", "task", "metadata", "tools", "strange"]


@st.composite
def submissions(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """A body and its headers: right, or wrong in one or several places, or no document at all."""
    run = draw(st.sampled_from(["fuzz-a", "fuzz-b", "_bad", "x" * 70]))
    request: dict[str, Any] = body(run, tasks=draw(st.integers(1, 3)), n=draw(st.integers(1, 3)))
    request["tasks"] = [dict(task) for task in request["tasks"]]
    request |= draw(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=2))
    if isinstance(request["tasks"], list) and request["tasks"] and isinstance(request["tasks"][0], dict):
        request["tasks"][0] |= draw(st.dictionaries(st.sampled_from(TASK_FIELDS), ODD, max_size=1))
    if draw(st.booleans()):
        raw = _msgpack(request)
    else:
        raw = _json(request)
    cut = draw(st.sampled_from([None, None, None, 0, 1, len(raw) // 2, len(raw) - 1]))
    raw = raw[:cut] + draw(st.sampled_from([b"", b"", b"", b"\x00", b"}", b"\xff\xfe"]))
    raw = draw(st.one_of(st.just(raw), st.just(raw), st.binary(max_size=40)))
    headers = draw(
        st.dictionaries(
            st.sampled_from(["Content-Type", "Idempotency-Key", "traceparent", "Rg-Claim", "Status", "content-type"]),
            st.sampled_from(["application/json", "application/msgpack", "text/plain", "k1", "k2", "503", "\x7f", "é"]),
            max_size=2,
        )
    )
    return raw, headers


def _msgpack(request: dict[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(request)
    except (OverflowError, UnicodeEncodeError, ValueError):
        return b"\xc1"


def _json(request: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(request)
    except (UnicodeEncodeError, ValueError):
        return b"{"


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=st.lists(submissions(), min_size=BATCH, max_size=BATCH))
async def test_every_message_ends_in_exactly_one_place(
    pipe: Stack, messages: list[tuple[bytes, dict[str, str]]]
) -> None:
    starts = pipe["ingest"].starts
    async with queue_of(pipe) as queue:
        before = {close.stored.sequence for close in await everything(queue)}
        sequences = []
        for number, (raw, headers) in enumerate(messages):
            if "Idempotency-Key" in headers:  # of its own: what several messages do under one key is told elsewhere
                headers = {**headers, "Idempotency-Key": f"{headers['Idempotency-Key']}{number}-{ids.new_key()}"}
            ack = await queue.client.jetstream().publish(subjects.submit(TENANT), raw, headers=headers or None)
            sequences.append(ack.seq)
        await queue.drained(60)
        found = [close for close in await settled(queue) if close.stored.sequence not in before]
        refused = [close for close in found if close.record.reason is CloseReason.REJECTED]
        told = Counter(close.record.metadata["rollgrid_submit"]["sequence"] for close in refused)
        assert set(told) <= set(sequences)
        for close in refused:
            assert {entry.sample.status for entry in close.record.entries} == {SampleStatus.FAILED}
            assert all(entry.sample.error is not None for entry in close.record.entries)
            alone = close.record.run == ids.REJECTED_RUN
            assert not alone or told[close.record.metadata["rollgrid_submit"]["sequence"]] == close.record.n == 1
        for close in found:
            assert len(close.record.entries) == close.record.n
        assert len({close.record.group_id for close in found}) == len(found)
        # an accepted group says when its message was stored, and no two messages are stored at once
        accepted = {close.record.created_at for close in found if close.record.reason is not CloseReason.REJECTED}
        assert len(accepted) + len(told) == len(messages)
        event(f"accepted {len(accepted) > 0}")
    assert pipe["ingest"].starts == starts
    assert pipe["ingest"].readiness()[0] == 200


async def everything(queue: Queue) -> list[Closed]:
    return await queue.closes("*")


async def settled(queue: Queue) -> list[Closed]:
    """All closes of the tenant, once every job has let go and the ledger has acknowledged every event.

    It acknowledges no event of a refusal before the close is written.
    """

    async def done() -> bool:
        jobs = (await queue.bus.stream_info(topology.JOBS.name)).state
        events = (await queue.bus.stream_info(topology.SAMPLES.name)).state
        reader = [name for name in await queue.bus.consumer_names(topology.SAMPLES.name) if name.startswith("ledger-")]
        info = await queue.bus.consumer_info(topology.SAMPLES.name, reader[-1])
        floor = info.ack_floor.stream_seq if info is not None and info.ack_floor is not None else 0
        return jobs.messages == 0 and floor >= events.last_seq

    await until(done, 60, "every job and event has led to its close", every_s=0.05)
    return await everything(queue)


async def test_an_accepted_message_with_nothing_wrong_is_among_them(queue: Queue) -> None:
    """The property above is not satisfied by refusing everything."""
    await queue.submit({**body("fuzz-right"), "tasks": [{"prompt_token_ids": PROMPT}] * 2})
    assert [close.record.reason for close in await queue.closed("fuzz-right", 2)] == [CloseReason.COMPLETE] * 2
