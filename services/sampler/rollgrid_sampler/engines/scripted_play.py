"""One sample of the scripted engine under way: its tokens are known, time brings them out."""

from __future__ import annotations

import time
from array import array

import numpy as np
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import TopLogprobs

from rollgrid_sampler import alternatives
from rollgrid_sampler.resume import continuable
from rollgrid_sampler.settings import SamplerSettings
from rollgrid_sampler.transcript import Transcript

from .base import Delta, Generated, GenerationRequest, OnDelta, Sent
from .progress import clipped
from .script import cut, neighbours, sample_key, script, spell


class Play:
    """One sample under way: all its tokens are known, time brings them out.

    After `script` it has the tokens as the weights of now continue what had come out before.
    """

    def __init__(
        self, settings: SamplerSettings, request: GenerationRequest, limit: int, on_delta: OnDelta | None
    ) -> None:
        self._settings, self._request, self._limit, self._on_delta = settings, request, limit, on_delta
        self._began = time.time()
        self._start(request.sent)

    def _start(self, sent: Sent) -> None:
        self._clock = time.time()
        self._tokens, self._logprobs = np.array(sent.token_ids, np.uint32), np.array(sent.logprobs, np.float32)
        self._seams = [(span.version, span.start) for span in sent.version_spans]
        self._sent = self._told = len(sent.token_ids)
        self._text = Transcript(lambda ids: spell(np.array(ids, np.uint32)), self._request.sampling)
        self._text.push(sent.token_ids)
        self._text_sent = self._text.length

    @property
    def streamed(self) -> bool:
        return self._on_delta is not None

    def script(self, digest: bytes, version: int) -> None:
        request, settings, kept = self._request, self._settings, len(self._tokens)
        key = sample_key(digest, request.sample, request.index, request.seed)
        vocab, eos_id = settings.scripted_vocab, settings.scripted_eos_id
        tokens, logprobs = script(key, kept, max(kept, self._limit), vocab, eos_id, settings.scripted_eos_rate)
        self._tokens = np.concatenate([self._tokens, tokens]) if kept else tokens
        self._logprobs = np.concatenate([self._logprobs, logprobs]) if kept else logprobs
        if not self._seams or self._seams[-1][0] != version:
            self._seams.append((version, kept))
        self._spelled = spell(self._tokens)
        self._cut = cut(self._tokens, self._spelled, request.sampling, eos_id, self._limit)

    @property
    def ends_at(self) -> float:
        rate, own = self._settings.scripted_token_rate, self._cut.end - self._sent
        return self._clock + self._settings.scripted_latency_s + (own / rate if rate else 0.0)

    @property
    def _due(self) -> int:
        """Tokens that have come out; the last one only comes out at the end."""
        rate = self._settings.scripted_token_rate
        elapsed = time.time() - self._clock - self._settings.scripted_latency_s
        own = max(0, int(elapsed * rate)) if rate else 0
        return max(self._told, min(self._cut.end - 1, self._sent + own))

    def tell(self) -> None:
        """Hand on what has come out."""
        first, end = self._told, self._due
        if self._on_delta is None or end <= first:
            return
        self._told = end
        ids, values = self._tokens[first:end], self._logprobs[first:end]
        delta = Delta(
            offset=first,
            token_ids=ids.tolist(),
            logprobs=array("f", values.tobytes()),
            top_logprobs=self._alternatives(first, end),
            text=self._text.push(ids.tolist()),
            version_spans=clipped(self._spans(end), first, end),
        )
        self._on_delta(delta)

    def interrupt(self, *, restart: bool) -> None:
        """Other weights are loaded: what has come out stays, unless `restart` and going on behind it is not exact."""
        kept = self._out
        if restart and not (kept and continuable(self._request.sampling)):
            self._start(Sent())
            if self._on_delta is not None:
                self._on_delta(Delta(offset=0, token_ids=[], logprobs=array("f")))
            return
        self._tokens, self._logprobs = self._tokens[:kept], self._logprobs[:kept]
        self._seams = [seam for seam in self._seams if seam[1] < kept]

    @property
    def _out(self) -> int:
        """Tokens that somebody has."""
        return self._told if self.streamed else self._due

    def so_far(self) -> Sent:
        """What has come out, for others to continue behind."""
        kept = self._out
        return Sent(
            token_ids=self._tokens[:kept].tolist(),
            logprobs=array("f", self._logprobs[:kept].tobytes()),
            version_spans=self._spans(kept),
        )

    def finish(self) -> Generated:
        ended = self._cut
        ids, values = self._tokens[: ended.end], self._logprobs[: ended.end]
        return Generated(
            token_ids=ids.tolist(),
            logprobs=array("f", values.tobytes()),
            top_logprobs=self._alternatives(0, ended.end),
            text=self._spelled[: ended.text_end],
            finish_reason=ended.reason,
            stop_reason=ended.stop_reason,
            version_spans=self._spans(ended.end),
            first_token_at=self._began + self._settings.scripted_latency_s,
            resumed_from=self._sent,
            text_sent=self._text_sent,
        )

    def _spans(self, end: int) -> tuple[VersionSpan, ...]:
        starts = [first for _, first in self._seams]
        whole = zip(self._seams, [*starts[1:], end], strict=True)
        return clipped(tuple(VersionSpan(version=v, start=a, end=b) for (v, a), b in whole), 0, end)

    def _alternatives(self, start: int, end: int) -> TopLogprobs | None:
        """Those of tokens sent before are not known."""
        asked, first = self._request.sampling.logprobs, max(start, self._sent)
        ids, values = self._tokens[first:end], self._logprobs[first:end]
        known = neighbours(ids, values, asked, self._settings.scripted_vocab)
        return (
            known
            if known is None or first == start
            else alternatives.joined([alternatives.empty(first - start), known])
        )
