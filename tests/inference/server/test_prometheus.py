"""Prometheus metrics: the text format, the counters of a server, and the exporter of a run."""

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
from keel.run.evaluation.evaluate import EvaluationResult
from keel.run.monitor.exporter import Exporter, ExporterServer
from tests.support.engine_fakes import TOKENIZER, FakeEngine, FakeStreamingEngine, until
from tests.support.tiny_runs import RECIPE

LINE = re.compile(
    r'(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (?P<value>\S+)'
)
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parse(page: str | bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples of a page in the text format; checks that each metric's type precedes its samples."""
    samples, typed = {}, set()
    for line in (page if isinstance(page, str) else page.decode()).split("\n")[:-1]:
        if line.startswith("# TYPE "):
            typed.add(line.split(" ")[2])
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert match["name"] in typed
        labels = re.findall(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"', match["labels"] or "")
        unescaped = tuple((name, re.sub(r"\\.", lambda escape: ESCAPES[escape[0]], value)) for name, value in labels)
        assert (match["name"], unescaped) not in samples
        samples[match["name"], unescaped] = float(match["value"].replace("Inf", "inf"))
    return samples


# --- the text format ---


def exported(metrics: dict[str, float], run: str = "r1") -> bytes:
    exporter = Exporter()
    exporter.started(run, Path("runs/r1"), 9, 2)
    exporter.step(3, metrics)
    return exporter.render()


def test_a_page_has_help_type_and_escaped_labels() -> None:
    page = exported({'a "b"\\c\n': 2.5, "d": 1e300}).decode()
    assert (
        '# HELP keel_run_info Run of this process.\n# TYPE keel_run_info gauge\nkeel_run_info{run="r1"} 1.0\n'
        "# HELP keel_run_steps Step at which the run ends.\n# TYPE keel_run_steps gauge\nkeel_run_steps 9.0\n"
    ) in page
    assert (
        "# HELP keel_run_metric Metrics of the last step by name.\n# TYPE keel_run_metric gauge\n"
        'keel_run_metric{name="a \\"b\\"\\\\c\\n"} 2.5\nkeel_run_metric{name="d"} 1e+300\n'
    ) in page


def test_non_finite_values_are_written_as_prometheus_expects() -> None:
    page = exported({"a": float("nan"), "b": float("inf"), "c": float("-inf")}).decode()
    lines = [line for line in page.split("\n") if line.startswith("keel_run_metric{")]
    assert [line.split(" ")[1] for line in lines] == ["NaN", "+Inf", "-Inf"]


@given(st.text().filter(lambda label: "\r" not in label), st.floats(allow_nan=False))
def test_any_label_and_value_survive_a_round_trip(label: str, value: float) -> None:
    samples = parse(exported({label: value}, run=label))
    assert samples["keel_run_metric", (("name", label),)] == value
    assert samples["keel_run_info", (("run", label),)] == 1


def test_a_label_that_is_not_valid_unicode_does_not_break_the_page() -> None:
    for page in (exported({"\ud800\r": 1}), exported({}, run="\ud800\r"), server_page(FakeEngine(), model="\ud800\r")):
        text = page.decode()
        assert len(text.splitlines()) == text.count("\n")
        parse(text)


def server_page(engine: Any, model: str) -> bytes:
    async def run() -> bytes:
        transport = httpx.ASGITransport(build_app(engine, TOKENIZER, model=model))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/metrics")).content

    return asyncio.run(run())


# --- a server ---


def send_requests(engine: Any, *requests: tuple[str, Any], key: str | None = None) -> list[httpx.Response]:
    """Send requests (path, JSON body or None for GET) to one server, one after another."""

    async def run() -> list[httpx.Response]:
        app = build_app(engine, TOKENIZER, model='tiny "1"', api_key=key)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return [
                await (client.get(path) if body is None else client.post(path, json=body)) for path, body in requests
            ]

    return asyncio.run(run())


REQUEST = ("/v1/completions", {"prompt": [97, 98, 99], "n": 2})
"""A request for two completions, which have four tokens each."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_counts_tokens_completions_and_requests(stream: bool) -> None:
    request = (REQUEST[0], {**REQUEST[1], "stream": stream})
    *_, last = send_requests(
        FakeStreamingEngine(), request, request, ("/v1/completions", {}), ("/nowhere/7", None), ("/metrics", None)
    )
    page = parse(last.text)
    assert last.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert page["keel_info", (("model", 'tiny "1"'),)] == 1
    assert page["keel_ready", ()] == 1
    assert page["keel_version", ()] == 3
    assert page["keel_completions_running", ()] == page["keel_completions_in_flight", ()] == 0
    assert page["keel_tokens_sampled_total", ()] == 16
    assert page["keel_completions_total", (("finish", "stop"),)] == 4
    assert page["keel_completions_failed_total", ()] == 0
    assert page["keel_requests_total", (("path", "/v1/completions"), ("status", "200"))] == 2
    assert page["keel_requests_total", (("path", "/v1/completions"), ("status", "400"))] == 1
    # clients cannot create new series by requesting other paths
    assert page["keel_requests_total", (("path", "other"), ("status", "404"))] == 1


def test_a_failed_stream_is_counted_with_the_tokens_it_sampled() -> None:
    engine = FakeStreamingEngine()
    engine.break_after = 3
    request = ("/v1/completions", {"prompt": [97, 98, 99], "stream": True})
    page = parse(send_requests(engine, request, ("/metrics", None))[-1].text)
    assert page["keel_tokens_sampled_total", ()] == 3
    assert page["keel_completions_failed_total", ()] == 1


def test_engine_failures_are_counted() -> None:
    engine = FakeEngine()
    engine.fail = lambda: EngineError("broken")
    responses = send_requests(engine, REQUEST, ("/metrics", None))
    page = parse(responses[-1].text)
    assert page["keel_completions_failed_total", ()] >= 1
    assert page["keel_requests_total", (("path", "/v1/completions"), ("status", str(responses[0].status_code)))] == 1


def test_metrics_require_the_key() -> None:
    assert send_requests(FakeEngine(), ("/metrics", None), key="secret")[0].status_code == 401


# --- a run ---


def test_an_exporter_shows_the_latest_state() -> None:
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


def test_the_exporter_serves_this_machine_only_and_frees_its_port() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = ExporterServer(Exporter(), listener)
    server.start()
    try:
        url = f"http://127.0.0.1:{port}/metrics"
        assert "keel_run_step 0.0\n" in httpx.get(url, timeout=10).text
        # DNS rebinding: a web page whose domain resolves to this machine
        assert httpx.get(url, headers={"host": "evil.example"}, timeout=10).status_code == 403
    finally:
        server.stop()
    socket.create_server(("127.0.0.1", port)).close()


def test_a_metrics_port_in_use_is_an_error_before_the_run_folder_is_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--metrics-port", port]) == 2
    assert f"--metrics-port {port}: cannot listen" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_metrics_of_a_run_are_served_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.run import loop

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pages: list[Any] = []

    async def train_one_step(self: Any) -> None:
        """Call the callbacks as the loop does, without a model, and read the page during the run."""
        self.callback.started("mine", self.folder.path, 6, 0)
        self.callback.step(1, {"reward": 0.75})
        thread = threading.Thread(
            target=lambda: pages.append(parse(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text))
        )
        thread.start()
        until(lambda: not thread.is_alive())
        self.ledger.set_status("finished")

    monkeypatch.setattr(loop.TrainingRun, "train", train_one_step)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--metrics-port", str(port)]) == 0
    assert pages[0]["keel_run_metric", (("name", "reward"),)] == 0.75
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10)
