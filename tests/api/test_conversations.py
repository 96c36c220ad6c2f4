"""The endpoint parses tool calls, and later turns extend the exact tokens of earlier ones or say why they cannot."""

from typing import Any

import httpx

from keel.api.conversations import Conversations
from keel.inference.protocol import Generation
from keel.inference.server.app import build_app
from keel.rollout.rendering.renderer import Renderer
from tests.support.api_helpers import run
from tests.support.engine_fakes import END, TOKENIZER, FakeEngine

HI = {"role": "user", "content": "hi"}


def test_tool_calls_get_unique_ids_and_the_next_turn_extends_their_tokens() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = (*TOKENIZER(text)["input_ids"], END)
    engine = FakeEngine()
    engine.answer = lambda _prompt, sampling: Generation(
        ids, (-0.5,) * len(ids), (3,) * len(ids), "stop", sampling.temperature
    )
    open_session = Conversations(Renderer(TOKENIZER)).open_session
    app = build_app(engine, TOKENIZER, model="agent-1", training_fields=True, open_session=open_session)

    async def converse() -> list[Any]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            response = await client.post("/v1/chat/completions", json={"messages": [HI], "n": 2, "max_tokens": 99})
            first, other = response.json()["choices"]
            tool = {"role": "tool", "content": "2", "tool_call_id": first["message"]["tool_calls"][0]["id"]}
            messages = [HI, first["message"], tool]
            second = (await client.post("/v1/chat/completions", json={"messages": messages})).json()["choices"][0]
            rejected = await client.post(
                "/v1/chat/completions", json={"messages": [HI], "tools": [{"type": "function"}]}
            )
            return [first, other, second, rejected]

    first, other, second, rejected = run(converse())
    calls = [choice["message"]["tool_calls"][0] for choice in (first, other)]
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'} and calls[0]["id"] != calls[1]["id"]
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == ""
    before = [*first["prompt_token_ids"], *first["token_ids"]]
    assert second["prompt_token_ids"][: len(before)] == before and second["prompt_reason"] is None
    assert "2<|im_end|>" in TOKENIZER.decode(second["prompt_token_ids"][len(before) :])
    # a template without support for tools is an error that says what to do
    assert rejected.status_code == 400 and "describe them in a system message" in rejected.json()["error"]["message"]


def test_a_forgotten_turn_is_rendered_again() -> None:
    conversations = Conversations(Renderer(TOKENIZER), max_turns=1)
    for text in ("one", "two"):
        conversations.open_session([{"role": "user", "content": text}], []).record_completion([5, 6, END], [])
    one, two = (
        conversations.open_session(
            [{"role": "user", "content": text}, {"role": "assistant", "content": "\x05\x06"}, HI], []
        )
        for text in ("one", "two")
    )
    assert two.split_reason is None
    assert list(one.prompt) == TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": "\x05\x06"}, HI],
        add_generation_prompt=True,
        return_dict=False,
    )


def test_a_stop_string_is_not_in_the_message_and_the_conversation_still_extends_its_tokens() -> None:
    conversations = Conversations(Renderer(TOKENIZER))
    first = conversations.open_session([HI], [])
    ids = TOKENIZER("yes. and")["input_ids"]
    assert first.record_completion(ids, ["."])["content"] == "yes"
    second = conversations.open_session([HI, {"role": "assistant", "content": "yes"}, HI], [])
    assert list(second.prompt)[: len(first.prompt) + len(ids)] == [*first.prompt, *ids]
