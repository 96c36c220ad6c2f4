"""`keel doctor`: its checks, remedies and exit code."""

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.tools import doctor
from keel.tools.doctor import (
    DoctorCheck,
    check_disk,
    check_memory,
    check_port,
    check_vllm,
    run_checks,
    unmet_requirement,
    usable_cores,
)


def write_meminfo(folder: Path, free_gib: float) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: {32 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {int(free_gib * 2**20)} kB\n")
    return file


@pytest.mark.parametrize(("free", "state"), [(0.5, "problem"), (4, "warning"), (16, "ok")])
def test_memory_is_judged_by_free_memory(free: float, state: str, tmp_path: Path) -> None:
    check = check_memory(write_meminfo(tmp_path, free), tmp_path / "none")
    assert check.state == state
    assert check.detail == f"{free:.1f} of 32.0 GiB free"
    assert bool(check.remedy) == (state != "ok")


def test_memory_in_a_container_is_limited_by_the_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{6 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**30}\n")
    check = check_memory(write_meminfo(tmp_path, 16), tmp_path)
    assert (check.state, check.detail) == ("warning", "5.0 of 6.0 GiB free")
    (tmp_path / "memory.max").write_text("max\n")
    assert check_memory(write_meminfo(tmp_path, 16), tmp_path).detail == "16.0 of 32.0 GiB free"


def test_unknown_memory_is_a_warning(tmp_path: Path) -> None:
    assert check_memory(tmp_path / "none", tmp_path).state == "warning"


def test_cores_in_a_container_are_limited_by_its_quota(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("50000 100000\n")
    assert usable_cores(file) == 0.5
    file.write_text("max 100000\n")
    assert usable_cores(file) == usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_a_port_in_use_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        check = check_port(number)
        assert check.state == "warning"
        assert check.detail.startswith(f"{number} is in use")
        assert "--port" in check.remedy
    assert check_port(number) == DoctorCheck("port", "ok", f"{number} is free on 127.0.0.1")


def test_a_missing_folder_is_judged_by_its_nearest_existing_parent(tmp_path: Path) -> None:
    assert check_disk("disk", tmp_path / "a" / "b").detail.endswith(f"free at {tmp_path.resolve()}")


@pytest.mark.parametrize(("free", "state"), [(0.5, "problem"), (5, "warning"), (50, "ok")])
def test_a_disk_is_judged_by_free_space(
    free: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": int(free * 2**30)})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: usage)
    assert check_disk("disk", tmp_path).state == state


def test_a_vllm_environment_is_checked_for_vllm(tmp_path: Path) -> None:
    missing = check_vllm(tmp_path / "bin" / "python")
    assert missing.state == "absent" and "(optional)" in missing.detail
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert check_vllm(python).state == "warning"
    assert "has no vllm" in check_vllm(python).detail
    python.write_text("#!/bin/sh\nexit 0\n")
    assert check_vllm(python).state == "ok"


@pytest.mark.parametrize(
    ("requirement", "patterns"),
    [
        ("numpy>=1", []),
        ("numpy>=1000", ["numpy is .*, required is >=1000"]),
        ("no-such-package-here", ["no-such-package-here is not installed"]),
        ('no-such-package-here; extra == "test"', []),
        ("torch==2.13.0", []),
    ],
)
def test_unmet_requirements_are_described(requirement: str, patterns: list[str]) -> None:
    unmet = unmet_requirement(requirement)
    assert len(unmet) == len(patterns)
    for text, pattern in zip(unmet, patterns, strict=True):
        assert re.fullmatch(pattern, text)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> list[DoctorCheck]:
    """The results on this machine."""
    return run_checks(tmp_path_factory.mktemp("doctor"))


def test_this_machine_has_no_problem(checks: list[DoctorCheck]) -> None:
    assert [check for check in checks if check.state == "problem"] == []
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.remedy for check in checks if check.state != "ok")


def test_a_step_and_sampling_are_timed(checks: list[DoctorCheck]) -> None:
    by_name = {check.name: check.detail for check in checks}
    milliseconds = float(by_name["step"].partition(" ms")[0])
    assert 0 < milliseconds < 60_000
    assert float(by_name["sampling"].partition(" tokens")[0].replace(",", "")) > 1


def run_with(checks: list[DoctorCheck], monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(doctor, "run_checks", lambda _folder: checks)
    return main(["doctor", *argv])


def test_the_exit_code_is_1_for_problems_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, slow = DoctorCheck("a", "ok", "good"), DoctorCheck("b", "warning", "slow", "wait")
    missing = DoctorCheck("m", "absent", "not installed (optional)", "pip install m")
    broken = DoctorCheck("c", "problem", "[bold]gone[/bold]", "restore it")
    assert run_with([good, slow, missing], monkeypatch) == 0
    output = capsys.readouterr().out
    assert "0 problems, 1 warning\n" in output
    assert re.search(r"^m +- +not installed \(optional\) +pip install m *$", output, re.MULTILINE)
    assert run_with([good, broken], monkeypatch) == 1
    output = capsys.readouterr().out
    # details may hold any text, which must not be read as markup
    assert "[bold]gone[/bold]" in output
    assert "restore it" in output


def test_json_has_every_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with([DoctorCheck("c", "problem", "gone", "restore it")], monkeypatch, "--json") == 1
    payload: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert payload["checks"] == [{"name": "c", "state": "problem", "detail": "gone", "remedy": "restore it"}]
    assert (payload["ok"], payload["warning"], payload["problem"]) == (0, 0, 1)


def test_a_check_that_raises_is_a_problem_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> list[DoctorCheck]:
        raise OSError("torch is not installed correctly")

    for name in ("_check_torch", "_measure_step", "_measure_sampling"):
        monkeypatch.setattr(doctor, name, broken)
    results = {check.name: check for check in run_checks(tmp_path)}
    assert results["torch"].state == results["step"].state == "problem"
    assert results["torch"].detail == "OSError: torch is not installed correctly"
    assert results["python"] == DoctorCheck("python", "ok", f"{sys.version.split()[0]} in {sys.prefix}")
