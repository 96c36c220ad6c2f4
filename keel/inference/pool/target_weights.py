"""The weights that the members of a pool should hold, and the way to them.

Two members that took the same loads hold the same weights; a version alone does not say that, because an adapter on
one base and all weights of another may carry the same number.
"""

from dataclasses import dataclass, field
from typing import Literal

from keel.inference.protocol import Engine, EngineError


@dataclass(frozen=True, slots=True)
class Load:
    """Something that an engine is told to load."""

    kind: Literal["weights", "adapter"]
    folder: str
    version: int
    drain: bool = field(default=False, compare=False)
    """Whether requests in flight end first: how it is loaded, not what."""

    async def into(self, engine: Engine) -> None:
        """Returns when it is live: the engine has said so and names this version."""
        load = engine.load_weights if self.kind == "weights" else engine.load_adapter
        await load(self.folder, self.version, drain=self.drain)
        version = await engine.version()
        if version != self.version:
            raise EngineError(f"was given version {self.version} and afterwards holds {version}")


@dataclass(frozen=True, slots=True)
class Weights:
    """What every member has to hold."""

    version: int | None
    """None: whatever it holds."""
    loads: tuple[Load, ...] = ()
    """The way there from a fresh server: all weights, an adapter, or an adapter on top of all weights; nothing: as it
    was started."""

    @property
    def below(self) -> tuple[Load, ...]:
        """The load of all weights, without an adapter on top."""
        return tuple(load for load in self.loads if load.kind == "weights")

    def then(self, load: Load) -> "Weights":
        """These after one more load. All weights replace everything; an adapter replaces only an adapter."""
        return Weights(load.version, (*self.below, load) if load.kind == "adapter" else (load,))

    def missing(self, held: "Weights | None") -> tuple[Load, ...]:
        """What has to be loaded by a member that holds `held` (None: nobody knows)."""
        if held == self:
            return ()
        adapter_only = held is not None and self.loads[-1:] != self.below and held.below == self.below
        return self.loads[-1:] if adapter_only else self.loads
