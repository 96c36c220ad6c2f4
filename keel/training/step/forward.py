"""A step's samples through the model: packed into micro-batches, then from tokens to hidden states and log-probs.

How samples are laid out is found out once, on the model itself: a short tree is computed shared and each of its
sequences alone through the model's own code, and only when both agree are tokens shared. A model that cannot pack
without changing its numbers (state-space layers, experts with a capacity, attention that has no hook) gets each
sequence alone, and the log says why. A model whose log-probs cannot be reproduced at all is refused. On several ranks
each gets its share of the micro-batches, all of them equally many, and scores are those of all.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from keel.common.packing_support import obstacle
from keel.errors import ConfigError, ModelError
from keel.training.distributed.fsdp import WholeHead, with_whole_head
from keel.training.distributed.world import World
from keel.training.model.model import Model
from keel.training.step.lm_head import Head, Scores, join
from keel.training.step.prefix_tree import Ints, build_tree, deal, micro_batches
from keel.training.step.sample import Sample, Tokens
from keel.training.step.tree_attention import TREE, Layout

log = logging.getLogger("keel")

Layouts = Literal["shared", "packed", "alone"]
"""One row per micro-batch with shared tokens once; one row with sequences side by side; one sequence per pass."""

TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far log-probs of the probe may be from the model's own, in the mean; elsewhere 1e-4. In half precision the
model's own logits are rounded to about 0.05. A wrong mask is off by a whole unit or so."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some samples of a step, ready for the model."""

    inputs: Tensor
    """[1, T] token ids."""
    positions: Tensor
    """[1, T]"""
    layout: Layout | None
    """Who sees whom; None: the model's own causal attention."""
    rows: Tensor
    """[n] where the hidden state stands that predicts each trainable token."""
    tokens: Tensor
    """[n] which of the step's trainable tokens these are."""
    targets: Tensor
    temperature: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[1]


