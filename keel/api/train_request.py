"""The parameters of a call of `train`, checked before any work: one without effect is an error that says why."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from keel.api.trajectories import TrajectoryGroup
from keel.common.settings import to_config_error
from keel.config.run import AdvantageSettings, ZeroVarianceGroups
from keel.errors import BatchError, ConfigError
from keel.objectives import Composition
from keel.signal import Objective
from keel.signal import objective as make_objective

ObjectiveLike = str | Mapping[str, Any] | Composition | Objective
"""Name of a preset, an `[objective]` table, a composition, or an `Objective`."""


def objective_table(objective: ObjectiveLike) -> dict[str, Any]:
    """Return an objective as an `[objective]` table, as it is written to `config.toml`."""
    if isinstance(objective, str):
        return {"name": objective}
    if isinstance(objective, Mapping):
        return dict(objective)
    if isinstance(objective, Composition):
        return objective.model_dump()
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"objective is a {type(objective).__name__}; it must be the name of a preset, an [objective] table, a"
            " keel.Composition or a keel.Objective"
        )
    if objective.name is not None:
        table = {"name": objective.name, **objective.parameters}
        if make_objective(table).composition == objective.composition:
            return table
    return objective.composition.model_dump()


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """One requested training step."""

    groups: list[TrajectoryGroup]
    objective: Objective
    reference_source: str | None
    """The reference, as in `ReferenceSettings.source`; None if the objective reads none."""
    learning_rate: float | None
    estimator: AdvantageSettings

    @classmethod
    def from_arguments(
        cls,
        groups: Iterable[TrajectoryGroup],
        *,
        objective: ObjectiveLike,
        learning_rate: float | None,
        advantages: str | AdvantageSettings,
        zero_variance_groups: ZeroVarianceGroups | None = None,
        kl_penalty_coef: float,
        kl_penalty_reference_step: int | None,
        kl_ref_adapter_path: str | Path | None,
    ) -> Self:
        """Build the request from the parameters of `LocalBackend.train`."""
        composed = _build_objective(objective, kl_penalty_coef)
        return cls(
            groups=_check_groups(groups),
            objective=composed,
            reference_source=_reference_source(composed, kl_penalty_reference_step, kl_ref_adapter_path),
            learning_rate=_check_learning_rate(learning_rate),
            estimator=_advantage_settings(advantages, zero_variance_groups),
        )


def _check_groups(groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
    result = list(groups)
    for index, group in enumerate(result):
        if not isinstance(group, TrajectoryGroup):
            raise BatchError(f"groups[{index}] is {type(group).__name__}, not a TrajectoryGroup")
        if group.pending:
            raise BatchError(f"groups[{index}] has not been gathered: groups = await keel.gather_groups(...)")
    return result


def _build_objective(base: ObjectiveLike, coef: float) -> Objective:
    """Return the objective with the KL penalty added."""
    if not coef:
        return base if isinstance(base, Objective) else make_objective(base)
    if isinstance(base, str):
        return make_objective(base, kl_penalty_coef=coef)
    objective = base if isinstance(base, Objective) else make_objective(base)
    if objective.composition.kl_penalty_coef:
        own = objective.composition.kl_penalty_coef
        raise ConfigError(f"kl_penalty_coef = {coef}, but the objective already has {own}; give one of them")
    try:
        composition = Composition.model_validate(objective.composition.model_dump() | {"kl_penalty_coef": coef})
    except ValidationError as error:
        raise to_config_error(error, ("objective",)) from None
    return Objective(composition, name=objective.name, parameters=objective.parameters | {"kl_penalty_coef": coef})


def _reference_source(objective: Objective, step: int | None, adapter: str | Path | None) -> str | None:
    """Return the reference, as in `ReferenceSettings.source`."""
    references = [
        f"{name} = {value}"
        for name, value in (("kl_penalty_reference_step", step), ("kl_ref_adapter_path", adapter))
        if value is not None
    ]
    if len(references) == 2:
        raise ConfigError(f"{references[0]} and {references[1]}: a step has one reference; give one of them")
    if not objective.composition.reads("reference"):
        if references:
            raise ConfigError(
                f"{references[0]} has no effect: the objective uses no reference; give kl_penalty_coef too"
            )
        return None
    if step is not None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"kl_penalty_reference_step = {step} must be the number of a step")
        return f"step:{step}"
    return "base" if adapter is None else f"adapter:{Path(adapter).expanduser().resolve()}"


def _check_learning_rate(rate: float | None) -> float | None:
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"learning_rate = {rate} must be above 0")
    return rate


def _advantage_settings(
    advantages: str | AdvantageSettings, zero_variance_groups: ZeroVarianceGroups | None
) -> AdvantageSettings:
    """Return the estimator's settings, with `zero_variance_groups` from whichever of the two parameters gives it."""
    table = (
        advantages.model_dump(exclude_unset=True) if isinstance(advantages, AdvantageSettings) else {"name": advantages}
    )
    if zero_variance_groups is not None:
        own = table.setdefault("zero_variance_groups", zero_variance_groups)
        if own != zero_variance_groups:
            raise ConfigError(
                f'zero_variance_groups = "{zero_variance_groups}", but advantages.zero_variance_groups = "{own}";'
                " give one of them"
            )
    try:
        return AdvantageSettings.model_validate(table)
    except ValidationError as error:
        raise to_config_error(error, ("advantages",)) from None
