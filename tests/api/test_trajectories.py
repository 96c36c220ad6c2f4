"""Claims of trajectories and groups: failures are data, cancelling is not, and what was not recorded never trains."""

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
    """A choice as the endpoint gives it."""
    made = {
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
    return {name: value for name, value in made.items() if value is not ...}


def said(*choices: Any, reward: float | None = 1.0, **more: Any) -> keel.Trajectory:
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


# --- what trains ---


def test_a_trajectory_becomes_its_recorded_tokens_and_nothing_else() -> None:
    made = batch([said(choice()), said(choice(), reward=0.0)])
    first, second = made.samples
    assert list(first.token_ids) == [257, 104, 105, 121, 111, END]
    assert list(first.trainable) == [False] * 3 + [True] * 3
    assert list(first.sampler_logprobs)[3:] == [-0.5] * 3 and list(first.version)[3:] == [1, 1, 2]
    assert first.temperature == 0.7 and first.group == second.group == 0
    assert (first.advantage[3], second.advantage[3]) == (0.5, -0.5)


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "versions", "logprobs", "sampling", "model"])
def test_a_choice_without_what_was_sampled_is_refused_by_name_and_by_what_it_lacks(field: str) -> None:
    bare = said(choice(), choice(**{field: ...}), name="the second task")
    with pytest.raises(BatchError, match="cannot be trained on") as refused:
        batch([said(choice()), bare])
    message = str(refused.value)
    assert f"group 0, trajectory 1 (the second task): choice 1 lacks {field}:" in message
    assert "as if it were on-policy" in message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "agent-2"}, 'was sampled by "agent-2", and "agent-1" is trained'),
        ({"versions": [3, 3, 3]}, "tokens of version 3, and the model is at step 2"),
        ({"versions": [1, 1]}, "3 token_ids, 2 versions and 3 logprobs"),
        ({"token_ids": [1.5, 2, 3]}, "must be a list of whole numbers"),
        ({"token_ids": [], "versions": [], "logprobs": {"content": []}}, "neither may be empty"),
        ({"logprobs": {"content": None}}, "lacks logprobs.content"),
        ({"logprobs": {"content": [{"logprob": float("nan")}] * 3}}, "not finite"),
        ({"sampling": {"temperature": 1.0, "top_p": 0.9}}, "sampling.top_p = 0.9 truncates the distribution"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature = 0"),
    ],
)
def test_a_choice_that_the_trainer_could_not_replay_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BatchError, match="group 0, trajectory 0: choice 0") as refused:
        batch([said(choice(**changes))])
    assert why in str(refused.value)


def test_trajectories_without_reward_or_choices_or_with_one_twice_are_refused() -> None:
    once = choice()
    for wrong, why in (
        (said(once, reward=None), "reward = None"),
        (said(once, reward=float("inf")), "reward = inf"),
        (said({"role": "assistant", "content": "yo"}), "no choices, only messages"),
        (said(once, once), "in it twice"),
        (said("yo"), "neither a message with a role nor a choice"),
        (said({"choices": [once, once]}), "a response with 2 choices"),
    ):
        with pytest.raises(BatchError) as refused:
            batch([wrong])
        assert why in str(refused.value)


def test_groups_without_signal_are_counted_and_left_out_or_kept() -> None:
    flat, lively = [said(choice()), said(choice())], [said(choice()), said(choice(), reward=0.0)]
    dropped, kept = batch(flat, lively), batch(flat, lively, zero_variance_groups="train")
    assert dropped.metrics["groups_zero_variance"] == kept.metrics["groups_zero_variance"] == 1
    assert len(dropped.samples) == 2 and len(kept.samples) == 4
    assert dropped.metrics["rollout/zero_variance_tokens"] == 6 and kept.metrics["rollout/zero_variance_tokens"] == 0
    assert {sample.group for sample in dropped.samples} == {1}
    nothing = batch(flat)
    assert not nothing.samples and "in 1 groups all advantages are zero" in nothing.skip_reason
    # by an estimator that compares with no other attempt, equal rewards are signal
    assert len(batch(flat, name="constant", baseline=0.0).samples) == 2


