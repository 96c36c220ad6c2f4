"""What supervised fine-tuning would train on, without training: counts, and one conversation token by token."""

from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
import transformers

from keel.config import RunSettings
from keel.rollout.rendering.renderer import Renderer
from keel.run.sft.batches import CHECKED_ROWS, SampleRenderer
from keel.run.sft.conversations import open_data
from keel.training.model.model_source import resolve_model, suppress_hf_output

TRAINED_BRACKETS = ("[", "]")
"""Put around trained text, so that it can be told apart without colours."""


@dataclass(frozen=True)
class SftPreview:
    """Counts of the data, and the tokens of its first conversation."""

    train_rows: int
    held_out_rows: int
    steps: int
    rows_per_step: int
    lengths: list[int]
    """Tokens of the first conversations."""
    trained: list[int]
    """Trained tokens of the same conversations."""
    pieces: list[tuple[str, bool]]
    """The text of the first conversation in parts, and whether each is trained."""

    def lines(self) -> list[str]:
        shown, rows = f"of the first {len(self.lengths)} rows", self.steps * self.rows_per_step
        lengths = self.lengths
        return [
            f"rows       {self.train_rows} for training, {self.held_out_rows} held out",
            f"steps      {self.steps} of {self.rows_per_step} rows: {rows / self.train_rows:.2f} epochs",
            f"tokens     {min(lengths)} to {max(lengths)} per row, median {median(lengths):.0f}, {shown}",
            f"trained    {100 * sum(self.trained) / sum(lengths):.1f} % of the tokens {shown}",
        ]

    def as_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("train_rows", "held_out_rows", "steps", "rows_per_step")}
        values |= {"tokens": sum(self.lengths), "trained_tokens": sum(self.trained), "checked_rows": len(self.lengths)}
        return values | {"example": [{"text": text, "trained": trained} for text, trained in self.pieces]}


def preview(settings: RunSettings) -> SftPreview:
    """Check the data with the model's tokenizer, as a run does before its first step."""
    data = open_data(settings)
    assert settings.sft is not None
    source = resolve_model(settings.model.name, settings.seed, settings.model.sft_warmup_steps)
    with suppress_hf_output():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    renderer = SampleRenderer(Renderer(tokenizer, settings.renderer), settings.sft)
    renderer.check(data)
    checked = renderer.held_out_samples(data.train, CHECKED_ROWS)
    first = checked[0]
    marked = zip(np.asarray(first.token_ids).tolist(), np.asarray(first.trainable).tolist(), strict=True)
    pieces = []
    for trained, tokens in groupby(marked, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in tokens])
        pieces.append((f"{TRAINED_BRACKETS[0]}{text}{TRAINED_BRACKETS[1]}" if trained else text, trained))
    return SftPreview(
        train_rows=len(data.train),
        held_out_rows=len(data.held_out),
        steps=settings.steps,
        rows_per_step=settings.sft.rows_per_step,
        lengths=[len(sample) for sample in checked],
        trained=[sample.trainable_count for sample in checked],
        pieces=pieces,
    )
