"""Training and examination of the example trainer never share a question (A20)."""

from __future__ import annotations

from examples.own_trainer.tasks import TaskStream, examination, is_held_out, score


def test_the_two_parts_are_disjoint_whatever_the_seed() -> None:
    train = {task.question for seed in range(3) for task in TaskStream(seed).take(400)}
    exam = {task.question for seed in range(3) for task in examination(100, seed)}
    assert not train & exam
    assert all(map(is_held_out, exam))
    assert not any(map(is_held_out, train))


def test_an_examination_has_different_questions_and_is_the_same_every_time() -> None:
    exam = examination(300)
    assert len({task.question for task in exam}) == 300
    assert [task.question for task in exam] == [task.question for task in examination(300)]


def test_streams_differ_by_seed_and_repeat() -> None:
    first = TaskStream(1)
    questions = [task.question for task in (*first.take(20), *first.take(20))]
    assert questions == [task.question for task in TaskStream(1).take(40)]
    assert questions != [task.question for task in TaskStream(2).take(40)]


def test_the_reward_is_that_of_reasoning_gym() -> None:
    task = TaskStream(0).take(1)[0]
    assert score(task.answer, task) == 1.0
    assert score(f" {task.answer}\n", task) == 1.0
    assert score(f"{task.answer}7", task) < 1.0  # it may reward a part
    assert score("", task) == 0.0
