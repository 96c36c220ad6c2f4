"""The pages about other trainers: their tables are those of the code, and their examples run."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from keel.integrations.requirements import preset_table
from keel.integrations.trl.options import GRPO_HOST, REPLACED_BY
from tests.docs.test_pages import blocks
from tests.support.paths import ROOT
from tests.support.trl_trainers import NO_TRL, tiny

TRL_PAGE = "docs/integrations/trl.md"


def test_the_table_of_presets_is_computed_from_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| (.*?) ?\|$", (ROOT / TRL_PAGE).read_text(), re.MULTILINE)
    assert rows == preset_table(GRPO_HOST)


def test_every_refused_option_is_named() -> None:
    text = (ROOT / TRL_PAGE).read_text()
    covered = ("sapo_", "vespo_", "vllm_importance_sampling_")
    assert all(f"`{name}`" in text for name in REPLACED_BY if not name.startswith(covered))


def test_the_example_for_another_trainer_prints_what_is_shown() -> None:
    page, out = "docs/integrations/index.md", io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(blocks(page, "python")[0], page, "exec"), {})
    assert out.getvalue() == blocks(page, "")[0]


@pytest.mark.hosts
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_the_example_with_trl_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl", reason=NO_TRL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")  # TRL then sends no telemetry
    network, tokenizer = tiny()
    for part in (network, tokenizer):
        part.save_pretrained("model")
    example = blocks(TRL_PAGE, "python")[0].replace("HuggingFaceTB/SmolLM2-135M-Instruct", "model")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, TRL_PAGE, "exec"), {})
    first, second = (eval(line) for line in out.getvalue().splitlines()[-2:])
    shown = [eval(line) for line in blocks(TRL_PAGE, "")[0].splitlines()]
    assert [list(first), list(second)] == [list(entry) for entry in shown]
    assert first["keel/mismatch_kl"] == 0 == first["keel/skipped_steps"]
    assert len(list((tmp_path / "tokens").glob("step_*.parquet"))) == 2
