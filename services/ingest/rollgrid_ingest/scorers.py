"""The scorers that a request may ask for: known types, webhooks of the allow-list, the formula of the reward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.scoring import ScorerKind, ScorerSpec, reward_formula
from rollgrid_runtime.webhooks import AllowList, WebhookParams

from .rollout_schema import ScorerRequest
from .settings import Limits
from .terms import member, payload
from .wire import at_most, invalid, over_limit, unsupported

WEBHOOK = "webhook"


class Scorers:
    """What this deployment offers."""

    def __init__(self, known: Iterable[str], webhooks: AllowList, limits: Limits) -> None:
        self._known, self._webhooks, self._limits = frozenset(known), webhooks, limits

    def specs(self, scorers: Sequence[str | ScorerRequest], path: str, tenant: str) -> tuple[ScorerSpec, ...]:
        """The scorers asked for, each of a known type and with a name of its own."""
        at_most(len(scorers), path, "max_scorers", self._limits.max_scorers)
        specs: list[ScorerSpec] = []
        for i, scorer in enumerate(scorers):
            request = ScorerRequest(type=scorer) if isinstance(scorer, str) else scorer
            specs.append(self._spec(request, f"{path}[{i}]", tenant))
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise invalid(f"{path}: two scorers have one name", path)
        if specs and all(spec.gate for spec in specs):
            raise invalid(f"{path}: all are gates, so the sum that they multiply is empty and the reward 0", path)
        return tuple(specs)

    def _spec(self, request: ScorerRequest, path: str, tenant: str) -> ScorerSpec:
        known = self._known | ({WEBHOOK} if self._webhooks else set())
        if request.type not in known:
            names = ", ".join(sorted(known))
            raise invalid(
                f"{path}.type {request.type[:80]!r} is not a known scorer ({names})", f"{path}.type", limit=names
            )
        kind = ScorerKind.WEBHOOK if request.type == WEBHOOK else ScorerKind.VERIFIER
        if member(ScorerKind, request.kind, f"{path}.kind", kind) is not kind:
            raise unsupported(f"{path}.kind", f"{request.type} is a {kind.value}")
        name = request.name if request.name is not None else request.type
        if not ids.is_label(name):
            raise invalid(f"{path}.name is not a usable name", f"{path}.name", limit=ids.LABEL_PATTERN)
        params = payload(request.params, f"{path}.params", self._limits)
        if kind is ScorerKind.WEBHOOK:
            self._check_webhook(params, f"{path}.params", tenant)
        return ScorerSpec(
            name=name,
            type=request.type,
            kind=kind,
            params=params,
            weight=_weight(request, path),
            gate=bool(request.gate),
            timeout_s=self._timeout_s(request, path),
        )

    def _timeout_s(self, request: ScorerRequest, path: str) -> float:
        timeout_s = 10.0 if request.timeout_s is None else request.timeout_s
        if not 0 < timeout_s <= self._limits.max_scorer_timeout_s:
            limit = f"max_scorer_timeout_s={self._limits.max_scorer_timeout_s:g}"
            raise over_limit(f"{path}.timeout_s", timeout_s, limit)
        return timeout_s

    def _check_webhook(self, params: dict[str, Any], path: str, tenant: str) -> None:
        """The scorer checks again: the list may have changed, and names may point elsewhere by then."""
        try:
            checked = msgspec.convert(params, WebhookParams)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$")
            field = path + where.rstrip("`")
            raise invalid(f"{field}: {what}", field) from error
        try:
            self._webhooks.find(checked.url, tenant)
        except ValueError as error:
            raise invalid(f"{path}.url: {error}", f"{path}.url", limit="ROLLGRID_WEBHOOK_ALLOW") from error


def _weight(request: ScorerRequest, path: str) -> float:
    weight = 1.0 if request.weight is None else request.weight
    if not math.isfinite(weight):
        raise invalid(f"{path}.weight is not finite", f"{path}.weight")
    return weight


def check_formula(asked: str | None, specs: tuple[ScorerSpec, ...], where: str) -> None:
    """A caller may state the formula it counts on: it is refused unless it is the one that will be recorded."""
    made = reward_formula(specs)
    if asked is not None and "".join(asked.split()) != "".join((made or "").split()):
        raise invalid(
            f"reward_formula is not what the scorers of {where} make: {made or 'there are none'}",
            "reward_formula",
            limit=made,
        )
