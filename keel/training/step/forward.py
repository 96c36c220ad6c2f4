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

from keel.common.packing_support import packing_obstacle
from keel.common.sample import Sample
from keel.errors import ConfigError, ModelError
from keel.training.distributed.fsdp import GatheredHead, use_gathered_head
from keel.training.distributed.world import World
from keel.training.model.model import Model
from keel.training.step.lm_head import LMHead, Scores, concat_scores
from keel.training.step.prefix_tree import IntArray, assign_to_ranks, build_tree, plan_micro_batches
from keel.training.step.trainable_tokens import TrainableTokens
from keel.training.step.tree_attention import TREE_ATTENTION, TreeLayout

log = logging.getLogger("keel")

PackingMode = Literal["shared", "packed", "alone"]
"""One row per micro-batch with shared tokens once; one row with sequences side by side; one sequence per pass."""

PROBE_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far log-probs of the probe may be from the model's own, in the mean; elsewhere 1e-4. In half precision the
model's own logits are rounded to about 0.05. A wrong mask is off by a whole unit or so."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some samples of a step, ready for the model."""

    inputs: Tensor
    """[1, T] token ids."""
    positions: Tensor
    """[1, T]"""
    layout: TreeLayout | None
    """Who sees whom; None: the model's own causal attention."""
    hidden_index: Tensor
    """[n] where the hidden state stands that predicts each trainable token."""
    token_index: Tensor
    """[n] which of the step's trainable tokens these are."""
    targets: Tensor
    temperature: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[1]


