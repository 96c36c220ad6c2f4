"""Batches of supervised fine-tuning: which conversations a step trains on, and their samples.

The rows of a step are a function of the settings and the number of the step alone, so nothing has to be saved to resume
at any step. Every epoch has its own order, drawn from the seed, and contains every row once.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from keel.common.sample import Sample
from keel.config import EpisodeLimits, RunSettings
from keel.config.sft import SftSettings
from keel.errors import ConfigError
from keel.rollout.environments.dataset import MAX_NAMED_ROWS
from keel.rollout.environments.dataset_rows import InvalidRow
from keel.rollout.rendering.conversation import render_conversation
from keel.rollout.rendering.renderer import Renderer
from keel.rollout.rendering.template_renderer import UnrenderableReply
from keel.run.records import SampleRecord, sample_name
from keel.run.sft.conversations import Conversation, Conversations, SftData

ENVIRONMENT = "sft"
"""Name of the environment in records and evaluations."""
CHECKED_ROWS = 1000
"""Rows that are rendered before the first step, so that a wrong template or limit is an error at the start."""


def steps_of_epochs(sft: SftSettings, rows: int) -> int | None:
    """Return the number of steps of `sft.epochs`; None if it is not set."""
    return None if sft.epochs is None else math.ceil(_rows_of_epochs(sft, rows) / sft.rows_per_step)


def _rows_of_epochs(sft: SftSettings, rows: int) -> int:
    assert sft.epochs is not None
    return max(round(sft.epochs * rows), 1)


class RowOrder:
    """The rows of each step."""

    def __init__(self, settings: RunSettings, data: SftData) -> None:
        assert settings.sft is not None
        self._rows, self._rows_per_step = len(data.train), settings.sft.rows_per_step
        self._total = None if settings.sft.epochs is None else _rows_of_epochs(settings.sft, self._rows)
        self._shuffle, self._seed = settings.sft.shuffle, settings.seed
        self._epoch_order = lru_cache(maxsize=2)(self._draw_epoch)

    def step_rows(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield (position, row) of a step, counted from 1. Positions count the rows of the run; the last may be few."""
        end = step * self._rows_per_step
        for position in range(end - self._rows_per_step, end if self._total is None else min(end, self._total)):
            epoch, index = divmod(position, self._rows)
            yield position, int(self._epoch_order(epoch)[index])

    def epoch_after(self, step: int) -> float:
        """Return the number of passes over the rows after a step."""
        position = step * self._rows_per_step
        return (position if self._total is None else min(position, self._total)) / self._rows

    def _draw_epoch(self, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        if not self._shuffle:
            return np.arange(self._rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self._rows)


class UnusableConversation(Exception):
    """A conversation that cannot be trained on; `reason` is the drop reason of the ledger."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SampleRenderer:
    """Renders conversations to samples of the trainer."""

    def __init__(self, renderer: Renderer, sft: SftSettings) -> None:
        self._renderer = renderer
        self._limits = EpisodeLimits(max_sequence_tokens=sft.max_sequence_tokens, on_overlength=sft.on_overlength)

    def samples(self, conversations: Conversations, index: int) -> tuple[Conversation, tuple[Sample, ...]]:
        """Return a conversation and its samples; raise UnusableConversation if it cannot be trained on."""
        try:
            conversation = conversations[index]
            rendered = render_conversation(
                self._renderer, conversation.messages, conversation.trained, self._limits, conversation.tools
            )
        except (InvalidRow, UnrenderableReply) as error:
            raise UnusableConversation("invalid_row", f"{conversations.place(index)}: {error}") from None
        except ConfigError as error:  # of the template: a role or content that it does not support
            raise UnusableConversation("invalid_row", f"{conversations.place(index)}: {error}") from None
        if rendered.counts["dropped_samples"] or not rendered.samples:
            raise UnusableConversation(
                "over_length",
                f"{conversations.place(index)}: longer than sft.max_sequence_tokens = "
                f"{self._limits.max_sequence_tokens}",
            )
        # every token has the same weight in the loss
        samples = (replace(s, advantage=1.0, sampler_logprobs=None, version=None) for s in rendered.samples)
        return conversation, tuple(samples)

    def step_records(self, conversations: Conversations, rows: Iterator[tuple[int, int]]) -> list[SampleRecord]:
        """Return the records of a step: one per sample, and one per row that cannot be trained on."""
        records: list[SampleRecord] = []
        for number, (position, index) in enumerate(rows):
            group = f"{ENVIRONMENT}#{position}"
            try:
                conversation, samples = self.samples(conversations, index)
            except UnusableConversation as error:
                place = conversations.place(index)
                records.append(SampleRecord(group, ENVIRONMENT, place, 0, 0, reason=error.reason, error=str(error)))
                continue
            for part, sample in enumerate(samples):
                sample = replace(sample, group=number, name=sample_name(group, 0, 0, part))
                records.append(
                    SampleRecord(
                        group,
                        ENVIRONMENT,
                        conversation.id,
                        0,
                        0,
                        part,
                        sample,
                        outcome="trained",
                        turns=len(conversation.trained),
                    )
                )
        return records

    def held_out_samples(self, conversations: Conversations, limit: int) -> list[Sample]:
        """Return the samples of the first conversations that can be used, at most `limit` of them."""
        samples: list[Sample] = []
        for index in range(min(limit, len(conversations))):
            try:
                samples += self.samples(conversations, index)[1]
            except UnusableConversation:
                continue
        return samples

    def check(self, data: SftData) -> None:
        """Render the first rows; raise an error that names those that cannot be trained on if they are too many."""
        total = min(CHECKED_ROWS, len(data.train))
        problems = []
        for index in range(total):
            try:
                self.samples(data.train, index)
            except UnusableConversation as error:
                problems.append(str(error))
        allowed = 0.0 if data.dataset is None else data.dataset.max_invalid_fraction
        if len(problems) > allowed * total or len(problems) == total:
            raise ConfigError(_describe_problems(problems, total, data.source, allowed))


def _describe_problems(problems: Sequence[str], total: int, source: str, allowed: float) -> str:
    named = "\n".join(f"  {problem}" for problem in problems[:MAX_NAMED_ROWS])
    more = f"\n  and {len(problems) - MAX_NAMED_ROWS} more" if len(problems) > MAX_NAMED_ROWS else ""
    return (
        f"{len(problems)} of the first {total} conversations of {source} cannot be trained on:\n{named}{more}\n"
        'fix them, set sft.on_overlength = "truncate" if they are too long, or raise'
        f" sft.dataset.max_invalid_fraction = {allowed:g}"
    )
