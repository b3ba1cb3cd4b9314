"""Groups to arrays, and the advantage against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rollgrid import Group, group_advantages, to_arrays

from tests.unit.sdk.build import closed, entry, failed_entry


def test_sample_arrays_are_views_of_the_received_bytes() -> None:
    group = Group(closed([entry(0, ids=(5, 6, 2))]), cursor=9)
    sample = group.samples[0]
    assert sample.token_ids.tolist() == [5, 6, 2]
    assert sample.token_ids.dtype == np.uint32
    assert sample.logprobs.tolist() == [-0.125, -0.25, -0.375]
    assert not sample.token_ids.flags.owndata
    assert not sample.token_ids.flags.writeable
    received = group.closed.entries[0].sample.token_ids.packed
    assert np.shares_memory(sample.token_ids, np.frombuffer(received, dtype=np.uint8))


def test_rows_are_padded_left_for_prompts_and_right_for_completions() -> None:
    first = Group(closed([entry(0, ids=(5, 2)), entry(1, ids=(7, 8, 9, 2), reward=None)], prompt=(1, 2)))
    second = Group(closed([entry(0, ids=(4,), reward=0.5)], prompt=(3, 3, 3)))
    arrays = to_arrays([first, second], pad_id=99)

    assert arrays["prompt_ids"].tolist() == [[99, 1, 2], [99, 1, 2], [3, 3, 3]]
    assert arrays["prompt_mask"].tolist() == [[False, True, True], [False, True, True], [True, True, True]]
    assert arrays["completion_ids"].tolist() == [[5, 2, 99, 99], [7, 8, 9, 2], [4, 99, 99, 99]]
    assert arrays["mask"].sum(axis=1).tolist() == [2, 4, 1]
    assert arrays["logprobs"][0].tolist() == [-0.125, -0.25, 0.0, 0.0]
    assert arrays["group_index"].tolist() == [0, 0, 1]
    assert arrays["sample_index"].tolist() == [0, 1, 0]
    assert arrays["rewards"][0] == 1.0
    assert math.isnan(arrays["rewards"][1])  # null is never 0
    assert arrays["ok"].tolist() == [True, True, True]


def test_version_spans_become_a_version_per_token() -> None:
    group = Group(closed([entry(0, ids=(5, 6, 7, 2), spans=[(3, 0, 1), (4, 1, 4)]), entry(1, ids=(2,))]))
    assert to_arrays([group])["versions"].tolist() == [[3, 4, 4, 4], [0, -1, -1, -1]]
    assert group.samples[0].versions == (3, 4)


def test_failed_samples_keep_their_row_unless_left_out() -> None:
    group = Group(closed([entry(0), failed_entry(1), entry(2)]))
    arrays = to_arrays([group])
    assert arrays["ok"].tolist() == [True, False, True]
    assert arrays["mask"][1].sum() == 0
    assert math.isnan(arrays["rewards"][1])
    kept = to_arrays([group], keep=lambda group, sample: sample.ok)
    assert kept["sample_index"].tolist() == [0, 2]


def test_widths_round_up_and_nothing_is_a_valid_input() -> None:
    group = Group(closed([entry(0, ids=(5, 6, 2))]))
    assert to_arrays([group], pad_to_multiple=8)["completion_ids"].shape == (1, 8)
    empty = to_arrays([])
    assert {name: array.shape[0] for name, array in empty.items()} == dict.fromkeys(empty, 0)


def test_unequal_lengths_are_refused_not_padded_over() -> None:
    good = closed([entry(0, ids=(5, 6, 2))])
    sample = good.entries[0].sample
    torn = type(sample)(index=0, status=sample.status, token_ids=sample.token_ids)
    with pytest.raises(ValueError, match="3 tokens and 0 logprobs"):
        to_arrays([Group(closed([type(good.entries[0])(sample=torn)]))])


def test_advantages_by_hand() -> None:
    # Group 0: mean 0.5, population std 0.5.  Group 1: mean 2, std sqrt(8/3).
    rewards = [0.0, 1.0, 0.0, 1.0, 0.0, 2.0, 4.0]
    owners = [0, 0, 0, 0, 1, 1, 1]
    spread = math.sqrt(8 / 3)
    expected = [-1.0, 1.0, -1.0, 1.0, -2 / spread, 0.0, 2 / spread]
    np.testing.assert_allclose(group_advantages(rewards, owners, epsilon=0.0), expected, rtol=1e-12)
    with_epsilon = group_advantages(rewards, owners)
    np.testing.assert_allclose(with_epsilon[:2], [-0.5 / 0.5001, 0.5 / 0.5001], rtol=1e-12)
    np.testing.assert_allclose(group_advantages(rewards, owners, scale=False)[4:], [-2.0, 0.0, 2.0])
    np.testing.assert_allclose(group_advantages(rewards, owners, ddof=1, epsilon=0.0)[4:], [-1.0, 0.0, 1.0])


def test_a_null_reward_stays_out_of_the_baseline() -> None:
    nan = math.nan
    with_null = group_advantages([0.0, 1.0, nan], [0, 0, 0], epsilon=0.0)
    assert with_null.tolist() == [-1.0, 1.0, 0.0]  # as if the third did not exist; not as if it had scored 0


def test_groups_without_signal_have_no_advantage() -> None:
    equal = group_advantages([1.0, 1.0, 1.0], [0, 0, 0])
    alone = group_advantages([1.0, math.nan, 3.0], [0, 0, 1])
    assert equal.tolist() == [0.0, 0.0, 0.0]
    assert alone.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="equally long"):
        group_advantages([1.0], [0, 0])
