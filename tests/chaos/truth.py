"""I4: each token is what the bytes of the version that its span names would have made (scripted engine)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from rollgrid_contracts import ids
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_sampler.engines.script import sample_key, script

from .checker import Close, Violation


def tokens_are_of_their_versions(
    closes: Iterable[Close], digests: Mapping[int, bytes], vocab: int = 512, eos_id: int = 2, eos_rate: float = 0.01
) -> Iterable[Violation]:
    """`digests` by version, as `scripted.weights_digest` gives them."""
    for close in closes:
        for entry in close.record.entries:
            group, index = close.record.group_id, entry.sample.index
            if entry.sample.status is SampleStatus.SUCCEEDED:
                yield from _of_one(ids.sample_id(group, index), entry.sample, digests, (vocab, eos_id, eos_rate))
            for turn in entry.turns:
                yield from _of_one(ids.turn_id(group, index, turn.turn), turn, digests, (vocab, eos_id, eos_rate))


def _of_one(
    name: str, sample: Sample, digests: Mapping[int, bytes], engine: tuple[int, int, float]
) -> Iterable[Violation]:
    tokens = np.frombuffer(sample.token_ids.packed, "<u4")
    logprobs = np.frombuffer(sample.logprobs.packed, "<f4")
    for span in sample.version_spans:
        digest = digests.get(span.version)
        if digest is None:
            yield Violation("I4", name, f"{span} names a version that nobody published")
            continue
        own = script(sample_key(digest, name, sample.index, sample.seed), span.start, span.end, *engine)
        if not np.array_equal(own[0], tokens[span.start : span.end]):
            yield Violation("I4", name, f"has tokens in {span} that its weights do not make")
        elif not np.array_equal(own[1], logprobs[span.start : span.end]):
            yield Violation("I4", name, f"has logprobs in {span} that its weights do not make")
