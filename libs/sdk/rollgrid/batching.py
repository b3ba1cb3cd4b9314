"""Finished groups as padded numpy arrays, and the group-relative advantage.

One row per sample, in the order of the groups and of their indexes; of a sample that was played in turns one row per
root→leaf path of its tree.  Prompts are padded on the left, completions on the right, so that
`concatenate([prompt_ids, completion_ids], axis=1)` keeps prompt and completion adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .paths import Path
from .results import Group, Sample

NO_VERSION = -1
"""Padding in `versions`, and of what was observed."""

NO_TURN = -1
"""The same in `turns`."""


class Row(NamedTuple):
    """One row to be: `path` is that of a sample that was played in turns, the `path_index`-th of them."""

    position: int
    group: Group
    sample: Sample
    path: Path | None = None
    path_index: int = 0

    @property
    def prompt(self) -> npt.NDArray[np.uint32]:
        return self.group.prompt_ids if self.path is None else self.path.prompt_ids

    def __len__(self) -> int:
        return len(self.sample) if self.path is None else len(self.path)


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
    | logprobs | (R, C) float32 | of the sampled tokens; 0 elsewhere |
    | versions | (R, C) int64 | checkpoint version per sampled token; -1 elsewhere |
    | rewards | (R,) float64 | NaN for null: a failure is not a 0 |
    | ok | (R,) bool | the sample succeeded |
    | group_index, sample_index | (R,) int64 | position in `groups`; index in its group |

    Failed, cancelled and expired samples keep their row (empty mask where there are no tokens), so a
    group of n always has n rows at least; pass `keep=lambda group, sample: sample.ok` to drop them.

    If any sample belongs to a session, kept or not, and whether or not it came to a turn, its rows are the root→leaf paths of its tree: the prompt ends where the first turn
    begins, the completion holds all turns and what was observed between them (there `mask` is False).  Then there are also

    | key | shape, dtype | |
    |---|---|---|
    | valid | (R, C) bool | sampled or observed: what attention may see; False in padding |
    | first | (R, C) bool | `mask` without turns that an earlier row holds: train on it, and no token counts twice |
    | token_rewards | (R, C) float32 | a turn's own reward on its last token, the sample's on the last sampled one |
    | turns | (R, C) int64 | the turn that sampled the token; -1 elsewhere |
    | path_index | (R,) int64 | which path of its sample |
    """
    groups = list(groups)
    rows = [
        row
        for position, group in enumerate(groups)
        for sample in group.samples
        if keep is None or keep(group, sample)
        for row in _rows(position, group, sample)
    ]
    in_turns = any(sample.session is not None for group in groups for sample in group.samples)
    arrays = _empty(rows, pad_id, pad_to_multiple, in_turns=in_turns)
    for number, row in enumerate(rows):
        _fill(arrays, number, row)
    return arrays


def _rows(position: int, group: Group, sample: Sample) -> list[Row]:
    if not sample.entry.turns:
        return [Row(position, group, sample)]
    paths = sample.paths()
    return [Row(position, group, sample, path, i) for i, path in enumerate(paths)] or [Row(position, group, sample)]


def _empty(rows: list[Row], pad_id: int, multiple: int, *, in_turns: bool) -> dict[str, npt.NDArray[Any]]:
    count = len(rows)
    before = (count, _round_up(max((len(row.prompt) for row in rows), default=0), multiple))
    behind = (count, _round_up(max((len(row) for row in rows), default=0), multiple))
    arrays: dict[str, npt.NDArray[Any]] = {
        "prompt_ids": np.full(before, pad_id, dtype=np.int64),
        "prompt_mask": np.zeros(before, dtype=bool),
        "completion_ids": np.full(behind, pad_id, dtype=np.int64),
        "mask": np.zeros(behind, dtype=bool),
        "logprobs": np.zeros(behind, dtype=np.float32),
        "versions": np.full(behind, NO_VERSION, dtype=np.int64),
        "rewards": np.full(count, math.nan, dtype=np.float64),
        "ok": np.zeros(count, dtype=bool),
        "group_index": np.zeros(count, dtype=np.int64),
        "sample_index": np.zeros(count, dtype=np.int64),
    }
    if in_turns:
        arrays["valid"] = np.zeros(behind, dtype=bool)
        arrays["first"] = np.zeros(behind, dtype=bool)
        arrays["token_rewards"] = np.zeros(behind, dtype=np.float32)
        arrays["turns"] = np.full(behind, NO_TURN, dtype=np.int64)
        arrays["path_index"] = np.zeros(count, dtype=np.int64)
    return arrays


