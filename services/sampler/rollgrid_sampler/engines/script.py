"""What the scripted engine answers, as pure functions: digests of weights, and the streams they make.

Whoever checks recomputes an answer with these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import SamplingParams
from rollgrid_contracts.samples import FinishReason, TopLogprobs

Tokens = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]

_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz 0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.", dtype=np.uint8)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COUNTER = np.arange(1, 4097, dtype=np.uint64) * _GOLDEN
"""The first positions' counters, made once: most samples are shorter."""


def file_digests(folder: Path | None) -> dict[str, bytes]:
    """sha256 of each safetensors file of `folder`, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").digest()
    return found


def combined(files: Mapping[str, bytes]) -> bytes:
    """One digest over the files' in name order; a constant without any."""
    return hashlib.sha256(b"rollgrid-scripted-1" + b"".join(files[name] for name in sorted(files))).digest()


def weights_digest(folder: Path | None) -> bytes:
    """What the tokens of the weights in `folder` derive from."""
    return combined(file_digests(folder))


def adapter_digest(weights: bytes, files: Mapping[str, bytes]) -> bytes:
    """What the tokens of a LoRA version derive from: its own bytes and those it lies on."""
    return hashlib.sha256(b"rollgrid-scripted-lora-1" + weights + combined(files)).digest()


def fingerprint(digest: bytes) -> str:
    """What the probes of an engine give whose weights have this digest."""
    return hashlib.sha256(b"rollgrid-scripted-fingerprint" + digest).hexdigest()


def sample_key(digest: bytes, sample: str, index: int, seed: int | None) -> int:
    """The 64-bit key of one sample's stream."""
    name = f"id:{sample}" if seed is None else f"seed:{seed}"
    return int.from_bytes(hashlib.sha256(digest + f"|{name}|{index}".encode()).digest()[:8], "little")


def script(key: int, start: int, end: int, vocab: int, eos_id: int, eos_rate: float) -> tuple[Tokens, Logprobs]:
    """Tokens and logprobs of positions [start, end)."""
    counter = _COUNTER[start:end] if end <= len(_COUNTER) else np.arange(start + 1, end + 1, dtype=np.uint64) * _GOLDEN
    mixed = np.uint64(key) + counter  # splitmix64 over a counter
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    tokens = (mixed % np.uint64(vocab - 1)).astype(np.uint32)
    tokens += tokens >= eos_id  # every id but EOS
    high = mixed >> np.uint64(40)
    tokens[high < int(eos_rate * (1 << 24))] = eos_id
    logprobs = (high.astype(np.float32) + np.float32(1)) * np.float32(-8.0 / (1 << 24))
    return tokens, logprobs


def spell(tokens: Tokens) -> str:
    """One character per token."""
    return _ALPHABET[tokens % np.uint32(64)].tobytes().decode()


class Cut(NamedTuple):
    """Where a stream ends (exclusive), and why; `text_end` is where its text ends."""

    end: int
    text_end: int
    reason: FinishReason
    stop_reason: int | str | None


def cut(tokens: Tokens, text: str, sampling: SamplingParams, eos_id: int, limit: int) -> Cut:
    """The earliest of EOS, stop token, stop string and `limit`, none before `min_tokens`."""
    best = Cut(limit, limit, FinishReason.LENGTH, None)
    stops = list(sampling.stop_token_ids) if sampling.ignore_eos else [eos_id, *sampling.stop_token_ids]
    at = min((_first(tokens, stop, sampling.min_tokens) for stop in stops), default=limit)
    if at < limit:
        why = None if int(tokens[at]) == eos_id and eos_id not in sampling.stop_token_ids else int(tokens[at])
        best = Cut(at + 1, at + 1, FinishReason.STOP, why)
    for stop in sampling.stop:
        found = text.find(stop, max(0, sampling.min_tokens - len(stop) + 1))
        if found >= 0 and found + len(stop) < best.end:
            text_end = found + len(stop) if sampling.include_stop_str_in_output else found
            best = Cut(found + len(stop), text_end, FinishReason.STOP, stop)
    return best


def _first(tokens: Tokens, wanted: int, start: int) -> int:
    """The first position from `start` on that holds `wanted`; the length when none does."""
    hits = tokens[start:] == wanted
    at = int(hits.argmax()) if hits.size else 0
    return start + at if hits.size and hits[at] else len(tokens)


def neighbours(ids: Tokens, values: Logprobs, asked: int, vocab: int) -> TopLogprobs | None:
    """The sampled token first, then its neighbours in the vocabulary, each one nat less likely."""
    if asked == 0:
        return None
    rank = np.arange(asked, dtype=np.uint32)
    tokens = (ids[:, None] + rank) % np.uint32(vocab)
    logprobs = values[:, None] - rank.astype(np.float32)
    offsets = np.arange(len(ids) + 1, dtype=np.uint32) * np.uint32(asked)
    return TopLogprobs(
        offsets=TokenIds(offsets.astype("<u4").tobytes()),
        token_ids=TokenIds(tokens.astype("<u4").tobytes()),
        logprobs=Floats(logprobs.astype("<f4").tobytes()),
    )
