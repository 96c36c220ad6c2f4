"""Settings that were renamed: the old name is an error that states the new one.

`RENAMED_KEYS` maps the old dotted name of a setting to its new one. `RENAMED_VALUES` maps a setting, under its current
name, to {old value: new value}. A part `*` of a name matches any single part (the name of an environment, an index in a
list); the n-th `*` of a new name takes the part that the n-th `*` of the old name matched. Both tables are read only
after validation failed, so an entry never changes the meaning of settings that load.
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


def _match(pattern: Parts, parts: Parts) -> list[str] | None:
    """Return the parts that the `*` of the pattern match, or None if the pattern does not match."""
    if len(pattern) != len(parts) or any(a not in ("*", b) for a, b in zip(pattern, parts, strict=True)):
        return None
    return [part for star, part in zip(pattern, parts, strict=True) if star == "*"]
