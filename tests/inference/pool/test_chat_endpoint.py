"""ChatEndpoint over real HTTP: text in, text out, retries of what may pass, clear errors for the rest."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from keel.config import EpisodeLimits, Sampling
from keel.errors import ConfigError
from keel.inference.pool.chat_endpoint import ChatEndpoint
from keel.inference.protocol import EngineError
from keel.rollout.environments.environment import EpisodeResult, Task, run_episode
from keel.rollout.text_policy_client import TextPolicyClient
from tests.support.engine_fakes import serving

HELLO = [{"role": "user", "content": "hello"}]


def chat_reply(content: Any = "7", **changes: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"} | changes
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


@contextmanager
def endpoint(*script: Any, key: str | None = None, **options: Any) -> Iterator[tuple[ChatEndpoint, list[Any]]]:
    """Serve the script: a dictionary is a reply, a number an error status, else a response. The last repeats."""
    requests: list[Any] = []

    async def chat(request: Request) -> Response:
        requests.append((await request.json(), request.headers.get("authorization")))
        entry = script[min(len(requests), len(script)) - 1]
        if isinstance(entry, int):
            return JSONResponse({"error": {"message": "not now"}}, entry)
        return JSONResponse(entry) if isinstance(entry, dict) else entry

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "first"}, {"id": "second"}]})

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)])
    with serving(app) as url:
        yield ChatEndpoint(url, api_key=key, retry_delay=0.01, **options), requests


def complete(client: ChatEndpoint, sampling: Sampling | None = None, **options: Any) -> Any:
    async def run() -> Any:
        try:
            return await client.complete(HELLO, sampling or Sampling(max_tokens=5), **options)
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_request_has_the_sampling_the_key_and_the_first_model() -> None:
    with endpoint(chat_reply(), key="secret-key") as (client, requests):
        completion = complete(client, Sampling(max_tokens=5, temperature=0.5, seed=4, stop=("END",)))
    ((body, authorization),) = requests
    assert authorization == "Bearer secret-key"
    assert body == {
        "model": "first",
        "messages": HELLO,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1.0,
        "n": 1,
        "stop": ["END"],
        "seed": 4,
    }
    assert (completion.message["content"], completion.finish_reason, completion.completion_tokens) == ("7", "stop", 3)


def test_the_url_may_be_a_server_or_the_base_of_an_api() -> None:
    urls = {url: ChatEndpoint(url).url for url in ("http://h:1", "http://h:1/", "https://h/v1/", "https://h/a/openai")}
    assert list(urls.values()) == ["http://h:1/v1", "http://h:1/v1", "https://h/v1", "https://h/a/openai"]
    with pytest.raises(ConfigError, match="url = somewhere is not a URL"):
        ChatEndpoint("somewhere")


def test_errors_that_may_pass_are_retried_and_others_are_not() -> None:
    with endpoint(429, 503, chat_reply()) as (client, requests):
        assert complete(client).message["content"] == "7"
        assert len(requests) == 3
    with endpoint(400, key="secret-key") as (client, requests):
        with pytest.raises(EngineError, match="returned status 400: not now") as raised:
            complete(client)
        assert len(requests) == 1
        assert "secret-key" not in str(raised.value)
    with endpoint(500) as (client, requests), pytest.raises(EngineError, match="returned status 500"):
        complete(client)
    assert len(requests) == 6


def test_the_delay_that_the_endpoint_asks_for_is_kept() -> None:
    busy = JSONResponse({}, 429, {"retry-after": "1"})
    with endpoint(busy, chat_reply()) as (client, _):
        start = time.monotonic()
        complete(client)
        assert time.monotonic() - start >= 1


def test_an_endpoint_that_cannot_be_reached_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"endpoint http://127\.0\.0\.1:9/v1 cannot be reached"):
        complete(ChatEndpoint("http://127.0.0.1:9", model="m", retry_delay=0.001))


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ({}, "instead of a message"),
        ({"choices": [{"text": "x"}]}, "instead of a message"),
        ({"choices": ["x"]}, "instead of a message"),
        (chat_reply(content=[{"type": "image"}]), "content of type list"),
        (Response("<html>"), "did not return a JSON object"),
    ],
)
def test_a_malformed_reply_is_an_error(reply: Any, problem: str) -> None:
    with endpoint(reply) as (client, _), pytest.raises(EngineError, match=problem):
        complete(client)


# ---------------------------------------------------------------------------------------------------------------------
# episodes


class Twice:
    """Two turns; the reward is the length of the second completion."""

    name = "twice"

    def tasks(self, split: str) -> list[Task]:
        return [Task("t", {})]

    async def episode(self, task: Task, client: Any) -> EpisodeResult:
        reply = await client.chat(HELLO)
        second = await client.chat([*HELLO, reply.message, {"role": "user", "content": "again"}])
        return EpisodeResult(len(second.text), metrics={"tokens": second.completion_tokens})


def play(client: ChatEndpoint, environment: Any = None, **limits: Any) -> tuple[Any, TextPolicyClient]:
    async def run() -> Any:
        policy = TextPolicyClient(client, Sampling(max_tokens=5, seed=1), EpisodeLimits(**limits), group="g")
        try:
            return await run_episode(environment or Twice(), Task("t", {}), policy), policy
        finally:
            await client.close()

    return asyncio.run(run())


def test_an_episode_of_an_endpoint_is_scored_and_has_nothing_to_train_on() -> None:
    thinking = chat_reply("<think>hm</think>\nanswer", finish_reason="length")
    with endpoint(thinking) as (client, requests):
        rollout, policy = play(client)
    assert (rollout.error, rollout.reward, rollout.samples) == (None, 6.0, ())
    assert (rollout.completion_tokens, rollout.turns, rollout.truncated) == (6, 2, True)
    assert rollout.metrics == {"tokens": 3.0}
    # the thinking of the first turn is not sent back
    assert requests[1][0]["messages"][1] == {"role": "assistant", "content": "answer"}
    assert requests[0][0]["seed"] != requests[1][0]["seed"]
    assert policy.last_exchange is not None
    assert policy.last_exchange.completion == "<think>hm</think>\nanswer"
    assert [message["role"] for message in policy.last_exchange.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("script", "limits", "kind"), [(400, {}, "engine"), (chat_reply(), {"max_turns": 1}, "over_length")]
)
def test_failures_of_an_endpoint_are_failed_episodes(script: Any, limits: dict[str, Any], kind: str) -> None:
    with endpoint(script) as (client, _):
        rollout, _ = play(client, **limits)
    assert rollout.error_kind == kind


def test_an_episode_without_a_request_is_an_error_and_an_empty_completion_is_not() -> None:
    class Silent(Twice):
        async def episode(self, task: Task, client: Any) -> EpisodeResult:
            return EpisodeResult(1.0)

    without_usage = chat_reply("") | {"usage": None}
    with endpoint(without_usage) as (client, _):
        assert play(client, Silent())[0].error_kind == "empty"
    with endpoint(without_usage) as (client, _):
        rollout, _ = play(client)
    assert (rollout.error, rollout.reward, rollout.completion_tokens) == (None, 0.0, 0)
