"""The OpenAI-compatible server: response formats, errors, access, and release of resources."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.cli import main
from keel.cli.run.serve import read_key
from keel.config import EngineSettings, ModelSettings, Sampling
from keel.errors import ConfigError
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import EngineError, Generation
from keel.inference.server.access import is_loopback
from keel.inference.server.app import build_app
from keel.inference.server.openai_requests import NO_OP_VALUES, ChatRequest, CompletionRequest, Limits
from keel.inference.server.openai_responses import IncrementalDetokenizer
from keel.training import load_model
from tests.support.engine_fakes import ANYWHERE, END, TOKENIZER, FakeEngine, FakeStreamingEngine, serving, until


def app_of(engine: Any, **options: Any) -> Any:
    return build_app(engine, TOKENIZER, model="tiny", **options)


def ask(engine: Any, path: str, body: Any, *, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    """Send one request to a server without a network; GET if there is no body."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(engine, **options), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            if body is None:
                return await client.get(path, headers=headers)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())


def complete(engine: Any, **body: Any) -> httpx.Response:
    return ask(engine, "/v1/completions", {"prompt": [97, 98, 99], **body})


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for part in lists for item in part]


# --- response formats ---


def test_a_completion_has_its_stop_token_in_the_tokens_and_not_in_the_text() -> None:
    body = complete(FakeEngine(), logprobs=0, return_token_ids=True).json()
    choice = body["choices"][0]
    assert choice["text"] == "cba"
    assert choice["token_ids"] == [99, 98, 97, END]
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert choice["versions"] == [3] * 4
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert choice["logprobs"]["tokens"] == ["c", "b", "a", "<|im_end|>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"


def test_a_text_prompt_is_tokenized() -> None:
    engine = FakeEngine()
    assert complete(engine, prompt="abc").json()["choices"][0]["text"] == "cba"
    assert engine.calls[0][0] == (97, 98, 99)


def test_every_prompt_gets_n_completions_in_order_and_is_a_group() -> None:
    engine = FakeEngine()
    body = complete(engine, prompt=["ab", "cd"], n=2, seed=7).json()
    assert [choice["text"] for choice in body["choices"]] == ["ba", "ba", "dc", "dc"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [call[1].seed for call in engine.calls] == [7, 8, 7, 8]
    groups = [call[2] for call in engine.calls]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert body["usage"]["prompt_tokens"] == 4


def test_sampling_parameters_reach_the_engine_unchanged() -> None:
    engine = FakeEngine()
    complete(
        engine, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=3, stop="x", stop_token_ids=[5], max_tokens=9
    )
    assert engine.calls[0][1] == Sampling(
        temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=3, stop=("x",), stop_token_ids=(5,), max_tokens=9
    )


def test_chat_uses_the_models_template() -> None:
    engine = FakeEngine()
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
        "logprobs": True,
        "return_token_ids": True,
        "max_completion_tokens": 5,
    }
    response = ask(engine, "/v1/chat/completions", body).json()
    expected = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert list(engine.calls[0][0]) == expected == response["prompt_token_ids"]
    choice = response["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert [row["logprob"] for row in choice["logprobs"]["content"]] == [-0.5] * 5
    assert len(choice["token_ids"]) == len(choice["versions"]) == 5
    assert response["object"] == "chat.completion"


def test_stop_strings_and_stop_tokens_are_in_the_tokens_and_not_in_the_text() -> None:
    engine = FakeEngine()
    engine.answer = lambda _prompt, _sampling: Generation((97, 98, 99, 33), (-1.0,) * 4, (0,) * 4, "stop", 1.0)
    choice = complete(engine, stop=["bc", "zz"], return_token_ids=True).json()["choices"][0]
    assert choice["text"] == "a"
    assert choice["token_ids"] == [97, 98, 99, 33]
    assert complete(engine, stop_token_ids=[33]).json()["choices"][0]["text"] == "abc"


@given(
    text=st.text(alphabet="ab\u00e9\u4e16\U0001f600", max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    stop=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=3), max_size=2),
)
def test_concatenated_deltas_equal_the_text_however_the_tokens_arrive(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    ids = list(text.encode())
    expected = IncrementalDetokenizer(TOKENIZER, tuple(stop)).push(ids, is_last=True)
    assert expected == text[: min((index for index in map(text.find, stop) if index >= 0), default=len(text))]
    detokenizer, positions = (
        IncrementalDetokenizer(TOKENIZER, tuple(stop)),
        sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)}),
    )
    deltas = [detokenizer.push(ids[low:high], is_last=False) for low, high in itertools.pairwise(positions)]
    deltas.append(detokenizer.push([], is_last=True))
    assert "".join(deltas) == expected
    assert all("\ufffd" not in delta for delta in deltas)


