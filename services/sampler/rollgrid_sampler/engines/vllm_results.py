"""What vLLM's outputs say, in our terms.  Nothing is imported from vLLM here."""

from __future__ import annotations

import math
from array import array
from typing import Any

from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, PromptLogprobs, TopLogprobs

from .base import Generated


def read_logprobs(flat: Any, asked: int, tokens: int) -> tuple[array[float], TopLogprobs | None]:
    """The sampled tokens' logprobs and the alternatives, out of vLLM's FlatLogprobs.

    In each position the sampled token comes first, then the alternatives by rank; alternatives
    that are not finite (cut off by top-k or top-p) are dropped.
    """
    if flat is None:
        return array("f"), None
    chosen = array("f", (flat.logprobs[start] for start in flat.start_indices[:tokens]))
    if asked == 0:
        return chosen, None
    offsets, ids, values = [0], [], []
    for start, end in zip(flat.start_indices[:tokens], flat.end_indices[:tokens], strict=True):
        for at in range(start + 1, end):
            if math.isfinite(flat.logprobs[at]):
                ids.append(flat.token_ids[at])
                values.append(flat.logprobs[at])
        offsets.append(len(ids))
    return chosen, TopLogprobs(offsets=TokenIds.of(offsets), token_ids=TokenIds.of(ids), logprobs=Floats.of(values))


def read_prompt_logprobs(flat: Any, sampling: SamplingParams, prompt: int) -> PromptLogprobs | None:
    """Those of the first `prompt` tokens, out of vLLM's FlatLogprobs; None while there are none."""
    asked = sampling.prompt_logprobs
    if asked is None or not flat:
        return None
    chosen, top = read_logprobs(flat[1:prompt], asked, prompt - 1)
    ranks = [flat.ranks[start] for start in flat.start_indices[1:prompt]]
    return PromptLogprobs(logprobs=Floats(chosen.tobytes()), ranks=TokenIds.of(ranks), top=top)


def scored(result: Generated) -> Generated:
    """Without the token that vLLM sampled although none was wanted; its version is the one that scored."""
    spans = result.version_spans[:1]
    return Generated(
        token_ids=[],
        logprobs=array("f"),
        finish_reason=FinishReason.LENGTH,
        version_spans=tuple(VersionSpan(version=span.version, start=0, end=0) for span in spans),
        cached_tokens=result.cached_tokens,
        first_token_at=result.first_token_at,
        prompt_logprobs=result.prompt_logprobs,
    )


def spans_of(versions: Any, start: int) -> tuple[VersionSpan, ...]:
    """vLLM's spans, moved to where the engine request's first token stands in the sample."""
    return tuple(VersionSpan(version=int(v.version), start=start + v.start, end=start + v.end) for v in versions or ())
