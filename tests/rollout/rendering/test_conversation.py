"""The trained tokens of a conversation are exactly those of its replies, as an episode would have sampled them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from keel.config import EpisodeLimits, RendererSettings
from keel.inference.protocol import Generation
from keel.rollout.rendering.conversation import render_conversation
from keel.rollout.rendering.renderer import RenderedTurn, Renderer
from keel.rollout.rendering.template_renderer import UnrenderableReply
from keel.rollout.trajectory import EpisodeTrajectory
from keel.training.model import tiny_models
from tests.rollout.rendering.test_renderer import OPENED, QWEN_LIKE, build_tokenizer

LIMITS = EpisodeLimits()
SPECIAL = tiny_models.SPECIAL_TOKENS
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: "<|" not in text)
roles = st.sampled_from(["system", "user", "tool", "assistant"])


@st.composite
def conversations(draw):
    """Return messages in any order of roles, with at least one reply that is not the first message."""
    drawn = draw(st.lists(st.tuples(roles, texts), min_size=1, max_size=6))
    messages = [{"role": "user", "content": draw(texts)}, *({"role": role, "content": text} for role, text in drawn)]
    messages.append({"role": "assistant", "content": draw(texts)})
    return messages


def chatml_ids(messages):
    """Write the tokens and the mask by hand: one token per byte, and the mask from the roles alone."""
    ids, mask = [], []
    for message in messages:
        head = [SPECIAL[tiny_models.IM_START], *f"{message['role']}\n".encode()]
        body = [*message["content"].encode(), SPECIAL[tiny_models.IM_END]]
        ids += [*head, *body, *b"\n"]
        mask += [*[False] * len(head), *[message["role"] == "assistant"] * len(body), False]
    return ids, mask


@given(conversations())
@settings(max_examples=60)
def test_the_mask_is_exactly_the_tokens_of_the_assistant_for_any_conversation(messages) -> None:
    trained = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    (sample,) = render_conversation(Renderer(build_tokenizer()), messages, trained, LIMITS).samples
    ids, mask = chatml_ids(messages)
    assert list(sample.token_ids) == ids[:-1]  # nothing follows the end of the last turn
    assert list(sample.trainable) == mask[:-1]


@given(conversations(), st.data())
@settings(max_examples=30)
def test_replies_that_are_not_trained_are_part_of_the_prompt(messages, data) -> None:
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = sorted(data.draw(st.sets(st.sampled_from(replies), min_size=1)))
    (sample,) = render_conversation(Renderer(build_tokenizer()), messages, trained, LIMITS).samples
    tokenizer, pairs = build_tokenizer(), zip(sample.trainable, sample.token_ids, strict=True)
    runs = [[int(token) for _, token in run] for key, run in itertools.groupby(pairs, lambda pair: pair[0]) if key]
    assert [tokenizer.decode(run) for run in runs] == [f"{messages[index]['content']}<|im_end|>" for index in trained]


def test_the_tokens_are_those_of_an_episode_that_samples_the_same_replies() -> None:
    renderer = Renderer(build_tokenizer())
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ]
    episode, turns = EpisodeTrajectory(), []
    for index in (2, 4):
        prompt = renderer.extend(turns, messages[:index])
        sampled = (*renderer._template_renderer.encode(messages[index]["content"]), SPECIAL[tiny_models.IM_END])
        episode.add_turn(prompt.ids, Generation(sampled, (0.0,) * len(sampled), (0,) * len(sampled), "stop", 1.0))
        turns.append(RenderedTurn(prompt, None, sampled, renderer.parse(sampled, prompt_ids=prompt.ids)))
    assert render_conversation(renderer, messages, [2, 4], LIMITS).samples == episode.build_samples(LIMITS).samples


THINKING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "first thought"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "reasoning_content": "second thought"},
]


def trained_texts(rendered, tokenizer):
    return [
        tokenizer.decode(np.asarray(sample.token_ids)[np.asarray(sample.trainable)].tolist())
        for sample in rendered.samples
    ]


def test_where_a_template_strips_earlier_thinking_every_reply_trains_once_in_its_own_sample() -> None:
    tokenizer = build_tokenizer(QWEN_LIKE)
    rendered = render_conversation(Renderer(tokenizer), THINKING, [1, 3], LIMITS)
    assert trained_texts(rendered, tokenizer) == [
        "<think>\nfirst thought\n</think>\n\nb<|im_end|>",
        "<think>\nsecond thought\n</think>\n\nd<|im_end|>",
    ]
    assert "first thought" not in tokenizer.decode(rendered.samples[1].token_ids)


def test_with_thinking_kept_the_conversation_is_one_sample() -> None:
    tokenizer = build_tokenizer(QWEN_LIKE)
    renderer = Renderer(tokenizer, RendererSettings(preserve_all_thinking=True))
    rendered = render_conversation(renderer, THINKING, [1, 3], LIMITS)
    assert len(rendered.samples) == 1
    assert tokenizer.decode(rendered.samples[0].token_ids).count("thought") == 2


def test_a_prompt_that_opens_the_thinking_is_continued_and_needs_thinking() -> None:
    tokenizer = build_tokenizer(OPENED)
    rendered = render_conversation(Renderer(tokenizer), THINKING[:2], [1], LIMITS)
    assert trained_texts(rendered, tokenizer) == ["first thought\n</think>\n\nb<|im_end|>"]
    with pytest.raises(UnrenderableReply, match="needs `reasoning_content`"):
        render_conversation(
            Renderer(tokenizer), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], [1], LIMITS
        )


def test_tool_calls_are_trained_and_tool_results_are_not() -> None:
    tokenizer = build_tokenizer(QWEN_LIKE)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "RESULT"},
        {"role": "assistant", "content": "done"},
    ]
    (text,) = trained_texts(render_conversation(Renderer(tokenizer), messages, [1, 3], LIMITS), tokenizer)
    assert '"add"' in text and "RESULT" not in text and text.count("<|im_end|>") == 2


def test_a_reply_with_the_token_that_ends_the_turn_is_an_error() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    with pytest.raises(UnrenderableReply, match="contains a token that ends the turn"):
        render_conversation(Renderer(build_tokenizer()), messages, [1], LIMITS)


def test_a_template_that_does_not_close_turns_gets_the_end_of_text_token() -> None:
    tokenizer = build_tokenizer(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    rendered = render_conversation(Renderer(tokenizer), messages, [1], LIMITS)
    assert trained_texts(rendered, tokenizer) == ["yes<|im_end|>"]


def test_a_conversation_over_the_limit_is_dropped_or_truncated() -> None:
    renderer = Renderer(build_tokenizer())
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x" * 100}]
    dropped = render_conversation(renderer, messages, [1], EpisodeLimits(max_sequence_tokens=50))
    assert not dropped.samples and dropped.counts["dropped_samples"] == 1
    cut = render_conversation(renderer, messages, [1], EpisodeLimits(max_sequence_tokens=50, on_overlength="truncate"))
    assert len(cut.samples[0]) == 50


def test_a_model_family_trains_the_same_tokens_as_its_template() -> None:
    pytest.importorskip("renderers", reason="pip install renderers")
    tokenizer = build_tokenizer(QWEN_LIKE)
    extra = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in extra])
    rendered = (
        render_conversation(Renderer(tokenizer, RendererSettings(family=family)), THINKING[:2], [1], LIMITS)
        for family in ("qwen3", "template")
    )
    family, template = (trained_texts(part, tokenizer) for part in rendered)
    assert family == template
