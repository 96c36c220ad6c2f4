"""The vLLM engine against a fake server with vLLM's endpoints and, if vLLM is installed, the real server.

The real server is used if scripts/install_vllm.sh has created .venv-vllm at the root of the repository.
"""

import asyncio
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
import transformers
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from keel.common.manifest import write_manifest
from keel.config import ModelSettings, PoolSettings, Sampling
from keel.errors import ConfigError
from keel.inference.pool.pool import Pool
from keel.inference.pool.vllm_engine import VllmEngine, start_vllm
from keel.inference.pool.vllm_process import server_env
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.training import load_model
from keel.training.model import tiny_models
from keel.training.publish.adapter import AdapterTransport
from keel.training.publish.folder import FolderTransport
from keel.training.publish.publisher import Publisher
from tests.support.paths import ROOT

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
PROMPT = [1, 2, 3]


class FakeVllm:
    """A fake server with vLLM's endpoints. Token k of a completion is len(prompt) + k, sampled every `pace` seconds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.adapters: list[str] = []
        self.weights = "base"
        self.sampled_from: list[str] = []
        self.pace = 0.0
        self.started = 1.0
        self.running = 0
        self.missing: set[str] = set()
        self.failing: set[str] = set()
        self._aborting = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()

    def app(self) -> Starlette:
        handlers = {
            "/v1/completions": self.complete,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": self.empty,
            "/pause": self.pause,
            "/resume": self.resume,
        }
        routes = [Route(path, self._recorded(path, handler), methods=["POST"]) for path, handler in handlers.items()]
        routes += [Route("/health", self.empty), Route("/metrics", self.metrics), Route("/v1/models", self.models)]
        return Starlette(routes=[*routes, Route("/version", self.version)])

    def _recorded(self, path: str, handler: Any) -> Any:
        async def respond(request: Request) -> Response:
            if path in self.missing:
                return JSONResponse({"detail": "Not Found"}, 404)
            body = json.loads(await request.body() or b"{}") | dict(request.query_params)
            if path != "/v1/completions":
                self.calls.append(path)
            if path in self.failing:
                return JSONResponse({"error": "it failed"}, 500)
            return await handler(body)

        return respond

    async def complete(self, body: dict[str, Any]) -> Response:
        if body["model"] not in ("policy", *self.adapters):
            return JSONResponse({"error": {"message": f"model {body['model']} does not exist"}}, 404)
        await self._resumed.wait()
        self.bodies.append(body)
        self.running += 1
        tokens: list[int] = []
        while len(tokens) < body["max_tokens"] and not self._aborting.is_set():
            tokens.append(len(body["prompt"]) + len(tokens))
            self.sampled_from.append(body["model"] if body["model"] != "policy" else self.weights)
            await asyncio.sleep(self.pace)
        self.running -= 1
        finish = "length" if len(tokens) == body["max_tokens"] else "abort"
        logprobs = {"token_logprobs": [-1.0] * len(tokens)} if tokens else None
        return JSONResponse(
            {"choices": [{"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish}]}
        )

    async def load_adapter(self, body: dict[str, Any]) -> Response:
        if body["lora_name"] in self.adapters:
            return JSONResponse({"error": {"message": "already loaded"}}, 400)
        self.adapters.append(body["lora_name"])
        return PlainTextResponse("Success")

    async def unload_adapter(self, body: dict[str, Any]) -> Response:
        self.adapters.remove(body["lora_name"])
        return PlainTextResponse("Success")

    async def rpc(self, body: dict[str, Any]) -> Response:
        assert body["method"] == "reload_weights"
        assert self.running == 0 or "/pause" in self.missing
        self.weights = body["kwargs"]["weights_path"]
        return JSONResponse({"results": [None]})

    async def pause(self, body: dict[str, Any]) -> Response:
        self._resumed.clear()
        if body.get("mode", "abort") == "abort":
            self._aborting.set()
        while self.running:
            await asyncio.sleep(0.001)
        self._aborting.clear()
        return JSONResponse({"status": "paused"})

    async def resume(self, _body: dict[str, Any]) -> Response:
        self._resumed.set()
        return JSONResponse({"status": "resumed"})

    async def empty(self, _request: Any) -> Response:
        return Response()

    async def version(self, _request: Any) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def models(self, _request: Any) -> Response:
        return JSONResponse({"data": [{"id": name, "max_model_len": 64} for name in ("policy", *self.adapters)]})

    async def metrics(self, _request: Any) -> Response:
        rows = [
            f"process_start_time_seconds {self.started}",
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0',
            'vllm:num_requests_waiting{engine="0"} 2.0',
        ]
        return PlainTextResponse("\n".join(rows))


class BreakableTransport(httpx.ASGITransport):
    """A connection that tests can break."""

    broken = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.broken:
            raise httpx.ConnectError("refused")
        return await super().handle_async_request(request)


def on_fake_vllm(work: Callable[[FakeVllm, VllmEngine, BreakableTransport], Any]) -> FakeVllm:
    async def run() -> FakeVllm:
        server = FakeVllm()
        transport = BreakableTransport(server.app())
        async with httpx.AsyncClient(transport=transport) as client:
            await work(server, VllmEngine("http://vllm:8000", client=client), transport)
        return server

    return asyncio.run(run())


async def sample(engine: VllmEngine, count: int = 4) -> Generation:
    return await engine.generate(PROMPT, Sampling(max_tokens=count))


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_all_sampling_parameters_are_sent_explicitly() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        await sample(engine)
        body = server.bodies[0]
        assert body["repetition_penalty"] == 1.0
        assert (body["top_k"], body["top_p"], body["min_p"], body["temperature"]) == (-1, 1.0, 0.0, 1.0)
        assert (body["model"], body["prompt"], body["return_token_ids"]) == ("policy", PROMPT, True)
        assert "group" not in body

    on_fake_vllm(work)


def test_a_load_reloads_weights_resets_the_prefix_cache_and_then_sets_the_version() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        assert await engine.version() == 0
        assert (await sample(engine)).versions == (0,) * 4
        await engine.load_weights(WeightSource.folder("step_1"), 1)
        assert await engine.version() == 1
        assert (await sample(engine)).versions == (1,) * 4
        assert server.weights == "step_1"

    assert on_fake_vllm(work).calls == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]


def test_a_request_in_flight_resumes_from_its_tokens_and_each_token_has_its_own_version() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        server.pace = 0.005
        request = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40, seed=5)))
        for version in (1, 2):
            count = len(server.sampled_from)
            await wait_until(lambda count=count: len(server.sampled_from) > count + 3)  # type: ignore[misc]
            await engine.load_weights(WeightSource.folder(f"step_{version}"), version)
        generation = await request
        # as without an interruption, except for the seeds
        assert generation.token_ids == tuple(range(3, 43))
        names = {0: "base", 1: "step_1", 2: "step_2"}
        assert [names[version] for version in generation.versions] == server.sampled_from
        assert set(generation.versions) == {0, 1, 2}
        assert generation.finish_reason == "length"
        assert len({body["seed"] for body in server.bodies}) == 3

    on_fake_vllm(work)


@pytest.mark.parametrize("missing", [set(), {"/pause"}])
def test_a_drained_load_waits_for_completions_and_each_has_one_version(missing: set[str]) -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        server.pace, server.missing = 0.002, missing
        started = [asyncio.ensure_future(sample(engine, 40)) for _ in range(2)]
        await wait_until(lambda: server.running == 2)
        loading = asyncio.ensure_future(engine.load_weights(WeightSource.folder("step_1"), 1, drain=True))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(sample(engine, 4))
        await loading
        assert all(request.done() for request in started)
        generations = await asyncio.gather(*started, late)
        assert [set(generation.versions) for generation in generations] == [{0}, {0}, {1}]
        assert server.sampled_from == ["base"] * 80 + ["step_1"] * 4

    on_fake_vllm(work)


def test_a_folder_that_fails_its_manifest_is_an_error_before_vllm_is_called(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_manifest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weighty")

    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        for source in (WeightSource.folder, WeightSource.adapter):
            with pytest.raises(EngineError, match=r"model\.safetensors was changed"):
                await engine.load_weights(source(str(tmp_path)), 1)
        assert (await engine.version(), server.calls) == (0, [])
        assert (await engine.health()).ready

    on_fake_vllm(work)


def test_without_pause_a_request_in_flight_counts_as_the_older_version() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        server.missing.add("/pause")
        server.pace = 0.005
        request = asyncio.ensure_future(sample(engine, 20))
        await wait_until(lambda: len(server.sampled_from) > 3)
        await engine.load_weights(WeightSource.folder("step_1"), 1)
        assert set((await request).versions) == {0}
        assert server.calls == ["/collective_rpc", "/reset_prefix_cache"]

    on_fake_vllm(work)


def test_an_abort_by_another_client_is_returned_as_abort() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        server.pace = 0.005
        request = asyncio.ensure_future(sample(engine, 50))
        await wait_until(lambda: len(server.sampled_from) > 3)
        await server.pause({})
        generation = await request
        assert generation.finish_reason == "abort"
        assert 3 < len(generation.token_ids) < 50

    on_fake_vllm(work)


@pytest.mark.parametrize("path", ["/collective_rpc", "/reset_prefix_cache", "/resume"])
def test_after_a_failed_load_nothing_is_sampled_until_a_load_succeeds(path: str) -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        server.failing.add(path)
        with pytest.raises(EngineError, match="it failed"):
            await engine.load_weights(WeightSource.folder("step_1"), 1)
        assert "loading step_1 as version 1 failed" in (await engine.health()).error
        assert not (await engine.health()).ready
        with pytest.raises(EngineError, match="load weights again") as error:
            await sample(engine)
        assert error.value.retryable
        server.failing.clear()
        await engine.load_weights(WeightSource.folder("step_1"), 1)
        assert (await engine.health()).ready
        assert (await sample(engine)).versions == (1,) * 4

    on_fake_vllm(work)


@pytest.mark.parametrize(
    ("path", "hint"), [("/collective_rpc", "VLLM_SERVER_DEV_MODE=1"), ("/v1/load_lora_adapter", "--enable-lora")]
)
def test_a_missing_endpoint_is_an_error_with_the_option_to_set(path: str, hint: str) -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        server.missing.add(path)
        source = WeightSource.folder if "rpc" in path else WeightSource.adapter
        with pytest.raises(EngineError, match=hint) as error:
            await engine.load_weights(source("folder"), 1)
        assert not error.value.retryable
        assert await engine.version() == 0

    on_fake_vllm(work)


def test_each_adapter_has_a_new_name_and_the_old_one_is_unloaded() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        await engine.load_weights(WeightSource.adapter("a"), 1)
        first = server.adapters[0]
        assert (await sample(engine)).versions == (1,) * 4
        await engine.load_weights(WeightSource.adapter("a"), 1)
        assert server.adapters != [first]
        assert len(server.adapters) == 1
        assert server.bodies[-1]["model"] == first
        await sample(engine)
        assert server.bodies[-1]["model"] == server.adapters[0]
        # full weights: the adapter belonged to the previous weights
        await engine.load_weights(WeightSource.folder("step_2"), 2)
        assert server.adapters == []
        await sample(engine)
        assert server.bodies[-1]["model"] == "policy"

    server = on_fake_vllm(work)
    assert server.calls[:2] == ["/v1/load_lora_adapter", "/reset_prefix_cache"]


def test_requests_finish_on_their_adapter_which_is_then_unloaded() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        await engine.load_weights(WeightSource.adapter("a"), 1)
        old = server.adapters[0]
        server.pace = 0.005
        request = asyncio.ensure_future(sample(engine, 20))
        await wait_until(lambda: len(server.sampled_from) > 3)
        await engine.load_weights(WeightSource.adapter("b"), 2)
        assert old in server.adapters
        assert (await sample(engine, 2)).versions == (2, 2)
        assert set((await request).versions) == {1}
        assert old not in server.adapters
        assert len(server.adapters) == 1

    on_fake_vllm(work)


@pytest.mark.parametrize(("restarted", "version"), [(False, 3), (True, 0)])
def test_after_a_lost_connection_a_restart_is_detected(restarted: bool, version: int) -> None:
    async def work(server: FakeVllm, engine: VllmEngine, transport: BreakableTransport) -> None:
        await engine.load_weights(WeightSource.folder("step_3"), 3)
        transport.broken = True
        assert not (await engine.health()).ready
        with pytest.raises(EngineError, match="cannot be reached"):
            await sample(engine)
        transport.broken = False
        server.started += restarted
        assert (await engine.health()).version == version
        assert await engine.version() == version
        assert (await sample(engine)).versions == (version,) * 4

    on_fake_vllm(work)


def test_an_adapter_missing_on_the_server_is_not_live() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        await engine.load_weights(WeightSource.adapter("a"), 1)
        assert await engine.version() == 1
        server.adapters.clear()
        assert await engine.version() == 0

    on_fake_vllm(work)


def test_a_completion_ends_at_the_context_length() -> None:
    async def work(server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        generation = await sample(engine, 100)
        assert server.bodies[0]["max_tokens"] == len(generation.token_ids) == 64 - len(PROMPT)
        assert generation.finish_reason == "length"

    on_fake_vllm(work)


def test_the_queue_lengths_are_read_from_the_server() -> None:
    async def work(_server: FakeVllm, engine: VllmEngine, _transport: BreakableTransport) -> None:
        health = await engine.health()
        assert (health.ready, health.running, health.waiting) == (True, 0, 2)

    on_fake_vllm(work)


# --- starting a server ---


def fake_python(folder: Path, script: str) -> str:
    """Write an interpreter that runs this script instead of vLLM."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_error_of_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "import sys; print('lines of log'); sys.exit('no such device')")
    with pytest.raises(EngineError, match=r"exit code 1.*\n.*lines of log|no such device") as error:
        asyncio.run(start_vllm(python, str(tmp_path)))
    assert "no such device" in str(error.value)


