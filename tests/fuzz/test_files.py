"""Damaged or hostile files: readers reject them with a `KeelError`, quickly and in little memory.

Every reader gets files that are almost valid: with bytes flipped, removed and repeated, or values replaced. It may
return anything, but may raise only `KeelError`.
"""

import json
import os
import resource
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from keel.common import safe_read
from keel.common.atomic_files import read_json
from keel.common.lora_config_check import check_adapter
from keel.common.manifest import verify_manifest, write_manifest
from keel.config import load_settings
from keel.errors import KeelError
from keel.run import records
from keel.run.ledger import Ledger
from keel.run.monitor.sinks import DeliveryLog, PendingMetrics
from keel.tools.compare.readers import Recording
from keel.tools.lens.queries import QUERIES, Lens
from keel.tools.lens.server import respond
from keel.tools.sweep.plan import SweepPlan
from keel.training.model.model_source import fingerprint, weight_files
from keel.training.model.optimizer_state import read_tensors, restore_rng_state, write_rng_state
from tests.support.lens_runs import make_run
from tests.support.recorded_rows import row, write_json

pytestmark = pytest.mark.fuzz

FUZZING = settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Reader(NamedTuple):
    """A file and the function that reads it."""

    file: str
    """Path relative to the folder passed to `read`."""
    read: Callable[[Path], object]


def ledger(folder: Path) -> None:
    with closing(Ledger(folder / "run.db")) as opened:
        opened.steps()
        opened.state()
        opened.outcome_counts()
        opened.evaluations()
        opened.unresolved()
        opened.check()


def lens(folder: Path) -> None:
    with closing(Lens(folder, read_seconds=0.0)) as opened:
        params = {
            "run": folder.name,
            "step": "1",
            "group": "sums/101",
            "member": "0",
            "attempt": "0",
            "names": "reward",
        }
        for name, declared in QUERIES.items():
            response = respond(opened, name, {key: params[key] for key in params if key in declared})
            assert response.status_code in (200, 400, 404), response.body


def plan(folder: Path) -> None:
    SweepPlan.read(folder)


