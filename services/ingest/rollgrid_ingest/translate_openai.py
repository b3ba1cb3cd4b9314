"""Requests of the calls that wait to submissions: defaults, limits, rendering."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec
from rollgrid_contracts import codec, ids
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import ParsingSpec, Priority, Reply, SamplingParams, WeightConstraint
from rollgrid_rendering.offload import RenderThreads

from .catalog import Catalog
from .chat_schema import CHAT_NEUTRAL, ChatRequest
from .openai_schema import (
    COMPLETION_NEUTRAL,
    GENERATE_NEUTRAL,
    CompletionRequest,
    GenerateRequest,
    ScoreRequest,
    StreamOptions,
    WeightsRequest,
)
from .prompts import Prompt, Prompts, token_ids
from .sampling import Overrides, SamplingFields, checked, with_seed
from .scorers import Scorers
from .settings import Limits
from .submission import Caller, GroupSpec, Submission
from .terms import bounded_text, on_refresh, payload, rights_of, weight_constraint, weights_field
from .tools import ToolPlan, parsing_spec, plan_tools
from .wire import at_most, invalid, over_limit, unsupported

MAX_CACHE_SALT_CHARS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Interactive(Protocol):
    """What the requests of all calls that wait have in common."""

    model: str | None
    cache_salt: str | None
    weights: WeightsRequest | None
    pin: bool | None
    on_refresh: str | None
    metadata: dict[str, Any] | None
    deadline_s: float | None


Prompting = Callable[[PolicyState, ToolPlan, dict[str, Any]], Awaitable[Prompt]]
"""How a session's turn comes by its prompt, given the policy, the tools and the template's variables."""


class OpenAITranslator:
    """One method per door.  Each raises RollgridError naming field and limit.

    `prompted` gives the prompt of a session's turn in the stead of what the request alone would make.
    """

    def __init__(
        self, catalog: Catalog, threads: RenderThreads, limits: Limits, scorers: Scorers, *, default_run: str
    ) -> None:
        self._catalog, self._limits = catalog, limits
        self.prompts = Prompts(catalog, threads, limits)
        self._scorers, self._default_run = scorers, default_run

    async def completion(
        self, request: CompletionRequest, caller: Caller, prompted: Prompting | None = None
    ) -> Submission:
        request.refuse(COMPLETION_NEUTRAL)
        _check_stream(request.stream, request.stream_options, request.prompt_logprobs)
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        if prompted is not None:
            prompts = [await prompted(policy, ToolPlan(), {})]
        else:
            prompts = await self.prompts.of_completion(request, policy)
        own = Overrides(request.max_tokens, "max_tokens", request.logprobs, "logprobs", _echoed_logprobs(request))
        sampling = self._interactive_sampling(request, "", prompts, policy, own)
        # an echo with logprobs begins with what only the record has
        reply = Reply.STREAM if request.stream and not (request.echo and request.logprobs is not None) else Reply.RESULT
        groups = self._groups(request, prompts, sampling, n=self._n(request.n, "n"))
        return self._interactive(request, caller, policy, pinned, groups, reply)

    async def chat(self, request: ChatRequest, caller: Caller, prompted: Prompting | None = None) -> Submission:
        request.refuse(CHAT_NEUTRAL)
        _check_stream(request.stream, request.stream_options, request.prompt_logprobs)
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        plan = plan_tools(request.tools, request.tool_choice, request.parallel_tool_calls, policy, self._limits)
        variables = self._template_variables(request)
        if prompted is not None:
            prompt = await prompted(policy, plan, variables)
        else:
            prompt = await self.prompts.of_chat(request, plan.tools, variables, policy)
        (params,) = self._interactive_sampling(
            request, "", [prompt], policy, _chat_overrides(request), prompt_field="messages"
        )
        if plan.schema is not None:
            if params.structured_output is not None:
                raise invalid("response_format and a forced tool call exclude each other", "response_format")
            params = msgspec.structs.replace(params, structured_output={"json": plan.schema})
        parsing = parsing_spec(policy, plan, variables)
        n = self._n(request.n, "n")
        groups = self._groups(request, [prompt], [params], n=n, parsing=parsing)
        return self._interactive(
            request, caller, policy, pinned, groups, Reply.STREAM if request.stream else Reply.RESULT
        )

    def _template_variables(self, request: ChatRequest) -> dict[str, Any]:
        """The template's variables; an effort also switches thinking on or off where the template knows how."""
        found = payload(request.chat_template_kwargs, "chat_template_kwargs", self._limits)
        effort = request.reasoning_effort
        if effort is None:
            return found
        if effort not in EFFORTS:
            raise invalid(f"reasoning_effort {effort[:80]!r} is unknown", "reasoning_effort", limit=", ".join(EFFORTS))
        return {"reasoning_effort": effort, "enable_thinking": effort != "none", **found}

    async def generate(self, request: GenerateRequest, caller: Caller, prompted: Prompting | None = None) -> Submission:
        request.refuse(GENERATE_NEUTRAL)
        fields, prefix = request.sampling_params, "sampling_params."
        _check_stream(request.stream, request.stream_options, fields.prompt_logprobs, prefix)
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        self._catalog.renderer(policy)  # not ready is said before a job waits for it
        if fields.max_tokens is None:
            raise invalid("sampling_params.max_tokens is required", "sampling_params.max_tokens")
        if request.n is not None and fields.n is not None and request.n != fields.n:
            raise invalid("n and sampling_params.n differ", "n")
        if prompted is not None:
            prompt = await prompted(policy, ToolPlan(), {})
        else:
            prompt = Prompt(token_ids(request.token_ids, "token_ids", policy))
        n = self._n(request.n if request.n is not None else fields.n, "n" if request.n is not None else f"{prefix}n")
        sampling = self._interactive_sampling(fields, prefix, [prompt], policy, None, prompt_field="token_ids")
        groups = self._groups(request, [prompt], sampling, n=n)
        return self._interactive(
            request, caller, policy, pinned, groups, Reply.STREAM if request.stream else Reply.RESULT
        )

    async def score(self, request: ScoreRequest, caller: Caller) -> Submission:
        """Jobs that sample nothing: only the logprobs of their prompts are wanted."""
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        prompts = await self.prompts.of_score(request, policy)
        top = 0 if request.top_logprobs is None else request.top_logprobs
        if not 0 <= top <= self._limits.max_logprobs:
            raise over_limit("top_logprobs", top, f"max_logprobs={self._limits.max_logprobs}")
        field = "token_ids" if request.token_ids is not None else "prompt"
        for position, prompt in enumerate(prompts):
            check_context(len(prompt.token_ids), 1, field if len(prompts) == 1 else f"{field}[{position}]", policy)
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)
        groups = self._groups(request, prompts, [params] * len(prompts), n=1)
        return self._interactive(request, caller, policy, pinned, groups, Reply.RESULT)

    # -- shared -----------------------------------------------------------------------------------

    def _groups(
        self,
        request: Interactive,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        *,
        n: int,
        parsing: ParsingSpec | None = None,
    ) -> tuple[GroupSpec, ...]:
        metadata = payload(request.metadata, "metadata", self._limits)
        deadline_s = self._deadline(request.deadline_s, "deadline_s", self._limits.interactive_deadline_s)
        return tuple(
            GroupSpec(
                prompt_token_ids=TokenIds.of(prompt.token_ids),
                prompt_text=prompt.text,
                messages=prompt.messages,
                n=n,
                sampling=params,
                deadline_s=deadline_s,
                metadata=metadata,
                parsing=parsing,
            )
            for prompt, params in zip(prompts, sampling, strict=True)
        )

    def _interactive(
        self,
        request: Interactive,
        caller: Caller,
        policy: PolicyState,
        pinned: WeightConstraint | None,
        groups: tuple[GroupSpec, ...],
        reply: Reply,
    ) -> Submission:
        run = caller.run or self._default_run
        if not ids.is_label(run):
            raise invalid("X-Rollgrid-Run is not a usable name", "X-Rollgrid-Run", limit=ids.LABEL_PATTERN)
        return Submission(
            tenant=caller.tenant,
            run=run,
            policy=policy,
            model=request.model or policy.policy,
            groups=self._checked_groups(groups, "prompt"),
            digest=caller.digest,
            key=caller.key,
            idempotent=caller.idempotent,
            priority=Priority.INTERACTIVE,
            weights=weight_constraint(request.weights, pinned),
            weights_field=weights_field(pinned),
            pinned=bool(request.pin),
            on_refresh=on_refresh(request.on_refresh),
            rights=rights_of(None, caller.tenant),
            cache_salt=bounded_text(request.cache_salt, "cache_salt", MAX_CACHE_SALT_CHARS),
            reply=reply,
            traceparent=caller.traceparent,
            affinity=caller.affinity,
        )

    def _interactive_sampling(
        self,
        fields: SamplingFields,
        prefix: str,
        prompts: Sequence[Prompt],
        policy: PolicyState,
        own: Overrides | None,
        prompt_field: str = "prompt",
    ) -> list[SamplingParams]:
        """One per prompt: where max_tokens is missing, it is what the context and the limit leave."""
        given = own.max_tokens if own is not None else fields.max_tokens
        base = self._sampling(fields, prefix, policy, own, given)
        found: list[SamplingParams] = []
        for position, prompt in enumerate(prompts):
            params = base
            if given is None:
                room = policy.max_model_len - len(prompt.token_ids)
                if self._limits.max_output_tokens is not None:
                    room = min(room, self._limits.max_output_tokens)
                params = msgspec.structs.replace(base, max_tokens=max(room, 1, base.min_tokens))
            field = prompt_field if len(prompts) == 1 else f"{prompt_field}[{position}]"
            check_context(len(prompt.token_ids), params.max_tokens, field, policy)
            found.append(with_seed(params, group_seed(params.seed, position)))
        return found

    def _sampling(
        self,
        fields: SamplingFields,
        prefix: str,
        policy: PolicyState,
        own: Overrides | None = None,
        given: int | None = None,
    ) -> SamplingParams:
        # where max_tokens is not given, a lone min_tokens must not be held against the stand-in
        stand_in = 1 if given is not None else max(1, min(fields.min_tokens or 0, policy.max_model_len - 1))
        return checked(
            fields,
            prefix,
            self._limits,
            vocab_size=policy.vocab_size,
            max_model_len=policy.max_model_len,
            max_tokens=stand_in,
            own=own,
        )

    # -- single values ----------------------------------------------------------------------------

    def _n(self, n: int | None, field: str) -> int:
        found = 1 if n is None else n
        if not 1 <= found <= self._limits.max_n:
            raise over_limit(field, found, f"max_n={self._limits.max_n}" if found > 1 else "n>=1")
        return found

    def _deadline(self, seconds: float | None, field: str, default_s: float) -> float:
        found = default_s if seconds is None else seconds
        if not 0 < found <= self._limits.max_deadline_s:
            raise over_limit(field, found, f"0<deadline_s<=max_deadline_s={self._limits.max_deadline_s:g}")
        return found

    def _checked_groups(self, groups: tuple[GroupSpec, ...], field: str) -> tuple[GroupSpec, ...]:
        samples = sum(group.n for group in groups)
        at_most(samples, "n", "max_samples", self._limits.max_samples)
        for i, group in enumerate(groups):
            if not (group.messages or group.task or group.metadata or group.scorers):
                continue
            try:  # whatever JSON let through must also fit the wire between services
                codec.encode((group.messages, group.task, group.metadata, group.scorers))
            except (OverflowError, UnicodeEncodeError, ValueError, TypeError, RecursionError) as error:
                raise invalid(f"{field}[{i}] cannot be stored: {error}", f"{field}[{i}]") from error
        return groups


