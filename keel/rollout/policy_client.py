"""The policy as an environment sees it: messages in, a reply out, and every token of it on record.

An environment needs nothing else. The client renders, samples, remembers the turn for training and holds the episode
to its limits; wall time is the runner's business. It never retries: an engine that cannot answer ends the episode.
"""

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keel.config.rollout import EpisodeLimits, Sampling
from keel.errors import KeelError
from keel.inference.protocol import Engine, EngineError, Generation, Message
from keel.rollout.rendering.renderer import Prompt, RenderedTurn, Renderer, Tools
from keel.rollout.trajectory import EpisodeTrajectory

LOGPROB_TOLERANCE = 1e-3
"""By how much the log-prob of an engine that computes in half precision may be above zero."""


class EpisodeLimitReached(KeelError):
    """The episode has used what it may. An environment may catch it and score what there is."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the policy."""

    message: Message
    """To append to the messages for the next turn."""
    text: str
    """Its content, without thinking, tool calls and space around it."""
    generation: Generation


class PolicyClient:
    """Talks to the policy in one episode, and keeps its trajectory."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        limits: EpisodeLimits,
        *,
        group: str,
        evaluation: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """`sampling.seed` is the seed of this episode: members of a group need different ones, see `derive_seed`.

        `vocabulary`: token ids are below it; an answer with others is the engine's error.
        """
        if not evaluation:
            sampling.check_trainable()
        self.group = group
        self.limits = limits
        self.trajectory = EpisodeTrajectory()
        self.engine_error: EngineError | None = None
        """Why the last request was not answered; none once a later one was."""
        self._engine, self._vocab_size = engine, vocab_size
        self._renderer = renderer
        stops = dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids))
        self._sampling = sampling.model_copy(update={"stop_token_ids": tuple(stops)})
        self._rendered_turns: list[RenderedTurn] = []
        self._turns_used = 0

    @property
    def turns_left(self) -> int:
        """Answers that the episode may still ask for."""
        return self.limits.max_turns - self._turns_used

    async def chat(self, messages: Sequence[Message], *, tools: Tools = None, max_tokens: int | None = None) -> Reply:
        """The policy's next message, at most `max_tokens` long (never longer than the run's own setting)."""
        given = [copy.deepcopy(dict(message)) for message in messages]
        _check_messages(given)
        if self.turns_left <= 0:
            raise EpisodeLimitReached(f"the episode has had its limits.max_turns = {self.limits.max_turns} answers")
        prompt = self._renderer.extend(self._rendered_turns, given, tools)
        if len(prompt.ids) >= self.limits.max_sequence_tokens:
            raise EpisodeLimitReached(
                f"the prompt of {len(prompt.ids)} tokens leaves no room for an answer within limits.max_sequence_tokens ="
                f" {self.limits.max_sequence_tokens}"
            )
        self._turns_used += 1
        generation = await self._generate(prompt, self._turn_sampling(max_tokens))
        reply = self._renderer.parse(generation.token_ids, prompt_ids=prompt.ids, tools=tools)
        self.trajectory.add_turn(prompt.ids, generation, prompt.split_reason)
        self._rendered_turns.append(RenderedTurn(prompt, tools, generation.token_ids, copy.deepcopy(reply)))
        return Reply(reply, str(reply["content"]).strip(), generation)

    def _turn_sampling(self, max_tokens: int | None) -> Sampling:
        changes: dict[str, Any] = {}
        if max_tokens is not None:
            if max_tokens < 1:
                raise ValueError(f"max_tokens = {max_tokens} must be at least 1")
            changes["max_tokens"] = min(max_tokens, self._sampling.max_tokens)
        if self._sampling.seed is not None:
            changes["seed"] = derive_seed(self._sampling.seed, self._turns_used)
        return self._sampling.model_copy(update=changes)

    async def _generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        try:
            generation = await self._engine.generate(prompt.ids, sampling, group=self.group)
            if generation.finish_reason == "abort":
                raise EngineError("the engine gave the request up before it was answered")
            if wrong := _find_problem(generation, sampling, self._vocab_size):
                raise EngineError(f"the engine's answer cannot be trained on: {wrong}")
        except EngineError as error:
            self.engine_error = error
            raise
        self.engine_error = None
        return generation


def derive_seed(seed: int, *parts: int | str) -> int:
    """A seed that is a function of another and of what it is for: the same everywhere, unrelated for other parts."""
    words = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") >> 1


def _find_problem(generation: Generation, sampling: Sampling, vocab_size: int | None) -> str | None:
    """What no sampler can have given, whatever engine it is: none where the answer may be true."""
    tokens, logprobs = generation.token_ids, generation.logprobs
    if not len(tokens) == len(logprobs) == len(generation.versions):
        return f"{len(tokens)} tokens with {len(logprobs)} log-probs and {len(generation.versions)} versions"
    if len(tokens) > sampling.max_tokens:
        return f"{len(tokens)} tokens, and sampling.max_tokens = {sampling.max_tokens} were asked for"
    if not all(map(math.isfinite, logprobs)) or max(logprobs, default=0.0) > LOGPROB_TOLERANCE:
        bad = next(value for value in logprobs if not math.isfinite(value) or value > LOGPROB_TOLERANCE)
        return f"a log-prob of {bad}"
    if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
        return f"token ids from {min(tokens)} to {max(tokens)}, and the model knows {vocab_size}"
    return None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("chat needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: {str(message)[:80]}")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"message {number} has content of type {type(message['content']).__name__}, not text")
