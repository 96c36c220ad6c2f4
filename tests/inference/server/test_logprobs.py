"""Log-probs over HTTP: of the prompt, of the most likely tokens, and the exact bytes of every token."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keel.config import EngineSettings, ModelSettings
from keel.inference.local.local_engine import LocalEngine
from keel.inference.server.app import build_app
from keel.inference.server.token_texts import TokenTexts, byte_alphabet
from keel.training import Model, load_model

PROMPT = [257, *b"user\nWhich is larger, 3 or 5?"]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    return load_model(ModelSettings(name="tiny", sft_warmup_steps=300))


def post(model: Model, path: str, body: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Answer one request with a real engine; a stream is returned as its list of chunks."""

    async def run() -> Any:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings(**settings))
        app = build_app(engine, model.tokenizer, model="tiny", vocab_size=model.head.out_features)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
                response = await client.post(f"/v1/{path}", json=body)
                if body.get("stream"):
                    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
                    return {"chunks": [json.loads(line) for line in lines if line != "[DONE]"]}
                return response.json()
        finally:
            await engine.close()

    answer: dict[str, Any] = asyncio.run(run())
    assert "error" not in answer, answer
    return answer


@torch.inference_mode()
def reference(model: Model, token_ids: list[int]) -> torch.Tensor:
    """Return the log-probs [T - 1, V] of the next token with the model's own code."""
    logits = model.network(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits[:-1].double().log_softmax(-1)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("length", [1, 2, 31, 700])
def test_prompt_logprobs_are_those_of_a_forward_pass(model: Model, native: str, length: int) -> None:
    prompt = (PROMPT * 30)[:length]
    expected = reference(model, prompt)
    body = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 0, "temperature": 0}
    (choice,) = post(model, "completions", body, native_kernels=native)["choices"]
    values, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert len(values) == len(tops) == len(choice["logprobs"]["tokens"]) == length
    assert values[0] is None and tops[0] is None
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert values[1:] == pytest.approx(chosen.tolist(), abs=2e-5)
    for row, top, value in zip(expected, tops[1:], values[1:], strict=True):
        best = row.topk(3).values.tolist()
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=2e-5)
        # lm-evaluation-harness decides by equality whether a token is the most likely one
        assert (max(top.values()) == value) == (value >= best[0] - 1e-6)


def test_echo_returns_the_prompt_before_the_completion(model: Model) -> None:
    body = {"prompt": ["3 or 5?", "9 or"], "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2, "temperature": 0}
    answer = post(model, "completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(answer["choices"], ["3 or 5?", "3 or 5?", "9 or", "9 or"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert len(logprobs["tokens"]) == len(prompt) + len(choice["versions"])
        assert logprobs["text_offset"][: len(prompt)] == list(range(len(prompt)))
        # the token that was sampled last is the most likely one
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    plain = post(model, "completions", {"prompt": "3 or", "echo": True, "max_tokens": 0})
    assert plain["choices"][0]["text"] == "3 or" and plain["choices"][0]["logprobs"] is None
    assert plain["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}


@pytest.mark.parametrize("temperature", [0, 0.7, 1])
def test_top_logprobs_are_sorted_and_agree_with_the_sampled_token(model: Model, temperature: float) -> None:
    body = {
        "messages": [{"role": "user", "content": "Which is larger, 3 or 5?"}],
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": temperature,
        "seed": 1,
        "max_tokens": 6,
    }
    (choice,) = post(model, "chat/completions", body)["choices"]
    content = choice["logprobs"]["content"]
    assert content
    for entry in content:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 20 and tops == sorted(tops, reverse=True)
        named = {bytes(top["bytes"]): top["logprob"] for top in entry["top_logprobs"]}
        if bytes(entry["bytes"]) in named:
            assert named[bytes(entry["bytes"])] == entry["logprob"]
        else:
            assert entry["logprob"] <= tops[-1] + 1e-6
        if temperature == 0:
            assert entry["logprob"] == tops[0]


def test_completions_without_scores_are_not_changed_by_those_with(model: Model) -> None:
    plain = {"prompt": PROMPT, "max_tokens": 8, "seed": 5, "logprobs": 0}
    first, second = post(model, "completions", plain), post(model, "completions", {**plain, "logprobs": 5})
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["choices"][0]["logprobs"]["token_logprobs"] == second["choices"][0]["logprobs"]["token_logprobs"]
    assert first["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_stream_has_the_same_top_logprobs_as_a_complete_response(model: Model) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 5, "logprobs": 4}
    complete = post(model, "completions", body)["choices"][0]["logprobs"]["top_logprobs"]
    chunks = post(model, "completions", {**body, "stream": True})["chunks"]
    streamed = [top for chunk in chunks for choice in chunk["choices"] for top in choice["logprobs"]["top_logprobs"]]
    assert streamed == complete


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer in which characters beyond ASCII are several tokens."""
    vocabulary = {character: index for index, character in enumerate(sorted(byte_alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the pieces and decoders of SentencePiece, with a fallback to bytes."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "b", "\u00e9"]
    merges = [("\u2581", "a")]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ["a b", "caf\u00e9", "\u65e5\u672c \U0001f600a", "a\n\x00b"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    ids = tokenizer(text)["input_ids"]
    assert b"".join(texts.raw_bytes(token) for token in ids) == text.encode()
    eos = tokenizer.eos_token_id
    assert texts.raw_bytes(eos) == texts.text(eos).encode() == tokenizer.eos_token.encode()
    if "\u65e5" in text:
        assert "\ufffd" in [texts.text(token) for token in ids]


def test_the_bytes_of_the_tiny_model_are_exact(model: Model) -> None:
    texts, text = TokenTexts(model.tokenizer), "caf\u00e9 \U0001f600"
    ids = model.tokenizer(text)["input_ids"]
    assert b"".join(texts.raw_bytes(token) for token in ids if token < 256).decode() == text
