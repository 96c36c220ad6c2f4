"""The Python API records exactly what is sampled, trains only on that, and then samples from the new weights."""

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import keel
from keel.config.run import AdvantageSettings
from keel.errors import ModelError
from keel.training import Checkpoints
from tests.support.api_helpers import LORA, agent, attempt, attempts, furthest, replayed, run, say, trainer_at

# --- sampling ---


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_choice_carries_the_log_probs_that_the_trainer_computes_for_its_tokens(
    tmp_path: Path, temperature: float
) -> None:
    async def talk() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            response = await say(model, [{"role": "user", "content": "hi"}], temperature=temperature, n=3)
            return model, response.choices

    model, choices = run(talk())
    trainer = keel.Trainer(model.settings)
    for choice in choices:
        assert choice.versions == [0] * len(choice.token_ids) and choice.model == "agent-1"
        assert furthest(*replayed(trainer, choice)) < 1e-4
    prompt = [{"role": "user", "content": "hi"}]
    expected = trainer.model.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert choices[0].prompt_token_ids == list(expected)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_after_train_the_endpoint_samples_from_the_new_weights(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    async def train() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent(lora=lora)
            await backend.register(model)
            results = [
                await backend.train(model, await attempts(model), objective="icepop", learning_rate=5e-3)
                for _ in range(2)
            ]
            response = await say(model, [{"role": "user", "content": "hi"}], max_tokens=12)
            return model, results, response.choices[0]

    model, (first, second), choice = run(train())
    assert (first.step, second.step) == (1, 2) and not second.skip_reason
    assert second.checkpoint_path == tmp_path / "agent-1" / "checkpoints" / "step_2" and second.checkpoint_path.is_dir()
    assert choice.versions == [2] * len(choice.token_ids)
    assert furthest(*replayed(trainer_at(tmp_path, 2, model), choice)) < 1e-4
    assert furthest(*replayed(trainer_at(tmp_path, 0, model), choice)) > 0.01
    # nothing was stale, so the sampler's log-probs equal the trainer's
    assert second.metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)


def test_a_conversation_of_several_turns_is_one_sample_even_if_its_text_is_not_valid(tmp_path: Path) -> None:
    async def talk() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            first = await attempt(model, turns=3)
            group = keel.TrajectoryGroup([first, await attempt(model, reward=-1.0)])
            return first, await backend.train(model, [group])

    first, result = run(talk())
    choices = first.choices
    # random bytes are rarely valid text: tokenising the client's text again would give other tokens
    assert any("\ufffd" in choice.message.content for choice in choices)
    for before, after in itertools.pairwise(choices):
        assert after.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
        start = len(before.prompt_token_ids)
        assert after.prompt_token_ids[start : start + len(before.token_ids)] == before.token_ids
    assert result.metrics["samples"] == 2 and result.metrics["rollout/turns"] == 4


def test_a_rewritten_conversation_becomes_another_sample_and_every_token_trains_once(tmp_path: Path) -> None:
    async def talk() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            first = await attempt(model, turns=2, reward=1.0)
            summary = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a summary"}]
            changed = await say(model, [*summary, {"role": "user", "content": "more"}])
            first.messages_and_choices.append(changed)
            return first, await backend.train(
                model, [keel.TrajectoryGroup([first, await attempt(model, reward=0.0, max_tokens=1)])]
            )

    first, result = run(talk())
    assert result.metrics["samples"] == 3 and result.metrics["rollout/split_branch"] == 1
    sampled = sum(len(choice.token_ids) for choice in first.choices) + 1
    assert result.metrics["rollout/sampled_tokens"] == sampled


def test_the_turn_after_a_streamed_completion_extends_its_tokens(tmp_path: Path) -> None:
    async def talk() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            text, tokens = "", []
            async for chunk in await say(model, messages, stream=True):
                text += chunk.choices[0].delta.content or ""
                for name in ("prompt_token_ids", "token_ids"):
                    tokens += getattr(chunk.choices[0], name, [])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
            return tokens, (await say(model, messages)).choices[0]

    tokens, choice = run(talk())
    assert len(tokens) > 20 and choice.prompt_token_ids[: len(tokens)] == tokens


def test_a_client_that_blocks_the_event_loop_gets_its_response(tmp_path: Path) -> None:
    async def talk() -> str:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            with openai.OpenAI(base_url=model.base_url, api_key=model.api_key, timeout=20, max_retries=0) as client:
                messages: list[Any] = [{"role": "user", "content": "hi"}]
                return str(client.chat.completions.create(model="agent-1", messages=messages, max_tokens=3).id)

    assert run(talk()).startswith("chatcmpl-")


def test_the_endpoint_requires_its_key_and_does_not_load_weights_for_clients(tmp_path: Path) -> None:
    async def talk() -> None:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            assert model.base_url.startswith("http://127.0.0.1:")
            async with openai.AsyncOpenAI(base_url=model.base_url, api_key="guess", max_retries=0) as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
            with pytest.raises(openai.NotFoundError):
                await model.openai_client().post("/load_weights", cast_to=object, body={"folder": "x", "version": 1})

    run(talk())


