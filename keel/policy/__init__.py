"""The policy: from a step's samples to new weights.

Loads models, computes log-probs without the logits and shared tokens once, takes optimizer steps, writes checkpoints
and reads references. It knows nothing of environments, engines or the loop that calls it.
"""

from keel.policy.checkpoint import Checkpoints
from keel.policy.forward import Forward
from keel.policy.head import Head, logprobs
from keel.policy.model import Model, load_model
from keel.policy.references import References, prepare
from keel.policy.report import StepReport, TokenAccount
from keel.policy.sample import Sample, Tokens
from keel.policy.trainer import Trainer

__all__ = [
    "Checkpoints",
    "Forward",
    "Head",
    "Model",
    "References",
    "Sample",
    "StepReport",
    "TokenAccount",
    "Tokens",
    "Trainer",
    "load_model",
    "logprobs",
    "prepare",
]
