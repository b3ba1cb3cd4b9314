"""Messages as OpenAI has them, checked before a template sees them.  Every refusal names the message."""

from __future__ import annotations

from typing import Any

from rollgrid_contracts.failures import ErrorCode
from rollgrid_rendering.messages import MEDIA_PARTS, TEXT_PARTS

from .settings import Limits
from .wire import at_most, check_payload, invalid, unsupported

_BARE = frozenset({"assistant"})
"""Roles whose message may have no content: it has tool calls, or is about to be continued."""


def check_messages(messages: list[dict[str, Any]], path: str, limits: Limits) -> tuple[dict[str, Any], ...]:
    """The messages as they are.  Raises RollgridError naming the field."""
    if not messages:
        raise invalid(f"{path} holds no token", path, code=ErrorCode.EMPTY_PROMPT)
    at_most(len(messages), path, "max_messages", limits.max_messages)
    check_payload(messages, path, limits.max_depth)
    for i, message in enumerate(messages):
        _check_message(message, f"{path}[{i}]")
    return tuple(messages)


def _check_message(message: dict[str, Any], path: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{path}.role must be a string", f"{path}.role")
    content = message.get("content")
    if content is None:
        if role not in _BARE:
            raise invalid(f"{path}.content is required", f"{path}.content")
    elif not isinstance(content, str):
        if not isinstance(content, list):
            raise invalid(f"{path}.content must be a string or text parts", f"{path}.content")
        for part in content:
            _check_part(part, f"{path}.content")
    for name in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if message.get(name) is not None and not isinstance(message[name], str):
            raise invalid(f"{path}.{name} must be a string", f"{path}.{name}")
    if message.get("audio") is not None:
        raise unsupported(f"{path}.audio", "only text is offered")
    if message.get("function_call") is not None:
        raise unsupported(f"{path}.function_call", "send tool_calls")
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list):
            raise invalid(f"{path}.tool_calls must be a list, of an assistant's message", f"{path}.tool_calls")
        for i, call in enumerate(calls):
            _check_call(call, f"{path}.tool_calls[{i}]")


def _check_part(part: Any, path: str) -> None:
    if isinstance(part, str):
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS:
        raise unsupported(path, f"{kind}: only text parts are offered")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise unsupported(path, "only text parts are offered")
    if not isinstance(part.get(TEXT_PARTS[kind]), str):
        raise invalid(f"{path}: a {kind} part needs a text", path)


def _check_call(call: Any, path: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(f"{path} must be a call of a function", path)
    if not isinstance(function.get("name"), str):
        raise invalid(f"{path}.function.name must be a string", f"{path}.function.name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise invalid(f"{path}.function.arguments must be a string", f"{path}.function.arguments")
