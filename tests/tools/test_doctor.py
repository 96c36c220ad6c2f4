"""Claims of `keel doctor`: what it finds, what it says to do, and what its exit code means."""

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


def meminfo(folder: Path, free_gib: float) -> Path:
    file = folder / "meminfo"
    file.write_text(f"MemTotal: {32 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {int(free_gib * 2**20)} kB\n")
    return file


@pytest.mark.parametrize(("free", "state"), [(0.5, "problem"), (4, "warning"), (16, "ok")])
def test_memory_is_judged_by_what_is_free(free: float, state: str, tmp_path: Path) -> None:
    found = check_memory(meminfo(tmp_path, free), tmp_path / "none")
    assert found.state == state
    assert found.detail == f"{free:.1f} of 32.0 GiB free"
    assert bool(found.remedy) == (state != "ok")


def test_memory_of_a_container_is_its_limit_and_not_the_machines(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{6 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**30}\n")
    found = check_memory(meminfo(tmp_path, 16), tmp_path)
    assert (found.state, found.detail) == ("warning", "5.0 of 6.0 GiB free")
    (tmp_path / "memory.max").write_text("max\n")
    assert check_memory(meminfo(tmp_path, 16), tmp_path).detail == "16.0 of 32.0 GiB free"


def test_memory_that_cannot_be_told_is_a_warning(tmp_path: Path) -> None:
    assert check_memory(tmp_path / "none", tmp_path).state == "warning"


def test_cores_of_a_container_are_its_quota(tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text("50000 100000\n")
    assert usable_cores(file) == 0.5
    file.write_text("max 100000\n")
    assert usable_cores(file) == usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        found = check_port(number)
        assert found.state == "warning"
        assert found.detail.startswith(f"{number} is taken")
        assert "--port" in found.remedy
    assert check_port(number) == DoctorCheck("port", "ok", f"{number} is free on 127.0.0.1")


def test_a_folder_that_is_not_there_yet_is_judged_by_where_it_would_be(tmp_path: Path) -> None:
    assert check_disk("disk", tmp_path / "a" / "b").detail.endswith(f"free at {tmp_path.resolve()}")


@pytest.mark.parametrize(("free", "state"), [(0.5, "problem"), (5, "warning"), (50, "ok")])
def test_a_disk_is_judged_by_what_is_free(
    free: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": int(free * 2**30)})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _path: usage)
    assert check_disk("disk", tmp_path).state == state


def test_a_vllm_environment_is_looked_into(tmp_path: Path) -> None:
    assert "(optional)" in check_vllm(tmp_path / "bin" / "python").detail
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    assert check_vllm(without).state == "warning"
    assert "has no vllm" in check_vllm(without).detail
    without.write_text("#!/bin/sh\nexit 0\n")
    assert check_vllm(without).state == "ok"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("numpy>=1", []),
        ("numpy>=1000", ["numpy is .*, needed is >=1000"]),
        ("no-such-package-here", ["no-such-package-here is not installed"]),
        ('no-such-package-here; extra == "test"', []),
        ("torch==2.13.0", []),
    ],
)
def test_requirements_are_met_or_named(line: str, words: list[str]) -> None:
    found = unmet_requirement(line)
    assert len(found) == len(words)
    for text, pattern in zip(found, words, strict=True):
        assert re.fullmatch(pattern, text)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[DoctorCheck]:
    """The real ones of this machine."""
    return run_checks(tmp_path_factory.mktemp("doctor"))


def test_the_machine_that_runs_the_tests_has_no_problem(findings: list[DoctorCheck]) -> None:
    assert [one for one in findings if one.state == "problem"] == []
    assert len({one.name for one in findings}) == len(findings)
    assert all(one.remedy for one in findings if one.state != "ok")


def test_a_step_and_sampling_are_really_timed(findings: list[DoctorCheck]) -> None:
    by_name = {one.name: one.detail for one in findings}
    milliseconds = float(by_name["step"].partition(" ms")[0])
    assert 0 < milliseconds < 60_000
    assert float(by_name["sampling"].partition(" tokens")[0].replace(",", "")) > 1


def run_with(findings: list[DoctorCheck], monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(doctor, "run_checks", lambda _folder: findings)
    return main(["doctor", *words])


def test_the_exit_code_is_1_for_problems_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine, worse = DoctorCheck("a", "ok", "good"), DoctorCheck("b", "warning", "slow", "wait")
    broken = DoctorCheck("c", "problem", "[bold]gone[/bold]", "bring it back")
    assert run_with([fine, worse], monkeypatch) == 0
    assert "0 problems, 1 warnings" in capsys.readouterr().out
    assert run_with([fine, broken], monkeypatch) == 1
    said = capsys.readouterr().out
    # what is found may hold any text, which is no markup
    assert "[bold]gone[/bold]" in said
    assert "bring it back" in said


def test_json_holds_every_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with([DoctorCheck("c", "problem", "gone", "bring it back")], monkeypatch, "--json") == 1
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["findings"] == [{"name": "c", "state": "problem", "found": "gone", "remedy": "bring it back"}]
    assert (said["ok"], said["warning"], said["problem"]) == (0, 0, 1)


def test_a_question_that_fails_is_a_problem_and_the_others_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> list[DoctorCheck]:
        raise OSError("torch is half installed")

    for name in ("_torch", "_step", "_sampling"):
        monkeypatch.setattr(doctor, name, broken)
    found = {one.name: one for one in run_checks(tmp_path)}
    assert found["torch"].state == found["step"].state == "problem"
    assert found["torch"].detail == "OSError: torch is half installed"
    assert found["python"] == DoctorCheck("python", "ok", f"{sys.version.split()[0]} in {sys.prefix}")
