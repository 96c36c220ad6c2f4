"""From logits to tokens: the draw has the distribution it should, truncation cuts what it names, stops are found."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.config import Sampling
from keel.inference.local.prefix_cache import MIN_SHARED_TOKENS, PrefixCache, PrefixNode
from keel.inference.local.sampling import StopStringDetector, sample_tokens, truncate
from tests.support.policy_strategies import tiny

LOGITS = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)) * 3


def drawn(count: int, **settings: Any) -> np.ndarray:
    """How often each word came, with chance spread evenly: exact up to one draw a word."""
    chance = [(place + 0.5) / count for place in range(count)]
    tokens, _ = sample_tokens(LOGITS.repeat(count, 1), [Sampling(**settings)] * count, chance)
    return np.bincount(tokens, minlength=LOGITS.shape[1]) / count


@pytest.mark.parametrize("heat", [0.5, 1.0, 2.5])
def test_words_come_as_often_as_the_softmax_at_the_temperature_says(heat: float) -> None:
    wanted = (LOGITS[0] / heat).softmax(-1).numpy()
    assert np.abs(drawn(4000, temperature=heat) - wanted).max() < 1.01 / 4000


@given(st.integers(2, 700), st.floats(0.1, 4), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5))
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(words: int, heat: float, chance: list[float]) -> None:
    logits = torch.randn(len(chance), words, generator=torch.Generator().manual_seed(words), dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits.clone(), [Sampling(temperature=heat)] * len(chance), chance)
    every = (logits / heat).log_softmax(-1)
    edges = every.exp().cumsum(-1)
    for row, token in enumerate(tokens):
        before = float(edges[row, token - 1]) if token else 0.0
        assert before - 1e-9 <= chance[row] <= float(edges[row, token]) + 1e-9
        assert logprobs[row] == pytest.approx(float(every[row, token]), abs=1e-6)


def test_a_word_of_no_probability_never_comes() -> None:
    logits = torch.full((5, 1000), -torch.inf)
    logits[:, 700] = 0.0
    tokens, logprobs = sample_tokens(logits, [Sampling()] * 5, [0.0, 1e-300, 0.5, 1 - 2**-53, 0.25])
    assert tokens == [700] * 5
    assert logprobs == [0.0] * 5


def test_rows_with_broken_logits_say_so_and_others_do_not_care() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = torch.nan
    tokens, logprobs = sample_tokens(logits, [Sampling()] * 3, [0.3] * 3)
    assert np.isfinite(logprobs).tolist() == [True, False, True]
    assert tokens[0] == tokens[2]


def test_truncation_samples_from_what_it_keeps_and_records_the_whole_distribution() -> None:
    whole = LOGITS[0].softmax(-1)
    ordered, index = whole.sort(descending=True)
    for settings, kept in (
        ({"top_k": 3}, set(index[:3].tolist())),
        ({"top_p": 0.5}, set(index[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())),
        ({"min_p": 0.2}, set((whole >= 0.2 * whole.max()).nonzero()[:, 0].tolist())),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.01}, None),
    ):
        came = set(drawn(2000, **settings).nonzero()[0].tolist())
        assert kept is None or came == kept
        assert came <= set(index[:200].tolist())
        tokens, logprobs = sample_tokens(LOGITS.clone(), [Sampling(**settings)], [0.4])
        assert logprobs[0] == pytest.approx(float(whole[tokens[0]].log()), abs=1e-5)


def test_top_k_keeps_exactly_k_among_equals() -> None:
    shares = torch.ones(10)
    truncate(shares, Sampling(top_k=4))
    assert int(shares.count_nonzero()) == 4


@given(st.text(min_size=1, max_size=120), st.text(alphabet="abé€🙂", min_size=1, max_size=5), st.integers(0, 120))
def test_a_stop_string_is_found_with_the_token_that_completes_it(text: str, stop: str, place: int) -> None:
    tokenizer = tiny().tokenizer
    whole = text[:place] + stop + text[place:]
    # one token per byte: characters of several bytes are whole only after the last of them
    ids = list(whole.encode())
    finder = StopStringDetector(tokenizer, (stop,))
    found = next(size for size in range(1, len(ids) + 1) if finder.detect(ids[:size]))
    assert found == len(whole[: whole.index(stop) + len(stop)].encode())


def test_no_stop_string_decodes_nothing() -> None:
    assert not StopStringDetector(None, ()).detect([1, 2, 3])
    assert not StopStringDetector(None, ("",)).detect([1, 2, 3])


def test_only_the_end_of_a_long_answer_is_decoded() -> None:
    finder, longest = StopStringDetector(tiny().tokenizer, ("END",)), 0
    ids: list[int] = []
    for byte in (b"some words. " * 300) + b"END":
        ids.append(byte)
        longest = max(longest, len(ids) - finder.window_start)
        assert finder.detect(ids) == (len(ids) == 3603)
    assert longest < 100


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=12))
def test_prompts_stand_on_nodes_that_spell_them_and_share_long_beginnings(
    recipe: list[tuple[int, int, int]],
) -> None:
    chance = random.Random(0)
    stems = [tuple(chance.choices(range(3), k=30)) for _ in range(3)]
    prompts = [
        (*stems[stem % 3][: 10 * (stem + 1)], *(word for _ in range(size % 5 + 1))) for stem, size, word in recipe
    ]
    prefixes = PrefixCache()
    kept: list[PrefixNode] = []
    for some in (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]):
        new = prefixes.insert(some)
        assert all(node.parent is None or node.parent in [*kept, *new[: new.index(node)]] for node in new)
        kept += new
    assert len({node.ids for node in kept}) == len(kept)
    for prompt in prompts:
        leaf = prefixes.get(prompt)
        assert leaf is not None
        assert [token for node in leaf.kv_path for token in node.ids[node.start :]] == list(prompt)
        assert all(len(node) >= 1 for node in leaf.kv_path)


def test_a_long_common_beginning_gets_one_node_and_a_short_one_none() -> None:
    stem = tuple(range(MIN_SHARED_TOKENS))
    grown = PrefixCache().insert([(*stem, 100), (*stem, 101, 102), (*stem[:3], 7)])
    assert sorted(len(node) for node in grown) == [1, 2, 4, MIN_SHARED_TOKENS]