def test_numbers_of_trajectories_are_averaged_into_those_of_the_step() -> None:
    group = [said(choice(), metrics={"tools": 1}), said(choice(), reward=0.0, metrics={"tools": 2})]
    made = batch(group, [])
    assert made.metrics["metrics/tools"] == 1.5 and made.metrics["reward"] == 0.5 and made.metrics["groups"] == 2


# --- gathering ---


async def works(after: float = 0.0) -> keel.Trajectory:
    await asyncio.sleep(after)
    return said(choice())


async def fails(what: str) -> keel.Trajectory:
    raise RuntimeError(what)


def test_failures_are_data_beside_what_worked() -> None:
    async def gather() -> list[keel.TrajectoryGroup]:
        return await keel.gather_groups(
            [keel.TrajectoryGroup([works(), fails("first")]), keel.TrajectoryGroup([fails("second"), said(choice())])],
            max_exceptions=2,
        )

    groups = run(gather())
    assert [len(group.trajectories) for group in groups] == [1, 1]
    assert [str(error) for group in groups for error in group.exceptions] == ["first", "second"]
    counted = build_batch(
        groups,
        model="agent-1",
        step=2,
        estimator=AdvantageSettings(zero_variance_groups="train"),
        moving_baseline=MovingBaseline(),
    )
    assert counted.metrics["exceptions"] == 2 and counted.metrics["trajectories"] == 2


def test_more_failures_than_allowed_are_an_error_that_shows_them_and_ends_the_rest() -> None:
    ended: list[bool] = []

    async def waits() -> keel.Trajectory:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(True)
            raise
        return said(choice())

    async def gather() -> None:
        groups = [keel.TrajectoryGroup([waits(), fails("tool broke")]), keel.TrajectoryGroup([works(), fails("again")])]
        await keel.gather_groups(groups, max_exceptions=1)

    with pytest.raises(TooManyExceptions, match="2 trajectories failed, and max_exceptions = 1") as refused:
        run(gather(), 10)
    assert "RuntimeError: tool broke; RuntimeError: again" in str(refused.value)
    assert ended == [True] and len(refused.value.exceptions) == 2
    with pytest.raises(TooManyExceptions):
        run(keel.gather_groups([keel.TrajectoryGroup([fails("by default none is allowed")])]))
    with pytest.raises(KeelError, match="max_exceptions = -1"):
        run(keel.gather_groups([], max_exceptions=-1))


def test_cancelling_passes_through_to_every_trajectory() -> None:
    begun, ended = [], []

    async def waits() -> keel.Trajectory:
        begun.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)
        return said(choice())

    async def gather() -> None:
        groups = [keel.TrajectoryGroup([waits(), waits()]), keel.TrajectoryGroup([waits()])]
        call = asyncio.ensure_future(keel.gather_groups(groups, max_exceptions=None))
        while len(begun) < 3:
            await asyncio.sleep(0)
        call.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        run(gather(), 10)
    assert len(ended) == 3


def test_a_trajectory_that_is_cancelled_is_no_failure_to_be_trained_around() -> None:
    async def cancelled() -> keel.Trajectory:
        raise asyncio.CancelledError

    async def gather() -> None:
        await keel.gather_groups([keel.TrajectoryGroup([works(), cancelled()])], max_exceptions=None)

    with pytest.raises(asyncio.CancelledError):
        run(gather(), 10)


