"""Chunks of a streamed answer in the shapes of the three doors, as vLLM and OpenAI have them.

The last chunk of a choice also says what only the record knows: versions, seed, parse status.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from rollgrid_contracts.samples import PromptLogprobs, Sample
from rollgrid_rendering.renderer import Renderer

from .answers import echoed, spans_of, turn_fields
from .chat_answers import finish_reason, parse_status, role_of, shows_tokens
from .chat_schema import ChatRequest
from .logprob_shapes import (
    Row,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    generate_logprobs,
    prompt_rows,
    rows_of,
)
from .openai_schema import CompletionRequest, GenerateRequest, StreamOptions
from .streaming import Piece
from .submission import Submission
from .visible import Visible

Chunk = dict[str, Any]


class Chunks(Protocol):
    """How one door words its stream.  Choices are numbered across groups, in prompt-major order."""

    def begin(self) -> list[Chunk]:
        """Before the first token."""

    def piece(self, choice: int, piece: Piece) -> list[Chunk]: ...

    def finish(self, choice: int, piece: Piece | None, sample: Sample, of_prompt: PromptLogprobs | None) -> list[Chunk]:
        """The last of a choice: the `piece` nobody has sent, and the record's verdict."""

    def end(self) -> list[Chunk]:
        """After the last choice: the usage, if asked for."""


class _Counted:
    """What the three have in common: one head, and the usage counted as it is sent."""

    def __init__(self, submission: Submission, options: StreamOptions | None, head: Chunk) -> None:
        self.submission, self.head = submission, head
        self.sizes = [group.n for group in submission.groups]
        self._sent = [0] * sum(self.sizes)
        self._usage = bool(options and options.include_usage)
        self._always = self._usage and bool(options and options.continuous_usage_stats)

    def group_of(self, choice: int) -> tuple[int, int]:
        """(position of the group, index in it)."""
        for position, n in enumerate(self.sizes):
            if choice < n:
                return position, choice
            choice -= n
        raise IndexError(choice)

    def chunk(self, choice: Chunk, sent: int = 0, **more: Any) -> Chunk:
        found = {**self.head, "choices": [choice], **more}
        number = choice["index"]
        self._sent[number] += sent
        if self._always:
            prompt = len(self.submission.groups[self.group_of(number)[0]].prompt_token_ids)
            found["usage"] = _usage(prompt, self._sent[number])
        return found

    def end(self) -> list[Chunk]:
        if not self._usage:
            return []
        prompt = sum(len(group.prompt_token_ids) for group in self.submission.groups)
        return [{**self.head, "choices": [], "usage": _usage(prompt, sum(self._sent))}]

    def verdict(self, choice: int, sample: Sample) -> Chunk:
        position, index = self.group_of(choice)
        found: Chunk = {
            "stop_reason": sample.stop_reason,
            "sample_id": self.submission.sample_id(self.submission.group_ids[position], index),
            "weight_versions": spans_of(sample),
        }
        if sample.seed is not None:
            found["seed"] = sample.seed
        if sample.weight_fingerprint is not None:
            found["weight_fingerprint"] = sample.weight_fingerprint
        return found


def _usage(prompt: int, completion: int) -> Chunk:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChatChunks(_Counted):
    """See `Chunks`."""

    def __init__(self, request: ChatRequest, submission: Submission, renderer: Renderer) -> None:
        head = {
            "id": f"chatcmpl-{submission.batch_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": submission.model,
        }
        super().__init__(submission, request.stream_options, head | turn_fields(submission))
        (self._group,) = submission.groups
        self._request = request
        self._names = TokenNames(renderer, bool(request.return_tokens_as_token_ids))
        shown = shows_tokens(request, self._group)
        self._logprobs, self._ids = bool(request.logprobs) and shown, bool(request.return_token_ids) and shown

    def begin(self) -> list[Chunk]:
        more: Chunk = {}
        if self._request.return_token_ids:
            more["prompt_token_ids"] = self._group.prompt_token_ids.tolist()
        if self._request.return_prompt_text:
            more["prompt_text"] = self._group.prompt_text
        delta = {"role": role_of(self._request), "content": ""}
        return [
            self.chunk({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}, **more)
            for i in range(self._group.n)
        ]

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        found = self._choice(choice, piece)
        sent = len(piece.token_ids)
        if not found["delta"] and not (sent and (self._logprobs or self._ids)):
            self._sent[choice] += sent
            return []
        return [self.chunk({**found, "finish_reason": None}, sent)]

    def finish(self, choice: int, piece: Piece | None, sample: Sample, of_prompt: PromptLogprobs | None) -> list[Chunk]:
        found = self._choice(choice, piece)
        verdict = self.verdict(choice, sample)
        status = parse_status(sample)
        if status is not None:
            verdict["parse_status"] = status
        reason = finish_reason(sample, self._group.parsing)
        sent = len(piece.token_ids) if piece is not None else 0
        return [self.chunk({**found, "finish_reason": reason, **verdict}, sent)]

    def _choice(self, choice: int, piece: Piece | None) -> Chunk:
        found: Chunk = {"index": choice, "delta": {} if piece is None else self._delta(piece.added), "logprobs": None}
        if self._ids:
            found["token_ids"] = [] if piece is None else piece.token_ids
        if piece is not None and piece.token_ids and self._logprobs:
            top = self._request.top_logprobs or 0
            found["logprobs"] = chat_logprobs(piece.token_ids, piece.logprobs, piece.alternatives, self._names, top)
        return found

    def _delta(self, added: Visible) -> Chunk:
        found: Chunk = {}
        if added.content:
            found["content"] = added.content
        if added.reasoning and self._request.include_reasoning is not False:
            found["reasoning"] = found["reasoning_content"] = added.reasoning
        calls = added.tool_calls
        if self._request.parallel_tool_calls is False:
            calls = [call for call in calls if call.get("index", 0) == 0]
        if calls:
            found["tool_calls"] = calls
        return found