# --- references ---


@pytest.mark.model
def test_the_penalty_is_computed_against_the_named_reference(tmp_path: Path) -> None:
    """Train the same rollouts from the same weights with different references."""

    async def other() -> Path:
        async with keel.LocalBackend(path=tmp_path / "other") as backend:
            model = agent(lora=LORA)
            await backend.register(model)
            return (await backend.train(model, await attempts(model), learning_rate=2e-2)).checkpoint_path

    async def train(lora: dict[str, Any] | None, adapter: Path) -> list[dict[str, float]]:
        async with keel.LocalBackend(path=tmp_path / f"run-{bool(lora)}") as backend:
            model = agent(lora=lora)
            await backend.register(model)
            await backend.train(model, await attempts(model), learning_rate=2e-2)
            groups, metrics = await attempts(model), []
            for reference in ({}, {"kl_penalty_reference_step": 1}, {"kl_ref_adapter_path": adapter}):
                # a rate so small that every call has practically the same policy
                result = await backend.train(model, groups, learning_rate=1e-12, kl_penalty_coef=1.0, **reference)
                metrics.append(result.metrics)
            plain = await backend.train(model, groups, learning_rate=1e-12)
            return [*metrics, plain.metrics]

    adapter = run(other())
    for lora in (None, LORA):
        base, step, adapted, plain = run(train(lora, adapter))
        assert step["kl_ref/step_1"] == pytest.approx(0, abs=1e-5)
        # their size depends on the samples, but they differ by more than rounding
        assert abs(base["kl_ref/base"]) > 1e-4 and abs(adapted["kl_ref/adapter"]) > 1e-4
        assert base["kl_ref/base"] != pytest.approx(adapted["kl_ref/adapter"], abs=1e-5)
        assert not any(name.startswith("kl_ref/") for name in plain)
        # a policy equal to its reference trains as if there were no penalty
        assert step["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-3)
        assert abs(base["grad_norm"] - plain["grad_norm"]) > 1e-5 * plain["grad_norm"]
        assert abs(adapted["grad_norm"] - base["grad_norm"]) > 1e-5 * plain["grad_norm"]


def test_a_missing_reference_is_an_error_and_nothing_changes(tmp_path: Path) -> None:
    async def train() -> None:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent(lora=LORA)
            await backend.register(model)
            groups = await attempts(model)
            with pytest.raises(ModelError, match="no checkpoint of step 7"):
                await backend.train(model, groups, kl_penalty_coef=1.0, kl_penalty_reference_step=7)
            with pytest.raises(ModelError, match="is not an adapter"):
                await backend.train(model, groups, kl_penalty_coef=1.0, kl_ref_adapter_path=tmp_path)
            assert await backend.step(model) == 0
            assert (await backend.train(model, groups)).step == 1

    run(train())


def test_the_first_step_stays_on_disk_as_a_reference(tmp_path: Path) -> None:
    async def train() -> tuple[list[int], float]:
        settings = keel.CheckpointSettings(keep_last=1)
        async with keel.LocalBackend(path=tmp_path, checkpoints=settings) as backend:
            model = agent()
            await backend.register(model)
            groups = await attempts(model)
            for _ in range(3):
                await backend.train(model, groups, learning_rate=1e-2)
            last = await backend.train(model, groups, kl_penalty_coef=0.1, kl_penalty_reference_step=0)
            return Checkpoints(tmp_path / "agent-1" / "checkpoints", settings).steps(), last.metrics["kl_ref/step_0"]

    steps, kl = run(train())
    assert steps == [0, 4] and abs(kl) > 0.01


@pytest.mark.parametrize(
    "options",
    [{"zero_variance_groups": "train"}, {"advantages": AdvantageSettings(zero_variance_groups="train")}],
    ids=["parameter", "settings"],
)
def test_zero_variance_groups_train_if_either_parameter_says_so(tmp_path: Path, options: dict[str, Any]) -> None:
    async def train() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            groups = [keel.TrajectoryGroup([await attempt(model, reward=1.0) for _ in range(2)])]
            # the gradient of this objective does not depend on advantages
            signal = {"policy": {"surrogate": "cross_entropy", "anchor": "none"}}
            dropped = await backend.train(model, groups, objective=signal)
            return dropped, await backend.train(model, groups, objective=signal, **options)

    dropped, trained = run(train())
    assert dropped.step == 0 and "all advantages are zero" in dropped.skip_reason
    assert dropped.metrics["rollout/zero_variance_tokens"] > 0
    assert (trained.step, trained.skip_reason) == (1, "")
    assert trained.metrics["rollout/zero_variance_tokens"] == 0


# --- complete steps ---


def test_a_model_that_is_registered_again_resumes_where_it_was(tmp_path: Path) -> None:
    async def train_once(reward: float) -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            before = await backend.step(model)
            live = (await say(model, [{"role": "user", "content": "hi"}])).choices[0]
            estimator = AdvantageSettings(name="moving_baseline", decay=0.5)
            groups = [keel.TrajectoryGroup([await attempt(model, reward=reward)])]
            return model, before, live, await backend.train(model, groups, learning_rate=5e-3, advantages=estimator)

    _, before, _, first = run(train_once(8.0))
    model, again, live, second = run(train_once(8.0))
    assert (before, again, first.step, second.step) == (0, 1, 1, 2)
    assert live.versions == [1] * len(live.token_ids)
    assert furthest(*replayed(trainer_at(tmp_path, 1, model), live)) < 1e-4
    # the optimizer steps and the baseline were restored: 8 -> 4 -> 6 with a decay of 0.5
    assert second.metrics["steps"] == 2
    state = keel.Trainer(model.settings).load(Checkpoints(second.checkpoint_path.parent, keel.CheckpointSettings()), 2)
    assert state == {"moving_baseline": {"0": 6.0}}


def test_a_broken_checkpoint_is_skipped_with_a_warning_and_left_unchanged(tmp_path: Path) -> None:
    async def train_steps(steps: int) -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            for _ in range(steps):
                await backend.train(model, await attempts(model), learning_rate=1e-3)
            return await backend.step(model)

    assert run(train_steps(2)) == 2
    (tmp_path / "agent-1/checkpoints/step_2/model.safetensors").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="step 2 is corrupt and not used"):
        assert run(train_steps(0)) == 1
    assert (tmp_path / "agent-1/checkpoints/step_2/model.safetensors").read_bytes() == b"damaged"