READERS = {
    "settings": Reader("config.toml", lambda folder: load_settings(folder / "config.toml").rows()),
    "ledger": Reader("run.db", ledger),
    "ledger in the lens": Reader("run.db", lens),
    "origin in the lens": Reader("run.json", lens),
    "settings in the lens": Reader("config.toml", lens),
    "rollouts": Reader("rollouts/step_000001.parquet", lambda f: records.read_step(f / "rollouts/step_000001.parquet")),
    "rollouts in the lens": Reader("rollouts/step_000001.parquet", lens),
    "rollouts compared": Reader("rollouts/step_000001.parquet", lambda f: list(Recording(f).steps())),
    "tokens of another trainer": Reader("tokens.jsonl", lambda f: list(Recording(f / "tokens.jsonl").steps())),
    "manifest": Reader("sealed/manifest.json", lambda folder: verify_manifest(folder / "sealed")),
    "tensors": Reader("sealed/random.safetensors", lambda f: read_tensors(f / "sealed/random.safetensors")),
    "random states": Reader("sealed/random.safetensors", lambda f: restore_rng_state(f / "sealed/random.safetensors")),
    "adapter": Reader("adapter/adapter_config.json", lambda folder: check_adapter(folder / "adapter")),
    "adapter's tensors": Reader("adapter/adapter_model.safetensors", lambda folder: check_adapter(folder / "adapter")),
    "index of a model": Reader("model/model.safetensors.index.json", lambda folder: weight_files(folder / "model")),
    "configuration of a model": Reader("model/config.json", lambda folder: fingerprint(folder / "model")),
    "state": Reader("sealed/state.json", lambda folder: read_json(folder / "sealed/state.json")),
    "sinks": Reader("sinks.json", lambda folder: DeliveryLog(folder / "sinks.json")),
    "trials": Reader("trials.json", plan),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a valid file for every reader."""
    folder = make_run(tmp_path_factory.mktemp("intact") / "run", steps=2)
    write_json(folder / "tokens.jsonl", [row([1.0, 1.5], 1.0, step=step, token_text=["a", "b"]) for step in (1, 2)])
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        db.execute("DELETE FROM checksums")  # otherwise every change would be found by its checksum
    (folder / "sealed").mkdir()
    write_rng_state(folder / "sealed/random.safetensors")
    (folder / "sealed/state.json").write_text(json.dumps({"step": 3, "more": [1, {"a": None}]}))
    write_manifest(folder / "sealed")
    (folder / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {}}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    tensors = {"x.lora_A.weight": torch.zeros(4, 8), "x.lora_B.weight": torch.zeros(8, 4)}
    save_file(tensors, folder / "adapter/adapter_model.safetensors")
    (folder / "model").mkdir()
    save_file({"w": torch.zeros(2)}, folder / "model/model-00001.safetensors")
    (folder / "model/model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001.safetensors"}}')
    (folder / "model/config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    (folder / "model/tokenizer.json").write_text("{}")
    delivered = [PendingMetrics(1, "", {}), PendingMetrics(0, "sums", {})]
    DeliveryLog(folder / "sinks.json").mark_delivered("custom", delivered)
    trial = {"name": "a-0", "variant": "a", "seed": 0, "overrides": ["--steps", "2"]}
    (folder / "trials.json").write_text(json.dumps({"format": 2, "recipe": "r.toml", "trials": [trial]}))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@contextmanager
def bounded(seconds: float = 30.0, megabytes: int = 500) -> Iterator[None]:
    """Fail if the block takes longer or makes the process grow by more."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - start < seconds
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < megabytes


def allow_keel_error(read: Callable[[], object]) -> None:
    with suppress(KeelError):
        read()


@pytest.mark.parametrize("name", READERS)
def test_every_reader_accepts_the_intact_file(intact: Path, name: str) -> None:
    READERS[name].read(intact)


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw damaged bytes, or rarely arbitrary ones."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=64))
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(damaged) - 1, 0)))
        size = draw(st.integers(0, 12))
        match draw(st.sampled_from(["flip", "cut", "put", "repeat", "end"])):
            case "flip":
                damaged[start : start + size] = bytes(
                    byte ^ draw(st.integers(1, 255)) for byte in damaged[start : start + size]
                )
            case "cut":
                del damaged[start : start + size]
            case "put":
                damaged[start:start] = draw(
                    st.binary(max_size=8) | st.sampled_from([b"[" * 5000, b"9" * 5000, b"\x00", b"{"])
                )
            case "repeat":
                damaged[start:start] = damaged[start : start + size] * draw(st.integers(1, 50))
            case "end":
                del damaged[start:]
    return bytes(damaged)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_raises_only_keel_errors(intact: Path, tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    data = (intact / reader.file).read_bytes()
    folder = shutil.copytree(intact, tmp_path / "run")

    # reading a complete run is slow
    @settings(FUZZING, max_examples=10 if reader.read in (lens, ledger) else 40)
    @given(damaged=damage(data))
    def read(damaged: bytes) -> None:
        for leftover in folder.glob("run.db-*"):
            leftover.unlink(missing_ok=True)  # a closing connection may remove them first
        (folder / reader.file).write_bytes(damaged)
        allow_keel_error(lambda: reader.read(folder))

    with bounded(seconds=120):
        read()


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, -1, 2**31, 2**63, 2**64, 10**400, 1e308, 0.5, "", "../../x", "/etc/passwd", "\x00", "a" * 3000]
    )
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def replaced(tree: Any, path: list[int], value: Any) -> Any:
    """Return the tree with another value at the position that the indices in `path` select."""
    if not path or not isinstance(tree, dict | list) or not tree:
        return value
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    chosen = keys[path[0] % len(keys)]
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    changed[chosen] = replaced(tree[chosen], path[1:], value)
    return changed


@pytest.mark.parametrize(
    "name", [name for name, reader in READERS.items() if reader.file.endswith((".json", ".jsonl"))]
)
def test_json_with_a_replaced_value_raises_only_keel_errors(intact: Path, tmp_path: Path, name: str) -> None:
    reader = READERS[name]
    trees = [json.loads(line) for line in _objects((intact / reader.file).read_text())]
    folder = shutil.copytree(intact, tmp_path / "run")

    @settings(FUZZING, max_examples=10 if reader.read is lens else 60)
    @given(path=st.lists(st.integers(0, 20), max_size=4), value=ANYTHING)
    def read(path: list[int], value: Any) -> None:
        text = "\n".join(json.dumps(replaced(tree, path, value)) for tree in trees)
        (folder / reader.file).write_text(text)
        allow_keel_error(lambda: reader.read(folder))

    read()


def _objects(text: str) -> list[str]:
    lines = text.splitlines()
    return lines if len(lines) > 1 and lines[0].endswith("}") else [text]


NAMES = ["steps", "pool", "urls", "environments", "x", "options", "objective", "0", "gates"]


@settings(FUZZING, max_examples=150)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
    value=ANYTHING,
)
def test_settings_with_any_value_raise_only_keel_errors(names: list[str], value: Any) -> None:
    with suppress(KeelError):
        load_settings(overrides=[f"--{'.'.join(names)}", json.dumps(value)]).rows()


VALUES = [
    "'a'",
    "x'ff'",
    "-1",
    "9223372036854775807",
    "1e999",
    "NULL",
    "'{'",
    "'[1]'",
    "'{\"reward\": 1e999}'",
    "'NaN'",
]


