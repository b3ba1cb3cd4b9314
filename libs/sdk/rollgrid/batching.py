"""Finished groups as padded numpy arrays, and the group-relative advantage.

One row per sample, in the order of the groups and of their indexes.  Prompts are padded on the
left, completions on the right, so that `concatenate([prompt_ids, completion_ids], axis=1)` keeps
prompt and completion adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .results import Group, Sample

NO_VERSION = -1
"""Padding in `versions`."""


def to_arrays(
    groups: Iterable[Group],
    *,
    pad_id: int = 0,
    pad_to_multiple: int = 1,
    keep: Callable[[Group, Sample], bool] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Pad the samples of `groups` into rows.

    With R rows, P the longest prompt and C the longest completion (both rounded up to
    `pad_to_multiple`):

    | key | shape, dtype | |
    |---|---|---|
    | prompt_ids, prompt_mask | (R, P) int64, bool | left-padded with `pad_id` |
    | completion_ids, mask | (R, C) int64, bool | right-padded; `mask` marks sampled tokens |
    | logprobs | (R, C) float32 | of the sampled tokens; 0 in padding |
    | versions | (R, C) int64 | checkpoint version per token; -1 in padding |
    | rewards | (R,) float64 | NaN for null: a failure is not a 0 |
    | ok | (R,) bool | the sample succeeded |
    | group_index, sample_index | (R,) int64 | position in `groups`; index in its group |

    Failed, cancelled and expired samples keep their row (empty mask where there are no tokens), so a
    group of n always has n rows; pass `keep=lambda group, sample: sample.ok` to drop them.
    """
    rows = [
        (position, group, sample)
        for position, group in enumerate(groups)
        for sample in group.samples
        if keep is None or keep(group, sample)
    ]
    count = len(rows)
    prompt_width = _round_up(max((len(group.prompt_ids) for _, group, _ in rows), default=0), pad_to_multiple)
    width = _round_up(max((len(sample) for _, _, sample in rows), default=0), pad_to_multiple)
    arrays: dict[str, npt.NDArray[Any]] = {
        "prompt_ids": np.full((count, prompt_width), pad_id, dtype=np.int64),
        "prompt_mask": np.zeros((count, prompt_width), dtype=bool),
        "completion_ids": np.full((count, width), pad_id, dtype=np.int64),
        "mask": np.zeros((count, width), dtype=bool),
        "logprobs": np.zeros((count, width), dtype=np.float32),
        "versions": np.full((count, width), NO_VERSION, dtype=np.int64),
        "rewards": np.full(count, math.nan, dtype=np.float64),
        "ok": np.zeros(count, dtype=bool),
        "group_index": np.zeros(count, dtype=np.int64),
        "sample_index": np.zeros(count, dtype=np.int64),
    }
    for row, (position, group, sample) in enumerate(rows):
        _fill(arrays, row, group, sample)
        arrays["group_index"][row] = position
        arrays["sample_index"][row] = sample.index
    return arrays


def _fill(arrays: dict[str, npt.NDArray[Any]], row: int, group: Group, sample: Sample) -> None:
    prompt, ids, logprobs = group.prompt_ids, sample.token_ids, sample.logprobs
    if len(logprobs) != len(ids):
        raise ValueError(f"sample {group.id}.{sample.index} has {len(ids)} tokens and {len(logprobs)} logprobs")
    if len(prompt):
        arrays["prompt_ids"][row, -len(prompt) :] = prompt
        arrays["prompt_mask"][row, -len(prompt) :] = True
    arrays["completion_ids"][row, : len(ids)] = ids
    arrays["mask"][row, : len(ids)] = True
    arrays["logprobs"][row, : len(ids)] = logprobs
    for span in sample.spans:
        arrays["versions"][row, span.start : span.end] = span.version
    if sample.reward is not None:
        arrays["rewards"][row] = sample.reward
    arrays["ok"][row] = sample.ok


def _round_up(length: int, multiple: int) -> int:
    if multiple < 1:
        raise ValueError(f"pad_to_multiple must be at least 1, not {multiple}")
    return -(-length // multiple) * multiple


def group_advantages(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    scale: bool = True,
    ddof: int = 0,
    epsilon: float = 1e-4,
) -> npt.NDArray[np.float64]:
    """Group-relative advantages, one per row.

    A_i = (r_i - mean(r)) / (std(r) + epsilon) over the rows of one group: the normalised group reward of
    GRPO with outcome supervision (Shao et al., "DeepSeekMath", 2024, section 4.1.2), plus the usual
    `epsilon` against division by zero.  `ddof=1` divides by n - 1 in the standard deviation, as torch
    does; `scale=False` only subtracts the mean ("Dr. GRPO": Liu et al., "Understanding R1-Zero-Like
    Training", 2025).

    A NaN reward (null: the sample failed or was not scored) stays out of its group's mean and standard
    deviation and gets advantage 0, as does every row of a group with fewer than two rewards: no
    baseline, no signal.
    """
    values = np.asarray(rewards, dtype=np.float64)
    owners = np.asarray(group_index)
    if values.ndim != 1 or owners.shape != values.shape:
        raise ValueError(f"rewards {values.shape} and group_index {owners.shape} must be equally long vectors")
    advantages = np.zeros_like(values)
    valid = ~np.isnan(values)
    for owner in np.unique(owners):
        rows = (owners == owner) & valid
        if rows.sum() < 2:
            continue
        centred = values[rows] - values[rows].mean()
        advantages[rows] = centred / (values[rows].std(ddof=ddof) + epsilon) if scale else centred
    return advantages
