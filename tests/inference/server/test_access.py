"""Security: keys, rate limits and paths of the servers, no code execution from data, no leaked secrets."""

import ast
import asyncio
import base64
import json
import pickle
import re
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import keel
from keel.cli import main
from keel.common.lora_config_check import check_adapter
from keel.config import EngineSettings, ModelSettings, load_settings
from keel.errors import ConfigError, KeelError, ModelError
from keel.inference.local.local_engine import LocalEngine
from keel.inference.protocol import WeightSource
from keel.inference.server.access import AccessControl, RateLimit, RateLimiter, check_binding
from keel.inference.server.app import build_app
from keel.inference.server.openai_requests import Limits
from keel.run.monitor.exporter import Exporter, ExporterServer
from keel.tools.lens.server import build_app as build_lens
from keel.training import load_model
from keel.training.model.model_source import resolve_model
from tests.support.engine_fakes import ANYWHERE, TOKENIZER, FakeEngine, serving
from tests.support.lens_runs import make_run
from tests.support.tiny_runs import train

PACKAGE = Path(keel.__file__).parent
KEY = "planted-key-0123456789abcdef"


# --- keys and rate limits ---


def scope(client: str = "127.0.0.1", path: str = "/x", **headers: str) -> dict[str, Any]:
    all_headers = {"host": "127.0.0.1"} | headers
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in all_headers.items()]
    return {"type": "http", "path": path, "client": (client, 1), "headers": encoded}


def status(access: AccessControl, **request: Any) -> int:
    denial = access.check_request(scope(**request))
    return 200 if denial is None else denial.status


def test_a_key_works_from_any_address_as_bearer_token_or_browser_password() -> None:
    access = AccessControl(KEY, None)
    assert status(access, client="10.0.0.7", authorization=f"Bearer {KEY}") == 200
    basic = "Basic " + base64.b64encode(f"anyone:{KEY}".encode()).decode()
    assert status(access, client="10.0.0.7", host="box.example", authorization=basic) == 200
    for wrong in ("", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Basic !!", "Basic YTpi", f"Digest {KEY}"):
        assert status(access, authorization=wrong) == 401


def test_keys_are_compared_in_constant_time() -> None:
    tree = ast.parse((PACKAGE / "inference/server/access.py").read_text())
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and "digest" in ast.unparse(node)]
    assert all(isinstance(node.ops[0], ast.Is | ast.IsNot) for node in compared)  # only with None
    assert "hmac.compare_digest(_hash_key(key), self._key_digest)" in ast.unparse(tree)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "box.example"])
def test_binding_beyond_loopback_requires_a_long_key(host: str) -> None:
    for key, message in ((None, "without a key"), ("short", "a key of 5 characters")):
        with pytest.raises(ConfigError, match=message):
            check_binding("--host", host, key)
    check_binding("--host", host, KEY)
    check_binding("--host", "127.0.0.1", None)


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "tiny", "--host", "0.0.0.0"],
        ["lens", "RUN", "--host", "0.0.0.0"],
        ["train", "R", "--metrics-host", "::", "--metrics-port", "9137"],
    ],
)
def test_no_command_binds_beyond_loopback_without_a_key(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", steps=1)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("steps = 1\n[environments.larger_number]\n")
    paths = {"RUN": str(tmp_path / "run"), "R": str(recipe)}
    assert main([paths.get(arg, arg) for arg in argv]) == 2
    assert "would let other machines connect without a key" in capsys.readouterr().err


@given(
    requests=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 2)), max_size=60),
    rate=st.integers(1, 20),
    burst=st.integers(1, 10),
)
def test_no_client_exceeds_the_rate_and_clients_do_not_affect_each_other(
    requests: list[tuple[float, int]], rate: int, burst: int
) -> None:
    now = [0.0]
    limiter = RateLimiter(RateLimit(rate, burst), lambda: now[0])
    allowed: dict[int, list[float]] = {}
    for pause, client in requests:
        now[0] += pause
        wait = limiter.seconds_until_allowed(client)
        if not wait:
            allowed.setdefault(client, []).append(now[0])
        else:
            assert 0 < wait <= 1 / rate + 1e-9
            assert len(allowed.get(client, [])) >= burst  # the burst is not shared between clients
    for times in allowed.values():
        for first, start in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= burst + rate * (times[last] - start) + 1e-6


def test_a_client_above_its_rate_gets_retry_after_and_others_are_served() -> None:
    access = AccessControl(KEY, RateLimit(per_second=0.25, burst=3), open_paths=frozenset({"/health"}))
    request = {"client": "10.0.0.7", "authorization": f"Bearer {KEY}"}
    assert [status(access, **request) for _ in range(4)] == [200, 200, 200, 429]
    denial = access.check_request(scope(**request))
    assert denial is not None and denial.retry_after == 4
    assert status(access, client="10.0.0.8", authorization=f"Bearer {KEY}") == 200
    assert status(access, client="10.0.0.7", path="/health") == 200  # open paths are counted separately


