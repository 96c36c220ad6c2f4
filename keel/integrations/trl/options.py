"""Check the options of TRL's trainers that Keel's objective replaces. Imports neither TRL nor torch.

An option of `GRPOConfig` that acts only inside TRL's loss has no effect once Keel computes the loss: setting it to
anything but its default is an error that names the setting of the objective to use instead.
"""

import copy
import dataclasses
from typing import Any

from keel.errors import ConfigError
from keel.integrations.requirements import Host
from keel.objectives import Composition

GRPO_HOST = Host(
    name="TRL's GRPOTrainer",
    gives={
        "sampler_logprobs": "from vLLM or rollout_func; recomputed by the trainer when model.generate samples",
        "proximal_logprobs": "the policy that the generation batch was sampled from",
        "reference_logprobs": "TRL's reference model",
        "versions": "the optimizer step at which the completion was sampled",
        "complete_sequences": "a micro-batch holds whole completions",
        "token_count": "counted over the buffered micro-batches and all ranks",
        "sequence_count": "counted over the buffered micro-batches and all ranks",
        "step_logprobs": "a first forward pass over the step if gradient_accumulation_steps > 1",
    },
    lacks={"teacher_logprobs": "it has no teacher model", "roles": "its completions carry no roles"},
)


def async_host(gradient_accumulation_steps: int) -> Host:
    """Return what `AsyncGRPOTrainer` gives, which depends on the number of micro-batches of a step."""
    gives = {
        "sampler_logprobs": "from the rollout worker",
        "proximal_logprobs": "the policy itself: every sample trains in one step",
        "complete_sequences": "a packed row holds whole completions",
        "token_count": "counted over the micro-batches of the step",
        "sequence_count": "counted over the micro-batches of the step",
    }
    lacks = {
        "reference_logprobs": "it has no reference model",
        "teacher_logprobs": "it has no teacher model",
        "roles": "its samples carry no roles",
        "versions": "its collator drops the version of a sample",
    }
    if gradient_accumulation_steps == 1:
        gives["step_logprobs"] = "the micro-batch is the step"
    else:
        lacks["step_logprobs"] = (
            f"with gradient_accumulation_steps = {gradient_accumulation_steps} it computes one micro-batch at a time;"
            " set gradient_accumulation_steps = 1 and a larger per_device_train_batch_size"
        )
    return Host(name="TRL's AsyncGRPOTrainer", gives=gives, lacks=lacks)  # type: ignore[arg-type]


REPLACED_BY = {
    "loss_type": 'the name of a preset, as in objective="dapo"',
    "epsilon": 'the parameter eps, as in objective={"name": "dapo", "eps": 0.2}',
    "epsilon_high": "the parameter eps_high",
    "delta": "the parameter dual_clip of the preset ppo, which bounds negative advantages only",
    "importance_sampling_level": "the presets gspo and luspo",
    "sapo_temperature_neg": "the parameter tau_negative of the preset sapo",
    "sapo_temperature_pos": "the parameter tau_positive of the preset sapo",
    "vespo_k_pos": "the parameter k_positive of the preset vespo",
    "vespo_lambda_pos": "the parameter rate_positive of the preset vespo",
    "vespo_k_neg": "the parameter k_negative of the preset vespo",
    "vespo_lambda_neg": "the parameter rate_negative of the preset vespo",
    "off_policy_mask_threshold": "the preset opsm with its parameter opsm_delta",
    "use_bias_correction_kl": "the parameter reference_kl_correction, which is off by default",
    "vllm_importance_sampling_mode": "the presets tis and mis with their parameter level",
    "vllm_importance_sampling_clip_max": "the parameter cap of the preset tis, or ratio_high of mis",
    "vllm_importance_sampling_clip_min": "the parameter ratio_low of the preset mis",
    "vllm_importance_sampling_cap": "the parameter cap of the preset tis",
    "top_entropy_quantile": None,
    "entropy_coef": None,
    "use_adaptive_entropy": None,
}
"""Options of `GRPOConfig` that only TRL's loss reads, and what to use instead; None if there is no equivalent."""

TRUNCATING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Options that sample from another distribution than the one log-probs are computed for, and their neutral values."""


def check_replaced(args: Any, trainer: str) -> None:
    """Raise a `ConfigError` for options that have no effect because the objective computes the loss."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    config = type(args).__name__
    for name, instead in REPLACED_BY.items():
        value = getattr(args, name, None)
        if name in defaults and value != defaults[name]:
            hint = f"use {instead}" if instead else "Keel's objectives have no equivalent; leave it at its default"
            raise ConfigError(f"{config}.{name} = {value!r} has no effect with {trainer}: {hint}")


def truncating_options(args: Any) -> list[str]:
    """Return the options that make the sampler draw from a changed distribution, as `name = value`."""
    changed = [(name, getattr(args, name)) for name, neutral in TRUNCATING.items() if getattr(args, name) != neutral]
    # 0 and None are both neutral for top_k and min_p
    return [f"{name} = {value}" for name, value in changed if value or name in ("top_p", "repetition_penalty")]


def prepare_grpo_args(args: Any, composition: Composition, *, recorded: bool) -> Any:
    """Return a copy of a `GRPOConfig` for TRL's own constructor, after checking it against the objective.

    `recorded` says whether the sampler records log-probs (vLLM, rollout_func). In the copy, `beta` is the objective's
    coefficient, so that TRL loads and applies the reference model, and TRL's importance sampling is off.
    """
    check_replaced(args, "KeelGRPOTrainer")
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ConfigError(
            f"GRPOConfig.steps_per_generation = {args.steps_per_generation} must be a multiple of"
            f" gradient_accumulation_steps = {args.gradient_accumulation_steps}: otherwise a step is trained before all"
            " of its completions are sampled, and its denominator is not known"
        )
    truncating = truncating_options(args)
    if truncating and not recorded:
        raise ConfigError(
            f"GRPOConfig.{truncating[0]} changes the distribution that model.generate samples from, and generate"
            " records no log-probs: they would be recomputed without it. Set it to its default, or sample with vLLM or"
            " rollout_func=keel_rollout()"
        )
    prepared = copy.copy(args)
    prepared.beta = _reference_coefficient(args.beta, composition)
    prepared.vllm_importance_sampling_correction = False
    return prepared


def _reference_coefficient(beta: float, composition: Composition) -> float:
    """Return a nonzero value if the objective reads the reference. TRL loads the reference model if beta is not 0."""
    if not composition.reads("reference"):
        if beta:
            raise ConfigError(
                f"GRPOConfig.beta = {beta} has no effect: the objective has no reference term; set reference_kl_coef ="
                f' {beta}, as in objective={{"name": "dapo", "reference_kl_coef": {beta}}}'
            )
        return 0.0
    penalties = [penalty.coef for penalty in composition.penalties if penalty.between == "policy/reference"]
    coefficient = penalties[0] if penalties else composition.kl_penalty_coef
    if beta not in (0, coefficient):
        raise ConfigError(
            f"GRPOConfig.beta = {beta} contradicts the objective, whose coefficient is {coefficient}; leave beta at 0"
        )
    return coefficient
