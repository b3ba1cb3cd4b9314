"""A policy's state with everything a test does not care about."""

from __future__ import annotations

from typing import Any

from rollgrid_contracts.checkpoints import PolicyState


def policy_state(**fields: Any) -> PolicyState:
    """Shared policy `p` at its base, unless `fields` say otherwise."""
    anything: dict[str, Any] = {
        "tenant": "shared",
        "policy": "p",
        "pool": "pool",
        "base": "/models/p",
        "base_digest": "d0",
        "tokenizer_prefix": "tokenizers/t/",
        "tokenizer_digest": "t",
        "max_model_len": 512,
        "vocab_size": 512,
        "dtype": "float32",
    }
    return PolicyState(**anything | fields)
