"""The engine in this process: exact log-probs, seeds that depend on nobody else, joining and leaving, and its end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from keel.config import EngineSettings, Sampling, TrainerSettings
from keel.inference.local import decoders
from keel.inference.local.continuous_batch import MAX_PREFILL_TOKENS, ContinuousBatch, GenerationRequest
from keel.inference.local.decode_attention import INITIAL_CAPACITY
from keel.inference.local.decoders import BatchedDecoder, SequentialDecoder, select_decoder
from keel.inference.local.local_engine import LocalEngine
from keel.inference.local.sampling import StopStringDetector
from keel.inference.protocol import EngineError, Generation, WeightSource
from keel.training import Model, Sample, Trainer
from tests.support.policy_strategies import FAMILIES, tiny

ROOT = [257, *b"user\nWhich is larger, "]
PROMPTS = [[*ROOT, *b"3 or 5?"], [*ROOT, *b"12 or 7, of these two?"], [*b"What is there?"], [*ROOT, *b"3"], [42]]


def ask(model: Model, use: Callable[[LocalEngine], Awaitable[Any]], **settings: Any) -> Any:
    """What `use` returns with an engine on the model, which is closed afterwards."""

    async def run() -> Any:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings(**settings))
        try:
            return await asyncio.wait_for(use(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(run())


def together(
    requests: Sequence[tuple[Sequence[int], Sampling]],
) -> Callable[[LocalEngine], Awaitable[list[Generation]]]:
    async def use(engine: LocalEngine) -> list[Generation]:
        return list(await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in requests)))

    return use


def sample_of(prompt: Sequence[int], found: Generation) -> Sample:
    ids = np.array([*prompt, *found.token_ids])
    return Sample(
        token_ids=ids,
        trainable=np.arange(len(ids)) >= len(prompt),
        advantage=0.0,
        sampler_logprobs=np.zeros(len(ids)),
        temperature=found.temperature,
    )


def off_trainer(model: Model, prompts: Sequence[Sequence[int]], found: Sequence[Generation]) -> float:
    """Mean difference between the recorded log-probs and the trainer's."""
    samples = [sample_of(prompt, one) for prompt, one in zip(prompts, found, strict=True)]
    truth = Trainer(model, TrainerSettings()).logprobs(samples)
    wanted = torch.cat([one[len(prompt) :] for prompt, one in zip(prompts, truth, strict=True)])
    recorded = torch.tensor([value for one in found for value in one.logprobs])
    return float((recorded - wanted).abs().mean())


def request(prompt: Sequence[int], **sampling: Any) -> GenerationRequest:
    settings = Sampling(**sampling)
    stops = frozenset(settings.stop_token_ids)
    return GenerationRequest(tuple(prompt), settings, stops, StopStringDetector(None, ()), settings.max_tokens)


# exactness


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_the_trainers_at_any_temperature(family: str) -> None:
    model = tiny(family)
    asked = [
        (prompt, Sampling(temperature=heat, max_tokens=24, seed=number))
        for number, (prompt, heat) in enumerate((p, h) for p in PROMPTS for h in (1.0, 0.6, 1.7))
    ]
    found = ask(model, together(asked))
    assert sum(len(one.token_ids) for one in found) > 200  # some end by themselves
    assert off_trainer(model, [prompt for prompt, _ in asked], found) < 1e-5


def test_models_are_batched_unless_they_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    for family in FAMILIES:
        assert isinstance(select_decoder(tiny(family).network, family), BatchedDecoder), family
    with caplog.at_level(logging.WARNING, logger="keel"):
        assert isinstance(select_decoder(tiny("tiny-mamba").network, "tiny-mamba"), SequentialDecoder)
    assert "recurrent state" in caplog.text


def test_a_model_with_a_state_is_decoded_alone_and_exact() -> None:
    model = tiny("tiny-mamba")
    asked = [(prompt, Sampling(max_tokens=5, seed=1, temperature=0.8)) for prompt in PROMPTS[:3]]
    assert off_trainer(model, PROMPTS[:3], ask(model, together(asked))) < 1e-5


