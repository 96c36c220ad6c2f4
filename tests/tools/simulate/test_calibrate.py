"""A prediction from the measurements of a real run agrees with that run."""

import json
from pathlib import Path

import pytest

from keel.cli import main
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.calibrate import measure_run
from keel.tools.simulate.prediction import predict
from tests.support.tiny_runs import train

pytestmark = pytest.mark.model

SPEED_TOLERANCE, STALENESS_TOLERANCE, DROPPED_TOLERANCE = 0.3, 0.35, 0.1
"""Allowed error of a prediction: relative in the seconds of a step, absolute in versions and in shares of all rollouts.
A step of the tiny model lasts a tenth of a second, much of which depends on other load on the machine."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of 40 steps without evaluations."""
    folder = tmp_path_factory.mktemp("real") / "run"
    train(folder, steps=40, evaluation__when="never", checkpoints__every=100)
    return folder


def test_steps_staleness_and_waste_are_as_predicted(run_folder: Path) -> None:
    settings, assumptions, measured = measure_run(run_folder)
    prediction = predict(settings, SimulateSettings.model_validate(assumptions))
    assert prediction.step_seconds == pytest.approx(measured.step_seconds, rel=SPEED_TOLERANCE)
    assert prediction.staleness == pytest.approx(measured.staleness, abs=STALENESS_TOLERANCE)
    assert prediction.dropped_share == pytest.approx(measured.dropped_share, abs=DROPPED_TOLERANCE)


def test_measured_assumptions_match_the_recorded_run(run_folder: Path) -> None:
    settings, assumptions, measured = measure_run(run_folder)
    assert measured.steps == 40
    assert assumptions["engines"] == 1 and assumptions["max_batch"] == settings.engine.max_batch
    assert max(assumptions["length"]["values"]) <= settings.sampling.max_tokens
    assert 0 <= assumptions["zero_variance_share"] <= 1 and assumptions["rollout_failures"] == 0
    assert 0 < assumptions["tokens_per_second_alone"] <= assumptions["tokens_per_second"]


def test_the_command_prints_the_measured_run_next_to_its_prediction(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--from", str(run_folder), "--engines", "2", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["assumptions"]["engines"] == 2
    assert payload["measured"]["steps"] == 40
    assert main(["simulate", "--from", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "measured    engines 1" in text and "real run    " in text