def group_seed(seed: int | None, position: int) -> int | None:
    """The seed of a group when one seed was given for several: the first keeps it, the others derive theirs."""
    return seed if seed is None or position == 0 else ids.sample_seed(seed, position, offset=-1)


def check_context(prompt_tokens: int, max_tokens: int, field: str, policy: PolicyState) -> None:
    """Raises context_length_exceeded."""
    # an engine has to compute the place behind the prompt even when nothing is sampled there
    if prompt_tokens + max(1, max_tokens) > policy.max_model_len:
        limit = f"max_model_len={policy.max_model_len}"
        raise invalid(
            f"{field} has {prompt_tokens} tokens and max_tokens is {max_tokens}: together more than {limit}",
            field,
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            limit=limit,
        )


def _echoed_logprobs(request: CompletionRequest) -> int | None:
    """How many alternatives of each prompt token are needed: an echo shows those of the prompt, too."""
    if request.prompt_logprobs is not None or not request.echo:
        return None
    if request.logprobs is not None:
        return request.logprobs
    return 0 if request.max_tokens == 0 else None


def _chat_overrides(request: ChatRequest) -> Overrides:
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs without logprobs", "top_logprobs")
    named = request.max_completion_tokens is not None
    return Overrides(
        request.max_completion_tokens if named else request.max_tokens,
        "max_completion_tokens" if named else "max_tokens",
        request.top_logprobs if request.logprobs else None,
        "top_logprobs",
    )


def _check_stream(
    stream: bool | None, options: StreamOptions | None, prompt_logprobs: int | None, prefix: str = ""
) -> None:
    if options is not None and not stream:
        raise invalid("stream_options without stream", "stream_options")
    if stream and prompt_logprobs is not None:
        raise unsupported(f"{prefix}prompt_logprobs", "not with stream: they come with a whole answer")
