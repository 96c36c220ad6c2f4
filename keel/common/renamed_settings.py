"""Settings under another name, old or of another system: the error states Keel's name.

`RENAMED_KEYS` maps the old dotted name of a setting to its new one. `RENAMED_VALUES` maps a setting, under its current
name, to {old value: new value}. A part `*` of a name matches any single part (the name of an environment, an index in a
list); the n-th `*` of a new name takes the part that the n-th `*` of the old name matched. `OTHER_SYSTEMS` lists the
words of TRL, verl, prime-rl, ART, OpenRLHF and slime by the setting of Keel that they correspond to. All tables are
read only after validation failed, so an entry never changes the meaning of settings that load.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Parts = tuple[str, ...]

RENAMED_KEYS: dict[str, str] = {
    "stall_after": "stall_timeout",
    "scheduler.groups": "scheduler.groups_per_step",
    "scheduler.stale": "scheduler.on_stale",
    "scheduler.window": "scheduler.window_batches",
    "scheduler.halt_after": "scheduler.max_empty_steps",
    "scheduler.watchdog": "scheduler.rollout_timeout",
    "environments.*.limits.turns": "environments.*.limits.max_turns",
    "environments.*.limits.tokens": "environments.*.limits.max_sequence_tokens",
    "environments.*.limits.seconds": "environments.*.limits.timeout",
    "environments.*.limits.over_length": "environments.*.limits.on_overlength",
    "engine.kernels": "engine.native_kernels",
    "engine.python": "engine.vllm_python",
    "engine.publish_every": "publish.every",
    "publish.way": "publish.transport",
    "publish.address": "publish.bind_address",
    "pool.wait": "pool.ready_timeout",
    "pool.attempts": "pool.max_attempts",
    "pool.interval": "pool.poll_interval",
    "pool.list_url": "pool.discovery_url",
    "pool.server": "pool.backend",
    "evaluation.tasks": "evaluation.num_tasks",
    "evaluation.samples": "evaluation.samples_per_task",
    "metrics.custom": "metrics.custom_sink",
    "advantages.no_signal": "advantages.zero_variance_groups",
    "trainer.max_tokens": "trainer.max_tokens_per_micro_batch",
    "trainer.updates": "trainer.optimizer_steps",
    "trainer.entropy": "trainer.compute_entropy",
    "trainer.keep_memory": "trainer.retain_freed_memory",
    "trainer.optimizer.decay": "trainer.optimizer.lr_schedule",
    "trainer.optimizer.floor": "trainer.optimizer.min_lr_ratio",
    "model.warm_up_steps": "model.sft_warmup_steps",
    "launch.wait": "launch.placement_timeout",
    "launch.start": "launch.startup_timeout",
    "launch.silence": "launch.health_timeout",
    "launch.forgive": "launch.restart_reset_after",
    "launch.grace": "launch.shutdown_timeout",
    "launch.engine.kernels": "launch.engine.native_kernels",
    "launch.engine.options": "launch.engine.extra_args",
    "objective.gates.*.on": "objective.gates.*.statistic",
    "objective.gates.*.of": "objective.gates.*.between",
    "objective.weights.*.of": "objective.weights.*.between",
    "objective.penalties.*.on": "objective.penalties.*.estimator",
    "objective.penalties.*.of": "objective.penalties.*.between",
    "objective.reduction.divide_by": "objective.reduction.denominator",
    "objective.max_unusable_share": "objective.max_invalid_logprob_fraction",
    "objective.metric_tokens": "objective.metrics_sample_size",
}

RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "scheduler.on_stale": {"refuse": "drop"},
    "environments.*.limits.on_overlength": {"refuse": "drop", "cut": "truncate"},
    "engine.native_kernels": {"torch": "off"},
    "launch.engine.native_kernels": {"torch": "off"},
    "publish.in_flight": {"go_on": "continue"},
    "evaluation.when": {"ends": "start_and_end"},
    "objective.denominator": {"members": "trainable"},
    "objective.reduction.denominator": {"members": "trainable"},
}


OTHER_SYSTEMS: tuple[tuple[str, str, str], ...] = (
    ("steps", "in batches", "max_steps num_train_epochs total_epochs total_training_steps num_episodes num_rollout"),
    ("model.name", "", "model.path model_name_or_path base_model pretrain hf_checkpoint"),
    ("model.lora.rank", "", "lora_rank lora_r lora.r"),
    ("model.lora.alpha", "", "lora_alpha"),
    ("model.lora.targets", "", "lora_target_modules target_modules"),
    (
        "model.gradient_checkpointing",
        "",
        "enable_gradient_checkpointing use_gradient_checkpointing recompute_granularity",
    ),
    ("model.dtype", "", "bf16 fp16 torch_dtype param_dtype"),
    (
        "environments.NAME.name",
        "one table per environment",
        "env.id environment_ids",
    ),
    (
        "environments.NAME.rewards",
        'built-in names or "module:function"',
        "custom_rm_path rm_type reward_funcs custom_reward_function reward_function reward_fn",
    ),
    ("environments.NAME.dataset", "", "train_dataset train_files prompt_data dataset_name dataset_path"),
    (
        "environments.NAME.curriculum.order",
        '"given" keeps the order of the file',
        "shuffle shuffle_dataset rollout_shuffle data.sampler curriculum.sampler",
    ),
    (
        "environments.NAME.curriculum.band",
        'with environments.NAME.curriculum.order = "difficulty"',
        "easy_threshold hard_threshold buffer.easy_threshold buffer.hard_threshold",
    ),
    (
        "environments.NAME.curriculum.floor",
        'with environments.NAME.curriculum.order = "difficulty"',
        "easy_fraction hard_fraction",
    ),
    ("seed", "it decides the order of the tasks too", "data_seed dataset.seed rollout_seed"),
    ("environments.NAME.options", "", "args env_args environment_args env_kwargs"),
    (
        "environments.NAME.limits.max_sequence_tokens",
        "prompt and completions together",
        "seq_len max_seq_length max_prompt_length prompt_max_len max_model_len rollout_max_context_len",
    ),
    ("environments.NAME.limits.max_turns", "", "max_tool_calling_iterations max_assistant_turns"),
    (
        "environments.NAME.limits.on_overlength",
        "samples above limits.max_sequence_tokens are dropped; completions that end at sampling.max_tokens train",
        "mask_truncated_completions overlong_filter overlong_filtering",
    ),
    (
        "sampling.max_tokens",
        "",
        "max_completion_length max_response_length response_length generate_max_len max_new_tokens"
        " rollout_max_response_len max_completion_tokens",
    ),
    ("sampling.temperature", "", "rollout_temperature temperature"),
    ("sampling.stop", "", "rollout_stop"),
    (
        "scheduler.group_size",
        "",
        "num_generations n rollout_n rollouts_per_example n_samples_per_prompt trajectories_per_group"
        " rollouts_per_group num_return_sequences group_size",
    ),
    (
        "scheduler.groups_per_step",
        "in groups, each of scheduler.group_size rollouts",
        "batch_size train_batch_size rollout_batch_size generation_batch_size per_device_train_batch_size"
        " prompts_per_step groups_per_step",
    ),
    (
        "scheduler.max_in_flight",
        "",
        "max_inflight_rollouts oversampling_factor over_sampling_batch_size max_concurrent max_concurrency"
        " async_queue_size",
    ),
    ("scheduler.max_off_policy_steps", "", "max_async_level async_level max_staleness staleness_threshold"),
    ("engine.kind", "", "use_vllm vllm_mode rollout.name rollout_backend colocate"),
    (
        "launch.engine.extra_args",
        "with `keel launch`; of a server of your own, on its command line",
        "gpu_memory_utilization vllm_gpu_memory_utilization tensor_model_parallel_size tensor_parallel_size"
        " vllm_tensor_parallel_size rollout_num_gpus_per_engine",
    ),
    ("launch.engines", "with `keel launch`", "vllm_num_engines num_engines"),
    (
        "pool.urls",
        'with engine.kind = "pool"',
        "vllm_server_base_url vllm_server_host client.base_url inference_base_url",
    ),
    ("publish.transport", "", "weight_broadcast vllm_sync_backend weight_sync"),
    (
        "objective.name",
        "",
        "loss_type loss_fn loss_mode policy_loss importance_sampling_level vllm_importance_sampling_correction use_tis"
        " enable_vllm_is_correction",
    ),
    (
        "objective.eps",
        'with a clipped preset such as objective.name = "grpo"',
        "epsilon clip_ratio clip_ratio_low eps_clip",
    ),
    (
        "objective.eps_high",
        'with a clipped preset such as objective.name = "dapo"',
        "epsilon_high clip_ratio_high eps_clip_high eps_clip_low_high",
    ),
    ("objective.dual_clip", 'with objective.name = "ppo"', "delta clip_ratio_c eps_clip_c dual_clip"),
    (
        "objective.cap",
        'with objective.name = "tis"',
        "truncated_importance_sampling vllm_importance_sampling_cap tis_clip tis_imp_ratio_cap"
        " vllm_is_truncated_threshold",
    ),
    ("objective.opsm_delta", 'with objective.name = "opsm"', "off_policy_mask_threshold"),
    ("objective.diff_low", 'with objective.name = "dppo_tv"', "ipo_mask_low"),
    ("objective.diff_high", 'with objective.name = "dppo_tv"', "ipo_mask_high"),
    ("objective.mask_low", 'with objective.name = "dppo_kl"', "dppo_mask_low"),
    ("objective.mask_high", 'with objective.name = "dppo_kl"', "dppo_mask_high"),
    ("objective.ratio_low", "", "token_mask_low mask_ratio_low"),
    ("objective.ratio_high", "", "token_mask_high mask_ratio_high"),
    ("objective.reduction", "", "loss_agg_mode"),
    ("objective.reference_kl_coef", "a KL term in the loss", "beta kl_loss_coef use_kl_loss"),
    ("objective.reference_kl_estimator", "", "kl_loss_type kl_estimator"),
    ("objective.reference_kl_correction", "", "use_bias_correction_kl"),
    (
        "objective.kl_penalty_coef",
        "a KL penalty in the advantages",
        "kl_coef init_kl_coef kl_ctrl.kl_coef use_kl_in_reward",
    ),
    ("references.NAME.source", "", "ref_model ref_load ref_model_path kl_ref_adapter_path kl_penalty_reference_step"),
    ("teacher.name", "", "teacher_model teacher_model_name_or_path"),
    (
        "advantages.name",
        "",
        "adv_estimator advantage_estimator advantage_type scale_rewards norm_adv_by_std_in_grpo"
        " grpo_std_normalization normalize_advantages",
    ),
    (
        "scheduler.refill",
        "samples another group in place of one whose rewards are all equal",
        "filter_groups dynamic_filtering dynamic_sampling_filter_path",
    ),
    ("advantages.zero_variance_groups", "", "zero_advantage remove_constant_reward_groups"),
    ("trainer.optimizer.lr", "", "learning_rate actor_learning_rate lr"),
    ("trainer.optimizer.betas", "", "adam_beta1 adam_beta2 betas1 betas2 adam_betas"),
    ("trainer.optimizer.eps", "", "adam_epsilon adam_eps"),
    ("trainer.optimizer.weight_decay", "", "weight_decay l2"),
    (
        "trainer.optimizer.warmup_steps",
        "in optimizer steps",
        "lr_warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio warmup_steps",
    ),
    ("trainer.optimizer.lr_schedule", "", "lr_scheduler_type lr_scheduler lr_decay_style lr_scheduler_kwargs"),
    ("trainer.optimizer.total_steps", "the length of the run by default", "decay_steps lr_decay_iters"),
    ("trainer.optimizer.min_lr_ratio", "a fraction of lr", "min_lr min_lr_rate"),
    ("trainer.max_grad_norm", "", "grad_clip clip_grad max_norm max_grad_norm"),
    (
        "trainer.max_tokens_per_micro_batch",
        "in tokens; gradients are accumulated over as many micro-batches as the batch needs",
        "gradient_accumulation_steps micro_batch_size micro_train_batch_size ppo_micro_batch_size"
        " ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu packed_sequence_length"
        " grad_accumulation_sequences",
    ),
    (
        "trainer.optimizer_steps",
        "the number of optimizer steps that a batch is divided among",
        "ppo_mini_batch_size mini_batch_size global_batch_size steps_per_generation num_steps_per_rollout",
    ),
    ("trainer.ranks", "", "num_processes n_gpus_per_node actor_num_gpus_per_node world_size num_train_gpus"),
    ("checkpoints.every", "", "save_steps save_freq save_interval ckpt.interval"),
    ("checkpoints.keep_last", "", "save_total_limit max_ckpt_num max_actor_ckpt_to_keep"),
    ("checkpoints.keep_every", "", "keep_interval"),
    ("evaluation.every", "", "eval_steps test_freq eval_interval eval.interval"),
    ("evaluation.when", "", "eval_strategy val_before_train eval_on_start"),
    ("evaluation.num_tasks", "", "num_examples eval_num_examples val_batch_size"),
    (
        "evaluation.samples_per_task",
        "",
        "num_generations_eval val_kwargs.n evaluation.n eval.n eval.rollouts_per_example n_samples_per_eval_prompt"
        " eval_n_samples_per_prompt",
    ),
    ("metrics.wandb", "", "use_wandb report_to logger"),
    ("metrics.project", "", "project_name wandb_project"),
    (
        "",
        "Keel trains on every batch once; trainer.optimizer_steps divides a batch among several optimizer steps",
        "num_iterations ppo_epochs max_epochs update_epochs",
    ),
    (
        "",
        "Keel has no critic: a baseline comes from the group (advantages.name)",
        "critic critic_learning_rate gamma lam lambd gae_lambda vf_coef cliprange_value value_clip",
    ),
    (
        "",
        "Keel has no entropy bonus; trainer.compute_entropy reports the entropy",
        "entropy_coeff entropy_coef entropy_loss_coef ent_coef",
    ),
    (
        "",
        "the folder of a run is an argument: keel train RECIPE --run DIR",
        "output_dir default_local_dir save_path ckpt_path experiment_name run_name",
    ),
)
"""(Keel's setting, a remark, the words of other systems). A word with dots matches the last parts of a name. An empty
setting means that Keel has no equivalent, and the remark says why."""

_SETTING_OF_WORD = {word: (setting, note) for setting, note, words in OTHER_SYSTEMS for word in words.split()}


def renamed_key(name: str) -> str | None:
    """Return the current name of a renamed setting, or None."""
    parts = tuple(name.split("."))
    for old, new in RENAMED_KEYS.items():
        matched = _match(tuple(old.split(".")), parts)
        if matched is not None:
            wildcards = iter(matched)
            return ".".join(next(wildcards) if part == "*" else part for part in new.split("."))
    return None


def renamed_value(name: str, value: Any) -> Any:
    """Return the current form of a renamed value, or None."""
    if not isinstance(value, str | int | float):
        return None
    for setting, values in RENAMED_VALUES.items():
        if value in values and _match(tuple(setting.split(".")), tuple(name.split("."))) is not None:
            return values[value]
    return None


def renamed_keys_in(name: str, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (old name, value, new name) for an unknown setting, or for the settings inside it if it is a table."""
    new = renamed_key(name)
    if new is not None:
        yield name, value, new
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from renamed_keys_in(f"{name}.{key}", inner)


def other_system_hints(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, hint) for an unknown setting that has the name of another system, or for those in a table."""
    parts = name.replace("-", "_").split(".")
    for start in range(len(parts)):
        if (match := _SETTING_OF_WORD.get(".".join(parts[start:]))) is not None:
            setting, note = match
            yield name, f"Keel's name is {setting}{note and f' ({note})'}" if setting else note
            return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from other_system_hints(f"{name}.{key}", inner)


def _match(pattern: Parts, parts: Parts) -> list[str] | None:
    """Return the parts that the `*` of the pattern match, or None if the pattern does not match."""
    if len(pattern) != len(parts) or any(a not in ("*", b) for a, b in zip(pattern, parts, strict=True)):
        return None
    return [part for star, part in zip(pattern, parts, strict=True) if star == "*"]