@pytest.mark.process
def test_a_server_that_is_not_ready_in_time_is_stopped_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(EngineError, match=r"was not ready within 1\.5 s"):
        asyncio.run(start_vllm(fake_python(tmp_path, script), str(tmp_path), start_timeout=1.5))
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_users_environment_variables_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = server_env()
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "PYTHONPATH" not in env


def test_the_error_of_a_missing_interpreter_names_the_install_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scripts/install_vllm\.sh"):
        asyncio.run(start_vllm(str(tmp_path / "none"), str(tmp_path)))


# --- the real server ---


def model_folder(folder: Path, seed: int) -> Path:
    """Save a small model of a shape that vLLM has kernels for."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, initializer_range=0.15, eos_token_id=258,
        bos_token_id=257, pad_token_id=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_models.build_tokenizer().save_pretrained(folder)
    return folder


def adapter_folder(base: Path, folder: Path) -> Path:
    """Save an adapter that changes the model's completions."""
    torch.manual_seed(9)
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(network, lora).save_pretrained(str(folder))
    return folder


def max_logprob_error(network: Any, generations: list[Generation], versions: set[int]) -> float:
    """Return the largest difference between the log-probs of tokens of these versions and the network's."""
    worst = 0.0
    for generation in generations:
        ids = torch.tensor([[*LONG_PROMPT, *generation.token_ids]])
        with torch.no_grad():
            logits = network(ids).logits[0, len(LONG_PROMPT) - 1 : -1].float() / generation.temperature
        expected_logprobs = logits.log_softmax(-1).gather(1, ids[0, len(LONG_PROMPT) :, None])[:, 0]
        for value, expected, version in zip(
            generation.logprobs, expected_logprobs.tolist(), generation.versions, strict=True
        ):
            if version in versions:
                worst = max(worst, abs(value - expected))
    return worst


