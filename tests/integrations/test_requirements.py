"""An objective is exact in a host, or refused with the setting that the host cannot serve."""

import subprocess
import sys

import pytest

import keel
from keel.integrations.requirements import Host, preset_table, requirements
from keel.integrations.trl.options import GRPO_HOST, async_host
from keel.objectives import PRESETS

TOKEN_HOST = Host(name="a token mean", gives={"sampler_logprobs": "", "token_count": ""})


def test_needs_follow_from_the_composition() -> None:
    needs = {name: set(requirements(preset.resolve({})[1])) for name, preset in PRESETS.items()}
    assert needs["icepop"] == {"sampler_logprobs", "token_count"}
    assert needs["gspo"] == {"sampler_logprobs", "sequence_count", "complete_sequences"}
    assert needs["m2po"] == {"sampler_logprobs", "token_count", "step_logprobs"}
    assert needs["tis"] == {"sampler_logprobs", "proximal_logprobs", "token_count"}
    assert needs["decoupled_ppo_loglinear"] == {"sampler_logprobs", "versions", "token_count"}
    assert needs["on_policy_distillation"] == {"sampler_logprobs", "teacher_logprobs", "token_count"}
    assert needs["cross_entropy"] == {"token_count"}


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"name": "gspo"}, 'policy.level = "sequence" needs all tokens of a sequence in one call'),
        ({"name": "opsm"}, 'the gate on sequence_kl with scope = "sequence" needs all tokens'),
        (
            {"name": "m2po"},
            'the gate on second_moment with scope = "step" needs log-probs of the policy over the whole',
        ),
        (
            {"name": "icepop", "denominator": "kept"},
            'denominator = "kept" needs log-probs of the policy over the whole',
        ),
        ({"name": "icepop", "roles": [1]}, "roles = [1] needs the role of each token"),
        ({"name": "icepop", "kl_penalty_coef": 0.1}, "kl_penalty_coef = 0.1 needs log-probs of a reference model"),
        ({"name": "dr_grpo"}, 'reduction over "constant" needs the number of sequences'),
    ],
)
def test_a_refusal_names_the_setting_and_what_is_missing(table: dict[str, object], reason: str) -> None:
    objective = keel.objective(table)
    with pytest.raises(keel.ConfigError) as error:
        TOKEN_HOST.check(objective.composition, objective.name)
    assert reason in str(error.value)
    assert f'objective "{table["name"]}" cannot be computed exactly in a token mean' in str(error.value)


def test_trl_refuses_only_what_it_has_no_input_for() -> None:
    assert [name for name, exact, _ in preset_table(GRPO_HOST) if exact == "no"] == ["on_policy_distillation"]
    refused = {name for name, exact, _ in preset_table(async_host(1)) if exact == "no"}
    assert refused == {"on_policy_distillation", "decoupled_ppo_loglinear"}
    assert {name for name, exact, _ in preset_table(async_host(2)) if exact == "no"} == refused | {"m2po"}


def test_the_tables_need_neither_torch_nor_trl() -> None:
    code = "import sys, keel.integrations.requirements, keel.integrations.trl.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
