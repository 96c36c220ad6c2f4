"""One finished episode, as the scheduler and scoring receive it.

Plain data: it crosses processes and is stored in the ledger. A failed episode is a rollout too, with its error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.common.sample import Sample

ErrorKind = Literal["exception", "timeout", "empty", "engine", "over_length", "prompt_too_long"]
"""The environment raised; its timeout expired; nothing was sampled; the engine failed; every sample exceeds
`limits.max_sequence_tokens`; the first prompt alone does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The result of one episode. With an error it does not count in its group's baseline and none of it trains."""

    environment: str
    task_id: str
    group: str
    attempt: int = 0
    samples: tuple[Sample, ...] = ()
    reward: float | None = None
    """None if the environment returned none, or until the group is scored (`group_inputs`)."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other values that the environment reported."""
    group_inputs: Mapping[str, Any] | None = None
    """What the environment needs to score this rollout together with its group, as JSON; None if it does not."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of sampled tokens; see `TrajectorySamples.counts`."""
    error: str | None = None
    error_kind: ErrorKind | None = None
    turns: int = 0
    """Completions of the policy."""
    seconds: float = 0.0
    ended_at: float | None = None
    """End of the episode in Unix time; informational, never used to decide anything."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version of the trainable tokens; None if there are none."""
        versions = [sample.oldest_version for sample in self.samples]
        return min((version for version in versions if version is not None), default=None)

    @property
    def completion_tokens(self) -> int:
        """Tokens that the policy sampled, over all turns."""
        return self.counts.get("sampled_tokens", 0)

    @property
    def truncated(self) -> bool:
        """Whether a completion ended at its maximum of tokens, or a sample exceeds `limits.max_sequence_tokens`."""
        return any(self.counts.get(name, 0) for name in ("length_turns", "truncated_samples", "dropped_samples"))
