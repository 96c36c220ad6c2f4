"""Run a model over samples: pack them into micro-batches and compute hidden states and log-probs.

The packing mode is chosen once, by a probe on the loaded model: a short prefix tree is computed packed and, with the
model's own forward, one sequence at a time; prefixes are shared only if both agree. A model that packing would change
(state-space layers, experts with a capacity, attention without a hook) computes one sequence at a time and logs the
reason. A model whose log-probs cannot be reproduced at all raises an error. On several ranks each rank computes the
same number of micro-batches, and scores are exchanged between all ranks.
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

PackingMode = Literal["shared", "packed", "sequential"]
"""One row per micro-batch with shared prefixes once; one row with concatenated sequences; one sequence per pass."""

PROBE_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest mean difference between the probe's log-probs and the model's own; 1e-4 for other dtypes. In half precision
the model's own logits are rounded to about 0.05. A wrong mask causes a difference of about 1."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Packed samples of a step, ready for the model."""

    inputs: Tensor
    """[1, T] token ids."""
    positions: Tensor
    """[1, T]"""
    layout: TreeLayout | None
    """Visibility of tokens; None for the model's own causal attention."""
    hidden_index: Tensor
    """[n] index of the hidden state that predicts each trainable token."""
    token_index: Tensor
    """[n] index of each token among the step's trainable tokens."""
    targets: Tensor
    temperature: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[1]