@pytest.mark.parametrize("kind", [FakeEngine, FakeStreamingEngine])
def test_a_concatenated_stream_equals_the_complete_response(kind: type[FakeEngine]) -> None:
    body = {"n": 2, "logprobs": 0, "return_token_ids": True}
    complete_response = complete(kind(), **body).json()
    response = complete(kind(), stream=True, stream_options={"include_usage": True}, **body)
    assert response.headers["content-type"] == "text/event-stream"
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == complete_response["usage"]
    for choice in complete_response["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for field in ("token_ids", "versions"):
            assert joined(part[field] for part in parts) == choice[field]
        logprobs = [part["logprobs"] for part in parts]
        for field in ("token_logprobs", "tokens", "text_offset"):
            assert joined(part[field] for part in logprobs) == choice["logprobs"][field]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
        assert not any(part["finish_reason"] for part in parts[:-1])


def test_a_chat_stream_starts_with_the_role() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 4, "return_token_ids": True}
    first, *chunks, done = events(ask(FakeStreamingEngine(), "/v1/chat/completions", body))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["object"] == "chat.completion.chunk"
    assert first["prompt_token_ids"][0] == 257
    assert len(chunks) == 4
    assert done == "[DONE]"


def test_models_health_and_version() -> None:
    engine = FakeEngine()
    assert ask(engine, "/v1/models", None).json()["data"][0]["id"] == "tiny"
    assert ask(engine, "/version", None).json() == {"version": 3, "server": "keel"}
    health = ask(engine, "/health", None)
    assert health.status_code == 200
    assert health.json() == {"ready": True, "version": 3, "running": 0, "waiting": 0, "error": ""}
    engine.closed = True
    assert ask(engine, "/health", None).status_code == 503


# --- invalid requests ---


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": "hot"}, 'temperature = "hot"'),
        ({"n": 0}, "n = 0"),
        ({"n": 1000}, "n = 1000 is above this server's limit of 128"),
        ({"max_tokens": 10**6}, "max_tokens = 1000000 is above"),
        ({"prompt": []}, "prompt = [] has no tokens"),
        ({"prompt": ""}, 'prompt = "" has no tokens'),
        ({"prompt": [[1], []]}, "has no tokens"),
        ({"prompt": ["a"] * 65}, "the number of prompts = 65 is above"),
        ({"prompt": [5, 999]}, "prompt holds token id 999, but the model has 260"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": None}, "prompt is missing"),
        ({"logprobs": 5}, "logprobs = 5"),
        ({"temprature": 1}, "temprature is not a setting; did you mean temperature?"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5 is not supported; only 0 is"),
        ({"echo": True, "logprobs": 1}, "echo = true is not supported"),
        ({"logprobs": 21}, "logprobs = 21"),
        ({"max_tokens": 0}, "max_tokens = 0 returns nothing without echo = true"),
        ({"echo": True, "stream": True}, "echo = true cannot be streamed"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [260]}, "stop_token_ids holds token id 260"),
        ({"seed": -1}, "seed = -1"),
        ({"top_p": 0}, "top_p = 0"),
    ],
)
def test_an_invalid_field_is_400_with_field_and_value(body: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    response = complete(engine, **body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.calls


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0] has no role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text is supported"),
        ([{"role": "user", "content": 5}], "messages[0].content must be text"),
    ],
)
def test_invalid_messages_are_400(messages: list[Any], message: str) -> None:
    response = ask(FakeEngine(), "/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *NO_OP_VALUES, "role"})


@pytest.mark.fuzz
@settings(max_examples=150)
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), chat=st.booleans(), valid_last=st.booleans())
def test_no_json_body_is_an_internal_error(body: dict[str, Any], chat: bool, valid_last: bool) -> None:
    valid = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = ask(FakeStreamingEngine(), path, body | valid if valid_last else valid | body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=50)
