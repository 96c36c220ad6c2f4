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

import torch

from keel.cache import cache_folder

log = logging.getLogger("keel")

HERE = Path(__file__).parent
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-fno-math-errno"]
SECONDS = 120
"""More than ten times what it takes on a slow machine."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None; the log says why, once."""
    try:
        return _load()
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.info("kernels in C are not used: %s", str(said).strip().splitlines()[0] if said else type(error).__name__)
        return None


def _load() -> ctypes.CDLL:
    if not sys.platform.startswith("linux"):
        raise OSError(f"they are not made for {sys.platform}")
    _ = torch.get_num_threads()  # torch is loaded, and with it the OpenMP whose threads are shared
    ctypes.CDLL(None).GOMP_parallel  # noqa: B018 - an AttributeError when torch has another OpenMP
    compiler = next((found for name in ("gcc", "cc") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C compiler (gcc) on the PATH")
    # what the compiler makes of this processor: a cache folder may be shared by machines that differ
    macros = _run([compiler, *FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    digest = hashlib.sha256(macros.encode())
    for source in sorted([*HERE.glob("*.c"), *HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    digest.update(" ".join(FLAGS).encode())
    target = folder() / f"kernels-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, target)
    return ctypes.CDLL(str(target))


def folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


def _compile(compiler: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for source in sorted(HERE.glob("*.c")):
            objects.append(str(Path(scratch) / f"{source.stem}.o"))
            _run([compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
        # linked without its own OpenMP: the symbols are found in torch's, which is loaded
        made = Path(scratch) / target.name
        _run([compiler, "-shared", *objects, "-o", str(made), "-lm"])
        os.replace(made, target)


def _run(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=SECONDS).stdout
