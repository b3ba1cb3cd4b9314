"""Requests for sessions as the terms, the group and the first event that they become.  Everything refusable is refused here."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from rollgrid_contracts import ids
from rollgrid_contracts.episodes import ReasoningHistory, SessionOpened, SessionTerms, VersionHold
from rollgrid_contracts.jobs import OpenEpisode

from .catalog import Catalog
from .scorers import Scorers
from .sessions_schema import SessionRequest
from .settings import Limits
from .submission import Caller
from .terms import MAX_TEXT_CHARS, RecordFormat, bounded_text, member, payload, rights_of, weight_constraint
from .turns import batch_of
from .wire import invalid, over_limit

GROUP_KEY = "\x00session:"
"""Begins the keys of groups of sessions: no Idempotency-Key holds such a character, so none names the same group."""
CONCURRENT = ("refuse", "fork")


class Opening(NamedTuple):
    opened: SessionOpened
    episode: OpenEpisode


class Openings:
    """`of` raises RollgridError naming field and limit."""

    def __init__(self, catalog: Catalog, scorers: Scorers, limits: Limits, *, default_run: str) -> None:
        self._catalog, self._scorers, self._limits, self._default_run = catalog, scorers, limits, default_run

    def of(self, request: SessionRequest, caller: Caller) -> Opening:
        run = request.run or caller.run or self._default_run
        if not ids.is_label(run):
            raise invalid("run is not a usable name", "run", limit=ids.LABEL_PATTERN)
        n, index = self._place(request)
        label = bounded_text(request.group, "group", MAX_TEXT_CHARS)
        # the same key (or label) names the same group, and so the same session
        key = GROUP_KEY + (f"group:{label}" if label is not None else f"key:{caller.key}")
        group_id = ids.group_id(caller.tenant, run, key, 0)
        now = time.time()
        deadline = now + self._seconds(request.deadline_s, "deadline_s", self._limits.batch_deadline_s)
        terms = self._terms(request, caller.tenant, deadline)
        opened = SessionOpened(
            tenant=caller.tenant,
            run=run,
            group_id=group_id,
            index=index,
            n=n,
            session=ids.session_id(group_id, index),
            terms=terms,
            opened_at=now,
            traceparent=caller.traceparent,
        )
        episode = OpenEpisode(
            tenant=caller.tenant,
            run=run,
            batch_id=batch_of(caller.tenant, run, group_id),
            group_id=group_id,
            n=n,
            policy=terms.policy,
            sessions=tuple(ids.session_id(group_id, i) for i in range(n)),
            scorers=terms.scorers,
            task=terms.task,
            metadata=terms.metadata,
            rights=rights_of(request.rights, caller.tenant),
            engagement_id=bounded_text(request.engagement_id, "engagement_id", MAX_TEXT_CHARS),
            reasoning_history=terms.reasoning_history.value,
            created_at=now,
            deadline=deadline,
            traceparent=caller.traceparent,
            label=label,
            record_format=member(RecordFormat, request.record_format, "record_format", RecordFormat.MSGPACK).value,
        )
        return Opening(opened, episode)

    def _place(self, request: SessionRequest) -> tuple[int, int]:
        n, index = request.n, request.index
        if not 1 <= n <= self._limits.max_n:
            raise over_limit("n", n, f"max_n={self._limits.max_n}" if n > 1 else "n>=1")
        if not 0 <= index < n:
            raise over_limit("index", index, f"0<=index<n={n}")
        if n > 1 and request.group is None:
            raise invalid("group is required with n over 1: it is what the sessions of one group share", "group")
        return n, index

    def _terms(self, request: SessionRequest, tenant: str, deadline: float) -> SessionTerms:
        if request.model is not None and request.policy is not None and request.model != request.policy:
            raise invalid("model and policy differ", "policy")
        model, field = (request.model, "model") if request.model is not None else (request.policy, "policy")
        policy, pinned = self._catalog.resolve(tenant, model, field)
        weights = weight_constraint(request.weights, pinned)
        concurrent = request.on_concurrent_turn or CONCURRENT[0]
        if concurrent not in CONCURRENT:
            known = ", ".join(CONCURRENT)
            raise invalid(
                f"on_concurrent_turn {concurrent[:80]!r} is none of {known}", "on_concurrent_turn", limit=known
            )
        return SessionTerms(
            policy=policy.policy,
            model=model or policy.policy,
            hold=member(VersionHold, request.hold, "hold", VersionHold.FLOAT),
            reasoning_history=member(
                ReasoningHistory, request.reasoning_history, "reasoning_history", ReasoningHistory.KEEP
            ),
            on_concurrent_turn=concurrent,
            ttl_s=self._seconds(request.ttl_s, "ttl_s", SessionTerms(policy="").ttl_s),
            max_turns=_cap(request.max_turns, "max_turns"),
            max_tokens=_cap(request.max_tokens, "max_tokens"),
            metadata=payload(request.metadata, "metadata", self._limits),
            weights_rule=weights.rule.value,
            weights_value=weights.value,
            deadline=deadline,
            scorers=self._scorers.specs(request.scorers or [], "scorers", tenant),
            task=payload(request.task, "task", self._limits),
        )

    def _seconds(self, seconds: float | None, field: str, default_s: float) -> float:
        found = default_s if seconds is None else seconds
        if not 0 < found <= self._limits.max_deadline_s:
            raise over_limit(field, found, f"0<{field}<=max_deadline_s={self._limits.max_deadline_s:g}")
        return found


def _cap(value: int | None, field: str) -> int:
    """0 = the deployment's alone."""
    if value is None:
        return 0
    if not 1 <= value < 2**31:
        raise over_limit(field, value, f"1<={field}<2**31")
    return value


def turn_rewards(given: dict[str, float] | None, turns: Any) -> dict[int, float]:
    """Rewards by turn, each of a turn that is there."""
    found: dict[int, float] = {}
    for name, value in (given or {}).items():
        field = f"turn_rewards.{name[:20]}"
        if (
            not (name.isascii() and name.isdigit() and len(name) < 10 and name == str(int(name)))
            or int(name) not in turns
        ):
            raise invalid(f"{field}: there is no such turn", field)
        found[int(name)] = finite(value, field)
    return found


def finite(value: float, field: str) -> float:
    if not math.isfinite(value):
        raise invalid(f"{field} is not finite", field)
    return value
