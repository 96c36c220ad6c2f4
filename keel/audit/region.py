"""Who is dropped, as a recipe's words have it and as its gradient shows it, over a grid of (p, q) and signs of A.

The words come from `keel.config.region`, plain scalar arithmetic that shares nothing with the tensors that train.
"""

import math

import torch

from keel.audit.asking import active
from keel.audit.probes import with_advantages
from keel.audit.target import Target
from keel.config.region import refuses
from keel.signal import TokenBatch

GRID = (0.002, 0.03, 0.11, 0.27, 0.46, 0.63, 0.79, 0.93, 0.985)


def dropped_as_declared(target: Target) -> str | None:
    """Every token of the grid is dropped exactly where the gates' own words say so."""
    if target.objective is None or "step" in target.declaration.decisions:
        return None
    gates = [gate for gate in target.objective.composition.gates if gate.of == "policy/sampler"]
    if len(gates) < len(target.objective.composition.gates):
        return None  # gates between sampler and proximal policy are asked elsewhere
    points = [(p, q, sign) for p in GRID for q in GRID for sign in (1.0, -1.0)]
    logprobs = torch.tensor([math.log(p) for p, _, _ in points], dtype=torch.float64)
    sampler = torch.tensor([math.log(q) for _, q, _ in points], dtype=torch.float64)
    advantages = torch.tensor([sign for _, _, sign in points], dtype=torch.float64)
    sequence = torch.arange(len(points))
    batch = TokenBatch(
        logprobs=logprobs,
        sampler_logprobs=sampler,
        advantages=advantages,
        trainable=torch.ones(len(points), dtype=torch.bool),
        sequence=sequence,
        group=sequence,
        version=torch.zeros_like(sequence),
        proximal_logprobs=sampler,
        reference_logprobs=sampler,
        teacher_logprobs=sampler,
    )
    batch = with_advantages(target.declaration, batch, advantages)
    kept, alive = target.objective(batch).keep, active(target, batch)
    for place, (p, q, sign) in enumerate(points):
        declared = any(refuses(gate, p, q, sign) is not None for gate in gates)
        if bool(kept[place]) == declared or (declared and bool(alive[place])):
            here = "dropped" if declared else "kept"
            return f"at p = {p}, q = {q}, A = {sign:+.0f} the words say {here}, and the gradient says otherwise"
    return None
