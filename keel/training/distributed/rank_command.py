"""Encode the commands rank 0 sends to other ranks: JSON arguments, samples and an objective.

The bytes are a safetensors file, so every number keeps its bits and no code runs on reading. Weights are never sent
this way.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from keel.common.sample import Sample
from keel.errors import ConfigError
from keel.objectives import Composition
from keel.signal import Objective
from keel.signal.function_objective import FunctionObjective, function_objective

_ARRAY_FIELDS = ("token_ids", "trainable", "advantage", "sampler_logprobs", "version", "teacher_logprobs", "role")
_SCALAR_FIELDS = ("group", "temperature", "split_reason", "name")
_HEADER_KEY = "header"


def encode_command(samples: Sequence[Sample] = (), objective: Objective | None = None, **arguments: Any) -> bytes:
    """Encode samples, an objective and JSON-serialisable arguments."""
    assert {*_ARRAY_FIELDS, *_SCALAR_FIELDS} == {field.name for field in dataclasses.fields(Sample)}
    tensors: dict[str, Tensor] = {}
    for index, sample in enumerate(samples):
        for field in _ARRAY_FIELDS:
            value = getattr(sample, field)
            if value is not None:
                tensors[f"{index}.{field}"] = torch.from_numpy(np.array(value))
    header = {
        "arguments": arguments,
        "samples": [[getattr(sample, field) for field in _SCALAR_FIELDS] for sample in samples],
        "objective": None if objective is None else _encode_objective(objective),
    }
    tensors[_HEADER_KEY] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    return bytes(save(tensors))


def decode_command(payload: bytes) -> tuple[dict[str, Any], list[Sample], Objective | None]:
    """Return the arguments, samples and objective passed to `encode_command`."""
    tensors = load(payload)
    header = json.loads(tensors.pop(_HEADER_KEY).numpy().tobytes())
    arrays: list[dict[str, Any]] = [{} for _ in header["samples"]]
    for key, tensor in tensors.items():
        index, _, field = key.partition(".")
        arrays[int(index)][field] = tensor.numpy()
    samples = [
        Sample(**array_fields, **dict(zip(_SCALAR_FIELDS, scalars, strict=True)))
        for array_fields, scalars in zip(arrays, header["samples"], strict=True)
    ]
    objective = None if header["objective"] is None else _decode_objective(**header["objective"])
    return header["arguments"], samples, objective


def _encode_objective(objective: Objective) -> dict[str, Any]:
    if not isinstance(objective, FunctionObjective):
        return {"name": objective.name, "composition": objective.composition.model_dump(mode="json")}
    if not objective.importable:
        raise ConfigError(
            f"the loss function {objective.name} cannot be sent to other ranks; name it as module:function, which every"
            " rank imports"
        )
    return {"name": objective.name, "function": objective.settings.model_dump(mode="json")}


def _decode_objective(
    name: str | None, composition: dict[str, Any] | None = None, function: dict[str, Any] | None = None
) -> Objective:
    if function is not None:
        return _load_function(json.dumps(function))
    return Objective(Composition.model_validate(composition), name=name)


@lru_cache(maxsize=8)
def _load_function(settings: str) -> Objective:
    """Return a loss function; the same object in each step, so that its reasons keep their codes."""
    return function_objective(json.loads(settings))