def test_half_precision_is_sampled_as_it_is_trained() -> None:
    for family in ("tiny", "tiny-gpt-oss"):
        model = tiny(family, dtype="bfloat16")
        assert isinstance(select_decoder(model.network, family), BatchedDecoder)
        asked = [(prompt, Sampling(max_tokens=12, seed=3)) for prompt in PROMPTS]
        assert off_trainer(model, PROMPTS, ask(model, together(asked))) < 0.1


def test_answers_longer_than_the_first_room_stay_exact() -> None:
    model = tiny()
    asked = [(prompt, Sampling(max_tokens=150, seed=9)) for prompt in PROMPTS[:2]]
    found = ask(model, together(asked))
    assert off_trainer(model, PROMPTS[:2], found) < 1e-5


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-gpt-oss"])
def test_long_answers_that_spill_stay_exact_and_reserve_nothing_for_others(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "SPILL_TOKENS", 8)
    model = tiny(family)
    asked = [(PROMPTS[n % 2], Sampling(max_tokens=size, seed=n)) for n, size in enumerate((40, 3, 20, 17, 9, 40))]

    async def use(engine: LocalEngine) -> list[Generation]:
        found = await together(asked)(engine)
        assert engine._batch.decoder.kv_cache.capacity == INITIAL_CAPACITY  # type: ignore[attr-defined]
        return found

    found = ask(model, use, max_batch=4)
    assert max(len(one.token_ids) for one in found) > 2 * 16
    assert off_trainer(model, [prompt for prompt, _ in asked], found) < 1e-5


def test_long_prompts_are_exact_with_a_window_and_without() -> None:
    long = np.random.default_rng(0).integers(0, 200, 700).tolist()
    for family in ("tiny", "tiny-gemma2"):
        model = tiny(family)
        asked = [(ids, Sampling(max_tokens=4, seed=1)) for ids in (long, long[:600])]
        found = ask(model, together(asked))
        assert off_trainer(model, [long, long[:600]], found) < 1e-5, family


# sharing and seeds


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma3", "tiny-gpt-oss", "tiny-mixtral"])
def test_an_answer_depends_on_no_other_request(family: str) -> None:
    asked = [
        (prompt, Sampling(max_tokens=6 + number, seed=number % 3)) for number, prompt in enumerate([*PROMPTS, *PROMPTS])
    ]
    alone = [ask(tiny(family), together([one]))[0] for one in asked[:5]]
    at_once = ask(tiny(family), together(asked))
    backwards = ask(tiny(family), together(asked[::-1]))[::-1]
    crowded = ask(tiny(family), together(asked), max_batch=3)
    for others in (at_once, backwards, crowded):
        for first, second in zip(alone, others, strict=False):
            assert first.token_ids == second.token_ids
            assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)
    assert [one.token_ids for one in at_once] == [one.token_ids for one in backwards]


def test_equal_seeds_give_equal_answers_and_others_do_not() -> None:
    asked = [(PROMPTS[0], Sampling(max_tokens=12, seed=seed)) for seed in (5, 5, 6)] + [
        (PROMPTS[0], Sampling(max_tokens=12)) for _ in range(2)
    ]
    found = ask(tiny(), together(asked))
    assert found[0] == found[1]
    assert len({one.token_ids for one in found[1:]}) == 4


def test_a_group_computes_its_prompt_once_and_nobody_copies_it() -> None:
    decoder = counting(tiny())
    batch = ContinuousBatch(decoder, 8)
    batch.waiting.extend(request(PROMPTS[0], seed=number, max_tokens=5) for number in range(12))
    batch.step(0)
    leaf = batch.rows[0].leaf
    assert decoder.computed == [len(PROMPTS[0])]
    assert all(row.leaf is leaf for row in [*batch.rows, *batch.waiting])
    while batch.busy:
        batch.step(0)
    # the four that waited computed no prompt of their own
    assert decoder.computed == [len(PROMPTS[0]), 8, 8, 8, 8, 4, 4, 4, 4]


def test_what_prompts_have_in_common_is_computed_once() -> None:
    decoder = counting(tiny())
    batch = ContinuousBatch(decoder, 8)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    batch.waiting.extend(request(prompt, max_tokens=2) for prompt in prompts)
    batch.step(0)
    distinct = {tuple(prompt[: size + 1]) for prompt in prompts for size in range(len(prompt))}
    assert decoder.computed == [len(distinct)]


