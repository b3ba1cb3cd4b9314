"""Requests to submissions: defaults, limits, rendering.  Everything refusable is refused here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import codec, ids
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import Priority, Purpose, Reply, Rights, SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.scoring import ScorerKind, ScorerSpec
from rollgrid_rendering.offload import RenderThreads
from rollgrid_rendering.renderer import Renderer, RenderingError
from rollgrid_runtime.errors import RollgridError

from .catalog import Catalog
from .openai_schema import (
    COMPLETION_NEUTRAL,
    GENERATE_NEUTRAL,
    CompletionRequest,
    GenerateRequest,
    WeightsRequest,
)
from .rollout_schema import RightsRequest, RolloutRequest, ScorerRequest, TaskRequest
from .sampling import SamplingFields, check_token_ids, checked, merged, with_seed
from .settings import Limits
from .submission import Caller, GroupSpec, Submission
from .wire import check_payload, invalid, over_limit, unsupported

MAX_CACHE_SALT_CHARS = 1024
MAX_ENGAGEMENT_CHARS = 255
INLINE_CHARS = 2000
"""Plain text up to this length is encoded in the event loop (about 0.2 ms): a hop to a thread costs as much."""


class Prompt(NamedTuple):
    """A rendered prompt and what it was made from."""

    token_ids: list[int]
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


class Translator:
    """One method per door.  Each raises RollgridError naming field and limit."""

    def __init__(
        self, catalog: Catalog, threads: RenderThreads, limits: Limits, scorers: frozenset[str], *, default_run: str
    ) -> None:
        self._catalog, self._threads, self._limits = catalog, threads, limits
        self._scorers, self._default_run = scorers, default_run

    async def completion(self, request: CompletionRequest, caller: Caller) -> Submission:
        request.refuse(COMPLETION_NEUTRAL)
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        prompts = await self._completion_prompts(request, policy)
        n = self._n(request.n, "n")
        sampling = self._interactive_sampling(request, "", prompts, policy)
        metadata = self._payload(request.metadata, "metadata")
        deadline_s = self._deadline(request.deadline_s, "deadline_s", self._limits.interactive_deadline_s)
        groups = tuple(
            GroupSpec(
                prompt_token_ids=TokenIds.of(prompt.token_ids),
                prompt_text=prompt.text,
                n=n,
                sampling=params,
                deadline_s=deadline_s,
                metadata=metadata,
            )
            for prompt, params in zip(prompts, sampling, strict=True)
        )
        return self._interactive(request, caller, policy, pinned, groups)

    async def generate(self, request: GenerateRequest, caller: Caller) -> Submission:
        request.refuse(GENERATE_NEUTRAL)
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        self._catalog.renderer(policy)  # not ready is said before a job waits for it
        fields, prefix = request.sampling_params, "sampling_params."
        if fields.max_tokens is None:
            raise invalid("sampling_params.max_tokens is required", "sampling_params.max_tokens")
        if request.n is not None and fields.n is not None and request.n != fields.n:
            raise invalid("n and sampling_params.n differ", "n")
        prompt = Prompt(self._token_ids(request.token_ids, "token_ids", policy))
        group = GroupSpec(
            prompt_token_ids=TokenIds.of(prompt.token_ids),
            n=self._n(request.n if request.n is not None else fields.n, "n" if request.n is not None else f"{prefix}n"),
            sampling=self._interactive_sampling(fields, prefix, [prompt], policy, prompt_field="token_ids")[0],
            deadline_s=self._deadline(request.deadline_s, "deadline_s", self._limits.interactive_deadline_s),
            metadata=self._payload(request.metadata, "metadata"),
        )
        return self._interactive(request, caller, policy, pinned, (group,))

    async def rollout(self, request: RolloutRequest, caller: Caller) -> Submission:
        if not ids.is_label(request.run):
            raise invalid("run is not a usable name", "run", limit=ids.LABEL_PATTERN)
        if request.model is not None and request.policy is not None and request.model != request.policy:
            raise invalid("model and policy differ", "policy")
        model, field = (request.model, "model") if request.model is not None else (request.policy, "policy")
        policy, pinned = self._catalog.resolve(caller.tenant, model, field)
        if request.reward_formula is not None:
            raise unsupported("reward_formula", "the reward is the weighted sum of the scorers (weight, gate)")
        if not request.tasks:
            raise invalid("tasks is empty", "tasks")
        self._at_most(len(request.tasks), "tasks", "max_groups", self._limits.max_groups)
        prompts = await self._task_prompts(request.tasks, policy)
        groups = self._task_groups(request, prompts, policy)
        return Submission(
            tenant=caller.tenant,
            run=request.run,
            policy=policy,
            model=model or policy.policy,
            groups=self._checked_groups(groups, "tasks"),
            digest=caller.digest,
            key=caller.key,
            idempotent=caller.idempotent,
            priority=_member(Priority, request.priority, "priority", Priority.NORMAL),
            weights=self._weights(request.weights, pinned, policy),
            rights=_rights(request.rights, caller.tenant),
            engagement_id=_text(request.engagement_id, "engagement_id", MAX_ENGAGEMENT_CHARS),
            cache_salt=_text(request.cache_salt, "cache_salt", MAX_CACHE_SALT_CHARS),
            traceparent=caller.traceparent,
        )

    # -- shared by the interactive doors ----------------------------------------------------------

    def _interactive(
        self,
        request: CompletionRequest | GenerateRequest,
        caller: Caller,
        policy: PolicyState,
        pinned: WeightConstraint | None,
        groups: tuple[GroupSpec, ...],
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
            weights=self._weights(request.weights, pinned, policy),
            rights=_rights(None, caller.tenant),
            cache_salt=_text(request.cache_salt, "cache_salt", MAX_CACHE_SALT_CHARS),
            reply=Reply.RESULT,
            traceparent=caller.traceparent,
        )

    def _interactive_sampling(
        self,
        fields: SamplingFields,
        prefix: str,
        prompts: Sequence[Prompt],
        policy: PolicyState,
        prompt_field: str = "prompt",
    ) -> list[SamplingParams]:
        """One per prompt: where max_tokens is missing, it is what the context and the limit leave."""
        base = self._sampling(fields, prefix, policy, default_max_tokens=1)
        found: list[SamplingParams] = []
        for position, prompt in enumerate(prompts):
            params = base
            if fields.max_tokens is None:
                room = policy.max_model_len - len(prompt.token_ids)
                if self._limits.max_output_tokens is not None:
                    room = min(room, self._limits.max_output_tokens)
                params = msgspec.structs.replace(base, max_tokens=max(room, 1, base.min_tokens))
            field = prompt_field if len(prompts) == 1 else f"{prompt_field}[{position}]"
            _check_context(len(prompt.token_ids), params.max_tokens, field, policy)
            found.append(with_seed(params, _group_seed(params.seed, position)))
        return found

    def _sampling(
        self, fields: SamplingFields, prefix: str, policy: PolicyState, default_max_tokens: int
    ) -> SamplingParams:
        if fields.max_tokens is None:
            # a lone min_tokens must not be held against the stand-in
            default_max_tokens = max(default_max_tokens, min(fields.min_tokens or 0, policy.max_model_len - 1))
        return checked(
            fields,
            prefix,
            self._limits,
            vocab_size=policy.vocab_size,
            max_model_len=policy.max_model_len,
            max_tokens=default_max_tokens,
        )

    # -- prompts ------------------------------------------------------------------------------------

    async def _completion_prompts(self, request: CompletionRequest, policy: PolicyState) -> list[Prompt]:
        renderer = self._catalog.renderer(policy)
        prompt = request.prompt
        items: list[Any] = [prompt] if isinstance(prompt, str) else prompt
        kinds = set(map(type, items))
        if kinds == {int}:
            return [Prompt(self._token_ids(items, "prompt", policy))]
        if not kinds:
            raise _empty("prompt")
        self._at_most(len(items), "prompt", "max_groups", self._limits.max_groups)
        if kinds == {list}:
            return [self._listed_prompt(ids_, f"prompt[{i}]", policy) for i, ids_ in enumerate(items)]
        if kinds != {str}:
            raise invalid("prompt mixes texts and token ids", "prompt")
        special = request.add_special_tokens is not False
        work = [lambda text=text: Prompt(renderer.encode(text, add_special_tokens=special), text) for text in items]
        fields = ["prompt"] if len(items) == 1 else [f"prompt[{i}]" for i in range(len(items))]
        return await self._rendered(work, fields, short=sum(map(len, items)) <= INLINE_CHARS)

    def _listed_prompt(self, items: list[Any], field: str, policy: PolicyState) -> Prompt:
        return Prompt(self._token_ids(items, field, policy))

    async def _task_prompts(self, tasks: Sequence[TaskRequest], policy: PolicyState) -> list[Prompt]:
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
            found = Prompt(self._token_ids(task.prompt_token_ids, f"{path}.prompt_token_ids", policy))
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
        self._at_most(len(messages), path, "max_messages", self._limits.max_messages)
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

    def _token_ids(self, token_ids: list[Any], field: str, policy: PolicyState) -> list[int]:
        if not token_ids:
            raise _empty(field)
        if set(map(type, token_ids)) != {int}:
            raise invalid(f"{field} must be a list of integers", field)
        check_token_ids(token_ids, field, policy.vocab_size)
        return token_ids

    # -- rollouts -----------------------------------------------------------------------------------

    def _task_groups(
        self, request: RolloutRequest, prompts: Sequence[Prompt], policy: PolicyState
    ) -> tuple[GroupSpec, ...]:
        batch_fields = request.sampling or SamplingFields()
        batch_params: SamplingParams | None = None
        batch_scorers = self._scorer_specs(request.scorers or [], "scorers")
        batch_metadata = self._payload(request.metadata, "metadata")
        groups: list[GroupSpec] = []
        for i, (task, prompt) in enumerate(zip(request.tasks, prompts, strict=True)):
            path = f"tasks[{i}]"
            if task.sampling is None:
                if batch_params is None:
                    batch_params = self._required_sampling(batch_fields, "sampling.", policy)
                params = with_seed(batch_params, _group_seed(batch_params.seed, i))
            else:
                params = self._required_sampling(merged(batch_fields, task.sampling), f"{path}.sampling.", policy)
                if task.sampling.seed is None:
                    params = with_seed(params, _group_seed(params.seed, i))
            _check_context(len(prompt.token_ids), params.max_tokens, path, policy)
            own_n = f"{path}.n" if task.n is not None else "n"
            metadata = self._payload(task.metadata, f"{path}.metadata")
            default_s = request.deadline_s if request.deadline_s is not None else self._limits.batch_deadline_s
            groups.append(
                GroupSpec(
                    prompt_token_ids=TokenIds.of(prompt.token_ids),
                    prompt_text=prompt.text,
                    messages=prompt.messages,
                    n=self._n(task.n if task.n is not None else request.n, own_n),
                    sampling=params,
                    deadline_s=self._deadline(
                        task.deadline_s,
                        f"{path}.deadline_s" if task.deadline_s is not None else "deadline_s",
                        default_s,
                    ),
                    scorers=batch_scorers
                    if task.scorers is None
                    else self._scorer_specs(task.scorers, f"{path}.scorers"),
                    task=self._payload(task.task, f"{path}.task"),
                    metadata={**batch_metadata, **metadata} if batch_metadata else metadata,
                )
            )
        return tuple(groups)

    def _required_sampling(self, fields: SamplingFields, prefix: str, policy: PolicyState) -> SamplingParams:
        if fields.max_tokens is None:
            raise invalid(f"{prefix}max_tokens is required", f"{prefix}max_tokens")
        return self._sampling(fields, prefix, policy, default_max_tokens=1)

    def _scorer_specs(self, scorers: Sequence[str | ScorerRequest], path: str) -> tuple[ScorerSpec, ...]:
        self._at_most(len(scorers), path, "max_scorers", self._limits.max_scorers)
        specs: list[ScorerSpec] = []
        for i, scorer in enumerate(scorers):
            request = ScorerRequest(type=scorer) if isinstance(scorer, str) else scorer
            specs.append(self._scorer(request, f"{path}[{i}]"))
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise invalid(f"{path}: two scorers have one name", path)
        return tuple(specs)

    def _scorer(self, request: ScorerRequest, path: str) -> ScorerSpec:
        if request.type not in self._scorers:
            known = ", ".join(sorted(self._scorers))
            raise invalid(
                f"{path}.type {request.type[:80]!r} is not a known scorer ({known})", f"{path}.type", limit=known
            )
        if _member(ScorerKind, request.kind, f"{path}.kind", ScorerKind.VERIFIER) is not ScorerKind.VERIFIER:
            raise unsupported(f"{path}.kind", "only verifiers are offered")
        name = request.name if request.name is not None else request.type
        if not ids.is_label(name):
            raise invalid(f"{path}.name is not a usable name", f"{path}.name", limit=ids.LABEL_PATTERN)
        weight = 1.0 if request.weight is None else request.weight
        if not math.isfinite(weight):
            raise invalid(f"{path}.weight is not finite", f"{path}.weight")
        timeout_s = 10.0 if request.timeout_s is None else request.timeout_s
        if not 0 < timeout_s <= self._limits.max_scorer_timeout_s:
            limit = f"max_scorer_timeout_s={self._limits.max_scorer_timeout_s:g}"
            raise over_limit(f"{path}.timeout_s", timeout_s, limit)
        return ScorerSpec(
            name=name,
            type=request.type,
            params=self._payload(request.params, f"{path}.params"),
            weight=weight,
            gate=bool(request.gate),
            timeout_s=timeout_s,
        )

    # -- single values ------------------------------------------------------------------------------

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

    def _payload(self, value: dict[str, Any] | None, field: str) -> dict[str, Any]:
        if not value:
            return {}
        check_payload(value, field, self._limits.max_depth)
        return value

    def _at_most(self, count: int, field: str, name: str, limit: int) -> None:
        if count > limit:
            raise over_limit(field, count, f"{name}={limit}")

    def _checked_groups(self, groups: tuple[GroupSpec, ...], field: str) -> tuple[GroupSpec, ...]:
        samples = sum(group.n for group in groups)
        self._at_most(samples, "n", "max_samples", self._limits.max_samples)
        for i, group in enumerate(groups):
            try:  # whatever JSON let through must also fit the wire between services
                codec.encode((group.messages, group.task, group.metadata, group.scorers, group.prompt_text))
            except (OverflowError, UnicodeEncodeError, ValueError, TypeError, RecursionError) as error:
                raise invalid(f"{field}[{i}] cannot be stored: {error}", f"{field}[{i}]") from error
        return groups

    def _weights(
        self, request: WeightsRequest | None, pinned: WeightConstraint | None, policy: PolicyState
    ) -> WeightConstraint:
        """Raises version_unavailable at once for what can never be met."""
        asked = _constraint(request)
        if asked is not None and pinned is not None and asked != pinned:
            raise invalid("weights and the version in the model name differ", "weights")
        found = pinned or asked or WeightConstraint()
        if found.value < 0 or found.value >= 2**31:
            raise over_limit("weights", found.value, "0<=weights<2**31")
        if found.rule in (VersionRule.EXACT, VersionRule.MIN) and found.value > policy.newest:
            raise RollgridError(
                ErrorCode.VERSION_UNAVAILABLE,
                f"weights: {policy.policy} has no version {found.value}, the newest published is {policy.newest}",
                field="weights" if pinned is None else "model",
                limit=f"newest={policy.newest}",
            )
        return found


def _constraint(request: WeightsRequest | None) -> WeightConstraint | None:
    if request is None:
        return None
    short = {
        VersionRule.EXACT: request.exact_version,
        VersionRule.MIN: request.min_version,
        VersionRule.MAX_STALENESS: request.max_staleness,
    }
    given = [(rule, value) for rule, value in short.items() if value is not None]
    if request.rule is not None or request.value is not None:
        rule = _member(VersionRule, request.rule, "weights.rule", VersionRule.LATEST)
        if rule is not VersionRule.LATEST and request.value is None:
            raise invalid(f"weights.value is required with {rule.value}", "weights.value")
        given.append((rule, request.value or 0))
    if len(given) > 1:
        raise invalid("weights holds more than one rule", "weights")
    return WeightConstraint(rule=given[0][0], value=given[0][1]) if given else None


def _rights(request: RightsRequest | None, tenant: str) -> Rights:
    """A tenant's own rollouts stand under its own grant and may be used for everything."""
    if request is None:
        return Rights(purposes=tuple(Purpose), grant_id=f"own:{tenant}")
    purposes = tuple(_member(Purpose, text, "rights.purposes", Purpose.EXECUTE) for text in request.purposes)
    if Purpose.EXECUTE not in purposes:
        raise invalid("rights.purposes lacks execute: nothing could be sampled", "rights.purposes")
    return Rights(
        purposes=tuple(dict.fromkeys(purposes)),
        grant_id=_text(request.grant_id, "rights.grant_id", MAX_ENGAGEMENT_CHARS) or f"own:{tenant}",
    )


