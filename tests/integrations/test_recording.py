"""Recorded tokens of a host are a step that `keel compare` reads, with the same loss."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import keel
from keel.cli import main
from keel.integrations.conversion import from_padded
from keel.integrations.recording import SCHEMA, TokenRecorder
from keel.run import records
from keel.tools.compare.readers import Recording

LOSS_MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])
TOKEN_IDS = torch.arange(14).view(2, 7)
ATTENTION = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]])


def record(folder: Path) -> keel.ObjectiveResult:
    torch.manual_seed(1)
    sampler = -2 * torch.rand(2, 4)
    batch = from_padded(
        sampler + 2 * torch.randn(2, 4),
        LOSS_MASK,
        sampler_logprobs=sampler,
        advantages=torch.tensor([1.0, -0.5]),
        group=torch.tensor([4, 4]),
        version=torch.tensor([2, 3]),
        trainer_version=3,
    )
    result = keel.objective("icepop", ratio_high=1.5)(batch)
    recorder = TokenRecorder(folder, lambda ids: f"<{ids[0]}>", temperature=0.7)
    recorder.add(batch, result, TOKEN_IDS, ATTENTION, LOSS_MASK)
    recorder.write(1, 3, recorder.take_rows())
    return result


def test_the_recorded_step_has_the_loss_of_the_step(tmp_path: Path) -> None:
    result = record(tmp_path)
    table = pq.read_table(tmp_path / "step_000001.parquet")
    (step,) = Recording(tmp_path).steps()
    assert float(keel.objective("icepop", ratio_high=1.5)(step.batch).loss) == pytest.approx(float(result.loss))
    first, second = table.to_pylist()
    assert first["token_ids"] == [1, 2, 3, 4, 5] and first["trainable"] == [False, False, True, True, True]
    assert first["token_text"][0] == "<1>" and first["versions"] == [-1, -1, 2, 2, 2]
    assert second["trainable"] == [False] * 3 + [True, False, True, True]
    dropped = [reason for row in (first, second) for reason in row["drop_reason"] if reason]
    assert len(dropped) == int((~result.keep).sum()) > 0


def test_keel_compare_reads_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "tokens")
    assert main(["compare", str(tmp_path / "tokens"), "--objectives", "icepop,dapo"]) == 0
    assert "icepop" in capsys.readouterr().out


def test_columns_are_those_of_keels_own_records() -> None:
    extra = {"proximal_logprobs"}
    assert set(SCHEMA.names) - extra <= set(records.SCHEMA.names)
    for name in set(SCHEMA.names) - extra - {"advantage"}:  # a host may have an advantage for each token
        assert SCHEMA.field(name).type == records.SCHEMA.field(name).type, name