class Forward:
    """Runs a model over samples. Holds no state of a step."""

    def __init__(
        self, model: Model, *, max_tokens: int = 4096, share_prefixes: bool = True, packing: PackingMode | None = None
    ) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.world = model.world
        self._head = LMHead.from_network(model.network)
        self._gathered_head: GatheredHead | None = None
        self.use_native = True
        """Attention by the kernel in C, where it fits."""
        self.packing: PackingMode = packing or ("shared" if share_prefixes else "packed")
        if packing is None:
            self.packing = self._choose_packing()

    @property
    def head(self) -> LMHead:
        """From hidden states to log-probs; whole, on several ranks, inside `attending` only."""
        return self._head

    @property
    def _model_name(self) -> str:
        return self.model.source.name

    # packing

    def plan(self, tokens: TrainableTokens, sample_indices: Sequence[int] | None = None) -> list[MicroBatch]:
        """Micro-batches of all samples, or of those with these numbers. Samples that train no token cost nothing.

        On several ranks those of this one; where it has fewer than others, empty ones in their place.
        """
        numbers = list(range(len(tokens.samples)) if sample_indices is None else sample_indices)
        sequences = [tokens.samples[number].inputs for number in numbers]
        self._check_samples(tokens, numbers)
        share, ranks = self.packing == "shared", 1 if self.world is None else self.world.size
        if self.packing == "alone":
            bins = [[index] for index, sequence in enumerate(sequences) if len(sequence)]
        else:
            bins = plan_micro_batches(sequences, self.max_tokens, share=share, ranks=ranks)
        own: Sequence[list[int] | None] = bins
        if self.world is not None:
            own = assign_to_ranks(sequences, bins, ranks, share=share)[self.world.rank]
        return [
            self._empty_micro_batch()
            if members is None
            else self._pack(tokens, [numbers[index] for index in members], [sequences[index] for index in members])
            for members in own
        ]

    def _empty_micro_batch(self) -> MicroBatch:
        """One token that nobody asks about: shards are gathered by all ranks together, also by one without work."""
        empty = TrainableTokens([Sample(token_ids=[0], trainable=[False], advantage=0.0)])
        return self._pack(empty, [0], [np.zeros(1, np.int64)])

    def _check_samples(self, tokens: TrainableTokens, sample_indices: Sequence[int]) -> None:
        vocabulary = self.model.head.weight.shape[0]
        for number in sample_indices:
            sample = tokens.samples[number]
            name = sample.name or f"number {number}"
            if len(sample.inputs) > self.max_tokens:
                raise ConfigError(
                    f"sample {name} has {len(sample.inputs)} tokens to compute, more than trainer.max_tokens_per_micro_batch ="
                    f" {self.max_tokens}; raise it, or leave the sample out"
                )
            largest = int(np.asarray(sample.token_ids).max())
            if largest >= vocabulary:
                raise ConfigError(f"sample {name} has token id {largest}; the model knows {vocabulary}")

    def _pack(self, tokens: TrainableTokens, sample_indices: list[int], sequences: list[IntArray]) -> MicroBatch:
        device = self.model.device
        tree = build_tree(sequences, share=self.packing == "shared")
        places = [tokens.slice_of(number) for number in sample_indices]
        rows = [path[tokens.position[place] - 1] for path, place in zip(tree.paths, places, strict=True)]
        chosen = np.concatenate([np.arange(place.start, place.stop) for place in places])
        layout = (
            None if self.packing == "alone" else TreeLayout(tree, device, self.model.dtype, use_native=self.use_native)
        )
        heat = torch.promote_types(self.model.dtype, torch.float32)
        return MicroBatch(
            inputs=torch.from_numpy(tree.tokens)[None].to(device),
            positions=torch.from_numpy(tree.positions)[None].to(device),
            layout=layout,
            hidden_index=torch.from_numpy(np.concatenate(rows)).to(device),
            token_index=torch.from_numpy(chosen).to(device),
            targets=tokens.targets[chosen].to(device),
            temperature=tokens.temperature[chosen].to(device, heat),
        )

    # running

    @contextmanager
    def tree_attention_enabled(self) -> Iterator[None]:
        """While it lasts, backward passes included, the model attends by tree; afterwards as before."""
        if self.packing != "alone":
            implementation = TREE_ATTENTION
        elif getattr(self.model.network.config.get_text_config(), "attn_logit_softcapping", None):
            implementation = "eager"  # the usual kernels leave the cap out
        else:
            implementation = self.model.network.config._attn_implementation
        with _attention_implementation(self.model, implementation), self._head_gathered():
            yield

    @contextmanager
    def _head_gathered(self) -> Iterator[None]:
        if self.world is None or self._gathered_head is not None:
            yield
            return
        sharded, self._gathered_head = (
            self._head,
            GatheredHead(self.model.head, self.model.dtype, self.model.reduce_dtype),
        )
        weights = self._gathered_head.weights
        self._head = dataclasses.replace(sharded, weight=weights["weight"], bias=weights.get("bias"))
        try:
            yield
        finally:
            self._head, self._gathered_head = sharded, None

    def reduce_head_gradient(self) -> None:
        """After the last backward pass: the head's gradient, which came together on each rank, to where it belongs."""
        if self._gathered_head is not None:
            self._gathered_head.reduce_gradient()

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
        return states[0].index_select(0, batch.hidden_index)

    @torch.no_grad()
    def score(
        self,
        tokens: TrainableTokens,
        *,
        entropy: bool = False,
        top_k: int = 0,
        plan: Sequence[MicroBatch] | None = None,
    ) -> Scores:
        """Log-probs of all trainable tokens, without a graph; the same path for policy, references and teachers."""
        parts, order = [], []
        with self.tree_attention_enabled():
            for batch in self.plan(tokens) if plan is None else plan:
                hidden = self.hidden(batch)
                parts.append(self.head.score(hidden, batch.targets, batch.temperature, entropy=entropy, top_k=top_k))
                order.append(batch.token_index)
            if not parts:
                nothing = torch.zeros(0, self.head.weight.shape[1], dtype=self.model.dtype, device=self.model.device)
                return self.head.score(nothing, tokens.targets[:0], entropy=entropy, top_k=top_k)
        return merge_scores_across_ranks(concat_scores(parts), torch.cat(order), len(tokens), self.world)

    # finding out what the model allows

    def _choose_packing(self) -> PackingMode:
        reason = packing_obstacle(self.model.network)
        wanted, tokens = self.packing, _probe_tokens(self.model)
        truth = _hf_logprobs(self.model, tokens)
        allowed = PROBE_TOLERANCE.get(self.model.dtype, 1e-4)
        for compiled in (True, False) if reason is None else ():
            self.use_native = compiled
            try:
                found = self.score(tokens).logprobs
            except (TypeError, ValueError, RuntimeError) as error:
                reason = f"its code does not take a tree: {error}"
            else:
                off = float((found - truth).abs().mean())
                if off <= allowed:
                    if not compiled:
                        log.warning("%s: attention goes by torch, the kernel in C is off: %s", self._model_name, reason)
                    return wanted
                reason = f"log-probs of a probe differ by {off:.2g}"
        self.packing = "alone"
        off = float((self.score(tokens).logprobs - truth).abs().mean())
        if not off <= allowed:
            raise ModelError(
                f"model {self._model_name}: its own logits give log-probs that differ by {off:.2g} from those of"
                f" its hidden states and output matrix; {type(self.model.network).__name__} is not supported"
            )
        log.warning("%s: tokens are not shared between samples, each is computed alone: %s", self._model_name, reason)
        return "alone"