class Forward:
    """Run a model over samples. Holds no state of a step."""

    def __init__(
        self, model: Model, *, max_tokens: int = 4096, share_prefixes: bool = True, packing: PackingMode | None = None
    ) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.world = model.world
        self._head = LMHead.from_network(model.network)
        self._gathered_head: GatheredHead | None = None
        self.use_native = True
        """Whether attention may use the native kernel."""
        self.packing: PackingMode = packing or ("shared" if share_prefixes else "packed")
        if packing is None:
            self.packing = self._choose_packing()

    @property
    def head(self) -> LMHead:
        """Return the output head; on several ranks it is unsharded only inside `tree_attention_enabled`."""
        return self._head

    @property
    def _model_name(self) -> str:
        return self.model.source.name

    # packing

    def plan(self, tokens: TrainableTokens, sample_indices: Sequence[int] | None = None) -> list[MicroBatch]:
        """Return micro-batches of all samples or of the given ones. Samples without trainable tokens are skipped.

        On several ranks, return those of this rank, padded with empty ones to the number of the other ranks.
        """
        indices = list(range(len(tokens.samples)) if sample_indices is None else sample_indices)
        sequences = [tokens.samples[index].inputs for index in indices]
        self._check_samples(tokens, indices)
        share, ranks = self.packing == "shared", 1 if self.world is None else self.world.size
        if self.packing == "sequential":
            bins = [[index] for index, sequence in enumerate(sequences) if len(sequence)]
        else:
            bins = plan_micro_batches(sequences, self.max_tokens, share=share, ranks=ranks)
        own_bins: Sequence[list[int] | None] = bins
        if self.world is not None:
            own_bins = assign_to_ranks(sequences, bins, ranks, share=share)[self.world.rank]
        return [
            self._empty_micro_batch()
            if members is None
            else self._pack(tokens, [indices[index] for index in members], [sequences[index] for index in members])
            for members in own_bins
        ]

    def _empty_micro_batch(self) -> MicroBatch:
        """Return a micro-batch of one unused token: a rank without work must still take part in gathering shards."""
        empty = TrainableTokens([Sample(token_ids=[0], trainable=[False], advantage=0.0)])
        return self._pack(empty, [0], [np.zeros(1, np.int64)])

    def _check_samples(self, tokens: TrainableTokens, sample_indices: Sequence[int]) -> None:
        vocabulary = self.model.head.weight.shape[0]
        for index in sample_indices:
            sample = tokens.samples[index]
            name = sample.name or f"number {index}"
            if len(sample.inputs) > self.max_tokens:
                raise ConfigError(
                    f"sample {name} has {len(sample.inputs)} tokens to compute, more than"
                    f" trainer.max_tokens_per_micro_batch = {self.max_tokens}; raise it, or remove the sample"
                )
            largest = int(np.asarray(sample.token_ids).max())
            if largest >= vocabulary:
                raise ConfigError(
                    f"sample {name} has token id {largest}, but the model's vocabulary has {vocabulary} tokens"
                )

    def _pack(self, tokens: TrainableTokens, sample_indices: list[int], sequences: list[IntArray]) -> MicroBatch:
        device = self.model.device
        tree = build_tree(sequences, share=self.packing == "shared")
        slices = [tokens.slice_of(index) for index in sample_indices]
        # the hidden state at the previous position predicts a token
        rows = [path[tokens.position[part] - 1] for path, part in zip(tree.paths, slices, strict=True)]
        token_index = np.concatenate([np.arange(part.start, part.stop) for part in slices])
        layout = None
        if self.packing != "sequential":
            layout = TreeLayout(tree, device, self.model.dtype, use_native=self.use_native)
        wide = torch.promote_types(self.model.dtype, torch.float32)
        return MicroBatch(
            inputs=torch.from_numpy(tree.tokens)[None].to(device),
            positions=torch.from_numpy(tree.positions)[None].to(device),
            layout=layout,
            hidden_index=torch.from_numpy(np.concatenate(rows)).to(device),
            token_index=torch.from_numpy(token_index).to(device),
            targets=tokens.targets[token_index].to(device),
            temperature=tokens.temperature[token_index].to(device, wide),
        )

    # running

    @contextmanager
    def tree_attention_enabled(self) -> Iterator[None]:
        """Use tree attention in the model, for forward and backward passes, until the block ends."""
        if self.packing != "sequential":
            implementation = TREE_ATTENTION
        elif getattr(self.model.network.config.get_text_config(), "attn_logit_softcapping", None):
            implementation = "eager"  # sdpa ignores the soft cap
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
        """Sum the head's gradient over ranks into its shards, after the last backward pass."""
        if self._gathered_head is not None:
            self._gathered_head.reduce_gradient()

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return [n, d]: the hidden states that predict the trainable tokens."""
        if batch.layout is None:
            output = self.model.body(input_ids=batch.inputs, use_cache=False)
        else:
            # transformers passes a 4-dimensional mask through instead of building one of T x T
            unused_mask = torch.zeros(1, 1, 1, 1, device=batch.inputs.device)
            output = self.model.body(
                input_ids=batch.inputs,
                position_ids=batch.positions,
                attention_mask=unused_mask,
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
        """Compute log-probs of all trainable tokens without a graph; used for policy, references and teachers."""
        parts, order = [], []
        with self.tree_attention_enabled():
            for batch in self.plan(tokens) if plan is None else plan:
                hidden = self.hidden(batch)
                parts.append(self.head.score(hidden, batch.targets, batch.temperature, entropy=entropy, top_k=top_k))
                order.append(batch.token_index)
            if not parts:
                no_rows = torch.zeros(0, self.head.weight.shape[1], dtype=self.model.dtype, device=self.model.device)
                return self.head.score(no_rows, tokens.targets[:0], entropy=entropy, top_k=top_k)
        return merge_scores_across_ranks(concat_scores(parts), torch.cat(order), len(tokens), self.world)

    # choosing the packing mode

    def _choose_packing(self) -> PackingMode:
        """Return the requested packing mode if a probe gives the model's own log-probs, "sequential" otherwise."""
        reason = packing_obstacle(self.model.network)
        requested, tokens = self.packing, _probe_tokens(self.model)
        expected = _hf_logprobs(self.model, tokens)
        tolerance = PROBE_TOLERANCE.get(self.model.dtype, 1e-4)
        for use_native in (True, False) if reason is None else ():
            self.use_native = use_native
            try:
                logprobs = self.score(tokens).logprobs
            except (TypeError, ValueError, RuntimeError) as error:
                reason = f"its code does not accept a prefix tree: {error}"
            else:
                difference = float((logprobs - expected).abs().mean())
                if difference <= tolerance:
                    if not use_native:
                        log.warning("%s: attention uses torch, not the native kernel: %s", self._model_name, reason)
                    return requested
                reason = f"log-probs of a probe differ by {difference:.2g}"
        self.packing = "sequential"
        difference = float((self.score(tokens).logprobs - expected).abs().mean())
        if not difference <= tolerance:
            raise ModelError(
                f"model {self._model_name}: log-probs from its own logits differ by {difference:.2g} from those of its"
                f" hidden states and output matrix; {type(self.model.network).__name__} is not supported"
            )
        log.warning("%s: prefixes are not shared, each sample is computed separately: %s", self._model_name, reason)
        return "sequential"