def test_a_prompt_that_is_not_kept_is_dropped_with_its_last_request() -> None:
    decoder = counting(tiny(), cache_bytes=0)
    batch = ContinuousBatch(decoder, 8)
    for _ in range(2):
        batch.waiting.append(request(PROMPTS[0], max_tokens=1))
        batch.step(0)
        assert not batch.busy
        assert len(decoder.prefix_cache) == 0
    assert decoder.computed == [len(PROMPTS[0])] * 2


def counting(model: Model, **options: Any) -> Any:
    """A decoder that notes how many tokens each forward pass had."""

    class Counting(BatchedDecoder):
        computed: list[int] = []

        def _forward(self, nodes: Any, rows: Any) -> torch.Tensor:
            self.computed.append(sum(len(node) for node in nodes) + len(rows))
            return super()._forward(nodes, rows)

    select_decoder(model.network, "tiny")
    decoder = Counting(model.network, **options)
    decoder.computed = []
    return decoder


# joining and leaving


def test_requests_join_between_steps_and_leave_at_once_in_order() -> None:
    batch = ContinuousBatch(counting(tiny()), 2)
    asked = [request(prompt, max_tokens=size) for prompt, size in zip(PROMPTS, (3, 1, 2, 4, 1), strict=True)]
    batch.waiting.extend(asked)
    running = []
    while batch.busy:
        batch.step(0)
        running.append([asked.index(row) for row in batch.rows])
    # after each step those that are done are gone; the next in order joins in the next step
    assert running == [[0], [0, 2], [], [3], [3], [3], []]
    assert [len(one.future.result().token_ids) for one in asked] == [3, 1, 2, 4, 1]


