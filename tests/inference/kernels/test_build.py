"""Kernels are compiled once, loaded only from a folder that other users cannot write, and optional."""

from pathlib import Path

import pytest

from keel.inference.kernels import build
from tests.support.kernels import needs_kernels

pytestmark = needs_kernels


def test_kernels_are_compiled_once_into_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build._build_and_load().panel_columns() > 0
    (library,) = (tmp_path / "keel" / "kernels").iterdir()
    assert library.stat().st_mode & 0o077 == 0
    before = library.stat()
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    build._build_and_load()
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_library_is_not_loaded_from_a_folder_that_others_can_write(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "keel" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(OSError, match=rf"{folder} may be written by other users"):
        build._build_and_load()
    assert not list(folder.iterdir())


def test_without_a_compiler_there_are_no_kernels_and_the_reason_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert build._load_once.__wrapped__() == (None, "there is no C compiler (gcc) on the PATH")


def test_a_compiler_error_is_returned_as_the_reason_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "COMPILER_FLAGS", [*build.COMPILER_FLAGS, "-include", "no_such_header.h"])
    run = build._run  # the query for the macros comes first and would fail too
    monkeypatch.setattr(build, "_run", lambda command: "" if "-dM" in command else run(command))
    library, reason = build._load_once.__wrapped__()
    assert library is None
    assert "no_such_header.h" in reason
    assert not list((tmp_path / "keel" / "kernels").iterdir())


def test_extra_compiler_flags_are_used_and_cached_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KEEL_NATIVE_CFLAGS", "")
    build._build_and_load()
    # a macro that replaces the name of an exported function, with a space that must survive the splitting
    monkeypatch.setenv("KEEL_NATIVE_CFLAGS", "-O1 '-Dpanel_columns= renamed_by_flag'")
    flagged = build._build_and_load()
    assert not hasattr(flagged, "panel_columns")
    assert flagged.renamed_by_flag() > 0
    assert len(list((tmp_path / "keel" / "kernels").iterdir())) == 2


def test_extra_compiler_flags_that_cannot_be_split_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEL_NATIVE_CFLAGS", "-O1 '-g")
    library, reason = build._load_once.__wrapped__()
    assert library is None
    assert reason == """KEEL_NATIVE_CFLAGS = "-O1 '-g" cannot be split into flags: No closing quotation"""
