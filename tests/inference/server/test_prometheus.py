"""Claims of the Prometheus pages: the text format, what servers count, and a run's numbers while it runs."""

import asyncio
import re
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.cli import main
from keel.inference.protocol import EngineError
from keel.inference.server.app import build_app
from keel.inference.server.prometheus import MetricFamily, render_metrics, single_value_family
from keel.run.evaluate import EvaluationResult
from keel.run.monitor.exporter import Exporter, ExporterServer
from tests.support.engine_fakes import TOKENIZER, FakeEngine, FakeStreamingEngine, until
from tests.support.run_world import RECIPE

LINE = re.compile(
    r'(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (?P<value>\S+)'
)
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parse(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a page, by the rules of the format; every family has its help and type before its samples."""
    found, typed = {}, set()
    for line in page.split("\n")[:-1]:
        if line.startswith("# TYPE "):
            typed.add(line.split(" ")[2])
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert match["name"] in typed
        labels = re.findall(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"', match["labels"] or "")
        plain = tuple((name, re.sub(r"\\.", lambda one: ESCAPES[one[0]], value)) for name, value in labels)
        assert (match["name"], plain) not in found
        found[match["name"], plain] = float(match["value"].replace("Inf", "inf"))
    return found


# --- the format ---


def test_the_page_of_known_numbers() -> None:
    page = render_metrics(
        [
            single_value_family("keel_ready", "gauge", "Ready.", True),
            MetricFamily(
                "keel_x_total", "counter", "X,\nby kind.", [({"kind": 'a "b"\\c\n'}, 2.5), ({"kind": "d"}, 1e300)]
            ),
        ]
    )
    assert page == (
        "# HELP keel_ready Ready.\n# TYPE keel_ready gauge\nkeel_ready 1\n"
        "# HELP keel_x_total X,\\nby kind.\n# TYPE keel_x_total counter\n"
        'keel_x_total{kind="a \\"b\\"\\\\c\\n"} 2.5\nkeel_x_total{kind="d"} 1e+300\n'
    )


def test_numbers_that_are_not_finite_have_their_words() -> None:
    values = [({"a": str(at)}, value) for at, value in enumerate((float("nan"), float("inf"), float("-inf")))]
    lines = render_metrics([MetricFamily("x", "gauge", "X.", values)]).split("\n")[2:5]
    assert [line.split(" ")[1] for line in lines] == ["NaN", "+Inf", "-Inf"]


@given(st.text().filter(lambda label: "\r" not in label), st.floats(allow_nan=False))
def test_any_label_and_any_number_come_back(label: str, value: float) -> None:
    assert parse(render_metrics([single_value_family("x", "gauge", "X.", value, label=label)])) == {
        ("x", (("label", label),)): value
    }


def test_text_that_has_no_bytes_is_still_a_page() -> None:
    page = render_metrics([single_value_family("x", "gauge", "X.", 1, label="\ud800\r")])
    assert page.encode().count(b"\n") == 3
    assert len(page.splitlines()) == 3


# --- a server ---


def talk(engine: Any, *asked: tuple[str, Any], key: str | None = None) -> list[httpx.Response]:
    """Requests to one server, one after another."""

    async def run() -> list[httpx.Response]:
        app = build_app(engine, TOKENIZER, model='tiny "1"', api_key=key)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [await (client.get(path) if body is None else client.post(path, json=body)) for path, body in asked]

    return asyncio.run(run())


ASK = ("/v1/completions", {"prompt": [97, 98, 99], "n": 2})
"""Two answers of four tokens each."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_counts_tokens_answers_and_requests(stream: bool) -> None:
    asked = (ASK[0], {**ASK[1], "stream": stream})
    last = talk(FakeStreamingEngine(), asked, asked, ("/v1/completions", {}), ("/nowhere/7", None), ("/metrics", None))
    page = parse(last[-1].text)
    assert last[-1].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert page["keel_info", (("model", 'tiny "1"'),)] == 1
    assert page["keel_ready", ()] == 1
    assert page["keel_version", ()] == 3
    assert page["keel_completions_running", ()] == page["keel_completions_in_flight", ()] == 0
    assert page["keel_tokens_sampled_total", ()] == 16
    assert page["keel_completions_total", (("finish", "stop"),)] == 4
    assert page["keel_completions_failed_total", ()] == 0
    assert page["keel_requests_total", (("path", "/v1/completions"), ("status", "200"))] == 2
    assert page["keel_requests_total", (("path", "/v1/completions"), ("status", "400"))] == 1
    # clients cannot make new series by asking for other paths
    assert page["keel_requests_total", (("path", "other"), ("status", "404"))] == 1


def test_answers_that_break_off_are_counted_with_the_tokens_they_had() -> None:
    engine = FakeStreamingEngine()
    engine.break_after = 3
    asked = ("/v1/completions", {"prompt": [97, 98, 99], "stream": True})
    page = parse(talk(engine, asked, ("/metrics", None))[-1].text)
    assert page["keel_tokens_sampled_total", ()] == 3
    assert page["keel_completions_failed_total", ()] == 1


def test_an_engine_that_fails_is_counted() -> None:
    engine = FakeEngine()
    engine.fail = lambda: EngineError("broken")
    answers = talk(engine, ASK, ("/metrics", None))
    page = parse(answers[-1].text)
    assert page["keel_completions_failed_total", ()] >= 1
    assert page["keel_requests_total", (("path", "/v1/completions"), ("status", str(answers[0].status_code)))] == 1


def test_metrics_are_behind_the_key() -> None:
    assert talk(FakeEngine(), ("/metrics", None), key="secret")[0].status_code == 401


# --- a run ---


def test_an_exporter_shows_what_it_was_told_last() -> None:
    exporter = Exporter()
    assert parse(exporter.render())["keel_run_stage", (("stage", "loading"),)] == 1
    exporter.started("mine", Path("runs/mine"), 9, 2)
    exporter.waiting("sampling: 3 groups ready")
    exporter.step(3, {"reward": 0.5, "loss": float("nan")})
    exporter.evaluated(3, EvaluationResult("larger_number", 0.5, 0.25, 0.75, 4, 1, {1: 0.5}, 0, 1.0))
    page = parse(exporter.render())
    assert page["keel_run_info", (("run", "mine"),)] == 1
    assert (page["keel_run_step", ()], page["keel_run_steps", ()]) == (3, 9)
    assert page["keel_run_metric", (("name", "reward"),)] == 0.5
    assert page["keel_run_stage", (("stage", "sampling"),)] == 1
    assert sum(value for (name, _), value in page.items() if name == "keel_run_stage") == 1
    assert page["keel_run_evaluation", (("environment", "larger_number"), ("name", "pass@1"))] == 0.5
    assert page["keel_run_evaluation", (("environment", "larger_number"), ("name", "step"))] == 3


def test_its_server_answers_this_machine_by_its_own_name_and_frees_its_port() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    server = ExporterServer(Exporter(), listener)
    server.start()
    try:
        url = f"http://127.0.0.1:{number}/metrics"
        assert "keel_run_step 0\n" in httpx.get(url, timeout=10).text
        # a page whose domain points here is not this machine
        assert httpx.get(url, headers={"host": "evil.example"}, timeout=10).status_code == 403
    finally:
        server.stop()
    socket.create_server(("127.0.0.1", number)).close()


def test_a_metrics_port_that_is_taken_is_refused_before_there_is_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--metrics-port", number]) == 2
    assert f"--metrics-port {number}: cannot listen" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_numbers_of_a_run_are_served_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.run import loop

    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    seen: list[Any] = []

    async def train_one_step(self: Any) -> None:
        """The loop's calls, without a model: the page is read in the middle of a run."""
        self.callback.started("mine", self.folder.path, 6, 0)
        self.callback.step(1, {"reward": 0.75})
        thread = threading.Thread(
            target=lambda: seen.append(parse(httpx.get(f"http://127.0.0.1:{number}/metrics", timeout=10).text))
        )
        thread.start()
        until(lambda: not thread.is_alive())
        self.ledger.set_status("finished")

    monkeypatch.setattr(loop.TrainingRun, "train", train_one_step)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--metrics-port", str(number)]) == 0
    assert seen[0]["keel_run_metric", (("name", "reward"),)] == 0.75
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{number}/metrics", timeout=10)
