"""`keel pool`: its output for real servers, its exit codes, and that text from a server is never interpreted."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from keel.cli import main
from keel.cli.run.pool import format_age
from keel.inference.protocol import EngineError
from keel.inference.server.app import build_app
from tests.inference.pool.test_vllm_engine import FakeVllm
from tests.support.engine_fakes import ANYWHERE, TOKENIZER, FakeEngine, serving

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(["pool", *argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def make_engine(version: int) -> FakeEngine:
    engine = FakeEngine()
    engine.live = version
    return engine


@pytest.fixture
def server() -> Iterator[str]:
    with serving(build_app(make_engine(3), TOKENIZER, model="tiny")) as url:
        yield url


def test_the_exit_code_is_0_if_all_members_are_ready(run: Any, server: str) -> None:
    code, out, err = run(server)
    assert (code, err) == (0, "")
    head, row, summary = out.splitlines()
    assert head.split() == ["member", "state", "version", "running", "waiting", "errors", "for", "last", "error"]
    assert row.split() == [server, "ready", "3", "0", "0", "0", "0", "s"]
    assert summary == "1 member: 1 ready"


def test_an_unreachable_member_is_exit_code_1_with_its_error(run: Any, server: str) -> None:
    code, out, err = run(server, NOWHERE)
    assert (code, err) == (1, "")
    assert re.search(rf"{server} +ready +3 ", out)
    assert re.search(rf"{NOWHERE} +unhealthy +- .*cannot be reached", out)
    assert out.endswith("2 members: 1 ready, 1 unhealthy\n")


def test_a_member_behind_the_newest_version_is_not_ready(run: Any, server: str) -> None:
    with serving(build_app(make_engine(5), TOKENIZER, model="tiny")) as newer:
        code, out, _ = run(server, newer)
    assert code == 1
    assert re.search(rf"{server} +syncing +3 .*holds version 3, the newest is 5", out)
    assert re.search(rf"{newer} +ready +5 ", out)


def test_without_load_no_weights_are_loaded_and_nothing_is_sampled(run: Any) -> None:
    fake = make_engine(0)
    with serving(build_app(fake, TOKENIZER, model="tiny")) as url:
        assert run(url)[0] == 0
    assert (fake.loaded, fake.calls) == ([], [])


@pytest.mark.process
def test_weights_and_adapters_are_loaded_into_all_members(run: Any, tmp_path: Path) -> None:
    folder = str(tmp_path.resolve())
    fakes = [make_engine(0), make_engine(2)]
    with ExitStack() as stack:
        apps = [build_app(fake, TOKENIZER, model="tiny", allowed_folders=ANYWHERE) for fake in fakes]
        urls = [stack.enter_context(serving(app)) for app in apps]
        code, out, _ = run(*urls, "--load", folder, "--version", "5")
        assert code == 0 and len(re.findall(r" ready +5 ", out)) == 2
        (tmp_path / "adapter_config.json").write_text("{}")
        assert run(*urls, "--load", folder, "--version", "6", "--drain")[0] == 0
        fakes[0].fail = lambda: EngineError("the disk is gone")
        code, out, _ = run(*urls, "--load", folder, "--version", "7", "--poll-interval", "0.2")
        assert code == 1 and "the disk is gone" in out and len(re.findall(r" ready +7 ", out)) == 1
        fakes[1].fail = fakes[0].fail
        code, _, err = run(*urls, "--load", folder, "--version", "8")
        assert code == 2 and "no member loaded version 8" in err
    assert fakes[1].loaded == [("weights", folder, 5), ("adapter", folder, 6), ("adapter", folder, 7)]


def test_weights_are_loaded_into_a_vllm_member(run: Any, tmp_path: Path) -> None:
    vllm = FakeVllm()
    with serving(vllm.app()) as url:
        code, _, err = run(url, "--load", str(tmp_path), "--version", "5")
        assert code == 2 and "is not a keel server" in err
        code, out, _ = run(url, "--backend", "vllm", "--load", str(tmp_path), "--version", "5")
    assert code == 0 and re.search(r" ready +5 ", out)
    assert vllm.weights == str(tmp_path.resolve())


def test_json_has_every_field(run: Any, server: str) -> None:
    code, out, err = run(server, NOWHERE, "--json")
    assert (code, err) == (1, "")
    payload = json.loads(out)
    ready, unhealthy = payload["members"]
    assert ready.pop("age") < 5
    assert ready == {
        "url": server,
        "state": "ready",
        "version": 3,
        "running": 0,
        "waiting": 0,
        "in_flight": 0,
        "requests": 0,
        "errors": 0,
        "last_error": "",
        "retiring": False,
    }
    assert (unhealthy["state"], unhealthy["version"], unhealthy["errors"]) == ("unhealthy", None, 1)
    assert payload["discovery_error"] == ""


def test_members_come_from_a_file_a_dns_name_or_a_url(run: Any, server: str, tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text(f"# engines\n{server}\n")
    assert run("--file", str(file))[0] == 0
    assert run("--dns", server.removeprefix("http://"))[0] == 0
    with serving(Starlette(routes=[Route("/members", lambda _: JSONResponse([server]))])) as registry:
        code, out, _ = run("--discovery-url", f"{registry}/members")
    assert code == 0
    assert server in out


def test_failed_discovery_is_exit_code_1(run: Any, tmp_path: Path) -> None:
    code, out, err = run("--file", str(tmp_path / "missing"))
    assert (code, err) == (1, "")
    assert "0 members: none found" in out
    assert "No such file or directory" in " ".join(out.split())


def test_the_api_key_is_sent_and_never_shown(run: Any, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with serving(build_app(make_engine(0), TOKENIZER, model="tiny", api_key="secret")) as url:
        assert run(url, "--api-key-file", str(key))[0] == 0
        assert run(url, "--api-key", "secret")[0] == 0
        code, out, _ = run(url, "--api-key", "wrong", "--json")
    # the server decides whether /health needs a key; a wrong key is never shown
    assert code in (0, 1)
    assert "wrong" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "pass the members as URLs, or with one of --dns, --file and --discovery-url"),
        ([NOWHERE, "--dns", "a:1"], "pass the members as URLs, or with one of --dns, --file and --discovery-url"),
        (["127.0.0.1:8000"], 'pool.urls: "127.0.0.1:8000" is not a URL; use a URL such as "http://10.0.0.1:8000"'),
        (["--dns", "engines"], 'pool.dns = "engines" is not host:port, such as "engines.internal:8000"'),
        (["--discovery-url", "x"], 'pool.discovery_url: "x" is not a URL; use a URL such as "http://10.0.0.1:8000"'),
        ([NOWHERE, "--poll-interval", "0"], "pool.poll_interval = 0.0: input should be greater than 0"),
        ([NOWHERE, "--timeout", "nan"], None),
        ([NOWHERE, "--version", "3"], "--version has no effect without --load DIR"),
        ([NOWHERE, "--drain"], "--drain has no effect without --load DIR"),
        ([NOWHERE, "--load", "."], "--load needs --version N, the version that sampled tokens are recorded with"),
        ([NOWHERE, "--load", "no-such-folder", "--version", "3"], "--load no-such-folder is not a folder"),
        ([NOWHERE, "--api-key-file", "no-such-file"], None),
    ],
)
def test_invalid_arguments_are_one_line_and_exit_code_2(run: Any, argv: list[str], message: str | None) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err == f"keel: {message}\n" if message else re.fullmatch(r"keel: .+\n", err)


@pytest.mark.parametrize("argv", [["--dns", "a:1", "--file", "b"], ["--nothing"], ["--poll-interval", "x"]])
def test_errors_of_argparse_are_exit_code_2(run: Any, argv: list[str]) -> None:
    code, _, err = run(*argv)
    assert code == 2
    assert err.startswith("usage: keel")


def test_text_from_a_server_cannot_control_the_terminal_and_is_not_markup(run: Any) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]hi[/] [/nonsense]\r\n\u202e" + "x" * 5000

    async def health(_: Request) -> Response:
        return JSONResponse({"ready": False, "version": 0, "error": evil}, 503)

    with serving(Starlette(routes=[Route("/health", health)])) as url:
        code, out, _ = run(url)
        _, machine, _ = run(url, "--json")
    assert code == 1
    assert out.replace("\n", "").isprintable()
    assert "[bold red]hi[/] [/nonsense]" in " ".join(out.split())
    assert len(out) < 2000
    assert len(json.loads(machine)["members"][0]["last_error"]) <= 200


def test_a_server_that_never_answers_times_out(run: Any) -> None:
    async def health(_: Request) -> Response:
        await asyncio.sleep(30)
        return Response()

    with serving(Starlette(routes=[Route("/health", health)]), timeout_graceful_shutdown=0) as url:
        start = time.monotonic()
        code, out, _ = run(url, "--timeout", "0.3")
        assert time.monotonic() - start < 5
    assert code == 1
    assert "did not respond within" in out


@pytest.mark.process
def test_watch_repeats_until_interrupted_and_does_not_import_torch(server: str) -> None:
    code = (
        # a shell starts background processes with SIGINT ignored, and their children inherit that
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from keel.cli import main;"
        f"code = main(['pool', '{server}', '--json', '--watch', '--poll-interval', '0.1']);"
        "sys.exit(code or 9 * ('torch' in sys.modules))"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as watching:
        assert watching.stdout is not None
        probes = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=20)
    assert [probe["members"][0]["state"] for probe in probes] == ["ready"] * 3
    assert (watching.returncode, err) == (0, "")


def test_help_shows_examples(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "examples:\n  keel pool " in out


def test_ages_are_formatted() -> None:
    assert [format_age(s) for s in (0, 59.4, 60, 3599, 7200, 1e6)] == ["0 s", "59 s", "1 min", "60 min", "2 h", "12 d"]
