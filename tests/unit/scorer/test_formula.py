"""The recorded formula, read by somebody else's parser, gives exactly the recorded reward."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts import ids
from rollgrid_contracts.scoring import Score, ScorerSpec, ScoreStatus, combine, reward_formula

OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(formula: str, values: Mapping[str, float]) -> float:
    def of(node: ast.expr) -> float:
        match node:
            case ast.BinOp(left, op, right):
                return OPERATIONS[type(op)](of(left), of(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -of(operand)
            case ast.Name(name) | ast.Constant(str() as name):
                return values[name]
            case ast.Constant(int() | float() as number):
                return float(number)
            case ast.Call(ast.Name("gate"), [argument]):
                return of(argument)
        raise AssertionError(ast.dump(node))

    return of(ast.parse(formula, mode="eval").body)


SCORERS = st.lists(
    st.builds(
        ScorerSpec,
        name=st.from_regex(ids.LABEL_PATTERN, fullmatch=True) | st.sampled_from(["is", "gate", "a-1", "1e5"]),
        type=st.just("x"),
        weight=st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1.0, 0.2, -0.5, 0.1234567]),
        gate=st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda spec: spec.name,
).map(tuple)


@given(specs=SCORERS, data=st.data())
def test_the_formula_evaluates_to_the_reward(specs: tuple[ScorerSpec, ...], data: st.DataObject) -> None:
    values = {spec.name: data.draw(st.floats(-10, 10) | st.sampled_from([0.0, 1.0])) for spec in specs}
    scores = tuple(Score(scorer=name, status=ScoreStatus.SCORED, value=value) for name, value in values.items())
    reward, _ = combine(specs, scores)
    formula = reward_formula(specs)
    assert formula is not None
    assert reward is not None
    found = evaluate(formula, values)
    assert found == reward or (math.isnan(found) and math.isnan(reward))


@pytest.mark.parametrize(
    ("specs", "formula"),
    [
        ((("numeric", 1.0, False), ("format", 0.2, False), ("length", 1.0, True)), "(1*numeric + 0.2*format) * gate(length)"),
        ((("numeric", 1.0, False),), "1*numeric"),
        ((("a", -1.0, False), ("b", -0.1234567891, False)), "-1*a - 0.1234567891*b"),
        ((("a", 1.0, False), ("g", 1.0, True), ("h-2", 1.0, True)), '(1*a) * gate(g) * gate("h-2")'),
        ((("g", 1.0, True),), "0 * gate(g)"),
        ((), None),
    ],
)  # fmt: skip
def test_it_is_readable(specs: tuple[tuple[str, float, bool], ...], formula: str | None) -> None:
    made = tuple(ScorerSpec(name=name, type="x", weight=weight, gate=gate) for name, weight, gate in specs)
    assert reward_formula(made) == formula