def test_requests_without_the_key_are_limited_and_do_not_use_up_the_limit_of_those_with_it() -> None:
    access = AccessControl(KEY, RateLimit(per_second=1, burst=5))
    statuses = [status(access, authorization="Bearer guess") for _ in range(80)]
    assert set(statuses) == {401, 429}
    assert [status(access, authorization=f"Bearer {KEY}") for _ in range(5)] == [200] * 5


def test_an_ipv6_network_is_one_client() -> None:
    access = AccessControl(KEY, RateLimit(per_second=0.1, burst=2))
    requests = [{"client": f"2001:db8::{n}", "authorization": f"Bearer {KEY}"} for n in range(3)]
    assert [status(access, **request) for request in requests] == [200, 200, 429]


def test_the_server_responds_429_with_retry_after_over_http() -> None:
    app = build_app(FakeEngine(), TOKENIZER, model="m", limits=Limits(rate_limit=RateLimit(per_second=0.5, burst=3)))
    with serving(app) as url, httpx.Client() as client:
        responses = [client.get(f"{url}/v1/models") for _ in range(5)]
    assert [response.status_code for response in responses] == [200, 200, 200, 429, 429]
    assert responses[-1].headers["retry-after"] == "2"
    assert responses[-1].json()["error"]["type"] == "rate_limit_error"


def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    app = build_app(FakeEngine(), TOKENIZER, model="m", limits=Limits(body_timeout=0.2))

    async def slow() -> Any:
        yield b'{"prompt": '
        await asyncio.sleep(1)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            headers = {"content-type": "application/json"}
            return await client.post(f"{url}/v1/completions", content=slow(), headers=headers, timeout=3)

    with serving(app) as url:
        assert asyncio.run(run()).status_code == 408


def test_the_exporter_with_a_key_requires_it() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ExporterServer(Exporter(), listener, KEY)
    server.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    finally:
        server.stop()