@given(message=st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), JSON, max_size=4))
def test_no_message_is_an_internal_error(message: dict[str, Any]) -> None:
    response = ask(FakeEngine(), "/v1/chat/completions", {"messages": [{"role": "user", **message}]})
    assert response.status_code in (200, 400), response.text


def test_tools_are_an_error_because_calls_are_not_parsed() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    response = ask(FakeEngine(), "/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def test_fields_without_an_effect_are_accepted() -> None:
    assert complete(FakeEngine(), user="me", echo=False, presence_penalty=0.0, logit_bias=None).status_code == 200


def test_an_unknown_model_path_or_method_is_an_error_in_openai_format() -> None:
    for response, status in (
        (complete(FakeEngine(), model="gpt"), 404),
        (ask(FakeEngine(), "/v1/nothing", {}), 404),
        (ask(FakeEngine(), "/v1/models", {}), 405),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_no_docs_page_loads_scripts_from_a_cdn() -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert ask(FakeEngine(), path, None).status_code == 404
    assert ask(FakeEngine(), "/openapi.json", None).status_code == 200


def test_the_openapi_document_describes_every_error_as_json_in_openai_format() -> None:
    paths = ask(FakeEngine(), "/openapi.json", None).json()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status != "200" and (path, status) != ("/health", "503"):
                    schema = {"$ref": "#/components/schemas/ErrorResponse"}
                    assert response["content"] == {"application/json": {"schema": schema}}, (path, status)


def test_a_body_that_is_not_a_json_object_is_an_error() -> None:
    async def run(content: Any, kind: str = "application/json", limit: int = 100) -> httpx.Response:
        app = app_of(FakeEngine(), limits=Limits(body_bytes=limit))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post("/v1/completions", content=content, headers={"content-type": kind})

    async def chunks() -> Any:
        for _ in range(30):
            yield b"[1, 2"

    assert asyncio.run(run(b"{")).status_code == 400
    assert asyncio.run(run(b"[]")).status_code == 400
    assert asyncio.run(run(b'{"prompt": "\\ud800"}')).status_code == 400
    assert asyncio.run(run(b'{"prompt": "\\ud83d\\ude00"}')).status_code == 200
    assert asyncio.run(run(b'{"prompt": "\xff"}')).status_code == 400
    assert asyncio.run(run(b'{"prompt": "a", "temperature": 1e999}')).status_code == 400
    assert asyncio.run(run(b"{}", "text/plain")).status_code == 415
    assert asyncio.run(run(b" " * 101)).status_code == 413
    deep = b'{"prompt":' + b"[" * 100_000
    assert asyncio.run(run(deep, limit=200_000)).status_code == 400
    # also without a content-length header
    assert asyncio.run(run(chunks())).status_code == 413


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineError("no capacity"), 503, "server_error"),
        (EngineError("the prompt is too long", retryable=False), 400, "invalid_request_error"),
        (RuntimeError("secret"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_status_of_an_engine_error_says_whether_to_retry(
    error: Exception, status: int, kind: str, stream: bool
) -> None:
    engine = FakeStreamingEngine()
    engine.fail = lambda: error
    response = complete(engine, stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)


def test_an_error_in_a_stream_is_sent_and_the_stream_has_no_done_event() -> None:
    engine = FakeStreamingEngine()
    engine.break_after = 2
    *chunks, error = events(complete(engine, stream=True))
    assert len(chunks) == 2
    assert error["error"]["message"] == "the engine broke"


def test_a_log_prob_that_is_not_finite_is_an_error() -> None:
    engine = FakeEngine()
    engine.answer = lambda _prompt, _sampling: Generation((97,), (float("nan"),), (0,), "stop", 1.0)
    assert complete(engine).status_code == 500


# --- access ---


def test_every_path_but_health_requires_the_key() -> None:
    engine = FakeEngine()
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/models", None), ("/version", None)):
        for headers, status in (
            (None, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Basic right"}, 401),
            ({"authorization": "Bearer right"}, 200),
        ):
            response = ask(engine, path, body, headers=headers, api_key="right")
            assert response.status_code == status, response.text
    assert ask(engine, "/health", None, api_key="right").status_code == 200
    assert len(engine.calls) == 1


@pytest.mark.parametrize("path", ["/v1/load_weights", "/v1/load_lora_adapter", "/v1/completions"])
def test_a_server_without_a_key_serves_this_machine_only(path: str) -> None:
    async def run(client: str, headers: dict[str, str]) -> int:
        transport = httpx.ASGITransport(app_of(FakeEngine()), client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as session:
            return (await session.post(path, json={}, headers=headers)).status_code

    assert asyncio.run(run("127.0.0.1", {})) == 400
    assert asyncio.run(run("::1", {"host": "[::1]:8000"})) == 400
    assert asyncio.run(run("10.0.0.7", {})) == 403
    # a proxy on this machine, and DNS rebinding by a web page
    assert asyncio.run(run("127.0.0.1", {"x-forwarded-for": "10.0.0.7"})) == 403
    assert asyncio.run(run("127.0.0.1", {"host": "evil.example:8000"})) == 403


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("localhost.example.com", False)],
)  # fmt: skip
def test_loopback_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_version_changes_after_weights_and_adapters_are_live(tmp_path: Path) -> None:
    engine = FakeEngine()
    folder, options = str(tmp_path), {"allowed_folders": ANYWHERE}
    response = ask(engine, "/v1/load_weights", {"folder": folder, "version": 7}, **options)
    assert response.json() == {"version": 7}
    assert ask(engine, "/v1/load_lora_adapter", {"lora_path": folder}, **options).json() == {"version": 8}
    assert engine.loaded == [("weights", folder, 7), ("adapter", folder, 8)]
    missing = ask(engine, "/v1/load_weights", {"folder": folder + "/none", "version": 9}, **options)
    assert missing.status_code == 400
    assert "none is not a folder" in missing.json()["error"]["message"]
    engine.fail = lambda: EngineError("these weights do not fit", retryable=False)
    assert ask(engine, "/v1/load_weights", {"folder": folder, "version": 9}, **options).status_code == 400
    assert ask(engine, "/version", None).json()["version"] == 8


# --- resources ---


def test_a_disconnect_cancels_completions_and_frees_their_capacity() -> None:
    engine = FakeEngine()
    engine.delay = 30
    with serving(app_of(engine, limits=Limits(max_in_flight=3))) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 3}, timeout=0.3)
        until(lambda: engine.cancelled == 3)
        engine.delay = 0
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "n": 3}).status_code == 200
    assert engine.closed


