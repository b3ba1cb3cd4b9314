"""What an engine may be asked, and what counts as an answer."""

from __future__ import annotations

from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SampleGroup, SamplingParams
from rollgrid_contracts.samples import FinishReason

from .engines.base import Engine, Generated, RequestFailed


def check(job: SampleGroup, engine: Engine) -> None:
    """Refuse what no engine should see.  Raises RequestFailed naming field and limit."""
    facts, prompt = engine.facts, job.prompt_token_ids
    if len(prompt) == 0:
        raise RequestFailed("the prompt is empty", ErrorCode.EMPTY_PROMPT, field="prompt_token_ids", limit="1")
    if len(prompt) >= facts.max_model_len:
        raise RequestFailed(
            f"a prompt of {len(prompt)} tokens leaves no room in a context of {facts.max_model_len}",
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            field="prompt_token_ids",
            limit=str(facts.max_model_len - 1),
        )
    largest = max(prompt)
    if largest >= facts.vocab_size:
        raise RequestFailed(
            f"token {largest} is beyond a vocabulary of {facts.vocab_size}",
            ErrorCode.TOKEN_OUT_OF_RANGE,
            field="prompt_token_ids",
            limit=str(facts.vocab_size - 1),
        )
    if job.sampling.max_tokens < 1 and job.sampling.prompt_logprobs is None:
        raise RequestFailed(
            "no token is wanted, and no prompt logprobs are asked for",
            ErrorCode.INVALID_REQUEST,
            field="max_tokens",
            limit="1",
        )


def judge(result: Generated, sampling: SamplingParams) -> None:
    """An answer that is none is a failure.  Raises RequestFailed."""
    if result.finish_reason is FinishReason.ERROR and sampling.structured_output is not None and not result.token_ids:
        # vLLM compiles beside its loop: a grammar that passed its checks and does not compile ends like this
        raise RequestFailed(
            "the engine could not compile what the output is bound to",
            ErrorCode.INVALID_REQUEST,
            field="structured_output",
        )
    if result.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        raise RequestFailed(f"the engine ended the request with {result.finish_reason.value}")
    if not result.token_ids and sampling.max_tokens:
        raise RequestFailed("the engine returned no token", ErrorCode.EMPTY_COMPLETION)
    if len(result.logprobs) != len(result.token_ids):
        raise RequestFailed(f"{len(result.logprobs)} logprobs for {len(result.token_ids)} tokens")
    if sampling.prompt_logprobs is not None and result.prompt_logprobs is None:
        raise RequestFailed("the engine returned no prompt logprobs", field="prompt_logprobs")
