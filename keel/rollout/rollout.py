"""One finished episode, as the scheduler and the trainer are given it.

Plain data: it crosses processes and is written to the ledger. A failed episode is a rollout too, with its error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keel.common.sample import Sample

ErrorKind = Literal["exception", "timeout", "empty", "engine", "over_length"]
"""The environment raised; wall time ran out; nothing was sampled; the engine could not answer; every sample was longer
than allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What came of one episode. With an error it has no vote in its group's baseline and nothing of it trains."""

    environment: str
    task_id: str
    group: str
    attempt: int = 0
    samples: tuple[Sample, ...] = ()
    reward: float | None = None
    """None where the environment came to none."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """The named parts of the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    """What became of the tokens sampled: see `Trajectory.samples`."""
    error: str | None = None
    error_kind: ErrorKind | None = None
    turns: int = 0
    """Answers of the policy."""
    seconds: float = 0.0
    ended_at: float | None = None
    """When, in Unix time: for whoever looks at the run later, and for nobody to decide by."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the tokens that train; none when there are none."""
        versions = [sample.oldest_version for sample in self.samples]
        return min((version for version in versions if version is not None), default=None)