def test_a_disconnect_cancels_a_stream() -> None:
    engine = FakeStreamingEngine()
    engine.pause = 0.05
    with serving(app_of(engine)) as url:
        body = {"prompt": [97] * 2000, "stream": True, "max_tokens": 2000, "n": 2}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        until(lambda: engine.cancelled == 2)
        sent = engine.sent
        time.sleep(0.15)
        assert engine.sent == sent < 100


def test_requests_above_the_capacity_get_429_with_retry_after() -> None:
    engine = FakeEngine()
    engine.delay = 0.5

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app_of(engine, limits=Limits(max_in_flight=4)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            bodies = [{"prompt": "a", "n": 2, "stream": stream} for stream in (False, True, False, True)]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    responses = asyncio.run(run())
    assert [response.status_code for response in responses] == [200, 200, 429, 429]
    assert responses[3].json()["error"]["type"] == "rate_limit_error"
    assert responses[3].headers["retry-after"] == "1"


def test_a_failed_completion_cancels_the_others_of_its_request() -> None:
    engine = FakeEngine()
    engine.delay = 10

    async def generate(prompt: Any, sampling: Sampling, *, group: str | None = None) -> Generation:
        if sampling.seed == 1:
            raise EngineError("one failed")
        return await FakeEngine.generate(engine, prompt, sampling, group=group)

    engine.generate = generate  # type: ignore[method-assign]
    start = time.monotonic()
    assert complete(engine, n=3, seed=0).status_code == 503
    assert time.monotonic() - start < 5
    assert engine.cancelled == 2


# --- the openai package ---


def test_the_openai_package_works_with_the_server() -> None:
    engine = FakeStreamingEngine()
    with serving(app_of(engine, api_key="right")) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0) as client:
            assert client.models.list().data[0].id == "tiny"
            completion = client.completions.create(model="tiny", prompt="abc", logprobs=0, n=2)
            assert [choice.text for choice in completion.choices] == ["cba", "cba"]
            assert completion.choices[0].logprobs is not None
            assert completion.choices[0].logprobs.token_logprobs == [-0.5] * 4
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, max_tokens=3
            )
            assert chat.choices[0].finish_reason == "length"
            assert chat.choices[0].logprobs is not None
            stream = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
            assert "".join(deltas).endswith("resu")
            with pytest.raises(openai.NotFoundError, match="not served here"):
                client.completions.create(model="other", prompt="abc")
            engine.break_after = 1
            with pytest.raises(openai.APIError, match="the engine broke"):
                list(client.completions.create(model="tiny", prompt="abc", stream=True))
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


