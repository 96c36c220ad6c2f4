"""Evaluation: closed-form intervals, every held-out task run as often as requested, failures counted."""

import asyncio
import itertools
import json
import math

import pytest

from keel.cli import main
from keel.config import CheckpointSettings, EpisodeLimits, LoraSettings, ModelSettings, Sampling, load_settings
from keel.config.toml_writer import toml_lines
from keel.errors import ConfigError, KeelError
from keel.inference.protocol import EngineError
from keel.rollout.environments.environment import EpisodeResult, Task
from keel.rollout.rendering.renderer import Renderer
from keel.run.evaluation import intervals
from keel.run.evaluation.evaluate import evaluate
from keel.training import Checkpoints, Trainer
from tests.support.scripted_engine import END, ScriptedEngine
from tests.support.scripted_engine import load as load_environment

# ---------------------------------------------------------------------------------------------------------------------
# intervals


@pytest.mark.parametrize(
    ("passed", "count", "low", "high"),
    [
        # z^2 / (n + z^2) when none or all pass, by hand: z^2 = 3.841459
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        # centre 1/2, half width z / sqrt(n + z^2) / 2
        (32, 64, 0.5 - 1.959964 / math.sqrt(67.841459) / 2, 0.5 + 1.959964 / math.sqrt(67.841459) / 2),
        # Wilson 1927 as tabulated by Newcombe 1998: 81 of 263
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval_is_the_closed_form(passed, count, low, high):
    estimate = intervals.wilson_interval(passed, count)
    assert estimate.mean == passed / count
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047), (2, 4.3026527), (3, 3.1824463), (10, 2.2281389), (63, 1.9983405), (1000, 1.9623391)],
)
def test_student_quantiles_match_published_tables(freedom, quantile):
    assert intervals.t_quantile(freedom) == pytest.approx(quantile, abs=2e-7)


def test_mean_of_graded_rewards_has_students_interval():
    estimate = intervals.mean_reward_interval([[0.0], [0.5], [1.0], [2.5]])
    # mean 1, variance (1 + 0.25 + 0 + 2.25) / 3, three degrees of freedom
    half = 3.1824463 * math.sqrt(3.5 / 3 / 4)
    assert estimate == pytest.approx((1.0, 1.0 - half, 1.0 + half), abs=1e-6)


def test_a_single_graded_reward_has_no_interval():
    estimate = intervals.mean_reward_interval([[0.3]])
    assert estimate.mean == 0.3
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_rewards_of_zero_and_one_have_wilsons_interval_over_tasks():
    rewards = [[1.0]] * 3 + [[0.0]] * 5
    assert intervals.mean_reward_interval(rewards) == pytest.approx(intervals.wilson_interval(3, 8))


def test_identical_completions_of_a_task_do_not_narrow_the_interval():
    once = intervals.mean_reward_interval([[1.0]] * 3 + [[0.0]] * 5)
    eight_times = intervals.mean_reward_interval([[1.0] * 8] * 3 + [[0.0] * 8] * 5)
    assert eight_times == pytest.approx(once)


def test_completions_independent_of_their_task_narrow_the_interval_like_more_tasks():
    estimate = intervals.mean_reward_interval([[1.0, 0.0, 0.0, 0.0]] * 8)
    assert estimate == pytest.approx(intervals.wilson_interval(8, 32))


@pytest.mark.parametrize("draws", [1, 2, 5, 8])
def test_pass_at_k_is_the_fraction_of_sets_of_k_that_contain_a_pass(draws):
    for passed, k in itertools.product(range(draws + 1), range(1, draws + 1)):
        sets = list(itertools.combinations(range(draws), k))
        fraction = sum(any(index < passed for index in chosen) for chosen in sets) / len(sets)
        assert intervals.pass_at_k_interval(k, [passed], draws).mean == pytest.approx(fraction, abs=1e-12)


def test_pass_at_k_is_finite_for_thousands_of_draws():
    estimate = intervals.pass_at_k_interval(1000, [1, 0], 10_000)
    assert estimate.mean == pytest.approx(0.05, abs=1e-12)


def test_pass_at_k_with_more_than_the_draws_is_an_error():
    with pytest.raises(ValueError, match="pass@5 cannot be estimated from 4 completions"):
        intervals.pass_at_k_interval(5, [1], 4)