def merge_scores_across_ranks(scores: Scores, index: Tensor, size: int, world: World | None) -> Scores:
    """Return the scores of this rank (at `index`) and of all others, scattered to `size` tokens."""
    scattered = scores.scatter(index, size)
    if world is None:
        return scattered
    mine = torch.zeros(size, dtype=torch.bool, device=index.device).index_fill_(0, index, True)
    known = world.all_reduce_sum(mine.to(torch.int32)) > 0
    columns: dict[str, Tensor | None] = {}
    for field in dataclasses.fields(scattered):
        values: Tensor | None = getattr(scattered, field.name)
        if values is not None:
            own, all_known = (mask.view(-1, *[1] * (values.dim() - 1)) for mask in (mine, known))
            # exactly one rank has each token, so summing with zeros preserves its bits
            values = torch.where(all_known, world.all_reduce_sum(torch.where(own, values, 0)), values)
        columns[field.name] = values
    return Scores(**columns)  # type: ignore[arg-type]


def _probe_tokens(model: Model) -> TrainableTokens:
    """Return three short sequences that share a prefix, two of them a longer one."""
    config = model.network.config.get_text_config()
    count = min(256, config.vocab_size)
    ids = np.random.default_rng(0).integers(0, count, 40)
    sequences = (ids[:24], np.concatenate([ids[:16], ids[24:36]]), np.concatenate([ids[:6], ids[30:40]]))
    samples = [
        Sample(token_ids=ids, trainable=np.arange(len(ids)) > 2, advantage=0.0, sampler_logprobs=np.zeros(len(ids)))
        for ids in sequences
    ]
    return TrainableTokens(samples)


@torch.no_grad()
def _hf_logprobs(model: Model, tokens: TrainableTokens) -> Tensor:
    """Return log-probs from the model's own logits and eager attention, one sequence at a time."""
    parts = []
    eager = "eager" if model.network._can_set_attn_implementation() else model.network.config._attn_implementation
    head = GatheredHead(model.head, model.dtype, model.reduce_dtype).weights if model.world is not None else {}
    with _attention_implementation(model, eager), use_gathered_head(model.head, head):
        for sample in tokens.samples:
            ids = torch.from_numpy(np.asarray(sample.token_ids)).to(model.device)
            logits = model.network(input_ids=ids[None], use_cache=False).logits[0, :-1]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            parts.append(logprobs[torch.from_numpy(np.asarray(sample.trainable))[1:].to(model.device)])
    return torch.cat(parts)


@contextmanager
def _attention_implementation(model: Model, name: str) -> Iterator[None]:
    """Switch the model's attention implementation and restore the previous one afterwards."""
    before = model.network.config._attn_implementation
    if name == before:
        yield
        return
    model.network.set_attn_implementation(name)
    try:
        yield
    finally:
        model.network.set_attn_implementation(before)
