"""Requests for batches to submissions: defaults, limits, rendering.  Everything refusable is refused here."""

from __future__ import annotations

from collections.abc import Sequence

from rollgrid_contracts import ids
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.jobs import ParsingSpec, Priority, SamplingParams

from .prompts import Prompt
from .rollout_schema import RolloutRequest, TaskRequest
from .sampling import SamplingFields, merged, with_seed
from .scorers import check_formula
from .submission import Caller, GroupSpec, Submission
from .terms import (
    MAX_TEXT_CHARS,
    RecordFormat,
    bounded_text,
    member,
    on_refresh,
    pace_of,
    payload,
    rights_of,
    weight_constraint,
    weights_field,
)
from .tools import AUTO, ToolPlan, parsing_spec
from .translate_openai import MAX_CACHE_SALT_CHARS, OpenAITranslator, check_context, group_seed
from .wire import at_most, invalid


class Translator(OpenAITranslator):
    """One method per door.  Each raises RollgridError naming field and limit."""

    async def rollout(self, request: RolloutRequest, caller: Caller) -> Submission:
        if not ids.is_label(request.run):
            raise invalid("run is not a usable name", "run", limit=ids.LABEL_PATTERN)
        if request.model is not None and request.policy is not None and request.model != request.policy:
            raise invalid("model and policy differ", "policy")
        model, field = (request.model, "model") if request.model is not None else (request.policy, "policy")
        policy, pinned = self._catalog.resolve(caller.tenant, model, field)
        if not request.tasks:
            raise invalid("tasks is empty", "tasks")
        at_most(len(request.tasks), "tasks", "max_groups", self._limits.max_groups)
        prompts = await self.prompts.of_tasks(request.tasks, policy)
        groups = self._task_groups(request, prompts, policy, caller.tenant)
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
            weights=weight_constraint(request.weights, pinned),
            weights_field=weights_field(pinned),
            pinned=bool(request.pin),
            on_refresh=on_refresh(request.on_refresh),
            pace=pace_of(request.pace, caller),
            rights=rights_of(request.rights, caller.tenant),
            engagement_id=bounded_text(request.engagement_id, "engagement_id", MAX_TEXT_CHARS),
            cache_salt=bounded_text(request.cache_salt, "cache_salt", MAX_CACHE_SALT_CHARS),
            traceparent=caller.traceparent,
            record_format=member(
                RecordFormat, request.record_format, "record_format", RecordFormat(caller.record_format)
            ).value,
        )

    def _task_groups(
        self, request: RolloutRequest, prompts: Sequence[Prompt], policy: PolicyState, tenant: str
    ) -> tuple[GroupSpec, ...]:
        batch_fields = request.sampling or SamplingFields()
        batch_params: SamplingParams | None = None
        batch_scorers = self._scorers.specs(request.scorers or [], "scorers", tenant)
        batch_metadata = payload(request.metadata, "metadata", self._limits)
        groups: list[GroupSpec] = []
        for i, (task, prompt) in enumerate(zip(request.tasks, prompts, strict=True)):
            path = f"tasks[{i}]"
            if task.sampling is None:
                if batch_params is None:
                    batch_params = self._required_sampling(batch_fields, "sampling.", policy)
                params = with_seed(batch_params, group_seed(batch_params.seed, i))
            else:
                params = self._required_sampling(merged(batch_fields, task.sampling), f"{path}.sampling.", policy)
                if task.sampling.seed is None:
                    params = with_seed(params, group_seed(params.seed, i))
            check_context(len(prompt.token_ids), params.max_tokens, path, policy)
            own_n = f"{path}.n" if task.n is not None else "n"
            metadata = payload(task.metadata, f"{path}.metadata", self._limits)
            default_s = request.deadline_s if request.deadline_s is not None else self._limits.batch_deadline_s
            scorers = batch_scorers
            if task.scorers is not None:
                scorers = self._scorers.specs(task.scorers, f"{path}.scorers", tenant)
            check_formula(request.reward_formula, scorers, path)
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
                    scorers=scorers,
                    task=payload(task.task, f"{path}.task", self._limits),
                    metadata={**batch_metadata, **metadata} if batch_metadata else metadata,
                    parsing=_parsing_of(task, policy),
                )
            )
        return tuple(groups)

    def _required_sampling(self, fields: SamplingFields, prefix: str, policy: PolicyState) -> SamplingParams:
        if fields.max_tokens is None:
            raise invalid(f"{prefix}max_tokens is required", f"{prefix}max_tokens")
        return self._sampling(fields, prefix, policy, given=fields.max_tokens)


def _parsing_of(task: TaskRequest, policy: PolicyState) -> ParsingSpec | None:
    """A conversation's answer is parsed as far as the policy has parsers; tokens and plain texts are not."""
    if task.messages is None:
        return None
    plan = ToolPlan(tuple(task.tools), AUTO) if task.tools and policy.tool_parser is not None else ToolPlan()
    return parsing_spec(policy, plan, task.chat_template_kwargs or {})
