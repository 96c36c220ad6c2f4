"""The order in which the tasks of one environment are drawn.

An order is a function of the run's seed, the name of the environment, the number of earlier draws and the pass rates of
the tasks, so that a run resumes from one number and the records of its tasks. It holds nothing in memory per task: a
shuffled order is computed one task at a time, in the same way by every version of Python and NumPy.
"""

import hashlib
from typing import Protocol

from keel.config.rollout import CurriculumSettings
from keel.rollout.scheduler.pass_rates import PassRates

FEISTEL_ROUNDS = 4


class TaskOrder(Protocol):
    """Chooses the next task of an environment by its index."""

    cursor: int
    """The state of the order; a run that resumes sets it."""

    def next_index(self) -> int:
        """Return the index of the next task."""
        ...


def make_order(settings: CurriculumSettings, rates: PassRates, seed: int) -> TaskOrder:
    """Return the order of an environment's tasks; it reads the pass rates when a task is drawn."""
    key = f"{seed}/{rates.environment}"
    if settings.order in ("epoch", "given"):
        return EpochOrder(rates, None if settings.order == "given" else key)
    return RandomOrder(rates, key, settings.uniform_fraction)


class EpochOrder:
    """Every task that is not retired once before any is repeated: as given, or shuffled anew for each epoch."""

    def __init__(self, rates: PassRates, key: str | None) -> None:
        """`key` decides the shuffled order; None keeps the given one."""
        self.cursor = 0
        self._rates, self._key = rates, key
        self._permutation: tuple[int, Permutation] | None = None

    def next_index(self) -> int:
        active = self._rates.active
        while (index := self._advance()) not in active and len(active):
            pass
        return index

    def _advance(self) -> int:
        epoch, position = divmod(self.cursor, self._rates.num_tasks)
        self.cursor += 1
        if self._key is None:
            return position
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (epoch, Permutation(self._rates.num_tasks, f"{self._key}/{epoch}"))
        return self._permutation[1][position]


class RandomOrder:
    """Independent draws: a fraction of them uniform over all active tasks, the others uniform over the target tasks.

    If a pool is empty, the next larger one takes its place: target, active, all tasks.
    """

    def __init__(self, rates: PassRates, key: str, uniform_fraction: float) -> None:
        self.cursor = 0
        self._rates, self._key, self._uniform_fraction = rates, key.encode(), uniform_fraction

    def next_index(self) -> int:
        coin, number = (hash_number(self._key, self.cursor, part) for part in range(2))
        self.cursor += 1
        active, target = self._rates.active, self._rates.target
        pool = target if len(target) and coin >= self._uniform_fraction * 2**64 else active
        if not len(pool):
            return number * self._rates.num_tasks >> 64
        return pool[number * len(pool) >> 64]

    def probability(self, index: int) -> float:
        """Return the probability that the next task is the one with this index."""
        active, target = self._rates.active, self._rates.target
        if not len(active):
            return 1 / self._rates.num_tasks
        uniform = self._uniform_fraction if len(target) else 1.0
        among_target = (1 - uniform) / len(target) if index in target and len(target) else 0.0
        return among_target + (uniform / len(active) if index in active else 0.0)


class Permutation:
    """A pseudo-random permutation of `range(size)`, one element at a time in constant time and memory.

    A Feistel network permutes the numbers of an even number of bits, fewer than 4 * size of them. Numbers outside the
    range are permuted again until they are inside ("cycle walking"), which keeps it a permutation.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size, self._key = size, key.encode()
        self._half_bits = max((max(size - 1, 1).bit_length() + 1) // 2, 1)

    def __getitem__(self, index: int) -> int:
        while True:
            index = self._encrypt(index)
            if index < self._size:
                return index

    def _encrypt(self, number: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = number >> self._half_bits, number & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (hash_number(self._key, turn, right) & mask)
        return left << self._half_bits | right


def hash_number(key: bytes, *numbers: int) -> int:
    """Return 64 bits that look random and depend on the key and the numbers alone."""
    text = b"/".join([key, *(b"%d" % number for number in numbers)])
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
