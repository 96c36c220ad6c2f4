"""Keel's objectives inside TRL's GRPOTrainer: equal to TRL's own loss, to Keel's trainer, and exact for the step."""

from pathlib import Path
from typing import Any

import pytest
import torch

import keel
from keel.common.sample import Sample
from keel.tools.compare.readers import Recording
from tests.support.trl_trainers import NO_TRL, PROMPTS, loss_and_gradient, make_trainer, micro_batch, tiny

pytest.importorskip("trl", reason=NO_TRL)
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


FLOAT32 = {"dtype": "float32"}


def assert_same_gradient(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        (
            {"name": "dapo", "reference_kl_coef": 0.04, "reference_kl_correction": True},
            {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04},
        ),
        ({"name": "grpo"}, {"loss_type": "grpo"}),
        ({"name": "dr_grpo", "length": 7}, {"loss_type": "dr_grpo", "max_completion_length": 7}),
        ({"name": "cispo", "ratio_high": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
        ({"name": "sapo"}, {"loss_type": "sapo"}),
        (
            {"name": "gspo"},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        ),
    ],
    ids=lambda value: value.get("name", ""),
)
def test_losses_that_trl_has_too_agree_with_it(
    objective: dict[str, Any], options: dict[str, Any], accumulated: int, tmp_path: Path
) -> None:
    shared = {"gradient_accumulation_steps": accumulated}
    own = make_trainer(tmp_path, **shared, **options, **_reference_folder(tmp_path, options))
    hosted = make_trainer(tmp_path, objective, **shared, **_reference_folder(tmp_path, options))
    micro_batches = [micro_batch(own, seed) for seed in range(accumulated)]
    own_loss, own_gradient = loss_and_gradient(own, [dict(part) for part in micro_batches])
    loss, gradient = loss_and_gradient(hosted, micro_batches)
    assert loss == pytest.approx(own_loss, rel=1e-5, abs=1e-6)
    assert_same_gradient(gradient, own_gradient)


def _reference_folder(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """TRL loads its reference from the folder of the model; the tests give the log-probs themselves."""
    if "beta" not in options:
        return {}
    from peft import LoraConfig

    return {"trainer": {"peft_config": LoraConfig(r=2, init_lora_weights=False)}}


@pytest.mark.parametrize("name", ["icepop", "dppo_kl", "opsm", "gspo", "m2po", "vespo", "tis"])
def test_a_step_equals_keels_own_trainer(name: str, tmp_path: Path) -> None:
    hosted = make_trainer(tmp_path, name, gradient_accumulation_steps=2)
    micro_batches = [micro_batch(hosted, seed) for seed in (0, 1)]
    for part in micro_batches:
        part["sampling_per_token_logps"] = part.pop("old_per_token_logps")
    samples = [_sample(part, row) for part in micro_batches for row in range(4)]
    loss, gradient = loss_and_gradient(hosted, micro_batches)
    trainer = keel.Trainer("tiny", keel.TrainerSettings(max_grad_norm=None))
    network = trainer.model.network
    network.load_state_dict(hosted.model.state_dict())
    captured: dict[str, torch.Tensor] = {}

    def capture(*_: Any) -> None:
        captured.update({name: value.grad.clone() for name, value in network.named_parameters()})

    trainer.optimizer.register_step_pre_hook(capture)
    report = trainer.step(samples, name)
    assert report.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert_same_gradient(gradient, captured)


def _sample(inputs: dict[str, Any], row: int) -> Sample:
    """Return the row of a micro-batch as Keel's trainer takes it."""
    present = torch.cat([inputs["prompt_mask"][row], inputs["completion_mask"][row]]).bool()
    ids = torch.cat([inputs["prompt_ids"][row], inputs["completion_ids"][row]])
    mask = torch.cat([torch.zeros(5), inputs["completion_mask"][row] * inputs["tool_mask"][row]]).bool()
    sampler = torch.cat([torch.zeros(5), inputs["sampling_per_token_logps"][row]])
    return Sample(
        token_ids=ids[present].numpy(),
        trainable=mask[present].numpy(),
        advantage=float(inputs["advantages"][row]),
        sampler_logprobs=sampler[present].numpy(),
    )


RUNS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "several iterations": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "several steps per generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["icepop", "gspo", "m2po", "decoupled_ppo_loglinear"])
def test_training_logs_the_loss_of_each_whole_step(name: str, run: str, tmp_path: Path) -> None:
    table = {"name": name, "denominator": "kept"} if name == "icepop" else {"name": name}
    trainer = make_trainer(tmp_path, table, trainer={"record_tokens": tmp_path / "tokens"}, **RUNS[run])
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    steps = list(Recording(tmp_path / "tokens").steps())
    assert len(logged) == len(steps) == trainer.args.max_steps
    for entry, step in zip(logged, steps, strict=True):
        result = keel.objective(table)(step.batch)
        assert entry["loss"] == pytest.approx(result.loss.item(), rel=1e-4, abs=1e-6)
        assert entry["keel/is_masked"] == pytest.approx(float((~result.keep).float().mean()))
        assert len(step.rows) == 4 * trainer.args.gradient_accumulation_steps
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


def test_groups_are_the_completions_of_one_prompt(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, "grpo", trainer={"record_tokens": tmp_path / "tokens"}, gradient_accumulation_steps=4, max_steps=2
    )
    trainer.train()
    for step in Recording(tmp_path / "tokens").steps():
        prompts: dict[str, set[str]] = {}
        for row in step.rows.to_pylist():
            text = b"".join(
                part for part, trains in zip(row["token_text"], row["trainable"], strict=True) if not trains
            )
            prompts.setdefault(row["group"], set()).add(text.decode())
        assert len(prompts) == 4 and all(len(texts) == 1 for texts in prompts.values())
        assert {text for texts in prompts.values() for text in texts} <= set(PROMPTS)


def test_a_step_without_a_kept_token_changes_nothing(tmp_path: Path) -> None:
    gates = [{"statistic": "ratio", "low": 2.0}]
    trainer = make_trainer(tmp_path, {"gates": gates}, weight_decay=0.5)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert [entry["keel/skipped_steps"] for entry in trainer.state.log_history if "loss" in entry] == [1.0, 1.0]


def test_a_missing_sampler_log_prob_drops_its_token(tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": [[40 + row, 41, 42] for row in range(len(prompts))],
            "logprobs": [[-5.0, None if row == 0 else -5.0, -5.0] for row in range(len(prompts))],
        }

    table = {"name": "icepop", "max_invalid_logprob_fraction": 0.2}
    trainer = make_trainer(tmp_path, table, trainer={"rollout_func": rollout}, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["keel/signal/invalid_logprob_tokens"] == pytest.approx(1 / 12)


def test_an_objective_the_host_cannot_serve_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    with pytest.raises(keel.ConfigError, match=r"teacher_tau = 1.0 needs log-probs of a teacher"):
        make_trainer(tmp_path, "on_policy_distillation")


@pytest.mark.parametrize(
    ("table", "engine"),
    [
        ({"name": "dapo", "reference_kl_coef": 0.1}, False),
        ({"name": "icepop", "kl_penalty_coef": 0.5}, False),
        ({"name": "icepop", "kl_penalty_coef": 0.5, "kl_penalty_source": "sampled"}, False),
        ({"name": "icepop", "kl_penalty_coef": 0.5, "kl_penalty_source": "sampled"}, True),
    ],
)
def test_trls_reference_model_serves_the_objective(table: dict[str, Any], engine: bool, tmp_path: Path) -> None:
    from keel.integrations.trl import keel_rollout

    network, tokenizer = tiny()
    for part in (network, tokenizer):
        part.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"model": str(tmp_path / "model"), "record_tokens": tmp_path / "tokens"}
    if engine:
        options["rollout_func"] = keel_rollout()
    changes = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4, "model_init_kwargs": FLOAT32}
    trainer = make_trainer(tmp_path, table, trainer=options, **changes)
    trainer.train()
    if engine:
        options["rollout_func"].close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry, step in zip(logged, Recording(tmp_path / "tokens").steps(), strict=True):
        assert entry["loss"] == pytest.approx(keel.objective(table)(step.batch).loss.item(), rel=1e-4, abs=1e-6)
    assert logged[-1]["keel/kl_policy_ref"] != 0


def test_evaluation_logs_the_loss_of_its_batch(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:2]])
    trainer = make_trainer(tmp_path, "gspo", trainer={"eval_dataset": rows}, per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert abs(metrics["eval_loss"]) < 1 and trainer.state.log_history[-1]["eval_keel/is_masked"] == 0
