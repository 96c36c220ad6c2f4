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

from keel.objectives import Composition
from keel.signal import Objective
from keel.training.step.sample import Sample

_ARRAYS = ("token_ids", "trainable", "advantage", "sampler_logprobs", "version", "teacher_logprobs", "role")
_PLAIN = ("group", "temperature", "name")
_SAID = "said"


def pack(samples: Sequence[Sample] = (), objective: Objective | None = None, **said: Any) -> bytes:
    """`said` is whatever JSON can hold."""
    assert {*_ARRAYS, *_PLAIN} == {field.name for field in dataclasses.fields(Sample)}
    tensors: dict[str, Tensor] = {}
    for number, sample in enumerate(samples):
        for field in _ARRAYS:
            value = getattr(sample, field)
            if value is not None:
                tensors[f"{number}.{field}"] = torch.from_numpy(np.array(value))
    content = {
        "said": said,
        "samples": [[getattr(sample, field) for field in _PLAIN] for sample in samples],
        "objective": None if objective is None else [objective.name, objective.composition.model_dump(mode="json")],
    }
    tensors[_SAID] = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
    return bytes(save(tensors))


def unpack(content: bytes) -> tuple[dict[str, Any], list[Sample], Objective | None]:
    """The plain values, the samples and the objective that `pack` was given."""
    tensors = load(content)
    found = json.loads(tensors.pop(_SAID).numpy().tobytes())
    arrays: list[dict[str, Any]] = [{} for _ in found["samples"]]
    for key, tensor in tensors.items():
        number, _, field = key.partition(".")
        arrays[int(number)][field] = tensor.numpy()
    samples = [
        Sample(**own, **dict(zip(_PLAIN, plain, strict=True)))
        for own, plain in zip(arrays, found["samples"], strict=True)
    ]
    objective = None
    if found["objective"] is not None:
        name, composition = found["objective"]
        objective = Objective(Composition.model_validate(composition), name=name)
    return found["said"], samples, objective
