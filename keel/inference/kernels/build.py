"""Compile the native kernels with the local C compiler, cache the shared library and load it.

The kernels serve float32 on CPUs, where they are faster than torch. Without a compiler, or on an unsupported system,
`load_kernels` returns None and callers use torch. The library is only loaded from a file and a folder that only the
user can write. The kernels use the OpenMP runtime that torch has already loaded, which must be GNU's: macOS and Windows
are not supported. Correctness of the results is not checked here; the engine and the trainer compare a probe with the
model's own code.

The environment variable KEEL_NATIVE_CFLAGS adds compiler flags, for example `-fsanitize=address` (see
scripts/sanitize.sh). Libraries built with different flags are cached separately.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch  # noqa: F401 - loads the OpenMP runtime that _load looks for

from keel.common.cache import cache_folder

log = logging.getLogger("keel")

SOURCE_FOLDER = Path(__file__).parent
COMPILER_FLAGS = ["-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-fno-math-errno"]
EXTRA_FLAGS = "KEEL_NATIVE_CFLAGS"
"""Environment variable with flags to add after COMPILER_FLAGS, for compiling and linking; quoted as in a shell."""
COMPILE_TIMEOUT = 120
"""Seconds that one compiler call may take: more than ten times the duration on a slow machine."""


def load_kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they cannot be built or loaded here."""
    return _load_once()[0]


def unavailable_reason() -> str:
    """Return the reason why `load_kernels` returns None, or an empty string if it returns the kernels."""
    return _load_once()[1]


def require_library() -> ctypes.CDLL:
    """Return the compiled kernels; raise RuntimeError with the reason if there are none."""
    library, reason = _load_once()
    if library is None:
        raise RuntimeError(
            f"native kernels are not available: {reason}; call load_kernels() first and use torch if it returns None"
        )
    return library


@cache
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    try:
        return _build_and_load(), ""
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        log.info("native kernels are not used: %s", reason)
        return None, reason


def _build_and_load() -> ctypes.CDLL:
    """Load the library for these sources, flags and processor; compile it first if it is not cached."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"native kernels are not supported on {sys.platform}")
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        raise OSError("torch uses an OpenMP runtime other than GNU's")
    compiler = next((path for name in ("gcc", "cc") if (path := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C compiler (gcc) on the PATH")
    flags = _flags()
    # The predefined macros name the compiler and the processor: machines that differ may share a cache folder.
    macros = _run([compiler, *flags, "-dM", "-E", "-x", "c", os.devnull])
    digest = hashlib.sha256(macros.encode())
    for source in sorted([*SOURCE_FOLDER.glob("*.c"), *SOURCE_FOLDER.glob("*.h")]):
        digest.update(source.read_bytes())
    digest.update(shlex.join(flags).encode())
    target = cache_folder() / "kernels" / f"{digest.hexdigest()[:16]}.so"
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(target.parent)
    if not target.exists():
        _compile(compiler, flags, target)
    _check_owner(target)
    return ctypes.CDLL(str(target))


def _flags() -> list[str]:
    extra = os.environ.get(EXTRA_FLAGS, "")
    try:
        return [*COMPILER_FLAGS, *shlex.split(extra)]
    except ValueError as error:
        raise OSError(f"{EXTRA_FLAGS} = {extra!r} cannot be split into flags: {error}") from error


def _check_owner(path: Path) -> None:
    """Raise OSError if another user may have written this file or folder: code is loaded from it."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{path} may be written by other users; make yourself its owner and run chmod go-w on it")


def _compile(compiler: str, flags: list[str], target: Path) -> None:
    """Compile every C file next to this module into `target`, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for source in sorted(SOURCE_FOLDER.glob("*.c")):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        library = Path(scratch) / target.name
        # Linked without -fopenmp: its symbols resolve to the runtime that torch has loaded. A second runtime would
        # start its own threads.
        link_flags = [flag for flag in flags if flag != "-fopenmp"]
        _run([compiler, *link_flags, "-shared", *objects, "-o", str(library), "-lm"])
        library.chmod(0o700)
        os.replace(library, target)


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT).stdout
