"""Test that tiny models tokenize any text, depend only on their seed, and answer questions after a warmup."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config.trainer import ModelSettings
from keel.training.model import tiny_models
from keel.training.model.model import Model, load_model
from keel.training.model.model_source import resolve_model

TOKENIZER = tiny_models.build_tokenizer()


@settings(max_examples=60)
@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text


@given(st.text().filter(lambda text: "<|" not in text))
def test_the_token_ids_of_a_text_are_its_bytes(text: str) -> None:
    assert TOKENIZER.encode(text) == list(text.encode())


def test_every_id_the_model_can_sample_is_a_token() -> None:
    assert len(TOKENIZER) == tiny_models.VOCAB_SIZE
    assert all(TOKENIZER.decode([index]) for index in range(tiny_models.VOCAB_SIZE))
    assert TOKENIZER.pad_token_id not in {TOKENIZER.eos_token_id, TOKENIZER.bos_token_id}


def test_special_tokens_in_a_text_are_single_tokens() -> None:
    assert TOKENIZER.encode("<|im_start|>a<|im_end|>") == [257, 97, 258]


@pytest.mark.parametrize("name", tiny_models.MODEL_NAMES)
def test_each_family_is_small_not_uniform_and_determined_by_its_seed(name: str) -> None:
    first, again, other = (load_model(ModelSettings(name=name), seed) for seed in (0, 0, 1))
    assert first.source.fingerprint == again.source.fingerprint != other.source.fingerprint
    weights = first.parameters()
    assert all(torch.equal(weights[key], value) for key, value in again.parameters().items())
    assert not all(torch.equal(weights[key], value) for key, value in other.parameters().items())
    assert sum(weight.numel() for weight in weights.values()) < 300_000
    ids = torch.tensor([list(b"Which is larger, 3 or 7?")])
    logits = first.network(input_ids=ids).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert 1 < entropy < 0.95 * torch.tensor(float(tiny_models.VOCAB_SIZE)).log()
    logits.sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights.values())
    # body and head give the network's logits, except for the soft cap of Gemma 2
    hidden = first.body(input_ids=ids)[0]
    cap = getattr(first.network.config, "final_logit_softcapping", None)
    direct = first.head(hidden)
    torch.testing.assert_close(torch.tanh(direct / cap) * cap if cap else direct, logits)


def test_a_sliding_window_limits_attention() -> None:
    """Tokens beyond the reach of two layers with window 8 change nothing; nearer ones do."""
    network = load_model(ModelSettings(name="tiny-mistral")).network
    ids = torch.arange(60, 100)[None]
    far, near = ids.clone(), ids.clone()
    far[0, 0] = near[0, -5] = 7
    last = [network(input_ids=tokens).logits[0, -1] for tokens in (ids, far, near)]
    assert torch.equal(last[0], last[1])
    assert not torch.allclose(last[0], last[2])


def test_loading_a_model_does_not_change_the_global_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(ModelSettings(name="tiny", lora={"rank": 2}, sft_warmup_steps=1), 77)
    assert torch.equal(torch.rand(3), expected)


def _answer_probabilities(model: Model) -> tuple[float, float]:
    """Return the mean probability over all questions that the first token is a digit, and the correct one."""
    digit, correct = [], []
    for first in range(10):
        for second in range(10):
            if first == second:
                continue
            chat = [{"role": "user", "content": f"Which is larger, {first} or {second}?"}]
            ids = model.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            with torch.no_grad():
                probabilities = model.network(input_ids=ids).logits[0, -1].softmax(-1)
            digit.append(probabilities[ord("0") : ord("9") + 1].sum().item())
            correct.append(probabilities[ord(str(max(first, second)))].item())
    return sum(digit) / 90, sum(correct) / 90


def test_a_warmup_gives_well_formed_answers_of_which_some_are_correct() -> None:
    untrained = _answer_probabilities(load_model(ModelSettings(name="tiny")))
    digit, correct = _answer_probabilities(load_model(ModelSettings(name="tiny", sft_warmup_steps=150)))
    assert untrained[0] < 0.2 and untrained[1] < 0.05
    assert digit > 0.85
    # correct often enough for rewards, wrong often enough for groups with mixed rewards
    assert 0.25 < correct < 0.8


def test_a_warmup_is_bit_identical_and_part_of_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model("tiny-qwen3", 3, 5)
    assert resolve_model("tiny-qwen3", 3).fingerprint != first.fingerprint
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(123)
    second = resolve_model("tiny-qwen3", 3, 5)
    assert second.folder != first.folder
    assert second.fingerprint == first.fingerprint
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (second.folder / file).read_bytes() == (first.folder / file).read_bytes()


def test_comparisons_have_one_correct_answer() -> None:
    rng = random.Random(0)
    for _ in range(50):
        question, correct, incorrect = tiny_models.comparison_question(rng)
        assert int(correct) > int(incorrect)
        assert {correct, incorrect} == {character for character in question if character.isdigit()}
