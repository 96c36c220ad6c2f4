"""Prompts extend the tokens as sampled, or say why not; thinking is kept where the settings say so."""

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

# as Qwen3 does: thinking is shown after the last user message only, and an empty one in the last message
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

# as DeepSeek-R1 does: the prompt opens the thinking, and all earlier thinking is cut out of the content
OPENED = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

# an empty thinking is shown after the last user message, and not before it
SHOWS_EMPTY = QWEN_LIKE.replace("(loop.last or reasoning)", "true").replace(
    "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}", "{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
)

# tools stand before the last user message, so that every new one moves them
MOVES_TOOLS = (
    "{% for m in messages %}{% if loop.last and m.role == 'user' %}{{ '[tools]' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def words(template=None):
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.fixture(scope="module")
def smollm2():
    return AutoTokenizer.from_pretrained(resolve_model("smollm2-135m").folder)


class Talk:
    """A conversation with an engine that says what it is told to, as a client would lead it."""

    def __init__(self, tokenizer, settings=None, tools=None):
        self.tokenizer, self.renderer, self.tools = tokenizer, Renderer(tokenizer, settings), tools
        self.messages, self.spoken, self.trajectory = [], [], EpisodeTrajectory()

    def say(self, *messages, answer):
        """Give these messages, get this answer; returns the prompt."""
        self.messages += messages
        prompt = self.renderer.extend(self.spoken, self.messages, self.tools)
        ids = tuple(self.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer)
        reply = self.renderer.parse(ids, prompt_ids=prompt.ids)
        self.spoken.append(RenderedTurn(prompt, self.tools, ids, reply))
        generation = Generation(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop", 1.0)
        self.trajectory.add_turn(prompt.ids, generation, prompt.split_reason)
        self.messages.append(reply)
        return prompt

    def samples(self):
        return self.trajectory.build_samples(EpisodeLimits(max_sequence_tokens=100_000))

    def shown(self, prompt):
        return self.tokenizer.decode(prompt.ids)


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "call_0"}


THOUGHT = "<think>\nhm {0}\n</think>\n\nanswer {0}<|im_end|>"
CALL = '<think>\nhm {0}\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {{"x": {0}}}}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    "answer", ["fine<|im_end|>", "  fine \n<|im_end|>", "cut off", "odd<|endoftext|>", "<|im_end|>"]
)
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_the_next_prompt_is_the_tokens_so_far_and_what_was_added(model, answer, smollm2):
    tokenizer = smollm2 if model == "smollm2" else words()
    talk = Talk(tokenizer)
    first = talk.say(user("Hello"), answer=answer)
    second = talk.say(user("And?"), answer="ok<|im_end|>")
    sampled = tuple(tokenizer.encode(answer, add_special_tokens=False))
    assert second.ids[: len(first.ids) + len(sampled)] == first.ids + sampled
    assert second.split_reason is None
    body = answer.removesuffix("<|im_end|>") + "<|im_end|>"
    assert talk.shown(second) == (
        talk.shown(first) + body + "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_first_prompt_is_the_chat_template(smollm2):
    messages = [{"role": "system", "content": "Be kind."}, user("Hello")]
    expected = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Renderer(smollm2).render(messages) == expected


def test_stop_ids_are_the_end_of_text_and_the_end_of_turn(smollm2):
    assert Renderer(smollm2).stop_token_ids == (2,)
    assert Renderer(words()).stop_token_ids == (tiny_models.SPECIAL_TOKENS[tiny_models.IM_END],)


@given(st.lists(st.lists(st.integers(0, tiny_models.VOCAB_SIZE - 1), min_size=1, max_size=12), min_size=1, max_size=5))
@settings(max_examples=100)
def test_any_tokens_whatever_are_extended_and_never_tokenised_again(answers):
    """Broken UTF-8, special tokens in the middle, an end or none: all of it can be sampled."""
    talk = Talk(words())
    for answer in answers:
        assert talk.say(user("next"), answer=answer).split_reason is None
    (sample,) = talk.samples().samples
    trained = [token for token, trains in zip(sample.token_ids, sample.trainable, strict=True) if trains]
    assert trained == [token for answer in answers for token in answer]


def test_another_tokenisation_of_the_same_text_is_kept(smollm2):
    talk = Talk(smollm2)
    letters = tuple(token for letter in "hello" for token in smollm2.encode(letter, add_special_tokens=False))
    assert letters != tuple(smollm2.encode("hello", add_special_tokens=False))
    prompt = talk.renderer.extend([], [user("Hi")])
    reply = talk.renderer.parse(letters, prompt_ids=prompt.ids)
    assert reply["content"] == "hello"
    following = talk.renderer.extend([RenderedTurn(prompt, None, letters, reply)], [user("Hi"), reply, user("more")])
    assert following.ids[len(prompt.ids) :][: len(letters)] == letters


def test_a_reply_given_back_without_space_or_thinking_is_still_the_reply():
    talk = Talk(words())
    talk.say(user("a"), answer="<think>hm</think> yes <|im_end|>")
    talk.messages[-1] = {"role": "assistant", "content": "yes"}
    assert talk.say(user("b"), answer="ok<|im_end|>").split_reason is None
    assert talk.say(user("c"), answer="ok<|im_end|>").split_reason is None
    assert len(talk.samples().samples) == 1


def test_a_changed_history_is_a_compaction():
    talk = Talk(words())
    talk.say(user("a"), answer="b<|im_end|>")
    talk.messages = [user("summary of a and b")]
    prompt = talk.say(user("c"), answer="d<|im_end|>")
    assert prompt.split_reason == "compaction"
    assert talk.say(user("e"), answer="f<|im_end|>").split_reason is None
    assert [sample.split_reason for sample in talk.samples().samples] == ["start", "compaction"]


def test_asking_the_same_again_is_a_branch_and_other_tools_are_said_so():
    talk = Talk(words(QWEN_LIKE))
    talk.say(user("a"), answer="b<|im_end|>")
    assert talk.renderer.extend(talk.spoken, [user("a")]).split_reason == "branch"
    assert talk.renderer.extend(talk.spoken, [*talk.messages, user("c")], [{"name": "f"}]).split_reason == "tools"


def test_a_family_that_strips_thinking_splits_at_a_new_question_and_not_at_a_tool_result():
    talk = Talk(words(QWEN_LIKE))
    talk.say(user("q1"), answer=CALL.format(1))
    assert talk.say(tool("r1"), answer=CALL.format(2)).split_reason is None
    assert talk.say(tool("r2"), answer=THOUGHT.format(3)).split_reason is None
    after = talk.say(user("q2"), answer=THOUGHT.format(4))
    assert after.split_reason == "thinking"
    assert "hm" not in talk.shown(after)
    result = talk.samples()
    assert [sample.split_reason for sample in result.samples] == ["start", "thinking"]
    assert result.counts["split_thinking"] == 1


def test_answers_without_thinking_do_not_split_where_thinking_would_be_stripped():
    talk = Talk(words(QWEN_LIKE))
    for number in range(4):
        assert talk.say(user(f"q{number}"), answer="plain<|im_end|>").split_reason is None
    assert len(talk.samples().samples) == 1


@pytest.mark.parametrize("template", [QWEN_LIKE, OPENED])
def test_thinking_kept_makes_one_sample_of_many_questions(template):
    opening = "" if template == OPENED else "<think>\n"
    talk = Talk(words(template), KEEP_ALL)
    for number in range(4):
        prompt = talk.say(user(f"q{number}"), answer=f"{opening}hm {number}\n</think>\n\na<|im_end|>")
        assert prompt.split_reason is None
    assert [f"hm {number}" in talk.shown(prompt) for number in range(4)] == [True, True, True, False]
    assert len(talk.samples().samples) == 1


def test_a_prompt_that_opens_the_thinking_is_read_so_and_stripped_by_habit():
    talk = Talk(words(OPENED))
    talk.say(user("q"), answer="hm\n</think>\n\na<|im_end|>")
    assert talk.messages[-1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    prompt = talk.say(user("r"), answer="x\n</think>\n\na<|im_end|>")
    assert prompt.split_reason == "thinking"
    assert "hm" not in talk.shown(prompt)


def test_kept_between_tool_calls_is_stripped_at_the_next_question():
    # this family strips even between tool calls
    talk = Talk(words(OPENED), KEEP_IN_TOOL_CALLS)
    talk.say(user("q1"), answer="hm 1\n</think>\n\ncall<|im_end|>")
    second = talk.say(tool("r1"), answer="hm 2\n</think>\n\ndone<|im_end|>")
    assert second.split_reason is None
    third = talk.say(user("q2"), answer="hm 3\n</think>\n\ndone<|im_end|>")
    assert third.split_reason == "thinking"
    assert "hm" not in talk.shown(third)
    assert len(talk.samples().samples) == 2
    without = Talk(words(OPENED))
    without.say(user("q1"), answer="hm 1\n</think>\n\ncall<|im_end|>")
    assert without.say(tool("r1"), answer="hm 2\n</think>\n\ndone<|im_end|>").split_reason == "thinking"


@given(st.lists(st.sampled_from(["user", "tool", "compact"]), max_size=8), st.sampled_from([QWEN_LIKE, OPENED]))
@settings(max_examples=40)
def test_with_thinking_kept_c_compactions_give_one_plus_c_samples(moves, template):
    talk = Talk(words(template), KEEP_ALL)
    opening = "" if template == OPENED else "<think>\n"
    talk.say(user("q"), answer=f"{opening}hm\n</think>\n\na<|im_end|>")
    for number, move in enumerate(moves):
        if move == "compact":
            # the last exchange is kept, with its thinking
            talk.messages = [user(f"summary {number}"), *talk.messages[-1:]]
        message = tool("r") if move == "tool" else user("q")
        prompt = talk.say(message, answer=f"{opening}hm {number}\n</think>\n\na<|im_end|>")
        if move == "compact":
            assert "hm" in talk.shown(prompt)
    result = talk.samples()
    compactions = moves.count("compact")
    assert len(result.samples) == 1 + compactions
    assert result.counts["samples"] == 1 + compactions
    assert {key: value for key, value in result.counts.items() if key.startswith("split_")} == (
        {"split_compaction": compactions} if compactions else {}
    )


def test_without_thinking_kept_the_extra_samples_are_counted():
    talk = Talk(words(QWEN_LIKE))
    for number in range(3):
        talk.say(user("q"), answer=THOUGHT.format(number))
    talk.messages = [user("summary")]
    talk.say(user("q"), answer=THOUGHT.format(9))
    counts = talk.samples().counts
    assert (counts["samples"], counts["split_thinking"], counts["split_compaction"]) == (4, 2, 1)
    assert counts["sampled_tokens"] == counts["trained_tokens"]


def test_a_template_that_moves_what_came_before_splits_and_says_so():
    talk = Talk(words(MOVES_TOOLS))
    talk.say(user("a"), answer="b<|im_end|>")
    prompt = talk.say(user("c"), answer="d<|im_end|>")
    assert prompt.split_reason == "template"
    assert talk.shown(prompt).count("[tools]") == 1


def test_empty_thinking_that_a_template_shows_here_and_not_there_splits_nothing():
    assert SHOWS_EMPTY.endswith("<think>\\n' -}}{%- endif -%}")
    talk = Talk(words(SHOWS_EMPTY), KEEP_ALL)
    answers = [f"hm {number}\n</think>\n\na<|im_end|>" for number in range(4)]
    assert talk.say(user("q"), answer=answers[0]).split_reason is None
    assert talk.say(tool("r"), answer=answers[1]).split_reason is None
    assert talk.say(user("q"), answer=answers[2]).split_reason is None
    assert talk.say(tool("r"), answer=answers[3]).split_reason is None
    assert len(talk.samples().samples) == 1


def test_tool_calls_are_read_and_bad_ones_stay_text():
    renderer = Renderer(words())
    good = renderer.parse(words().encode('So: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'))
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
        assert renderer.parse(words().encode(text)) == {"role": "assistant", "content": text}


def test_unfinished_thinking_has_no_content():
    assert Renderer(words()).parse(words().encode("<think>\nwell")) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "well",
    }


def test_calls_and_thinking_are_written_out_for_templates_that_know_of_neither():
    talk = Talk(words())
    talk.say(user("q"), answer=CALL.format(1))
    calls = talk.messages[-1]
    text = talk.tokenizer.decode(Renderer(words()).render([user("other"), calls, tool("2")]))
    assert (
        '<think>\nhm 1\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    )


def test_tools_that_the_template_cannot_show_are_refused():
    with pytest.raises(ConfigError, match="does not support tools"):
        Renderer(words()).render([user("q")], [{"name": "f"}])


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = words()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Renderer(tokenizer)


# ---- the renderers library


def family_words():
    tokenizer = words(QWEN_LIKE)
    extra = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in extra])
    return tokenizer


