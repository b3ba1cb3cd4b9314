"""The terms of a request beside its prompts: weight constraints, rights, and other single values."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from rollgrid_contracts.jobs import OnRefresh, Purpose, Rights, VersionRule, WeightConstraint

from .openai_schema import WeightsRequest
from .rollout_schema import PaceRequest, RightsRequest
from .settings import Limits
from .submission import Caller, Pace
from .wire import check_payload, invalid, over_limit

MAX_TEXT_CHARS = 255


class RecordFormat(StrEnum):
    """How a group's close is stored for readers of the stream."""

    MSGPACK = "msgpack"
    JSON = "json"


def weight_constraint(request: WeightsRequest | None, pinned: WeightConstraint | None) -> WeightConstraint:
    """What the request asks for; whether it can be met is `availability`'s to say."""
    asked = _asked(request)
    if asked is not None and pinned is not None and asked != pinned:
        raise invalid("weights and the version in the model name differ", "weights")
    found = pinned or asked or WeightConstraint()
    if found.value < 0 or found.value >= 2**31:
        raise over_limit("weights", found.value, "0<=weights<2**31")
    return found


def weights_field(pinned: WeightConstraint | None) -> str:
    """The field that names the versions a request wants."""
    return "weights" if pinned is None else "model"


def on_refresh(text: str | None) -> OnRefresh | None:
    return None if text is None else OnRefresh(member(OnRefresh, text, "on_refresh", None))


def pace_of(request: PaceRequest | None, caller: Caller) -> Pace | None:
    """A retry must not count twice, so a paced submission has a name: its key, or its place in the queue."""
    if request is None:
        return None
    if not caller.named:
        raise invalid("a paced submission needs an Idempotency-Key: a retry would count twice", "Idempotency-Key")
    if not 1 <= request.batch < 2**31:
        raise over_limit("pace.batch", request.batch, "1<=batch<2**31")
    if not 0 <= request.max_staleness < 2**20:
        raise over_limit("pace.max_staleness", request.max_staleness, "0<=max_staleness<2**20")
    return Pace(batch=request.batch, max_staleness=request.max_staleness)


def _asked(request: WeightsRequest | None) -> WeightConstraint | None:
    if request is None:
        return None
    short = {
        VersionRule.EXACT: request.exact_version,
        VersionRule.MIN: request.min_version,
        VersionRule.MAX_STALENESS: request.max_staleness,
    }
    given = [(rule, value) for rule, value in short.items() if value is not None]
    if request.rule is not None or request.value is not None:
        rule = member(VersionRule, request.rule, "weights.rule", VersionRule.LATEST)
        if rule is not VersionRule.LATEST and request.value is None:
            raise invalid(f"weights.value is required with {rule.value}", "weights.value")
        given.append((rule, request.value or 0))
    if len(given) > 1:
        raise invalid("weights holds more than one rule", "weights")
    return WeightConstraint(rule=given[0][0], value=given[0][1]) if given else None


def rights_of(request: RightsRequest | None, tenant: str) -> Rights:
    """A tenant's own rollouts stand under its own grant and may be used for everything."""
    if request is None:
        return Rights(purposes=tuple(Purpose), grant_id=f"own:{tenant}")
    purposes = tuple(member(Purpose, text, "rights.purposes", Purpose.EXECUTE) for text in request.purposes)
    if Purpose.EXECUTE not in purposes:
        raise invalid("rights.purposes lacks execute: nothing could be sampled", "rights.purposes")
    return Rights(
        purposes=tuple(dict.fromkeys(purposes)),
        grant_id=bounded_text(request.grant_id, "rights.grant_id", MAX_TEXT_CHARS) or f"own:{tenant}",
    )


def member(kind: Any, text: str | None, field: str, default: Any) -> Any:
    """The enumeration's member of this value; refused with the list of all others."""
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError as error:
        known = ", ".join(kind)
        raise invalid(f"{field} {text[:80]!r} is none of {known}", field, limit=known) from error


def bounded_text(value: str | None, field: str, limit: int) -> str | None:
    if value is not None and not 1 <= len(value) <= limit:
        raise over_limit(field, f"{len(value)} characters", f"1-{limit} characters")
    return value


def payload(value: dict[str, Any] | None, field: str, limits: Limits) -> dict[str, Any]:
    """A caller's own object, within what can be stored."""
    if not value:
        return {}
    check_payload(value, field, limits.max_depth)
    return value
