"""An engine with scripted completions, and helpers to play episodes with it."""

import asyncio

from keel.config import EnvironmentSettings, EpisodeLimits, Sampling
from keel.inference.protocol import EngineError, Generation, Health
from keel.rollout.environments.environment import close_environments, run_episode
from keel.rollout.environments.registry import load_environment
from keel.rollout.policy_client import PolicyClient
from keel.rollout.rendering.renderer import Renderer
from keel.training.model import tiny_models

END = "<|im_end|>"


class ScriptedEngine:
    """Returns the texts of the script one after the other, or the result of `answer(prompt)`.

    An exception in the script is raised; a number is a time to sleep in seconds.
    """

    def __init__(self, *script, tokenizer=None, answer=None, version=0):
        self.script, self.answer, self.live = list(script), answer, version
        self.tokenizer = tokenizer or tiny_models.build_tokenizer()
        self.requests = []

    async def generate(self, prompt, sampling, *, group=None):
        self.requests.append((tuple(prompt), sampling, group))
        entry = self.answer(self.tokenizer.decode(list(prompt))) if self.answer else self.script.pop(0)
        if isinstance(entry, BaseException):
            raise entry
        if isinstance(entry, int | float):
            await asyncio.sleep(entry)
            raise EngineError("the scripted sleep ended")
        ids = self.tokenizer.encode(entry, add_special_tokens=False)[: sampling.max_tokens]
        finish = "stop" if ids and ids[-1] in sampling.stop_token_ids else "length"
        return Generation(tuple(ids), (-0.5,) * len(ids), (self.live,) * len(ids), finish, sampling.temperature)

    async def version(self):
        return self.live

    async def health(self):
        return Health(True, self.live)


def client(engine, *, sampling=None, limits=None, group="g", evaluation=False, renderer=None):
    return PolicyClient(
        engine,
        Renderer(engine.tokenizer, renderer),
        sampling or Sampling(),
        limits or EpisodeLimits(),
        group=group,
        evaluation=evaluation,
    )


def load(name, **options):
    """Load an environment by name."""
    return load_environment(EnvironmentSettings(name=name, options=options))


def play(environment, task, engine, **options):
    """Play one episode, close the environment and return the rollout."""
    limits = options.pop("limits", EpisodeLimits())
    policy = client(engine, limits=limits, sampling=options.pop("sampling", None))

    async def episode():
        try:
            return await run_episode(environment, task, policy, limits, **options)
        finally:
            await close_environments([environment])

    return asyncio.run(episode())
