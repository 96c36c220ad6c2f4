"""The kernels in C, compiled once by the machine's own compiler and kept in the cache folder.

They serve float32 on CPUs, where they are faster than what torch has; without a compiler, or on a system where they do
not fit, `library` gives None and everything goes by torch. Whether their numbers are right is not taken for granted
by whoever uses them: engine and trainer compare a probe with the model's own code. They share the threads of torch's
OpenMP, which is why that of another runtime (macOS, Windows) is not served.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch  # noqa: F401 - see _load

from keel.cache import cache_folder

log = logging.getLogger("keel")

HERE = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-fno-math-errno"]
SECONDS = 120
"""More than ten times what it takes on a slow machine."""


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None."""
    return _found()[0]


def why_not() -> str:
    """Why there are none; empty when there are."""
    return _found()[1]


@cache
def _found() -> tuple[ctypes.CDLL | None, str]:
    try:
        return _load(), ""
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        why = lines[0] if lines else type(error).__name__
        log.info("kernels in C are not used: %s", why)
        return None, why


def _load() -> ctypes.CDLL:
    if not sys.platform.startswith("linux"):
        raise OSError(f"they are not made for {sys.platform}")
    # torch is loaded, and with it the OpenMP whose threads are shared
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        raise OSError("torch has another OpenMP here than GNU's")
    compiler = next((found for name in ("gcc", "cc") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C compiler (gcc) on the PATH")
    # what the compiler makes of this processor: a cache folder may be shared by machines that differ
    macros = _run([compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    digest = hashlib.sha256(macros.encode())
    for source in sorted([*HERE.glob("*.c"), *HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    digest.update(" ".join(FLAGS).encode())
    target = cache_folder() / "kernels" / f"{digest.hexdigest()[:16]}.so"
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(target.parent)
    if not target.exists():
        _compile(compiler, target)
    _check_owner(target)
    return ctypes.CDLL(str(target))


def _check_owner(path: Path) -> None:
    """Code is run from here: nobody else may have written it."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{path} may be written by others; make it your own and nobody else's (chmod go-w)")


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for source in sorted(HERE.glob("*.c")):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _run([compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
        # linked without its own OpenMP: the symbols are found in torch's, which is loaded
        made = Path(scratch) / target.name
        _run([compiler, "-shared", *objects, "-o", str(made), "-lm"])
        made.chmod(0o700)
        os.replace(made, target)


def _run(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=SECONDS).stdout
