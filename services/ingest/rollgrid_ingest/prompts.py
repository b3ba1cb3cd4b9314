"""Prompts in every form a request may use, rendered to token ids once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_rendering.offload import RenderThreads
from rollgrid_rendering.renderer import Renderer, RenderingError, TooManyTokens
from rollgrid_runtime import telemetry
from rollgrid_runtime.errors import RollgridError

from . import metrics
from .catalog import Catalog
from .chat_schema import ChatRequest
from .conversation import check_messages
from .openai_schema import CompletionRequest, ScoreRequest
from .rollout_schema import TaskRequest
from .sampling import check_token_ids
from .settings import Limits
from .tools import check_tools
from .wire import at_most, check_payload, invalid

INLINE_CHARS = 2000
"""Plain text up to this length is encoded in the event loop (about 0.2 ms): a hop to a thread costs as much."""


class Prompt(NamedTuple):
    """A rendered prompt and what it was made from."""

    token_ids: list[int]
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


class Prompts:
    """Renders.  All methods raise RollgridError naming the field."""

    def __init__(self, catalog: Catalog, threads: RenderThreads, limits: Limits) -> None:
        self._catalog, self._threads, self._limits = catalog, threads, limits

    async def of_completion(self, request: CompletionRequest, policy: PolicyState) -> list[Prompt]:
        return await self._any_form(request.prompt, "prompt", request.add_special_tokens, policy)

    async def of_score(self, request: ScoreRequest, policy: PolicyState) -> list[Prompt]:
        if (request.token_ids is None) == (request.prompt is None):
            raise invalid("exactly one of token_ids and prompt is required", "token_ids")
        if request.token_ids is not None:
            return await self._any_form(request.token_ids, "token_ids", None, policy)
        return await self._any_form(request.prompt or [], "prompt", request.add_special_tokens, policy)

    async def _any_form(
        self, prompt: str | Sequence[Any], field: str, add_special_tokens: bool | None, policy: PolicyState
    ) -> list[Prompt]:
        """A text, texts, token ids, or lists of token ids."""
        renderer = self._catalog.renderer(policy)
        items: list[Any] = [prompt] if isinstance(prompt, str) else list(prompt)
        kinds = set(map(type, items))
        if kinds == {int}:
            return [Prompt(token_ids(items, field, policy))]
        if not kinds:
            raise _empty(field)
        at_most(len(items), field, "max_groups", self._limits.max_groups)
        if kinds == {list}:
            return [Prompt(token_ids(ids, f"{field}[{i}]", policy)) for i, ids in enumerate(items)]
        if kinds != {str}:
            raise invalid(f"{field} mixes texts and token ids", field)
        special = add_special_tokens is not False
        most = policy.max_model_len
        work = [
            lambda text=text: Prompt(renderer.encode(text, add_special_tokens=special, at_most=most), text)
            for text in items
        ]
        fields = [field] if len(items) == 1 else [f"{field}[{i}]" for i in range(len(items))]
        return await self._rendered(work, fields, policy, short=sum(map(len, items)) <= INLINE_CHARS)

    async def of_chat(
        self, request: ChatRequest, tools: tuple[dict[str, Any], ...], options: dict[str, Any], policy: PolicyState
    ) -> Prompt:
        """`options` are the template's variables, checked."""
        renderer = self._catalog.renderer(policy)
        messages = check_messages(request.messages, "messages", self._limits)
        documents = request.documents or []
        check_payload(documents, "documents", self._limits.max_depth)
        goes_on = bool(request.continue_final_message)
        if goes_on and request.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt exclude each other", "add_generation_prompt"
            )
        generation_prompt = not goes_on and request.add_generation_prompt is not False
        special = bool(request.add_special_tokens)

        def render() -> Prompt:
            text, found = renderer.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=generation_prompt,
                continue_final_message=goes_on,
                add_special_tokens=special,
                options=options,
                at_most=policy.max_model_len,
            )
            return Prompt(found, text, messages)

        size = sum(map(_size, messages))
        (prompt,) = await self._rendered([render], ["messages"], policy, short=not tools and size <= INLINE_CHARS)
        return prompt

    async def of_tasks(self, tasks: Sequence[TaskRequest], policy: PolicyState) -> list[Prompt]:
        renderer = self._catalog.renderer(policy)
        work: list[Callable[[], Prompt]] = []
        fields: list[str] = []
        for i, task in enumerate(tasks):
            path = f"tasks[{i}]"
            fields.append(path)
            work.append(self._task_work(task, path, policy, renderer))
        short = all(task.messages is None for task in tasks) and _characters(tasks) <= INLINE_CHARS
        return await self._rendered(work, fields, policy, short=short)

    def _task_work(self, task: TaskRequest, path: str, policy: PolicyState, renderer: Renderer) -> Callable[[], Prompt]:
        """How to render one task; refuses at once what needs no rendering."""
        given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(task, name) is not None]
        if len(given) != 1:
            raise invalid(f"{path} needs exactly one of prompt, messages and prompt_token_ids", path)
        if task.prompt_token_ids is not None:
            found = Prompt(token_ids(task.prompt_token_ids, f"{path}.prompt_token_ids", policy))
            return lambda: found
        if task.prompt is not None:
            text, special = task.prompt, task.add_special_tokens is not False
            most = policy.max_model_len
            return lambda: Prompt(renderer.encode(text, add_special_tokens=special, at_most=most), text)
        messages = check_messages(task.messages or [], f"{path}.messages", self._limits)
        tools = check_tools(task.tools, f"{path}.tools", self._limits) if task.tools else ()
        options = task.chat_template_kwargs or {}
        check_payload(options, f"{path}.chat_template_kwargs", self._limits.max_depth)

        def render() -> Prompt:
            text, token_ids = renderer.render(messages, tools=tools, options=options, at_most=policy.max_model_len)
            return Prompt(token_ids, text, messages)

        return render

    async def _rendered(
        self, work: Sequence[Callable[[], Prompt]], fields: Sequence[str], policy: PolicyState, *, short: bool = False
    ) -> list[Prompt]:
        """All of `work`: in one hop to the render threads, or here when that would cost more than the work."""

        def run() -> list[Prompt]:
            found: list[Prompt] = []
            for task, field in zip(work, fields, strict=True):
                try:
                    prompt = task()
                except TooManyTokens as error:
                    raise too_long(f"{error.least} tokens or more", field, policy) from error
                except RenderingError as error:
                    raise invalid(f"{field}: {error}", field) from error
                if not prompt.token_ids:
                    raise _empty(field)
                found.append(prompt)
            return found

        with telemetry.child("render prompts", prompts=len(work)) as span, metrics.RENDER_SECONDS.time():
            prompts = run() if short else await self._threads.run(run)
            if span.recorded:
                span.set(prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts))
        return prompts


