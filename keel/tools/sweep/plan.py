"""Which trials there are: every variant with every seed, checked before the first of them starts.

A plan is a folder: `recipe.toml`, a copy of the recipe, and `trials.json`, which has a name and the overrides of each
trial; the run of a trial is the folder of its name beside them. Whoever goes on with a plan needs nothing else, and a
recipe that is edited meanwhile changes nothing. A plan is never changed after it was written.
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
"""Characters of a folder's name, without the seed."""


@dataclass(frozen=True)
class Variant:
    """What is compared: a name for people, and the overrides that make it."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """One run to be done."""

    name: str
    """Of its folder, too."""
    variant: str
    seed: int
    overrides: tuple[str, ...]
    """Overrides of the recipe, the variant's and the seed's included."""


@dataclass(frozen=True)
class SweepPlan:
    """All trials, variant after variant, in the order in which they run."""

    folder: Path
    recipe: str
    """As the user wrote it."""
    trials: tuple[Trial, ...]
    recipe_folder: Path | None = None
    """Where the recipe was, for modules next to it; None: it was not recorded."""

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(trial.variant for trial in self.trials))

    @cached_property
    def steps(self) -> dict[str, int]:
        """How many steps each trial has, by name."""
        return {trial.name: self.load_trial_settings(trial).settings.steps for trial in self.trials}

    def load_trial_settings(self, trial: Trial) -> LoadedSettings:
        """The settings of one."""
        loaded = load_settings(self.folder / "recipe.toml", trial.overrides)
        return replace(loaded, recipe_folder=self.recipe_folder or loaded.recipe_folder)

    def path(self, trial: Trial) -> Path:
        """Where its run is, or will be."""
        return self.folder / trial.name

    @classmethod
    def create(
        cls, folder: Path, recipe: Path, overrides: Sequence[str], variants: Sequence[Variant], seeds: int
    ) -> Self:
        """Check every trial, then write the plan. `words`: overrides that hold for all of them."""
        if (folder / "trials.json").exists():
            raise ConfigError(f"{folder} holds trials; go on with them by --resume {folder}, or choose another --run")
        if (folder / "run.db").exists():
            raise ConfigError(f"--run {folder} is a run itself; choose another folder for the trials")
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
        """A plan that was written."""
        path = folder / "trials.json"
        try:
            found = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"{folder} holds no trials: there is no trials.json in it") from None
        except (OSError, ValueError) as error:
            raise KeelError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise KeelError(f"{path} is of another version; this version of keel reads format {FORMAT}")
        try:
            trials = (
                Trial(one["name"], one["variant"], one["seed"], tuple(one["overrides"])) for one in found["trials"]
            )
            beside = found.get("recipe_folder")
            plan = cls(folder, str(found["recipe"]), tuple(trials), None if beside is None else Path(beside))
        except (LookupError, TypeError) as error:
            raise KeelError(f"{path} is damaged: {error!r}") from None
        for trial in plan.trials:
            if not isinstance(trial.name, str) or Path(trial.name).name != trial.name or trial.name == "..":
                raise KeelError(f"{path}: {trial.name!r} is no name of a folder in {folder}")
        return plan

    def _write(self, recipe: Path) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run {self.folder} cannot be made: {error.strerror}") from error
        with atomic_file(self.folder / "recipe.toml") as temporary:
            temporary.write_bytes(recipe.read_bytes())
        rows = [
            {"name": one.name, "variant": one.variant, "seed": one.seed, "overrides": list(one.overrides)}
            for one in self.trials
        ]
        # last: a folder without it holds no trials yet
        beside = None if self.recipe_folder is None else str(self.recipe_folder)
        written = {"format": FORMAT, "recipe": self.recipe, "recipe_folder": beside, "trials": rows}
        write_json(self.folder / "trials.json", written)


def _check_trials(recipe: Path, trials: Sequence[Trial]) -> None:
    """Load every variant, and refuse what could not run or could not be told apart."""
    seen: dict[str, str] = {}
    worlds: set[str] = set()
    for trial in trials:
        try:
            loaded = load_settings(recipe, trial.overrides)
            _check_runnable(loaded.settings, worlds)
        except ConfigError as error:
            raise ConfigError("\n".join(f"{trial.variant}: {line}" for line in str(error).splitlines())) from None
        settings = repr([row[:2] for row in loaded.rows()])
        if settings in seen:
            raise ConfigError(f"{seen[settings]} and {trial.variant} are the same settings; leave one of them out")
        seen[settings] = trial.variant


def _check_runnable(settings: RunSettings, checked_environments: set[str]) -> None:
    if not settings.environments:
        raise ConfigError("environments is empty: a run needs at least one, for example [environments.arithmetic]")
    if settings.engine.kind == "pool":
        raise ConfigError(
            'engine.kind = "pool" cannot be compared live: its servers hold the weights of the run before, so that no'
            ' two runs have the same start; use "local", "process" or "vllm"'
        )
    resolve_sinks(settings.metrics)
    world = repr((settings.environments, settings.sampling))
    if world not in checked_environments:
        build_environments(settings)
        checked_environments.add(world)


def _slugs(names: Sequence[str]) -> list[str]:
    """Names that are good for folders, each of them once."""
    found: list[str] = []
    for name in names:
        short = re.sub(r"[^A-Za-z0-9._=+-]+", "_", name).strip("._-")[:MAX_NAME_LENGTH] or "variant"
        slug, number = short, 2
        while slug in found:
            slug, number = f"{short}_{number}", number + 1
        found.append(slug)
    return found