def test_a_family_is_found_by_the_name_of_the_model_or_its_snapshot_folder():
    pytest.importorskip("renderers")
    for name in ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/abc123"):
        tokenizer = family_words()
        tokenizer.name_or_path = name
        assert Renderer(tokenizer).family == "qwen3"
        assert Renderer(tokenizer, RendererSettings(family="template")).family is None
    assert Renderer(words()).family is None


def test_an_unknown_family_names_the_nearest_and_one_that_does_not_fit_says_why():
    pytest.importorskip("renderers")
    with pytest.raises(ConfigError, match=r'renderer.family = "qwen33" is not known; did you mean qwen3\?'):
        Renderer(words(), RendererSettings(family="qwen33"))
    with pytest.raises(ConfigError, match="does not fit the tokenizer"):
        Renderer(words(), RendererSettings(family="qwen3"))


def test_without_the_library_the_template_is_used(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "renderers", None)
    monkeypatch.setitem(sys.modules, "renderers.base", None)
    tokenizer = family_words()
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
    talk = Talk(family_words(), RendererSettings(family="qwen3", **settings))
    seen = [
        talk.say(user("q1"), answer=CALL.format(1)),
        talk.say(tool("r1"), answer=CALL.format(2)),
        talk.say(tool("r2"), answer=THOUGHT.format(3)),
        talk.say(user("q2"), answer=CALL.format(4)),
        talk.say(tool("r4"), answer=THOUGHT.format(5)),
    ]
    assert [prompt.split_reason for prompt in seen] == reasons
    assert len(talk.samples().samples) == 1 + sum(reason is not None for reason in reasons)
    assert talk.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert talk.messages[1]["reasoning_content"].strip() == "hm 1"


def test_the_library_extends_answers_without_thinking_whatever_its_habit():
    pytest.importorskip("renderers")
    talk = Talk(family_words(), RendererSettings(family="qwen3"))
    for answer in ("plain<|im_end|>", " spaced \n<|im_end|>", "cut off"):
        assert talk.say(user("q"), answer=answer).split_reason is None
    assert len(talk.samples().samples) == 1
