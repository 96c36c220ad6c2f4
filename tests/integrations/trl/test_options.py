"""Options of GRPOConfig that Keel's objective replaces are refused by name."""

from pathlib import Path
from typing import Any

import pytest

import keel
from keel.integrations.trl.options import REPLACED_BY, check_replaced, prepare_grpo_args, truncating_options
from tests.support.trl_trainers import NO_TRL, config

pytest.importorskip("trl", reason=NO_TRL)
pytestmark = pytest.mark.hosts

DAPO = keel.objective("dapo").composition


def prepare(folder: Path, table: dict[str, Any] | None = None, *, recorded: bool = True, **changes: Any) -> Any:
    composition = DAPO if table is None else keel.objective(table).composition
    return prepare_grpo_args(config(folder, **changes), composition, recorded=recorded)


CHANGES = {
    **dict.fromkeys(REPLACED_BY, 0.5),
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "use_bias_correction_kl": False,
    "use_adaptive_entropy": True,
    "vllm_importance_sampling_mode": "token_mask",
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", REPLACED_BY)
def test_an_option_of_trls_loss_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(keel.ConfigError) as error:
        prepare(tmp_path, **{name: CHANGES[name]})
    # the deprecated cap sets the maximum, which is then the option that is named
    named = "vllm_importance_sampling_clip_max" if name == "vllm_importance_sampling_cap" else name
    assert str(error.value).startswith(f"GRPOConfig.{named} = {CHANGES[name]!r} has no effect with KeelGRPOTrainer")


def test_every_option_of_the_table_exists(tmp_path: Path) -> None:
    assert all(hasattr(config(tmp_path), name) for name in REPLACED_BY)


def test_beta_is_the_coefficient_of_the_objective(tmp_path: Path) -> None:
    table = {"name": "dapo", "reference_kl_coef": 0.04}
    assert prepare(tmp_path, table).beta == prepare(tmp_path, table, beta=0.04).beta == 0.04
    assert prepare(tmp_path, {"name": "icepop", "kl_penalty_coef": 0.3}).beta == 0.3
    with pytest.raises(keel.ConfigError, match=r"beta = 0.1 contradicts the objective, whose coefficient is 0.04"):
        prepare(tmp_path, table, beta=0.1)
    with pytest.raises(keel.ConfigError, match=r"beta = 0.1 has no effect: .* set reference_kl_coef = 0.1"):
        prepare(tmp_path, beta=0.1)


def test_a_step_must_not_span_two_generations(tmp_path: Path) -> None:
    with pytest.raises(keel.ConfigError, match=r"steps_per_generation = 2 must be a multiple of gradient_acc.* = 4"):
        prepare(tmp_path, gradient_accumulation_steps=4, steps_per_generation=2)
    assert prepare(tmp_path, gradient_accumulation_steps=2, steps_per_generation=4).steps_per_generation == 4


def test_a_changed_distribution_needs_recorded_log_probs(tmp_path: Path) -> None:
    with pytest.raises(keel.ConfigError, match=r"top_p = 0.9 changes the distribution that model.generate samples"):
        prepare(tmp_path, top_p=0.9, recorded=False)
    assert prepare(tmp_path, top_p=0.9).top_p == 0.9
    assert truncating_options(config(tmp_path)) == []
    assert truncating_options(config(tmp_path, top_k=5, min_p=0.1, repetition_penalty=1.2)) == [
        "top_k = 5",
        "min_p = 0.1",
        "repetition_penalty = 1.2",
    ]


def test_the_users_configuration_is_not_changed(tmp_path: Path) -> None:
    args = config(tmp_path)
    prepared = prepare_grpo_args(args, keel.objective("dapo", reference_kl_coef=0.1).composition, recorded=True)
    assert args.beta == 0 and args.vllm_importance_sampling_correction
    assert prepared.beta == 0.1 and not prepared.vllm_importance_sampling_correction
    check_replaced(prepared, "KeelGRPOTrainer")
