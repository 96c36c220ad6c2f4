"""Helpers for tests of the local engine: prompts, requests, and a comparison with the trainer's log-probs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keel.config import EngineSettings, Sampling, TrainerSettings
from keel.inference.local.continuous_batch import ContinuousBatch, GenerationRequest
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.decoders import BatchedDecoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.local.sampling import StopStringDetector
from keel.inference.protocol import Generation
from keel.training import Model, Sample, Trainer

STEM = [257, *b"user\nWhich is larger, "]
PROMPTS = [[*STEM, *b"3 or 5?"], [*STEM, *b"12 or 7, of these two?"], [*b"What is there?"], [*STEM, *b"3"], [42]]


def with_engine(model: Model, use: Callable[[LocalEngine], Awaitable[Any]], **settings: Any) -> Any:
    """Return the result of `use` called with an engine on the model; the engine is closed afterwards."""

    async def run() -> Any:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings(**settings))
        try:
            return await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(run())


def generate_all(
    requests: Sequence[tuple[Sequence[int], Sampling]],
) -> Callable[[LocalEngine], Awaitable[list[Generation]]]:
    """Return a function for `with_engine` that runs these requests concurrently."""

    async def use(engine: LocalEngine) -> list[Generation]:
        return list(await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in requests)))

    return use


def generate(engine: LocalEngine, max_tokens: int = 12) -> Awaitable[Generation]:
    """Sample a completion of the first prompt with a fixed seed."""
    return engine.generate(PROMPTS[0], Sampling(max_tokens=max_tokens, seed=1))


def make_request(prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    """Return a request for a `ContinuousBatch` that is not part of an engine."""
    settings = Sampling(**sampling)
    stop_ids = frozenset(settings.stop_token_ids)
    return GenerationRequest(tuple(prompt), settings, stop_ids, StopStringDetector(None, ()), settings.max_tokens)


def run_batch(batch: ContinuousBatch, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Add the requests to the batch and step until all have completed."""
    batch.waiting.extend(requests)
    while batch.busy:
        batch.step(0)
    return [request.future.result() for request in requests]


def logprob_error(model: Model, prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> float:
    """Return the mean absolute difference between the recorded log-probs and the trainer's."""
    samples = [_to_sample(prompt, generation) for prompt, generation in zip(prompts, generations, strict=True)]
    rows = Trainer(model, TrainerSettings()).logprobs(samples)
    expected = torch.cat([row[len(prompt) :] for prompt, row in zip(prompts, rows, strict=True)])
    recorded = torch.tensor([logprob for generation in generations for logprob in generation.logprobs])
    return float((recorded - expected).abs().mean())


def _to_sample(prompt: Sequence[int], generation: Generation) -> Sample:
    ids = np.array([*prompt, *generation.token_ids])
    return Sample(
        token_ids=ids,
        trainable=np.arange(len(ids)) >= len(prompt),
        advantage=0.0,
        sampler_logprobs=np.zeros(len(ids)),
        temperature=generation.temperature,
    )


def counting_decoder(model: Model, **options: Any) -> Any:
    """Return a decoder that records in `computed` how many tokens each forward pass had."""

    class CountingDecoder(BatchedDecoder):
        computed: list[int] = []

        def _forward(self, nodes: Any, rows: Any) -> torch.Tensor:
            self.computed.append(sum(len(node) for node in nodes) + len(rows))
            return super()._forward(nodes, rows)

    select_decoder(model.network, "tiny")
    decoder = CountingDecoder(model.network, **options)
    decoder.computed = []
    return decoder


def save_weights(model: Model, path: Path) -> str:
    """Write the network as a Hugging Face folder and return its path."""
    model.network.save_pretrained(path)
    return str(path)


def save_adapter(model: Model, path: Path) -> str:
    """Write the LoRA adapter as a PEFT folder and return its path."""
    assert model.peft is not None
    model.peft.save_pretrained(str(path))
    return str(path)
