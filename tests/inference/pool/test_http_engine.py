"""Claims of the engine over HTTP: it gives what the server sampled or an error that says whether to try again."""

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
from keel.inference.protocol import Engine, EngineError, Generation
from keel.inference.server.app import build_app
from keel.inference.server.openai_requests import Limits
from keel.training import load_model
from keel.training.model.model_source import resolve_model
from tests.support.engine_fakes import ANYWHERE, END, TOKENIZER, FakeEngine, serving, until

PROMPT = [97, 98]


def on_app(work: Callable[[HttpEngine], Any], engine: FakeEngine, *, key: str | None = None, **options: Any) -> Any:
    """What `work` gives on an engine that talks to Keel's server, without a network."""

    async def run() -> Any:
        app = build_app(engine, TOKENIZER, model="tiny", allowed_folders=ANYWHERE, **options)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return await work(HttpEngine("http://127.0.0.1/v1", api_key=key, client=client))

    return asyncio.run(run())


def on_other(work: Callable[[HttpEngine], Any], handler: Callable[[httpx.Request], Any], **options: Any) -> Any:
    """What `work` gives on an engine that talks to some other server."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "policy"}]})
        if request.url.path in ("/version", "/health") and not options.get("everything"):
            return httpx.Response(404)
        answer = handler(request)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await work(HttpEngine("http://other:1", client=client, timeout=options.get("timeout", 5.0)))

    return asyncio.run(run())


def choice(**changes: Any) -> dict[str, Any]:
    whole = {
        "index": 0,
        "text": "x",
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "logprobs": {"token_logprobs": [-0.1, -0.2], "top_logprobs": [{"a": -0.1, "b": -2.1}] * 2},
    } | changes
    return {"choices": [{name: value for name, value in whole.items() if value is not ...}]}


def answers(**changes: Any) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _request: httpx.Response(200, json=choice(**changes))


def generate(engine: HttpEngine, **sampling: Any) -> Any:
    return engine.generate(PROMPT, Sampling(**sampling), group="g")


def test_it_is_an_engine() -> None:
    engine: Engine = HttpEngine("http://127.0.0.1:1")
    asyncio.run(engine.close())


def test_over_http_comes_what_the_engine_behind_it_gave() -> None:
    fake = FakeEngine()
    sampling = Sampling(temperature=0.7, max_tokens=9, stop=("x",), stop_token_ids=(5,), seed=4, top_p=0.9, top_k=3)
    answer = on_app(lambda engine: engine.generate(PROMPT, sampling, group="g"), fake)
    assert answer == Generation((98, 97, END), (-0.5,) * 3, (3,) * 3, "stop", 0.7)
    assert fake.calls == [((97, 98), sampling, "g")]


def test_versions_per_token_are_passed_on() -> None:
    fake = FakeEngine()
    fake.answer = lambda _prompt, _sampling: Generation((1, 2, 3), (-1.0,) * 3, (4, 4, 5), "length", 1.0)
    assert on_app(generate, fake).versions == (4, 4, 5)


def test_weights_adapters_version_and_health(tmp_path: Path) -> None:
    fake = FakeEngine()
    folder = str(tmp_path)

    async def work(engine: HttpEngine) -> None:
        assert await engine.version() == 3
        await engine.load_weights(folder, 6)
        assert await engine.version() == 6
        await engine.load_adapter(folder, 7)
        assert (await engine.health()).version == 7
        assert (await engine.health()).ready
        with pytest.raises(EngineError, match="is not a folder") as error:
            await engine.load_weights(folder + "/none", 8)
        assert not error.value.retryable
        assert await engine.version() == 7
        # somebody else loads: the server is asked, not remembered
        fake.live = 9
        assert await engine.version() == 9
        fake.closed = True
        assert not (await engine.health()).ready

    on_app(work, fake)
    assert fake.loaded == [("weights", folder, 6), ("adapter", folder, 7)]


@pytest.mark.parametrize(
    ("error", "retryable"), [(EngineError("busy"), True), (EngineError("too long", retryable=False), False)]
)
def test_whether_to_try_again_survives_the_way_over_http(error: EngineError, retryable: bool) -> None:
    fake = FakeEngine()
    fake.fail = lambda: error
    with pytest.raises(EngineError, match=str(error)) as raised:
        on_app(generate, fake)
    assert raised.value.retryable is retryable


def test_a_full_server_may_be_tried_again_and_a_wrong_key_not() -> None:
    with pytest.raises(EngineError, match=r"429.*limit of 0") as full:
        on_app(generate, FakeEngine(), limits=Limits(max_in_flight=0))
    assert full.value.retryable
    with pytest.raises(EngineError, match=r"401.*invalid API key") as wrong:
        on_app(generate, FakeEngine(), api_key="right", key="no")
    assert not wrong.value.retryable
    assert on_app(generate, FakeEngine(), api_key="right", key="right").finish_reason == "stop"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 422, 429, 500, 502, 503, 504])
def test_statuses_say_whether_to_try_again(status: int) -> None:
    retryable = status in (408, 429) or status >= 500
    with pytest.raises(EngineError, match=f"returned status {status}: no luck") as error:
        on_other(generate, lambda _request: httpx.Response(status, json={"error": {"message": "no luck"}}))
    assert error.value.retryable is retryable


@pytest.mark.parametrize(
    ("changes", "said", "retryable"),
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
def test_an_answer_that_cannot_be_trained_on_is_refused_with_its_reason(
    changes: dict[str, Any], said: str, retryable: bool
) -> None:
    with pytest.raises(EngineError, match=said) as error:
        on_other(generate, answers(**changes))
    assert error.value.retryable is retryable


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_a_log_prob_that_is_not_finite_is_refused(number: str) -> None:
    text = json.dumps(choice()).replace("-0.2", number)
    with pytest.raises(EngineError, match="returned a log-prob of"):
        on_other(generate, lambda _request: httpx.Response(200, text=text))


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"choices": []}', '{"choices": [1, 2]}'])
def test_a_body_that_is_no_answer_is_refused(body: str) -> None:
    with pytest.raises(EngineError, match="engine http://other:1"):
        on_other(generate, lambda _request: httpx.Response(200, text=body))


def test_an_answer_without_tokens_is_an_answer() -> None:
    assert on_other(generate, answers(token_ids=[], logprobs=None)).token_ids == ()


def test_a_server_that_does_not_say_gets_the_version_that_is_known_and_takes_no_weights() -> None:
    async def work(engine: HttpEngine) -> Generation:
        engine._version = 5
        with pytest.raises(EngineError, match="not a keel server") as error:
            await engine.load_weights("folder", 6)
        assert not error.value.retryable
        return await generate(engine)

    assert on_other(work, answers()).versions == (5, 5)


def test_nothing_is_asked_that_plain_openai_does_not_know_unless_it_acts() -> None:
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


@pytest.mark.parametrize(("scaled", "refused"), [(True, False), (False, True)])
def test_log_probs_of_another_temperature_are_found_out(scaled: bool, refused: bool) -> None:
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
            if refused:
                with pytest.raises(EngineError, match="processed_logprobs") as error:
                    await generate(engine, temperature=0.7)
                assert not error.value.retryable
            else:
                assert (await generate(engine, temperature=0.7)).temperature == 0.7

    on_other(work, handler)
    # asked once, not before every request
    assert probes == 2


def test_a_server_that_is_not_there_is_an_error_to_try_again_and_not_ready() -> None:
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
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="engine url"):
        HttpEngine(url)


def test_a_slow_server_times_out_and_loses_the_request() -> None:
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


def test_cancelling_a_request_frees_it_on_the_server_and_closing_fails_the_rest() -> None:
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


def test_a_server_that_comes_back_with_other_weights_is_asked_again() -> None:
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


def test_a_hundred_requests_at_once_each_get_their_own_answer() -> None:
    async def run(url: str) -> None:
        engine = HttpEngine(url)
        prompts = [[number % 250, number // 250 + 1] for number in range(100)]
        got = await asyncio.gather(*(engine.generate(prompt, Sampling()) for prompt in prompts))
        assert [answer.token_ids for answer in got] == [(*reversed(prompt), END) for prompt in prompts]
        await engine.close()

    with serving(build_app(FakeEngine(), TOKENIZER, model="tiny")) as url:
        asyncio.run(run(url))


def test_the_local_engine_over_http_takes_weights_and_adapters_while_it_answers(tmp_path: Path) -> None:
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
        under_way = asyncio.ensure_future(engine.generate(PROMPT, sampling))
        while (await engine.health()).running == 0:
            await asyncio.sleep(0.01)
        await engine.load_weights(str(other), 1)
        assert await engine.version() == 1
        answer = await under_way
        assert answer.temperature == 0.8
        assert list(answer.versions) == sorted(answer.versions)
        assert set(answer.versions) <= {0, 1}
        fresh = await engine.generate(PROMPT, sampling)
        assert set(fresh.versions) == {1}
        expected = load_model(ModelSettings(name=str(other)))
        assert difference(expected.network, fresh) < 1e-4
        await engine.load_weights(str(model.source.folder), 2)
        await engine.load_adapter(str(tmp_path / "adapter"), 3)
        fresh = await engine.generate(PROMPT, sampling)
        assert set(fresh.versions) == {3}
        assert difference(adapted.network, fresh) < 1e-4
        with pytest.raises(EngineError) as error:
            await engine.load_weights(str(tmp_path), 4)
        assert not error.value.retryable
        assert await engine.version() == 3
        with pytest.raises(EngineError, match="3000 tokens") as error:
            await engine.generate([1] * 3000, sampling)
        assert not error.value.retryable
        await engine.close()

    with serving(build_app(local, model.tokenizer, model="tiny", allowed_folders=ANYWHERE)) as url:
        asyncio.run(run(url))


def difference(network: Any, answer: Generation) -> float:
    """By how much the log-probs of an answer differ from the network's, at most."""
    ids = torch.tensor([[*PROMPT, *answer.token_ids]])
    with torch.no_grad():
        logits = network(ids).logits[0, len(PROMPT) - 1 : -1] / answer.temperature
    own = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return float((own - torch.tensor(answer.logprobs)).abs().max())