def test_a_step_whose_checkpoint_fails_did_not_happen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def train() -> Any:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            groups = await attempts(model)
            with monkeypatch.context() as patch:
                patch.setattr(Checkpoints, "save", lambda *_args: (_ for _ in ()).throw(ModelError("disk full")))
                with pytest.raises(ModelError, match="disk full"):
                    await backend.train(model, groups, learning_rate=1e-2)
            assert await backend.step(model) == 0
            live = (await say(model, [{"role": "user", "content": "hi"}])).choices[0]
            assert live.versions[0] == 0
            return (await backend.train(model, groups, learning_rate=1e-2)).metrics, live, model

    metrics, live, model = run(train())
    # the second try started from the same weights and optimizer as the first
    assert metrics["steps"] == 1 and metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert furthest(*replayed(keel.Trainer(model.settings), live)) < 1e-4


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    async def both() -> None:
        async with keel.LocalBackend(path=tmp_path) as first, keel.LocalBackend(path=tmp_path) as second:
            await first.register(agent())
            with pytest.raises(ModelError, match="in use by another backend"):
                await second.register(agent())
            await first.close()
            await second.register(agent())

    run(both())


def test_the_endpoint_answers_during_training_and_a_cancelled_call_still_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, proceed = threading.Event(), threading.Event()
    original = keel.Trainer.step

    def slow(self: keel.Trainer, *args: Any, **options: Any) -> Any:
        started.set()
        assert proceed.wait(30)
        return original(self, *args, **options)

    async def train() -> int:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent()
            await backend.register(model)
            groups = await attempts(model)
            monkeypatch.setattr(keel.Trainer, "step", slow)
            call = asyncio.ensure_future(backend.train(model, groups))
            await asyncio.to_thread(started.wait, 30)
            response = await say(model, [{"role": "user", "content": "hi"}])
            assert response.choices[0].versions[0] == 0
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            proceed.set()
            await backend.close()
            return Checkpoints(tmp_path / "agent-1" / "checkpoints", keel.CheckpointSettings()).latest() or 0

    assert run(train()) == 1


def test_references_leave_the_trained_network_unchanged(tmp_path: Path) -> None:
    async def train() -> None:
        async with keel.LocalBackend(path=tmp_path) as backend:
            model = agent(lora=LORA)
            await backend.register(model)
            policy = backend._session_for(model).trainer.model
            trained = {name: weight.requires_grad for name, weight in policy.network.named_parameters()}
            groups = await attempts(model)
            for step in range(3):
                await backend.train(model, groups, kl_penalty_coef=0.1, kl_penalty_reference_step=step)
            await backend.train(model, groups)
            assert {n: weight.requires_grad for n, weight in policy.network.named_parameters()} == trained
            assert all(torch.isfinite(weight).all() for weight in policy.network.parameters())

    run(train())


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"engine": keel.config.EngineSettings(kind="process")}, "engine.kind = process"),
        ({"engine": keel.config.EngineSettings(vllm_python="python3")}, "engine.vllm_python = python3"),
        ({"checkpoints": keel.CheckpointSettings(every=5)}, "checkpoints.every = 5"),
    ],
)
def test_settings_without_effect_in_a_backend_are_errors(tmp_path: Path, options: dict[str, Any], setting: str) -> None:
    with pytest.raises(keel.ConfigError, match=f"{setting} has no effect"):
        keel.LocalBackend(path=tmp_path, **options)
