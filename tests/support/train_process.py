"""A `keel train` process that ends with the test."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RUN_TIMEOUT = 240
"""Seconds after which a training process is killed."""


@contextmanager
def train_process(
    *arguments: str, launcher: Sequence[str] = ("-m",), stderr: int = subprocess.STDOUT
) -> Iterator["subprocess.Popen[str]"]:
    """Run `keel train` with one thread; the process is killed at the end of the block, or after RUN_TIMEOUT."""
    with subprocess.Popen(
        [sys.executable, *launcher, "keel.cli", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    ) as process:
        timer = threading.Timer(RUN_TIMEOUT, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()
