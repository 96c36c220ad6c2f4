"""The reward model with tiny random sequence-classification models, built here from transformers configurations."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)

from keel.cli import main
from keel.config.dataset import RewardModelSettings, RewardSettings
from keel.errors import ConfigError
from keel.rollout.environments.rewards.reward_sources import make_sources
from keel.rollout.environments.rewards.workers import RewardScore
from keel.rollout.model_rewards.reward_model import SequenceClassifier, reward_model
from keel.training.model import tiny_models

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "bert": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "gpt2": GPT2Config, "bert": BertConfig}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]
TEXTS = ["hello", "a much longer completion " * 3, "", "hello there", "x" * 40, "hello"]


def build(folder: Path, kind: str = "llama", *, labels: int = 1, template: bool = True, pad: bool = False) -> Path:
    """Save a random model with the byte tokenizer of the tiny models; return its folder."""
    tokenizer: Any = tiny_models.build_tokenizer()
    if not template:
        tokenizer.chat_template = None
    torch.manual_seed(0)
    pad_id = {"pad_token_id": tokenizer.eos_token_id if pad else None}
    # with the usual range, texts differ by less than rounding
    size: dict[str, Any] = {"vocab_size": len(tokenizer), "initializer_range": 0.3, **SIZES[kind]}
    config = CONFIGS[kind](num_labels=labels, **size, **pad_id)
    network = AutoModelForSequenceClassification.from_config(config)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scores(folder: Path, texts: list[str], **options: Any) -> list[float]:
    classifier = SequenceClassifier(RewardModelSettings(model=str(folder), **options), folder)
    return [entry["reward"] for entry in classifier.score([MESSAGES] * len(texts), texts)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("pad", [True, False])
def test_batched_scores_equal_single_scores(kind: str, template: bool, pad: bool, tmp_path: Path) -> None:
    if kind == "bert" and not pad:
        pytest.skip("an encoder does not take its score from the last token")
    build(tmp_path, kind, template=template, pad=pad)
    batched = scores(tmp_path, TEXTS)
    assert batched == pytest.approx([scores(tmp_path, [text])[0] for text in TEXTS], abs=1e-5)
    assert len({round(value, 4) for value in batched}) == 5
    assert scores(tmp_path, TEXTS, batch_size=2) == pytest.approx(batched, abs=1e-5)


def test_equal_completions_get_exactly_equal_scores(tmp_path: Path) -> None:
    values = scores(build(tmp_path), TEXTS, batch_size=3)
    assert values[0] == values[-1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_padding_side_of_the_tokenizer_does_not_matter(kind: str, tmp_path: Path) -> None:
    build(tmp_path, kind)
    expected = scores(tmp_path, TEXTS)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    assert scores(tmp_path, TEXTS) == expected


def test_the_score_is_that_of_transformers(tmp_path: Path) -> None:
    build(tmp_path)
    classifier = SequenceClassifier(RewardModelSettings(model=str(tmp_path)), tmp_path)
    conversation = [*MESSAGES, {"role": "assistant", "content": "hello"}]
    ids = classifier.tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)["input_ids"]
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = network(ids).logits.item()
    assert scores(tmp_path, ["hello"]) == [pytest.approx(expected, abs=1e-5)]
    assert scores(tmp_path, ["hello"], sigmoid=True) == [pytest.approx(1 / (1 + 2.718281828**-expected), abs=1e-5)]


def test_a_label_is_chosen_by_its_index(tmp_path: Path) -> None:
    build(tmp_path, labels=3)
    values = [scores(tmp_path, ["hello"], label=label)[0] for label in range(3)]
    assert len(set(values)) == 3


def test_the_end_of_a_long_text_is_kept_with_a_first_special_token(tmp_path: Path) -> None:
    build(tmp_path)
    classifier = SequenceClassifier(RewardModelSettings(model=str(tmp_path), max_length=16), tmp_path)
    whole, _, _ = SequenceClassifier(RewardModelSettings(model=str(tmp_path)), tmp_path)._encode(MESSAGES, "a" * 50)
    ids, _, truncated = classifier._encode(MESSAGES, "a" * 50)
    assert truncated
    assert len(ids) == 16
    assert ids[1:] == whole[-15:]
    assert ids[0] == whole[0]
    (entry,) = classifier.score([MESSAGES], ["a" * 50])
    assert entry["metrics"] == {"tokens": 16, "truncated": True}


def test_the_default_length_is_that_of_the_model(tmp_path: Path) -> None:
    build(tmp_path, "gpt2")
    assert SequenceClassifier(RewardModelSettings(model=str(tmp_path)), tmp_path).max_length == 256
    assert len(scores(tmp_path, ["a" * 1000])) == 1


# settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "./nowhere"},
            'reward "reward_model": options.model = "./nowhere" is neither a folder nor a model in',
        ),
        ({"model": "no/such-model"}, 'options.model = "no/such-model" is neither a folder nor'),
        ({"model": "."}, 'options.model = "." is not a folder with a config.json'),
        ({}, "rewards.reward_model.options.model is missing"),
        ({"model": "m", "batch_size": 0}, "rewards.reward_model.options.batch_size = 0"),
    ],
)
def test_wrong_options_are_errors_that_name_the_setting(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        reward_model(**options)


def test_a_model_without_a_trained_score_is_an_error(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=300, **SIZES["llama"])
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not a sequence-classification model but LlamaForCausalLM"):
        reward_model(model=str(tmp_path))


def test_a_model_with_several_labels_needs_one(tmp_path: Path) -> None:
    build(tmp_path, labels=2)
    with pytest.raises(ConfigError, match=r"options.label must choose one of the labels of the model: 0, 1"):
        reward_model(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"options.label = 2, and the model has 2 labels"):
        reward_model(model=str(tmp_path), label=2)


# in a worker process


@pytest.mark.process
def test_the_model_runs_in_its_own_process_and_the_event_loop_is_not_blocked(tmp_path: Path) -> None:
    build(tmp_path)
    (source,) = make_sources([RewardSettings(name="reward_model", options={"model": str(tmp_path)})])
    assert source.scope == "group"
    items = [{"messages": MESSAGES, "prompt": "Say hello.", "completion": text} for text in TEXTS]

    async def call() -> tuple[list[list[RewardScore]], float]:
        longest, last = 0.0, asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(source.score(items)) for _ in range(3)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            longest, last = max(longest, asyncio.get_running_loop().time() - last), asyncio.get_running_loop().time()
        await source.close()
        return [task.result() for task in tasks], longest

    results, longest = asyncio.run(call())
    expected = scores(tmp_path, TEXTS)
    for result in results:
        assert [score.value for score in result] == pytest.approx(expected, abs=1e-5)
    assert results[0][0].metrics["truncated"] == 0.0
    assert longest < 1.0


@pytest.mark.process
def test_keel_reward_tries_a_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "scorer")
    rows = [{"prompt": f"Question {n}?"} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--data", "train.jsonl", "--model", "tiny", "--tasks", "2", "--samples", "4", "--max-tokens", "8"]
    assert main(["reward", '{name = "reward_model", options = {model = "scorer"}}', *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 groups have different rewards" in out
    assert "reward_model/truncated 0" in out
