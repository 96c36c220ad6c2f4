"""What chance decides in a simulation: lengths, failures, groups without a signal, crashes.

Each draw is a function of the seed and a name (group, member, attempt) and of nothing else: the same rollout is as long
in every variant of a sweep, however the order of events differs.
"""

import hashlib
import math
import random
import struct
from collections.abc import Iterator
from statistics import NormalDist

from keel.config.simulate import LengthSettings

NUM_QUANTILES = 4096
"""Of a table of lengths: the longest of a lognormal has one chance in 8192 of being longer."""
DEFAULT_SIGMA = 0.8
_THREE_UINT32, _UINT32_RANGE = struct.Struct("<III"), 2**32


class SeededDraws:
    """Uniform numbers by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def uniforms(self, group: str, member: int = 0, attempt: int = 0) -> tuple[float, float, float]:
        """Three numbers from 0 to below 1."""
        said = f"{self._seed}/{group}/{member}/{attempt}".encode()
        first, second, third = _THREE_UINT32.unpack(hashlib.blake2b(said, digest_size=12).digest())
        return first / _UINT32_RANGE, second / _UINT32_RANGE, third / _UINT32_RANGE

    def crash_intervals(self, engine: int, hours: float) -> Iterator[float]:
        """Seconds until each next crash of an engine."""
        own = random.Random(f"{self._seed}/engine/{engine}")
        while True:
            yield own.expovariate(1 / (hours * 3600))


def length_quantiles(settings: LengthSettings, max_tokens: int) -> list[int]:
    """The distribution as a table: its quantiles in rising order, before anything is cut."""
    if settings.kind == "empirical":
        values = sorted(settings.values)
        return [values[place * len(values) // NUM_QUANTILES] for place in range(NUM_QUANTILES)]
    mean = settings.mean or max_tokens / 2
    if settings.kind == "fixed":
        return [max(round(mean), 1)] * NUM_QUANTILES
    spread = DEFAULT_SIGMA if settings.sigma is None else settings.sigma
    normal, middle = NormalDist(), math.log(mean) - spread**2 / 2
    return [
        max(round(math.exp(middle + spread * normal.inv_cdf((place + 0.5) / NUM_QUANTILES))), 1)
        for place in range(NUM_QUANTILES)
    ]