class Forward:
    """Runs a model over samples. Holds no state of a step."""

    def __init__(
        self, model: Model, *, max_tokens: int = 4096, share: bool = True, layout: Layouts | None = None
    ) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.world = model.world
        self._head = Head.of(model.network)
        self._whole: WholeHead | None = None
        self.compiled = True
        """Attention by the kernel in C, where it fits."""
        self.layout: Layouts = layout or ("shared" if share else "packed")
        if layout is None:
            self.layout = self._checked_layout()

    @property
    def head(self) -> Head:
        """From hidden states to log-probs; whole, on several ranks, inside `attending` only."""
        return self._head

    @property
    def _name(self) -> str:
        return self.model.source.name

    # packing

    def plan(self, tokens: Tokens, only: Sequence[int] | None = None) -> list[MicroBatch]:
        """Micro-batches of all samples, or of those with these numbers. Samples that train no token cost nothing.

        On several ranks those of this one; where it has fewer than others, empty ones in their place.
        """
        numbers = list(range(len(tokens.samples)) if only is None else only)
        sequences = [tokens.samples[number].inputs for number in numbers]
        self._check(tokens, numbers)
        share, ranks = self.layout == "shared", 1 if self.world is None else self.world.size
        if self.layout == "alone":
            bins = [[index] for index, sequence in enumerate(sequences) if len(sequence)]
        else:
            bins = micro_batches(sequences, self.max_tokens, share=share, ranks=ranks)
        own: Sequence[list[int] | None] = bins
        if self.world is not None:
            own = deal(sequences, bins, ranks, share=share)[self.world.rank]
        return [
            self._nothing()
            if members is None
            else self._pack(tokens, [numbers[index] for index in members], [sequences[index] for index in members])
            for members in own
        ]

    def _nothing(self) -> MicroBatch:
        """One token that nobody asks about: shards are gathered by all ranks together, also by one without work."""
        empty = Tokens([Sample(token_ids=[0], trainable=[False], advantage=0.0)])
        return self._pack(empty, [0], [np.zeros(1, np.int64)])

    def _check(self, tokens: Tokens, numbers: Sequence[int]) -> None:
        vocabulary = self.model.head.weight.shape[0]
        for number in numbers:
            sample = tokens.samples[number]
            name = sample.name or f"number {number}"
            if len(sample.inputs) > self.max_tokens:
                raise ConfigError(
                    f"sample {name} has {len(sample.inputs)} tokens to compute, more than trainer.max_tokens ="
                    f" {self.max_tokens}; raise it, or leave the sample out"
                )
            largest = int(np.asarray(sample.token_ids).max())
            if largest >= vocabulary:
                raise ConfigError(f"sample {name} has token id {largest}; the model knows {vocabulary}")

    def _pack(self, tokens: Tokens, numbers: list[int], sequences: list[Ints]) -> MicroBatch:
        device = self.model.device
        tree = build_tree(sequences, share=self.layout == "shared")
        places = [tokens.of(number) for number in numbers]
        rows = [path[tokens.position[place] - 1] for path, place in zip(tree.paths, places, strict=True)]
        chosen = np.concatenate([np.arange(place.start, place.stop) for place in places])
        layout = None if self.layout == "alone" else Layout(tree, device, self.model.dtype, compiled=self.compiled)
        heat = torch.promote_types(self.model.dtype, torch.float32)
        return MicroBatch(
            inputs=torch.from_numpy(tree.tokens)[None].to(device),
            positions=torch.from_numpy(tree.positions)[None].to(device),
            layout=layout,
            rows=torch.from_numpy(np.concatenate(rows)).to(device),
            tokens=torch.from_numpy(chosen).to(device),
            targets=tokens.targets[chosen].to(device),
            temperature=tokens.temperature[chosen].to(device, heat),
        )

    # running

    @contextmanager
    def attending(self) -> Iterator[None]:
        """While it lasts, backward passes included, the model attends by tree; afterwards as before."""
        if self.layout != "alone":
            implementation = TREE
        elif getattr(self.model.network.config.get_text_config(), "attn_logit_softcapping", None):
            implementation = "eager"  # the usual kernels leave the cap out
        else:
            implementation = self.model.network.config._attn_implementation
        with _implementation(self.model, implementation), self._with_head():
            yield

    @contextmanager
    def _with_head(self) -> Iterator[None]:
        if self.world is None or self._whole is not None:
            yield
            return
        sharded, self._whole = self._head, WholeHead(self.model.head, self.model.dtype, self.model.reduce)
        weights = self._whole.weights
        self._head = dataclasses.replace(sharded, weight=weights["weight"], bias=weights.get("bias"))
        try:
            yield
        finally:
            self._head, self._whole = sharded, None

    def collect(self) -> None:
        """After the last backward pass: the head's gradient, which came together on each rank, to where it belongs."""
        if self._whole is not None:
            self._whole.collect()

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[n, d] the hidden states that predict the trainable tokens."""
        if batch.layout is None:
            output = self.model.body(input_ids=batch.inputs, use_cache=False)
        else:
            # a mask of four dimensions is passed on as it is, so that the model does not make one of T x T
            nothing = torch.zeros(1, 1, 1, 1, device=batch.inputs.device)
            output = self.model.body(
                input_ids=batch.inputs,
                position_ids=batch.positions,
                attention_mask=nothing,
                use_cache=False,
                tree=batch.layout,
            )
        states: Tensor = output.last_hidden_state
        return states[0].index_select(0, batch.rows)

    @torch.no_grad()
    def score(
        self, tokens: Tokens, *, entropy: bool = False, top_k: int = 0, plan: Sequence[MicroBatch] | None = None
    ) -> Scores:
        """Log-probs of all trainable tokens, without a graph; the same path for policy, references and teachers."""
        parts, order = [], []
        with self.attending():
            for batch in self.plan(tokens) if plan is None else plan:
                hidden = self.hidden(batch)
                parts.append(self.head.score(hidden, batch.targets, batch.temperature, entropy=entropy, top_k=top_k))
                order.append(batch.tokens)
            if not parts:
                nothing = torch.zeros(0, self.head.weight.shape[1], dtype=self.model.dtype, device=self.model.device)
                return self.head.score(nothing, tokens.targets[:0], entropy=entropy, top_k=top_k)
        return exchange(join(parts), torch.cat(order), len(tokens), self.world)

    # finding out what the model allows

    def _checked_layout(self) -> Layouts:
        reason = obstacle(self.model.network)
        wanted, tokens = self.layout, _probe(self.model)
        truth = _own_logprobs(self.model, tokens)
        allowed = TOLERANCE.get(self.model.dtype, 1e-4)
        for compiled in (True, False) if reason is None else ():
            self.compiled = compiled
            try:
                found = self.score(tokens).logprobs
            except (TypeError, ValueError, RuntimeError) as error:
                reason = f"its code does not take a tree: {error}"
            else:
                off = float((found - truth).abs().mean())
                if off <= allowed:
                    if not compiled:
                        log.warning("%s: attention goes by torch, the kernel in C is off: %s", self._name, reason)
                    return wanted
                reason = f"log-probs of a probe differ by {off:.2g}"
        self.layout = "alone"
        off = float((self.score(tokens).logprobs - truth).abs().mean())
        if not off <= allowed:
            raise ModelError(
                f"model {self._name}: its own logits give log-probs that differ by {off:.2g} from those of"
                f" its hidden states and output matrix; {type(self.model.network).__name__} is not supported"
            )
        log.warning("%s: tokens are not shared between samples, each is computed alone: %s", self._name, reason)
        return "alone"


def exchange(scores: Scores, index: Tensor, size: int, world: World | None) -> Scores:
    """Scores of some tokens, by this rank and all others, at their places among `size`; elsewhere as by `placed`."""
    placed = scores.placed(index, size)
    if world is None:
        return placed
    mine = torch.zeros(size, dtype=torch.bool, device=index.device).index_fill_(0, index, True)
    known = world.sum(mine.to(torch.int32)) > 0
    columns: dict[str, Tensor | None] = {}
    for field in dataclasses.fields(placed):
        values: Tensor | None = getattr(placed, field.name)
        if values is not None:
            own, all_known = (mask.view(-1, *[1] * (values.dim() - 1)) for mask in (mine, known))
            # each token is known to one rank, so that a sum with zeros is its very bits
            values = torch.where(all_known, world.sum(torch.where(own, values, 0)), values)
        columns[field.name] = values
    return Scores(**columns)  # type: ignore[arg-type]


def _probe(model: Model) -> Tokens:
    """Three short sequences of which two share most, and all the start."""
    config = model.network.config.get_text_config()
    count = min(256, config.vocab_size)
    ids = np.random.default_rng(0).integers(0, count, 40)
    chosen = (ids[:24], np.concatenate([ids[:16], ids[24:36]]), np.concatenate([ids[:6], ids[30:40]]))
    samples = [
        Sample(token_ids=one, trainable=np.arange(len(one)) > 2, advantage=0.0, sampler_logprobs=np.zeros(len(one)))
        for one in chosen
    ]
    return Tokens(samples)


@torch.no_grad()
def _own_logprobs(model: Model, tokens: Tokens) -> Tensor:
    """The log-probs of the model's own logits, by its own plain attention, each sequence alone."""
    parts = []
    plain = "eager" if model.network._can_set_attn_implementation() else model.network.config._attn_implementation
    head = WholeHead(model.head, model.dtype, model.reduce).weights if model.world is not None else {}
    with _implementation(model, plain), with_whole_head(model.head, head):
        for sample in tokens.samples:
            ids = torch.from_numpy(np.asarray(sample.token_ids)).to(model.device)
            logits = model.network(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            every = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            parts.append(every[torch.from_numpy(np.asarray(sample.trainable))[1:].to(model.device)])
    return torch.cat(parts)


@contextmanager
def _implementation(model: Model, name: str) -> Iterator[None]:
    """Attention by this implementation, and then again by the one before."""
    before = model.network.config._attn_implementation
    if name == before:
        yield
        return
    model.network.set_attn_implementation(name)
    try:
        yield
    finally:
        model.network.set_attn_implementation(before)
