"""The policy behind a chat endpoint that returns text only, for evaluations.

Environments see the same client as in training. Its episodes have no tokens and no log-probs, so nothing of them can
train; lengths are those that the endpoint reports.
"""

import re
from collections.abc import Sequence

from keel.config.rollout import EpisodeLimits, Sampling
from keel.inference.pool.chat_endpoint import ChatCompletion, ChatEndpoint
from keel.inference.protocol import EngineError, FinishReason, Generation, Message
from keel.rollout.policy_client import Exchange, PolicyClient, Reply
from keel.rollout.rendering.renderer import Tools
from keel.rollout.trajectory import EpisodeTrajectory, TrajectorySamples, Turn

_LEADING_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


class TextTrajectory(EpisodeTrajectory):
    """The turns of an episode without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.reported_tokens = 0
        """Length of all completions, as the endpoint counted."""

    def build_samples(self, limits: EpisodeLimits) -> TrajectorySamples:
        """Return the counts of the episode, and no samples."""
        counts = dict(super().build_samples(limits).counts)
        return TrajectorySamples((), counts | {"sampled_tokens": self.reported_tokens})


class TextPolicyClient(PolicyClient):
    """Requests completions from an endpoint during one episode. It has neither an engine nor a renderer."""

    records_tokens = False

    def __init__(self, endpoint: ChatEndpoint, sampling: Sampling, limits: EpisodeLimits, *, group: str) -> None:
        self._start_episode(sampling, limits, group)
        self.trajectory: TextTrajectory = TextTrajectory()
        self._endpoint = endpoint
        self._last_exchange: Exchange | None = None

    @property
    def last_exchange(self) -> Exchange | None:
        return self._last_exchange

    async def chat(self, messages: Sequence[Message], *, tools: Tools = None, max_tokens: int | None = None) -> Reply:
        """Request the next message, of at most `max_tokens` tokens (never more than sampling.max_tokens)."""
        copied = self._check_request(messages)
        self._turns_used += 1
        sampling = self._turn_sampling(max_tokens)
        try:
            completion = await self._endpoint.complete(copied, sampling, tools=tools)
        except EngineError as error:
            self.engine_error = error
            raise
        self.engine_error = None
        message = _separate_thinking(completion.message)
        finish_reason: FinishReason = "length" if completion.finish_reason == "length" else "stop"
        generation = Generation((), (), (), finish_reason, sampling.temperature)
        self.trajectory.turns.append(Turn((), generation, None))
        self.trajectory.reported_tokens += completion.completion_tokens or 0
        self._last_exchange = Exchange(tuple(copied), _full_text(completion), completion.finish_reason)
        return Reply(message, str(message["content"]).strip(), generation, completion.completion_tokens)


def _separate_thinking(message: Message) -> Message:
    """Return the message with thinking at the start of its content moved to `reasoning_content`, as renderers do."""
    found = _LEADING_THINKING.match(message["content"])
    if found is None or "reasoning_content" in message:
        return message
    return {**message, "content": message["content"][found.end() :].strip(), "reasoning_content": found[1].strip()}


def _full_text(completion: ChatCompletion) -> str:
    thinking = completion.message.get("reasoning_content")
    content: str = completion.message["content"]
    return content if thinking is None else f"<think>\n{thinking}\n</think>\n{content}"
