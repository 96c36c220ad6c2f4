"""The turns of one episode, token by token, and the training samples built from them.

Sampled tokens are never tokenised again: a turn stores the ids the engine was given and the ids it sampled. Turns are
joined by longest common prefix: a turn whose prompt extends the tokens of an earlier sample continues that sample, any
other turn starts a new one and records why. Every sampled token trains in exactly one sample, or is counted as dropped
or truncated. This module knows nothing about text; that is the renderer's task.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.common.sample import Sample
from keel.config.rollout import EpisodeLimits
from keel.inference.protocol import Generation

FIRST_SAMPLE = "start"
"""Reason of the first sample of an episode; every other sample has another reason."""
REWRITTEN = "rewritten"
"""Reason if the caller gave none and the prompt does not extend an earlier sample."""
TEMPERATURE_CHANGED = "temperature"
"""Reason if only the temperature changed: a sample has one temperature, at which log-probs are computed."""


@dataclass(frozen=True, slots=True)
class TrajectorySamples:
    """The training samples of a trajectory, and counts of what happened to all sampled tokens."""

    samples: tuple[Sample, ...]
    counts: Mapping[str, int]
    """turns, samples; length_turns: completions that ended at their maximum of tokens; sampled_tokens =
    trained_tokens + dropped_tokens + truncated_tokens; dropped_samples and truncated_samples: over length;
    empty_samples: without a sampled token; split_REASON: samples started for it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion: the prompt the engine was given, and what it sampled."""

    prompt_ids: tuple[int, ...]
    generation: Generation
    split_reason: str | None
    """Why the prompt does not extend an earlier turn, if the caller knows."""


@dataclass(slots=True)
class _SampleBuilder:
    """A sample under construction."""

    token_ids: list[int]
    sampled_indices: list[int]
    """For each token its index among all sampled tokens of the episode; -1 if it was not sampled."""
    temperature: float
    split_reason: str


class EpisodeTrajectory:
    """The turns of one episode, in the order of their completions.

    Invariants. Up to the end of each of its completions, a sample is exactly a prompt the engine was given and the
    completion it returned. While every prompt extends the tokens before it there is one sample; c prompts that do not
    make 1 + c samples. `sampled_tokens` = `trained_tokens` + `dropped_tokens` + `truncated_tokens`.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._builders: list[_SampleBuilder] = []
        self._sampled_tokens: list[tuple[float, int, float]] = []
        """Log-prob, version and temperature of every token sampled."""

    def add_turn(self, prompt_ids: Sequence[int], generation: Generation, split_reason: str | None = None) -> None:
        """Add a turn. `split_reason` says why its prompt does not extend an earlier turn; not needed if it does."""
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError("a turn needs a prompt of at least one token to predict the first sampled token from")
        self.turns.append(Turn(tuple(prompt), generation, split_reason))
        builder = self._find_extendable(prompt, generation.temperature) or self._start_sample(
            prompt, generation.temperature, split_reason
        )
        added = prompt[len(builder.token_ids) :]
        builder.token_ids += [*added, *generation.token_ids]
        first = len(self._sampled_tokens)
        self._sampled_tokens += [
            (logprob, version, generation.temperature)
            for logprob, version in zip(generation.logprobs, generation.versions, strict=True)
        ]
        builder.sampled_indices += [-1] * len(added) + list(range(first, len(self._sampled_tokens)))

    def _find_extendable(self, prompt: list[int], temperature: float) -> _SampleBuilder | None:
        """Return the longest sample that the prompt extends; None if there is none."""
        extended = [
            builder
            for builder in self._builders
            if builder.temperature == temperature and builder.token_ids == prompt[: len(builder.token_ids)]
        ]
        return max(extended, key=lambda builder: len(builder.token_ids), default=None)

    def _start_sample(self, prompt: list[int], temperature: float, split_reason: str | None) -> _SampleBuilder:
        """Start a sample with the longest prefix that the prompt shares with an earlier one."""
        shared, source = max(
            ((_common_prefix_length(builder.token_ids, prompt), builder) for builder in self._builders),
            key=lambda pair: pair[0],
            default=(0, None),
        )
        if source is None:
            split_reason = FIRST_SAMPLE
        elif shared == len(source.token_ids):
            split_reason = TEMPERATURE_CHANGED
        sampled = source.sampled_indices[:shared] if source is not None else []
        builder = _SampleBuilder(prompt[:shared], sampled, temperature, split_reason or REWRITTEN)
        self._builders.append(builder)
        return builder

    def build_samples(self, limits: EpisodeLimits) -> TrajectorySamples:
        """Return the samples to train on. A token in several samples trains in the first that is not dropped."""
        counts = Counter(
            turns=len(self.turns), samples=0, dropped_samples=0, truncated_samples=0, empty_samples=0, trained_tokens=0
        )
        trained: set[int] = set()
        kept = []
        for builder in self._builders:
            if builder.split_reason != FIRST_SAMPLE:
                counts[f"split_{builder.split_reason}"] += 1
            if len(builder.token_ids) > limits.max_sequence_tokens:
                counts["truncated_samples" if limits.on_overlength == "truncate" else "dropped_samples"] += 1
                if limits.on_overlength == "drop":
                    continue
            sample = self._build_sample(builder, limits.max_sequence_tokens, trained)
            if sample.trainable_count:
                kept.append(sample)
            elif len(builder.token_ids) <= limits.max_sequence_tokens:
                counts["empty_samples"] += 1
        lost = len(self._sampled_tokens) - len(trained)
        counts.update(
            samples=len(kept),
            length_turns=sum(turn.generation.finish_reason == "length" for turn in self.turns),
            sampled_tokens=len(self._sampled_tokens),
            trained_tokens=len(trained),
            dropped_tokens=lost if limits.on_overlength == "drop" else 0,
            truncated_tokens=lost if limits.on_overlength == "truncate" else 0,
        )
        return TrajectorySamples(tuple(kept), dict(counts))

    def _build_sample(self, builder: _SampleBuilder, limit: int, trained: set[int]) -> Sample:
        """Return the first `limit` tokens as a sample; add the tokens that train in it to `trained`."""
        indices = [
            index
            if index >= 0 and index not in trained and self._sampled_tokens[index][2] == builder.temperature
            else -1
            for index in builder.sampled_indices[:limit]
        ]
        trained.update(index for index in indices if index >= 0)
        return Sample(
            token_ids=builder.token_ids[:limit],
            trainable=[index >= 0 for index in indices],
            sampler_logprobs=[self._sampled_tokens[index][0] if index >= 0 else 0.0 for index in indices],
            version=[self._sampled_tokens[index][1] if index >= 0 else -1 for index in indices],
            temperature=builder.temperature,
            split_reason=builder.split_reason,
        )


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    size = min(len(first), len(second))
    return next((index for index in range(size) if first[index] != second[index]), size)
