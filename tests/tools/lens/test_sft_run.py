"""The lens shows a run of supervised fine-tuning: its losses, its conversations and the log-prob of every token."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from keel.tools.lens.queries import Lens
from keel.tools.lens.report import write_report
from keel.tools.lens.server import build_app
from tests.support.lens_browser import browser, missing
from tests.support.sft_runs import train_sft, write_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    train_sft(root / "run", write_rows(root / "train.jsonl"), steps=4, evaluation__every=2)
    return root / "run"


def test_every_view_of_the_run_can_be_read(run: Path) -> None:
    lens = Lens(run, read_seconds=5)
    facts = lens.query("run", {"run": "run"})
    assert [evaluation["step"] for evaluation in facts["evaluations"]] == [0, 2, 4]
    assert all(evaluation["numbers"]["loss"] > 0 for evaluation in facts["evaluations"])
    series = lens.query("series", {"run": "run", "names": "loss,entropy"})["values"]
    assert len(series["loss"]) == 4 and None not in series["loss"] + series["entropy"]
    for name in ("outcomes", "region", "texts"):
        assert lens.query(name, {"run": "run"}).get("unreadable", []) == []
    (group, *_) = lens.query("groups", {"run": "run", "step": "1"})["groups"]
    assert group["group"] == "sft#0" and group["task_id"].startswith("train.jsonl:")
    key = {"run": "run", "step": "1", "group": "sft#0", "member": "0", "attempt": "0", "sample": "0"}
    sample = lens.query("sample", key)
    assert [value is not None for value in sample["logprobs"]] == sample["trainable"]
    lens.close()


def test_a_report_can_be_written(run: Path, tmp_path: Path) -> None:
    assert write_report(run, tmp_path / "report.html", 5_000_000) > 100_000


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_app(run), log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


@pytest.mark.browser
@pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")
def test_the_page_shows_the_held_out_loss_and_the_trained_tokens(address: str) -> None:
    with browser() as window:
        window.open(f"{address}#view=overview")
        window.wait("return document.querySelectorAll('figure:nth-child(2) .entry').length === 2")
        assert "evaluation" in window.run("return document.querySelector('figure:nth-child(2)').innerText")
        assert "loss" in window.run("return [...document.querySelectorAll('th')].map((e) => e.innerText)")
        window.open("about:blank")
        window.open(f"{address}#view=tokens&run=run&step=1")
        window.wait("return document.querySelector('.block.own .t') !== null")
        assert window.run("return document.querySelector('.block.own').innerText").endswith("<|im_end|>")
        window.point(".block.own .t")
        facts = window.run("return document.querySelector('.token-facts').innerText")
        assert "p policy" in facts and "entropy" in facts
        assert window.log() == []
