"""Prompts extend the sampled tokens or have a split reason; thinking is kept as the settings say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from keel.config import EpisodeLimits, RendererSettings
from keel.errors import ConfigError
from keel.inference.protocol import Generation
from keel.rollout.rendering.renderer import RenderedTurn, Renderer
from keel.rollout.trajectory import EpisodeTrajectory
from keel.training.model import tiny_models
from keel.training.model.model_source import resolve_model

KEEP_ALL = RendererSettings(preserve_all_thinking=True)
KEEP_IN_TOOL_CALLS = RendererSettings(preserve_thinking_between_tool_calls=True)

# like Qwen3: thinking is rendered only after the last user message, and empty thinking in the last message
QWEN_LIKE = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\\n' -}}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- set content = m.content -%}{%- set reasoning = '' -%}
{%- if m.reasoning_content is string -%}{%- set reasoning = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()

# like DeepSeek-R1: the prompt opens the thinking, and all earlier thinking is removed from the content
OPENED = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

# empty thinking is rendered after the last user message, and not before it
SHOWS_EMPTY = QWEN_LIKE.replace("(loop.last or reasoning)", "true").replace(
    "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}", "{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
)

# tools are rendered before the last user message, so that every new message moves them
MOVES_TOOLS = (
    "{% for m in messages %}{% if loop.last and m.role == 'user' %}{{ '[tools]' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(template=None):
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def smollm2():
    return AutoTokenizer.from_pretrained(resolve_model("smollm2-135m").folder)


class Conversation:
    """A conversation with scripted completions, rendered and recorded as by a PolicyClient."""

    def __init__(self, tokenizer, settings=None, tools=None):
        self.tokenizer, self.renderer, self.tools = tokenizer, Renderer(tokenizer, settings), tools
        self.messages, self.turns, self.trajectory = [], [], EpisodeTrajectory()

    def add(self, *messages, completion):
        """Append the messages and the completion; return the prompt."""
        self.messages += messages
        prompt = self.renderer.extend(self.turns, self.messages, self.tools)
        ids = tuple(
            self.tokenizer.encode(completion, add_special_tokens=False) if isinstance(completion, str) else completion
        )
        reply = self.renderer.parse(ids, prompt_ids=prompt.ids)
        self.turns.append(RenderedTurn(prompt, self.tools, ids, reply))
        generation = Generation(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop", 1.0)
        self.trajectory.add_turn(prompt.ids, generation, prompt.split_reason)
        self.messages.append(reply)
        return prompt

    def samples(self):
        return self.trajectory.build_samples(EpisodeLimits(max_sequence_tokens=100_000))

    def decode(self, prompt):
        return self.tokenizer.decode(prompt.ids)


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "call_0"}


THOUGHT = "<think>\nhm {0}\n</think>\n\nanswer {0}<|im_end|>"
CALL = '<think>\nhm {0}\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {{"x": {0}}}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    "completion", ["fine<|im_end|>", "  fine \n<|im_end|>", "cut off", "odd<|endoftext|>", "<|im_end|>"]
)
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_the_next_prompt_extends_the_tokens_so_far(model, completion, smollm2):
    tokenizer = smollm2 if model == "smollm2" else build_tokenizer()
    chat = Conversation(tokenizer)
    first = chat.add(user("Hello"), completion=completion)
    second = chat.add(user("And?"), completion="ok<|im_end|>")
    sampled = tuple(tokenizer.encode(completion, add_special_tokens=False))
    assert second.ids[: len(first.ids) + len(sampled)] == first.ids + sampled
    assert second.split_reason is None
    body = completion.removesuffix("<|im_end|>") + "<|im_end|>"
    assert chat.decode(second) == (
        chat.decode(first) + body + "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_first_prompt_is_rendered_by_the_chat_template(smollm2):
    messages = [{"role": "system", "content": "Be kind."}, user("Hello")]
    expected = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Renderer(smollm2).render(messages) == expected


def test_stop_ids_are_the_end_of_text_and_the_end_of_turn(smollm2):
    assert Renderer(smollm2).stop_token_ids == (2,)
    assert Renderer(build_tokenizer()).stop_token_ids == (tiny_models.SPECIAL_TOKENS[tiny_models.IM_END],)


@given(st.lists(st.lists(st.integers(0, tiny_models.VOCAB_SIZE - 1), min_size=1, max_size=12), min_size=1, max_size=5))
@settings(max_examples=100)
def test_any_sampled_tokens_are_extended_and_never_tokenized_again(completions):
    """Also broken UTF-8, special tokens in the middle, and completions with or without an end token."""
    chat = Conversation(build_tokenizer())
    for completion in completions:
        assert chat.add(user("next"), completion=completion).split_reason is None
    (sample,) = chat.samples().samples
    trained = [token for token, trains in zip(sample.token_ids, sample.trainable, strict=True) if trains]
    assert trained == [token for completion in completions for token in completion]


def test_a_non_canonical_tokenization_is_kept(smollm2):
    chat = Conversation(smollm2)
    letters = tuple(token for letter in "hello" for token in smollm2.encode(letter, add_special_tokens=False))
    assert letters != tuple(smollm2.encode("hello", add_special_tokens=False))
    prompt = chat.renderer.extend([], [user("Hi")])
    reply = chat.renderer.parse(letters, prompt_ids=prompt.ids)
    assert reply["content"] == "hello"
    following = chat.renderer.extend([RenderedTurn(prompt, None, letters, reply)], [user("Hi"), reply, user("more")])
    assert following.ids[len(prompt.ids) :][: len(letters)] == letters


def test_a_reply_without_whitespace_or_thinking_is_recognized():
    chat = Conversation(build_tokenizer())
    chat.add(user("a"), completion="<think>hm</think> yes <|im_end|>")
    chat.messages[-1] = {"role": "assistant", "content": "yes"}
    assert chat.add(user("b"), completion="ok<|im_end|>").split_reason is None
    assert chat.add(user("c"), completion="ok<|im_end|>").split_reason is None
    assert len(chat.samples().samples) == 1


def test_a_changed_history_is_a_compaction():
    chat = Conversation(build_tokenizer())
    chat.add(user("a"), completion="b<|im_end|>")
    chat.messages = [user("summary of a and b")]
    prompt = chat.add(user("c"), completion="d<|im_end|>")
    assert prompt.split_reason == "compaction"
    assert chat.add(user("e"), completion="f<|im_end|>").split_reason is None
    assert [sample.split_reason for sample in chat.samples().samples] == ["start", "compaction"]


def test_a_repeated_prompt_is_a_branch_and_changed_tools_have_their_own_reason():
    chat = Conversation(build_tokenizer(QWEN_LIKE))
    chat.add(user("a"), completion="b<|im_end|>")
    assert chat.renderer.extend(chat.turns, [user("a")]).split_reason == "branch"
    assert chat.renderer.extend(chat.turns, [*chat.messages, user("c")], [{"name": "f"}]).split_reason == "tools"


def test_stripped_thinking_splits_at_a_user_message_and_not_at_a_tool_result():
    chat = Conversation(build_tokenizer(QWEN_LIKE))
    chat.add(user("q1"), completion=CALL.format(1))
    assert chat.add(tool("r1"), completion=CALL.format(2)).split_reason is None
    assert chat.add(tool("r2"), completion=THOUGHT.format(3)).split_reason is None
    after = chat.add(user("q2"), completion=THOUGHT.format(4))
    assert after.split_reason == "thinking"
    assert "hm" not in chat.decode(after)
    result = chat.samples()
    assert [sample.split_reason for sample in result.samples] == ["start", "thinking"]
    assert result.counts["split_thinking"] == 1


def test_completions_without_thinking_do_not_split():
    chat = Conversation(build_tokenizer(QWEN_LIKE))
    for number in range(4):
        assert chat.add(user(f"q{number}"), completion="plain<|im_end|>").split_reason is None
    assert len(chat.samples().samples) == 1


@pytest.mark.parametrize("template", [QWEN_LIKE, OPENED])
def test_kept_thinking_makes_one_sample_of_many_user_messages(template):
    opening = "" if template == OPENED else "<think>\n"
    chat = Conversation(build_tokenizer(template), KEEP_ALL)
    for number in range(4):
        prompt = chat.add(user(f"q{number}"), completion=f"{opening}hm {number}\n</think>\n\na<|im_end|>")
        assert prompt.split_reason is None
    assert [f"hm {number}" in chat.decode(prompt) for number in range(4)] == [True, True, True, False]
    assert len(chat.samples().samples) == 1


def test_thinking_opened_by_the_prompt_is_parsed_and_later_stripped():
    chat = Conversation(build_tokenizer(OPENED))
    chat.add(user("q"), completion="hm\n</think>\n\na<|im_end|>")
    assert chat.messages[-1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    prompt = chat.add(user("r"), completion="x\n</think>\n\na<|im_end|>")
    assert prompt.split_reason == "thinking"
    assert "hm" not in chat.decode(prompt)


def test_thinking_kept_between_tool_calls_is_stripped_at_the_next_user_message():
    # this template strips thinking even between tool calls
    chat = Conversation(build_tokenizer(OPENED), KEEP_IN_TOOL_CALLS)
    chat.add(user("q1"), completion="hm 1\n</think>\n\ncall<|im_end|>")
    second = chat.add(tool("r1"), completion="hm 2\n</think>\n\ndone<|im_end|>")
    assert second.split_reason is None
    third = chat.add(user("q2"), completion="hm 3\n</think>\n\ndone<|im_end|>")
    assert third.split_reason == "thinking"
    assert "hm" not in chat.decode(third)
    assert len(chat.samples().samples) == 2
    without = Conversation(build_tokenizer(OPENED))
    without.add(user("q1"), completion="hm 1\n</think>\n\ncall<|im_end|>")
    assert without.add(tool("r1"), completion="hm 2\n</think>\n\ndone<|im_end|>").split_reason == "thinking"


@given(st.lists(st.sampled_from(["user", "tool", "compact"]), max_size=8), st.sampled_from([QWEN_LIKE, OPENED]))
@settings(max_examples=40)
def test_with_thinking_kept_each_compaction_starts_one_more_sample(moves, template):
    chat = Conversation(build_tokenizer(template), KEEP_ALL)
    opening = "" if template == OPENED else "<think>\n"
    chat.add(user("q"), completion=f"{opening}hm\n</think>\n\na<|im_end|>")
    for number, move in enumerate(moves):
        if move == "compact":
            # keep the last reply, with its thinking
            chat.messages = [user(f"summary {number}"), *chat.messages[-1:]]
        message = tool("r") if move == "tool" else user("q")
        prompt = chat.add(message, completion=f"{opening}hm {number}\n</think>\n\na<|im_end|>")
        if move == "compact":
            assert "hm" in chat.decode(prompt)
    result = chat.samples()
    compactions = moves.count("compact")
    assert len(result.samples) == 1 + compactions
    assert result.counts["samples"] == 1 + compactions
    assert {key: value for key, value in result.counts.items() if key.startswith("split_")} == (
        {"split_compaction": compactions} if compactions else {}
    )


def test_splits_by_stripped_thinking_are_counted():
    chat = Conversation(build_tokenizer(QWEN_LIKE))
    for number in range(3):
        chat.add(user("q"), completion=THOUGHT.format(number))
    chat.messages = [user("summary")]
    chat.add(user("q"), completion=THOUGHT.format(9))
    counts = chat.samples().counts
    assert (counts["samples"], counts["split_thinking"], counts["split_compaction"]) == (4, 2, 1)
    assert counts["sampled_tokens"] == counts["trained_tokens"]


def test_a_template_that_changes_earlier_text_splits_with_reason_template():
    chat = Conversation(build_tokenizer(MOVES_TOOLS))
    chat.add(user("a"), completion="b<|im_end|>")
    prompt = chat.add(user("c"), completion="d<|im_end|>")
    assert prompt.split_reason == "template"
    assert chat.decode(prompt).count("[tools]") == 1


def test_empty_thinking_that_only_some_positions_render_does_not_split():
    assert SHOWS_EMPTY.endswith("<think>\\n' -}}{%- endif -%}")
    chat = Conversation(build_tokenizer(SHOWS_EMPTY), KEEP_ALL)
    completions = [f"hm {number}\n</think>\n\na<|im_end|>" for number in range(4)]
    assert chat.add(user("q"), completion=completions[0]).split_reason is None
    assert chat.add(tool("r"), completion=completions[1]).split_reason is None
    assert chat.add(user("q"), completion=completions[2]).split_reason is None
    assert chat.add(tool("r"), completion=completions[3]).split_reason is None
    assert len(chat.samples().samples) == 1


def test_tool_calls_are_parsed_and_malformed_ones_stay_text():
    renderer = Renderer(build_tokenizer())
    good = renderer.parse(
        build_tokenizer().encode('So: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>')
    )
    assert good["content"] == "So:"
    assert good["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ]
    for text in (
        "<tool_call>{bad</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>",
    ):
        assert renderer.parse(build_tokenizer().encode(text)) == {"role": "assistant", "content": text}


def test_unfinished_thinking_has_no_content():
    assert Renderer(build_tokenizer()).parse(build_tokenizer().encode("<think>\nwell")) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "well",
    }


def test_tool_calls_and_thinking_become_text_for_templates_without_support():
    chat = Conversation(build_tokenizer())
    chat.add(user("q"), completion=CALL.format(1))
    calls = chat.messages[-1]
    text = chat.tokenizer.decode(Renderer(build_tokenizer()).render([user("other"), calls, tool("2")]))
    assert (
        '<think>\nhm 1\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    )


def test_tools_are_rejected_if_the_template_does_not_support_them():
    with pytest.raises(ConfigError, match="does not support tools"):
        Renderer(build_tokenizer()).render([user("q")], [{"name": "f"}])


def test_a_tokenizer_without_a_template_is_rejected():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer)


# ---- the renderers library


def build_family_tokenizer():
    tokenizer = build_tokenizer(QWEN_LIKE)
    extra = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in extra])
    return tokenizer


def test_the_family_is_found_by_model_name_or_snapshot_folder():
    pytest.importorskip("renderers")
    for name in ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/abc123"):
        tokenizer = build_family_tokenizer()
        tokenizer.name_or_path = name
        assert Renderer(tokenizer).family == "qwen3"
        assert Renderer(tokenizer, RendererSettings(family="template")).family is None
    assert Renderer(build_tokenizer()).family is None


def test_an_unknown_or_incompatible_family_is_rejected():
    pytest.importorskip("renderers")
    with pytest.raises(ConfigError, match=r'renderer.family = "qwen33" is not known; did you mean qwen3\?'):
        Renderer(build_tokenizer(), RendererSettings(family="qwen33"))
    with pytest.raises(ConfigError, match="does not fit the tokenizer"):
        Renderer(build_tokenizer(), RendererSettings(family="qwen3"))


def test_without_the_library_the_chat_template_is_used(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "renderers", None)
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    tokenizer = build_family_tokenizer()
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    assert Renderer(tokenizer).family is None
    with pytest.raises(ConfigError, match="pip install renderers"):
        Renderer(tokenizer, RendererSettings(family="qwen3"))


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({}, [None, None, None, "thinking", None]),
        ({"preserve_thinking_between_tool_calls": True}, [None, None, None, "thinking", None]),
        ({"preserve_all_thinking": True}, [None, None, None, None, None]),
    ],
)
def test_the_library_keeps_thinking_as_the_settings_say(settings, reasons):
    pytest.importorskip("renderers")
    chat = Conversation(build_family_tokenizer(), RendererSettings(family="qwen3", **settings))
    prompts = [
        chat.add(user("q1"), completion=CALL.format(1)),
        chat.add(tool("r1"), completion=CALL.format(2)),
        chat.add(tool("r2"), completion=THOUGHT.format(3)),
        chat.add(user("q2"), completion=CALL.format(4)),
        chat.add(tool("r4"), completion=THOUGHT.format(5)),
    ]
    assert [prompt.split_reason for prompt in prompts] == reasons
    assert len(chat.samples().samples) == 1 + sum(reason is not None for reason in reasons)
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert chat.messages[1]["reasoning_content"].strip() == "hm 1"


def test_the_library_extends_completions_without_thinking():
    pytest.importorskip("renderers")
    chat = Conversation(build_family_tokenizer(), RendererSettings(family="qwen3"))
    for completion in ("plain<|im_end|>", " spaced \n<|im_end|>", "cut off"):
        assert chat.add(user("q"), completion=completion).split_reason is None
    assert len(chat.samples().samples) == 1
