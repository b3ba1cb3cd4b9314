"""Policy-gradient losses as small functions on padded tensors: GRPO, Dr. GRPO, PPO, GSPO, REINFORCE.

Shapes: R rows (one per sample), T sampled tokens of the longest row.  `mask` (R, T) marks sampled
tokens; what stands in padding never matters.  `logprobs` (R, T) come from the trainer's forward pass
and carry the gradient; `old_logprobs` (R, T) are those of the weights that sampled, as rollgrid
recorded them.  Every loss is a scalar to minimise.

The models and the optimizer are elsewhere: nothing here has a state.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

Tensor = Any
"""A torch.Tensor; torch is untyped to our checker."""

Reduction = Literal["sequence_mean", "token_mean", "constant"]


def group_advantages(rewards: Tensor, group_index: Tensor, *, normalise: bool = True, epsilon: float = 1e-4) -> Tensor:
    """How much better each sample is than its group: rewards (R,), group_index (R,) int → (R,).

    A_i = (r_i - mean(r)) / (std(r) + epsilon) over the rows of one group: outcome supervision of GRPO,
    section 4.1.2 of DeepSeekMath (Shao et al. 2024, arXiv 2402.03300), std with divisor n.  With
    `normalise=False` A_i = r_i - mean(r): Dr. GRPO (Liu et al. 2025, arXiv 2503.20783), which leaves the
    division out because it favours questions that are nearly always or nearly never solved.

    A NaN reward (the sample failed, or no verdict) counts neither as a reward nor in the group's mean and gets
    advantage 0, as does every row of a group with fewer than two rewards.
    """
    advantages = torch.zeros_like(rewards)
    for group in group_index.unique():
        rows = (group_index == group) & ~rewards.isnan()
        if rows.sum() < 2:
            continue
        centred = rewards[rows] - rewards[rows].mean()
        scale = centred.square().mean().sqrt() + epsilon if normalise else 1.0
        advantages[rows] = centred / scale
    return advantages


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old of every sampled token, 0 in padding, (R, T) → (R, T)."""
    return torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho_t = pi(a_t | s_t) / pi_old(a_t | s_t) of every sampled token, 1 in padding, (R, T) → (R, T)."""
    return torch.exp(log_ratio(logprobs, old_logprobs, mask))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The ratio of whole sequences, normalised by length, (R, T) → (R,).

    s_i = (pi(y_i | x) / pi_old(y_i | x)) ^ (1 / |y_i|) = exp(mean_t(log pi - log pi_old)): equation 7 of
    GSPO (Zheng et al. 2025, arXiv 2507.18071).  A row without tokens has ratio 1.
    """
    lengths = mask.sum(1).clamp(min=1)
    return torch.exp(log_ratio(logprobs, old_logprobs, mask).sum(1) / lengths)


def reduce(values: Tensor, mask: Tensor, how: Reduction, length: int = 1) -> Tensor:
    """One number out of per-token values (R, T).

    `sequence_mean`: mean over rows of each row's mean (GRPO's 1/G sum_i 1/|o_i| sum_t).  `token_mean`: mean
    over all tokens (DAPO, Yu et al. 2025, arXiv 2503.14476).  `constant`: sum over tokens divided by
    R * `length`, the same for short and long answers (Dr. GRPO).
    """
    values = torch.where(mask, values, torch.zeros_like(values))
    if how == "token_mean":
        return values.sum() / mask.sum().clamp(min=1)
    if how == "constant":
        return values.sum() / (mask.shape[0] * length)
    return (values.sum(1) / mask.sum(1).clamp(min=1)).mean()


