"""Settings of the policy: which model, what of it trains, how it is updated, what is kept of it.

Each table says what it is for; nothing here is accepted that could not act.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class LoraSettings(Settings):
    """Train low-rank adapters and leave the weights as they are."""

    rank: Count = 16
    """Rank of each adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get one (`q_proj`, `v_proj`, ...); all-linear: each but the output head. On
    Mixtral and Qwen MoE that includes the router and the experts, on gpt-oss attention only, as peft has it."""

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if isinstance(self.targets, list) and (not self.targets or "lm_head" in self.targets):
            raise setting_error(
                "{targets}: name at least one linear layer, and not the output head, which is fused with the loss",
                targets=self.targets,
            )
        return self


class ModelSettings(Settings):
    """The model that is trained."""

    name: Annotated[str, Field(min_length=1)] = "smollm2-135m"
    """A built-in name (smollm2-135m, tiny, tiny-qwen3, ...), a Hugging Face folder, or a hub name."""
    lora: LoraSettings | None = None
    """Adapters; not given: every weight trains."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """auto: bfloat16 on a GPU that has it, float32 elsewhere. Log-probs are float32 or better in any case."""
    device: str = "auto"
    """auto: the accelerator that torch finds, else cpu."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third slower."""
    sft_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Tiny models only: supervised steps on short answers before anything else, so that rewards are not all zero."""


class OptimizerSettings(Settings):
    """AdamW and its learning rate over the run."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay, on matrices only."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises from lr / (warmup_steps + 1) to lr."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up, until total_steps."""
    total_steps: Count | None = None
    """Where the decay ends; the rate stays at min_lr_ratio * lr afterwards."""
    min_lr_ratio: Share | None = None
    """The share of lr at which a decay ends; not given: 0."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.lr_schedule == "constant":
            for name in ("total_steps", "min_lr_ratio"):
                if getattr(self, name) is not None:
                    raise setting_error(
                        f'{{{name}}} has no effect with lr_schedule = "constant"', **{name: getattr(self, name)}
                    )
        elif self.total_steps is None:
            raise setting_error("{lr_schedule} needs total_steps", lr_schedule=self.lr_schedule)
        elif self.total_steps <= self.warmup_steps:
            raise setting_error(
                "{total_steps} must be above {warmup_steps}",
                total_steps=self.total_steps,
                warmup_steps=self.warmup_steps,
            )
        return self


class TrainerSettings(Settings):
    """From a step's samples to new weights."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """The update."""
    max_tokens_per_micro_batch: Count = 4096
    """Memory budget of a micro-batch, in tokens that the model computes (shared ones count once)."""
    optimizer_steps: Count = 1
    """Optimizer steps a training step is divided into, by groups (a step of fewer groups has as many as groups); with
    more than one, the proximal policy is the one before the first."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm."""
    share_prefixes: bool = True
    """Compute tokens that samples share once. Falls back, and says so, where the model does not allow it."""
    compute_entropy: bool = True
    """Also compute the entropy of the policy at each trainable token, for the metrics."""
    retain_freed_memory: bool = True
    """Linux with glibc: tell the allocator to keep freed memory, which makes steps on CPU much faster."""
    ranks: Count = 1
    """Processes that train together, each with its shard of weights, gradients and moments (FSDP2). `keel train` starts
    them on this machine; under torchrun it is as many as torchrun has started, and may be left out."""
    rank_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a rank may keep the others waiting before the run is given up."""
    master_weights: bool = False
    """Several ranks, bfloat16: keep weights and moments in float32, and compute in bfloat16."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Several ranks: what gradients are summed over ranks in."""


class CheckpointSettings(Settings):
    """What stays on disk."""

    every: Count = 10
    """Steps between two checkpoints. Steps after the last one are trained again from their record when a run goes on,
    which costs no sampling."""
    keep_last: Count = 2
    """Newest checkpoints that are always kept."""
    keep_every: Count | None = None
    """Checkpoints of every so many steps that are kept for good."""


class ReferenceSettings(Settings):
    """A frozen policy to stay close to."""

    source: Annotated[str, Field(pattern=r"^(base|step:\d+|adapter:.+|model:.+)$")] = "base"
    """`base`: the model before training; `step:N`: a checkpoint of this run; `adapter:PATH`; `model:NAME`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """With several references the drift is their weighted mean."""
