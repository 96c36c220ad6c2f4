"""Installing keel-rl next to TRL changes no version that is already installed."""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.trl_trainers import NO_TRL

pytest.importorskip("trl", reason=NO_TRL)
pytestmark = [pytest.mark.hosts, pytest.mark.process]


@pytest.mark.parametrize("extra", ["", "[trl]"])
def test_pip_would_install_keel_and_nothing_else(extra: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", str(report)]
    # no isolation: the build must not need the network, only versions that are missing may
    command += ["--no-build-isolation", f"{ROOT}{extra}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No matching distribution" in result.stderr or "Could not find a version" in result.stderr:
        pytest.skip("the package index cannot be reached")
    assert result.returncode == 0, result.stderr
    planned = {
        entry["metadata"]["name"].lower().replace("_", "-") for entry in json.loads(report.read_text())["install"]
    }
    installed = {str(found.metadata["Name"]).lower().replace("_", "-") for found in distributions()}
    assert planned - {"keel-rl"} & installed == set()
    assert planned == {"keel-rl"}
