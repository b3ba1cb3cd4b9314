"""Where the two endpoints differ: the one table, held both ways.

A test named here must fail on that endpoint and pass on the other; `docs/reference/compatibility.md`
says the same in prose.
"""

from __future__ import annotations

from .endpoints import PLAIN, ROLLGRID

DIFFERENCES: dict[tuple[str, str], str] = {
    ("test_A49_one_model_is_retrieved", PLAIN): "vLLM has no GET /v1/models/{model}",
    ("test_A49_a_model_whose_id_is_a_path_is_retrieved", PLAIN): "vLLM has no GET /v1/models/{model}",
    ("test_the_answer_names_the_model_that_was_asked_for", PLAIN): "vLLM answers with its first served name",
    ("test_A49_a_field_that_nobody_knows_is_refused_by_name", PLAIN): "vLLM ignores unknown fields, so a typo samples "
    "with the default",
    ("test_A49_a_prompt_that_leaves_less_than_was_asked_for", PLAIN): "vLLM shortens max_tokens without a word",
    ("test_A26_the_bytes_of_tokens_that_are_parts_of_a_character", PLAIN): "vLLM gives the bytes of its own "
    "replacement text, not those of the token",
    ("test_A49_without_max_tokens_sixteen_as_openai_says", ROLLGRID): "a rollout cut at 16 tokens by a forgotten field "
    "is worse than a long one: the bound is what the context and the tenant's limit leave, and the answer says so",
}
"""(test, endpoint that does not do it) → why."""

__all__ = ["DIFFERENCES", "PLAIN", "ROLLGRID"]
