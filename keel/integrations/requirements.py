"""Decide which objectives another trainer can compute exactly, from what each side needs and gives.

What an objective needs follows from its composition; what a trainer gives is declared once per host. An objective
that needs something its host does not give is refused with the setting that needs it: nothing is approximated.
Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.errors import ConfigError
from keel.objectives import PRESETS, Composition

Need = Literal[
    "sampler_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "versions",
    "roles",
    "complete_sequences",
    "token_count",
    "sequence_count",
    "step_logprobs",
]
"""Something an objective reads besides the policy's log-probs, the advantages and the mask."""

MEANINGS: dict[Need, str] = {
    "sampler_logprobs": "log-probs recorded by the sampler",
    "proximal_logprobs": "log-probs of the policy at the start of the step",
    "reference_logprobs": "log-probs of a reference model",
    "teacher_logprobs": "log-probs of a teacher",
    "versions": "the version that sampled each token",
    "roles": "the role of each token",
    "complete_sequences": "all tokens of a sequence in one call",
    "token_count": "the number of trainable tokens of the whole step",
    "sequence_count": "the number of sequences of the whole step",
    "step_logprobs": "log-probs of the policy over the whole step before the first gradient",
}


@dataclass(frozen=True, kw_only=True)
class Host:
    """Another trainer, and what it gives to a loss function that runs inside it."""

    name: str
    """Name in errors and tables."""
    gives: Mapping[Need, str]
    """What the loss can read, and where it comes from."""
    lacks: Mapping[Need, str] = field(default_factory=dict)
    """Why something is missing, where that is worth saying."""

    def missing(self, composition: Composition) -> list[str]:
        """Return a sentence for each need of the objective that this trainer does not meet."""
        sentences = []
        for need, setting in requirements(composition).items():
            if need not in self.gives:
                why = f": {self.lacks[need]}" if need in self.lacks else ""
                sentences.append(f"{setting} needs {MEANINGS[need]}, which {self.name} does not give{why}")
        return sentences

    def check(self, composition: Composition, name: str | None = None) -> None:
        """Raise a `ConfigError` if the objective cannot be computed exactly in this trainer."""
        missing = self.missing(composition)
        if missing:
            label = f'objective "{name}"' if name else "the objective"
            raise ConfigError(f"{label} cannot be computed exactly in {self.name}:\n- " + "\n- ".join(missing))


def requirements(composition: Composition) -> dict[Need, str]:
    """Return what an objective needs, each with the setting that needs it."""
    needs: dict[Need, str] = {}
    if composition.reads("sampler"):
        needs["sampler_logprobs"] = "the objective"
    if composition.reads("proximal"):
        if composition.proximal == "interpolated":
            needs["versions"] = 'proximal = "interpolated"'
        else:
            needs["proximal_logprobs"] = "a ratio against the proximal policy"
    if composition.reads("reference"):
        coefficient = f"kl_penalty_coef = {composition.kl_penalty_coef}"
        needs["reference_logprobs"] = coefficient if composition.kl_penalty_coef else "a KL term against the reference"
    if composition.reads("teacher"):
        needs["teacher_logprobs"] = f"teacher_tau = {composition.teacher_tau}"
    if composition.roles is not None:
        needs["roles"] = f"roles = {composition.roles}"
    by_sequence = _sequence_part(composition)
    if by_sequence:
        needs["complete_sequences"] = by_sequence
    over = composition.reduction.over
    needs["token_count" if over == "tokens" else "sequence_count"] = f'reduction over "{over}"'
    for part in composition.step_logprob_parts():
        needs.setdefault("step_logprobs", part)
    return needs


def _sequence_part(composition: Composition) -> str | None:
    """Return the first setting that decides or weighs whole sequences."""
    for gate in composition.gates:
        if gate.scope == "sequence":
            return f'the gate on {gate.statistic} with scope = "sequence"'
    if composition.policy.level == "sequence":
        return 'policy.level = "sequence"'
    for weight in composition.weights:
        if weight.level != "token":
            return f'a weight with level = "{weight.level}"'
    return 'reduction over "sequences"' if composition.reduction.over == "sequences" else None


def preset_table(host: Host) -> list[tuple[str, str, str]]:
    """Return name, "yes" or "no", and what is noteworthy for each preset with its default parameters."""
    rows = []
    for name, preset in PRESETS.items():
        _, composition = preset.resolve({})
        missing = host.missing(composition)
        notes: list[Any] = missing or _notes(host, composition)
        rows.append((name, "no" if missing else "yes", "; ".join(notes)))
    return rows


def _notes(host: Host, composition: Composition) -> list[str]:
    """Return where a host gets what most objectives do not need."""
    common = ("sampler_logprobs", "token_count", "sequence_count", "complete_sequences")
    return [f"{MEANINGS[need]}: {host.gives[need]}" for need in requirements(composition) if need not in common]