def test_the_reported_k_are_powers_of_two_and_all_draws():
    assert [intervals.pass_k_values(draws) for draws in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]


# ---------------------------------------------------------------------------------------------------------------------
# evaluation


class Coins:
    """Numbered tasks; a function computes the reward from the task number and the completion."""

    name = "coins"

    def __init__(self, reward, count=10):
        self.reward, self.count = reward, count
        self.in_flight = self.max_in_flight = 0

    def tasks(self, split):
        return (Task(f"{split}/{number}", {"number": number}) for number in itertools.count() if number < self.count)

    async def episode(self, task, client):
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            reply = await client.chat([{"role": "user", "content": f"task {task.data['number']}"}])
            await asyncio.sleep(0)
            return EpisodeResult(self.reward(task.data["number"], reply.text))
        finally:
            self.in_flight -= 1


class Finite(Coins):
    def tasks(self, split):
        return [Task(f"{split}/{number}", {"number": number}) for number in range(self.count)]


class Digest:
    """The reward is a function of the sampled tokens: equal rewards mean equal completions."""

    name = "digest"

    def tasks(self, split):
        return [Task(f"{split}/{number}", {}) for number in range(100)]

    async def episode(self, task, client):
        reply = await client.chat([{"role": "user", "content": task.id}])
        reward = sum(reply.generation.token_ids) % 97 / 97
        return EpisodeResult(reward, {"digest": reward, "bonus": 0}, {"tokens": len(reply.generation.token_ids)})


def run(environment, engine=None, **options):
    engine = engine or ScriptedEngine(answer=lambda _: f"7{END}")
    defaults = {
        "num_tasks": 4,
        "samples_per_task": 1,
        "sampling": Sampling(max_tokens=8),
        "limits": EpisodeLimits(),
        "seed": 3,
    }
    return asyncio.run(evaluate(engine, Renderer(engine.tokenizer), environment, **defaults | options))


def test_the_first_held_out_tasks_run_as_often_as_requested():
    engine = ScriptedEngine(answer=lambda _: f"7{END}")
    # an infinite iterator: only the requested tasks may be drawn
    result = run(Coins(lambda number, _: float(number % 2)), engine, num_tasks=4, samples_per_task=3)
    groups = [group for _, _, group in engine.requests]
    assert sorted(groups) == sorted(f"eval/eval/{number}" for number in range(4) for _ in range(3))
    assert (result.num_tasks, result.samples_per_task, result.failed_episodes) == (4, 3, 0)
    assert result.reward == 0.5
    assert result.pass_at_k == {1: 0.5, 2: 0.5, 3: 0.5}
    assert (result.low, result.high) == pytest.approx(intervals.wilson_interval(2, 4)[1:])


def test_every_completion_has_its_own_seed_independent_of_the_number_in_flight():
    def seeds(**options):
        engine = ScriptedEngine(answer=lambda _: f"7{END}")
        run(Finite(lambda *_: 1.0), engine, samples_per_task=3, **options)
        return {(prompt, sampling.seed) for prompt, sampling, _ in engine.requests}

    alone = seeds(max_in_flight=1)
    assert len(alone) == 12
    assert seeds(max_in_flight=64) == alone
    assert not seeds(seed=4) & alone


def test_at_most_max_in_flight_episodes_run_concurrently():
    environment = Finite(lambda *_: 1.0)
    run(environment, num_tasks=10, samples_per_task=2, max_in_flight=3)
    assert environment.max_in_flight == 3


def test_progress_is_reported_for_every_episode():
    reported = []
    run(
        Finite(lambda *_: 1.0),
        num_tasks=3,
        samples_per_task=2,
        progress=lambda done, total: reported.append((done, total)),
    )
    assert reported == [(number, 6) for number in range(1, 7)]


def test_a_failed_episode_has_reward_zero_and_is_counted():
    def reward(number, _):
        if number == 1:
            raise RuntimeError("no judge")
        return 1.0

    result = run(Finite(reward))
    assert (result.reward, result.failed_episodes) == (0.75, 1)
    assert result.first_error.startswith("eval/1: RuntimeError: no judge")
    assert result.scalars()["failed"] == 1.0


