"""Prompts in every form a request may use, rendered to token ids once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_rendering.offload import RenderThreads
from rollgrid_rendering.renderer import Renderer, RenderingError
from rollgrid_runtime.errors import RollgridError

from .catalog import Catalog
from .openai_schema import CompletionRequest
from .rollout_schema import TaskRequest
from .sampling import check_token_ids
from .settings import Limits
from .wire import at_most, check_payload, invalid, unsupported

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
        renderer = self._catalog.renderer(policy)
        prompt = request.prompt
        items: list[Any] = [prompt] if isinstance(prompt, str) else prompt
        kinds = set(map(type, items))
        if kinds == {int}:
            return [Prompt(token_ids(items, "prompt", policy))]
        if not kinds:
            raise _empty("prompt")
        at_most(len(items), "prompt", "max_groups", self._limits.max_groups)
        if kinds == {list}:
            return [self._listed_prompt(ids_, f"prompt[{i}]", policy) for i, ids_ in enumerate(items)]
        if kinds != {str}:
            raise invalid("prompt mixes texts and token ids", "prompt")
        special = request.add_special_tokens is not False
        work = [lambda text=text: Prompt(renderer.encode(text, add_special_tokens=special), text) for text in items]
        fields = ["prompt"] if len(items) == 1 else [f"prompt[{i}]" for i in range(len(items))]
        return await self._rendered(work, fields, short=sum(map(len, items)) <= INLINE_CHARS)

    def _listed_prompt(self, items: list[Any], field: str, policy: PolicyState) -> Prompt:
        return Prompt(token_ids(items, field, policy))

    async def of_tasks(self, tasks: Sequence[TaskRequest], policy: PolicyState) -> list[Prompt]:
        renderer = self._catalog.renderer(policy)
        work: list[Callable[[], Prompt]] = []
        fields: list[str] = []
        for i, task in enumerate(tasks):
            path = f"tasks[{i}]"
            fields.append(path)
            work.append(self._task_work(task, path, policy, renderer))
        short = all(task.messages is None for task in tasks) and _characters(tasks) <= INLINE_CHARS
        return await self._rendered(work, fields, short=short)

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
            return lambda: Prompt(renderer.encode(text, add_special_tokens=special), text)
        messages = self._messages(task.messages or [], f"{path}.messages")
        tools = task.tools or []
        options = task.chat_template_kwargs or {}
        check_payload(tools, f"{path}.tools", self._limits.max_depth)
        check_payload(options, f"{path}.chat_template_kwargs", self._limits.max_depth)

        def render() -> Prompt:
            text, token_ids = renderer.render(messages, tools=tools, options=options)
            return Prompt(token_ids, text, messages)

        return render

    def _messages(self, messages: list[dict[str, Any]], path: str) -> tuple[dict[str, Any], ...]:
        if not messages:
            raise _empty(path)
        at_most(len(messages), path, "max_messages", self._limits.max_messages)
        check_payload(messages, path, self._limits.max_depth)
        for i, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise invalid(f"{path}[{i}].role must be a string", f"{path}[{i}].role")
            content = message.get("content")
            if content is None or isinstance(content, str):
                continue
            if not isinstance(content, list):
                raise invalid(f"{path}[{i}].content must be a string or text parts", f"{path}[{i}].content")
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise unsupported(f"{path}[{i}].content", "only text parts are offered")
        return tuple(messages)

    async def _rendered(
        self, work: Sequence[Callable[[], Prompt]], fields: Sequence[str], *, short: bool = False
    ) -> list[Prompt]:
        """All of `work`: in one hop to the render threads, or here when that would cost more than the work."""

        def run() -> list[Prompt]:
            found: list[Prompt] = []
            for task, field in zip(work, fields, strict=True):
                try:
                    prompt = task()
                except RenderingError as error:
                    raise invalid(f"{field}: {error}", field) from error
                if not prompt.token_ids:
                    raise _empty(field)
                found.append(prompt)
            return found

        return run() if short else await self._threads.run(run)


def token_ids(ids: list[Any], field: str, policy: PolicyState) -> list[int]:
    """`ids` as they are.  Raises empty_prompt, invalid_request, token_out_of_range."""
    if not ids:
        raise _empty(field)
    if set(map(type, ids)) != {int}:
        raise invalid(f"{field} must be a list of integers", field)
    check_token_ids(ids, field, policy.vocab_size)
    return ids


def _characters(tasks: Sequence[TaskRequest]) -> int:
    return sum(len(task.prompt) for task in tasks if task.prompt is not None)


def _empty(field: str) -> RollgridError:
    return invalid(f"{field} holds no token", field, code=ErrorCode.EMPTY_PROMPT)
