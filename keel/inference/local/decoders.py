"""The two ways to compute a step: all rows in one pass with shared prompts, or each sequence alone.

Which one a model gets is found out on the model itself: a few tokens are decoded together and compared with the model's
own forward pass. A model that cannot be batched without changing its numbers (a recurrent state, attention without a
hook, experts with a capacity) has each sequence computed from its beginning for every token: exact, but slow; the log
says why. It keeps no state between steps, so that new weights count for the whole sequence.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from keel.common.packing_support import obstacle
from keel.config import Sampling
from keel.inference.kernels.build import library
from keel.inference.local.continuous_batch import Decoder, Request
from keel.inference.local.decode_attention import DECODE, Step, Tails
from keel.inference.local.fused_linear import Fused
from keel.inference.local.llama_forward import Own
from keel.inference.local.prefix_cache import KEEP, Ids, Node, Prefixes, Shelf, shelve
from keel.inference.local.sampling import StopText

log = logging.getLogger("keel")

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far log-probs of the probe may be from the model's own, in the mean; elsewhere 1e-4."""
DEEP = 8
"""Pieces that a kept beginning may have; above, they are put together, for each costs a product of its own."""
SPILL = 512
"""Own tokens that are stored beside those of other rows, all with room for the longest. The rest of a long answer gets
room of its own: one long answer must not reserve as much for every other."""
ROWS = 8
"""On CPU a step has a multiple of so many tokens: products with 63 take up to half as long again as with 64."""
_OBSTACLES = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)


