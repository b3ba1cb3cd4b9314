"""The check of tokens against their versions is not believed until it has caught each lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import Sample
from rollgrid_contracts.trajectories import Entry
from rollgrid_sampler.engines.script import combined, sample_key, script

from .test_checker import GROUPS, close, closed, sample
from .truth import tokens_are_of_their_versions

DIGESTS = {version: combined({"model.safetensors": bytes([version]) * 32}) for version in (3, 4)}
SPANS = (VersionSpan(version=3, start=0, end=5), VersionSpan(version=4, start=5, end=12))


def told(spans: tuple[VersionSpan, ...] = SPANS, **changes: Any) -> Sample:
    """A sample over two versions, as the scripted engine makes it."""
    name = ids.sample_id(GROUPS[0], 0)
    parts = [
        script(sample_key(DIGESTS[span.version], name, 0, 9), span.start, span.end, 512, 2, 0.01) for span in SPANS
    ]
    whole: dict[str, Any] = {
        "token_ids": TokenIds.of(np.concatenate([tokens for tokens, _ in parts]).tolist()),
        "logprobs": Floats(np.concatenate([logprobs for _, logprobs in parts]).astype("<f4").tobytes()),
        "version_spans": spans,
        "seed": 9,
    }
    return sample(0, **{**whole, **changes})


def found(one: Sample) -> list[str]:
    record = closed(GROUPS[0], n=1, entries=(Entry(sample=one),))
    return [violation.what for violation in tokens_are_of_their_versions([close(1, record)], DIGESTS)]


def test_a_true_sample_passes() -> None:
    assert found(told()) == []


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (told((VersionSpan(version=4, start=0, end=12),)), "tokens"),
        (told((VersionSpan(version=3, start=0, end=6), VersionSpan(version=4, start=6, end=12))), "tokens"),
        (told((VersionSpan(version=7, start=0, end=12),)), "nobody published"),
        (told(seed=8), "tokens"),
        (told(logprobs=Floats.of([-0.5] * 12)), "logprobs"),
    ],
)
def test_a_lie_is_caught(lie: Sample, said: str) -> None:
    assert any(said in what for what in found(lie))
