"""Requests to submissions: defaults, limits, rendering.  Everything refusable is refused here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rollgrid_contracts import codec, ids
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import Priority, Reply, SamplingParams, WeightConstraint
from rollgrid_rendering.offload import RenderThreads

from .catalog import Catalog
from .openai_schema import (
    COMPLETION_NEUTRAL,
    GENERATE_NEUTRAL,
    CompletionRequest,
    GenerateRequest,
)
from .prompts import Prompt, Prompts, token_ids
from .rollout_schema import RolloutRequest
from .sampling import SamplingFields, checked, merged, with_seed
from .settings import Limits
from .submission import Caller, GroupSpec, Submission
from .terms import MAX_TEXT_CHARS, bounded_text, member, payload, rights_of, scorer_specs, weight_constraint
from .wire import at_most, invalid, over_limit, unsupported

MAX_CACHE_SALT_CHARS = 1024


class Translator:
    """One method per door.  Each raises RollgridError naming field and limit."""

    def __init__(
        self, catalog: Catalog, threads: RenderThreads, limits: Limits, scorers: frozenset[str], *, default_run: str
    ) -> None:
        self._catalog, self._limits = catalog, limits
        self._prompts = Prompts(catalog, threads, limits)
        self._scorers, self._default_run = scorers, default_run

    async def completion(self, request: CompletionRequest, caller: Caller) -> Submission:
        request.refuse(COMPLETION_NEUTRAL)
        policy, pinned = self._catalog.resolve(caller.tenant, request.model)
        prompts = await self._prompts.of_completion(request, policy)
        n = self._n(request.n, "n")
        sampling = self._interactive_sampling(request, "", prompts, policy)
        metadata = payload(request.metadata, "metadata", self._limits)
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
        prompt = Prompt(token_ids(request.token_ids, "token_ids", policy))
        group = GroupSpec(
            prompt_token_ids=TokenIds.of(prompt.token_ids),
            n=self._n(request.n if request.n is not None else fields.n, "n" if request.n is not None else f"{prefix}n"),
            sampling=self._interactive_sampling(fields, prefix, [prompt], policy, prompt_field="token_ids")[0],
            deadline_s=self._deadline(request.deadline_s, "deadline_s", self._limits.interactive_deadline_s),
            metadata=payload(request.metadata, "metadata", self._limits),
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
        at_most(len(request.tasks), "tasks", "max_groups", self._limits.max_groups)
        prompts = await self._prompts.of_tasks(request.tasks, policy)
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
            priority=member(Priority, request.priority, "priority", Priority.NORMAL),
            weights=weight_constraint(request.weights, pinned, policy),
            rights=rights_of(request.rights, caller.tenant),
            engagement_id=bounded_text(request.engagement_id, "engagement_id", MAX_TEXT_CHARS),
            cache_salt=bounded_text(request.cache_salt, "cache_salt", MAX_CACHE_SALT_CHARS),
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
            weights=weight_constraint(request.weights, pinned, policy),
            rights=rights_of(None, caller.tenant),
            cache_salt=bounded_text(request.cache_salt, "cache_salt", MAX_CACHE_SALT_CHARS),
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

    # -- rollouts -----------------------------------------------------------------------------------

    def _task_groups(
        self, request: RolloutRequest, prompts: Sequence[Prompt], policy: PolicyState
    ) -> tuple[GroupSpec, ...]:
        batch_fields = request.sampling or SamplingFields()
        batch_params: SamplingParams | None = None
        batch_scorers = scorer_specs(request.scorers or [], "scorers", self._scorers, self._limits)
        batch_metadata = payload(request.metadata, "metadata", self._limits)
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
            metadata = payload(task.metadata, f"{path}.metadata", self._limits)
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
                    else scorer_specs(task.scorers, f"{path}.scorers", self._scorers, self._limits),
                    task=payload(task.task, f"{path}.task", self._limits),
                    metadata={**batch_metadata, **metadata} if batch_metadata else metadata,
                )
            )
        return tuple(groups)

    def _required_sampling(self, fields: SamplingFields, prefix: str, policy: PolicyState) -> SamplingParams:
        if fields.max_tokens is None:
            raise invalid(f"{prefix}max_tokens is required", f"{prefix}max_tokens")
        return self._sampling(fields, prefix, policy, default_max_tokens=1)

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
