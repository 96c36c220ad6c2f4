"""What one episode said, token by token, and the training samples it becomes.

What was sampled is never tokenised again: a turn is kept as the ids the engine saw and the ids it answered. Turns are
joined by longest common prefixes: a turn whose prompt extends the tokens of an earlier sample goes on in that sample,
any other begins a new one and says why. Every sampled token trains in exactly one sample, or is counted as refused or
cut. Nothing here knows about text: what the tokens mean is the renderer's business.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.common.sample import Sample
from keel.config.rollout import EpisodeLimits
from keel.inference.protocol import Generation

FIRST_SAMPLE = "start"
"""The reason of the first sample of an episode; every other sample has another reason."""
REWRITTEN = "rewritten"
"""The reason when whoever added the turn gave none, and its prompt does not extend what came before."""
TEMPERATURE_CHANGED = "temperature"
"""The reason when only the temperature changed: a sample has one, since the trainer's log-probs are taken at it."""


@dataclass(frozen=True, slots=True)
class TrajectorySamples:
    """The training samples of a trajectory, and what became of everything that was sampled."""

    samples: tuple[Sample, ...]
    counts: Mapping[str, int]
    """turns, samples; sampled_tokens = trained_tokens + dropped_tokens + truncated_tokens; dropped_samples and truncated_samples,
    over length; empty_samples, in which nothing was sampled; and split_REASON: samples begun for that reason."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: the tokens that the engine was given, and what it sampled."""

    prompt_ids: tuple[int, ...]
    generation: Generation
    split_reason: str | None
    """Why the prompt does not extend an earlier turn, where whoever made it knows."""


@dataclass(slots=True)
class _SampleBuilder:
    """A sample in the making."""

    token_ids: list[int]
    sampled_indices: list[int]
    """For each token its number among all that were sampled in the episode; -1: it was not."""
    temperature: float
    split_reason: str


class EpisodeTrajectory:
    """The turns of one episode, in the order in which they were answered.

    Invariants. The tokens of every sample are, up to each of its answers, exactly a prompt that the engine was given
    and the answer that it gave. While every prompt extends the tokens before it there is one sample; c prompts that do
    not make 1 + c samples. `sampled_tokens` = `trained_tokens` + `dropped_tokens` + `truncated_tokens`, each token once.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._builders: list[_SampleBuilder] = []
        self._sampled_tokens: list[tuple[float, int, float]] = []
        """Log-prob, version and temperature of every token sampled."""

    def add_turn(self, prompt_ids: Sequence[int], generation: Generation, split_reason: str | None = None) -> None:
        """One more turn. `reason`: why its prompt does not extend an earlier one; not needed when it does."""
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError("a turn needs a prompt of at least one token: nothing predicts the first one")
        self.turns.append(Turn(tuple(prompt), generation, split_reason))
        path = self._find_extendable(prompt, generation.temperature) or self._start_sample(
            prompt, generation.temperature, split_reason
        )
        added = prompt[len(path.token_ids) :]
        path.token_ids += [*added, *generation.token_ids]
        first = len(self._sampled_tokens)
        self._sampled_tokens += [
            (logprob, version, generation.temperature)
            for logprob, version in zip(generation.logprobs, generation.versions, strict=True)
        ]
        path.sampled_indices += [-1] * len(added) + list(range(first, len(self._sampled_tokens)))

    def _find_extendable(self, prompt: list[int], temperature: float) -> _SampleBuilder | None:
        """The longest sample that the prompt goes on from."""
        whole = [
            path
            for path in self._builders
            if path.temperature == temperature and path.token_ids == prompt[: len(path.token_ids)]
        ]
        return max(whole, key=lambda path: len(path.token_ids), default=None)

    def _start_sample(self, prompt: list[int], temperature: float, split_reason: str | None) -> _SampleBuilder:
        """A new sample, which so far is what the prompt has in common with an earlier one."""
        shared, source = max(
            ((_common_prefix_length(path.token_ids, prompt), path) for path in self._builders),
            key=lambda pair: pair[0],
            default=(0, None),
        )
        if source is None:
            split_reason = FIRST_SAMPLE
        elif shared == len(source.token_ids):
            split_reason = TEMPERATURE_CHANGED
        sampled = source.sampled_indices[:shared] if source is not None else []
        path = _SampleBuilder(prompt[:shared], sampled, temperature, split_reason or REWRITTEN)
        self._builders.append(path)
        return path

    def build_samples(self, limits: EpisodeLimits) -> TrajectorySamples:
        """What to train on. A token in several samples trains in the first one that is not refused."""
        counts = Counter(
            turns=len(self.turns), samples=0, dropped_samples=0, truncated_samples=0, empty_samples=0, trained_tokens=0
        )
        trained: set[int] = set()
        kept = []
        for path in self._builders:
            if path.split_reason != FIRST_SAMPLE:
                counts[f"split_{path.split_reason}"] += 1
            if len(path.token_ids) > limits.max_sequence_tokens:
                counts["truncated_samples" if limits.on_overlength == "truncate" else "dropped_samples"] += 1
                if limits.on_overlength == "drop":
                    continue
            sample = self._build_sample(path, limits.max_sequence_tokens, trained)
            if sample.trainable_count:
                kept.append(sample)
            elif len(path.token_ids) <= limits.max_sequence_tokens:
                counts["empty_samples"] += 1
        lost = len(self._sampled_tokens) - len(trained)
        counts.update(
            samples=len(kept),
            sampled_tokens=len(self._sampled_tokens),
            trained_tokens=len(trained),
            dropped_tokens=lost if limits.on_overlength == "drop" else 0,
            truncated_tokens=lost if limits.on_overlength == "truncate" else 0,
        )
        return TrajectorySamples(tuple(kept), dict(counts))

    def _build_sample(self, builder: _SampleBuilder, limit: int, trained: set[int]) -> Sample:
        """The first `limit` tokens of a path; those that train in it are added to `trained`."""
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
    """The length of the longest common prefix."""
    size = min(len(first), len(second))
    return next((place for place in range(size) if first[place] != second[place]), size)
