"""The trials of a sweep: every variant with every seed, validated before the first one starts.

A plan is a folder with `recipe.toml`, a copy of the recipe, and `trials.json`, the name and overrides of each trial.
The run folder of a trial is next to them and has the trial's name. Resuming needs nothing else, so later edits of the
recipe have no effect. A plan is immutable once written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from keel.common.atomic_files import atomic_file, write_json
from keel.common.safe_read import read_json
from keel.config import LoadedSettings, RunSettings, load_settings
from keel.errors import ConfigError, KeelError
from keel.rollout.episode_runner import build_environments
from keel.run.monitor.sinks import resolve_sinks

FORMAT = 2
MAX_NAME_LENGTH = 80
"""Maximum length of a folder name, without the seed."""


@dataclass(frozen=True)
class Variant:
    """One of the compared alternatives: its name and the overrides that define it."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """Also the name of its folder."""
    variant: str
    seed: int
    overrides: tuple[str, ...]
    """Overrides of the recipe, including those of the variant and the seed."""


@dataclass(frozen=True)
class SweepPlan:
    """All trials in the order in which they run, grouped by variant."""

    folder: Path
    recipe: str
    """Path of the recipe as given by the user."""
    trials: tuple[Trial, ...]
    recipe_folder: Path | None = None
    """Folder of the original recipe, for modules next to it; None if it was not recorded."""

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(trial.variant for trial in self.trials))

    @cached_property
    def steps(self) -> dict[str, int]:
        """Number of steps of each trial, by name."""
        return {trial.name: self.load_trial_settings(trial).settings.steps for trial in self.trials}

    def load_trial_settings(self, trial: Trial) -> LoadedSettings:
        """Return the settings of a trial."""
        loaded = load_settings(self.folder / "recipe.toml", trial.overrides)
        return replace(loaded, recipe_folder=self.recipe_folder or loaded.recipe_folder)

    def path(self, trial: Trial) -> Path:
        """Return the run folder of a trial, which may not exist yet."""
        return self.folder / trial.name

    @classmethod
    def create(
        cls, folder: Path, recipe: Path, overrides: Sequence[str], variants: Sequence[Variant], seeds: int
    ) -> Self:
        """Validate every trial, then write the plan. `overrides` apply to all trials."""
        if (folder / "trials.json").exists():
            raise ConfigError(f"{folder} already contains trials; use --resume {folder}, or choose another --run")
        if (folder / "run.db").exists():
            raise ConfigError(f"--run {folder} is a run folder; choose another folder for the trials")
        if seeds < 1:
            raise ConfigError(f"--seeds {seeds} must be at least 1")
        first = load_settings(recipe, overrides).settings.seed
        slugs = _slugs([variant.name for variant in variants])
        trials = tuple(
            Trial(f"{slug}-seed{seed}", variant.name, seed, (*overrides, *variant.overrides, f"--seed={seed}"))
            for slug, variant in zip(slugs, variants, strict=True)
            for seed in range(first, first + seeds)
        )
        _check_trials(recipe, trials[::seeds])
        plan = cls(folder, str(recipe), trials, recipe.absolute().parent)
        plan._write(recipe)
        return plan

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a plan from its folder."""
        path = folder / "trials.json"
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"{folder} contains no trials: it has no trials.json") from None
        except (OSError, ValueError) as error:
            raise KeelError(f"{path} cannot be read: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise KeelError(f"{path} has an unsupported format; this version of keel reads format {FORMAT}")
        try:
            trials = (
                Trial(row["name"], row["variant"], row["seed"], tuple(row["overrides"])) for row in content["trials"]
            )
            recipe_folder = content.get("recipe_folder")
            plan = cls(
                folder, str(content["recipe"]), tuple(trials), None if recipe_folder is None else Path(recipe_folder)
            )
        except (LookupError, TypeError) as error:
            raise KeelError(f"{path} is damaged: {error!r}") from None
        for trial in plan.trials:
            if not isinstance(trial.name, str) or Path(trial.name).name != trial.name or trial.name == "..":
                raise KeelError(f"{path}: {trial.name!r} is not a valid folder name in {folder}")
        return plan

    def _write(self, recipe: Path) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run {self.folder} cannot be created: {error.strerror}") from error
        with atomic_file(self.folder / "recipe.toml") as temporary:
            temporary.write_bytes(recipe.read_bytes())
        rows = [
            {"name": trial.name, "variant": trial.variant, "seed": trial.seed, "overrides": list(trial.overrides)}
            for trial in self.trials
        ]
        recipe_folder = None if self.recipe_folder is None else str(self.recipe_folder)
        content = {"format": FORMAT, "recipe": self.recipe, "recipe_folder": recipe_folder, "trials": rows}
        # written last: a folder without it is not a plan yet
        write_json(self.folder / "trials.json", content)


def _check_trials(recipe: Path, trials: Sequence[Trial]) -> None:
    """Load every variant; one that cannot run, or equals another one, is an error."""
    seen: dict[str, str] = {}
    checked_environments: set[str] = set()
    for trial in trials:
        try:
            loaded = load_settings(recipe, trial.overrides)
            _check_runnable(loaded.settings, checked_environments)
        except ConfigError as error:
            raise ConfigError("\n".join(f"{trial.variant}: {line}" for line in str(error).splitlines())) from None
        settings = repr([row[:2] for row in loaded.rows()])
        if settings in seen:
            raise ConfigError(f"{seen[settings]} and {trial.variant} are the same settings; remove one of them")
        seen[settings] = trial.variant


def _check_runnable(settings: RunSettings, checked_environments: set[str]) -> None:
    if not settings.environments:
        raise ConfigError("environments is empty: a run needs at least one, for example [environments.arithmetic]")
    if settings.engine.kind == "pool":
        raise ConfigError(
            'engine.kind = "pool" cannot be used in a sweep: its servers keep the weights of the previous run, so that'
            ' runs would start from different weights; use "local", "process" or "vllm"'
        )
    resolve_sinks(settings.metrics)
    key = repr((settings.environments, settings.sampling))
    if key not in checked_environments:
        build_environments(settings)
        checked_environments.add(key)


def _slugs(names: Sequence[str]) -> list[str]:
    """Return distinct names that are valid folder names."""
    slugs: list[str] = []
    for name in names:
        short = re.sub(r"[^A-Za-z0-9._=+-]+", "_", name).strip("._-")[:MAX_NAME_LENGTH] or "variant"
        slug, number = short, 2
        while slug in slugs:
            slug, number = f"{short}_{number}", number + 1
        slugs.append(slug)
    return slugs
