"""Loading of environments by name: built-in ones, adapters of other libraries, and `module:attribute` import paths."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import ValidationError

from keel.common.extras import import_object
from keel.common.settings import suggest_name, to_config_error
from keel.config.rollout import EnvironmentSettings
from keel.errors import ConfigError
from keel.rollout.environments import builtin
from keel.rollout.environments.code_tasks import CodeProblems, HumanEval
from keel.rollout.environments.dataset import DatasetEnvironment
from keel.rollout.environments.environment import Environment
from keel.rollout.environments.reasoning_gym_tasks import ReasoningGym
from keel.rollout.environments.verifiers_tasks import Verifiers

INTEGRATIONS: dict[str, Callable[..., Environment]] = {"reasoning_gym": ReasoningGym, "verifiers": Verifiers}
"""Adapters of other libraries, by the prefix of the environment's name: `reasoning_gym:gcd`."""

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    **builtin.ENVIRONMENTS,
    "code_problems": CodeProblems,
    "humaneval": HumanEval,
}
"""Environments of the package, by name."""


def load_environment(settings: EnvironmentSettings) -> Environment:
    """Return the environment `settings.name`, constructed with `settings.options`."""
    if settings.dataset is not None:
        return DatasetEnvironment(settings)
    factory = _find_factory(settings.name)
    try:
        environment = factory(**settings.options)
    except ValidationError as error:
        raise to_config_error(error, ("environment", "options")) from error
    except TypeError as error:
        raise ConfigError(f"environment.options = {settings.options} do not fit {settings.name}: {error}") from error
    if not isinstance(environment, Environment):
        raise ConfigError(
            f'environment.name = "{settings.name}" gave a {type(environment).__name__}; an environment has a name,'
            " tasks(split) and an async episode(task, client)"
        )
    return environment


def _find_factory(name: str) -> Callable[..., Any]:
    prefix, _, rest = name.partition(":")
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if prefix in INTEGRATIONS and rest:
        return partial(INTEGRATIONS[prefix], rest)
    if rest:
        factory: Callable[..., Any] = import_object(name, f'environment.name = "{name}"')
        return factory
    known = [*ENVIRONMENTS, *(f"{integration}:TASK" for integration in INTEGRATIONS)]
    raise ConfigError(
        f'environment.name = "{name}" is not known; {suggest_name(name, known)} (your own environment:'
        ' "module:attribute")'
    )
