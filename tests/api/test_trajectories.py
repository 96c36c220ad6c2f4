"""Trajectories and groups: failures are data, cancellation is not, and only recorded tokens train."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.api.samples import build_batch
from keel.api.train_request import TrainRequest
from keel.api.trajectories import TooManyExceptions
from keel.config.run import AdvantageSettings
from keel.errors import BatchError, ConfigError, KeelError
from keel.signal import MovingBaseline
from tests.support.api_helpers import agent, attempt, run
from tests.support.engine_fakes import END

HI = {"role": "user", "content": "hi"}


def choice(**changes: Any) -> dict[str, Any]:
    """Return a choice as the endpoint returns it."""
    fields = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "yo"},
        "token_ids": [121, 111, END],
        "prompt_token_ids": [257, 104, 105],
        "versions": [1, 1, 2],
        "logprobs": {"content": [{"token": "?", "logprob": -0.5}] * 3},
        "sampling": {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        "model": "agent-1",
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def trajectory(*choices: Any, reward: float | None = 1.0, **more: Any) -> keel.Trajectory:
    return keel.Trajectory(messages_and_choices=[HI, *choices], reward=reward, **more)


def batch(*groups: list[keel.Trajectory], **estimator: Any) -> Any:
    settings = AdvantageSettings.model_validate({"name": "group_mean", **estimator})
    return build_batch(
        [keel.TrajectoryGroup(group) for group in groups],
        model="agent-1",
        step=2,
        estimator=settings,
        moving_baseline=MovingBaseline(),
    )


# --- samples ---


def test_a_trajectory_becomes_its_recorded_tokens_and_nothing_else() -> None:
    result = batch([trajectory(choice()), trajectory(choice(), reward=0.0)])
    first, second = result.samples
    assert list(first.token_ids) == [257, 104, 105, 121, 111, END]
    assert list(first.trainable) == [False] * 3 + [True] * 3
    assert list(first.sampler_logprobs)[3:] == [-0.5] * 3 and list(first.version)[3:] == [1, 1, 2]
    assert first.temperature == 0.7 and first.group == second.group == 0
    assert (first.advantage[3], second.advantage[3]) == (0.5, -0.5)


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "versions", "logprobs", "sampling", "model"])
def test_a_choice_without_a_required_field_is_an_error_that_names_the_field(field: str) -> None:
    bare = trajectory(choice(), choice(**{field: ...}), name="the second task")
    with pytest.raises(BatchError, match="cannot be trained on") as error:
        batch([trajectory(choice()), bare])
    message = str(error.value)
    assert f"group 0, trajectory 1 (the second task): choice 1 lacks {field}:" in message
    assert "as if it were on-policy" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "agent-2"}, 'was sampled by "agent-2", and "agent-1" is trained'),
        ({"versions": [3, 3, 3]}, "tokens of version 3, but the model is at step 2"),
        ({"versions": [1, 1]}, "3 token_ids, 2 versions and 3 logprobs"),
        ({"token_ids": [1.5, 2, 3]}, "must be a list of integers"),
        ({"token_ids": [], "versions": [], "logprobs": {"content": []}}, "neither may be empty"),
        ({"logprobs": {"content": None}}, "lacks logprobs.content"),
        ({"logprobs": {"content": [{"logprob": float("nan")}] * 3}}, "not finite"),
        ({"sampling": {"temperature": 1.0, "top_p": 0.9}}, "sampling.top_p = 0.9 truncates the distribution"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature = 0"),
    ],
)
def test_a_choice_that_the_trainer_cannot_reproduce_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match="group 0, trajectory 0: choice 0") as error:
        batch([trajectory(choice(**changes))])
    assert message in str(error.value)


def test_trajectories_without_reward_or_choices_or_with_a_repeated_choice_are_errors() -> None:
    once = choice()
    for invalid, message in (
        (trajectory(once, reward=None), "reward = None"),
        (trajectory(once, reward=float("inf")), "reward = inf"),
        (trajectory({"role": "assistant", "content": "yo"}), "no choices, only messages"),
        (trajectory(once, once), "the same choice twice"),
        (trajectory("yo"), "neither a message with a role nor a choice"),
        (trajectory({"choices": [once, once]}), "a response has 2 choices"),
    ):
        with pytest.raises(BatchError) as error:
            batch([invalid])
        assert message in str(error.value)


def test_zero_variance_groups_are_counted_and_dropped_or_trained() -> None:
    equal, different = (
        [trajectory(choice()), trajectory(choice())],
        [trajectory(choice()), trajectory(choice(), reward=0.0)],
    )
    dropped, kept = batch(equal, different), batch(equal, different, zero_variance_groups="train")
    assert dropped.metrics["groups_zero_variance"] == kept.metrics["groups_zero_variance"] == 1
    assert len(dropped.samples) == 2 and len(kept.samples) == 4
    assert dropped.metrics["rollout/zero_variance_tokens"] == 6 and kept.metrics["rollout/zero_variance_tokens"] == 0
    assert {sample.group for sample in dropped.samples} == {1}
    nothing = batch(equal)
    assert not nothing.samples and "in 1 groups all advantages are zero" in nothing.skip_reason
    # equal rewards carry signal for an estimator that does not compare attempts
    assert len(batch(equal, name="constant", baseline=0.0).samples) == 2


def test_metrics_of_trajectories_are_averaged_into_those_of_the_step() -> None:
    group = [trajectory(choice(), metrics={"tools": 1}), trajectory(choice(), reward=0.0, metrics={"tools": 2})]
    metrics = batch(group, []).metrics
    assert metrics["metrics/tools"] == 1.5 and metrics["reward"] == 0.5 and metrics["groups"] == 2


# --- gathering ---


async def succeed(delay: float = 0.0) -> keel.Trajectory:
    await asyncio.sleep(delay)
    return trajectory(choice())


async def fail(message: str) -> keel.Trajectory:
    raise RuntimeError(message)


def test_failures_are_kept_next_to_the_trajectories_that_succeeded() -> None:
    async def gather() -> list[keel.TrajectoryGroup]:
        return await keel.gather_groups(
            [
                keel.TrajectoryGroup([succeed(), fail("first")]),
                keel.TrajectoryGroup([fail("second"), trajectory(choice())]),
            ],
            max_exceptions=2,
        )

    groups = run(gather())
    assert [len(group.trajectories) for group in groups] == [1, 1]
    assert [str(error) for group in groups for error in group.exceptions] == ["first", "second"]
    result = build_batch(
        groups,
        model="agent-1",
        step=2,
        estimator=AdvantageSettings(zero_variance_groups="train"),
        moving_baseline=MovingBaseline(),
    )
    assert result.metrics["exceptions"] == 2 and result.metrics["trajectories"] == 2


def test_more_failures_than_allowed_are_an_error_that_quotes_them_and_cancels_the_rest() -> None:
    cancelled: list[bool] = []

    async def wait_long() -> keel.Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return trajectory(choice())

    async def gather() -> None:
        groups = [
            keel.TrajectoryGroup([wait_long(), fail("tool broke")]),
            keel.TrajectoryGroup([succeed(), fail("again")]),
        ]
        await keel.gather_groups(groups, max_exceptions=1)

    with pytest.raises(TooManyExceptions, match="2 trajectories failed, but max_exceptions = 1") as error:
        run(gather(), 10)
    assert "RuntimeError: tool broke; RuntimeError: again" in str(error.value)
    assert cancelled == [True] and len(error.value.exceptions) == 2
    with pytest.raises(TooManyExceptions):
        run(keel.gather_groups([keel.TrajectoryGroup([fail("by default none is allowed")])]))
    with pytest.raises(KeelError, match="max_exceptions = -1"):
        run(keel.gather_groups([], max_exceptions=-1))


def test_cancellation_reaches_every_trajectory() -> None:
    started, ended = [], []

    async def wait_long() -> keel.Trajectory:
        started.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return trajectory(choice())

    async def gather() -> None:
        groups = [keel.TrajectoryGroup([wait_long(), wait_long()]), keel.TrajectoryGroup([wait_long()])]
        call = asyncio.ensure_future(keel.gather_groups(groups, max_exceptions=None))
        while len(started) < 3:
            await asyncio.sleep(0)
        call.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        run(gather(), 10)
    assert len(ended) == 3


def test_a_cancelled_trajectory_cancels_the_gathering_and_is_not_a_failure() -> None:
    async def cancelled() -> keel.Trajectory:
        raise asyncio.CancelledError

    async def gather() -> None:
        await keel.gather_groups([keel.TrajectoryGroup([succeed(), cancelled()])], max_exceptions=None)

    with pytest.raises(asyncio.CancelledError):
        run(gather(), 10)


def test_groups_can_be_awaited_or_created_by_coroutines_and_hold_only_trajectories() -> None:
    async def gather() -> None:
        group = keel.TrajectoryGroup([succeed(), succeed()])
        with pytest.raises(KeelError, match="2 trajectories of the group are still pending"):
            _ = group.trajectories
        assert (await group) is group and len(group.trajectories) == 2

        async def create() -> keel.TrajectoryGroup:
            return keel.TrajectoryGroup([succeed()])

        assert [len(gathered) for gathered in await keel.gather_groups([create(), group])] == [1, 2]

        async def return_text() -> Any:
            return "text"

        (failed,) = await keel.gather_groups([keel.TrajectoryGroup([return_text()])], max_exceptions=1)
        assert "got str" in str(failed.exceptions[0])
        with pytest.raises(KeelError, match="not str"):
            keel.TrajectoryGroup(["text"])  # type: ignore[list-item]

    run(gather())


# --- parameters of train ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kl_penalty_reference_step": 0}, "kl_penalty_reference_step = 0 has no effect"),
        ({"kl_ref_adapter_path": "x"}, "kl_ref_adapter_path = x has no effect"),
        (
            {"kl_penalty_coef": 1.0, "kl_penalty_reference_step": 0, "kl_ref_adapter_path": "x"},
            "a step has one reference",
        ),
        ({"kl_penalty_coef": -1.0}, "kl_penalty_coef = -1.0"),
        ({"kl_penalty_coef": 1.0, "kl_penalty_reference_step": -1}, "must be the number of a step"),
        ({"kl_penalty_coef": 1.0, "objective": {"kl_penalty_coef": 0.5}}, "the objective already has 0.5"),
        ({"objective": "icepopp"}, "did you mean icepop?"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0 must be above 0"),
        ({"advantages": "group_median"}, "advantages.name"),
        ({"zero_variance_groups": "keep"}, 'advantages.zero_variance_groups = "keep": input should be'),
        (
            {"zero_variance_groups": "drop", "advantages": AdvantageSettings(zero_variance_groups="train")},
            'zero_variance_groups = "drop", but advantages.zero_variance_groups = "train"',
        ),
        ({"groups": [trajectory()]}, "groups[0] is Trajectory"),
    ],
)
def test_parameters_without_effect_or_with_invalid_values_are_errors(changes: dict[str, Any], message: str) -> None:
    defaults = {
        "objective": "icepop",
        "learning_rate": None,
        "advantages": "group_mean",
        "kl_penalty_coef": 0.0,
        "kl_penalty_reference_step": None,
        "kl_ref_adapter_path": None,
    }
    arguments = defaults | changes
    with pytest.raises(KeelError) as error:
        TrainRequest.from_arguments(arguments.pop("groups", []), **arguments)
    assert message in str(error.value)


def test_the_kl_penalty_can_be_added_to_any_form_of_objective() -> None:
    forms: list[Any] = ["icepop", {"name": "icepop"}, keel.objective("icepop"), keel.objective("icepop").composition]
    for form in forms:
        request = TrainRequest.from_arguments(
            [],
            objective=form,
            learning_rate=None,
            advantages="group_mean",
            kl_penalty_coef=0.25,
            kl_penalty_reference_step=3,
            kl_ref_adapter_path=None,
        )
        assert request.objective.composition == keel.objective("icepop", kl_penalty_coef=0.25).composition
        assert request.reference_source == "step:3"


@pytest.mark.parametrize("name", ["", "..", "../up", "/etc", "a/b", ".hidden", "a\n", "x" * 101])
def test_the_name_of_a_model_must_be_a_folder_name(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a valid folder name"):
        keel.TrainableModel(name=name)


def test_misuse_of_a_model_is_an_error_that_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.rank = 0"):
        keel.TrainableModel(name="a", lora={"rank": 0})
    model = agent()
    with pytest.raises(KeelError, match="register"):
        model.openai_client()

    async def talk() -> None:
        async with keel.LocalBackend(path=tmp_path) as backend:
            with pytest.raises(KeelError, match="not registered here"):
                await backend.train(model, [])
            await backend.register(model)
            with pytest.raises(ConfigError, match="is already registered"):
                await backend.register(model)
            nothing = await backend.train(model, [keel.TrajectoryGroup([await attempt(model)])])
            assert nothing.step == 0 and "nothing to train on" in nothing.skip_reason
            assert nothing.checkpoint_path.name == "step_0"
            with pytest.raises(BatchError, match="not been gathered"):
                await backend.train(model, [group := keel.TrajectoryGroup([succeed()])])
            await group
            assert model.openai_client() is model.openai_client()
            monkeypatch.setitem(sys.modules, "openai", None)
            with pytest.raises(KeelError, match="pip install openai"):
                model.openai_client()

    run(talk())
