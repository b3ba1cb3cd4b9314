"""The scripted engine's streams: known in advance, independent of labels, cut where they should be."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts import ids
from rollgrid_contracts.jobs import OnRefresh, SamplingParams
from rollgrid_contracts.samples import FinishReason
from rollgrid_sampler.engines.base import EngineDead, GenerationRequest, RequestFailed
from rollgrid_sampler.engines.script import cut, sample_key, script, spell, weights_digest
from rollgrid_sampler.engines.scripted import ScriptedEngine
from rollgrid_sampler.settings import EngineKind, Fault, SamplerSettings

EOS = 2


def request(**sampling: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        sample="g.0",
        index=0,
        prompt_token_ids=[5],
        sampling=SamplingParams(**{"max_tokens": 50, **sampling}),  # type: ignore[arg-type]
        seed=9,
    )


def engine(**changes: object) -> ScriptedEngine:
    return ScriptedEngine(SamplerSettings(engine=EngineKind.SCRIPTED, **changes))  # type: ignore[arg-type]


def folder(path: Path, content: bytes) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(content)
    return path


@given(st.integers(0, 2**64 - 1), st.integers(0, 300), st.integers(0, 300))
def test_a_stream_does_not_depend_on_where_it_is_joined(key: int, middle: int, end: int) -> None:
    first, last = min(middle, end), max(middle, end)
    whole = script(key, 0, last, 512, EOS, 0.05)
    parts = [script(key, 0, first, 512, EOS, 0.05), script(key, first, last, 512, EOS, 0.05)]
    assert np.array_equal(whole[0], np.concatenate([p[0] for p in parts]))
    assert np.array_equal(whole[1], np.concatenate([p[1] for p in parts]))
    assert whole[0].max(initial=0) < 512
    assert np.all(whole[1] < 0)
    assert np.all(np.isfinite(whole[1]))


def test_eos_comes_at_its_rate_and_otherwise_never() -> None:
    tokens, _ = script(1, 0, 200_000, 512, EOS, 0.01)
    assert 0.008 < float(np.mean(tokens == EOS)) < 0.012
    tokens, _ = script(1, 0, 200_000, 512, EOS, 0.0)
    assert not np.any(tokens == EOS)
    assert len(np.unique(tokens)) == 511


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.integers(0, 20),
    st.sets(st.integers(0, 9), max_size=2),
    st.booleans(),
)
def test_the_cut_is_the_first_stop_after_min_tokens(
    raw: list[int], least: int, stop_ids: set[int], ignore_eos: bool
) -> None:
    tokens = np.array(raw, dtype=np.uint32)
    sampling = SamplingParams(
        max_tokens=len(raw), min_tokens=least, stop_token_ids=tuple(stop_ids), ignore_eos=ignore_eos
    )
    found = cut(tokens, spell(tokens), sampling, EOS, len(raw))
    stops = stop_ids | (set() if ignore_eos else {EOS})
    hits = [i for i, token in enumerate(raw) if i >= least and token in stops]
    if hits:
        assert (found.end, found.reason) == (hits[0] + 1, FinishReason.STOP)
        token = raw[hits[0]]
        assert found.stop_reason == (None if token == EOS and EOS not in stop_ids else token)
    else:
        assert (found.end, found.reason, found.stop_reason) == (len(raw), FinishReason.LENGTH, None)


def test_a_stop_string_ends_the_text_before_it_unless_included() -> None:
    tokens = np.array([0, 1, 2, 3, 4], dtype=np.uint32)  # "abcde"
    for include, text_end in ((False, 2), (True, 4)):
        sampling = SamplingParams(max_tokens=5, stop=("cd", "e"), include_stop_str_in_output=include, ignore_eos=True)
        found = cut(tokens, "abcde", sampling, EOS, 5)
        assert (found.end, found.text_end, found.stop_reason) == (4, text_end, "cd")


async def test_tokens_follow_the_bytes_not_the_label(tmp_path: Path) -> None:
    """I4: the same file under another version gives the same tokens, another file others."""
    a, b = folder(tmp_path / "a", b"one"), folder(tmp_path / "b", b"two")
    subject = engine()
    await subject.start(0, a)
    first = await subject.generate(request())
    await subject.load_version(1, a, OnRefresh.WAIT)
    relabelled = await subject.generate(request())
    await subject.load_version(2, b, OnRefresh.WAIT)
    other = await subject.generate(request())
    assert first.token_ids == relabelled.token_ids != other.token_ids
    assert [r.version_spans[0].version for r in (first, relabelled, other)] == [0, 1, 2]
    key = sample_key(weights_digest(b), "g.0", 0, 9)
    assert other.token_ids == script(key, 0, len(other.token_ids), 512, EOS, 0.01)[0].tolist()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("mode", "bias", "expected"),
    [
        (OnRefresh.WAIT, {}, [0]),
        (OnRefresh.ABORT, {}, [0, 1]),
        (OnRefresh.ABORT, {"7": 0.0}, [1]),
        (OnRefresh.KEEP, {"7": 0.0}, [0, 1]),
    ],
)
async def test_a_swap_while_generating(
    tmp_path: Path, mode: OnRefresh, bias: dict[str, float], expected: list[int], own: bool
) -> None:
    """`own`: the request says so itself, whatever the load says."""
    a, b = folder(tmp_path / "a", b"one"), folder(tmp_path / "b", b"two")
    subject = engine(scripted_token_rate=200.0, scripted_eos_rate=0.0)
    await subject.start(0, a)
    asked = msgspec.structs.replace(request(logit_bias=bias), on_refresh=mode if own else None)
    running = asyncio.create_task(subject.generate(asked))
    await asyncio.sleep(0.1)
    other = OnRefresh.ABORT if mode is OnRefresh.WAIT else OnRefresh.WAIT
    await subject.load_version(1, b, other if own else mode)
    result = await running
    spans = [(s.version, s.start, s.end) for s in result.version_spans]
    streams = {
        version: script(sample_key(weights_digest(path), "g.0", 0, 9), 0, 50, 512, EOS, 0.0)[0].tolist()
        for version, path in ((0, a), (1, b))
    }
    for version, start, end in spans:
        assert result.token_ids[start:end] == streams[version][start:end]
    assert spans[0][1] == 0
    assert spans[-1][2] == len(result.token_ids) == 50
    assert [version for version, _, _ in spans] == expected


async def test_fault_drills() -> None:
    faults = {20: Fault.ERROR, 21: Fault.EMPTY, 22: Fault.DIE}
    subject = engine(scripted_faults=faults)
    await subject.start(0, None)

    def with_token(token: int) -> GenerationRequest:
        return GenerationRequest(
            request_id="r", sample="s", index=0, prompt_token_ids=[5, token], sampling=SamplingParams(max_tokens=4)
        )

    with pytest.raises(RequestFailed):
        await subject.generate(with_token(20))
    assert (await subject.generate(with_token(21))).token_ids == []
    assert (await subject.generate(with_token(23))).token_ids
    with pytest.raises(EngineDead):
        await subject.generate(with_token(22))
    with pytest.raises(EngineDead):
        await subject.health()


def test_samples_of_a_group_and_its_neighbours_share_no_stream() -> None:
    digest = weights_digest(None)
    keys = {
        sample_key(digest, ids.sample_id(f"g{group}", index), index, ids.sample_seed(group, index))
        for group in range(50)
        for index in range(8)
    }
    assert len(keys) == 400
