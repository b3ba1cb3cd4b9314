"""What scorers see of a session in the record, and where their values per turn stand."""

from __future__ import annotations

from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.samples import Parsed, Sample, SampleStatus
from rollgrid_contracts.scoring import Score, ScoreStatus
from rollgrid_contracts.trajectories import Entry
from rollgrid_scorer.sessions import by_turn, conversation, path_of


def turn(number: int, parent: int | None, status: SampleStatus = SampleStatus.SUCCEEDED) -> Sample:
    node = TurnNode(parent=parent, messages=({"role": "user", "content": f"ask {number}"},))
    return Sample(index=0, turn=number, status=status, text=f"answer {number}", node=node)


TURNS = (turn(0, None), turn(1, 0, SampleStatus.CANCELLED), turn(2, 0), turn(4, 0), turn(5, 4))


def entry(leaf: int, status: SampleStatus = SampleStatus.SUCCEEDED) -> Entry:
    return Entry(sample=Sample(index=0, turn=leaf, status=status), turns=TURNS, session="s")


def test_the_judged_path_goes_from_the_root_to_the_leaf() -> None:
    assert [sample.turn for sample in path_of(entry(5))] == [0, 4, 5]
    assert [sample.turn for sample in path_of(entry(2))] == [0, 2]
    assert path_of(entry(1)) == (), "a turn that was stopped is no answer"
    assert path_of(entry(9)) == ()
    assert path_of(entry(5, SampleStatus.EXPIRED)) == ()


def test_the_conversation_has_what_was_asked_and_answered() -> None:
    path = (turn(0, None), Sample(index=0, turn=1, status=SampleStatus.SUCCEEDED, text="<think>x</think>y", parsed=Parsed(content="y", reasoning="x")))  # fmt: skip
    assert conversation(path) == (
        {"role": "user", "content": "ask 0"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "assistant", "content": "y", "reasoning": "x"},
    )


def test_values_per_turn_stand_under_the_turns_own_numbers() -> None:
    def given(*values: float | None) -> Score:
        return Score(scorer="s", status=ScoreStatus.SCORED, value=1.0, turn_values=values)

    path = path_of(entry(5))
    assert by_turn(given(0.1, None, 0.3), path).turn_values == (0.1, None, None, None, None, 0.3)
    assert by_turn(given(0.1), path).turn_values == (0.1, None, None, None, None, None)
    assert by_turn(given(), path) == given()
    assert by_turn(given(0.1, 0.2), ()) == given(0.1, 0.2), "of a single generation they stay as they are"
    failed = by_turn(given(0.1, 0.2, 0.3, 0.4), path)
    assert (failed.status, failed.value, failed.turn_values) == (ScoreStatus.VERIFIER_ERROR, None, ())
