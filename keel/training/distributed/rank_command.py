"""What rank 0 sends to the other ranks: plain values, samples and an objective, as bytes and back.

The bytes are a safetensors file, so every number arrives with the bits that it had and nothing runs when it is read.
Weights never travel this way.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from keel.common.sample import Sample
from keel.objectives import Composition
from keel.signal import Objective

_ARRAY_FIELDS = ("token_ids", "trainable", "advantage", "sampler_logprobs", "version", "teacher_logprobs", "role")
_SCALAR_FIELDS = ("group", "temperature", "split_reason", "name")
_HEADER_KEY = "said"


def encode_command(samples: Sequence[Sample] = (), objective: Objective | None = None, **arguments: Any) -> bytes:
    """`said` is whatever JSON can hold."""
    assert {*_ARRAY_FIELDS, *_SCALAR_FIELDS} == {field.name for field in dataclasses.fields(Sample)}
    tensors: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        for field in _ARRAY_FIELDS:
            value = getattr(sample, field)
            if value is not None:
                tensors[f"{number}.{field}"] = torch.from_numpy(np.array(value))
    content = {
        "said": arguments,
        "samples": [[getattr(sample, field) for field in _SCALAR_FIELDS] for sample in samples],
        "objective": None if objective is None else [objective.name, objective.composition.model_dump(mode="json")],
    }
    tensors[_HEADER_KEY] = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    return bytes(save(tensors))


def decode_command(payload: bytes) -> tuple[dict[str, Any], list[Sample], Objective | None]:
    """The plain values, the samples and the objective that `pack` was given."""
    tensors = load(payload)
    found = json.loads(tensors.pop(_HEADER_KEY).numpy().tobytes())
    arrays: list[dict[str, Any]] = [{} for _ in found["samples"]]
    for key, tensor in tensors.items():
        number, _, field = key.partition(".")
        arrays[int(number)][field] = tensor.numpy()
    samples = [
        Sample(**own, **dict(zip(_SCALAR_FIELDS, plain, strict=True)))
        for own, plain in zip(arrays, found["samples"], strict=True)
    ]
    objective = None
    if found["objective"] is not None:
        name, composition = found["objective"]
        objective = Objective(Composition.model_validate(composition), name=name)
    return found["said"], samples, objective
