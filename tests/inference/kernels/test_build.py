"""Kernels are compiled once, kept where nobody else writes, and done without when they cannot be had."""

from pathlib import Path

import pytest

from keel.inference.kernels import build
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels


def test_they_are_compiled_once_into_a_folder_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._build_and_load().panel_columns() > 0
    (made,) = (tmp_path / "keel" / "kernels").iterdir()
    assert made.stat().st_mode & 0o077 == 0
    before = made.stat()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    build._build_and_load()
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_not_loaded_from(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "keel" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(OSError, match=rf"{folder} may be written by other users"):
        build._build_and_load()
    assert not list(folder.iterdir())


def test_without_a_compiler_there_are_none_and_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert build._load_once.__wrapped__() == (None, "there is no C compiler (gcc) on the PATH")


def test_what_the_compiler_says_is_the_reason_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMPILER_FLAGS", [*build.COMPILER_FLAGS, "-include", "no_such_header.h"])
    right = build._run  # the list of macros, which is asked for first, would fail by it too
    monkeypatch.setattr(build, "_run", lambda words: "" if "-dM" in words else right(words))
    found, why = build._load_once.__wrapped__()
    assert found is None
    assert "no_such_header.h" in why
    assert not list((tmp_path / "keel" / "kernels").iterdir())


def test_extra_compiler_flags_are_used_and_give_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KEEL_NATIVE_CFLAGS", "")
    build._build_and_load()
    # a macro that replaces the name of an exported function, with a space that must survive the splitting
    monkeypatch.setenv("KEEL_NATIVE_CFLAGS", "-O1 '-Dpanel_columns= renamed_by_flag'")
    flagged = build._build_and_load()
    assert not hasattr(flagged, "panel_columns")
    assert flagged.renamed_by_flag() > 0
    assert len(list((tmp_path / "keel" / "kernels").iterdir())) == 2


def test_extra_compiler_flags_that_cannot_be_split_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_NATIVE_CFLAGS", "-O1 '-g")
    found, why = build._load_once.__wrapped__()
    assert found is None
    assert why == """KEEL_NATIVE_CFLAGS = "-O1 '-g" cannot be split into flags: No closing quotation"""
