"""Submit, follow, resume, cancel, publish: every method of the clients on the real services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid import AsyncClient, Client, CursorFile, Standing, to_arrays
from rollgrid.errors import (
    ContextLengthExceeded,
    GroupNotClosed,
    GroupOpen,
    IdempotencyConflict,
    InvalidRequest,
    LimitExceeded,
    ModelNotFound,
    NotFound,
    RollgridAPIError,
    TokenOutOfRange,
    UnknownField,
    VersionRefused,
    VersionUnavailable,
)
from rollgrid.export import to_parquet
from rollgrid_contracts.ids import sample_seed
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_contracts.samples import SampleStatus

from tests.support.stack import POLICY, Stack
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import wait_until

SHORT = {"max_tokens": 12}


def test_a_batch_comes_back_whole_and_in_arrays(client: Client) -> None:
    tasks: list[Any] = ["plain text", [5, 6, 7], np.array([8, 9], dtype=np.uint32), [{"role": "user", "content": "hi"}]]
    tasks += [{"prompt": "2+2=", "task": {"answer": "4"}, "metadata": {"row": 4}, "n": 2}]
    batch = client.submit(tasks, n=4, sampling={**SHORT, "seed": 11}, scorers=["exact_match"], run="whole")
    groups = sorted(batch.groups(timeout=60), key=lambda group: group.position)

    assert [group.id for group in groups] == list(batch.group_ids)
    assert [len(group) for group in groups] == [4, 4, 4, 4, 2]
    assert batch.samples == 18
    assert groups[1].prompt_ids.tolist() == [5, 6, 7]
    assert groups[2].prompt_ids.tolist() == [8, 9]
    assert groups[4].task == {"answer": "4"}
    assert groups[4].metadata == {"row": 4}
    for group in groups:
        assert [sample.index for sample in group] == list(range(group.n))
        for sample in group:
            assert sample.status is SampleStatus.SUCCEEDED
            assert len(sample.token_ids) == len(sample.logprobs) > 0
            assert (sample.spans[0].start, sample.spans[-1].end) == (0, len(sample))
    assert groups[4].samples[0].reward == 0.0  # the scripted engine cannot add
    assert groups[0].samples[1].record.seed == sample_seed(11, 1)

    arrays = to_arrays(groups)
    assert arrays["mask"].sum() == sum(len(sample) for group in groups for sample in group)
    assert set(np.unique(arrays["versions"])) <= {-1, 0}
    status = batch.status()
    assert (status.done, status.closed, status.counts) == (True, 5, {"succeeded": 18})
    assert list(batch.groups(cursor=max(group.cursor for group in groups))) == []


def test_the_same_key_is_the_same_batch(client: Client) -> None:
    first = client.submit(["a", "b"], n=2, sampling=SHORT, run="keyed", idempotency_key="step-1")
    seen = {group.id for group in first.groups(timeout=60)}
    again = client.submit(["a", "b"], n=2, sampling=SHORT, run="keyed", idempotency_key="step-1")
    assert (again.batch_id, again.group_ids) == (first.batch_id, first.group_ids)
    assert {group.id for group in again.groups(timeout=60)} == seen
    assert len(list(client.trajectories("keyed", follow=False))) == 2  # nothing was sampled twice
    with pytest.raises(IdempotencyConflict):
        client.submit(["other"], sampling=SHORT, run="keyed", idempotency_key="step-1")


def test_another_process_goes_on_where_the_first_stopped(client: Client, pipe: Stack, tmp_path: Path) -> None:
    batch = client.submit(["x"] * 10, sampling=SHORT, run="handover")
    path = tmp_path / "cursor"
    groups = batch.groups(cursor=CursorFile(path), timeout=60)
    taken = [next(groups).id for _ in range(4)]
    groups.close()
    with Client(pipe.url) as successor:
        rest = [group.id for group in successor.batch(batch.batch_id).groups(cursor=CursorFile(path), timeout=60)]
    assert rest[0] == taken[-1]  # it was in hand
    assert sorted(taken[:-1] + rest) == sorted(batch.group_ids)


def test_one_group_by_its_id(client: Client) -> None:
    batch = client.submit(["x"], n=2, sampling=SHORT, run="single")
    group = next(batch.groups(timeout=60))
    again = client.group(group.id)
    assert again.closed == group.closed
    assert again.cursor == group.cursor
    with pytest.raises(NotFound):
        client.group("gnobody")
    with pytest.raises(NotFound):
        client.batch("bnobody")


def test_what_is_wrong_is_named(client: Client) -> None:
    refused: list[tuple[type[RollgridAPIError], str, dict[str, Any]]] = [
        (LimitExceeded, "n", {"n": 10**6}),
        (UnknownField, "sampling.temprature", {"sampling": {**SHORT, "temprature": 1}}),
        (ModelNotFound, "policy", {"policy": "nobody"}),
    ]
    for kind, field, change in refused:
        with pytest.raises(kind) as caught:
            client.submit(["x"], **{"sampling": SHORT, **change})
        assert (caught.value.field or "").endswith(field), caught.value
    with pytest.raises(TokenOutOfRange):
        client.submit([[1, 10**6]], sampling=SHORT)
    with pytest.raises(ContextLengthExceeded):
        client.submit([[1] * 5000], sampling=SHORT)


def test_cancelled_and_expired_samples_have_their_entries(client: Client, pipe: Stack) -> None:
    pipe["sampler-0"].pause()
    try:
        batch = client.submit(["x"] * 3, n=2, sampling=SHORT, run="cancelled")
        with pytest.raises(GroupOpen) as caught:
            open_group(client, batch.group_ids[0])
        assert (caught.value.n, caught.value.done) == (2, ())
        batch.cancel()
        batch.cancel()  # once more is the same
        assert {group.counts["cancelled"] for group in batch.groups(timeout=60)} == {2}
        late = client.submit(["x"], n=3, sampling=SHORT, run="late", deadline_s=0.5)
        assert [group.counts for group in late.groups(timeout=60)] == [{"expired": 3}]
    finally:
        pipe["sampler-0"].resume()


def open_group(client: Client, group_id: str) -> None:
    """Ask until the ledger has read the job: before, nobody knows the group."""

    def known() -> bool:
        try:
            client.group(group_id)
        except NotFound:
            return False
        return True

    wait_until(known, 20, "the group is known")


def test_services_restart_under_a_reading_iterator(client: Client, pipe: Stack) -> None:
    """Ingest and then NATS killed and started again in the middle: each group once, none missing."""
    batch = client.submit([f"task {k}" for k in range(40)], n=2, sampling=SHORT, run="restarts")
    groups = batch.groups(timeout=100)
    seen = [next(groups).id for _ in range(3)]
    for process in (pipe["ingest"], pipe.nats):
        process.kill()
        process.start()
        seen.append(next(groups).id)
    seen += [group.id for group in groups]
    assert sorted(seen) == sorted(batch.group_ids)
    pipe.heal()


def test_a_submission_survives_a_restart_of_ingest(client: Client, pipe: Stack) -> None:
    pipe["ingest"].kill()
    pipe["ingest"].start()
    batch = client.submit(["x"] * 5, n=2, sampling=SHORT, run="reborn")
    assert len(list(batch.groups(timeout=60))) == 5
    assert len(list(client.trajectories("reborn", follow=False))) == 5


def test_published_weights_go_live_and_stamp_every_token(client: Client, tmp_path: Path) -> None:
    start = client.policy(POLICY)
    new = tiny_model(TinyModel(seed=1)) / "model.safetensors"
    version = client.weights.publish(POLICY, new, step=7).wait_live(timeout=60)
    with pytest.raises(VersionUnavailable):
        client.weights.publish(POLICY, tiny_model(TinyModel()), version=version.version)
    assert version.version == start.newest + 1
    state = client.policy(POLICY)
    assert (state.desired, state.newest) == (version.version, version.version)
    demand = WeightConstraint(rule=VersionRule.MIN, value=version.version)
    for weights in (demand, {"exact_version": version.version}):
        batch = client.submit(["x"], n=4, sampling=SHORT, run="fresh", weights=weights)
        arrays = to_arrays(batch.groups(timeout=60))
        assert (arrays["versions"][arrays["mask"]] == version.version).all()
    second = client.weights.publish(POLICY, tiny_model(TinyModel()), step=8)  # at once: no waiting in between
    third = client.weights.publish(POLICY, new, step=9)
    assert (second.version, third.version) == (version.version + 1, version.version + 2)
    third.wait_live(timeout=60)


def test_A43_a_version_of_another_model_is_refused_with_its_reason(client: Client) -> None:
    running = client.policy(POLICY).desired
    other = tiny_model(TinyModel("qwen3")) / "model.safetensors"
    with pytest.raises(VersionRefused) as refused:
        client.weights.publish(POLICY, other).wait_live(timeout=60)
    assert refused.value.code == "invalid_request"
    assert refused.value.field
    assert client.policy(POLICY).desired == running


def test_the_fleet_and_its_policies(client: Client) -> None:
    assert [model.id for model in client.models()] == [POLICY]
    policies = client.policies()
    assert [policy.policy for policy in policies] == [POLICY]
    fleet = client.fleet()
    assert [worker.engine.split()[0] for worker in fleet.workers] == ["scripted"]
    assert "RG_JOBS" in fleet.queues
    assert fleet.policies[0].pool == fleet.workers[0].pool


async def test_asyncio(pipe: Stack, tmp_path: Path) -> None:
    async with AsyncClient(pipe.url) as client:
        assert [model.id for model in await client.models()] == [POLICY]
        batch = await client.submit(["x"] * 6, n=2, sampling=SHORT, run="async")
        groups = [group async for group in batch.groups(cursor=CursorFile(tmp_path / "cursor"), timeout=60)]
        assert sorted(group.id for group in groups) == sorted(batch.group_ids)
        assert (await batch.status()).done
        assert (await client.group(groups[0].id)).closed == groups[0].closed
        again = [group.id async for group in client.trajectories("async", follow=False)]
        assert again == [group.id for group in groups]
        await batch.cancel()  # nothing is left to end
        assert (await client.policies())[0].policy == POLICY
        assert (await client.fleet()).workers


def test_rewards_are_posted_after_the_fact_and_read_back(client: Client, tmp_path: Path) -> None:
    groups = list(client.submit(["a", "b"], n=2, sampling=SHORT, run="rewarded").groups(timeout=60))
    group, other = groups
    first = client.post_rewards(group, {0: 1.0, 1: 0.0})
    again = client.post_rewards(group.samples[1], 0.5, detail="looked again", source="judge")
    client.post_rewards(other.id, [{"index": 0, "name": "tests", "kind": "pass_rate", "value": 0.75}])
    assert group.cursor < first.cursor < again.cursor
    assert not first.duplicate

    shown = client.group(group.id).posted_rewards
    assert [(r.index, r.value, r.source) for r in shown] == [(0, 1.0, "customer"), (1, 0.5, "judge")]
    posts = list(client.rewards("rewarded"))
    assert [post.cursor for post in posts[:2]] == [first.cursor, again.cursor]
    assert list(client.rewards("rewarded", cursor=posts[-1].cursor)) == []
    standing = Standing(posts)
    assert [r.value for r in standing.of(other.id)] == [0.75]
    assert to_parquet(groups, tmp_path / "rows.parquet", posted=standing) == 4

    keyed = [client.post_rewards(group, {0: 2.0}, idempotency_key="reward-1") for _ in range(2)]
    assert keyed[0].cursor == keyed[1].cursor
    with pytest.raises(IdempotencyConflict):
        client.post_rewards(group, {0: 3.0}, idempotency_key="reward-1")
    many = client.post_run_rewards("rewarded", [(group, {0: 0.25}), (other.id, {1: 0.5})], source="ci")
    assert [posted.group_id for posted in many] == [group.id, other.id]
    with pytest.raises(InvalidRequest) as refused:
        client.post_rewards(group, {2: 1.0})
    assert refused.value.field == "rewards[0].index"


async def test_rewards_from_a_loop(pipe: Stack) -> None:
    async with AsyncClient(pipe.url) as client:
        batch = await client.submit(["a"], sampling=SHORT, run="rewarded-async")
        (group,) = [found async for found in batch.groups(timeout=60)]
        posted = await client.post_rewards(group.samples[0], 1.0)
        assert [post.cursor async for post in client.rewards("rewarded-async")] == [posted.cursor]
        (many,) = await client.post_run_rewards("rewarded-async", [(group, {0: 2.0})])
        follower = client.rewards("rewarded-async", cursor=posted.cursor, follow=True, timeout=30)
        assert (await anext(follower)).cursor == many.cursor
        await follower.aclose()


def test_an_open_group_takes_no_reward_yet(client: Client, pipe: Stack) -> None:
    pipe["sampler-0"].pause()
    try:
        batch = client.submit(["a"], sampling=SHORT, run="early")
        with pytest.raises(GroupNotClosed) as early:
            client.post_rewards(batch.group_ids[0], {0: 1.0})
        assert early.value.retryable
    finally:
        pipe["sampler-0"].resume()


def test_given_tokens_are_scored(client: Client) -> None:
    one, two = client.score_tokens([[5, 6, 7], [8, 9]], top_logprobs=2)
    assert (one.token_ids, two.token_ids) == ((5, 6, 7), (8, 9))
    assert one.logprobs[0] is None
    assert all(logprob is not None and logprob <= 0 for logprob in one.logprobs[1:])
    (same,) = client.score_tokens(np.array([5, 6, 7]))  # type: ignore[arg-type]
    assert same.logprobs == one.logprobs
