"""What several examples are made of."""

from __future__ import annotations

from typing import Any

from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import (
    ForkReason,
    TurnNode,
)
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import (
    BatchStatus,
    GroupStatus,
    LoadedVersion,
)
from rollgrid_contracts.jobs import (
    Purpose,
    Rights,
    SamplingParams,
    Session,
    VersionSpan,
)
from rollgrid_contracts.samples import (
    BlobRef,
    FinishReason,
    Parsed,
    Sample,
    SampleStatus,
    Timings,
    TopLogprobs,
)
from rollgrid_contracts.scoring import Score, ScorerKind, ScorerSpec, ScoreStatus

GROUP, BATCH = "gabcdefghijklmnopqrstuvwx", "babcdefghijklmnopqrstuvwx"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

TOKENS = TokenIds.of([1, 2, 65_535, 4_294_967_295])
LOGPROBS = Floats.of([-0.5, -1.25, 0.0, -100.0])
BLOB = BlobRef(key="payloads/" + "ab" * 32, sha256="ab" * 32, size=300_000)
RIGHTS = Rights(purposes=(Purpose.EXECUTE, Purpose.TRAIN), grant_id="grant-1")
SPANS = (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=4))
ERROR = ErrorInfo(
    code=ErrorCode.LIMIT_EXCEEDED,
    message="n is 99",
    boundary=Boundary.CLIENT,
    retryable=False,
    field="n",
    limit="64",
)
SAMPLING = SamplingParams(
    max_tokens=256,
    min_tokens=1,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    seed=2**62 + 1,
    stop=("\n\n", "Ende"),
    stop_token_ids=(2, 3),
    include_stop_str_in_output=True,
    ignore_eos=True,
    bad_words=("foo",),
    allowed_token_ids=(1, 2, 3),
    logit_bias={"5": -1.5},
    logprobs=5,
    prompt_logprobs=1,
    skip_special_tokens=False,
    structured_output={"json": {"type": "object"}},
)
SCORER = ScorerSpec(
    name="exact",
    type="exact_match",
    kind=ScorerKind.VERIFIER,
    params={"strip": True},
    weight=0.5,
    gate=True,
    timeout_s=2.5,
)
SCORE = Score(
    scorer="exact",
    status=ScoreStatus.SCORED,
    value=0.75,
    version="exact_match/1",
    detail="near",
    duration_ms=1.5,
    attempt=2,
    turn_values=(0.5, None),
)
TURN_NODE = TurnNode(
    parent=1,
    branch="b1",
    observation=TokenIds.of([7, 8]),
    closing=1,
    messages=({"role": "tool", "tool_call_id": "c1", "content": "42"},),
    fork=ForkReason.RETRY,
    fork_detail="message 2 differs",
    gap_s=1.5,
    approvals=({"call": "c1", "by": "user"},),
    deliverables=({"name": "report.md", "sha256": "aa"},),
)
SESSION = Session(
    session="s-1",
    turn=2,
    node=TURN_NODE,
    fence=17,
    worker="w-1",
)
SAMPLE = Sample(
    index=3,
    turn=1,
    attempt=2,
    status=SampleStatus.SUCCEEDED,
    token_ids=TOKENS,
    logprobs=LOGPROBS,
    top_logprobs=TopLogprobs(
        offsets=TokenIds.of([0, 1, 1, 1, 2]), token_ids=TokenIds.of([9, 10]), logprobs=Floats.of([-0.25, -2.0])
    ),
    text="Grüße ✓",
    parsed=Parsed(
        content="hi",
        reasoning="because",
        tool_calls=({"name": "f", "arguments": {"x": 1}},),
        parse_status="ok",
    ),
    finish_reason=FinishReason.STOP,
    stop_reason="\n\n",
    version_spans=SPANS,
    weight_fingerprint="cd" * 32,
    seed=123456789,
    resumed_from=1,
    worker="w-1",
    cached_tokens=16,
    timings=Timings(dequeued_at=1.0, started_at=1.5, first_token_at=1.75, finished_at=2.0),
    routed_experts=BLOB,
    kept_tokens=BLOB,
    error=ERROR,
)
MESSAGES = ({"role": "user", "content": "2+2?"},)
TASK: dict[str, Any] = {"answer": "4", "entry": {"difficulty": 1}}
STATUS = GroupStatus(group_id=GROUP, known=True, batch_id=BATCH, run="run-1", n=8, closed_seq=44, done={0: 5, 3: 9})
BATCH_STATUS = BatchStatus(
    batch_id=BATCH,
    run="run-1",
    tenant="acme",
    groups=2,
    closed=1,
    samples=16,
    finished=9,
    counts={SampleStatus.SUCCEEDED: 7, SampleStatus.FAILED: 1},
    open_groups=(GROUP,),
    last_closed_seq=44,
)
LOADED = LoadedVersion(policy="smol", tenant="acme", version=4, fingerprint="ef" * 32, policy_revision=12)
