"""Environments load by name or import path; errors name the setting, the value and the fix."""

import re
import sys

import pytest

from keel.errors import ConfigError
from tests.support.scripted_engine import load


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("larger_numbers", {}, 'environment.name = "larger_numbers" is not known; did you mean larger_number?'),
        ("qqq", {}, '"module:attribute"'),
        ("larger_number", {"digit": 3}, "environment.options.digit is not a setting; did you mean digits?"),
        ("larger_number", {"digits": 0}, "environment.options.digits = 0: input should be greater than or equal to 1"),
        ("count_letters", {"digits": 2}, "environment.options.digits is not a setting"),
        ("arithmetic", {"operations": ["divide"]}, 'environment.options.operations.0 = "divide"'),
        ("no_such_module:Thing", {}, "cannot be imported: No module named 'no_such_module'"),
        ("math:nothing", {}, "cannot be imported: module 'math' has no attribute 'nothing'"),
        ("math:pi", {}, "is a float, not a class or function"),
        (
            "tests.rollout.test_episode_runner:Custom",
            {"wrong": 1},
            "do not fit tests.rollout.test_episode_runner:Custom",
        ),
        ("collections:OrderedDict", {}, "gave a OrderedDict; an environment has a name, tasks(split)"),
        ("reasoning_gym:letter_countin", {}, "did you mean letter_counting?"),
        ("reasoning_gym:letter_counting", {"config": {"min_words": -1}}, "does not fit letter_counting"),
        ("verifiers:no_such_taskset", {}, 'environment.name = "verifiers:no_such_taskset" cannot be loaded'),
    ],
)
def test_loading_errors_name_the_setting_and_the_cause(name, options, message):
    if name.partition(":")[0] in ("reasoning_gym", "verifiers"):
        pytest.importorskip(name.partition(":")[0])
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(name, **options)


def test_a_missing_library_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        load("reasoning_gym:gcd")
    with pytest.raises(ConfigError, match="pip install verifiers"):
        load("verifiers:x")


def test_an_environment_loads_by_import_path():
    assert load("tests.rollout.test_episode_runner:Custom").name == "custom"
