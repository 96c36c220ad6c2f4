"""Start and stop a vLLM server process: its command line, environment and log.

Guarantees that the whole process group is gone after `stop`, also if Python exits without calling it, and that the
server listens on loopback only, behind a key that appears in no command line. Sends no requests to the server.
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
"""Nothing is downloaded or reported, and adapters and weights can be changed at run time."""


@dataclass
class VllmProcess:
    """A vLLM server started by this process."""

    MODEL_NAME: ClassVar[str] = "policy"
    """Name of the served model."""

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
        """Start a server; port 0 selects a free port."""
        if not Path(python).is_file():
            raise ConfigError(
                f"engine.vllm_python = {python} is not a Python interpreter; scripts/install_vllm.sh creates an"
                " environment with vLLM"
            )
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
        """Whether the process is running."""
        return self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, or None while it runs."""
        return self.process.poll()

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log."""
        with open(self.log.name, errors="replace") as log:
            return "".join(log.readlines()[-lines:]).strip() or "(the log is empty)"

    def stop(self, timeout: float = 15.0) -> None:
        """Stop the whole process group: SIGTERM first, SIGKILL after `timeout` seconds."""
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
        # the group id is the first process's id and is not reused while any process of the group lives
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
    """Return the arguments that follow the interpreter on a server's command line."""
    # not `vllm serve`: it looks up a distribution named vllm, and the CPU build has another name
    argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", model_folder]
    argv += ["--served-model-name", VllmProcess.MODEL_NAME, "--dtype", dtype, "--host", host, "--port", str(port)]
    # log-probs as sampled, and no sampling defaults from the model's generation_config.json
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if max_lora_rank is not None:
        # two: while a new adapter comes into use, requests in flight still use the previous one
        argv += ["--enable-lora", "--max-lora-rank", str(max_lora_rank), "--max-loras", "2"]
    if max_model_len is not None:
        argv += ["--max-model-len", str(max_model_len)]
    return argv


def server_env() -> dict[str, str]:
    """Return the environment of a server; the user's variables take precedence over ours."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ours = dict(SERVER_ENV)
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        # without these vLLM binds a single core and uses half of the memory for its cache
        ours |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "OMP_NUM_THREADS": str(len(cores)),
        }
        inherited.pop("OMP_NUM_THREADS", None)
    return ours | inherited


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