def merge_scores_across_ranks(scores: Scores, index: Tensor, size: int, world: World | None) -> Scores:
    """Scores of some tokens, by this rank and all others, at their places among `size`; elsewhere as by `placed`."""
    placed = scores.scatter(index, size)
    if world is None:
        return placed
    mine = torch.zeros(size, dtype=torch.bool, device=index.device).index_fill_(0, index, True)
    known = world.all_reduce_sum(mine.to(torch.int32)) > 0
    columns: dict[str, Tensor | None] = {}
    for field in dataclasses.fields(placed):
        values: Tensor | None = getattr(placed, field.name)
        if values is not None:
            own, all_known = (mask.view(-1, *[1] * (values.dim() - 1)) for mask in (mine, known))
            # each token is known to one rank, so that a sum with zeros is its very bits
            values = torch.where(all_known, world.all_reduce_sum(torch.where(own, values, 0)), values)
        columns[field.name] = values
    return Scores(**columns)  # type: ignore[arg-type]


def _probe_tokens(model: Model) -> TrainableTokens:
    """Three short sequences of which two share most, and all the start."""
    config = model.network.config.get_text_config()
    count = min(256, config.vocab_size)
    ids = np.random.default_rng(0).integers(0, count, 40)
    chosen = (ids[:24], np.concatenate([ids[:16], ids[24:36]]), np.concatenate([ids[:6], ids[30:40]]))
    samples = [
        Sample(token_ids=one, trainable=np.arange(len(one)) > 2, advantage=0.0, sampler_logprobs=np.zeros(len(one)))
        for one in chosen
    ]
    return TrainableTokens(samples)


@torch.no_grad()
def _hf_logprobs(model: Model, tokens: TrainableTokens) -> Tensor:
    """The log-probs of the model's own logits, by its own plain attention, each sequence alone."""
    parts = []
    plain = "eager" if model.network._can_set_attn_implementation() else model.network.config._attn_implementation
    head = GatheredHead(model.head, model.dtype, model.reduce_dtype).weights if model.world is not None else {}
    with _attention_implementation(model, plain), use_gathered_head(model.head, head):
        for sample in tokens.samples:
            ids = torch.from_numpy(np.asarray(sample.token_ids)).to(model.device)
            logits = model.network(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            every = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            parts.append(every[torch.from_numpy(np.asarray(sample.trainable))[1:].to(model.device)])
    return torch.cat(parts)


@contextmanager
def _attention_implementation(model: Model, name: str) -> Iterator[None]:
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
