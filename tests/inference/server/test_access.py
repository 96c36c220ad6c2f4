"""Who may do what: keys, rates and paths at the servers' doors, no code in data, and no secret where others read."""

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


# --- the door ---


def scope(client: str = "127.0.0.1", path: str = "/x", **headers: str) -> dict[str, Any]:
    sent = {"host": "127.0.0.1"} | headers
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()]
    return {"type": "http", "path": path, "client": (client, 1), "headers": encoded}


def status(access: AccessControl, **asked: Any) -> int:
    refusal = access.check_request(scope(**asked))
    return 200 if refusal is None else refusal.status


def test_a_key_lets_in_from_anywhere_and_is_sent_by_programs_or_typed_into_a_browser() -> None:
    access = AccessControl(KEY, None)
    assert status(access, client="10.0.0.7", authorization=f"Bearer {KEY}") == 200
    typed = "Basic " + base64.b64encode(f"anyone:{KEY}".encode()).decode()
    assert status(access, client="10.0.0.7", host="box.example", authorization=typed) == 200
    for wrong in ("", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Basic !!", "Basic YTpi", f"Digest {KEY}"):
        assert status(access, authorization=wrong) == 401


def test_keys_are_compared_in_constant_time() -> None:
    tree = ast.parse((PACKAGE / "inference/server/access.py").read_text())
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and "digest" in ast.unparse(node)]
    assert all(isinstance(node.ops[0], ast.Is | ast.IsNot) for node in compared)  # only with None
    assert "hmac.compare_digest(_hash_key(key), self._key_digest)" in ast.unparse(tree)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "box.example"])
def test_another_address_than_loopback_needs_a_key_that_cannot_be_guessed(host: str) -> None:
    for key, why in ((None, "without a key"), ("short", "a key of 5 characters")):
        with pytest.raises(ConfigError, match=why):
            check_binding("--host", host, key)
    check_binding("--host", host, KEY)
    check_binding("--host", "127.0.0.1", None)


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "tiny", "--host", "0.0.0.0"],
        ["lens", "RUN", "--host", "0.0.0.0"],
        ["train", "R", "--metrics-host", "::", "--metrics-port", "9137"],
    ],
)
def test_no_command_binds_elsewhere_without_a_key(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", steps=1)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("steps = 1\n[environments.larger_number]\n")
    places = {"RUN": str(tmp_path / "run"), "R": str(recipe)}
    assert main([places.get(word, word) for word in words]) == 2
    assert "would let other machines connect without a key" in capsys.readouterr().err


@given(
    asked=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 2)), max_size=60),
    rate=st.integers(1, 20),
    burst=st.integers(1, 10),
)
def test_no_client_is_answered_more_often_than_the_rate_and_none_pays_for_another(
    asked: list[tuple[float, int]], rate: int, burst: int
) -> None:
    now = [0.0]
    rates = RateLimiter(RateLimit(rate, burst), lambda: now[0])
    answered: dict[int, list[float]] = {}
    for pause, client in asked:
        now[0] += pause
        wait = rates.seconds_until_allowed(client)
        if not wait:
            answered.setdefault(client, []).append(now[0])
        else:
            assert 0 < wait <= 1 / rate + 1e-9
            assert len(answered.get(client, [])) >= burst  # a client's own burst is never another's
    for times in answered.values():
        for first, start in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= burst + rate * (times[last] - start) + 1e-6


def test_beyond_its_rate_a_client_is_told_when_to_come_back_and_others_are_answered() -> None:
    access = AccessControl(KEY, RateLimit(per_second=0.25, burst=3), open_paths=frozenset({"/health"}))
    mine = {"client": "10.0.0.7", "authorization": f"Bearer {KEY}"}
    assert [status(access, **mine) for _ in range(4)] == [200, 200, 200, 429]
    refusal = access.check_request(scope(**mine))
    assert refusal is not None and refusal.retry_after == 4
    assert status(access, client="10.0.0.8", authorization=f"Bearer {KEY}") == 200
    assert status(access, client="10.0.0.7", path="/health") == 200  # how it is doing is counted apart


