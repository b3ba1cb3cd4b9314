"""Finding the answer inside what the model wrote.  All functions are linear in the text."""

from __future__ import annotations

from enum import StrEnum

from .base import TaskError

_OPEN, _CLOSE = "<answer>", "</answer>"


class Extract(StrEnum):
    """Where the answer is: `auto` takes the last `<answer>` element, else the last line that has text."""

    AUTO = "auto"
    TAGS = "tags"
    LAST_LINE = "last_line"
    WHOLE = "whole"


def extract_mode(text: str) -> Extract:
    """The mode of that name; raises TaskError naming the known ones."""
    try:
        return Extract(text)
    except ValueError:
        raise TaskError(f"extract={text!r} is not one of {', '.join(Extract)}") from None


def extract(text: str, mode: Extract) -> str | None:
    """The answer without surrounding white space; None when there is none where it should be."""
    if mode is Extract.WHOLE:
        return text.strip() or None
    if mode is Extract.LAST_LINE:
        return last_line(text)
    found = answer_tag(text)
    if found is None and mode is Extract.AUTO:
        return last_line(text)
    return found


def answer_tag(text: str) -> str | None:
    """The content of the last closed `<answer>` element."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end].strip() if start >= 0 else None


def last_line(text: str) -> str | None:
    for line in reversed(text.splitlines()):
        if stripped := line.strip():
            return stripped
    return None


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` whose braces close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return text[start + len("\\boxed{") : position].strip()
    return None