def test_long_prompts_do_not_all_join_in_one_step() -> None:
    batch = ContinuousBatch(counting(tiny()), 8)
    batch.waiting.extend(request([number] * (MAX_PREFILL_TOKENS // 2 + 1), max_tokens=3) for number in range(3))
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

    found = ask(tiny(), use, max_batch=1)
    assert len(found.token_ids) == 3


def test_a_cancelled_request_that_waits_is_never_started() -> None:
    decoder = counting(tiny())
    batch = ContinuousBatch(decoder, 4)
    batch.waiting.append(request(PROMPTS[0]))
    batch.waiting[0].future.cancel()
    batch.step(0)
    assert not batch.busy
    assert decoder.computed == []


def test_rows_that_move_into_a_gap_stay_exact() -> None:
    model = tiny("tiny-gemma3")
    lengths = (20, 2, 9, 3, 14, 1, 20, 5)
    asked = [(PROMPTS[n % 3], Sampling(max_tokens=size, seed=n)) for n, size in enumerate(lengths)]
    found = ask(model, together(asked), max_batch=5)
    assert tuple(len(one.token_ids) for one in found) == lengths
    assert off_trainer(model, [prompt for prompt, _ in asked], found) < 1e-5


def test_rows_may_leave_and_fail_in_the_step_in_which_others_join() -> None:
    model = tiny()
    batch = ContinuousBatch(counting(model), 8)
    first = [request(PROMPTS[n], seed=n, max_tokens=3) for n in range(2)]
    later = [request(PROMPTS[n % 3], seed=n, max_tokens=6) for n in range(6)]
    batch.waiting.extend(first)
    batch.step(0)
    batch.step(0)
    batch.waiting.extend(later)
    batch.step(0)  # both of the first leave, and rows that have stored nothing take their places
    assert [row in later for row in batch.rows] == [True] * 6
    while batch.busy:
        batch.step(0)
    found = [one.future.result() for one in (*first, *later)]
    assert off_trainer(model, [one.prompt for one in (*first, *later)], found) < 1e-5
    batch.waiting.extend(request(PROMPTS[n % 3]) for n in range(8))
    batch.decoder.compute_logits = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        batch.step(0)
    batch.fail(lambda: EngineError("it failed"), include_waiting=True)
    assert not batch.busy


def test_the_event_loop_stays_free() -> None:
    async def use(engine: LocalEngine) -> int:
        task = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=100)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert ask(tiny(), use) > 100


# how answers end


def test_greedy_takes_the_likeliest_token_and_records_its_logprob() -> None:
    model = tiny()
    found = ask(model, together([(PROMPTS[0], Sampling(temperature=0, max_tokens=8))]))[0]
    ids = torch.tensor([[*PROMPTS[0], *found.token_ids]])
    with torch.no_grad():
        every = model.network(input_ids=ids, use_cache=False).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    assert list(found.token_ids) == every.argmax(-1).tolist()
    assert found.logprobs == pytest.approx(every.amax(-1).tolist(), abs=1e-5)
    assert found.temperature == 0


def test_stop_ids_and_the_models_own_end_are_kept_and_end_the_answer() -> None:
    free = ask(tiny(), together([(PROMPTS[0], Sampling(max_tokens=30, seed=2))]))[0]
    where = next(place for place in range(3, 30) if free.token_ids[place] not in free.token_ids[:place])
    stop = free.token_ids[where]
    found = ask(tiny(), together([(PROMPTS[0], Sampling(max_tokens=30, seed=2, stop_token_ids=(stop,)))]))[0]
    assert found.token_ids == free.token_ids[: where + 1]
    assert (free.finish_reason, found.finish_reason) == ("length", "stop")
    model = tiny()
    with torch.no_grad():  # the end of a turn is by far the likeliest
        model.network.get_output_embeddings().weight[258] *= 50
    ended = ask(model, together([(PROMPTS[0], Sampling(max_tokens=200, seed=2))]))[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == 258


def test_a_stop_string_across_tokens_ends_the_answer_and_its_tokens_are_kept() -> None:
    model = tiny()
    free = ask(model, together([(PROMPTS[0], Sampling(max_tokens=40, seed=4))]))[0]
    text = [model.tokenizer.decode(list(free.token_ids[:size])) for size in range(41)]
    stop = text[40][5:9]
    first = next(size for size in range(41) if stop in text[size])
    found = ask(model, together([(PROMPTS[0], Sampling(max_tokens=40, seed=4, stop=("never", stop)))]))[0]
    assert found.finish_reason == "stop"
    assert found.token_ids == free.token_ids[:first]


def test_an_answer_ends_where_the_models_positions_end() -> None:
    model = tiny()
    model.network.config.max_position_embeddings = len(PROMPTS[0]) + 3
    found = ask(model, together([(PROMPTS[0], Sampling(max_tokens=30))]))[0]
    assert (len(found.token_ids), found.finish_reason) == (3, "length")


# errors and the end


@pytest.mark.parametrize(("prompt", "says"), [([], "empty"), ([1, 260], "260"), ([-1], "-1"), ([1] * 2048, "2048")])
def test_a_wrong_prompt_is_refused_for_good(prompt: list[int], says: str) -> None:
    async def use(engine: LocalEngine) -> None:
        with pytest.raises(EngineError, match=says) as caught:
            await engine.generate(prompt, Sampling())
        assert not caught.value.retryable
        await engine.generate(PROMPTS[0], Sampling(max_tokens=1))

    ask(tiny(), use)


def test_a_step_that_fails_ends_its_requests_and_later_ones_are_served() -> None:
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

    ask(model, use)


def test_logits_that_are_not_finite_fail_their_request_and_spoil_no_other() -> None:
    model = tiny()
    embedding = model.network.get_input_embeddings()
    clean = embedding.weight.detach().clone()
    asked = (PROMPTS[0], Sampling(max_tokens=3, seed=1))
    before = ask(tiny(), together([asked]))[0]

    async def use(engine: LocalEngine) -> Generation:
        embedding.weight.data.fill_(torch.nan)
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(PROMPTS[1], Sampling(max_tokens=5))
        embedding.weight.data.copy_(clean)
        return await engine.generate(*asked)

    assert ask(model, use) == before


def test_close_ends_what_runs_and_what_waits() -> None:
    model = tiny()
    attention = model.network.config._attn_implementation

    async def run() -> None:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=1))
        tasks = [asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=2000))) for _ in range(3)]
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
