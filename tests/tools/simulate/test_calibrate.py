"""A prediction from a real run's own measurements is what the run was like."""

import json
from pathlib import Path

import pytest

from keel.cli import main
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.calibrate import measure_run
from keel.tools.simulate.prediction import predict
from tests.support.tiny_runs import train

SPEED, AGE, REFUSED = 0.3, 0.35, 0.1
"""How far off a prediction may be: of the seconds of a step, in versions, and in shares of all rollouts. A tiny model's
step lasts a tenth of a second, of which much is the machine's other work."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run of 40 steps without evaluations."""
    folder = tmp_path_factory.mktemp("real") / "run"
    train(folder, steps=40, evaluation__when="never", checkpoints__every=100)
    return folder


def test_steps_staleness_and_waste_are_as_predicted(run: Path) -> None:
    settings, measured, observed = measure_run(run)
    found = predict(settings, SimulateSettings.model_validate(measured))
    assert found.step_seconds == pytest.approx(observed.step_seconds, rel=SPEED)
    assert found.staleness == pytest.approx(observed.staleness, abs=AGE)
    assert found.dropped_share == pytest.approx(observed.dropped_share, abs=REFUSED)


def test_what_is_measured_is_what_was_recorded(run: Path) -> None:
    settings, measured, observed = measure_run(run)
    assert observed.steps == 40
    assert measured["engines"] == 1 and measured["max_batch"] == settings.engine.max_batch
    assert max(measured["length"]["values"]) <= settings.sampling.max_tokens
    assert 0 <= measured["no_signal"] <= 1 and measured["rollout_failures"] == 0
    assert 0 < measured["tokens_per_second_alone"] <= measured["tokens_per_second"]


def test_the_command_shows_the_run_beside_its_prediction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--from", str(run), "--engines", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["assumed"]["engines"] == 2
    assert told["observed"]["steps"] == 40
    assert main(["simulate", "--from", str(run)]) == 0
    text = capsys.readouterr().out
    assert "measured    engines 1" in text and "the run     " in text
