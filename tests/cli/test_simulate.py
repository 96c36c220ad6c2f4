"""`keel simulate`: its output, the output shown in docs/scaling.md, and its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keel.cli import main
from keel.errors import KeelError
from keel.run.ledger import Ledger
from keel.tools.simulate.calibrate import measure_run
from tests.docs.test_pages import blocks, sessions


def test_a_run_that_cannot_be_measured_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("steps = 5\n")
    ledger = Ledger(tmp_path / "run.db", create=True)
    ledger.close()
    with pytest.raises(KeelError, match="the run has 0 steps; at least 3 are needed to measure"):
        measure_run(tmp_path)
    (tmp_path / "run.db").write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(KeelError, match=r"run\.db cannot be read: file is not a database"):
        measure_run(tmp_path)


@pytest.mark.parametrize(
    ("argv", "error_message"),
    [
        (["--engines", "0"], "engines = 0: input should be greater than or equal to 1"),
        (["--engins", "3"], "engins is not a setting; did you mean engine?"),
        (["--length", "normal:3"], "write fixed:MEAN, lognormal:MEAN or lognormal:MEAN:SIGMA"),
        (["--tokens-per-second", "1e6"], "a request cannot be faster in a batch than alone"),
        (["--tokens-per-second", "1"], "tokens_per_second = 1.0 must not be below tokens_per_second_alone = 60.0"),
        (["--sweep", "engins=1,2"], "engins is neither an assumption nor a setting; did you mean engines?"),
        (["--sweep", "engines"], "--sweep engines: write name=value,value"),
        (["--from", "nowhere"], "--from nowhere: run.db not found"),
        (["--assume", "nowhere.toml"], "--assume nowhere.toml cannot be read"),
    ],
)
def test_invalid_arguments_are_errors(
    argv: list[str], error_message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 2\n")
    assert main(["simulate", str(file), *argv]) == 2
    assert error_message in capsys.readouterr().err


def test_the_command_prints_a_prediction_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, assumptions = tmp_path / "run.toml", tmp_path / "assumptions.toml"
    file.write_text("steps = 8\n[sampling]\nmax_tokens = 64\n[scheduler]\ngroups_per_step = 2\ngroup_size = 2\n")
    assumptions.write_text('length = "fixed:20"\nengines = 3\n')
    argv = [str(file), "--assume", str(assumptions), "--engines", "2", "--scheduler.groups_per_step", "3"]
    assert main(["simulate", *argv]) == 0
    text = capsys.readouterr().out
    for label in ("speed", "engines", "trainer", "staleness", "dropped", "wasted", "bottleneck", "to change"):
        assert any(line.startswith(label) for line in text.splitlines()), label
    assert "file        length fixed:20" in text and "flags       engines 2" in text
    assert main(["simulate", str(file), "--json", "--length", "fixed:20"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["prediction"]["steps"] == 8 and payload["assumptions"]["length"]["mean"] == 20
    sweep = ["--sweep", "engines=1,2", "--sweep", "scheduler.max_off_policy_steps=0,1"]
    assert main(["simulate", str(file), *sweep]) == 0
    table, _, assumptions = capsys.readouterr().out.partition("\n\n")
    rows = [line.split()[:2] for line in table.splitlines()]
    assert rows == [["engines", "scheduler.max_off_policy_steps"], ["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]
    assert assumptions.startswith("defaults    tokens_per_second 2,000")


def test_the_scaling_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/scaling.md"
    (tmp_path / "assume.toml").write_text(next(text for text in blocks(page, "toml") if "assume.toml" in text))
    monkeypatch.chdir(tmp_path)
    shown = [pair for pair in sessions(page) if pair[0].startswith("keel simulate")]
    assert len(shown) >= 5
    for command, expected in shown:
        assert main(command.split()[1:]) == 0
        assert capsys.readouterr().out.rstrip("\n") == expected, command


@pytest.mark.process
def test_simulate_does_not_import_torch() -> None:
    modules = "keel.tools.simulate.bottleneck, keel.tools.simulate.calibrate, keel.cli.inspect.simulate"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
