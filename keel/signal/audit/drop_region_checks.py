"""Check over a grid of probabilities that an objective drops the tokens its gates say it drops.

The expected region comes from `keel.objectives.scalar_gates`: scalar arithmetic that shares no code with the tensor
implementation used in training.
"""

import math

import torch

from keel.objectives.scalar_gates import dropped_side
from keel.signal import TokenBatch
from keel.signal.audit.observe import active
from keel.signal.audit.probe_batches import with_advantages
from keel.signal.audit.target import Target

GRID = (0.002, 0.03, 0.11, 0.27, 0.46, 0.63, 0.79, 0.93, 0.985)


def check_drop_region(target: Target) -> str | None:
    """Check that each token of the grid is dropped exactly where a gate of the objective says so."""
    if target.objective is None or "step" in target.declaration.decisions:
        return None
    gates = [gate for gate in target.objective.composition.gates if gate.between == "policy/sampler"]
    if len(gates) < len(target.objective.composition.gates):
        return None  # this grid does not cover gates that read the proximal policy
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
    is_active = active(target, batch)
    kept = target.objective(batch).keep
    for index, (p, q, sign) in enumerate(points):
        dropped = any(dropped_side(gate, p, q, sign) is not None for gate in gates)
        if bool(kept[index]) == dropped or (dropped and bool(is_active[index])):
            expected = "dropped" if dropped else "kept"
            return f"at p = {p}, q = {q}, A = {sign:+.0f} the token should be {expected}, and it is not"
    return None
