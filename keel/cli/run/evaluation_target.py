"""What `keel eval` evaluates: a checkpoint of a run, a model in this process, or a model behind an endpoint; and on
which environments."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keel.errors import ConfigError

if TYPE_CHECKING:
    from keel.config import EnvironmentSettings, RunSettings, Sampling
    from keel.inference.local.local_engine import LocalEngine
    from keel.inference.pool.chat_endpoint import ChatEndpoint
    from keel.training import Model

DATASET = "dataset"
"""Name of the environment of --dataset."""


@dataclass(frozen=True)
class EvaluationTarget:
    """The model to evaluate and its settings."""

    settings: "RunSettings"
    weights: str
    """Folder or name of the model, for display."""
    step: int | None = None
    checkpoint: Path | None = None
    endpoint: "ChatEndpoint | None" = None
    """The endpoint that samples; None: this process does."""

    def load(self) -> "tuple[Model, LocalEngine]":
        """Load the model and an engine that samples from it. Must be called in an event loop."""
        from keel.config import EngineSettings
        from keel.inference.local.local_engine import LocalEngine
        from keel.training import load_model
        from keel.training.step.malloc import retain_freed_memory

        retain_freed_memory(self.settings.trainer.retain_freed_memory)
        model_settings = self.settings.model.model_copy(update={"lora": None})
        if self.checkpoint is not None and self.settings.model.lora is None:
            model_settings = model_settings.model_copy(update={"name": str(self.checkpoint), "sft_warmup_steps": 0})
        model = load_model(model_settings, self.settings.seed)
        engine = EngineSettings(max_batch=self.settings.engine.max_batch)
        return model, LocalEngine(model.network, model.tokenizer, engine, version=self.step or 0)


def resolve_target(args: argparse.Namespace) -> EvaluationTarget:
    """Return the run, model or endpoint that the arguments name."""
    if is_run(args.target):
        for name in ("recipe", "model", "url"):
            if value := getattr(args, name):
                raise ConfigError(
                    f"--{name} {value} has no effect: {args.target} is a run with its own settings; remove it"
                )
        return _run_target(args)
    if args.step is not None:
        raise ConfigError(f"--step {args.step} has no effect: {args.target} is not a run (it has no config.toml)")
    if args.api_key_env is not None and args.url is None:
        raise ConfigError(f"--api-key-env {args.api_key_env} has no effect without --url")
    if args.url is not None:
        return _endpoint_target(args)
    return _model_target(args)


def is_run(target: str | None) -> bool:
    return target is not None and (Path(target) / "config.toml").is_file()


def _load_settings(args: argparse.Namespace, recipe: str | Path | None) -> "RunSettings":
    """Return the settings of a recipe with the overrides; all rows of --dataset are held out."""
    from keel.cli.run.train import dataset_overrides
    from keel.config import load_settings

    settings = load_settings(recipe, [*dataset_overrides(args), *args.overrides]).settings
    if args.dataset is None:
        return settings
    environment = settings.environments[DATASET]
    assert environment.dataset is not None
    prefix = f"--environments.{DATASET}.dataset.eval"
    if not any(override.startswith(prefix) for override in args.overrides):
        whole = environment.dataset.model_copy(update={"eval_path": None, "eval_fraction": 1.0})
        environment = environment.model_copy(update={"dataset": whole})
    return settings.model_copy(update={"environments": {DATASET: environment}})


def _evaluation_recipe(args: argparse.Namespace) -> str | Path | None:
    """Return the recipe with the environments: --recipe, or what TARGET names next to --model or --url.

    A TARGET that is not a recipe is the name of an environment.
    """
    from keel.config.recipe_files import EVALUATIONS_FOLDER, recipe_names

    named: str | None = args.target
    if named is None:
        return args.recipe  # type: ignore[no-any-return]
    if args.recipe is not None or args.dataset is not None:
        raise ConfigError(f"{named} and {'--recipe' if args.recipe else '--dataset'} both name the tasks; remove one")
    if (packaged := EVALUATIONS_FOLDER / f"{named}.toml").is_file():
        return packaged
    if named in recipe_names() or Path(named).suffix == ".toml":
        return named
    args.environment = [named, *args.environment]
    return None


def _endpoint_target(args: argparse.Namespace) -> EvaluationTarget:
    from keel.inference.pool.chat_endpoint import ChatEndpoint

    settings = _load_settings(args, _evaluation_recipe(args))
    key = None if args.api_key_env is None else os.environ.get(args.api_key_env)
    if args.api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env {args.api_key_env}: the environment variable is not set")
    endpoint = ChatEndpoint(args.url, model=args.model, api_key=key)
    return EvaluationTarget(settings, f"{args.model or 'the first model'} at {endpoint.url}", endpoint=endpoint)


def _model_target(args: argparse.Namespace) -> EvaluationTarget:
    from keel.config import ModelSettings
    from keel.config.recipe_files import evaluation_names

    name = args.model or args.target
    if name is None:
        raise ConfigError("pass the folder of a run, a model, or --url; for example: keel eval runs/first")
    if args.model is None and name in evaluation_names():
        raise ConfigError(f"{name} is an evaluation, not a model; pass --model NAME or --url URL too")
    settings = _load_settings(args, _evaluation_recipe(args) if args.model is not None else args.recipe)
    # take only dtype and device from the recipe's model: its adapter and warm-up belong to another model
    model = ModelSettings(name=name, dtype=settings.model.dtype, device=settings.model.device)
    if args.recipe is not None and name == settings.model.name:
        model = settings.model.model_copy(update={"lora": None})
    return EvaluationTarget(settings.model_copy(update={"model": model}), name)


def _run_target(args: argparse.Namespace) -> EvaluationTarget:
    from keel.training import Checkpoints

    folder, step = Path(args.target), args.step
    settings = _load_settings(args, folder / "config.toml")
    kept = Checkpoints(folder / "checkpoints", settings.checkpoints)
    if step is None:
        step = kept.latest()
        if step is None:
            raise ConfigError(f"{folder / 'checkpoints'} has no complete checkpoint yet; wait for the first one")
    else:
        kept.verify(step)
    return EvaluationTarget(settings, str(kept.path(step)), step, kept.path(step))


def select_environments(names: list[str], target: EvaluationTarget) -> "dict[str, EnvironmentSettings]":
    """Return the named environments, or all environments of the settings."""
    from keel.config import EnvironmentSettings

    environments = target.settings.environments
    if not names:
        if not environments:
            raise ConfigError(
                f"{target.weights} is not the folder of a run, so its environments are not known; pass"
                " --environment NAME, --recipe FILE, or --dataset FILE with --reward NAME"
            )
        return dict(environments)
    return {name: environments.get(name) or EnvironmentSettings(name=name) for name in names}


def resolve_sampling(
    args: argparse.Namespace, settings: "RunSettings", environment_sampling: "Sampling | None"
) -> "Sampling":
    """Return the sampling settings: command line over evaluation.sampling, the environment's, and the run's."""
    from pydantic import ValidationError

    from keel.common.settings import to_config_error
    from keel.config import Sampling

    overrides = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    base = settings.evaluation.sampling or environment_sampling or settings.sampling
    try:
        return Sampling.model_validate(
            base.model_dump() | {name: value for name, value in overrides.items() if value is not None}
        )
    except ValidationError as error:
        raise to_config_error(error, ("sampling",)) from None
