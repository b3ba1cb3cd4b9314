"""Losses of the example trainer against numbers worked out by hand (A02, A39).

The batch has two groups of two: rewards 1, 0 and 1, 1.  Row 0 has two tokens, the others one; what stands
in the padding is absurd on purpose.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rollgrid import group_advantages as sdk_advantages  # noqa: E402

from examples.own_trainer import losses  # noqa: E402

NOT_A_NUMBER = float("nan")
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 1, 1])
MASK = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
OLD = torch.tensor([[-0.7, -1.0], [-1.5, 7.0], [-0.3, 7.0], [-0.4, 7.0]])
NEW = torch.tensor([[-0.5, -1.0], [-2.0, -9.0], [-0.3, -9.0], [-0.3, -9.0]])
A = 0.5 / (0.5 + 1e-4)  # of a group with rewards 1 and 0: mean 0.5, std 0.5


def near(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-6)


def test_group_advantages_are_the_distance_from_the_mean_in_standard_deviations() -> None:
    assert losses.group_advantages(REWARDS, GROUPS).tolist() == near([A, -A, 0, 0])
    # rewards 3, 0, 0: mean 1, variance (4 + 1 + 1) / 3 = 2
    three = losses.group_advantages(torch.tensor([3.0, 0.0, 0.0]), torch.zeros(3), epsilon=0.0)
    assert three.tolist() == near([2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)])


def test_without_normalisation_they_are_the_distance_itself() -> None:
    assert losses.group_advantages(REWARDS, GROUPS, normalise=False).tolist() == near([0.5, -0.5, 0, 0])


def test_a_missing_reward_is_no_zero() -> None:
    found = losses.group_advantages(torch.tensor([2.0, 0.0, NOT_A_NUMBER]), torch.zeros(3), normalise=False)
    assert found.tolist() == near([1, -1, 0])
    assert losses.group_advantages(torch.tensor([2.0, NOT_A_NUMBER]), torch.zeros(2)).tolist() == [0, 0]


def test_they_equal_those_of_the_sdk() -> None:
    rewards, groups = torch.rand(60, dtype=torch.float64), torch.arange(60) // 6
    rewards[7] = NOT_A_NUMBER
    for normalise in (True, False):
        ours = losses.group_advantages(rewards, groups, normalise=normalise).numpy()
        np.testing.assert_allclose(ours, sdk_advantages(rewards.numpy(), groups.numpy(), scale=normalise), atol=1e-12)


def test_stale_tokens_count_by_how_likely_they_have_become_but_no_more_than_twice() -> None:
    now = OLD + torch.log(torch.tensor([[1.5, 0.25], [9.0, 1.0], [1.0, 1.0], [1.0, 1.0]]))
    weight = losses.behaviour_weight(now, OLD, MASK)
    assert weight[MASK].tolist() == near([1.5, 0.25, 2.0, 1.0, 1.0])
    assert weight[~MASK].tolist() == [1, 1, 1]
    # around the weights of now (ratio 1 everywhere): the mean over rows of each row's mean of w A
    found = losses.grpo(now, now, REWARDS, GROUPS, MASK, weight=weight)
    assert found.item() == near(-((1.5 + 0.25) / 2 * A + 2.0 * -A) / 4)


def test_ratios_of_tokens_and_of_sequences() -> None:
    tokens = losses.token_ratio(NEW, OLD, MASK)[MASK].tolist()
    assert tokens == near([1.2214028, 1.0, 0.6065307, 1.0, 1.1051709])  # e^0.2, e^0, e^-0.5, e^0, e^0.1
    sequences = losses.sequence_ratio(NEW, OLD, MASK).tolist()
    assert sequences == near([1.1051709, 0.6065307, 1.0, 1.1051709])  # e^((0.2 + 0) / 2), the rest as above


def test_ppo_takes_the_worse_of_ratio_and_clipped_ratio() -> None:
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0])
    # gains: min(1.2214, 1.2) = 1.2 and 1 · min(-0.6065, -0.8) = -0.8 · 0 · min(1.1052, 1.1052) * 2 = 2.2103
    by_token = (1.2 + 1 - 0.8 + 0 + 2.2103418) / 5
    by_sequence = ((1.2 + 1) / 2 - 0.8 + 0 + 2.2103418) / 4
    constant = (1.2 + 1 - 0.8 + 0 + 2.2103418) / (4 * 10)
    every: dict[losses.Reduction, float] = {"token_mean": by_token, "sequence_mean": by_sequence, "constant": constant}
    for reduction, expected in every.items():
        loss = losses.ppo_clip(NEW, OLD, advantages, MASK, reduction=reduction, length=10)
        assert loss.item() == near(-expected), reduction
    higher = losses.ppo_clip(NEW, OLD, advantages, MASK, clip_high=0.3)  # now 1.2214 stands
    assert higher.item() == near(-(by_token + 0.0214028 / 5))


def test_ppo_has_no_gradient_where_it_clips() -> None:
    logprobs = NEW.clone().requires_grad_()
    losses.ppo_clip(logprobs, OLD, torch.tensor([1.0, -1.0, 1.0, -1.0]), MASK).backward()
    # clipped above with A > 0: 0 · ratio 1: -1/5 · clipped below with A < 0: 0 · ratio 1: -1/5 · e^0.1 inside: +e^0.1 / 5
    assert logprobs.grad.tolist() == [near([0, -0.2]), near([0, 0]), near([-0.2, 0]), near([0.2210342, 0])]


def test_grpo_and_dr_grpo_on_the_batch() -> None:
    # row 0: A * (1.2 + 1) / 2, row 1: -A * 0.8, rows 2 and 3: nothing to learn
    assert losses.grpo(NEW, OLD, REWARDS, GROUPS, MASK).item() == near(-(A * 1.1 - A * 0.8) / 4)
    # advantages ±0.5, sums over tokens, divided by 4 rows of at most 8 tokens
    found = losses.dr_grpo(NEW, OLD, REWARDS, GROUPS, MASK, length=8)
    assert found.item() == near(-(0.5 * 2.2 - 0.5 * 0.8) / 32)


def test_gspo_clips_whole_sequences() -> None:
    found = losses.gspo(NEW, OLD, REWARDS, GROUPS, MASK, clip_low=0.2, clip_high=0.05)
    assert found.item() == near(-(A * 1.05 - A * 0.8) / 4)
    logprobs = NEW.clone().requires_grad_()
    losses.gspo(logprobs, OLD, REWARDS, GROUPS, MASK, clip_low=0.5, clip_high=0.5).backward()
    # inside the bounds: -s A / (4 rows * length), the same for each token of a row
    each = -1.1051709 * A / 8
    assert logprobs.grad.tolist() == [near([each, each]), near([0.6065307 * A / 4, 0]), near([0, 0]), near([0, 0])]


def test_reinforce_weighs_each_token_with_its_return() -> None:
    token_rewards = torch.tensor([[1.0, 2.0], [4.0, 100.0], [0.0, 0.0], [3.0, 0.0]])
    returns = losses.discounted_returns(token_rewards, MASK, discount=0.5)
    assert returns.tolist() == [[2.0, 2.0], [4.0, 0.0], [0.0, 0.0], [3.0, 0.0]]  # 1 + 0.5 * 2 = 2
    logprobs = NEW.clone().requires_grad_()
    loss = losses.reinforce(logprobs, returns, 1.0, MASK)
    # (2 - 1) * (-0.5 - 1.0) + (4 - 1) * -2 + (0 - 1) * -0.3 + (3 - 1) * -0.3 = -7.8 over four rows
    assert loss.item() == near(7.8 / 4)
    loss.backward()
    assert logprobs.grad.tolist() == [near([-0.25, -0.25]), near([-0.75, 0]), near([0.25, 0]), near([-0.5, 0])]


def test_the_reward_of_an_outcome_is_the_return_of_each_of_its_tokens() -> None:
    token_rewards = losses.final_rewards(torch.tensor([1.0, 0.5, NOT_A_NUMBER, 0.0]), MASK)
    assert token_rewards.tolist() == [[0.0, 1.0], [0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert losses.discounted_returns(token_rewards, MASK).tolist()[0] == [1.0, 1.0]


def test_on_policy_all_ratios_are_one_and_grpo_is_reinforce_with_the_group_as_baseline() -> None:
    advantages = losses.group_advantages(REWARDS, GROUPS, normalise=False)
    one, other = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    losses.ppo_clip(one, OLD, advantages, MASK, reduction="constant").backward()
    losses.reinforce(other, advantages, 0.0, MASK).backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert losses.token_ratio(OLD, OLD, MASK)[MASK].tolist() == [1.0] * 5


def test_padding_decides_nothing() -> None:
    for fill in (0.0, NOT_A_NUMBER):
        new, old = NEW.masked_fill(~MASK, fill), OLD.masked_fill(~MASK, 0.0)
        for loss in (losses.grpo, losses.gspo):
            logprobs = new.requires_grad_()
            found = loss(logprobs, old, REWARDS, GROUPS, MASK)
            found.backward()
            assert found.item() == near(loss(NEW, OLD, REWARDS, GROUPS, MASK).item())
            assert logprobs.grad.isfinite().all()