class CompletionChunks(_Counted):
    """See `Chunks`.  With an echo and logprobs nothing is sent before the record: those of the prompt are there."""

    def __init__(self, request: CompletionRequest, submission: Submission, renderer: Renderer) -> None:
        head = {
            "id": f"cmpl-{submission.batch_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": submission.model,
        }
        super().__init__(submission, request.stream_options, head | turn_fields(submission))
        self._request, self._renderer = request, renderer
        self._names = TokenNames(renderer, bool(request.return_tokens_as_token_ids))
        self._offsets = [0] * len(self._sent)
        self._echo_late = bool(request.echo) and request.logprobs is not None

    def begin(self) -> list[Chunk]:
        request = self._request
        if self._echo_late or not (request.echo or request.return_token_ids):
            return []
        found: list[Chunk] = []
        for choice in range(len(self._sent)):
            group = self.submission.groups[self.group_of(choice)[0]]
            text = echoed(group, self._renderer) if request.echo else ""
            first: Chunk = {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
            if request.return_token_ids:
                first |= {"prompt_token_ids": group.prompt_token_ids.tolist(), "token_ids": []}
            found.append(self.chunk(first))
        return found

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        sent = len(piece.token_ids)
        shows_ids = self._request.return_token_ids or self._request.logprobs is not None
        if not piece.added.content and not (sent and shows_ids):
            self._sent[choice] += sent
            return []
        return [self.chunk({**self._choice(choice, piece, [], ""), "finish_reason": None}, sent)]

    def finish(self, choice: int, piece: Piece | None, sample: Sample, of_prompt: PromptLogprobs | None) -> list[Chunk]:
        group = self.submission.groups[self.group_of(choice)[0]]
        before: list[Row] = []
        text = ""
        if self._echo_late:
            before = prompt_rows(group.prompt_token_ids.tolist(), of_prompt)
            text = echoed(group, self._renderer)
        found = self._choice(choice, piece, before, text)
        if self._echo_late and self._request.return_token_ids:
            found["prompt_token_ids"] = group.prompt_token_ids.tolist()
        reason = sample.finish_reason.value if sample.finish_reason else None
        sent = len(piece.token_ids) if piece is not None else 0
        return [self.chunk({**found, "finish_reason": reason, **self.verdict(choice, sample)}, sent)]

    def _choice(self, choice: int, piece: Piece | None, before: list[Row], text: str) -> Chunk:
        found: Chunk = {"index": choice, "text": text, "logprobs": None}
        rows = before
        if piece is not None:
            found["text"] += piece.added.content
            rows = before + rows_of(piece.token_ids, piece.logprobs, piece.alternatives)
        if self._request.return_token_ids:
            found["token_ids"] = [] if piece is None else piece.token_ids
        if self._request.logprobs is not None and rows:
            logprobs = completion_logprobs(rows, self._names, self._offsets[choice])
            self._offsets[choice] = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
            found["logprobs"] = logprobs
        return found


class GenerateChunks(_Counted):
    """See `Chunks`: token ids alone."""

    def __init__(self, request: GenerateRequest, submission: Submission, request_id: str) -> None:
        head = {"request_id": request.request_id or request_id, "model": submission.model, "output_mode": "tokens"}
        super().__init__(submission, request.stream_options, head | turn_fields(submission))
        self._prompt = submission.groups[0].prompt_token_ids if request.return_token_ids else None
        self._with_logprobs = request.sampling_params.logprobs is not None

    def begin(self) -> list[Chunk]:
        return [] if self._prompt is None else [{**self.head, "choices": [], "prompt_token_ids": self._prompt.tolist()}]

    def piece(self, choice: int, piece: Piece) -> list[Chunk]:
        if not piece.token_ids:
            return []
        return [self.chunk({**self._choice(choice, piece), "finish_reason": None}, len(piece.token_ids))]

    def finish(self, choice: int, piece: Piece | None, sample: Sample, of_prompt: PromptLogprobs | None) -> list[Chunk]:
        reason = sample.finish_reason.value if sample.finish_reason else None
        found = {**self._choice(choice, piece), "finish_reason": reason, **self.verdict(choice, sample)}
        return [self.chunk(found, len(piece.token_ids) if piece is not None else 0)]

    def _choice(self, choice: int, piece: Piece | None) -> Chunk:
        if piece is None:
            return {"index": choice, "token_ids": [], "logprobs": None}
        logprobs = (
            generate_logprobs(piece.token_ids, piece.logprobs, piece.alternatives) if self._with_logprobs else None
        )
        return {"index": choice, "token_ids": piece.token_ids, "logprobs": logprobs}
