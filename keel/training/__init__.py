"""The policy: from a step's samples to new weights.

Loads models, computes log-probs without the logits and shared tokens once, takes optimizer steps, writes checkpoints
and reads references. It knows nothing of environments, engines or the loop that calls it.
"""

from keel.common.sample import Sample
from keel.training.model.checkpoint import Checkpoints
from keel.training.model.model import Model, load_model
from keel.training.model.references import References, load_references
from keel.training.step.forward import Forward
from keel.training.step.lm_head import LMHead, logprobs
from keel.training.step.step_report import StepReport, TokenReport
from keel.training.step.trainable_tokens import TrainableTokens
from keel.training.step.trainer import Trainer

__all__ = [
    "Checkpoints",
    "Forward",
    "LMHead",
    "Model",
    "References",
    "Sample",
    "StepReport",
    "TokenReport",
    "TrainableTokens",
    "Trainer",
    "load_model",
    "load_references",
    "logprobs",
]
