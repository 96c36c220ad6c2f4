"""The policy as an environment sees it: messages in, a reply out, with every sampled token recorded.

The client renders the messages, samples a completion, records the turn for training and enforces the limits of the
episode except wall time, which `run_episode` enforces. It never retries: an engine error ends the episode.
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
"""How far above zero a log-prob may be: engines that compute in half precision round up slightly."""


class EpisodeLimitReached(KeelError):
    """Raised when the episode reached a limit. An environment may catch it and score the episode so far."""


class PromptTooLong(EpisodeLimitReached):
    """Raised when the first prompt of an episode leaves no room for a completion: another attempt would not help."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion of the policy."""

    message: Message
    """The assistant message, to append to the messages of the next turn."""
    text: str
    """The content without thinking, tool calls and surrounding whitespace."""
    generation: Generation
    reported_tokens: int | None = None
    """Length in tokens as a server counted it that returns no token ids."""

    @property
    def completion_tokens(self) -> int:
        """Length of the completion in tokens; 0 if it is not known."""
        return len(self.generation.token_ids) if self.reported_tokens is None else self.reported_tokens


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of an episode and its completion, as evaluations store them."""

    messages: tuple[Message, ...]
    completion: str
    """The text of the completion, including thinking."""
    finish_reason: str
    token_ids: tuple[int, ...] = ()
    """Sampled token ids; empty if the policy returns text only."""
    logprobs: tuple[float, ...] = ()


class PolicyClient:
    """Samples from the policy during one episode and records the trajectory."""

    records_tokens = True
    """Whether completions have the token ids and log-probs that training needs."""

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
        """`sampling.seed` is the seed of this episode; members of a group need different ones, see `derive_seed`.

        A completion with a token id of `vocab_size` or more is an engine error.
        """
        if not evaluation:
            sampling.check_trainable()
        stops = dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids))
        self._start_episode(sampling.model_copy(update={"stop_token_ids": tuple(stops)}), limits, group)
        self._engine, self._vocab_size = engine, vocab_size
        self._renderer = renderer
        self._rendered_turns: list[RenderedTurn] = []

    def _start_episode(self, sampling: Sampling, limits: EpisodeLimits, group: str) -> None:
        """Set the state that does not depend on what samples."""
        self.group = group
        self.limits = limits
        self.trajectory = EpisodeTrajectory()
        self.engine_error: EngineError | None = None
        """The error of the last request; None if it succeeded."""
        self._sampling = sampling
        self._turns_used = 0

    @property
    def turns_left(self) -> int:
        """The number of completions that the episode may still request."""
        return self.limits.max_turns - self._turns_used

    @property
    def last_exchange(self) -> Exchange | None:
        """The last request and its completion; None before the first completion."""
        if not self._rendered_turns:
            return None
        turn, generation = self._rendered_turns[-1], self.trajectory.turns[-1].generation
        text = self._renderer.decode(turn.sampled)
        return Exchange(turn.prompt.messages, text, generation.finish_reason, generation.token_ids, generation.logprobs)

    async def chat(self, messages: Sequence[Message], *, tools: Tools = None, max_tokens: int | None = None) -> Reply:
        """Sample the policy's next message, of at most `max_tokens` tokens (never more than sampling.max_tokens)."""
        copied = self._check_request(messages)
        prompt = self._renderer.extend(self._rendered_turns, copied, tools)
        if len(prompt.ids) >= self.limits.max_sequence_tokens:
            raise (EpisodeLimitReached if self._turns_used else PromptTooLong)(
                f"the prompt of {len(prompt.ids)} tokens leaves no room for a completion within"
                f" limits.max_sequence_tokens = {self.limits.max_sequence_tokens}"
            )
        self._turns_used += 1
        generation = await self._generate(prompt, self._turn_sampling(max_tokens))
        reply = self._renderer.parse(generation.token_ids, prompt_ids=prompt.ids, tools=tools)
        self.trajectory.add_turn(prompt.ids, generation, prompt.split_reason)
        self._rendered_turns.append(RenderedTurn(prompt, tools, generation.token_ids, copy.deepcopy(reply)))
        return Reply(reply, str(reply["content"]).strip(), generation)

    def _check_request(self, messages: Sequence[Message]) -> list[Message]:
        """Return a copy of the messages; raise if they are invalid or no turn is left."""
        copied = [copy.deepcopy(dict(message)) for message in messages]
        _check_messages(copied)
        if self.turns_left <= 0:
            raise EpisodeLimitReached(f"the episode has used all limits.max_turns = {self.limits.max_turns} turns")
        return copied

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
                raise EngineError("the engine aborted the request before it completed")
            if problem := _find_problem(generation, sampling, self._vocab_size):
                raise EngineError(f"the engine returned an invalid completion: {problem}")
        except EngineError as error:
            self.engine_error = error
            raise
        self.engine_error = None
        return generation


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a seed that depends only on `seed` and `parts`; different parts give unrelated seeds."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _find_problem(generation: Generation, sampling: Sampling, vocab_size: int | None) -> str | None:
    """Return what makes the completion impossible for any sampler, or None if it is plausible."""
    tokens, logprobs = generation.token_ids, generation.logprobs
    if not len(tokens) == len(logprobs) == len(generation.versions):
        return f"{len(tokens)} tokens with {len(logprobs)} log-probs and {len(generation.versions)} versions"
    if len(tokens) > sampling.max_tokens:
        return f"{len(tokens)} tokens, more than sampling.max_tokens = {sampling.max_tokens}"
    if not all(map(math.isfinite, logprobs)) or max(logprobs, default=0.0) > LOGPROB_TOLERANCE:
        bad = next(value for value in logprobs if not math.isfinite(value) or value > LOGPROB_TOLERANCE)
        return f"a log-prob of {bad}"
    if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
        return f"token ids from {min(tokens)} to {max(tokens)}, outside the vocabulary of {vocab_size}"
    return None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise ValueError("chat needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: {str(message)[:80]}")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"message {number} has content of type {type(message['content']).__name__}, not text")