def test_if_all_episodes_fail_the_error_quotes_the_first_failure():
    engine = ScriptedEngine(answer=lambda _: EngineError("no memory left"))
    with pytest.raises(KeelError, match=r'"coins": all 4 episodes failed; the first, eval/0: no memory left'):
        run(Finite(lambda *_: 1.0), engine)


def test_partial_credit_counts_in_the_reward_and_not_in_pass_at_k():
    result = run(Finite(lambda number, _: [0.0, 0.5, 0.9, 1.1][number]))
    assert result.reward == pytest.approx(0.625)
    assert result.pass_at_k == {1: 0.25}


def test_fewer_tasks_than_requested_all_run_and_no_tasks_is_an_error():
    assert run(Finite(lambda *_: 1.0, count=2), num_tasks=64).num_tasks == 2
    with pytest.raises(ConfigError, match='"mine" has no tasks for evaluation'):
        run(Finite(lambda *_: 1.0, count=0), name="mine")


def test_greedy_sampling_allows_one_sample_per_task():
    greedy = Sampling(temperature=0, max_tokens=8)
    assert run(Finite(lambda *_: 1.0), sampling=greedy).reward == 1.0
    with pytest.raises(ConfigError, match="samples_per_task = 2 has no effect"):
        run(Finite(lambda *_: 1.0), sampling=greedy, samples_per_task=2)


def test_metrics_omit_unknown_values():
    metrics = run(Finite(lambda *_: 0.3), num_tasks=1).scalars()
    assert metrics["reward"] == 0.3
    assert not {"low", "high"} & metrics.keys()
    assert {"pass@1", "pass@1/low", "pass@1/high", "tasks", "samples", "seconds"} <= metrics.keys()


def test_means_of_components_are_over_the_episodes_that_reported_them():
    class Parts(Finite):
        async def episode(self, task, client):
            result = await super().episode(task, client)
            number = task.data["number"]
            return EpisodeResult(result.reward, {"half": number / 2} if number else {}, {"number": number})

    def reward(number, _):
        if number == 3:
            raise RuntimeError("no judge")
        return 1.0

    result = run(Parts(reward))
    means = {"reward_components/half": 0.75, "environment_metrics/number": 1.0}
    assert result.environment_means == means
    assert result.completions == {"completion_tokens": 2.0, "completion_tokens_max": 2.0, "truncated": 0.0}
    assert result.scalars().items() >= {**means, "completion_tokens": 2.0, "truncated": 0.0}.items()


def test_a_built_in_environment_gives_full_reward_to_correct_completions():
    environment = load_environment("larger_number", shots=0, digits=1)

    def larger(prompt):
        question = prompt.rpartition("larger, ")[2].split("?")[0]
        return max(question.split(" or "), key=int) + END

    engine = ScriptedEngine(answer=larger)
    assert run(environment, engine, num_tasks=8).reward == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# keel eval


def make_run_folder(tmp_path, *, lora=None, steps=(1, 2)):
    """Create a run folder with real checkpoints; the last samples differently from the base model."""
    settings = ModelSettings(name="tiny", lora=lora)
    trainer = Trainer(settings)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointSettings(keep_last=9))
    for step in steps:
        for weight in trainer.model.parameters().values():
            weight.data.add_(0.01 * step)
        checkpoints.save(step, trainer.model, trainer.optimizer, {})
    (tmp_path / "recipe.toml").write_text(
        'seed = 0\n[model]\nname = "tiny"\n'
        + ("lora = { rank = 4 }\n" if lora else "")
        + "[sampling]\nmax_tokens = 4\n[evaluation]\nnum_tasks = 6\n[environments.small]\n"
        'name = "tests.run.evaluation.test_evaluate:Digest"\n'
    )
    loaded = load_settings(tmp_path / "recipe.toml")
    text = "\n".join(line + comment for line, comment in toml_lines(loaded)) + "\n"
    (tmp_path / "run" / "config.toml").write_text(text)
    return tmp_path / "run"