# --- keel serve ---


def test_binding_to_another_address_without_a_key_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", "--host", "0.0.0.0"]) == 2
    assert "--host 0.0.0.0 would let other machines connect without a key" in capsys.readouterr().err


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(app_of(FakeEngine())) as url:
        assert main(["serve", "no-such-model", "--port", url.rpartition(":")[2]]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


def test_the_key_comes_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abc\n")
    assert read_key(None, file) == "abc"
    assert read_key("abc", None) == "abc"
    assert read_key(None, None) is None
    file.write_text("\n")
    for key, path in ((None, file), ("", None), ("a b", None), (None, tmp_path / "none")):
        with pytest.raises(ConfigError, match="key"):
            read_key(key, path)


SLOW_SERVER = """
import asyncio
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from keel.cli.run.serve import bind_socket, run_server

async def slow(request):
    print("received", flush=True)
    await asyncio.sleep(1)
    return PlainTextResponse("done")

listener = bind_socket("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
run_server(Starlette(routes=[Route("/", slow)]), listener, 10)
print("stopped", flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_requests_in_flight_finish(signum: int) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW_SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}/"
        with ThreadPoolExecutor() as pool:
            response = pool.submit(httpx.get, url, timeout=20)
            assert process.stdout.readline() == "received\n"
            process.send_signal(signum)
            assert response.result().text == "done"
        assert process.stdout.read() == "stopped\n"
        assert process.wait(20) == 0


@pytest.mark.process
def test_the_command_serves_the_tiny_model() -> None:
    command = [sys.executable, "-m", "keel.cli", "serve", "tiny", "--port", "0", "--max-batch", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("serving tiny at http://127.0.0.1:"), process.stderr.read()
            with openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0) as client:
                completion = client.completions.create(model="tiny", prompt="1 or 2?", max_tokens=6, seed=1, logprobs=0)
                assert completion.usage is not None
                assert 1 <= completion.usage.completion_tokens <= 6
        finally:
            process.terminate()
            code = process.wait(30)
        assert code == 0, process.stderr.read()
        assert process.stderr.read() == ""


def test_the_server_returns_what_the_local_engine_samples_complete_and_streamed() -> None:
    model = load_model(ModelSettings(name="tiny"))
    prompt = list(b"1 or 2?")
    sampling = Sampling(max_tokens=60, seed=5)

    async def direct() -> Generation:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=4))
        generation = await engine.generate(prompt, sampling)
        await engine.close()
        return generation

    expected = asyncio.run(direct())
    engine = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=4))
    with serving(build_app(engine, model.tokenizer, model="tiny")) as url:
        body = {"prompt": prompt, "max_tokens": 60, "seed": 5, "logprobs": 0, "return_token_ids": True}
        choice = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]
        assert tuple(choice["token_ids"]) == expected.token_ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected.logprobs, abs=1e-5)
        assert choice["versions"] == list(expected.versions)
        assert choice["finish_reason"] == expected.finish_reason
        chunks = events(httpx.post(f"{url}/v1/completions", json=body | {"stream": True, "n": 2}))[:-1]
        first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == 0]
        assert joined(part["token_ids"] for part in first) == choice["token_ids"]
        assert "".join(part["text"] for part in first) == choice["text"]
        assert len(first) > 2
        too_long = httpx.post(f"{url}/v1/completions", json={"prompt": [97] * 3000, "stream": True})
        assert too_long.status_code == 400
        assert "3000 tokens" in too_long.json()["error"]["message"]


def test_a_disconnect_frees_the_rows_of_the_local_engine() -> None:
    model = load_model(ModelSettings(name="tiny"))
    engine = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=4))
    with serving(build_app(engine, model.tokenizer, model="tiny", limits=Limits(max_tokens=2000))) as url:
        body = {"prompt": "1 or 2?", "stream": True, "max_tokens": 2000, "n": 4, "seed": 1}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        until(lambda: httpx.get(f"{url}/health").json()["running"] == 0)
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "1 or 2?"})
        assert response.status_code == 200