def test_strangers_are_limited_and_cannot_use_up_what_the_holder_of_the_key_has() -> None:
    access = AccessControl(KEY, RateLimit(per_second=1, burst=5))
    seen = [status(access, authorization="Bearer guess") for _ in range(80)]
    assert set(seen) == {401, 429}
    assert [status(access, authorization=f"Bearer {KEY}") for _ in range(5)] == [200] * 5


def test_a_subscribers_whole_network_is_one_client() -> None:
    access = AccessControl(KEY, RateLimit(per_second=0.1, burst=2))
    asked = [{"client": f"2001:db8::{n}", "authorization": f"Bearer {KEY}"} for n in range(3)]
    assert [status(access, **one) for one in asked] == [200, 200, 429]


def test_the_server_answers_429_with_retry_after_over_http() -> None:
    app = build_app(FakeEngine(), TOKENIZER, model="m", limits=Limits(rate_limit=RateLimit(per_second=0.5, burst=3)))
    with serving(app) as url, httpx.Client() as client:
        answers = [client.get(f"{url}/v1/models") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert answers[-1].headers["retry-after"] == "2"
    assert answers[-1].json()["error"]["type"] == "rate_limit_error"


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
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


def test_metrics_with_a_key_are_for_its_holders() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = ExporterServer(Exporter(), listener, KEY)
    server.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": f"Bearer {KEY}"}).status_code == 200
    finally:
        server.stop()


def test_the_lens_with_a_key_lets_a_browser_ask_for_it(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1)
    with serving(build_lens(tmp_path, KEY)) as url, httpx.Client(base_url=url) as client:
        refused = client.get("/")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert client.get("/", auth=("anyone", KEY)).status_code == 200
        assert client.get("/query/runs", auth=("anyone", KEY)).json()["runs"][0]["run"] == "run"
        other = {"sec-fetch-site": "cross-site"}
        assert client.get("/query/runs", auth=("anyone", KEY), headers=other).status_code == 403


# --- no code in data ---

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {
    *("torch.load", "torch.save", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load"),
    *("eval", "exec", "compile"),
}


def test_nothing_in_the_package_can_open_a_pickle_or_run_text() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & MODULES, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in MODULES, where
                assert not {f"{node.module}.{alias.name}" for alias in node.names} & CALLS, where
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CALLS, where
                assert not {"trust_remote_code", "shell"} & {word.arg for word in node.keywords}, where


def test_every_model_is_loaded_as_safetensors_and_from_this_machine() -> None:
    loads = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if "output_loading_info" in words:  # weights, not a tokenizer or a configuration
                    loads.append((path.name, words.get("use_safetensors"), words.get("local_files_only")))
    assert len(loads) >= 3
    assert {found[1:] for found in loads} == {("True", "True")}


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_weights_that_are_a_program_are_not_run(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    base = shutil.copytree(resolve_model("tiny").folder, tmp_path / "base")
    trap = pickle.dumps(Trap(sprung))
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").write_bytes(trap)
    with pytest.raises(ModelError, match="pickled weights, which can execute code"):
        load_model(ModelSettings(name=str(base)))
    (base / "model.safetensors").write_bytes(trap)
    with pytest.raises(ModelError):
        load_model(ModelSettings(name=str(base)))
    model = load_model(ModelSettings(name="tiny"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]})
    )
    (adapter / "adapter_model.bin").write_bytes(trap)

    async def load_both() -> None:
        engine = LocalEngine(model.network, model.tokenizer, EngineSettings())
        for source in (WeightSource.adapter, WeightSource.folder):
            for folder in (adapter, base):
                with pytest.raises(KeelError):
                    await engine.load_weights(source(folder), 1)
        assert await engine.version() == 0
        await engine.close()

    asyncio.run(load_both())
    assert not sprung.exists()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron"),
        ({"auto_mapping": {"parent_library": "os"}}, "auto_mapping"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 4], [0, 4]]}, "layer_replication"),
        ({"target_modules": "(a+)+$"}, "only layer names"),
        ({"rank_pattern": {"(a+)+$": 4}}, "only layer names"),
        ({"r": 10**9}, "r = 1000000000, but its tensors have rank 4"),
        ({"rank_pattern": {"q_proj": 10**9}}, "rank 4"),
        ({"r": -1}, "not a whole number"),
        ({"modules_to_save": ["lm_head"]}, "load merged weights"),
        ({"something_new": {"x": 1}}, "a plain LoRA does not have"),
    ],
)
def test_an_adapters_configuration_can_neither_import_nor_take_memory_nor_change_the_base(
    tmp_path: Path, entry: dict[str, Any], why: str
) -> None:
    save_file({"a.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | entry))
    with pytest.raises(ModelError, match=re.escape(why)):
        check_adapter(tmp_path)


# --- secrets ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pool.api_key", KEY], "pool.api_key is not a setting; did you mean api_key_file?"),
        (["--pool.urls", f'["http://me:{KEY}@box:8000"]'], "contains a user name or password"),
        (["--pool.discovery_url", f"http://box/list?token={KEY}"], "contains the query parameter token"),
        (["--environments.larger_number.options.api_key", KEY], "option api_key of an environment looks like a secret"),
        (["--environments.larger_number.options.judge.password", KEY], "option judge.password of an environment"),
    ],
)
def test_a_secret_in_the_settings_is_refused_and_not_shown(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text('[engine]\nkind = "pool"\n[environments.larger_number]\n')
    for command in ("config", "train"):
        assert main([command, "recipe.toml", *words]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert KEY not in shown.out + shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def held(folder: Path) -> str:
    """Everything that a run's folder says: bytes as they are, and what stands compressed in ledger and parquet."""
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


def test_a_pools_key_is_nowhere_but_in_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    file = tmp_path / "key"
    file.write_text(KEY)
    own = load_model(ModelSettings(name="tiny", sft_warmup_steps=300))
    engine = LocalEngine(own.network, own.tokenizer, EngineSettings())
    app = build_app(engine, own.tokenizer, model="m", api_key=KEY, allowed_folders=ANYWHERE)
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
        told = client.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        assert main(["pool", url, "--api-key-file", str(file), "--json"]) in (0, 1)
        wrong = client.get(f"{url}/v1/models", headers={"authorization": "Bearer planted-other-key"})
    assert "planted-other-key" not in wrong.text
    assert main(["report", str(folder)]) == 0
    assert main(["config", str(folder / "config.toml")]) == 0
    shown = capsys.readouterr()
    everything = held(folder) + told + wrong.text + caplog.text + shown.out + shown.err
    assert str(file) in everything  # where it is, is said
    assert KEY not in everything


def test_a_server_shows_its_key_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    app = build_app(FakeEngine(), TOKENIZER, model="m", api_key=KEY)
    headers = {"authorization": f"Bearer {KEY}"}
    with serving(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        said = [client.get(path).text for path in ("/metrics", "/openapi.json", "/health", "/version", "/nothing")]
        said.append(client.post("/v1/completions", json={"prompt": [10**9]}).text)
        said.append(client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"}).text)
    assert KEY not in "".join(said) + caplog.text
    assert "keel_ready 1" in said[0]


def test_the_endpoint_of_the_api_is_on_loopback_behind_a_key_of_its_own() -> None:
    source = (PACKAGE / "api/endpoint.py").read_text()
    assert 'socket.create_server(("127.0.0.1", 0)' in source
    assert "secrets.token_urlsafe(32)" in source


def test_settings_without_secrets_are_taken() -> None:
    loaded = load_settings(overrides=["--environments.larger_number.options.shots", "2"])
    assert loaded.settings.environments["larger_number"].options == {"shots": 2}