def _fill(arrays: dict[str, npt.NDArray[Any]], number: int, row: Row) -> None:
    sample, prompt = row.sample, row.prompt
    if len(prompt):
        arrays["prompt_ids"][number, -len(prompt) :] = prompt
        arrays["prompt_mask"][number, -len(prompt) :] = True
    if sample.reward is not None:
        arrays["rewards"][number] = sample.reward
    arrays["ok"][number] = sample.ok
    arrays["group_index"][number] = row.position
    arrays["sample_index"][number] = sample.index
    if row.path is None:
        _fill_generation(arrays, number, row)
    else:
        _fill_path(arrays, number, row.path)
        arrays["path_index"][number] = row.path_index


def _fill_generation(arrays: dict[str, npt.NDArray[Any]], number: int, row: Row) -> None:
    sample, ids, logprobs = row.sample, row.sample.token_ids, row.sample.logprobs
    if len(logprobs) != len(ids):
        raise ValueError(f"sample {row.group.id}.{sample.index} has {len(ids)} tokens and {len(logprobs)} logprobs")
    arrays["completion_ids"][number, : len(ids)] = ids
    arrays["mask"][number, : len(ids)] = True
    arrays["logprobs"][number, : len(ids)] = logprobs
    for span in sample.spans:
        arrays["versions"][number, span.start : span.end] = span.version
    if "turns" in arrays and len(ids):
        arrays["valid"][number, : len(ids)] = arrays["first"][number, : len(ids)] = True
        arrays["turns"][number, : len(ids)] = 0
        arrays["token_rewards"][number, len(ids) - 1] = sample.reward or 0.0


def _fill_path(arrays: dict[str, npt.NDArray[Any]], number: int, path: Path) -> None:
    end = len(path)
    arrays["completion_ids"][number, :end] = path.completion_ids
    arrays["mask"][number, :end] = path.mask
    arrays["logprobs"][number, :end] = path.logprobs
    arrays["versions"][number, :end] = path.versions
    arrays["valid"][number, :end] = True
    arrays["first"][number, :end] = path.first
    arrays["token_rewards"][number, :end] = path.rewards
    arrays["turns"][number, :end] = path.turn_numbers


def _round_up(length: int, multiple: int) -> int:
    if multiple < 1:
        raise ValueError(f"pad_to_multiple must be at least 1, not {multiple}")
    return -(-length // multiple) * multiple


def group_advantages(
    rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    sample_index: npt.ArrayLike | None = None,
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
    baseline, no signal.  With `sample_index`, rows of one sample (the paths of an episode) count as one in the
    baseline, however many they are.
    """
    values = np.asarray(rewards, dtype=np.float64)
    owners = np.asarray(group_index)
    if values.ndim != 1 or owners.shape != values.shape:
        raise ValueError(f"rewards {values.shape} and group_index {owners.shape} must be equally long vectors")
    samples = np.arange(len(values)) if sample_index is None else np.asarray(sample_index)
    advantages = np.zeros_like(values)
    valid = ~np.isnan(values)
    for owner in np.unique(owners):
        rows = (owners == owner) & valid
        counted = values[rows][np.unique(samples[rows], return_index=True)[1]]
        if len(counted) < 2:
            continue
        centred = values[rows] - counted.mean()
        advantages[rows] = centred / (counted.std(ddof=ddof) + epsilon) if scale else centred
    return advantages
