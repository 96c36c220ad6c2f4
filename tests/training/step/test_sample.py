"""Samples: wrong ones name their field when they are made, and a step's tokens stand in the order of its samples."""

from typing import Any

import numpy as np
import pytest
import torch

from keel.errors import BatchError
from keel.training import Sample, TrainableTokens


def sample(**changes: Any) -> Sample:
    given = {"token_ids": [5, 6, 7, 8], "trainable": [False, True, False, True], "advantage": 0.5, "name": "it"}
    return Sample(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
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
def test_a_wrong_sample_names_itself_its_field_and_the_value(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BatchError) as refusal:
        sample(**changes)
    assert str(refusal.value).startswith("sample it: ") and says in str(refusal.value)


def test_what_lies_at_tokens_that_do_not_train_is_never_read() -> None:
    odd = sample(advantage=[np.nan, 1.0, np.inf, 2.0], sampler_logprobs=[np.nan, -1.0, np.nan, -2.0])
    batch = TrainableTokens([odd]).to_batch(torch.zeros(2))
    assert batch.advantages.tolist() == [1.0, 2.0]
    assert batch.sampler_logprobs is not None and batch.sampler_logprobs.tolist() == [-1.0, -2.0]


def test_the_model_reads_all_before_the_last_trainable_token() -> None:
    assert sample().inputs.tolist() == [5, 6, 7]
    assert sample(trainable=[False, True, False, False]).inputs.tolist() == [5]
    assert sample(trainable=[False] * 4).inputs.tolist() == []


def test_tokens_stand_sample_after_sample() -> None:
    silent = sample(trainable=[False] * 4)
    other = sample(token_ids=[1, 2, 3], trainable=[False, True, True], temperature=0.5)
    tokens = TrainableTokens([sample(), silent, other])
    assert len(tokens) == 4
    assert tokens.sample.tolist() == [0, 0, 2, 2]
    assert tokens.position.tolist() == [1, 3, 1, 2]
    assert tokens.targets.tolist() == [6, 8, 2, 3]
    assert tokens.temperature.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert [tokens.slice_of(number) for number in range(3)] == [slice(0, 2), slice(2, 2), slice(2, 4)]


def test_a_batch_has_the_fields_that_were_recorded_at_the_tokens_that_train() -> None:
    full = sample(sampler_logprobs=[0, -1, -2, -3], version=[0, 1, 2, 3], role=4, teacher_logprobs=[0, -5, -6, -7])
    batch = TrainableTokens([full]).to_batch(torch.zeros(2, dtype=torch.float64), 9)
    given = {name: value.tolist() for name, value in batch.tensors().items()}
    assert given == {
        "logprobs": [0, 0],
        "sampler_logprobs": [-1, -3],
        "advantages": [0.5, 0.5],
        "trainable": [True, True],
        "sequence": [0, 0],
        "version": [1, 3],
        "teacher_logprobs": [-5, -7],
        "token_ids": [6, 8],
        "role": [4, 4],
    }
    assert batch.trainer_version == 9 and batch.sampler_logprobs.dtype == torch.float64


def test_a_sample_without_a_group_is_one_of_its_own() -> None:
    batch = TrainableTokens([sample(group=3), sample(), sample(group=3), sample(), sample(group=-2)]).to_batch(
        torch.zeros(10)
    )
    assert batch.group is not None
    groups = batch.group[::2].tolist()
    assert groups[0] == groups[2] == 3 and groups[4] == -2 and len(set(groups)) == 4
    assert TrainableTokens([sample()]).to_batch(torch.zeros(2)).group is None


def test_a_field_that_only_some_samples_have_names_one_that_lacks_it() -> None:
    recorded = sample(sampler_logprobs=np.zeros(4))
    with pytest.raises(BatchError, match="sample it has no sampler_logprobs, and others do"):
        TrainableTokens([recorded, sample()]).to_batch(torch.zeros(4))
    with pytest.raises(BatchError, match="sample number 1 has no sampler_logprobs"):
        TrainableTokens([recorded, sample(name="")]).to_batch(torch.zeros(4))


def test_no_samples_are_no_tokens() -> None:
    tokens = TrainableTokens([])
    assert len(tokens) == 0 and len(tokens.targets) == 0 and len(tokens.to_batch(torch.zeros(0))) == 0
