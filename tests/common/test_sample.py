"""A sample checks its fields when it is created, and survives a round trip through plain values."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keel.common.sample import Sample
from keel.errors import BatchError


def sample(**changes: Any) -> Sample:
    fields = {"token_ids": [5, 6, 7, 8], "trainable": [False, True, False, True], "advantage": 0.5, "name": "it"}
    return Sample(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "token_ids has shape [0]"),
        ({"token_ids": [[1, 2]]}, "token_ids has shape [1, 2]"),
        ({"token_ids": [1.0, 2.0, 3.0, 4.0]}, "token_ids has dtype float64"),
        ({"token_ids": [1, -2, 3, 4]}, "token_ids holds -2"),
        ({"trainable": [0, 1, 0, 1]}, "trainable is int64"),
        ({"trainable": [False, True]}, "trainable is bool of shape [2]; it must be 4 booleans"),
        ({"trainable": [True, True, False, True]}, "trainable marks the first token"),
        ({"advantage": [1.0, 2.0]}, "advantage has shape [2]; the sample has 4 tokens"),
        ({"advantage": np.nan}, "advantage is not finite on a trainable token"),
        ({"advantage": [0.0, np.inf, 0.0, 0.0]}, "advantage is not finite on a trainable token"),
        ({"sampler_logprobs": [0.0]}, "sampler_logprobs has shape [1]"),
        ({"sampler_logprobs": -1.0}, "sampler_logprobs has shape []"),
        ({"teacher_logprobs": [0.0] * 5}, "teacher_logprobs has shape [5]"),
        ({"version": 1.5}, "version has dtype float64"),
        ({"role": [0, 1]}, "role has shape [2]"),
        ({"temperature": 0.0}, "temperature = 0.0 must be above 0"),
        ({"temperature": np.nan}, "temperature = nan must be above 0"),
    ],
)
def test_an_invalid_sample_names_itself_its_field_and_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError) as error:
        sample(**changes)
    assert str(error.value).startswith("sample it: ") and message in str(error.value)


def test_the_model_reads_every_token_before_the_last_trainable_one() -> None:
    assert sample().inputs.tolist() == [5, 6, 7]
    assert sample(trainable=[False, True, False, False]).inputs.tolist() == [5]
    assert sample(trainable=[False] * 4).inputs.tolist() == []


def test_scoring_a_sample_adds_the_advantage_and_checks_it() -> None:
    unscored = Sample(token_ids=[1, 2], trainable=[False, True], temperature=0.0)
    with pytest.raises(BatchError, match=r"temperature = 0\.0 must be above 0"):
        replace(unscored, advantage=1.0)
    scored = replace(sample(advantage=None), advantage=-1.5, group=2)
    assert np.asarray(scored.advantage).tolist() == [-1.5] * 4 and scored.group == 2


def test_versions_are_those_of_the_trainable_tokens() -> None:
    assert sample(version=[9, 3, 1, 5]).trainable_versions.tolist() == [3, 5]
    assert sample(version=[9, 3, 1, 5]).oldest_version == 3
    assert sample().oldest_version is None
    assert sample(version=2, trainable=[False] * 4).oldest_version is None


def test_plain_values_restore_an_equal_sample() -> None:
    original = sample(sampler_logprobs=[0.0, -0.1, np.nan, -1 / 3], version=[-1, 3, -1, 4], split_reason="start")
    restored = Sample(**json.loads(json.dumps(original.as_lists())))
    assert restored == original and hash(restored) == hash(original)
    assert original != replace(original, advantage=0.25) and original != replace(original, teacher_logprobs=[0.0] * 4)
