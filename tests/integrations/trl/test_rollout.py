"""Keel's engine samples for TRL: with the weights of the current step, and with the trainer's own log-probs."""

from pathlib import Path
from typing import Any

import pytest

import keel
from keel.integrations.trl import keel_rollout
from tests.support.trl_trainers import NO_TRL, make_trainer

pytest.importorskip("trl", reason=NO_TRL)
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")]


@pytest.mark.parametrize("lora", [False, True])
def test_completions_come_from_the_current_weights(lora: bool, tmp_path: Path) -> None:
    rollout = keel_rollout()
    options: dict[str, Any] = {"rollout_func": rollout}
    if lora:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=64)
    trainer = make_trainer(tmp_path, "icepop", trainer=options, num_iterations=2, max_steps=6, learning_rate=1e-2)
    trainer.train()
    rollout.close()
    mismatch = [entry["keel/mismatch_kl"] for entry in trainer.state.log_history if "loss" in entry]
    # steps 1, 3 and 5 train on completions of the current weights, steps 2, 4 and 6 one step later
    assert max(mismatch[::2]) < 1e-8
    assert min(mismatch[1::2]) > 1e-5


def test_trls_own_trainer_can_use_it(tmp_path: Path) -> None:
    rollout = keel_rollout(max_batch=3)
    trainer = make_trainer(tmp_path, trainer={"rollout_func": rollout}, max_steps=1)
    trainer.train()
    rollout.close()
    assert trainer.state.log_history[0]["completions/mean_length"] > 0


def test_runs_with_the_same_seed_sample_the_same(tmp_path: Path) -> None:
    sampled = []
    for _ in range(2):
        rollout = keel_rollout()
        trainer = make_trainer(tmp_path, trainer={"rollout_func": rollout})
        sampled.append(rollout(["abc", "abc", "x"], trainer)["completion_ids"])
        rollout.close()
    assert sampled[0] == sampled[1] and sampled[0][0] != sampled[0][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, r"GRPOConfig.top_p = 0.9 changes the distribution"),
        ({"generation_kwargs": {"num_beams": 2}}, r"GRPOConfig.generation_kwargs = .* has no effect with keel_rollout"),
    ],
)
def test_options_the_engine_cannot_follow_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    rollout = keel_rollout()
    trainer = make_trainer(tmp_path, trainer={"rollout_func": rollout}, **options)
    with pytest.raises(keel.ConfigError, match=message):
        rollout(["abc"], trainer)
    rollout.close()


def test_only_an_engine_in_this_process_is_possible() -> None:
    with pytest.raises(keel.ConfigError, match=r'kind="vllm"'):
        keel_rollout(kind="vllm")
