"""Fuzz the HTTP servers with requests generated from their OpenAPI descriptions, and with hostile requests.

The servers are real, on a local port; the engine is the tiny model. No request may cause a server error, and no file
outside the run folder may be opened.
"""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.routing import Route

from keel.config import EngineSettings, ModelSettings
from keel.inference.local.local_engine import LocalEngine
from keel.inference.server.allowed_paths import AllowedFolders
from keel.inference.server.app import build_app
from keel.inference.server.openai_requests import IGNORED_FIELDS, NO_OP_VALUES, CompletionRequest, Limits
from keel.tools.lens.queries import QUERIES
from keel.tools.lens.server import build_app as build_lens
from keel.training import load_model
from tests.support.engine_fakes import TOKENIZER, FakeEngine, serving
from tests.support.file_watch import untouched
from tests.support.lens_runs import make_run

pytestmark = pytest.mark.fuzz

FUZZING = settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# a schema cannot express everything: an empty prompt is a valid string and is rejected
EXCLUDED_CHECKS = [positive_data_acceptance]


CLIENT = httpx.Client(timeout=30)
QUERY_PATH = "/query"
"""Path of the lens's queries."""


@pytest.fixture(scope="module", autouse=True)
def _close_client() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the servers must not read."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "secret": "zebra-42"}))
    (folder / "model.safetensors").write_bytes(b"zebra-42")
    (folder / "run.db").write_bytes(b"zebra-42")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, outside: Path) -> Path:
    """Return a folder with a run, its published weights, and links to files outside."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "a", steps=2)
    weights = folder / "a" / "weights"
    weights.mkdir()
    (weights / "link").symlink_to(outside)
    (weights / "inside").mkdir()
    (weights / "inside" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (weights / "loop").symlink_to(weights / "loop")
    return folder


@pytest.fixture(scope="module")
def engine_app(runs: Path) -> Any:
    model = load_model(ModelSettings(name="tiny"))
    engine = LocalEngine(model.network, model.tokenizer, EngineSettings(max_batch=8))
    limits = Limits(max_tokens=4, n=3, prompts_per_request=3, body_bytes=100_000)
    return build_app(engine, model.tokenizer, model="tiny", limits=limits, allowed_folders=AllowedFolders([runs]))


@pytest.fixture(scope="module")
def engine_url(engine_app: Any) -> Iterator[str]:
    with serving(engine_app) as url:
        yield url


@pytest.fixture(scope="module")
def lens_url(runs: Path) -> Iterator[str]:
    with serving(build_lens(runs)) as url:
        yield url


def fuzz_all(url: str, *, skip_valid: str = "") -> dict[str, set[int]]:
    """Send valid and invalid requests to every described operation; return the status codes per operation."""
    statuses: dict[str, set[int]] = {}
    for loaded in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = loaded.ok()
        has_input = operation.body or operation.query
        for mode in GenerationMode if has_input else [GenerationMode.POSITIVE]:
            if mode is GenerationMode.NEGATIVE or operation.path != skip_valid:
                fuzz_operation(operation, mode, url, statuses.setdefault(operation.label, set()))
    return statuses


def fuzz_operation(operation: Any, mode: GenerationMode, url: str, statuses: set[int]) -> None:
    @FUZZING
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(base_url=url, session=session)
        if response.text == "Invalid HTTP request received.":
            return  # the request line is longer than servers accept
        statuses.add(response.status_code)
        case.validate_response(response, excluded_checks=EXCLUDED_CHECKS)

    with requests.Session() as session:
        send()


def test_the_engine_server_handles_valid_and_invalid_requests(engine_url: str, outside: Path) -> None:
    with untouched(outside):
        # a valid request would wait for a broadcast that never comes
        statuses = fuzz_all(engine_url, skip_valid="/v1/receive_weights")
    assert {200, 400} <= statuses["POST /v1/completions"]
    assert {200, 400} <= statuses["POST /v1/chat/completions"]
    assert 403 in statuses["POST /v1/load_weights"]
    assert CLIENT.get(f"{engine_url}/health").json()["ready"]


def test_the_lens_handles_valid_and_invalid_requests(lens_url: str, outside: Path) -> None:
    with untouched(outside):
        statuses = fuzz_all(lens_url)
    assert statuses[f"GET {QUERY_PATH}/runs"] == {200}
    assert {name.removeprefix(f"GET {QUERY_PATH}/") for name in statuses} == set(QUERIES)


HOSTILE_PATHS = [
    "{outside}",
    "{outside}/",
    "{runs}/../{name}",
    "{runs}/a/weights/../../../{name}",
    "{runs}/a/weights/link",
    "{runs}/a/weights/inside",
    "{runs}/a/weights/loop",
    "{runs}/a/weights/none",
    "../../../../../../../../..{outside}",
    "/",
    "/proc/self/cwd",
    "/proc/self/fd/0",
    "~",
    "$HOME",
    "file://{outside}",
    "http://127.0.0.1:1/x",
    "hub-user/hub-model",
    "a\x00b",
    "{runs}/a\x00/../../{name}",
    "x" * 5000,
    "/".join("x" * 900),
    ".",
    "..",
    " ",
    "\u202e\ud7ff",
    "//{outside}",
    "{runs}x",
]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [("/v1/load_weights", "folder", {"version": 1}), ("/v1/load_lora_adapter", "lora_path", {})],
)
def test_no_request_loads_weights_from_outside_the_allowed_folders(
    engine_url: str, runs: Path, outside: Path, path: str, field: str, more: dict[str, int]
) -> None:
    with untouched(outside):
        for hostile in HOSTILE_PATHS:
            value = hostile.format(outside=outside, runs=runs, name=outside.name)
            response = CLIENT.post(f"{engine_url}{path}", json={field: value, **more})
            assert response.status_code in (400, 403), (hostile, response.text)
            assert "zebra" not in response.text
    assert CLIENT.get(f"{engine_url}/version").json()["version"] == 0


def test_responses_do_not_reveal_whether_outside_files_exist(engine_url: str, outside: Path) -> None:
    existing, missing = (
        CLIENT.post(f"{engine_url}/v1/load_weights", json={"folder": str(folder), "version": 1}).text
        for folder in (outside, outside.with_name("missing"))
    )
    assert existing.replace(outside.name, "missing") == missing


def test_no_query_parameter_reads_outside_the_runs(lens_url: str, runs: Path, outside: Path) -> None:
    with untouched(outside):
        for hostile in HOSTILE_PATHS:
            value = hostile.format(outside=outside, runs=runs, name=outside.name)
            for name, declared in QUERIES.items():
                params = dict.fromkeys(declared, value) | {"step": 1} if declared else {}
                shown = {key: params[key] for key in params if key in declared}
                while (response := CLIENT.get(f"{lens_url}{QUERY_PATH}/{name}", params=shown)).status_code == 429:
                    time.sleep(0.2)  # more requests than the server allows in a second
                assert response.status_code in (200, 400, 404), (name, hostile, response.text)
                assert "zebra" not in response.text
    for path in (
        f"/assets/..%2f..%2f..{outside}/run.db",
        "/assets//etc/passwd",
        f"{QUERY_PATH}/..%2f..{outside}/run.db",
    ):
        assert CLIENT.get(f"{lens_url}{path}").status_code == 404


@pytest.mark.parametrize("server", ["engine_url", "lens_url"])
def test_malformed_requests_end_only_their_connection(server: str, request: pytest.FixtureRequest) -> None:
    url = httpx.URL(request.getfixturevalue(server))

    @settings(FUZZING, max_examples=40)
    @given(
        head=st.sampled_from([b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"]),
        rest=st.binary(max_size=80)
        | st.sampled_from([b"content-length: 99999999999999999999\r\n\r\n", b"content-length: -1\r\n\r\n"])
        | st.sampled_from(
            [b"transfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\nzz\r\n", b"x" * 70_000]
        )
        | st.sampled_from([b"content-type: application/json\r\ncontent-length: 5\r\n\r\n{}"]),
    )
    def send(head: bytes, rest: bytes) -> None:
        with socket.create_connection((url.host, url.port or 80), timeout=5) as connection:
            try:
                connection.sendall(head + rest + b"\r\n\r\n")
                connection.shutdown(socket.SHUT_WR)
                response = connection.recv(1 << 16)
            except (BrokenPipeError, ConnectionResetError):
                return
        assert not response or response.startswith(b"HTTP/1.1 "), response
        assert not response.startswith(b"HTTP/1.1 5"), response

    send()
    assert CLIENT.get(url.join("/openapi.json")).status_code == 200


@pytest.mark.parametrize("extreme", [5e-324, 1e-30, 1e30, 1.7976931348623157e308])
def test_extreme_sampling_values_do_not_crash_the_engine(engine_url: str, extreme: float) -> None:
    for more in ({"top_k": 10**30}, {"top_p": 5e-324}, {"min_p": 0.9999999999999999}, {"seed": 2**62 - 1}):
        body = {"prompt": "ab", "temperature": extreme, "logprobs": 1, **more}
        response = CLIENT.post(f"{engine_url}/v1/completions", json=body)
        assert response.status_code in (200, 400), response.text
    assert CLIENT.post(f"{engine_url}/v1/completions", json={"prompt": "ab"}).status_code == 200


# --- OpenAPI descriptions ---


def test_all_served_routes_are_described(engine_app: Any, runs: Path) -> None:
    for app in (engine_app, build_lens(runs)):
        described = {"/openapi.json"}
        with serving(app) if app is not engine_app else serving(build_app(FakeEngine(), TOKENIZER, model="m")) as url:
            described |= CLIENT.get(f"{url}/openapi.json").json()["paths"].keys()
        served = {route.path for route in app.routes if isinstance(route, Route) and route.path != "/"}
        assert served - {f"{QUERY_PATH}/{{name:path}}"} == described


def test_exactly_the_accepted_fields_are_described(engine_url: str) -> None:
    page = CLIENT.get(f"{engine_url}/openapi.json").json()
    body = page["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"].keys() == CompletionRequest.model_fields.keys() | NO_OP_VALUES.keys() | IGNORED_FIELDS
    assert body["required"] == ["prompt"]
    assert body["additionalProperties"] is False


def test_all_described_routes_but_health_require_the_key(runs: Path) -> None:
    for app in (
        build_app(FakeEngine(), TOKENIZER, model="m", api_key="the-right-key"),
        build_lens(runs, "the-right-key"),
    ):
        with serving(app) as url:
            page = CLIENT.get(f"{url}/openapi.json", headers={"authorization": "Bearer the-right-key"}).json()
            for path, operations in page["paths"].items():
                for method, description in operations.items():
                    response = CLIENT.request(method, url + path)
                    assert (response.status_code == 401) == (path != "/health"), (path, response.status_code)
                    assert ("security" in description) == (path != "/health")