def _member(kind: Any, text: str | None, field: str, default: Any) -> Any:
    """The enumeration's member of this value; refused with the list of all others."""
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError as error:
        known = ", ".join(kind)
        raise invalid(f"{field} {text[:80]!r} is none of {known}", field, limit=known) from error


def _text(value: str | None, field: str, limit: int) -> str | None:
    if value is not None and not 1 <= len(value) <= limit:
        raise over_limit(field, f"{len(value)} characters", f"1-{limit} characters")
    return value


def _group_seed(seed: int | None, position: int) -> int | None:
    """The seed of a group when one seed was given for several: the first keeps it, the others derive theirs."""
    return seed if seed is None or position == 0 else ids.sample_seed(seed, position, offset=-1)


def _check_context(prompt_tokens: int, max_tokens: int, field: str, policy: PolicyState) -> None:
    if prompt_tokens + max_tokens > policy.max_model_len:
        limit = f"max_model_len={policy.max_model_len}"
        raise invalid(
            f"{field} has {prompt_tokens} tokens and max_tokens is {max_tokens}: together more than {limit}",
            field,
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            limit=limit,
        )


def _characters(tasks: Sequence[TaskRequest]) -> int:
    return sum(len(task.prompt) for task in tasks if task.prompt is not None)


def _empty(field: str) -> RollgridError:
    return invalid(f"{field} holds no token", field, code=ErrorCode.EMPTY_PROMPT)
