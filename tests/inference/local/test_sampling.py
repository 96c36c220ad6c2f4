"""Sampling: draws follow the distribution, truncation removes what it should, and stop strings are detected."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.config import Sampling
from keel.inference.local.sampling import StopStringDetector, sample_tokens, truncate
from tests.support.policy_strategies import tiny

LOGITS = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)) * 3


def token_frequencies(count: int, **settings: Any) -> np.ndarray:
    """Return how often each token is drawn with evenly spaced uniforms: exact up to one draw per token."""
    uniforms = [(index + 0.5) / count for index in range(count)]
    tokens, _ = sample_tokens(LOGITS.repeat(count, 1), [Sampling(**settings)] * count, uniforms)
    return np.bincount(tokens, minlength=LOGITS.shape[1]) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_token_frequencies_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS[0] / temperature).softmax(-1).numpy()
    assert np.abs(token_frequencies(4000, temperature=temperature) - expected).max() < 1.01 / 4000


@given(st.integers(2, 700), st.floats(0.1, 4), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5))
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(
    vocab_size: int, temperature: float, uniforms: list[float]
) -> None:
    rng = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(len(uniforms), vocab_size, generator=rng, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits.clone(), [Sampling(temperature=temperature)] * len(uniforms), uniforms)
    expected = (logits / temperature).log_softmax(-1)
    edges = expected.exp().cumsum(-1)
    for row, token in enumerate(tokens):
        before = float(edges[row, token - 1]) if token else 0.0
        assert before - 1e-9 <= uniforms[row] <= float(edges[row, token]) + 1e-9
        assert logprobs[row] == pytest.approx(float(expected[row, token]), abs=1e-6)


def test_a_token_with_zero_probability_is_never_drawn() -> None:
    logits = torch.full((5, 1000), -torch.inf)
    logits[:, 700] = 0.0
    tokens, logprobs = sample_tokens(logits, [Sampling()] * 5, [0.0, 1e-300, 0.5, 1 - 2**-53, 0.25])
    assert tokens == [700] * 5
    assert logprobs == [0.0] * 5


def test_a_row_with_nan_logits_gets_a_nan_logprob_and_does_not_affect_other_rows() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 5] = torch.nan
    tokens, logprobs = sample_tokens(logits, [Sampling()] * 3, [0.3] * 3)
    assert np.isfinite(logprobs).tolist() == [True, False, True]
    assert tokens[0] == tokens[2]


def test_truncation_restricts_draws_but_logprobs_are_of_the_full_distribution() -> None:
    probs = LOGITS[0].softmax(-1)
    ordered, index = probs.sort(descending=True)
    for settings, expected in (
        ({"top_k": 3}, set(index[:3].tolist())),
        ({"top_p": 0.5}, set(index[: int((ordered.cumsum(0) < 0.5).sum()) + 1].tolist())),
        ({"min_p": 0.2}, set((probs >= 0.2 * probs.max()).nonzero()[:, 0].tolist())),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.01}, None),
    ):
        drawn = set(token_frequencies(2000, **settings).nonzero()[0].tolist())
        assert expected is None or drawn == expected
        assert drawn <= set(index[:200].tolist())
        tokens, logprobs = sample_tokens(LOGITS.clone(), [Sampling(**settings)], [0.4])
        assert logprobs[0] == pytest.approx(float(probs[tokens[0]].log()), abs=1e-5)


def test_top_k_keeps_exactly_k_of_equal_values() -> None:
    exp_logits = torch.ones(10)
    truncate(exp_logits, Sampling(top_k=4))
    assert int(exp_logits.count_nonzero()) == 4


@given(st.text(min_size=1, max_size=120), st.text(alphabet="abé€🙂", min_size=1, max_size=5), st.integers(0, 120))
def test_a_stop_string_is_detected_at_the_token_that_completes_it(text: str, stop: str, position: int) -> None:
    tokenizer = tiny().tokenizer
    full_text = text[:position] + stop + text[position:]
    # one token per byte: a character of several bytes is complete only after the last of them
    ids = list(full_text.encode())
    detector = StopStringDetector(tokenizer, (stop,))
    detected = next(size for size in range(1, len(ids) + 1) if detector.detect(ids[:size]))
    assert detected == len(full_text[: full_text.index(stop) + len(stop)].encode())


def test_without_a_stop_string_nothing_is_decoded() -> None:
    assert not StopStringDetector(None, ()).detect([1, 2, 3])
    assert not StopStringDetector(None, ("",)).detect([1, 2, 3])


def test_only_the_end_of_a_long_completion_is_decoded() -> None:
    detector, longest = StopStringDetector(tiny().tokenizer, ("END",)), 0
    ids: list[int] = []
    for byte in (b"some words. " * 300) + b"END":
        ids.append(byte)
        longest = max(longest, len(ids) - detector.window_start)
        assert detector.detect(ids) == (len(ids) == 3603)
    assert longest < 100