def run_eval(capsys, *args):
    code = main(["eval", *map(str, args)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_eval_of_a_run_uses_its_last_intact_checkpoint_and_its_settings(tmp_path, capsys):
    folder = make_run_folder(tmp_path)
    code, out, _ = run_eval(capsys, folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["step"] == 2
    assert report["model"].endswith("step_2")
    (last,) = report["evaluations"]
    assert (last["environment"], last["tasks"], last["samples"]) == ("small", 6, 1)
    (other,) = json.loads(run_eval(capsys, folder, "--step", 1, "--json")[1])["evaluations"]
    assert other["reward"] != last["reward"]
    (again,) = json.loads(run_eval(capsys, folder, "--json")[1])["evaluations"]
    assert again["reward"] == last["reward"]
    code, _, error = run_eval(capsys, folder, "--step", 7)
    assert code == 2
    assert "no checkpoint of step 7" in error
    assert "steps that exist: 1, 2" in error


def test_eval_is_reproducible_and_prints_a_table_with_intervals(tmp_path, capsys):
    folder = make_run_folder(tmp_path)
    args = (folder, "--tasks", 4, "--samples", 2, "--temperature", 0.5, "--max-tokens", 3, "--seed", 5)
    shown = [run_eval(capsys, *args)[1] for _ in range(2)]
    assert shown[0].splitlines()[:-1] != []
    strip = [[line.rsplit(" ", 1)[0] for line in text.splitlines()] for text in shown]
    assert strip[0] == strip[1]
    header = shown[0].splitlines()[1]
    assert all(title in header for title in ("environment", "reward", "95 % interval", "pass@1", "pass@2", "failed"))
    assert "4 x 2" in shown[0]


def test_eval_prints_components_metrics_and_completion_lengths(tmp_path, capsys):
    folder = make_run_folder(tmp_path)
    (report,) = json.loads(run_eval(capsys, folder, "--json")[1])["evaluations"]
    assert report["reward_components/digest"] == pytest.approx(report["reward"])
    assert (report["reward_components/bonus"], report["environment_metrics/tokens"]) == (
        0.0,
        report["completion_tokens"],
    )
    printed = run_eval(capsys, folder)[1].splitlines()
    assert printed[-3] == (
        f"small: completions of {report['completion_tokens']:.1f} tokens on average, 4 at most;"
        f" {report['truncated']:.1%} truncated"
    )
    assert printed[-2] == f"small: reward components digest {report['reward']:.3g}, bonus 0"
    assert printed[-1] == f"small: metrics tokens {report['completion_tokens']:.3g}"


def test_eval_of_a_lora_run_samples_with_its_adapter(tmp_path, capsys):
    folder = make_run_folder(tmp_path, lora=LoraSettings(rank=4))
    args = ("--tasks", 12, "--samples", 4, "--max-tokens", 2, "--json")
    with_adapter = json.loads(run_eval(capsys, folder, *args)[1])["evaluations"]
    base = tmp_path / "recipe.toml"
    without = json.loads(run_eval(capsys, "tiny", "--recipe", base, *args)[1])["evaluations"]
    assert with_adapter[0]["environment"] == without[0]["environment"] == "small"
    assert with_adapter[0]["reward"] != without[0]["reward"]


def test_eval_of_a_model_needs_an_environment(tmp_path, capsys):
    code, _, error = run_eval(capsys, "tiny")
    assert code == 2
    assert "--environment" in error
    code, out, _ = run_eval(capsys, "tiny", "--environment", "larger_number", "--tasks", 2, "--max-tokens", 2)
    assert code == 0
    assert "larger_number" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--environment", "larger_numbr"), "larger_number"),
        (("--environment", "larger_number", "--tasks", "0"), "--tasks 0 must be at least 1"),
        (("--environment", "larger_number", "--temperature", "-1"), "temperature"),
        (("--environment", "larger_number", "--step", "3"), "--step 3 has no effect"),
        (("--environment", "calculator", "--recipe", "none.toml"), "none.toml does not exist"),
    ],
)
def test_invalid_arguments_of_eval_are_errors_that_say_what_to_do(args, message, capsys):
    code, _, error = run_eval(capsys, "tiny", *args)
    assert code == 2
    assert message in error


def test_eval_of_a_folder_that_is_not_a_run_is_an_error(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[model]\nname = 'tiny'\n")
    code, _, error = run_eval(capsys, tmp_path)
    assert code == 2
    assert "checkpoint" in error