def test_the_lens_with_a_key_makes_a_browser_prompt_for_it(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    with serving(build_lens(tmp_path, KEY)) as url, httpx.Client(base_url=url) as client:
        response = client.get("/")
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Basic ")
        assert client.get("/", auth=("anyone", KEY)).status_code == 200
        assert client.get("/query/runs", auth=("anyone", KEY)).json()["runs"][0]["run"] == "run"
        other = {"sec-fetch-site": "cross-site"}
        assert client.get("/query/runs", auth=("anyone", KEY), headers=other).status_code == 403


# --- no code execution from data ---

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {
    *("torch.load", "torch.save", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load"),
    *("eval", "exec", "compile"),
}


SANDBOXED = {"program_process", "sandbox_bootstrap", "verdict_process"}
"""Modules whose source runs only inside the sandbox of the `code` reward; they execute programs on purpose."""


def test_no_module_imports_the_sandboxed_ones() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.stem in SANDBOXED:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {(node.module or "").rpartition(".")[2], *(alias.name for alias in node.names)}
                assert not names & SANDBOXED, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Import):
                assert not {alias.name.rpartition(".")[2] for alias in node.names} & SANDBOXED, f"{path}:{node.lineno}"


def test_no_module_unpickles_or_evaluates_text() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.stem in SANDBOXED:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & MODULES, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES, where
                assert not {f"{node.module}.{alias.name}" for alias in node.names} & CALLS, where
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CALLS, where
                assert not {"trust_remote_code", "shell"} & {keyword.arg for keyword in node.keywords}, where


def test_every_model_is_loaded_from_local_safetensors() -> None:
    loads = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if "output_loading_info" in keywords:  # weights, not a tokenizer or a configuration
                    loads.append((path.name, keywords.get("use_safetensors"), keywords.get("local_files_only")))
    assert len(loads) >= 3
    assert {load[1:] for load in loads} == {("True", "True")}


class FileWriter:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_pickled_weights_are_never_executed(tmp_path: Path) -> None:
    written = tmp_path / "written"
    base = shutil.copytree(resolve_model("tiny").folder, tmp_path / "base")
    pickled = pickle.dumps(FileWriter(written))
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(pickled)
    with pytest.raises(ModelError, match="pickled weights, which can execute code"):
        load_model(ModelSettings(name=str(base)))
    (base / "model.safetensors").write_bytes(pickled)
    with pytest.raises(ModelError):
        load_model(ModelSettings(name=str(base)))
    model = load_model(ModelSettings(name="tiny"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]})
    )
    (adapter / "adapter_model.bin").write_bytes(pickled)

    async def load_both() -> None:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings())
        for source in (WeightSource.adapter, WeightSource.folder):
            for folder in (adapter, base):
                with pytest.raises(KeelError):
                    await engine.load_weights(source(str(folder)), 1)
        assert await engine.version() == 0
        await engine.close()

    asyncio.run(load_both())
    assert not written.exists()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron"),
        ({"auto_mapping": {"parent_library": "os"}}, "auto_mapping"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 4], [0, 4]]}, "layer_replication"),
        ({"target_modules": "(a+)+$"}, "only layer names are allowed"),
        ({"rank_pattern": {"(a+)+$": 4}}, "only layer names are allowed"),
        ({"r": 10**9}, "r = 1000000000, but its tensors have rank 4"),
        ({"rank_pattern": {"q_proj": 10**9}}, "rank 4"),
        ({"r": -1}, "not a whole number above 0"),
        ({"modules_to_save": ["lm_head"]}, "load merged weights"),
        ({"something_new": {"x": 1}}, "which a plain LoRA does not have"),
    ],
)
def test_an_adapter_config_cannot_import_code_allocate_memory_or_change_the_base_model(
    tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    save_file({"a.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | entry))
    with pytest.raises(ModelError, match=re.escape(message)):
        check_adapter(tmp_path)


# --- secrets ---


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pool.api_key", KEY], "pool.api_key is not a setting; did you mean api_key_file?"),
        (["--pool.urls", f'["http://me:{KEY}@box:8000"]'], "contains a user name or password"),
        (["--pool.discovery_url", f"http://box/list?token={KEY}"], "contains the query parameter token"),
        (["--environments.larger_number.options.api_key", KEY], "option api_key of an environment looks like a secret"),
        (["--environments.larger_number.options.judge.password", KEY], "option judge.password of an environment"),
    ],
)
def test_a_secret_in_the_settings_is_an_error_and_not_shown(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text('[engine]\nkind = "pool"\n[environments.larger_number]\n')
    for command in ("config", "train"):
        assert main([command, "recipe.toml", *argv]) == 2
        output = capsys.readouterr()
        assert message in output.err
        assert KEY not in output.out + output.err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def folder_text(folder: Path) -> str:
    """Return all text of a run folder: raw bytes, and the decompressed ledger and parquet files."""
    text = ""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text += path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            text += str(pq.read_table(path).to_pylist())
        if path.name == "run.db":
            with closing(sqlite3.connect(path)) as db:
                text += str(list(db.iterdump()))
    return text


def test_a_pools_key_appears_nowhere_but_in_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    file = tmp_path / "key"
    file.write_text(KEY)
    model = load_model(ModelSettings(name="tiny", sft_warmup_steps=300))
    engine = LocalEngine(model.network, model.tokenizer, EngineSettings())
    app = build_app(engine, model.tokenizer, model="m", api_key=KEY, allowed_folders=ANYWHERE)
    folder = tmp_path / "run"
    with serving(app) as url, httpx.Client() as client:
        train(
            folder,
            steps=2,
            engine__kind="pool",
            pool__urls=[url],
            pool__api_key_file=str(file),
            evaluation__when="start_and_end",
            metrics__tensorboard=True,
        )
        assert client.get(f"{url}/metrics").status_code == 401
        metrics = client.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert main(["pool", url, "--api-key-file", str(file), "--json"]) in (0, 1)
        wrong = client.get(f"{url}/v1/models", headers={"authorization": "Bearer planted-other-key"})
    assert "planted-other-key" not in wrong.text
    assert main(["report", str(folder)]) == 0
    assert main(["config", str(folder / "config.toml")]) == 0
    output = capsys.readouterr()
    everything = folder_text(folder) + metrics + wrong.text + caplog.text + output.out + output.err
    assert str(file) in everything  # the path of the key file is not a secret
    assert KEY not in everything


def test_a_server_never_shows_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    app = build_app(FakeEngine(), TOKENIZER, model="m", api_key=KEY)
    headers = {"authorization": f"Bearer {KEY}"}
    with serving(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        texts = [client.get(path).text for path in ("/metrics", "/openapi.json", "/health", "/version", "/nothing")]
        texts.append(client.post("/v1/completions", json={"prompt": [10**9]}).text)
        texts.append(client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"}).text)
    assert KEY not in "".join(texts) + caplog.text
    assert "keel_ready 1" in texts[0]


def test_the_api_endpoint_is_on_loopback_with_a_random_key() -> None:
    source = (PACKAGE / "api/endpoint.py").read_text()
    assert 'socket.create_server(("127.0.0.1", 0)' in source
    assert "secrets.token_urlsafe(32)" in source


def test_settings_without_secrets_are_accepted() -> None:
    loaded = load_settings(overrides=["--environments.larger_number.options.shots", "2"])
    assert loaded.settings.environments["larger_number"].options == {"shots": 2}
