"""What one episode said, token by token, and the training samples it becomes.

What was sampled is never tokenised again: a turn is kept as the ids the engine saw and the ids it answered. Turns are
joined by longest common prefixes: a turn whose prompt extends the tokens of an earlier sample goes on in that sample,
any other begins a new one and says why. Every sampled token trains in exactly one sample, or is counted as refused or
cut. Nothing here knows about text: what the tokens mean is the renderer's business.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.config.rollout import EpisodeLimits
from keel.inference.protocol import Generation

FIRST_SAMPLE = "start"
"""The reason of the first sample of an episode; every other sample has another reason."""
REWRITTEN = "rewritten"
"""The reason when whoever added the turn gave none, and its prompt does not extend what came before."""
TEMPERATURE_CHANGED = "temperature"
"""The reason when only the temperature changed: a sample has one, since the trainer's log-probs are taken at it."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to train on: all that the engine saw when it sampled the last of these tokens, and its answer."""

    token_ids: tuple[int, ...]
    trainable: tuple[bool, ...]
    """Sampled by the policy, and not already trained in an earlier sample of the episode; never the first token."""
    logprobs: tuple[float, ...]
    """Of the sampler, at the temperature; 0 where not trainable."""
    versions: tuple[int, ...]
    """The policy version that sampled the token; -1 where not trainable."""
    temperature: float
    split_reason: str
    """Why the sample begins: "start", or what kept it from going on in an earlier one."""

    def __post_init__(self) -> None:
        sizes = {len(self.token_ids), len(self.trainable), len(self.logprobs), len(self.versions)}
        if len(sizes) != 1:
            raise ValueError(f"a training sample of {len(self.token_ids)} tokens has fields of {sorted(sizes)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int | None:
        """Of the tokens that train; none when there are none."""
        return min((v for v, trains in zip(self.versions, self.trainable, strict=True) if trains), default=None)


@dataclass(frozen=True, slots=True)
class TrajectorySamples:
    """The training samples of a trajectory, and what became of everything that was sampled."""

    samples: tuple[TrainingSample, ...]
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
            if any(sample.trainable):
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

    def _build_sample(self, builder: _SampleBuilder, limit: int, trained: set[int]) -> TrainingSample:
        """The first `limit` tokens of a path; those that train in it are added to `trained`."""
        numbers = [
            number
            if number >= 0 and number not in trained and self._sampled_tokens[number][2] == builder.temperature
            else -1
            for number in builder.sampled_indices[:limit]
        ]
        trained.update(number for number in numbers if number >= 0)
        return TrainingSample(
            token_ids=tuple(builder.token_ids[:limit]),
            trainable=tuple(number >= 0 for number in numbers),
            logprobs=tuple(self._sampled_tokens[number][0] if number >= 0 else 0.0 for number in numbers),
            versions=tuple(self._sampled_tokens[number][1] if number >= 0 else -1 for number in numbers),
            temperature=builder.temperature,
            split_reason=builder.split_reason,
        )


def _common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    size = min(len(first), len(second))
    return next((place for place in range(size) if first[place] != second[place]), size)