LONG_PROMPT = list(b"which is larger, 3 or 7? ")


@pytest.mark.skipif(not VLLM.is_file(), reason="vLLM is not installed: scripts/install_vllm.sh creates .venv-vllm")
@pytest.mark.process
def test_the_real_server_end_to_end(tmp_path: Path) -> None:
    base, other = model_folder(tmp_path / "base", 0), model_folder(tmp_path / "other", 1)
    adapter = adapter_folder(base, tmp_path / "adapter")
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (base, other))

    async def run() -> None:
        engine = await start_vllm(
            str(VLLM), str(base), dtype="float32", max_lora_rank=8, max_model_len=2048, start_timeout=600
        )
        process = engine._process
        assert process is not None
        try:
            await exchange(engine)
        except BaseException:
            sys.stderr.write(process.log_tail(60))
            raise
        finally:
            await engine.close()
        assert not process.alive

    async def sample_many(engine: VllmEngine, count: int = 4, **sampling: Any) -> list[Generation]:
        settings = Sampling(**({"max_tokens": 12} | sampling))
        return list(await asyncio.gather(*(engine.generate(LONG_PROMPT, settings, group="g") for _ in range(count))))

    async def exchange(engine: VllmEngine) -> None:
        # as sampled, at the temperature of the sampling
        for temperature in (1.0, 0.6):
            generations = await sample_many(engine, temperature=temperature)
            assert max_logprob_error(first, generations, {0}) < 1e-3
        assert len({generation.token_ids for generation in generations}) > 1
        seeded = [(await sample_many(engine, 1, seed=4))[0].token_ids for _ in range(2)]
        assert seeded[0] == seeded[1]
        stopped = await sample_many(engine, 8, stop_token_ids=tuple(range(128)), max_tokens=64)
        assert all(generation.token_ids[-1] < 128 or generation.token_ids[-1] == 258 for generation in stopped)
        assert {generation.finish_reason for generation in stopped} == {"stop"}

        # an adapter; requests in flight stay without it
        in_flight = asyncio.ensure_future(sample_many(engine, 2, max_tokens=200))
        await asyncio.sleep(0.3)
        await engine.load_weights(WeightSource.adapter(str(adapter)), 1)
        assert await engine.version() == 1
        adapted = await sample_many(engine)
        assert {version for generation in adapted for version in generation.versions} == {1}
        assert max_logprob_error(first, adapted, {1}) > 0.05
        with_adapter = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), str(adapter)
        )
        assert max_logprob_error(with_adapter, adapted, {1}) < 1e-3
        earlier = await in_flight
        assert max_logprob_error(first, earlier, {0}) < 1e-3
        assert {version for generation in earlier for version in generation.versions} == {0}

        # full weights; requests in flight continue with them
        in_flight = asyncio.ensure_future(sample_many(engine, 8, max_tokens=1500))
        await asyncio.sleep(0.3)
        await engine.load_weights(WeightSource.folder(str(other)), 2)
        assert await engine.version() == 2
        fresh = await sample_many(engine)
        assert {version for generation in fresh for version in generation.versions} == {2}
        assert max_logprob_error(second, fresh, {2}) < 1e-3
        assert max_logprob_error(first, fresh, {2}) > 0.05
        crossed = await in_flight
        # each token ends a completion with probability 1/260, so almost surely one of eight is still in flight
        assert any(set(generation.versions) == {1, 2} for generation in crossed)
        assert max_logprob_error(second, crossed, {2}) < 1e-3
        assert max_logprob_error(with_adapter, crossed, {1}) < 1e-3
        assert (await engine.health()).ready

        await publish(engine)

        # invalid requests are not retryable
        with pytest.raises(EngineError) as error:
            await engine.generate([1] * 3000, Sampling(max_tokens=4))
        assert not error.value.retryable
        # the context length ends a completion like max_tokens does
        last = (await engine.generate([1] * 2040, Sampling(max_tokens=100))).finish_reason
        assert last in ("length", "stop")

    async def publish(engine: VllmEngine) -> None:
        """Publish as a run does, through a pool: full weights, drained, and then an adapter on top of them."""
        assert engine._process is not None
        key = engine._process.api_key
        pool = Pool(PoolSettings(urls=[engine.url], backend="vllm"), lambda url: VllmEngine(url, api_key=key))
        full_model = load_model(ModelSettings(name=str(base)))
        adapted = load_model(ModelSettings.model_validate({"name": str(base), "lora": {"rank": 8}}))
        assert adapted.peft is not None
        with torch.no_grad():
            for name, weight in adapted.peft.named_parameters():
                if "lora_B" in name:
                    weight.normal_(0, 0.1)
        await pool.wait_until_probed()
        settings = Sampling(max_tokens=300, stop_token_ids=())
        in_flight = [asyncio.ensure_future(pool.generate(LONG_PROMPT, settings)) for _ in range(4)]
        await asyncio.sleep(0.2)
        await Publisher(pool, FolderTransport(full_model, tmp_path / "full"), drain=True).publish(10)
        assert [row.version for row in pool.status()] == [10]
        assert all(len(set(generation.versions)) == 1 for generation in await asyncio.gather(*in_flight))
        fresh = [await pool.generate(LONG_PROMPT, Sampling(max_tokens=12)) for _ in range(3)]
        assert max_logprob_error(first, fresh, {10}) < 1e-3
        await Publisher(pool, AdapterTransport(adapted, tmp_path / "adapted")).publish(11)
        changed = [await pool.generate(LONG_PROMPT, Sampling(max_tokens=12)) for _ in range(3)]
        assert {version for generation in changed for version in generation.versions} == {11}
        assert max_logprob_error(adapted.network, changed, {11}) < 1e-3 < 0.01 < max_logprob_error(first, changed, {11})
        await pool.close()

    asyncio.run(run())