def behaviour_weight(proximal: Tensor, behaviour: Tensor, mask: Tensor, *, most: float = 2.0) -> Tensor:
    """w_t = min(pi_proximal(a_t | s_t) / pi_behaviour(a_t | s_t), most), 1 in padding, (R, T) → (R, T); no gradient.

    What stale samples count for in the decoupled objective of AReaL (Fu et al. 2025, arXiv 2505.24298, section 5.2):
    the clip is around the weights at the beginning of the step (`proximal`), and w corrects for those that sampled
    (`behaviour`), bounded above as truncated importance sampling has it (Ionides 2008).
    """
    return token_ratio(proximal, behaviour, mask).clamp(max=most).detach()


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reduction: Reduction = "token_mean",
    length: int = 1,
    weight: Tensor | None = None,
) -> Tensor:
    """PPO's clipped surrogate, `advantages` (R,) or (R, T), `weight` (R, T) or None for 1 everywhere.

    L = -mean(w_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)): equation 7 of Schulman et al. 2017
    (arXiv 1707.06347), where both bounds are one epsilon; DAPO's "clip higher" sets them apart.  `weight` is
    `behaviour_weight` where `old_logprobs` are not those of the weights that sampled.
    """
    advantages = advantages if advantages.ndim == 2 else advantages[:, None]
    ratio = token_ratio(logprobs, old_logprobs, mask)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return -reduce(gain if weight is None else weight * gain, mask, reduction, length)


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, rewards: Tensor, group_index: Tensor, mask: Tensor, *,
    clip_low: float = 0.2, clip_high: float = 0.2, weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """GRPO without its KL term: PPO's surrogate with the normalised group advantage, each answer weighing the same.

    Equation 3 of DeepSeekMath (arXiv 2402.03300) with beta = 0.
    """
    advantages = group_advantages(rewards, group_index)
    return ppo_clip(
        logprobs, old_logprobs, advantages, mask,
        clip_low=clip_low, clip_high=clip_high, reduction="sequence_mean", weight=weight,
    )  # fmt: skip


def dr_grpo(
    logprobs: Tensor, old_logprobs: Tensor, rewards: Tensor, group_index: Tensor, mask: Tensor, *,
    length: int, clip_low: float = 0.2, clip_high: float = 0.2, weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dr. GRPO (arXiv 2503.20783): no division by the group's std, and none by an answer's own length.

    `length` is the constant in its place: the most tokens that an answer may have.
    """
    advantages = group_advantages(rewards, group_index, normalise=False)
    return ppo_clip(
        logprobs, old_logprobs, advantages, mask,
        clip_low=clip_low, clip_high=clip_high, reduction="constant", length=length, weight=weight,
    )  # fmt: skip


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, rewards: Tensor, group_index: Tensor, mask: Tensor, *,
    clip_low: float = 3e-4, clip_high: float = 4e-4,
) -> Tensor:  # fmt: skip
    """GSPO: ratio, clip and advantage per sequence (equation 5 of arXiv 2507.18071, bounds of its section 5.1).

    L = -mean_i(min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)) over rows with tokens.
    """
    advantages = group_advantages(rewards, group_index)
    ratio = sequence_ratio(logprobs, old_logprobs, mask)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    present = mask.any(1)
    return -torch.where(present, gain, torch.zeros_like(gain)).sum() / present.sum().clamp(min=1)


def discounted_returns(token_rewards: Tensor, mask: Tensor, discount: float = 1.0) -> Tensor:
    """G_t = sum over k >= t of discount^(k - t) r_k, (R, T) → (R, T); zero in padding."""
    returns = torch.zeros_like(token_rewards)
    running = torch.zeros_like(token_rewards[:, 0])
    for position in range(token_rewards.shape[1] - 1, -1, -1):
        running = torch.where(mask[:, position], token_rewards[:, position] + discount * running, running)
        returns[:, position] = running
    return torch.where(mask, returns, torch.zeros_like(returns))


def final_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Per-token rewards (R, T) of an outcome: all of it at the last sampled token, 0 elsewhere.

    A NaN reward becomes 0 and has to be taken out by the mask.
    """
    token_rewards = torch.zeros(mask.shape, dtype=rewards.dtype)
    rows = mask.any(1)
    last = mask.sum(1).clamp(min=1) - 1
    token_rewards[rows, last[rows]] = rewards.nan_to_num(0.0)[rows]
    return token_rewards


def reinforce(logprobs: Tensor, returns: Tensor, baseline: Tensor | float, mask: Tensor) -> Tensor:
    """REINFORCE with a baseline (Williams 1992, "Simple statistical gradient-following algorithms", section 4).

    L = -mean_i(sum_t (G_t - b) log pi(a_t | s_t)), `returns` (R, T) or (R,), `baseline` broadcast to it: any number
    that does not depend on the action keeps the gradient unbiased.  No ratio: for samples of the current weights.
    """
    weight = returns - baseline
    weight = weight if weight.ndim == 2 else weight[:, None]
    return -reduce(weight.detach() * logprobs, mask, "constant")
