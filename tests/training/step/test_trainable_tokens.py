"""The trainable tokens of a step keep the order of its samples."""

from typing import Any

import numpy as np
import pytest
import torch

from keel.errors import BatchError
from keel.training import Sample, TrainableTokens


def sample(**changes: Any) -> Sample:
    fields = {"token_ids": [5, 6, 7, 8], "trainable": [False, True, False, True], "advantage": 0.5, "name": "it"}
    return Sample(**(fields | changes))


def test_values_at_tokens_that_are_not_trainable_are_never_read() -> None:
    odd = sample(advantage=[np.nan, 1.0, np.inf, 2.0], sampler_logprobs=[np.nan, -1.0, np.nan, -2.0])
    batch = TrainableTokens([odd]).to_batch(torch.zeros(2))
    assert batch.advantages.tolist() == [1.0, 2.0]
    assert batch.sampler_logprobs is not None and batch.sampler_logprobs.tolist() == [-1.0, -2.0]


def test_tokens_are_ordered_sample_after_sample() -> None:
    silent = sample(trainable=[False] * 4)
    other = sample(token_ids=[1, 2, 3], trainable=[False, True, True], temperature=0.5)
    tokens = TrainableTokens([sample(), silent, other])
    assert len(tokens) == 4
    assert tokens.sample.tolist() == [0, 0, 2, 2]
    assert tokens.position.tolist() == [1, 3, 1, 2]
    assert tokens.targets.tolist() == [6, 8, 2, 3]
    assert tokens.temperature.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert [tokens.slice_of(index) for index in range(3)] == [slice(0, 2), slice(2, 2), slice(2, 4)]


def test_a_batch_has_the_fields_recorded_at_the_trainable_tokens() -> None:
    full = sample(sampler_logprobs=[0, -1, -2, -3], version=[0, 1, 2, 3], role=4, teacher_logprobs=[0, -5, -6, -7])
    batch = TrainableTokens([full]).to_batch(torch.zeros(2, dtype=torch.float64), 9)
    columns = {name: value.tolist() for name, value in batch.tensors().items()}
    assert columns == {
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


def test_a_sample_without_a_group_is_a_separate_group() -> None:
    batch = TrainableTokens([sample(group=3), sample(), sample(group=3), sample(), sample(group=-2)]).to_batch(
        torch.zeros(10)
    )
    assert batch.group is not None
    groups = batch.group[::2].tolist()
    assert groups[0] == groups[2] == 3 and groups[4] == -2 and len(set(groups)) == 4
    assert TrainableTokens([sample()]).to_batch(torch.zeros(2)).group is None


def test_a_field_missing_in_some_samples_names_a_sample_that_lacks_it() -> None:
    recorded = sample(sampler_logprobs=np.zeros(4))
    with pytest.raises(BatchError, match="sample it has no sampler_logprobs, but others do"):
        TrainableTokens([recorded, sample()]).to_batch(torch.zeros(4))
    with pytest.raises(BatchError, match="sample number 1 has no sampler_logprobs"):
        TrainableTokens([recorded, sample(name="")]).to_batch(torch.zeros(4))


def test_an_empty_list_of_samples_has_no_tokens() -> None:
    tokens = TrainableTokens([])
    assert len(tokens) == 0 and len(tokens.targets) == 0 and len(tokens.to_batch(torch.zeros(0))) == 0


def test_an_unscored_sample_cannot_be_trained() -> None:
    with pytest.raises(BatchError, match="sample it has no advantage; score it before training"):
        TrainableTokens([sample(advantage=None)]).to_batch(torch.zeros(2))
