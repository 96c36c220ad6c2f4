"""A vLLM server as a process of its own: its command, its environment, its log, its end.

Guarantees that the whole process group is gone after `stop`, also when Python exits without it, and that the server
listens on loopback only, behind a key that is in no command line. It waits for nothing and sends no request.
"""

import atexit
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from keel.errors import ConfigError

SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Nothing is fetched or reported; adapters and weights can be changed while it runs."""


@dataclass
class VllmProcess:
    """A server that was started here."""

    MODEL_NAME: ClassVar[str] = "policy"
    """The name under which it serves its model."""

    process: subprocess.Popen[bytes]
    url: str
    api_key: str
    log: IO[bytes]

    @classmethod
    def start(
        cls,
        python: str,
        model_folder: str,
        port: int,
        dtype: str,
        max_lora_rank: int | None,
        max_model_len: int | None,
        extra_args: Sequence[str],
    ) -> "VllmProcess":
        """Start it; port 0: a free one."""
        if not Path(python).is_file():
            raise ConfigError(f"{python} is no interpreter; scripts/install_vllm.sh makes an environment with vLLM")
        if not Path(model_folder).is_dir():
            raise ConfigError(f"model folder {model_folder} does not exist")
        port = port or free_port()
        key = secrets.token_urlsafe(24)
        command = [python, *vllm_argv(model_folder, "127.0.0.1", port, dtype, max_lora_rank, max_model_len)]
        log = tempfile.NamedTemporaryFile(prefix="keel-vllm-", suffix=".log")  # noqa: SIM115 - lives as long as the server
        process = subprocess.Popen(
            [*command, *extra_args],
            env=server_env() | {"VLLM_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        server = cls(process, f"http://127.0.0.1:{port}", key, log)
        atexit.register(server.stop)
        return server

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, if it ended."""
        return self.process.poll()

    def log_tail(self, lines: int = 40) -> str:
        """The end of its log."""
        with open(self.log.name, errors="replace") as log:
            return "".join(log.readlines()[-lines:]).strip() or "(its log is empty)"

    def stop(self, timeout: float = 15.0) -> None:
        """End the server and all that it started: asked first, killed after `patience` seconds."""
        atexit.unregister(self.stop)
        self._signal_group(signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and (self.alive or self._group_alive()):
            time.sleep(0.05)
        self._signal_group(signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(FileNotFoundError):
            self.log.close()

    def _signal_group(self, signum: int) -> None:
        # the group's id is the first process's, and stays taken as long as any of the group lives
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def _group_alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def vllm_argv(
    model_folder: str, host: str, port: int, dtype: str, max_lora_rank: int | None, max_model_len: int | None = None
) -> list[str]:
    """What follows the interpreter on the command line of a server."""
    # not `vllm serve`: it looks for a distribution of that name, and the CPU build has another
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model_folder]
    words += ["--served-model-name", VllmProcess.MODEL_NAME, "--dtype", dtype, "--host", host, "--port", str(port)]
    # log-probs as sampled, and nothing of the distribution from the model's own generation_config.json
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if max_lora_rank is not None:
        # two: while a new adapter is taken into use, requests are still on the one before it
        words += ["--enable-lora", "--max-lora-rank", str(max_lora_rank), "--max-loras", "2"]
    if max_model_len is not None:
        words += ["--max-model-len", str(max_model_len)]
    return words


def server_env() -> dict[str, str]:
    """The environment of a server; what the user has set goes before what is set here."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ours = dict(SERVER_ENV)
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        # without these it binds a single core and takes half of the memory for its cache
        ours |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "OMP_NUM_THREADS": str(len(cores)),
        }
        inherited.pop("OMP_NUM_THREADS", None)
    return ours | inherited


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
