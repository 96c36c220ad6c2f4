"""`keel serve` serves a run, an adapter or a model, and parses tool calls where the chat template has tools."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from keel.cli import main
from keel.cli.run.served_model import find_served_model, tool_session_factory
from keel.config import LoraSettings, ModelSettings
from keel.config.trainer import CheckpointSettings
from keel.errors import ConfigError, ModelError
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import WeightSource
from keel.inference.server.app import build_app
from keel.training import Checkpoints, Trainer, load_model
from keel.training.model import tiny_models
from tests.rollout.rendering.test_renderer import QWEN_LIKE
from tests.support.scripted_engine import ScriptedEngine

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


def chat(template: str | None, *script: str, **body: Any) -> tuple[httpx.Response, ScriptedEngine]:
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    engine = ScriptedEngine(*script, tokenizer=tokenizer)
    app = build_app(engine, tokenizer, model="tiny", open_tool_session=tool_session_factory(tokenizer))

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            request = {"messages": [{"role": "user", "content": "1 + 2?"}], **body}
            return await client.post("/v1/chat/completions", json=request)

    return asyncio.run(run()), engine


def test_tools_are_rendered_and_a_call_is_parsed() -> None:
    response, engine = chat(QWEN_LIKE, CALL, tools=[ADD], tool_choice="auto", max_tokens=200)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "add"
    assert '"Add two numbers."' in engine.tokenizer.decode(list(engine.requests[0][0]))


def test_a_completion_without_a_call_is_a_message() -> None:
    response, _ = chat(QWEN_LIKE, "3<|im_end|>", tools=[ADD], max_tokens=200)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "3"
    assert not choice["message"].get("tool_calls")


def test_tool_choice_none_hides_the_tools() -> None:
    response, engine = chat(QWEN_LIKE, "3<|im_end|>", tools=[ADD], tool_choice="none", max_tokens=200)
    assert response.status_code == 200
    assert "Add two numbers" not in engine.tokenizer.decode(list(engine.requests[0][0]))


@pytest.mark.parametrize(
    ("template", "body", "message"),
    [
        (None, {}, "the model's chat template does not support tools"),
        (QWEN_LIKE, {"stream": True}, "completions with tools cannot be streamed"),
        (QWEN_LIKE, {"tool_choice": "required"}, "tool_choice = \"required\": input should be 'auto' or 'none'"),
    ],
)
def test_tools_that_cannot_be_served_are_400(template: str | None, body: dict[str, Any], message: str) -> None:
    response, engine = chat(template, tools=[ADD], **body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert not engine.requests


def make_run(folder: Path, lora: LoraSettings | None = None) -> Path:
    """Write a run with two checkpoints whose weights differ from the model's."""
    trainer = Trainer(load_model(ModelSettings(name="tiny", lora=lora)))
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointSettings())
    for step in (1, 2):
        with torch.no_grad():
            for weight in trainer.model.parameters().values():
                weight.add_(0.05 * step)
        trainer.save(checkpoints, step)
    (folder / "config.toml").write_text('[model]\nname = "tiny"\n' + ("lora = { rank = 4 }\n" if lora else ""))
    (folder / "run.db").touch()
    return folder


def served_weights(**target: Any) -> dict[str, torch.Tensor]:
    """Return the weights with which an engine serves a target."""
    served = find_served_model(
        **({"model": None, "adapter": None, "step": None, "dtype": "auto", "device": "cpu"} | target)
    )

    async def run() -> dict[str, torch.Tensor]:
        model = load_model(served.settings, served.seed)
        engine = LocalEngine(model.network, model.tokenizer)
        try:
            if served.adapter is not None:
                await engine.load_weights(WeightSource.adapter(served.adapter), served.step or 0)
        finally:
            await engine.close()
        return {name: value.clone() for name, value in model.network.state_dict().items()}

    return asyncio.run(run())


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(first[name], second[name]) for name in first)


def test_a_run_is_served_with_its_newest_checkpoint_or_that_of_a_step(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    newest, first = served_weights(model=str(run)), served_weights(model=str(run), step=1)
    assert same(newest, served_weights(model=str(run), step=2)) and not same(newest, first)
    assert not same(first, served_weights(model="tiny"))
    with pytest.raises(ModelError, match="there is no checkpoint of step 9"):
        served_weights(model=str(run), step=9)


def test_an_adapter_is_served_on_its_base(tmp_path: Path) -> None:
    run = make_run(tmp_path, LoraSettings(rank=4))
    checkpoint = run / "checkpoints" / "step_2"
    newest = served_weights(model=str(run))
    assert not same(newest, served_weights(model="tiny"))
    assert same(newest, served_weights(adapter=checkpoint, model="tiny"))
    assert same(newest, served_weights(adapter=checkpoint))
    assert same(newest, served_weights(model=str(checkpoint)))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({}, "pass a MODEL, the folder of a run, or --adapter DIR"),
        ({"model": "tiny", "step": 3}, "--step 3 has no effect: tiny is not the folder of a run"),
        ({"adapter": Path("/nowhere")}, "/nowhere"),
    ],
)
def test_a_target_that_cannot_be_served_is_an_error(target: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        served_weights(**target)


def test_the_command_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0"]) == 2
    assert "pass a MODEL" in capsys.readouterr().err
