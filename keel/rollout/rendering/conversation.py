"""Render a recorded conversation to training samples, with exactly the tokens that an episode would have had.

Every reply that is to be trained becomes a turn: its prompt extends the turns before it as in an episode, and its
tokens are those that the policy would have sampled, the token that ends the turn included. Therefore the trainable
tokens are decided by token and not by searching a text, and each trains exactly once, also where a template strips
earlier thinking and the conversation becomes several samples.
"""

from collections.abc import Sequence
from typing import Any

from keel.config.rollout import EpisodeLimits
from keel.inference.protocol import Generation, Message
from keel.rollout.rendering.renderer import RenderedTurn, Renderer
from keel.rollout.trajectory import EpisodeTrajectory, TrajectorySamples


def render_conversation(
    renderer: Renderer,
    messages: Sequence[Message],
    trained: Sequence[int],
    limits: EpisodeLimits,
    tools: Sequence[Any] | None = None,
) -> TrajectorySamples:
    """Return the samples of a conversation in which the replies at the indices `trained` are trainable.

    Raises `UnrenderableReply` for a reply that the policy could not have sampled. The samplers' log-probs and versions
    have no meaning.
    """
    trajectory, turns = EpisodeTrajectory(), list[RenderedTurn]()
    for index in trained:
        prompt = renderer.extend(turns, messages[:index], tools)
        ids = tuple(renderer.encode_reply(messages[: index + 1], tools))
        generation = Generation(ids, (0.0,) * len(ids), (0,) * len(ids), "stop", 1.0)
        trajectory.add_turn(prompt.ids, generation, prompt.split_reason)
        turns.append(RenderedTurn(prompt, tools, ids, messages[index]))
    return trajectory.build_samples(limits)
