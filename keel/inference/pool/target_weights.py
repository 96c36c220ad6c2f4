"""The weights that the members of a pool should hold, and the way to them.

Two members that took the same loads hold the same weights; a version alone does not say that, because an adapter on
one base and all weights of another may carry the same number.
"""

from dataclasses import dataclass, field

from keel.inference.protocol import Engine, EngineError, WeightSource


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """Something that an engine is told to load."""

    source: WeightSource
    version: int
    drain: bool = field(default=False, compare=False)
    """Whether requests in flight end first: how it is loaded, not what."""

    @property
    def is_adapter(self) -> bool:
        """Whether it changes only the adapter on top of the base weights."""
        return self.source.kind == "adapter"

    async def apply_to(self, engine: Engine) -> None:
        """Returns when it is live: the engine has said so and names this version."""
        await engine.load_weights(self.source, self.version, drain=self.drain)
        version = await engine.version()
        if version != self.version:
            raise EngineError(f"was given version {self.version} and afterwards holds {version}")


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What every member has to hold."""

    version: int | None
    """None: whatever it holds."""
    loads: tuple[WeightLoad, ...] = ()
    """The way there from a fresh server: all weights, an adapter, or an adapter on top of all weights; nothing: as it
    was started."""

    @property
    def base(self) -> tuple[WeightLoad, ...]:
        """The load of all weights, without an adapter on top."""
        return tuple(load for load in self.loads if not load.is_adapter)

    def plus(self, load: WeightLoad) -> "TargetWeights":
        """These after one more load. All weights replace everything; an adapter replaces only an adapter."""
        return TargetWeights(load.version, (*self.base, load) if load.is_adapter else (load,))

    def loads_needed(self, current: "TargetWeights | None") -> tuple[WeightLoad, ...]:
        """What has to be loaded by a member that holds `held` (None: nobody knows)."""
        if current == self:
            return ()
        adapter_only = current is not None and self.loads[-1:] != self.base and current.base == self.base
        return self.loads[-1:] if adapter_only else self.loads
