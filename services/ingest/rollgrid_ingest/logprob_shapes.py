"""Logprobs in the shapes of the three doors, for finished samples and for pieces of streams alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollgrid_contracts.samples import PromptLogprobs
from rollgrid_rendering.renderer import Renderer

from .chat_schema import ChatLogprob, ChatLogprobEntry, ChatLogprobs
from .openai_schema import CompletionLogprobs, GenerateLogprob, GenerateLogprobEntry, GenerateLogprobs
from .streaming import Alternatives, alternatives_of

Row = tuple[int, float | None, list[tuple[int, float]]]
"""A token, its logprob (None for the first of a prompt), the alternatives in rank order."""


class TokenNames:
    """Tokens as texts, or as `token_id:N` for clients that must tell every one of them apart."""

    def __init__(self, renderer: Renderer, as_ids: bool) -> None:
        self._renderer, self._as_ids = renderer, as_ids

    def of(self, ids: Sequence[int]) -> list[str]:
        return [f"token_id:{token}" for token in ids] if self._as_ids else self._renderer.pieces(ids)

    def bytes_of(self, ids: Sequence[int]) -> list[list[int]]:
        return [list(each) for each in self._renderer.piece_bytes(ids)]


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], others: Alternatives, names: TokenNames, top: int
) -> ChatLogprobs:
    """`top` entries in each place, the sampled token first among them."""
    content: list[ChatLogprobEntry] = []
    rows = zip(ids, names.of(ids), names.bytes_of(ids), logprobs, others, strict=True)
    for token, name, own_bytes, logprob, row in rows:
        ranked = [(token, logprob), *((other, value) for other, value in row if other != token)][:top]
        content.append(
            ChatLogprobEntry(
                token=name,
                logprob=logprob,
                bytes=own_bytes,
                top_logprobs=_ranked(ranked, names),
            )
        )
    return ChatLogprobs(content=content)


def _ranked(ranked: Sequence[tuple[int, float]], names: TokenNames) -> list[ChatLogprob]:
    ids = [token for token, _ in ranked]
    return [
        ChatLogprob(token=name, logprob=value, bytes=own_bytes)
        for name, own_bytes, (_, value) in zip(names.of(ids), names.bytes_of(ids), ranked, strict=True)
    ]


def completion_logprobs(rows: Sequence[Row], names: TokenNames, start: int = 0) -> CompletionLogprobs:
    """`start` is where the first token's text begins in the answer."""
    tokens = names.of([row[0] for row in rows])
    offsets, position = [], start
    top: list[dict[str, float] | None] = []
    for name, (token, logprob, others) in zip(tokens, rows, strict=True):
        offsets.append(position)
        position += len(name)
        if logprob is None:
            top.append(None)
            continue
        entry = {name: logprob}
        for (other, value), other_name in zip(others, names.of([each for each, _ in others]), strict=True):
            if other != token:
                entry.setdefault(other_name, value)
        top.append(entry)
    return CompletionLogprobs(
        tokens=tokens, token_logprobs=[row[1] for row in rows], top_logprobs=top, text_offset=offsets
    )


def generate_logprobs(ids: Sequence[int], logprobs: Sequence[float], others: Alternatives) -> GenerateLogprobs:
    content: list[GenerateLogprobEntry] = []
    for token, logprob, row in zip(ids, logprobs, others, strict=True):
        name = f"token_id:{token}"
        top = [GenerateLogprob(token=name, token_id=token, logprob=logprob)]
        top += [
            GenerateLogprob(token=f"token_id:{other}", token_id=other, logprob=value)
            for other, value in row
            if other != token
        ]
        content.append(GenerateLogprobEntry(token=name, token_id=token, logprob=logprob, top_logprobs=top))
    return GenerateLogprobs(content=content)


def rows_of(ids: Sequence[int], logprobs: Sequence[float], others: Alternatives) -> list[Row]:
    return list(zip(ids, logprobs, others, strict=True))


def prompt_rows(ids: Sequence[int], found: PromptLogprobs | None) -> list[Row]:
    """One row per prompt token, the first without a logprob."""
    first: list[Row] = [(ids[0], None, [])]
    if found is None:
        return first + [(token, None, []) for token in ids[1:]]
    return first + rows_of(ids[1:], found.logprobs.tolist(), alternatives_of(found.top, len(ids) - 1))


def prompt_logprobs(
    ids: Sequence[int], found: PromptLogprobs | None, names: TokenNames
) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: per prompt token {id: {logprob, rank, decoded_token}}, the token itself first; the first is null."""
    if found is None:
        return None
    ranks: list[int | None] = [*found.ranks] or [None] * (len(ids) - 1)
    answer: list[dict[str, Any] | None] = [None]
    for (token, logprob, others), rank in zip(prompt_rows(ids, found)[1:], ranks, strict=True):
        entry = {str(token): _entry(logprob, rank, names.of([token])[0])}
        for place, (other, value) in enumerate(others, 1):
            if other != token:
                entry[str(other)] = _entry(value, place, names.of([other])[0])
        answer.append(entry)
    return answer


def _entry(logprob: float | None, rank: int | None, name: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": name}
