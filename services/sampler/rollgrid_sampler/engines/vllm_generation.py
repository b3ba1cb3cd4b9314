"""One sample on vLLM: its engine requests, one after the other, until it is whole.

vLLM's own `n` derives colliding seeds (measured), so every sample is its own request.  Text is decoded
once at the end unless stop strings need it, and a streamed sample is decoded here, where stop strings
are found over the join with what was sent before.  One that other weights took away goes on under them
behind what there is, where that is exact.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason

from rollgrid_sampler.transcript import Transcript, whole_text

from .base import (
    AdapterGone,
    EngineDead,
    EngineFacts,
    Generated,
    GenerationRequest,
    Loaded,
    OnDelta,
    RequestFailed,
    Sent,
)
from .progress import End, Progress
from .vllm_adapters import Adapter
from .vllm_flights import Applied, Flight, Flights, Taken
from .vllm_options import refused_field, translate
from .vllm_results import read_logprobs, read_prompt_logprobs, scored, spans_of


class Running(Protocol):
    """What generation asks of the engine: what is applied at this moment, and vLLM."""

    @property
    def llm(self) -> Any: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def loaded(self) -> Loaded: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def flights(self) -> Flights: ...

    @property
    def adapters(self) -> Mapping[int, Adapter]: ...


class Generation:
    """Generates on a running engine."""

    def __init__(self, engine: Running) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        """Aborted by the caller's cancelling only; one that other weights took away goes on under them.

        It goes on behind what there is where that is exact, else it starts again.
        """
        if request.sampling.max_tokens and (on_delta is not None or request.sent.token_ids):
            return await self._stream(request, self._progress(request, on_delta or _nobody))
        return await self._whole(request)

    async def _whole(self, request: GenerationRequest) -> Generated:
        params = translate(request.sampling, request.seed)
        while True:
            async with contextlib.aclosing(self._outputs(request, request.prompt_token_ids, params)) as outputs:
                found = [output async for output in outputs]  # one, at the end
            if not found:
                raise RequestFailed("the engine ended the request without an output")
            flight, last = found[-1]
            if not _taken(flight, last.outputs[0]):
                return self._collect(flight, last)
            if not request.sampling.max_tokens:
                self._go_on_or_raise(flight, Sent())
                continue
            progress = self._progress(request, _nobody)
            self._take(flight, progress, last, 0, last=False)
            progress.interrupted()
            self._go_on_or_raise(flight, progress.so_far())
            if progress.token_ids:
                return await self._stream(request, progress)

    def _progress(self, request: GenerationRequest, on_delta: OnDelta) -> Progress:
        room = min(request.sampling.max_tokens, self._engine.facts.max_model_len - len(request.prompt_token_ids))
        return Progress(request, room, partial(self._transcript, request.sampling), on_delta)

    async def _stream(self, request: GenerationRequest, progress: Progress) -> Generated:
        sampling = request.sampling
        end = progress.end(self._eos_id())
        while end is None:
            end = await self._go_on(request, progress) or progress.end(self._eos_id())
        if sampling.prompt_logprobs is not None and progress.prompt_logprobs is None:  # nothing was left to generate
            scoring = msgspec.structs.replace(sampling, max_tokens=0)
            scores = await self._whole(msgspec.structs.replace(request, sampling=scoring, sent=Sent()))
            progress.prompt_logprobs = scores.prompt_logprobs
        return progress.generated(end)

    async def _go_on(self, request: GenerationRequest, progress: Progress) -> End | None:
        """One engine request behind the tokens there are; None when other weights took it away."""
        prompt, start = request.prompt_token_ids, len(progress.token_ids)
        params = translate(request.sampling, request.seed_at(start), portions=True, room=progress.left)
        try:
            async with contextlib.aclosing(self._outputs(request, prompt + progress.token_ids, params)) as outputs:
                async for flight, output in outputs:
                    result = output.outputs[0]
                    taken = _taken(flight, result)
                    self._take(flight, progress, output, start, last=result.finish_reason is not None and not taken)
                    if progress.text.stopped is not None:
                        return End(FinishReason.STOP, progress.text.stopped)
                    if taken:
                        progress.interrupted()
                        self._go_on_or_raise(flight, progress.so_far())
                        return None
                    if result.finish_reason is not None:
                        return End(FinishReason(result.finish_reason), result.stop_reason)
        except AdapterGone as gone:
            raise AdapterGone(gone.version, progress.so_far()) from gone
        raise RequestFailed("the engine ended the request without an output")

    @staticmethod
    def _go_on_or_raise(flight: Flight, so_far: Sent) -> None:
        if flight.taken is Taken.ADAPTER:
            assert flight.applied.adapter is not None
            raise AdapterGone(flight.applied.adapter, so_far)

    def _take(self, flight: Flight, progress: Progress, output: Any, start: int, *, last: bool) -> None:
        """A portion into `progress`; `start` is the position of the engine request's own first token."""
        request, result = flight.request, output.outputs[0]
        progress.cached_tokens = progress.cached_tokens or int(output.num_cached_tokens or 0)
        progress.first_token_at = progress.first_token_at or _first_token_at(output.metrics)
        progress.prompt_logprobs = progress.prompt_logprobs or read_prompt_logprobs(
            output.prompt_logprobs, request.sampling, len(request.prompt_token_ids)
        )
        ids, offset = list(result.token_ids), len(progress.token_ids)
        chosen, top = read_logprobs(result.logprobs, request.sampling.logprobs, len(ids))
        spans = spans_of(result.weight_versions, start) or self._spans_so_far(flight, start, offset + len(ids))
        progress.take(ids, chosen, top, _checked(flight, spans), last=last)

    def _spans_so_far(self, flight: Flight, start: int, end: int) -> tuple[VersionSpan, ...]:
        """vLLM tells the versions with the last output only; its output processor knows them before."""
        processor = self._engine.llm.output_processor
        for internal in processor.external_req_ids.get(flight.request_id, ()):
            state = processor.request_states.get(internal)
            if state is not None and state.weight_version_starts:
                starts = [(int(version), start + first) for version, first in state.weight_version_starts]
                ends = [first for _, first in starts[1:]] + [end]
                return tuple(VersionSpan(version=v, start=a, end=b) for (v, a), b in zip(starts, ends, strict=True))
        return (VersionSpan(version=flight.versions[-1], start=start, end=end),)

    async def _outputs(
        self, request: GenerationRequest, prompt: list[int], params: Any
    ) -> AsyncGenerator[tuple[Flight, Any], None]:
        """vLLM's outputs of one engine request; leaving it aborts the request.  Raises AdapterGone before the first."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._engine.flights.gate()
        lora = self._lora(request)  # from here nothing suspends until vLLM has the request
        with self._engine.flights.flight(request, Applied(self._engine.loaded.version, request.adapter)) as flight:
            try:
                inputs = tokens_input(prompt, cache_salt=flight.salt)
                place = 0 if request.hurried else 1
                generating = self._engine.llm.generate(
                    inputs, params, request.request_id, lora_request=lora, priority=place
                )
                async with contextlib.aclosing(generating) as outputs:
                    async for output in outputs:
                        yield flight, output
            except EngineDeadError as error:
                raise EngineDead("the engine died while generating") from error
            except (VLLMClientError, ValueError, TypeError) as error:
                raise RequestFailed(
                    str(error), ErrorCode.INVALID_REQUEST, field=refused_field(error, request.sampling)
                ) from error
            except Exception as error:
                if self._engine.llm is None or self._engine.llm.errored:
                    raise EngineDead(f"the engine died while generating: {error!r}") from error
                raise RequestFailed(f"{error!r} ({error.__cause__!r})") from error

    def _lora(self, request: GenerationRequest) -> Any:
        if request.adapter is None:
            return None
        adapter = self._engine.adapters.get(request.adapter)
        if adapter is None or adapter.retiring:
            raise AdapterGone(request.adapter, Sent())
        return adapter.request()

    def _collect(self, flight: Flight, output: Any) -> Generated:
        request, result = flight.request, output.outputs[0]
        sampling = request.sampling
        ids = list(result.token_ids)
        chosen, top = read_logprobs(result.logprobs, sampling.logprobs, len(ids))
        found = Generated(
            token_ids=ids,
            logprobs=chosen,
            top_logprobs=top,
            text=whole_text(
                partial(self._decode, skip_special_tokens=sampling.skip_special_tokens),
                ids,
                result.stop_reason if isinstance(result.stop_reason, str) else None,
                include=sampling.include_stop_str_in_output,
            ),
            finish_reason=FinishReason(result.finish_reason),
            stop_reason=result.stop_reason,
            version_spans=_checked(flight, spans_of(result.weight_versions, 0)),
            cached_tokens=int(output.num_cached_tokens or 0),
            first_token_at=_first_token_at(output.metrics),
            prompt_logprobs=read_prompt_logprobs(output.prompt_logprobs, sampling, len(request.prompt_token_ids)),
        )
        return found if sampling.max_tokens else scored(found)

    def _transcript(self, sampling: SamplingParams) -> Transcript:
        return Transcript(partial(self._decode, skip_special_tokens=sampling.skip_special_tokens), sampling)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._engine.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _eos_id(self) -> int | None:
        found = self._engine.llm.renderer.get_eos_token_id()
        return None if found is None else int(found)


def _nobody(_: Any) -> None:
    """Nobody listens."""


def _taken(flight: Flight, result: Any) -> bool:
    """Whether the weights took it away before its end."""
    return flight.taken is not None and bool(result.finish_reason == FinishReason.ABORT.value)


def _checked(flight: Flight, spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    try:
        return flight.spans(spans)
    except ValueError as error:
        raise RequestFailed(str(error), ErrorCode.INTERNAL) from error


def _first_token_at(metrics: Any) -> float:
    """UNIX seconds; 0 when vLLM's statistics are off."""
    if metrics is None or not metrics.first_token_latency:
        return 0.0
    return min(float(metrics.arrival_time + metrics.first_token_latency), time.time())
