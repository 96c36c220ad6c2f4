"""The reward "reward_model": a Hugging Face sequence-classification model, scored in batches.

The factory checks the model's files when the run starts; the model is loaded by the first call, in a worker process of
its own, so that the event loop never waits for it. All completions of a group are scored by one call. Nothing is
downloaded.

- Text: the chat template of the tokenizer over the prompt's messages and the completion; without a template, the text
  of the messages and the completion as a pair.
- Truncation: of a text with more than `max_length` tokens the last ones are kept, and the first one if it is a special
  token, which encoders classify by. The completion is at the end, so the prompt loses its beginning first.
- Equal completions are scored once: rounding in a batch would otherwise give them different rewards, which a group
  baseline takes for a signal.
- Padding is always on the right, whatever the tokenizer's setting; causal models do not see it there.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keel.common.settings import to_config_error
from keel.config.dataset import RewardModelSettings
from keel.errors import ConfigError, ModelError
from keel.rollout.environments.dataset_rows import find_path

DEFAULT_MAX_LENGTH = 4096
MAX_STATED_LENGTH = 10**6
"""Tokenizers without a limit state a huge one."""
LOAD_TIMEOUT = 300.0
"""Default time limit of a call in seconds: the first one loads the model."""


def reward_model(**options: Any) -> Callable[..., list[dict[str, Any]]]:
    """Return a reward function of lists; raise ConfigError if the model's files cannot be used."""
    try:
        settings = RewardModelSettings.model_validate(options)
    except ValidationError as error:
        raise to_config_error(error, ("rewards", "reward_model", "options")) from error
    folder = find_model(settings)
    check_config(settings, folder)
    loaded: list[SequenceClassifier] = []

    def reward(messages: list[list[dict[str, Any]]], completions: list[str], **_: Any) -> list[dict[str, Any]]:
        if not loaded:
            loaded.append(SequenceClassifier(settings, folder))
        return loaded[0].score(messages, completions)

    return reward


def find_model(settings: RewardModelSettings) -> Path:
    """Return the folder of the model: a path, or a name in the Hugging Face cache."""
    name = f'reward "reward_model": options.model = "{settings.model}"'
    path = find_path(settings.model)
    if path is not None and (path / "config.json").is_file():
        return path.resolve()
    if path is not None:
        raise ConfigError(f"{name} is not a folder with a config.json")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(settings.model, "config.json")
    except HFValidationError:  # a path
        cached = None
    if not isinstance(cached, str):
        raise ConfigError(
            f"{name} is neither a folder nor a model in the local Hugging Face cache; nothing is downloaded during a"
            " run: download it first (hf download NAME), or give its folder"
        )
    return Path(cached).parent


def check_config(settings: RewardModelSettings, folder: Path) -> None:
    """Raise ConfigError if the folder holds another kind of model, or the label does not exist."""
    from keel.common.atomic_files import read_json

    try:
        config = read_json(folder / "config.json")
    except ModelError as error:
        raise ConfigError(f'reward "reward_model": options.model = "{settings.model}": {error}') from error
    architectures = config.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise ConfigError(
            f'reward "reward_model": options.model = "{settings.model}" is not a sequence-classification model but'
            f" {', '.join(map(str, architectures)) or 'unknown'}: it has no trained score"
        )
    labels = config.get("id2label") or dict.fromkeys(range(int(config.get("num_labels", 2))), "")
    if settings.label is None and len(labels) != 1:
        names = ", ".join(f"{index} ({label})" if label else str(index) for index, label in labels.items())
        raise ConfigError(f'reward "reward_model": options.label must choose one of the labels of the model: {names}')
    if settings.label is not None and settings.label >= len(labels):
        raise ConfigError(
            f'reward "reward_model": options.label = {settings.label}, and the model has {len(labels)} labels'
        )


class SequenceClassifier:
    """A loaded model with its tokenizer."""

    def __init__(self, settings: RewardModelSettings, folder: Path) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._settings = settings
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=getattr(torch, settings.dtype),
            output_loading_info=True,
        )
        if info["missing_keys"]:  # transformers initialises them at random
            raise ModelError(f"{folder} lacks the weights {', '.join(sorted(info['missing_keys'])[:3])}")
        self.model.to(settings.device).eval()
        self._pad_id: int | None = self.model.config.get_text_config().pad_token_id
        self.max_length = settings.max_length or self._stated_length()

    def score(self, messages: Sequence[Sequence[dict[str, Any]]], completions: Sequence[str]) -> list[dict[str, Any]]:
        """Return reward and metrics of each completion."""
        encoded = [self._encode(prompt, text) for prompt, text in zip(messages, completions, strict=True)]
        unique = sorted({ids for ids, _, _ in encoded}, key=lambda ids: (len(ids), ids))
        types = {ids: token_types for ids, token_types, _ in encoded}
        values: dict[tuple[int, ...], float] = {}
        for start in range(0, len(unique), self._settings.batch_size):
            batch = unique[start : start + self._settings.batch_size]
            values |= zip(batch, self._score_batch(batch, [types[ids] for ids in batch]), strict=True)
        return [
            {"reward": values[ids], "metrics": {"tokens": len(ids), "truncated": truncated}}
            for ids, _, truncated in encoded
        ]

    def _score_batch(self, batch: list[tuple[int, ...]], types: list[tuple[int, ...]]) -> list[float]:
        import torch

        width = max(map(len, batch))
        # A causal model without a padding token takes the last token of a row; one that is not in the batch marks the
        # end of the shorter rows without hiding a token of the text.
        used = {token for ids in batch for token in ids}
        pad = self._pad_id if self._pad_id is not None else next(t for t in range(len(used) + 1) if t not in used)
        self.model.config.get_text_config().pad_token_id = pad

        def padded(rows: Sequence[Sequence[int]], value: int) -> "torch.Tensor":
            filled = [[*row, *[value] * (width - len(row))] for row in rows]
            return torch.tensor(filled, device=self._settings.device)

        inputs = {"input_ids": padded(batch, pad), "attention_mask": padded([[1] * len(ids) for ids in batch], 0)}
        if any(types):
            inputs["token_type_ids"] = padded(types, 0)
        with torch.inference_mode():
            logits = self.model(**inputs).logits[:, self._settings.label or 0].float()
        return [float(value) for value in (logits.sigmoid() if self._settings.sigmoid else logits)]

    def _encode(
        self, messages: Sequence[dict[str, Any]], completion: str
    ) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Return token ids, token types if the model has them, and whether the text was too long."""
        if self.tokenizer.chat_template:
            conversation = [*messages, {"role": "assistant", "content": completion}]
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False)
            encoding = self.tokenizer(text, add_special_tokens=False, truncation=False)
        else:
            prompt = "\n".join(str(message["content"]) for message in messages)
            encoding = self.tokenizer(prompt, completion, truncation=False)
        ids, types = encoding["input_ids"], encoding.get("token_type_ids") or []
        if not ids:
            raise ValueError("prompt and completion have no tokens")
        if len(ids) <= self.max_length:
            return tuple(ids), tuple(types), False
        first = 1 if ids[0] in self.tokenizer.all_special_ids else 0
        cut = len(ids) - (self.max_length - first)
        return (*ids[:first], *ids[cut:]), (*types[:first], *types[cut:]), True

    def _stated_length(self) -> int:
        stated = [self.tokenizer.model_max_length]
        stated.append(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf)
        return int(min((length for length in stated if length < MAX_STATED_LENGTH), default=DEFAULT_MAX_LENGTH))
