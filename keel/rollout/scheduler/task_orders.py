"""The order in which the tasks of one environment are drawn.

An order is a function of the run's seed, the name of the environment and the number of earlier draws, so that a run
resumes from one number. Nothing is held in memory per task: a shuffled order is computed one task at a time, in the
same way by every version of Python and NumPy.
"""

import hashlib
from typing import Protocol

from keel.config.rollout import CurriculumSettings

FEISTEL_ROUNDS = 4


class TaskOrder(Protocol):
    """Chooses the next task of an environment by its index."""

    cursor: int
    """The state of the order; a run that resumes sets it."""

    def next_index(self) -> int:
        """Return the index of the next task."""
        ...


def make_order(settings: CurriculumSettings, num_tasks: int, seed: int, environment: str) -> TaskOrder:
    return EpochOrder(num_tasks, None if settings.order == "given" else f"{seed}/{environment}")


class EpochOrder:
    """Every task once before any is repeated: as given, or shuffled anew for each epoch."""

    def __init__(self, num_tasks: int, key: str | None) -> None:
        """`key` decides the shuffled order; None keeps the given one."""
        self.cursor = 0
        self._num_tasks, self._key = num_tasks, key
        self._permutation: tuple[int, Permutation] | None = None

    def next_index(self) -> int:
        epoch, position = divmod(self.cursor, self._num_tasks)
        self.cursor += 1
        if self._key is None:
            return position
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = (epoch, Permutation(self._num_tasks, f"{self._key}/{epoch}"))
        return self._permutation[1][position]


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
