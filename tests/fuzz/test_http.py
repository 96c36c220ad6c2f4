"""The HTTP surface under fire: requests made from each server's own description, and others that nobody would send.

The servers are real, on a port of this machine; the engine is the tiny model. Nothing may fail, and nothing outside of
the run folder may be opened.
"""

import json
import socket
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

FIRE = settings(
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# a description cannot say everything: an empty prompt is a text, and is refused
BUT = [positive_data_acceptance]


CLIENT = httpx.Client(timeout=30)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nobody was allowed to look into."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "secret": "zebra-42"}))
    (folder / "model.safetensors").write_bytes(b"zebra-42")
    (folder / "run.db").write_bytes(b"zebra-42")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, outside: Path) -> Path:
    """A folder with a run, its published weights, and links that lead out."""
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


def fire(url: str, *, never: str = "nothing") -> dict[str, set[int]]:
    """Ask everything that a server says it answers, rightly and wrongly; the statuses that came back."""
    seen: dict[str, set[int]] = {}
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        asks = operation.body or operation.query
        for mode in GenerationMode if asks else [GenerationMode.POSITIVE]:
            if mode is GenerationMode.NEGATIVE or operation.path != never:
                fire_at(operation, mode, url, seen.setdefault(operation.label, set()))
    return seen


def fire_at(operation: Any, mode: GenerationMode, url: str, seen: set[int]) -> None:
    @FIRE
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(base_url=url, session=session)
        if response.text == "Invalid HTTP request received.":
            return  # its first line is longer than any server takes
        seen.add(response.status_code)
        case.validate_response(response, excluded_checks=BUT)

    with requests.Session() as session:
        ask()


def test_the_engine_server_withstands_whatever_its_description_allows_and_what_it_forbids(
    engine_url: str, outside: Path
) -> None:
    with untouched(outside):
        # a broadcast that nobody sends would be waited for
        seen = fire(engine_url, never="/v1/receive_weights")
    assert {200, 400} <= seen["POST /v1/completions"]
    assert {200, 400} <= seen["POST /v1/chat/completions"]
    assert 403 in seen["POST /v1/load_weights"]
    assert CLIENT.get(f"{engine_url}/health").json()["ready"]


def test_the_lens_withstands_whatever_its_description_allows_and_what_it_forbids(lens_url: str, outside: Path) -> None:
    with untouched(outside):
        seen = fire(lens_url)
    assert seen["GET /query/runs"] == {200}
    assert {name.removeprefix("GET /query/") for name in seen} == set(QUERIES)


HOSTILE = [
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
def test_no_path_in_a_request_leads_out_of_the_folders_that_may_be_loaded_from(
    engine_url: str, runs: Path, outside: Path, path: str, field: str, more: dict[str, int]
) -> None:
    with untouched(outside):
        for hostile in HOSTILE:
            given = hostile.format(outside=outside, runs=runs, name=outside.name)
            answer = CLIENT.post(f"{engine_url}{path}", json={field: given, **more})
            assert answer.status_code in (400, 403), (hostile, answer.text)
            assert "zebra" not in answer.text
    assert CLIENT.get(f"{engine_url}/version").json()["version"] == 0


def test_whether_something_is_there_is_not_told_outside_of_the_folders(engine_url: str, outside: Path) -> None:
    there, missing = (
        CLIENT.post(f"{engine_url}/v1/load_weights", json={"folder": str(folder), "version": 1}).text
        for folder in (outside, outside.with_name("missing"))
    )
    assert there.replace(outside.name, "missing") == missing


def test_no_word_of_a_question_leads_out_of_the_runs(lens_url: str, runs: Path, outside: Path) -> None:
    with untouched(outside):
        for hostile in HOSTILE:
            given = hostile.format(outside=outside, runs=runs, name=outside.name)
            for name, words in QUERIES.items():
                asked = dict.fromkeys(words, given) | {"step": 1} if words else {}
                answer = CLIENT.get(f"{lens_url}/query/{name}", params={key: asked[key] for key in asked if key in words})
                assert answer.status_code in (200, 400, 404), (name, hostile, answer.text)
                assert "zebra" not in answer.text
    for way in (f"/assets/..%2f..%2f..{outside}/run.db", "/assets//etc/passwd", f"/query/..%2f..{outside}/run.db"):
        assert CLIENT.get(f"{lens_url}{way}").status_code == 404


@pytest.mark.parametrize("server", ["engine_url", "lens_url"])
def test_bytes_that_are_no_request_end_one_connection_and_nothing_else(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = httpx.URL(request.getfixturevalue(server))

    @settings(FIRE, max_examples=40)
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
        with socket.create_connection((url.host, url.port or 80), timeout=5) as line:
            try:
                line.sendall(head + rest + b"\r\n\r\n")
                line.shutdown(socket.SHUT_WR)
                answer = line.recv(1 << 16)
            except (BrokenPipeError, ConnectionResetError):
                return
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer
        assert not answer.startswith(b"HTTP/1.1 5"), answer

    send()
    assert CLIENT.get(url.join("/openapi.json")).status_code == 200


@pytest.mark.parametrize("extreme", [5e-324, 1e-30, 1e30, 1.7976931348623157e308])
def test_no_temperature_brings_the_engine_down(engine_url: str, extreme: float) -> None:
    for more in ({"top_k": 10**30}, {"top_p": 5e-324}, {"min_p": 0.9999999999999999}, {"seed": 2**62 - 1}):
        body = {"prompt": "ab", "temperature": extreme, "logprobs": 1, **more}
        answer = CLIENT.post(f"{engine_url}/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
    assert CLIENT.post(f"{engine_url}/v1/completions", json={"prompt": "ab"}).status_code == 200


# --- the descriptions ---


def test_what_is_served_is_what_is_described(engine_app: Any, runs: Path) -> None:
    for app in (engine_app, build_lens(runs)):
        described = {"/openapi.json"}
        with serving(app) if app is not engine_app else serving(build_app(FakeEngine(), TOKENIZER, model="m")) as url:
            described |= CLIENT.get(f"{url}/openapi.json").json()["paths"].keys()
        served = {route.path for route in app.routes if isinstance(route, Route) and route.path != "/"}
        assert served - {"/query/{name:path}"} == described


def test_every_field_that_is_read_is_described_and_no_other(engine_url: str) -> None:
    page = CLIENT.get(f"{engine_url}/openapi.json").json()
    body = page["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"].keys() == CompletionRequest.model_fields.keys() | NO_OP_VALUES.keys() | IGNORED_FIELDS
    assert body["required"] == ["prompt"]
    assert body["additionalProperties"] is False


def test_with_a_key_all_that_is_described_needs_it_but_health(runs: Path) -> None:
    for app in (
        build_app(FakeEngine(), TOKENIZER, model="m", api_key="the-right-key"),
        build_lens(runs, "the-right-key"),
    ):
        with serving(app) as url:
            page = CLIENT.get(f"{url}/openapi.json", headers={"authorization": "Bearer the-right-key"}).json()
            for path, operations in page["paths"].items():
                for method, said in operations.items():
                    answer = CLIENT.request(method, url + path)
                    assert (answer.status_code == 401) == (path != "/health"), (path, answer.status_code)
                    assert ("security" in said) == (path != "/health")
