"""How a chat template begins an answer: the same text whether the answer is still to come or stands in the history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .renderer import Renderer, RenderingError

_MARK = "zqanswerqz"
_MOST_REMEMBERED = 64
"""Variables of a template that are remembered at once."""


class Header(NamedTuple):
    """`text` opens an answer; what follows it up to the answer itself is reasoning, prefilled or stripped."""

    text: str

    def precedes(self, part: str, seen: str, closings: set[str] | None) -> bool:
        """Whether `part`, the template's text before an answer, is what was `seen` there.

        `closings` may stand before it (they end the answer before); None: anything.
        """
        if self.text:
            at = seen.rfind(self.text)
            if at < 0:
                return False
            seen = seen[: at + len(self.text)]
        at = part.rfind(seen)
        if at < 0:
            return False
        rest, before = part[at + len(seen) :], part[:at].strip()
        prefilled = self.text not in rest if self.text else not rest.strip()
        return prefilled and (closings is None or before in closings)


class Headers:
    """Finds the header for given template variables, and remembers it."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._found: dict[tuple[str, bool], Header | None] = {}

    def of(self, options: Mapping[str, Any] | None, *, retold: bool = False) -> Header | None:
        """`retold`: as the tokenizer gives its text back.  None where the template does not let it be told."""
        key = (json.dumps(options or {}, sort_keys=True, default=repr), retold)
        if key not in self._found:
            if len(self._found) >= _MOST_REMEMBERED:
                self._found.clear()
            self._found[key] = self._find(options, retold)
        return self._found[key]

    def _find(self, options: Mapping[str, Any] | None, retold: bool) -> Header | None:
        asked = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": _MARK}

        def text(messages: list[dict[str, str]], *, asks: bool) -> str:
            found = self._renderer.chat_text(messages, add_generation_prompt=asks, options=options)
            return self._renderer.retold(found) if retold else found

        try:
            question = text([asked], asks=False)
            forms = [
                text([asked], asks=True),
                text([asked, answer], asks=False),
                text([asked, answer, asked], asks=False),
            ]
        except RenderingError:
            return None
        if not all(_MARK in form for form in forms[1:]):
            return None
        begun = [form.partition(_MARK)[0] for form in forms]
        asked_to = self._whole(common_prefix(question, *begun), question)
        return Header(self._whole(common_prefix(*begun), min(begun, key=len))[len(asked_to) :])

    def _whole(self, common: str, text: str) -> str:
        """`common` if it is all of `text`, else up to its last special token or line: texts part in mid-word, too."""
        if common == text:
            return common
        return max(self._renderer.to_special_token(common), common[: common.rfind("\n") + 1], key=len)


def common_prefix(*texts: str) -> str:
    """The longest text that all begin with."""
    shortest = min(texts, key=len)
    end = next((i for i, character in enumerate(shortest) if any(t[i] != character for t in texts)), len(shortest))
    return shortest[:end]
