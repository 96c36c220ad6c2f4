"""The local engine: exact log-probs, seeds independent of other requests, joining and leaving, streams and errors."""

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
import torch

from keel.config import EngineSettings, Sampling
from keel.inference.local import decoders
from keel.inference.local.continuous_batch import MAX_PREFILL_TOKENS, ContinuousBatch
from keel.inference.local.decode_step import INITIAL_CAPACITY
from keel.inference.local.decoder_selection import select_decoder
from keel.inference.local.decoders import BatchedDecoder, SequentialDecoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.inference.server.openai_responses import TokenChunk
from tests.support.local_engine import (
    PROMPTS,
    counting_decoder,
    generate_all,
    logprob_error,
    make_request,
    with_engine,
)
from tests.support.policy_strategies import FAMILIES, tiny

# exactness


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_the_trainers_at_any_temperature(family: str) -> None:
    model = tiny(family)
    cases = [(prompt, temperature) for prompt in PROMPTS for temperature in (1.0, 0.6, 1.7)]
    requests = [
        (prompt, Sampling(temperature=temperature, max_tokens=24, seed=number))
        for number, (prompt, temperature) in enumerate(cases)
    ]
    generations = with_engine(model, generate_all(requests))
    assert sum(len(generation.token_ids) for generation in generations) > 200  # some end before max_tokens
    assert logprob_error(model, [prompt for prompt, _ in requests], generations) < 1e-5


def test_models_are_batched_unless_they_have_a_recurrent_state(caplog: pytest.LogCaptureFixture) -> None:
    for family in FAMILIES:
        assert isinstance(select_decoder(tiny(family).network, family), BatchedDecoder), family
    with caplog.at_level(logging.WARNING, logger="keel"):
        assert isinstance(select_decoder(tiny("tiny-mamba").network, "tiny-mamba"), SequentialDecoder)
    assert "recurrent state" in caplog.text


def test_a_model_with_a_recurrent_state_is_decoded_sequentially_and_exactly() -> None:
    model = tiny("tiny-mamba")
    requests = [(prompt, Sampling(max_tokens=5, seed=1, temperature=0.8)) for prompt in PROMPTS[:3]]
    assert logprob_error(model, PROMPTS[:3], with_engine(model, generate_all(requests))) < 1e-5


def test_half_precision_logprobs_are_close_to_the_trainers() -> None:
    for family in ("tiny", "tiny-gpt-oss"):
        model = tiny(family, dtype="bfloat16")
        assert isinstance(select_decoder(model.network, family), BatchedDecoder)
        requests = [(prompt, Sampling(max_tokens=12, seed=3)) for prompt in PROMPTS]
        assert logprob_error(model, PROMPTS, with_engine(model, generate_all(requests))) < 0.1


def test_completions_longer_than_the_initial_capacity_are_exact() -> None:
    model = tiny()
    requests = [(prompt, Sampling(max_tokens=150, seed=9)) for prompt in PROMPTS[:2]]
    generations = with_engine(model, generate_all(requests))
    assert logprob_error(model, PROMPTS[:2], generations) < 1e-5


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_long_completions_that_spill_are_exact_and_do_not_grow_the_shared_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "SPILL_TOKENS", 8)
    model = tiny(family)
    lengths = (40, 3, 20, 17, 9, 40)
    requests = [(PROMPTS[n % 2], Sampling(max_tokens=length, seed=n)) for n, length in enumerate(lengths)]

    async def use(engine: LocalEngine) -> list[Generation]:
        generations = await generate_all(requests)(engine)
        assert engine._batch.decoder.kv_cache.capacity == INITIAL_CAPACITY  # type: ignore[attr-defined]
        return generations

    generations = with_engine(model, use, max_batch=4)
    assert max(len(generation.token_ids) for generation in generations) > 2 * 16
    assert logprob_error(model, [prompt for prompt, _ in requests], generations) < 1e-5


def test_long_prompts_are_exact_with_and_without_a_sliding_window() -> None:
    long = np.random.default_rng(0).integers(0, 200, 700).tolist()
    for family in ("tiny", "tiny-gemma2"):
        model = tiny(family)
        requests = [(ids, Sampling(max_tokens=4, seed=1)) for ids in (long, long[:600])]
        generations = with_engine(model, generate_all(requests))
        assert logprob_error(model, [long, long[:600]], generations) < 1e-5, family


