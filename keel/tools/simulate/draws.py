"""Random draws of a simulation: rollout lengths, failures, zero-variance groups, crashes.

Each draw is a function of only the seed and a name (group, member, attempt): the same rollout has the same length in
every variant of a sweep, even if the order of events differs.
"""

import hashlib
import math
import random
import struct
from collections.abc import Iterator
from statistics import NormalDist

from keel.config.simulate import LengthSettings

NUM_QUANTILES = 4096
"""Size of a table of lengths: a lognormal draw exceeds the table's largest length with probability 1/8192."""
DEFAULT_SIGMA = 0.8
_THREE_UINT32, _UINT32_RANGE = struct.Struct("<III"), 2**32


class SeededDraws:
    """Uniform random numbers, keyed by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def uniforms(self, group: str, member: int = 0, attempt: int = 0) -> tuple[float, float, float]:
        """Return three numbers in [0, 1)."""
        key = f"{self._seed}/{group}/{member}/{attempt}".encode()
        first, second, third = _THREE_UINT32.unpack(hashlib.blake2b(key, digest_size=12).digest())
        return first / _UINT32_RANGE, second / _UINT32_RANGE, third / _UINT32_RANGE

    def crash_intervals(self, engine: int, hours: float) -> Iterator[float]:
        """Yield the seconds until each next crash of an engine, exponentially distributed with a mean of `hours`."""
        rng = random.Random(f"{self._seed}/engine/{engine}")
        while True:
            yield rng.expovariate(1 / (hours * 3600))


def length_quantiles(settings: LengthSettings, max_tokens: int) -> list[int]:
    """Return the length distribution as a table of quantiles in rising order, before truncation."""
    if settings.kind == "empirical":
        values = sorted(settings.values)
        return [values[index * len(values) // NUM_QUANTILES] for index in range(NUM_QUANTILES)]
    mean = settings.mean or max_tokens / 2
    if settings.kind == "fixed":
        return [max(round(mean), 1)] * NUM_QUANTILES
    sigma = DEFAULT_SIGMA if settings.sigma is None else settings.sigma
    normal, mu = NormalDist(), math.log(mean) - sigma**2 / 2
    return [
        max(round(math.exp(mu + sigma * normal.inv_cdf((index + 0.5) / NUM_QUANTILES))), 1)
        for index in range(NUM_QUANTILES)
    ]
