"""A loss function of the user as an objective: the `[objective]` table with `name = "module:function"`.

The function is imported where it is called (`keel/signal/function_objective.py`), so settings that name it are read
without importing it. Keel knows only what the table says about it: the log-probs that it reads.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from keel.common.settings import Settings
from keel.objectives.composition import Composition, PolicyTerm

LogprobSource = Literal["proximal", "reference", "teacher"]


class FunctionSettings(Settings):
    """The settings of a loss function of your own."""

    name: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`module:function`: a function from a `keel.TokenBatch` to a loss."""
    reads: list[LogprobSource] = []
    """The log-probs that the function reads besides the policy's and the sampler's. The others are None in its
    batch."""
    audit: Literal["refuse", "warn"] = "refuse"
    """What happens if the function fails the audit before the first step. refuse: the run does not start; warn: it
    starts, with a notice."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    roles: list[int] | None = None
    """Role ids: only trainable tokens with one of these roles belong to the objective. Defaults to all tokens."""
    max_invalid_logprob_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """A step is not trained if more than this fraction of its trainable tokens has a NaN or infinite sampler
    log-prob."""
    metrics_sample_size: Annotated[int, Field(ge=0)] = 8192
    """Tokens per step above which distributions are estimated from a sample. 0 disables sampling."""

    def composition(self) -> "FunctionComposition":
        """Return the stand-in for a composition, from which the trainer learns what the function reads."""
        return FunctionComposition(
            function=self.name,
            sources=self.reads,
            policy=PolicyTerm(surrogate="log_prob", anchor="none"),
            roles=self.roles,
            max_invalid_logprob_fraction=self.max_invalid_logprob_fraction,
            metrics_sample_size=self.metrics_sample_size,
        )


class FunctionComposition(Composition):
    """What is known about the parts of a loss function: the log-probs it reads. Its own arithmetic is not described."""

    function: str
    """`module:function`, or the function's name."""
    sources: list[LogprobSource] = []
    """The log-probs it reads besides the policy's and the sampler's."""

    def reads(self, source: Literal["sampler", "proximal", "reference", "teacher"]) -> bool:
        return source == "sampler" or source in self.sources

    @property
    def token_local(self) -> bool:
        """False: the function is called once per optimizer step, with all of its tokens."""
        return False