# sharing and seeds


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-gpt-oss", "tiny-mixtral"])
def test_a_completion_does_not_depend_on_other_requests(family: str) -> None:
    requests = [
        (prompt, Sampling(max_tokens=6 + number, seed=number % 3)) for number, prompt in enumerate([*PROMPTS, *PROMPTS])
    ]
    alone = [with_engine(tiny(family), generate_all([request]))[0] for request in requests[:5]]
    concurrent = with_engine(tiny(family), generate_all(requests))
    reverse_order = with_engine(tiny(family), generate_all(requests[::-1]))[::-1]
    queued = with_engine(tiny(family), generate_all(requests), max_batch=3)
    for batched in (concurrent, reverse_order, queued):
        for first, second in zip(alone, batched, strict=False):
            assert first.token_ids == second.token_ids
            assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)
    assert [first.token_ids for first in concurrent] == [second.token_ids for second in reverse_order]


def test_equal_seeds_give_equal_completions_and_other_seeds_do_not() -> None:
    requests = [(PROMPTS[0], Sampling(max_tokens=12, seed=seed)) for seed in (5, 5, 6)] + [
        (PROMPTS[0], Sampling(max_tokens=12)) for _ in range(2)
    ]
    generations = with_engine(tiny(), generate_all(requests))
    assert generations[0] == generations[1]
    assert len({generation.token_ids for generation in generations[1:]}) == 4


def test_a_group_computes_its_prompt_once_and_does_not_copy_it() -> None:
    decoder = counting_decoder(tiny())
    batch = ContinuousBatch(decoder, 8)
    batch.waiting.extend(make_request(PROMPTS[0], seed=number, max_tokens=5) for number in range(12))
    batch.step(0)
    leaf = batch.rows[0].leaf
    assert decoder.computed == [len(PROMPTS[0])]
    assert all(row.leaf is leaf for row in [*batch.rows, *batch.waiting])
    while batch.busy:
        batch.step(0)
    # the four requests that waited did not compute the prompt again
    assert decoder.computed == [len(PROMPTS[0]), 8, 8, 8, 8, 4, 4, 4, 4]


def test_common_prefixes_of_prompts_are_computed_once() -> None:
    decoder = counting_decoder(tiny())
    batch = ContinuousBatch(decoder, 8)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    batch.waiting.extend(make_request(prompt, max_tokens=2) for prompt in prompts)
    batch.step(0)
    distinct = {tuple(prompt[: size + 1]) for prompt in prompts for size in range(len(prompt))}
    assert decoder.computed == [len(distinct)]


def test_without_a_cache_a_prompt_is_freed_with_its_last_request() -> None:
    decoder = counting_decoder(tiny(), cache_bytes=0)
    batch = ContinuousBatch(decoder, 8)
    for _ in range(2):
        batch.waiting.append(make_request(PROMPTS[0], max_tokens=1))
        batch.step(0)
        assert not batch.busy
        assert len(decoder.prefix_cache) == 0
    assert decoder.computed == [len(PROMPTS[0])] * 2


# joining and leaving


