"""Train a policy: turn the samples of a step into new weights.

Loads models, computes log-probs (each shared prefix once, without materialising the logits), takes optimizer steps,
writes checkpoints and loads references. Independent of environments, engines and the training loop.
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
