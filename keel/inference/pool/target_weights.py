"""The weights that the members of a pool should hold, and the loads that lead to them.

Two members hold the same weights if and only if they applied the same loads. The version alone does not identify them:
an adapter on one base and full weights may carry the same number.
"""

from dataclasses import dataclass, field

from keel.inference.protocol import Engine, EngineError, WeightSource


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """One weight update of an engine."""

    source: WeightSource
    version: int
    drain: bool = field(default=False, compare=False)
    """Whether requests in flight finish first; does not identify the weights."""

    @property
    def is_adapter(self) -> bool:
        """Whether it changes only the adapter on top of the base weights."""
        return self.source.kind == "adapter"

    async def apply_to(self, engine: Engine) -> None:
        """Load into an engine. Returns when the engine reports this version as live."""
        await engine.load_weights(self.source, self.version, drain=self.drain)
        version = await engine.version()
        if version != self.version:
            raise EngineError(f"reports version {version} after loading version {self.version}")


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The weights that every member must hold."""

    version: int | None
    """None: whatever the member holds."""
    loads: tuple[WeightLoad, ...] = ()
    """Loads from a fresh server: full weights, an adapter, or full weights and then an adapter; empty: as started."""

    @property
    def base(self) -> tuple[WeightLoad, ...]:
        """The load of full weights, without the adapter on top."""
        return tuple(load for load in self.loads if not load.is_adapter)

    def plus(self, load: WeightLoad) -> "TargetWeights":
        """Return the weights after one more load. Full weights replace everything, an adapter only an adapter."""
        return TargetWeights(load.version, (*self.base, load) if load.is_adapter else (load,))

    def loads_needed(self, current: "TargetWeights | None") -> tuple[WeightLoad, ...]:
        """Return the loads for a member that holds `current` (None: unknown)."""
        if current == self:
            return ()
        adapter_only = current is not None and self.loads[-1:] != self.base and current.base == self.base
        return self.loads[-1:] if adapter_only else self.loads
