"""Sample TRL's completions with Keel's local engine: `GRPOTrainer(rollout_func=keel_rollout(), ...)`.

The engine runs in the training process on a second copy of the weights, which is updated before completions are
sampled with newer ones. It decodes all completions of a batch together, computes a prompt once for its group, and
records the log-prob of every token it samples. On a CPU it is several times faster than `generate`. It needs
`keel-rl[train]` and works with any `GRPOTrainer`, not only with Keel's.
"""

import asyncio
import copy
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from peft import PeftModel

from keel.common.atomic_files import read_json, write_json
from keel.config import EngineSettings, Sampling
from keel.errors import ConfigError
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import Generation, WeightSource
from keel.integrations.trl.options import truncating_options

ADAPTER_CONFIG = "adapter_config.json"

T = TypeVar("T")


def keel_rollout(**engine: Any) -> "KeelRollout":
    """Return a `rollout_func` for TRL. Keywords are the settings of a local engine, such as `max_batch` or `int8`."""
    return KeelRollout(EngineSettings(**engine))


class KeelRollout:
    """Samples with a `LocalEngine` that follows the weights of one trainer. `close` stops it."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.kind != "local":
            raise ConfigError(f'keel_rollout(kind="{settings.kind}") is not possible: it samples in this process')
        self._settings = settings
        self._engine: LocalEngine | None = None
        self._loaded_step: int | None = None
        self._num_requests = 0
        # a thread with its own event loop, because a notebook already runs one in the main thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="keel-rollout", daemon=True)
        self._thread.start()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return token ids of prompts and completions, and the log-prob of every sampled token."""
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ConfigError("keel_rollout samples text only: the prompts have images")
        prompt_ids = [[int(token) for token in ids] for ids in prompt_ids]
        engine = self._current_engine(trainer)
        requests = self._requests(trainer, len(prompt_ids))
        completions = self._wait(_generate(engine, prompt_ids, requests))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [list(completion.logprobs) for completion in completions],
        }

    def close(self) -> None:
        """Stop the engine and its threads."""
        if self._engine is not None:
            self._wait(self._engine.close())
            self._engine = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _requests(self, trainer: Any, count: int) -> list[Sampling]:
        """Return the sampling settings of each request. Seeds depend on the trainer's seed, rank and progress only."""
        first, self._num_requests = self._num_requests, self._num_requests + count
        seeds = [
            np.random.SeedSequence([trainer.args.seed, trainer.accelerator.process_index, first + index])
            for index in range(count)
        ]
        return [
            Sampling(
                temperature=trainer.temperature,
                max_tokens=trainer.max_completion_length,
                stop_token_ids=tuple(trainer.eos_token_ids),
                seed=int(seed.generate_state(1)[0]),
            )
            for seed in seeds
        ]

    def _current_engine(self, trainer: Any) -> LocalEngine:
        """Return the engine, with the weights of the trainer's current step."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        if self._engine is None:
            _check_trainer(trainer)
            network = _copy_network(model.get_base_model() if isinstance(model, PeftModel) else model)
            self._engine = LocalEngine(network, trainer._tokenizer, self._settings)
        step = trainer.state.global_step
        if step != self._loaded_step:
            self._wait(_load_weights(self._engine, model, step))
            self._loaded_step = step
        return self._engine


async def _generate(engine: LocalEngine, prompts: list[list[int]], requests: list[Sampling]) -> list[Generation]:
    pairs = zip(prompts, requests, strict=True)
    return list(await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in pairs)))


async def _load_weights(engine: LocalEngine, model: Any, step: int) -> None:
    if not isinstance(model, PeftModel):
        await engine.load_weights(WeightSource("in_memory", tensors=model.state_dict()), step)
        return
    with tempfile.TemporaryDirectory(prefix="keel-adapter-") as temporary:
        name = str(model.active_adapters[0])
        model.save_pretrained(temporary, selected_adapters=[name])
        folder = Path(temporary) if name == "default" else Path(temporary) / name
        config = read_json(folder / ADAPTER_CONFIG)
        # names the class of the base model, which the engine already has; a plain LoRA configuration has no such key
        write_json(folder / ADAPTER_CONFIG, config | {"auto_mapping": None})
        await engine.load_weights(WeightSource.adapter(folder), step)


def _copy_network(network: Any) -> Any:
    """Return a second network with the same weights, and with the original forward, which TRL replaces."""
    # the engine changes the attention of its network, which is a setting of the configuration
    copied = type(network)(copy.deepcopy(network.config)).to(device=network.device, dtype=network.dtype)
    state = {name.replace(".base_layer.", "."): value for name, value in network.state_dict().items()}
    copied.load_state_dict({name: value for name, value in state.items() if name in copied.state_dict()})
    copied.generation_config = copy.deepcopy(network.generation_config)
    copied.requires_grad_(False)
    return copied


def _check_trainer(trainer: Any) -> None:
    """Raise a `ConfigError` for options of the trainer that the engine cannot follow."""
    args, config = trainer.args, type(trainer.args).__name__
    for option in truncating_options(args):
        raise ConfigError(
            f"{config}.{option} changes the distribution that completions are sampled from, and the trainer's log-probs"
            " are those of the full distribution; set it to its default"
        )
    if args.temperature == 0:
        raise ConfigError(f"{config}.temperature = 0 is greedy decoding; training needs a positive temperature")
    if args.generation_kwargs:
        raise ConfigError(f"{config}.generation_kwargs = {args.generation_kwargs} has no effect with keel_rollout")
    if args.use_vllm:
        raise ConfigError(f"{config}.use_vllm = True has no effect with keel_rollout, which samples itself; remove it")
    if trainer.tools:
        raise ConfigError("keel_rollout samples one turn: tools need TRL's own sampling or vLLM")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError("keel_rollout needs the whole model in each process: DeepSpeed and FSDP shard it; use vLLM")