@pytest.mark.parametrize("read", [ledger, lens])
def test_a_ledger_with_any_value_in_any_column_raises_only_keel_errors(
    intact: Path, tmp_path: Path, read: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(intact, tmp_path / "run")
    file = folder / "run.db"
    data = file.read_bytes()
    with closing(sqlite3.connect(file)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(name, column[1]) for name in tables for column in db.execute(f"PRAGMA table_info({name})")]
    loose = "CREATE TABLE loose AS SELECT * FROM {0}; DROP TABLE {0}; ALTER TABLE loose RENAME TO {0};"
    for number, (table, column) in enumerate(columns):
        for value in (VALUES + VALUES)[number % len(VALUES) :][: 1 if read is lens else 3]:
            for leftover in folder.glob("run.db*"):
                leftover.unlink(missing_ok=True)  # a closing connection may remove them first
            file.write_bytes(data)
            with closing(sqlite3.connect(file)) as db:
                db.executescript(loose.format(table) + f'UPDATE {table} SET "{column}" = {value};')
            allow_keel_error(lambda: read(folder))


# --- small files with huge contents, and special files ---


def test_a_ledger_with_an_endless_view_is_rejected(intact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(intact, tmp_path / "run")
    with closing(sqlite3.connect(folder / "run.db")) as db:
        endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x, x, x, x, '{}' FROM n"
        columns = ", ".join(column[1] for column in db.execute("PRAGMA table_info(steps)"))
        db.executescript(f"DROP TABLE steps; CREATE VIEW steps ({columns}) AS {endless};")
    with bounded(), pytest.raises(KeelError):
        Lens(folder).query("run", {"run": "run"})
    with bounded(), pytest.raises(KeelError, match="view"):
        ledger(folder)


def test_a_decompression_bomb_in_the_ledger_is_rejected(intact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(intact, tmp_path / "run")
    packer = zlib.compressobj(1)
    bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(200)) + packer.flush()
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        db.execute("INSERT INTO finished VALUES ('g', 0, 0, ?)", (bomb,))
    with bounded(), pytest.raises(KeelError, match="more than"):
        ledger(folder)


def test_a_parquet_file_with_too_many_values_is_rejected(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_read, "MAX_COLUMN_VALUES", 2**20)
    folder = shutil.copytree(intact, tmp_path / "run")
    path = folder / "rollouts/step_000001.parquet"
    few = pq.read_table(path).slice(0, 1)
    many = pa.ListArray.from_arrays([0, 2_000_000], pa.array([False] * 2_000_000))
    pq.write_table(few.set_column(few.schema.get_field_index("trainable"), "trainable", many), path, compression="zstd")
    assert path.stat().st_size < 20_000
    with bounded():
        for read in (READERS["rollouts"].read, READERS["rollouts compared"].read):
            with pytest.raises(KeelError, match="2,000,000 values"):
                read(folder)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.file.endswith((".json", ".toml"))])
def test_deeply_nested_files_raise_only_keel_errors(intact: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(intact, tmp_path / "run")
    file = folder / READERS[name].file
    for text in (
        "[" * 200_000,
        '{"files":' * 50_000 + "1" + "}" * 50_000,
        "a = " + "[" * 5000 + "]" * 5000,
        "a." * 5000 + "a = 1",
    ):
        file.write_text(text)
        with bounded():
            allow_keel_error(lambda: READERS[name].read(folder))


@pytest.mark.parametrize("name", ["manifest", "adapter", "index of a model", "state", "origin in the lens"])
def test_pipes_and_devices_do_not_block_readers(intact: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(intact, tmp_path / "run")
    file = folder / READERS[name].file
    file.unlink()
    os.mkfifo(file)
    with bounded(seconds=10):
        allow_keel_error(lambda: READERS[name].read(folder))
    file.unlink()
    file.symlink_to("/dev/zero")
    with bounded(seconds=10):
        allow_keel_error(lambda: READERS[name].read(folder))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", "", ".", "pipe", "link", "a\x00b"])
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "sealed"
    folder.mkdir()
    (tmp_path / "outside").write_text("x")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(tmp_path / "outside")
    from keel.common.manifest import _hash_entries, hash_file

    files = {name: {"size": 1 if name == "link" else 0, "blake2b": hash_file(tmp_path / "outside")}}
    (folder / "manifest.json").write_text(json.dumps({"files": files, "blake2b": _hash_entries(files)}))
    with bounded(seconds=10), pytest.raises(KeelError, match=r"is not a file (in|of) this folder"):
        verify_manifest(folder)


def test_a_run_with_links_to_outside_files_shows_nothing_of_them(intact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(intact, tmp_path / "runs" / "run")
    other = make_run(tmp_path / "other", steps=1, seed=5)
    for file in ("run.db", "config.toml", "run.json", "rollouts/step_000001.parquet"):
        (folder / file).unlink()
        (folder / file).symlink_to(other / file)
    with closing(Lens(folder.parent)) as opened:
        (shown,) = opened.query("runs", {})["runs"]
        assert shown["status"] == "unreadable"
        assert "is a symbolic link to outside the run folder" in shown["why"]
        with pytest.raises(KeelError, match="is a symbolic link to outside"):
            opened.query("groups", {"run": "run", "step": "1"})