def test_requests_join_in_order_between_steps_and_leave_when_they_end() -> None:
    batch = ContinuousBatch(counting_decoder(tiny()), 2)
    lengths = (3, 1, 2, 4, 1)
    requests = [make_request(prompt, max_tokens=length) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    batch.waiting.extend(requests)
    running = []
    while batch.busy:
        batch.step(0)
        running.append([requests.index(row) for row in batch.rows])
    # finished requests are gone after each step; the next in order joins in the next step
    assert running == [[0], [0, 2], [], [3], [3], [3], []]
    assert [len(request.future.result().token_ids) for request in requests] == [3, 1, 2, 4, 1]


def test_long_prompts_do_not_all_join_in_one_step() -> None:
    batch = ContinuousBatch(counting_decoder(tiny()), 8)
    batch.waiting.extend(make_request([number] * (MAX_PREFILL_TOKENS // 2 + 1), max_tokens=3) for number in range(3))
    batch.step(0)
    assert len(batch.rows) == 1


def test_cancelling_frees_the_row_before_the_next_step() -> None:
    async def use(engine: LocalEngine) -> Generation:
        first = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=2000, seed=1)))
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(engine.generate(PROMPTS[1], Sampling(max_tokens=3, seed=1)))
        await asyncio.sleep(0.02)
        health = await engine.health()
        assert (health.running, health.waiting) == (1, 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    generation = with_engine(tiny(), use, max_batch=1)
    assert len(generation.token_ids) == 3


def test_a_request_cancelled_while_waiting_is_never_started() -> None:
    decoder = counting_decoder(tiny())
    batch = ContinuousBatch(decoder, 4)
    batch.waiting.append(make_request(PROMPTS[0]))
    batch.waiting[0].future.cancel()
    batch.step(0)
    assert not batch.busy
    assert decoder.computed == []


def test_rows_that_move_into_a_gap_stay_exact() -> None:
    model = tiny("tiny-gemma3")
    lengths = (20, 2, 9, 3, 14, 1, 20, 5)
    requests = [(PROMPTS[n % 3], Sampling(max_tokens=length, seed=n)) for n, length in enumerate(lengths)]
    generations = with_engine(model, generate_all(requests), max_batch=5)
    assert tuple(len(generation.token_ids) for generation in generations) == lengths
    assert logprob_error(model, [prompt for prompt, _ in requests], generations) < 1e-5


def test_rows_can_leave_and_fail_in_the_step_in_which_others_join() -> None:
    model = tiny()
    batch = ContinuousBatch(counting_decoder(model), 8)
    first = [make_request(PROMPTS[n], seed=n, max_tokens=3) for n in range(2)]
    later = [make_request(PROMPTS[n % 3], seed=n, max_tokens=6) for n in range(6)]
    batch.waiting.extend(first)
    batch.step(0)
    batch.step(0)
    batch.waiting.extend(later)
    batch.step(0)  # both first rows leave, and rows without cached tokens take their indices
    assert [row in later for row in batch.rows] == [True] * 6
    while batch.busy:
        batch.step(0)
    generations = [request.future.result() for request in (*first, *later)]
    assert logprob_error(model, [request.prompt for request in (*first, *later)], generations) < 1e-5
    batch.waiting.extend(make_request(PROMPTS[n % 3]) for n in range(8))
    batch.decoder.compute_logits = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        batch.step(0)
    batch.fail(lambda: EngineError("it failed"), include_waiting=True)
    assert not batch.busy


def test_decoding_does_not_block_the_event_loop() -> None:
    async def use(engine: LocalEngine) -> int:
        task = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=100)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert with_engine(tiny(), use) > 100


# how completions end


def test_greedy_takes_the_likeliest_token_and_records_its_logprob() -> None:
    model = tiny()
    greedy = with_engine(model, generate_all([(PROMPTS[0], Sampling(temperature=0, max_tokens=8))]))[0]
    ids = torch.tensor([[*PROMPTS[0], *greedy.token_ids]])
    with torch.no_grad():
        logits = model.network(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    assert list(greedy.token_ids) == logprobs.argmax(-1).tolist()
    assert greedy.logprobs == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-5)
    assert greedy.temperature == 0


def test_stop_ids_and_the_end_token_end_the_completion_and_are_included() -> None:
    full = with_engine(tiny(), generate_all([(PROMPTS[0], Sampling(max_tokens=30, seed=2))]))[0]
    index = next(index for index in range(3, 30) if full.token_ids[index] not in full.token_ids[:index])
    sampling = Sampling(max_tokens=30, seed=2, stop_token_ids=(full.token_ids[index],))
    stopped = with_engine(tiny(), generate_all([(PROMPTS[0], sampling)]))[0]
    assert stopped.token_ids == full.token_ids[: index + 1]
    assert (full.finish_reason, stopped.finish_reason) == ("length", "stop")
    model = tiny()
    with torch.no_grad():  # make the end-of-turn token by far the likeliest
        model.network.get_output_embeddings().weight[258] *= 50
    ended = with_engine(model, generate_all([(PROMPTS[0], Sampling(max_tokens=200, seed=2))]))[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == 258


def test_a_stop_string_across_tokens_ends_the_completion_and_is_included() -> None:
    model = tiny()
    full = with_engine(model, generate_all([(PROMPTS[0], Sampling(max_tokens=40, seed=4))]))[0]
    texts = [model.tokenizer.decode(list(full.token_ids[:size])) for size in range(41)]
    stop = texts[40][5:9]
    first = next(size for size in range(41) if stop in texts[size])
    sampling = Sampling(max_tokens=40, seed=4, stop=("never", stop))
    stopped = with_engine(model, generate_all([(PROMPTS[0], sampling)]))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == full.token_ids[:first]


def test_a_completion_ends_at_the_models_last_position() -> None:
    model = tiny()
    model.network.config.max_position_embeddings = len(PROMPTS[0]) + 3
    generation = with_engine(model, generate_all([(PROMPTS[0], Sampling(max_tokens=30))]))[0]
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


# streams


def test_joined_stream_chunks_equal_the_completion_and_arrive_while_it_is_sampled() -> None:
    sampling = Sampling(max_tokens=40, seed=3)

    async def use(engine: LocalEngine) -> tuple[list[TokenChunk], Generation]:
        chunks = [chunk async for chunk in engine.stream(PROMPTS[0], sampling)]
        return chunks, await engine.generate(PROMPTS[0], sampling)

    chunks, full = with_engine(tiny(), use)
    assert len(chunks) > 2
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == full.token_ids
    assert [value for chunk in chunks for value in chunk.logprobs] == pytest.approx(full.logprobs, abs=1e-5)
    assert tuple(value for chunk in chunks for value in chunk.versions) == full.versions
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [full.finish_reason]


def test_closing_a_stream_frees_its_row_and_a_failed_stream_raises() -> None:
    async def use(engine: LocalEngine) -> None:
        stream: Any = engine.stream(PROMPTS[0], Sampling(max_tokens=2000))
        assert (await anext(stream)).token_ids
        await stream.aclose()
        await engine.generate(PROMPTS[1], Sampling(max_tokens=1))
        assert (await engine.health()).running == 0
        other: Any = engine.stream(PROMPTS[0], Sampling(max_tokens=2000))
        await anext(other)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            async for _ in other:
                pass

    with_engine(tiny(), use, max_batch=1)


# errors and close


@pytest.mark.parametrize(
    ("prompt", "error_message"), [([], "empty"), ([1, 260], "id 260;"), ([-1], "id -1;"), ([1] * 2048, "2048")]
)
def test_an_invalid_prompt_raises_an_error_that_is_not_retryable(prompt: list[int], error_message: str) -> None:
    async def use(engine: LocalEngine) -> None:
        with pytest.raises(EngineError, match=error_message) as caught:
            await engine.generate(prompt, Sampling())
        assert not caught.value.retryable
        await engine.generate(PROMPTS[0], Sampling(max_tokens=1))

    with_engine(tiny(), use)


def test_a_failed_step_fails_its_requests_and_later_requests_succeed() -> None:
    model = tiny()
    calls = []

    def fail_once(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("out of memory")

    async def use(engine: LocalEngine) -> None:
        handle = model.network.get_output_embeddings().register_forward_pre_hook(fail_once)
        with pytest.raises(EngineError, match="out of memory") as caught:
            await engine.generate(PROMPTS[0], Sampling(max_tokens=3, seed=1))
        assert caught.value.retryable
        assert "out of memory" in (await engine.health()).error
        handle.remove()
        await engine.generate(PROMPTS[0], Sampling(max_tokens=3, seed=1))
        assert (await engine.health()).error == ""

    with_engine(model, use)


def test_logits_that_are_not_finite_fail_their_request_and_do_not_affect_later_ones() -> None:
    model = tiny()
    embedding = model.network.get_input_embeddings()
    clean = embedding.weight.detach().clone()
    request = (PROMPTS[0], Sampling(max_tokens=3, seed=1))
    before = with_engine(tiny(), generate_all([request]))[0]

    async def use(engine: LocalEngine) -> Generation:
        embedding.weight.data.fill_(torch.nan)
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(PROMPTS[1], Sampling(max_tokens=5))
        embedding.weight.data.copy_(clean)
        return await engine.generate(*request)

    assert with_engine(model, use) == before


def test_close_fails_running_and_waiting_requests() -> None:
    model = tiny()
    attention = model.network.config._attn_implementation

    async def run() -> None:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=1))
        # greedy: these completions do not end before max_tokens
        sampling = Sampling(max_tokens=2000, temperature=0.0)
        tasks = [asyncio.create_task(engine.generate(PROMPTS[0], sampling)) for _ in range(3)]
        while not (await engine.health()).running:
            await asyncio.sleep(0.001)
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineError, match="closed"):
                await task
        for late in (
            engine.generate(PROMPTS[0], Sampling()),
            engine.load_weights(WeightSource.folder("x"), 1),
            engine.load_weights(WeightSource.adapter("x"), 1),
        ):
            with pytest.raises(EngineError, match="closed"):
                await late
        health = await engine.health()
        assert (health.ready, health.running, health.waiting) == (False, 0, 0)
        await engine.close()

    asyncio.run(run())
    assert model.network.config._attn_implementation == attention
