"""vLLM as the engine: the client of a server, and `start_vllm`, which starts a server and connects to it.

Guarantees that a version is assigned only after its weights are live, that every weight change resets the prefix cache,
and that each token carries the version that sampled it. Requests in flight during a change of full weights are aborted
by vLLM and resumed from their own tokens with the new weights, or with `drain` finish before the change; requests on an
adapter finish on it. A stop string that spans such a change is not detected.

Weights must be in a folder that the server can read. If the folder is visible from here its manifest is verified first,
because vLLM does not check it. The process itself is managed by `keel.inference.pool.vllm_process`.
"""

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from keel.common.manifest import check_weights
from keel.config import Sampling
from keel.errors import ModelError
from keel.inference.pool.http_engine import HttpEngine, ServerKind
from keel.inference.pool.vllm_process import VllmProcess
from keel.inference.protocol import EngineError, Generation, Health, WeightSource


class VllmEngine(HttpEngine):
    """Client of a vLLM server that runs with `VLLM_SERVER_DEV_MODE=1` and, for adapters, runtime LoRA updates."""

    def _init_backend(self) -> None:
        self._process: VllmProcess | None = None
        self._adapter: str | None = None
        self._active_requests: Counter[str] = Counter()
        self._retired_adapters: set[str] = set()
        self._load_lock = asyncio.Lock()
        self._accepting = asyncio.Event()
        self._accepting.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._weight_changes = 0
        self._load_failure = ""
        self._server_start_time: str | None = None
        self._restart_suspected = False

    def attach_process(self, process: VllmProcess) -> None:
        """Set the process of a server that was started here; `close` stops it."""
        self._process = process

    # --- generating ---

    async def _generate(self, prompt: list[int], sampling: Sampling, group: str | None) -> Generation:
        parts: list[Generation] = []
        sampled: list[int] = []
        while True:
            part, interrupted = await self._generate_part(
                prompt + sampled, _remaining_sampling(sampling, len(sampled)), group
            )
            parts.append(part)
            sampled += part.token_ids
            if not interrupted or len(sampled) >= sampling.max_tokens:
                return _join_parts(parts)

    async def _generate_part(self, prompt: list[int], sampling: Sampling, group: str | None) -> tuple[Generation, bool]:
        """Sample up to the end or up to a weight change; return the part and whether a change interrupted it."""
        await self._accepting.wait()
        if self._load_failure:
            raise EngineError(f"engine {self.url} is not usable: {self._load_failure}")
        kind = await self._detect_server()
        await self._check_temperature(kind, sampling.temperature, prompt)
        changes, live, name = self._weight_changes, self._version, self._model_name()
        self._active_requests[name] += 1
        self._idle.clear()
        try:
            choice = await self._request_completion(self._request_body(prompt, sampling, group))
        finally:
            self._active_requests[name] -= 1
            if not self._active_requests.total():
                self._idle.set()
            await self._unload_retired()
        part = self._parse_choice(choice, sampling, live)
        return part, part.finish_reason == "abort" and changes != self._weight_changes

    def _request_body(self, prompt: list[int], sampling: Sampling, group: str | None) -> dict[str, Any]:
        # vLLM takes fields that are not sent from the model's generation_config.json
        no_op_values = {"top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": 1.0}
        return super()._request_body(prompt, sampling, group) | no_op_values

    def _model_name(self) -> str:
        return self._adapter or str(self.model)

    # --- weights ---

    async def load_weights(self, source: WeightSource, version: int, *, drain: bool = False) -> None:
        """Load all weights or an adapter from a folder."""
        if source.kind == "folder":
            await self._load_folder(str(source.path), version, drain)
        elif source.kind == "adapter":
            await self._load_adapter(str(source.path), version)
        else:
            raise source.unsupported_by("vLLM")

    async def _load_folder(self, folder: str, version: int, drain: bool) -> None:
        """Take all weights from a folder. Requests in flight go on with the new ones, or end before the change."""
        async with self._load_lock:
            await self._detect_server()
            await asyncio.to_thread(_check_folder, folder)
            async with self._paused(f"loading {folder} as version {version}", drain):
                body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
                await self._post("/collective_rpc", body, "start it with VLLM_SERVER_DEV_MODE=1")
                await self._reset_prefix_cache()
                self._server_start_time = await self._read_start_time()
                self._switch_adapter(None)
                self._version = version
            await self._unload_retired()

    async def _load_adapter(self, folder: str, version: int) -> None:
        """Load a PEFT adapter under a new name. Requests in flight finish on the adapter they started with."""
        async with self._load_lock:
            await self._detect_server()
            await asyncio.to_thread(_check_folder, folder)
            # never reuse a name: vLLM would reuse the prefix cache of the earlier adapter
            name = f"keel-{version}-{uuid.uuid4().hex[:8]}"
            hint = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, hint)
            await self._reset_prefix_cache()
            self._server_start_time = await self._read_start_time()
            self._switch_adapter(name)
            self._version = version
            await self._unload_retired()

    @asynccontextmanager
    async def _paused(self, action: str, drain: bool) -> AsyncIterator[None]:
        """Pause sampling during a change. If it fails the weights are unknown and the engine becomes unusable."""
        self._accepting.clear()
        try:
            if drain:
                await self._idle.wait()
            self._weight_changes += 1
            # a server without /pause keeps sampling; its requests then count as the older version until they end.
            # "wait" drains the requests of other clients too
            mode = {"mode": "wait" if drain else "abort"}
            paused = (await self._send("POST", "/pause", params=mode)).status_code == 200
            try:
                yield
            finally:
                if paused:
                    await self._post("/resume", None, "")
            self._load_failure = ""
        except BaseException as error:
            self._load_failure = f"{action} failed ({error or type(error).__name__}); load weights again"
            raise
        finally:
            self._accepting.set()

    async def _reset_prefix_cache(self) -> None:
        # recompute running requests; otherwise a cache in use is not reset
        response = await self._send("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if response.status_code != 200:
            raise self._response_error(response)

    async def _post(self, path: str, body: dict[str, Any] | None, missing_hint: str) -> None:
        response = await self._send("POST", path, json=body) if body else await self._send("POST", path)
        if response.status_code == 404 and missing_hint:
            raise EngineError(f"vLLM at {self.url} has no {path}; {missing_hint}", retryable=False)
        if response.status_code != 200:
            raise self._response_error(response)

    def _switch_adapter(self, successor: str | None) -> None:
        if self._adapter is not None:
            self._retired_adapters.add(self._adapter)
        self._adapter = successor

    async def _unload_retired(self) -> None:
        """Unload retired adapters that no request uses any more."""
        for name in [name for name in self._retired_adapters if not self._active_requests[name]]:
            self._retired_adapters.discard(name)
            try:
                await self._send("POST", "/v1/unload_lora_adapter", json={"lora_name": name}, timeout=10.0)
            except EngineError:
                # the server is gone, and so is the adapter
                return

    # --- version and health ---

    async def version(self) -> int:
        """Return the version this engine loaded last, or the initial one if the server restarted since."""
        await self._detect_server()
        if self._adapter is not None:
            models = (await self._get_json("/v1/models")).get("data") or []
            if self._adapter not in {model.get("id") for model in models if isinstance(model, dict)}:
                self._reset_after_restart()
        return self._version

    async def health(self) -> Health:
        """Return the server's health; after a failed load it is not ready until a load succeeds."""
        health = await super().health()
        if health.ready and self._restart_suspected:
            try:
                await self._detect_server()
            except EngineError as error:
                return Health(False, self._version, error=str(error))
        load = await self._queue_lengths() if health.ready else {}
        return Health(
            ready=health.ready and not self._load_failure,
            version=self._version,
            running=load.get("running", health.running),
            waiting=load.get("waiting", 0),
            error=health.error or self._load_failure,
        )

    def _on_connection_lost(self) -> None:
        if self._process is not None and self._process.alive:
            return
        self._kind = None
        self._restart_suspected = True

    async def _detect_server(self) -> ServerKind:
        kind = await super()._detect_server()
        if self._restart_suspected:
            self._restart_suspected = False
            if self._server_start_time is None or await self._read_start_time() != self._server_start_time:
                self._reset_after_restart()
        return kind

    def _reset_after_restart(self) -> None:
        """Reset the state to that of a fresh server, which holds its initial weights."""
        self._adapter = None
        self._retired_adapters.clear()
        self._logprobs_scaled = None
        self._load_failure = ""
        self._version = self._initial_version

    async def _read_start_time(self) -> str | None:
        match = re.search(r"^process_start_time_seconds (\S+)", await self._fetch_metrics(), re.MULTILINE)
        return match.group(1) if match else None

    async def _queue_lengths(self) -> dict[str, int]:
        rows = re.findall(
            r"^vllm:num_requests_(running|waiting)\{[^}]*\} (\S+)", await self._fetch_metrics(), re.MULTILINE
        )
        load: Counter[str] = Counter()
        for name, value in rows:
            load[name] += int(float(value))
        return dict(load)

    async def _fetch_metrics(self) -> str:
        try:
            response = await self._send("GET", "/metrics", timeout=10.0)
        except EngineError:
            return ""
        return response.text if response.status_code == 200 else ""

    async def close(self) -> None:
        """End requests in flight with an `EngineError`, and stop the server if it was started here."""
        await super().close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)


