"""A49: which models there are, and the names they may be asked for by."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from .asking import USER, chat
from .model import CONTEXT, MODEL, PATH_ID, VERSION_ID

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_A49_models_are_listed_with_their_context(client: OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) >= {MODEL, PATH_ID, VERSION_ID}
    for card in cards.values():
        assert (card.object, (card.model_extra or {})["max_model_len"]) == ("model", CONTEXT)


@pytest.mark.parametrize("name", [MODEL, VERSION_ID])
def test_A49_one_model_is_retrieved(client: OpenAI, name: str) -> None:
    assert client.models.retrieve(name).id == name


def test_A49_a_model_whose_id_is_a_path_is_retrieved(client: OpenAI) -> None:
    assert client.models.retrieve(PATH_ID).id == PATH_ID


@pytest.mark.parametrize("name", [PATH_ID, VERSION_ID])
def test_A49_paths_and_versions_are_model_names_like_others(client: OpenAI, name: str) -> None:
    assert chat(client, model=name).usage.completion_tokens > 0


@pytest.mark.parametrize("name", [PATH_ID, VERSION_ID])
def test_the_answer_names_the_model_that_was_asked_for(client: OpenAI, name: str) -> None:
    assert chat(client, model=name).model == name


def test_A49_unknown_models_are_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=USER)
    assert "nobody" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=MODEL + "-other", prompt="hi")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