def test_groups_may_be_awaited_made_by_coroutines_and_hold_only_trajectories() -> None:
    async def gather() -> None:
        group = keel.TrajectoryGroup([works(), works()])
        with pytest.raises(KeelError, match="2 trajectories of the group are not there yet"):
            _ = group.trajectories
        assert (await group) is group and len(group.trajectories) == 2

        async def made() -> keel.TrajectoryGroup:
            return keel.TrajectoryGroup([works()])

        assert [len(one) for one in await keel.gather_groups([made(), group])] == [1, 2]

        async def wrong() -> Any:
            return "text"

        (odd,) = await keel.gather_groups([keel.TrajectoryGroup([wrong()])], max_exceptions=1)
        assert "str came" in str(odd.exceptions[0])
        with pytest.raises(KeelError, match="not str"):
            keel.TrajectoryGroup(["text"])  # type: ignore[list-item]

    run(gather())


# --- what train may be told ---


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"kl_penalty_reference_step": 0}, "kl_penalty_reference_step = 0 cannot act"),
        ({"kl_ref_adapter_path": "x"}, "kl_ref_adapter_path = x cannot act"),
        (
            {"kl_penalty_coef": 1.0, "kl_penalty_reference_step": 0, "kl_ref_adapter_path": "x"},
            "a step has one reference",
        ),
        ({"kl_penalty_coef": -1.0}, "kl_penalty_coef = -1.0"),
        ({"kl_penalty_coef": 1.0, "kl_penalty_reference_step": -1}, "must be the number of a step"),
        ({"kl_penalty_coef": 1.0, "objective": {"kl_penalty_coef": 0.5}}, "the objective has 0.5 already"),
        ({"objective": "icepopp"}, "did you mean icepop?"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0 must be above 0"),
        ({"advantages": "group_median"}, "advantages.name"),
        ({"zero_variance_groups": "keep"}, 'advantages.zero_variance_groups = "keep": input should be'),
        (
            {"zero_variance_groups": "drop", "advantages": AdvantageSettings(zero_variance_groups="train")},
            'zero_variance_groups = "drop", and advantages.zero_variance_groups = "train"',
        ),
        ({"groups": [said()]}, "groups[0] is Trajectory"),
    ],
)
def test_what_cannot_act_is_refused(given: dict[str, Any], why: str) -> None:
    usual = {
        "objective": "icepop",
        "learning_rate": None,
        "advantages": "group_mean",
        "kl_penalty_coef": 0.0,
        "kl_penalty_reference_step": None,
        "kl_ref_adapter_path": None,
    }
    whole = usual | given
    with pytest.raises(KeelError) as refused:
        TrainRequest.from_arguments(whole.pop("groups", []), **whole)
    assert why in str(refused.value)


def test_the_penalty_joins_any_form_of_objective() -> None:
    forms: list[Any] = ["icepop", {"name": "icepop"}, keel.objective("icepop"), keel.objective("icepop").composition]
    for form in forms:
        wish = TrainRequest.from_arguments(
            [],
            objective=form,
            learning_rate=None,
            advantages="group_mean",
            kl_penalty_coef=0.25,
            kl_penalty_reference_step=3,
            kl_ref_adapter_path=None,
        )
        assert wish.objective.composition == keel.objective("icepop", kl_penalty_coef=0.25).composition
        assert wish.reference_source == "step:3"


@pytest.mark.parametrize("name", ["", "..", "../up", "/etc", "a/b", ".hidden", "a\n", "x" * 101])
def test_a_name_is_one_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a folder's name"):
        keel.TrainableModel(name=name)


def test_a_model_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
            with pytest.raises(ConfigError, match="is registered"):
                await backend.register(model)
            nothing = await backend.train(model, [keel.TrajectoryGroup([await attempt(model)])])
            assert nothing.step == 0 and "nothing to train on" in nothing.skip_reason
            assert nothing.checkpoint_path.name == "step_0"
            with pytest.raises(BatchError, match="not been gathered"):
                await backend.train(model, [group := keel.TrajectoryGroup([works()])])
            await group
            assert model.openai_client() is model.openai_client()
            monkeypatch.setitem(sys.modules, "openai", None)
            with pytest.raises(KeelError, match="pip install openai"):
                model.openai_client()

    run(talk())