def _check_folder(folder: str) -> None:
    try:
        check_weights(Path(folder))
    except ModelError as error:
        raise EngineError(f"invalid weights in {folder}: {error}", retryable=False) from error


def _remaining_sampling(sampling: Sampling, sampled: int) -> Sampling:
    """Return the settings for the remaining tokens; the seed advances so that no noise is drawn twice."""
    if not sampled:
        return sampling
    seed = None if sampling.seed is None else sampling.seed + sampled
    return sampling.model_copy(update={"max_tokens": sampling.max_tokens - sampled, "seed": seed})


def _join_parts(parts: Sequence[Generation]) -> Generation:
    if len(parts) == 1:
        return parts[0]
    return Generation(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        versions=tuple(version for part in parts for version in part.versions),
        finish_reason=parts[-1].finish_reason,
        temperature=parts[-1].temperature,
    )


async def start_vllm(
    python: str,
    model_folder: str,
    *,
    port: int = 0,
    dtype: str = "auto",
    max_lora_rank: int | None = None,
    max_model_len: int | None = None,
    version: int = 0,
    timeout: float = 600.0,
    start_timeout: float = 600.0,
    extra_args: Sequence[str] = (),
) -> VllmEngine:
    """Start a server on loopback and return its client when it is ready.

    `python` is the interpreter of an environment with vLLM (scripts/install_vllm.sh); `extra_args` are appended to the
    command line. A server that does not start within `start_timeout` seconds is stopped, and the error shows the end of
    its log.
    """
    process = VllmProcess.start(python, model_folder, port, dtype, max_lora_rank, max_model_len, extra_args)
    engine = VllmEngine(
        process.url, model=VllmProcess.MODEL_NAME, api_key=process.api_key, timeout=timeout, version=version
    )
    engine.attach_process(process)
    try:
        deadline = asyncio.get_running_loop().time() + start_timeout
        while not (await engine.health()).ready:
            if not process.alive:
                raise EngineError(
                    f"vLLM did not start (exit code {process.exit_code}):\n{process.log_tail()}", retryable=False
                )
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(
                    f"vLLM was not ready within {start_timeout} s:\n{process.log_tail()}", retryable=False
                )
            await asyncio.sleep(0.5)
    except BaseException:
        await engine.close()
        raise
    return engine