class Together:
    """All rows of a step, and the prompts of new ones, in one forward pass."""

    def __init__(self, network: Any, keep: int = KEEP, own: Own | None = None, compiled: bool = False) -> None:
        self.network, self.own, self.compiled = network, own, compiled
        """With a faster way to compute it."""
        self.prefixes, self.tails = Prefixes(keep), Tails()
        self.fused: Fused | None = None
        self.multiple = ROWS if network.device.type == "cpu" else 1

    def known(self, prompt: Ids) -> Node | None:
        return self.prefixes.get(prompt)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Request]) -> Tensor:
        running = [row for row in rows if row.tokens]
        new = rows[len(running) :]
        nodes = self.prefixes.grow(row.prompt for row in new)
        for row in new:
            row.leaf = self.prefixes.get(row.prompt)
        for slot, row in enumerate(running):
            if row.stored >= SPILL:
                self._spill(slot, row)
        parts = [self._forward(nodes, running)] if nodes or running else []
        parts += [torch.stack([row.leaf.logits for row in new])] if new else []  # type: ignore[union-attr,misc]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _spill(self, slot: int, row: Request) -> None:
        """Move what the row has stored into a node of its own, one for all that it has spilled."""
        leaf, size = row.leaf, row.stored
        assert leaf is not None
        spilled = leaf.end > len(row.prompt)
        row.leaf = self._extended(slot, row, size, [leaf] if spilled else [])

    def _extended(self, slot: int, row: Request, size: int, before: list[Node]) -> Node:
        """A node with what the nodes `before`, the last of the row's path, hold and the row has stored."""
        parent = before[0].under if before else row.leaf
        node = Node((*row.prompt, *row.tokens[:-1]), parent)
        shelve([node])
        for layer, own in self.tails.keys.items():
            key, value = own[slot, :, :size], self.tails.values[layer][slot, :, :size]
            if before:
                key = torch.cat([*(one.keys(layer) for one in before), key], 1)
                value = torch.cat([*(one.values(layer) for one in before), value], 1)
            node.store(layer, key, value)
        return node

    @torch.inference_mode()
    def keep(self, rows: Mapping[int, Request]) -> None:
        if not self.prefixes.kept.limit:
            return
        new: dict[Node, int] = {}
        ends: dict[Ids, Node] = {}
        for number, row in rows.items():
            leaf, prompt, ids = row.leaf, self.prefixes.get(row.prompt), (*row.prompt, *row.tokens[:-1])
            # a prompt that cannot be found was computed by other weights, and so may be what stands on it
            if leaf is None or prompt is None or prompt not in (leaf, leaf.parent) or ids in ends:
                continue
            found = self.prefixes.get(ids) or (None if row.stored else leaf)
            if found is None and leaf.depth >= DEEP:
                found = self._extended(number, row, row.stored, leaf.path)
            if found is None:
                found = Node(ids, leaf)
                new[found] = number
            ends[ids] = found
        shelve(list(new))
        self._copy(new)
        for node in ends.values():
            self.prefixes.keep(node)

    def _copy(self, nodes: Mapping[Node, int]) -> None:
        """What the rows of these numbers have stored into the nodes, which have their shelves to themselves."""
        shelves: dict[Shelf, list[int]] = {}
        for node in sorted(nodes, key=lambda node: node.place):
            shelves.setdefault(node.shelf, []).append(nodes[node])
        for shelf, numbers in shelves.items():
            which = torch.tensor(numbers, device=self.network.device)
            for store, own in ((shelf.keys, self.tails.keys), (shelf.values, self.tails.values)):
                store |= {layer: one[:, :, : shelf.length].index_select(0, which) for layer, one in own.items()}

    def _forward(self, nodes: Sequence[Node], rows: Sequence[Request]) -> Tensor:
        """[rows, V]; the nodes get theirs."""
        device = self.network.device
        leaves = [row.leaf for row in rows if row.leaf is not None]
        lengths = [row.stored for row in rows]
        inputs = [token for node in nodes for token in node.ids[node.start :]] + [row.tokens[-1] for row in rows]
        positions = [place for node in nodes for place in range(node.start, node.end)]
        positions += [leaf.end + length for leaf, length in zip(leaves, lengths, strict=True)]
        ends, last = [], -1
        for node in nodes:
            last += len(node)
            ends.append(last)
        ends += range(last + 1, last + 1 + len(rows))
        count = len(ends)
        inputs, positions, ends = (_padded(numbers, self.multiple) for numbers in (inputs, positions, ends))
        tokens, places, wanted = (torch.tensor(some, device=device) for some in (inputs, positions, ends))
        step = Step(nodes, leaves, lengths, self.tails, device, compiled=self.compiled)
        if self.own is not None:
            self.own = self.own.follow(self.network)
        logits = (self.own or self._by_model)(tokens, places, wanted, step)[:count]
        for place, node in enumerate(nodes):
            node.logits = logits[place].clone()
        return logits[len(nodes) :]

    def _by_model(self, inputs: Tensor, positions: Tensor, wanted: Tensor, step: Step) -> Tensor:
        """Logits [wanted, V] by the model's own code."""
        output = self.network(
            input_ids=inputs[None],
            position_ids=positions[None],
            # a mask of four dimensions is passed on as it is, so that the model does not make one of T x T
            attention_mask=torch.zeros(1, 1, 1, 1, device=inputs.device),
            use_cache=False,
            logits_to_keep=wanted,
            decode=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def move(self, source: int, target: int, row: Request) -> None:
        self.tails.move(source, target, row.stored)

    def clear(self, number: int) -> None:
        self.tails.clear(number)

    def forget(self) -> None:
        self.prefixes.forget()


def _padded(numbers: list[int], multiple: int) -> list[int]:
    """With the last one repeated. What is computed of it stands alone, and is never read."""
    return numbers + numbers[-1:] * (-len(numbers) % multiple)


class Alone:
    """Each sequence from its beginning, one at a time, by the model's own code."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.fused: Fused | None = None

    def known(self, _prompt: Ids) -> Node | None:
        return None

    @torch.inference_mode()
    def logits(self, rows: Sequence[Request]) -> Tensor:
        return torch.stack([own_logits(self.network, (*row.prompt, *row.tokens))[-1] for row in rows])

    def move(self, source: int, target: int, row: Request) -> None:
        """Nothing is kept."""

    def clear(self, number: int) -> None:
        """Nothing is kept."""

    def keep(self, rows: Mapping[int, Request]) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""


def choose(network: Any, name: str, *, compiled: bool = True, pack: bool = True) -> Decoder:
    """Together if that gives the model's own log-probs, else Alone. Sets the network's attention accordingly.

    `compiled`: by the kernels in C where they can be used, and with `pack` by weights that are packed for them.
    """
    reason = obstacle(network)
    if reason is None:
        found = _together(network, compiled, pack)
        if isinstance(found, Together):
            network.set_attn_implementation(DECODE)
            return found
        reason = found
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None):
        network.set_attn_implementation("eager")  # the usual kernels leave the cap out
    log.warning("%s: answers are decoded one at a time, from the beginning for each token: %s", name, reason)
    return Alone(network)


def _together(network: Any, compiled: bool, pack: bool) -> Together | str:
    """By the fastest way that gives the model's own log-probs; or why none does."""
    try:
        truth = _truth(network)  # before anything is fused: what is wrong with that must not be wrong here too
    except _OBSTACLES as error:
        return f"its code does not take a sequence: {error}"
    for in_c in (True, False) if compiled and network.device.type == "cpu" and library() is not None else (False,):
        fused = _fuse(network, in_c and pack)
        if fused is None:
            break
        for own in dict.fromkeys((_own(network, fused), None)):
            decoder = Together(network, own=own, compiled=in_c)
            reason = _differs(decoder, truth)
            if reason is None:
                decoder.fused = fused
                return decoder
        if in_c:
            log.warning("%s: decoding goes by torch, the kernels in C are off: %s", type(network).__name__, reason)
        fused.undo()
    decoder = Together(network)
    reason = _differs(decoder, truth)
    return decoder if reason is None else reason


def _own(network: Any, fused: Fused) -> Own | None:
    try:
        return Own(network, fused)
    except (*_OBSTACLES, StopIteration):
        return None


@torch.inference_mode(False)
def _fuse(network: Any, pack: bool) -> Fused | None:
    with torch.no_grad():
        try:
            return Fused(network, lambda: own_logits(network, [0, 1]), pack=pack)
        except _OBSTACLES:
            return None  # the probe says what the obstacle is


def _differs(decoder: Together, truth: Tensor) -> str | None:
    """Why the network cannot be decoded like this."""
    try:
        off = float((_probe(decoder) - truth).abs().mean())
    except _OBSTACLES as error:
        return f"its code does not take a batch: {error}"
    finally:
        decoder.prefixes, decoder.tails = Prefixes(), Tails()
    return None if off <= TOLERANCE.get(decoder.network.dtype, 1e-4) else f"log-probs of a probe differ by {off:.2g}"


def own_logits(network: Any, ids: Sequence[int]) -> Tensor:
    """[T, V] by the model's own code."""
    logits: Tensor = network(input_ids=torch.tensor([list(ids)], device=network.device), use_cache=False).logits[0]
    return logits


def _questions(network: Any) -> list[tuple[list[int], list[int]]]:
    """Three short answers to two prompts."""
    count = min(256, network.config.get_text_config().vocab_size)
    ids = torch.randint(count, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    return [(ids[:24], ids[24:30]), (ids[:24], ids[28:34]), ([*ids[:18], *ids[30:36]], ids[34:40])]


@torch.inference_mode()
def _truth(network: Any) -> Tensor:
    """[answers, 6] log-probs of the tokens of the answers, by the model's own code."""
    found = []
    with _attention(network, "eager"):
        for prompt, answer in _questions(network):
            scores = own_logits(network, [*prompt, *answer]).float().log_softmax(-1)[len(prompt) - 1 : -1]
            found.append(scores.gather(1, torch.tensor(answer, device=scores.device)[:, None])[:, 0])
    return torch.stack(found)


@torch.inference_mode()
def _probe(decoder: Together) -> Tensor:
    """The same, decoded together."""
    questions = _questions(decoder.network)
    rows = [Request(tuple(prompt), Sampling(), frozenset(), StopText(None, ()), 6) for prompt, _ in questions]
    found = []
    with _attention(decoder.network, DECODE):
        for place in range(6):
            scores = decoder.logits(rows).float().log_softmax(-1)
            wanted = [answer[place] for _, answer in questions]
            found.append(scores.gather(1, torch.tensor(wanted, device=scores.device)[:, None])[:, 0])
            for row, token in zip(rows, wanted, strict=True):
                row.tokens.append(token)
    return torch.stack(found, 1)


@contextmanager
def _attention(network: Any, name: str) -> Iterator[None]:
    before = network.config._attn_implementation
    network.set_attn_implementation(name)
    try:
        yield
    finally:
        network.set_attn_implementation(before)
