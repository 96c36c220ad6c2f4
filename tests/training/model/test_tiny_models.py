"""The tiny models: any text survives their tokenizer, a seed decides every bit, a warm-up makes answers."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.config.trainer import ModelSettings
from keel.training.model import tiny_models
from keel.training.model.model import Model, load_model
from keel.training.model.model_source import resolve_model


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


WORDS = tiny_models.build_tokenizer()


@settings(max_examples=60)
@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text


@given(st.text().filter(lambda text: "<|" not in text))
def test_the_tokens_of_a_text_are_its_bytes(text: str) -> None:
    assert WORDS.encode(text) == list(text.encode())


def test_every_id_that_the_model_can_sample_is_a_token() -> None:
    assert len(WORDS) == tiny_models.VOCAB_SIZE
    assert all(WORDS.decode([index]) for index in range(tiny_models.VOCAB_SIZE))
    assert WORDS.pad_token_id not in {WORDS.eos_token_id, WORDS.bos_token_id}


def test_specials_in_a_text_are_single_tokens() -> None:
    assert WORDS.encode("<|im_start|>a<|im_end|>") == [257, 97, 258]


@pytest.mark.parametrize("name", tiny_models.MODEL_NAMES)
def test_each_family_loads_small_uneven_and_from_its_seed(name: str) -> None:
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
    # what the head and the body give is what the network gives, up to the soft-capping of Gemma 2
    hidden = first.body(input_ids=ids)[0]
    cap = getattr(first.network.config, "final_logit_softcapping", None)
    direct = first.head(hidden)
    torch.testing.assert_close(torch.tanh(direct / cap) * cap if cap else direct, logits)


def test_a_sliding_window_is_felt() -> None:
    """Tokens farther back than two layers of window 8 can reach change nothing; nearer ones do."""
    network = load_model(ModelSettings(name="tiny-mistral")).network
    ids = torch.arange(60, 100)[None]
    far, near = ids.clone(), ids.clone()
    far[0, 0] = near[0, -5] = 7
    last = [network(input_ids=each).logits[0, -1] for each in (ids, far, near)]
    assert torch.equal(last[0], last[1])
    assert not torch.allclose(last[0], last[2])


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(ModelSettings(name="tiny", lora={"rank": 2}, sft_warmup_steps=1), 77)
    assert torch.equal(torch.rand(3), expected)


def _answers(model: Model) -> tuple[float, float]:
    """Mean probability that the first token is a digit, and that it is the right one, over all questions."""
    legal, right = [], []
    for first in range(10):
        for second in range(10):
            if first == second:
                continue
            chat = [{"role": "user", "content": f"Which is larger, {first} or {second}?"}]
            ids = model.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
            )
            with torch.no_grad():
                chances = model.network(input_ids=ids).logits[0, -1].softmax(-1)
            legal.append(chances[ord("0") : ord("9") + 1].sum().item())
            right.append(chances[ord(str(max(first, second)))].item())
    return sum(legal) / 90, sum(right) / 90


def test_a_warm_up_makes_legal_answers_of_which_some_are_right() -> None:
    cold = _answers(load_model(ModelSettings(name="tiny")))
    legal, right = _answers(load_model(ModelSettings(name="tiny", sft_warmup_steps=150)))
    assert cold[0] < 0.2 and cold[1] < 0.05
    assert legal > 0.85
    # right often enough for rewards, wrong often enough for a signal
    assert 0.25 < right < 0.8


def test_a_warm_up_is_bit_identical_and_part_of_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = resolve_model("tiny-qwen3", 3, 5)
    assert resolve_model("tiny-qwen3", 3).fingerprint != here.fingerprint
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(123)
    there = resolve_model("tiny-qwen3", 3, 5)
    assert there.folder != here.folder
    assert there.fingerprint == here.fingerprint
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (there.folder / file).read_bytes() == (here.folder / file).read_bytes()


def test_comparisons_have_one_right_answer() -> None:
    chance = random.Random(0)
    for _ in range(50):
        question, right, wrong = tiny_models.comparison_question(chance)
        assert int(right) > int(wrong)
        assert {right, wrong} == {character for character in question if character.isdigit()}
