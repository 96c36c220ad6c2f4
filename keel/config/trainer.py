"""Settings of the policy: the model, its adapters, the optimizer, the trainer, checkpoints and references.

A setting that would have no effect is an error.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class LoraSettings(Settings):
    """Train low-rank adapters and freeze the weights of the model."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get an adapter (`q_proj`, `v_proj`, ...). all-linear: every linear layer except
    the output head, as peft defines it: on Mixtral and Qwen MoE this includes the router and the experts, on gpt-oss
    only attention."""

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if isinstance(self.targets, list) and (not self.targets or "lm_head" in self.targets):
            raise setting_error(
                "{targets} must name at least one linear layer, and not the output head, which is fused with the loss",
                targets=self.targets,
            )
        return self


class ModelSettings(Settings):
    """The model that is trained."""

    name: Annotated[str, Field(min_length=1)] = "smollm2-135m"
    """A built-in name (smollm2-135m, tiny, tiny-qwen3, ...), a Hugging Face model folder, a Hugging Face Hub name, or
    the folder of a run: its newest checkpoint, with an adapter merged into its base."""
    lora: LoraSettings | None = None
    """LoRA adapters. By default all weights are trained."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the weights. auto: bfloat16 on GPUs that support it, float32 elsewhere. Log-probs are always computed in
    float32 or better."""
    device: str = "auto"
    """Device of the model, such as "cuda:0". auto: the accelerator that torch finds, or cpu."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them. Uses less memory and is about a third
    slower."""
    sft_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Supervised steps on short completions before the run starts, so that rewards are not all zero. Tiny models
    only."""


class OptimizerSettings(Settings):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Constant added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, applied to matrices only."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from lr / (warmup_steps + 1) to lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up, until total_steps."""
    total_steps: Count | None = None
    """Optimizer step at which the decay ends; the learning rate stays at min_lr_ratio * lr afterwards. Defaults to the
    length of the run, steps * trainer.optimizer_steps, and must not be below it."""
    min_lr_ratio: Fraction | None = None
    """Fraction of lr at which the decay ends. Defaults to 0."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.lr_schedule == "constant":
            for name in ("total_steps", "min_lr_ratio"):
                if getattr(self, name) is not None:
                    raise setting_error(
                        f'{{{name}}} has no effect with lr_schedule = "constant"', **{name: getattr(self, name)}
                    )
        elif self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise setting_error(
                "{total_steps} must be above {warmup_steps}",
                total_steps=self.total_steps,
                warmup_steps=self.warmup_steps,
            )
        return self


class TrainerSettings(Settings):
    """How a step's samples become new weights."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer and its learning-rate schedule."""
    max_tokens_per_micro_batch: Count = 4096
    """Maximum number of tokens the model computes in one micro-batch. Shared prefix tokens count once."""
    optimizer_steps: Count = 1
    """Optimizer steps per training step. The groups of the batch are divided among them; a batch with fewer groups
    takes one step per group. With more than one, the proximal policy is the policy before the first of them."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down."""
    share_prefixes: bool = True
    """Compute prefixes that samples share only once. Models that do not support it are trained without it, with a
    message that says why."""
    compute_entropy: bool = True
    """Compute the entropy of the policy at each trainable token, for the metrics."""
    retain_freed_memory: bool = True
    """Let the allocator keep freed memory, which makes steps on CPU much faster. Linux with glibc only."""
    ranks: Count = 1
    """Processes that train together, each with a shard of weights, gradients and optimizer state (FSDP2). `keel train`
    starts them on this machine. Under torchrun it is the number of processes torchrun started, and may be omitted."""
    rank_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds the other ranks wait for a rank before the run stops."""
    master_weights: bool = False
    """Keep weights and optimizer state in float32 and compute in bfloat16. Needs several ranks and bfloat16."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks. Needs several ranks."""


class CheckpointSettings(Settings):
    """Which checkpoints are written and kept."""

    every: Count = 10
    """Steps between two checkpoints. On resume, steps after the last checkpoint are trained again from their recorded
    rollouts, without sampling."""
    keep_last: Count = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Count | None = None
    """Also keep every checkpoint whose step is a multiple of this number."""


class ReferenceSettings(Settings):
    """A frozen reference model for a KL penalty."""

    source: Annotated[str, Field(pattern=r"^(base|step:\d+|adapter:.+|model:.+)$")] = "base"
    """`base`: the model before training; `step:N`: a checkpoint of this run; `adapter:PATH`: a LoRA adapter;
    `model:NAME`: another model."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this reference. With several references, the KL is their weighted mean."""