def token_ids(ids: list[Any], field: str, policy: PolicyState) -> list[int]:
    """`ids` as they are.  Raises empty_prompt, context_length_exceeded, invalid_request, token_out_of_range."""
    if not ids:
        raise _empty(field)
    if len(ids) > policy.max_model_len:
        raise too_long(f"{len(ids)} tokens", field, policy)
    if set(map(type, ids)) != {int}:
        raise invalid(f"{field} must be a list of integers", field)
    check_token_ids(ids, field, policy.vocab_size)
    return ids


def _size(message: dict[str, Any]) -> int:
    """Characters of a short message; anything but a short text counts as long."""
    content = message.get("content")
    return len(content) if isinstance(content, str) and len(message) == 2 else INLINE_CHARS + 1


def _characters(tasks: Sequence[TaskRequest]) -> int:
    return sum(len(task.prompt) for task in tasks if task.prompt is not None)


def too_long(tokens: str, field: str, policy: PolicyState) -> RollgridError:
    limit = f"max_model_len={policy.max_model_len}"
    message = f"{field} has {tokens}: more than {limit}"
    return invalid(message, field, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED, limit=limit)


def _empty(field: str) -> RollgridError:
    return invalid(f"{field} holds no token", field, code=ErrorCode.EMPTY_PROMPT)
