"""Archive rows hold a closed group without loss, and say in columns what the record says.  Turns: `test_archive_turns`."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import BufferReader
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.columns import COLUMNS, data_key, first_of_manifest, manifest_key
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import Purpose, Rights, SamplingParams, VersionSpan
from rollgrid_contracts.samples import Parsed, Sample, SampleStatus, Timings, TopLogprobs
from rollgrid_contracts.scoring import Score, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed
from rollgrid_runtime import archive_rows

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.lists(st.floats(width=32), max_size=8).map(Floats.of)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(TokenIds.of)
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
BODY = st.dictionaries(TEXT, ANY, max_size=3)
ERRORS = st.builds(ErrorInfo, code=st.sampled_from(ErrorCode), message=TEXT)
SAMPLES = st.builds(
    Sample,
    index=st.integers(0, 9),
    attempt=st.integers(1, 5),
    status=st.sampled_from(SampleStatus),
    token_ids=TOKENS,
    logprobs=FLOATS,
    top_logprobs=st.none() | st.builds(TopLogprobs, offsets=TOKENS, token_ids=TOKENS, logprobs=FLOATS),
    text=st.none() | TEXT,
    parsed=st.none() | st.builds(Parsed, content=TEXT, tool_calls=st.tuples(BODY)),
    version_spans=st.lists(
        st.builds(VersionSpan, version=st.integers(0, 9), start=st.just(0), end=st.integers(0, 9))
    ).map(tuple),
    seed=st.none() | st.integers(0, 2**63 - 1),
    timings=st.builds(Timings, finished_at=st.floats(0, 1e10)),
    error=st.none() | ERRORS,
)
SCORES = st.builds(
    Score, scorer=TEXT, status=st.sampled_from(ScoreStatus), value=st.none() | st.floats(allow_nan=False), detail=TEXT
)
ENTRIES = st.builds(
    Entry,
    sample=SAMPLES,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    score_status=st.none() | st.sampled_from(ScoreStatus),
    scores=st.lists(SCORES, max_size=2).map(tuple),
    staleness=st.none() | st.integers(0, 9),
    turns=st.lists(SAMPLES, max_size=2).map(tuple),
    engine=TEXT,
)
GROUPS = st.builds(
    GroupClosed,
    tenant=st.sampled_from(["acme", "globex"]),
    run=st.sampled_from(["r1", "r2"]),
    batch_id=TEXT,
    group_id=TEXT,
    n=st.integers(1, 9),
    policy=TEXT,
    reason=st.sampled_from(CloseReason),
    prompt_token_ids=TOKENS,
    prompt_text=st.none() | TEXT,
    messages=st.none() | st.tuples(BODY),
    sampling=st.none() | st.builds(SamplingParams, max_tokens=st.integers(1, 9)),
    task=BODY,
    metadata=BODY,
    rights=st.builds(Rights, purposes=st.lists(st.sampled_from(Purpose), max_size=3).map(tuple)),
    created_at=st.floats(0, 1e10),
    closed_at=st.floats(0, 1e10),
    job_seqs=st.lists(st.integers(0, 99), max_size=2).map(tuple),
    error=st.none() | ERRORS,
    entries=st.lists(ENTRIES, min_size=1, max_size=4).map(tuple),
)
BATCHES = st.lists(GROUPS, min_size=1, max_size=4).map(lambda groups: [(10 + 3 * i, g) for i, g in enumerate(groups)])


def without_turns(groups: list[Any]) -> list[Any]:
    return [
        (seq, msgspec.structs.replace(g, entries=tuple(msgspec.structs.replace(e, turns=()) for e in g.entries)))
        for seq, g in groups
    ]


@settings(max_examples=30, deadline=None)
@given(groups=BATCHES)
def test_rows_give_back_the_very_groups(groups: list) -> None:
    assert archive_rows.from_parquet(archive_rows.to_parquet(groups)) == without_turns(groups)


@settings(max_examples=30, deadline=None)
@given(
    groups=BATCHES, tenant=st.sampled_from([None, "acme", "globex"]), run=st.sampled_from([None, "r1"]), data=st.data()
)
def test_readers_get_their_tenant_and_nothing_else(groups: list, tenant: str, run: str, data: st.DataObject) -> None:
    after, limit = data.draw(st.integers(0, 25)), data.draw(st.none() | st.integers(0, 3))
    wanted = [(s, g) for s, g in groups if s > after and tenant in (None, g.tenant) and run in (None, g.run)]
    found = archive_rows.from_parquet(archive_rows.to_parquet(groups), tenant, run, after, limit)
    assert found == without_turns(wanted[:limit])


@settings(max_examples=30, deadline=None)
@given(groups=BATCHES)
def test_columns_say_what_the_record_says(groups: list) -> None:
    table = pq.read_table(BufferReader(archive_rows.to_parquet(groups)))
    assert table.column_names == [column.name for column in COLUMNS]
    rows = table.to_pylist()
    entries = [(seq, group, entry) for seq, group in groups for entry in group.entries]
    assert len(rows) == len(entries)
    for row, (seq, group, entry) in zip(rows, entries, strict=True):
        assert (row["sequence"], row["tenant"], row["group_id"]) == (seq, group.tenant, group.group_id)
        assert row["token_ids"] == entry.sample.token_ids.tolist()
        assert all(a == b or math.isnan(a) for a, b in zip(row["logprobs"], entry.sample.logprobs, strict=True))
        assert (row["reward"], row["status"]) == (entry.reward, entry.sample.status.value)
        assert row["score_values"] == [score.value for score in entry.scores]
        made = [span.version for sample in (entry.turns or (entry.sample,)) for span in sample.version_spans]
        assert (row["oldest_version"], row["newest_version"]) == (min(made, default=None), max(made, default=None))
        assert (row["staleness"], row["fingerprint_confirmed"]) == (entry.staleness, entry.sample.fingerprint_confirmed)
        assert row["error_code"] == (entry.sample.error.code.value if entry.sample.error else None)
        for column in COLUMNS:
            assert column.nullable or row[column.name] is not None, column.name


def test_every_declared_column_has_a_type_and_a_value() -> None:
    assert archive_rows.schema().names == [column.name for column in COLUMNS]
    assert len(set(archive_rows.schema().names)) == len(COLUMNS)


@given(first=st.integers(1, 2**63))
def test_manifest_keys_sort_by_sequence(first: int) -> None:
    assert first_of_manifest(manifest_key(first)) == first
    assert manifest_key(first) < manifest_key(first + 1)
    assert data_key(first, first, "a" * 64) != data_key(first, first, "b" * 64)
