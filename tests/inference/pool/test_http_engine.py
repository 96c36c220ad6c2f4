"""HttpEngine: it returns what the server sampled, or an error that says whether to retry."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from keel.config import EngineSettings, LoraSettings, ModelSettings, Sampling
from keel.errors import ConfigError
from keel.inference.local.local_engine import LocalEngine
from keel.inference.pool.http_engine import HttpEngine
from keel.inference.protocol import Engine, EngineError, Generation, WeightSource
from keel.inference.server.app import build_app
from keel.inference.server.openai_requests import Limits
from keel.training import load_model
from keel.training.model.model_source import resolve_model
from tests.support.engine_fakes import ANYWHERE, END, TOKENIZER, FakeEngine, serving, until

PROMPT = [97, 98]


def on_app(work: Callable[[HttpEngine], Any], engine: FakeEngine, *, key: str | None = None, **options: Any) -> Any:
    """Return the result of `work` on a client of Keel's server, without a network."""

    async def run() -> Any:
        app = build_app(engine, TOKENIZER, model="tiny", allowed_folders=ANYWHERE, **options)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return await work(HttpEngine("http://127.0.0.1/v1", api_key=key, client=client))

    return asyncio.run(run())


def on_other(work: Callable[[HttpEngine], Any], handler: Callable[[httpx.Request], Any], **options: Any) -> Any:
    """Return the result of `work` on a client of another server, implemented by `handler`."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "policy"}]})
        if request.url.path in ("/version", "/health") and not options.get("everything"):
            return httpx.Response(404)
        response = handler(request)
        return await response if asyncio.iscoroutine(response) else response

    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await work(HttpEngine("http://other:1", client=client, timeout=options.get("timeout", 5.0)))

    return asyncio.run(run())


def choice(**changes: Any) -> dict[str, Any]:
    fields = {
        "index": 0,
        "text": "x",
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-0.1, -0.2], "top_logprobs": [{"a": -0.1, "b": -2.1}] * 2},
    } | changes
    return {"choices": [{name: value for name, value in fields.items() if value is not ...}]}


def respond_with(**changes: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _request: httpx.Response(200, json=choice(**changes))


def generate(engine: HttpEngine, **sampling: Any) -> Any:
    return engine.generate(PROMPT, Sampling(**sampling), group="g")


def test_http_engine_implements_the_engine_protocol() -> None:
    engine: Engine = HttpEngine("http://127.0.0.1:1")
    asyncio.run(engine.close())


def test_a_generation_over_http_equals_the_engines() -> None:
    fake = FakeEngine()
    sampling = Sampling(temperature=0.7, max_tokens=9, stop=("x",), stop_token_ids=(5,), seed=4, top_p=0.9, top_k=3)
    generation = on_app(lambda engine: engine.generate(PROMPT, sampling, group="g"), fake)
    assert generation == Generation((98, 97, END), (-0.5,) * 3, (3,) * 3, "stop", 0.7)
    assert fake.calls == [((97, 98), sampling, "g")]


def test_versions_per_token_are_returned() -> None:
    fake = FakeEngine()
    fake.answer = lambda _prompt, _sampling: Generation((1, 2, 3), (-1.0,) * 3, (4, 4, 5), "length", 1.0)
    assert on_app(generate, fake).versions == (4, 4, 5)


def test_weights_adapters_version_and_health(tmp_path: Path) -> None:
    fake = FakeEngine()
    folder = str(tmp_path)

    async def work(engine: HttpEngine) -> None:
        assert await engine.version() == 3
        await engine.load_weights(WeightSource.folder(folder), 6)
        assert await engine.version() == 6
        await engine.load_weights(WeightSource.adapter(folder), 7)
        assert (await engine.health()).version == 7
        assert (await engine.health()).ready
        with pytest.raises(EngineError, match="is not a folder") as error:
            await engine.load_weights(WeightSource.folder(folder + "/none"), 8)
        assert not error.value.retryable
        assert await engine.version() == 7
        # another client loads weights: the version comes from the server, not from memory
        fake.live = 9
        assert await engine.version() == 9
        fake.closed = True
        assert not (await engine.health()).ready

    on_app(work, fake)
    assert fake.loaded == [("weights", folder, 6), ("adapter", folder, 7)]


@pytest.mark.parametrize(
    ("error", "retryable"), [(EngineError("busy"), True), (EngineError("too long", retryable=False), False)]
)
def test_retryability_of_errors_is_preserved_over_http(error: EngineError, retryable: bool) -> None:
    fake = FakeEngine()
    fake.fail = lambda: error
    with pytest.raises(EngineError, match=str(error)) as raised:
        on_app(generate, fake)
    assert raised.value.retryable is retryable


def test_a_full_server_is_retryable_and_an_invalid_key_is_not() -> None:
    with pytest.raises(EngineError, match=r"429.*limit of 0") as full:
        on_app(generate, FakeEngine(), limits=Limits(max_in_flight=0))
    assert full.value.retryable
    with pytest.raises(EngineError, match=r"401.*invalid API key") as wrong:
        on_app(generate, FakeEngine(), api_key="right", key="no")
    assert not wrong.value.retryable
    assert on_app(generate, FakeEngine(), api_key="right", key="right").finish_reason == "stop"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504])
def test_the_status_determines_whether_an_error_is_retryable(status: int) -> None:
    retryable = status in (408, 429) or status >= 500
    with pytest.raises(EngineError, match=f"returned status {status}: no luck") as error:
        on_other(generate, lambda _request: httpx.Response(status, json={"error": {"message": "no luck"}}))
    assert error.value.retryable is retryable


@pytest.mark.parametrize(
    ("changes", "message", "retryable"),
    [
        ({"token_ids": ...}, "returned no token_ids: it does not support return_token_ids", False),
        ({"logprobs": None}, "returned no log-probs: it does not support logprobs", False),
        ({"token_ids": [5]}, "1 token ids, 2 log-probs and 1 versions", True),
        ({"versions": [1]}, "2 token ids, 2 log-probs and 1 versions", True),
        ({"token_ids": [5, "6"]}, "returned 6 as token id", True),
        ({"versions": [1, None]}, "returned None as version", True),
        ({"logprobs": {"token_logprobs": [-0.1, None]}}, "returned a log-prob of None", True),
        ({"finish_reason": "content_filter"}, "returned finish_reason content_filter", True),
    ],
)
def test_a_completion_that_cannot_be_trained_on_is_an_error(
    changes: dict[str, Any], message: str, retryable: bool
) -> None:
    with pytest.raises(EngineError, match=message) as error:
        on_other(generate, respond_with(**changes))
    assert error.value.retryable is retryable


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_a_log_prob_that_is_not_finite_is_an_error(value: str) -> None:
    text = json.dumps(choice()).replace("-0.2", value)
    with pytest.raises(EngineError, match="returned a log-prob of"):
        on_other(generate, lambda _request: httpx.Response(200, text=text))


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"choices": []}', '{"choices": [1, 2]}'])
def test_a_body_that_is_not_a_completion_is_an_error(body: str) -> None:
    with pytest.raises(EngineError, match="engine http://other:1"):
        on_other(generate, lambda _request: httpx.Response(200, text=body))


def test_a_completion_without_tokens_is_valid() -> None:
    assert on_other(generate, respond_with(token_ids=[], logprobs=None)).token_ids == ()


def test_a_server_without_versions_gets_the_known_version_and_loads_no_weights() -> None:
    async def work(engine: HttpEngine) -> Generation:
        engine._version = 5
        with pytest.raises(EngineError, match="not a keel server") as error:
            await engine.load_weights(WeightSource.folder("folder"), 6)
        assert not error.value.retryable
        return await generate(engine)

    assert on_other(work, respond_with()).versions == (5, 5)


def test_fields_unknown_to_plain_openai_servers_are_sent_only_if_set() -> None:
    bodies = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=choice())

    on_other(generate, handler)
    assert bodies[0]["prompt"] == PROMPT
    assert bodies[0]["model"] == "policy"
    assert not {"top_k", "min_p", "stop", "stop_token_ids", "seed", "group"} & set(bodies[0])
    on_other(lambda engine: generate(engine, top_k=4, seed=1), handler)
    assert (bodies[1]["top_k"], bodies[1]["seed"]) == (4, 1)


@pytest.mark.parametrize("scaled", [True, False])
def test_log_probs_at_another_temperature_are_detected(scaled: bool) -> None:
    probes = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal probes
        body = json.loads(request.content)
        probes += body["logprobs"] == 2
        gap = 1.5 / ((body["temperature"] or 1.0) if scaled else 1.0)
        tops = [{"a": -0.1, "b": -0.1 - gap, "c": -0.1 - 2 * gap}] * 2
        logprobs = {"token_logprobs": [-0.1, -0.2], "top_logprobs": tops}
        return httpx.Response(200, json=choice(logprobs=logprobs))

    async def work(engine: HttpEngine) -> None:
        assert (await generate(engine)).temperature == 1.0
        assert (await generate(engine, temperature=0.0)).temperature == 0.0
        assert probes == 0
        for _ in range(2):
            if not scaled:
                with pytest.raises(EngineError, match="processed_logprobs") as error:
                    await generate(engine, temperature=0.7)
                assert not error.value.retryable
            else:
                assert (await generate(engine, temperature=0.7)).temperature == 0.7

    on_other(work, handler)
    # probed once, not before every request
    assert probes == 2


def test_an_unreachable_server_is_a_retryable_error_and_not_ready() -> None:
    async def run() -> None:
        engine = HttpEngine("http://127.0.0.1:9", timeout=2.0)
        with pytest.raises(EngineError, match="cannot be reached") as error:
            await generate(engine)
        assert error.value.retryable
        health = await engine.health()
        assert not health.ready
        assert "cannot be reached" in health.error
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "nonsense"])
def test_an_invalid_url_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="engine url"):
        HttpEngine(url)


def test_a_timeout_cancels_the_request_on_the_server() -> None:
    fake = FakeEngine()
    fake.delay = 30

    async def run(url: str) -> None:
        engine = HttpEngine(url, timeout=0.5)
        with pytest.raises(EngineError, match=r"did not respond within 0\.5 s") as error:
            await generate(engine)
        assert error.value.retryable
        await engine.close()

    with serving(build_app(fake, TOKENIZER, model="tiny")) as url:
        asyncio.run(run(url))
        until(lambda: fake.cancelled == 1)


def test_cancelling_a_request_cancels_it_on_the_server_and_closing_fails_the_rest() -> None:
    fake = FakeEngine()
    fake.delay = 30

    async def run(url: str) -> None:
        engine = HttpEngine(url)
        first, second = (asyncio.ensure_future(generate(engine)) for _ in range(2))
        await asyncio.to_thread(until, lambda: fake.running == 2)
        assert (await engine.health()).running == 2
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await asyncio.to_thread(until, lambda: fake.cancelled == 1)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await second
        with pytest.raises(EngineError, match="closed"):
            await generate(engine)

    with serving(build_app(fake, TOKENIZER, model="tiny")) as url:
        asyncio.run(run(url))
        until(lambda: fake.cancelled == 2)


def test_a_restarted_server_is_detected_again() -> None:
    async def run() -> None:
        engine = HttpEngine(f"http://127.0.0.1:{port}")
        versions = []
        for live in (3, 0):
            fake = FakeEngine()
            fake.live = live
            with serving_at(fake, port):
                versions.append((await generate(engine)).versions[0])
                assert await engine.version() == live
            with pytest.raises(EngineError):
                await generate(engine)
        assert versions == [3, 0]
        await engine.close()

    from keel.inference.pool.vllm_process import free_port

    port = free_port()
    asyncio.run(run())


def serving_at(fake: FakeEngine, port: int) -> Any:
    return serving(build_app(fake, TOKENIZER, model="tiny"), port=port, timeout_graceful_shutdown=1)


def test_a_hundred_concurrent_requests_each_get_their_own_completion() -> None:
    async def run(url: str) -> None:
        engine = HttpEngine(url)
        prompts = [[number % 250, number // 250 + 1] for number in range(100)]
        generations = await asyncio.gather(*(engine.generate(prompt, Sampling()) for prompt in prompts))
        assert [generation.token_ids for generation in generations] == [(*reversed(prompt), END) for prompt in prompts]
        await engine.close()

    with serving(build_app(FakeEngine(), TOKENIZER, model="tiny")) as url:
        asyncio.run(run(url))


def test_the_local_engine_over_http_loads_weights_and_adapters_while_it_samples(tmp_path: Path) -> None:
    model = load_model(ModelSettings(name="tiny"))
    other = resolve_model("tiny", seed=1).folder
    adapted = load_model(ModelSettings(name="tiny", lora=LoraSettings(rank=4)))
    for name, weight in adapted.parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert adapted.peft is not None
    adapted.peft.save_pretrained(str(tmp_path / "adapter"))
    local = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=8))
    sampling = Sampling(max_tokens=400, seed=3, temperature=0.8)

    async def run(url: str) -> None:
        engine = HttpEngine(url)
        in_flight = asyncio.ensure_future(engine.generate(PROMPT, sampling))
        while (await engine.health()).running == 0:
            await asyncio.sleep(0.01)
        await engine.load_weights(WeightSource.folder(str(other)), 1)
        assert await engine.version() == 1
        generation = await in_flight
        assert generation.temperature == 0.8
        assert list(generation.versions) == sorted(generation.versions)
        assert set(generation.versions) <= {0, 1}
        fresh = await engine.generate(PROMPT, sampling)
        assert set(fresh.versions) == {1}
        expected = load_model(ModelSettings(name=str(other)))
        assert max_logprob_error(expected.network, fresh) < 1e-4
        await engine.load_weights(WeightSource.folder(str(model.source.folder)), 2)
        await engine.load_weights(WeightSource.adapter(str(tmp_path / "adapter")), 3)
        fresh = await engine.generate(PROMPT, sampling)
        assert set(fresh.versions) == {3}
        assert max_logprob_error(adapted.network, fresh) < 1e-4
        with pytest.raises(EngineError) as error:
            await engine.load_weights(WeightSource.folder(str(tmp_path)), 4)
        assert not error.value.retryable
        assert await engine.version() == 3
        with pytest.raises(EngineError, match="3000 tokens") as error:
            await engine.generate([1] * 3000, sampling)
        assert not error.value.retryable
        await engine.close()

    with serving(build_app(local, model.tokenizer, model="tiny", allowed_folders=ANYWHERE)) as url:
        asyncio.run(run(url))


def max_logprob_error(network: Any, generation: Generation) -> float:
    """Return the largest difference between a generation's log-probs and the network's."""
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    with torch.no_grad():
        logits = network(ids).logits[0, len(PROMPT) - 1 : -1] / generation.temperature
    expected = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return float((expected - torch.tensor(generation.logprobs)).abs().max())
