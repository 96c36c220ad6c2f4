"""Sinks receive every metric once and in order, write it where it can be read back, and never harm a run."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.cli import main
from keel.config import MetricsSettings, RunSettings, load_settings
from keel.errors import ConfigError, KeelError
from keel.run.evaluation.evaluate import EvaluationResult
from keel.run.folder import RunFolder
from keel.run.monitor.sinks import Sinks, finite_metrics, open_sinks, resolve_sinks
from tests.support.paths import ROOT
from tests.support.tiny_runs import RECIPE

METRICS = {"reward": 0.25, "loss/policy": -0.5, "empty": float("nan")}
EVALUATION = EvaluationResult("larger_number", 0.5, 0.25, 0.75, 4, 1, {1: 0.5}, 0, 1.0)


class Recorder:
    """A custom sink that records what it received, across resumes."""

    received: list[Any] = []
    fail_at: int | None = None
    fail_to_close = False
    closed = 0

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        assert (folder / "run.db").exists()
        assert isinstance(settings, RunSettings)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == Recorder.fail_at:
            raise OSError("no space left")
        Recorder.received.append((step, dict(metrics)))

    def evaluated(self, step: int, environment: str, metrics: Mapping[str, float]) -> None:
        Recorder.received.append((step, environment, metrics["reward"]))

    def close(self) -> None:
        Recorder.closed += 1
        if Recorder.fail_to_close:
            raise RuntimeError("connection lost")


NOT_CALLABLE = 3


def not_a_sink(folder: Path, settings: RunSettings) -> object:
    return object()


@pytest.fixture(autouse=True)
def fresh_recorder() -> None:
    Recorder.received, Recorder.fail_at, Recorder.fail_to_close, Recorder.closed = [], None, False, 0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Any]:
    """Return a function that opens the run with these metrics settings; each call after the first resumes it."""
    opened: list[RunFolder] = []

    def open_run(metrics: str) -> RunFolder:
        while opened:
            opened.pop().close()
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(f"{RECIPE}\n[metrics]\n{metrics}\n")
        path = tmp_path / "run"
        if path.exists():
            opened.append(RunFolder.open(path, file=recipe, allow_changes=True))
        else:
            opened.append(RunFolder.create(path, load_settings(recipe)))
        return opened[-1]

    yield open_run
    while opened:
        opened.pop().close()


CUSTOM = f'custom_sink = "{__name__}:Recorder"'


def commit(folder: RunFolder, sinks: Sinks | None, *steps: int) -> None:
    """Commit steps as the loop does: the ledger first, then the callbacks."""
    for step in steps:
        folder.ledger.write_step(
            step, version=step, stepped=True, metrics=finite_metrics(METRICS), outcomes=[], state={}
        )
        if sinks is not None:
            sinks.step(step, METRICS)


def evaluate(folder: RunFolder, sinks: Sinks, step: int, table: str = "larger_number") -> None:
    folder.ledger.write_evaluation(step, table, EVALUATION.scalars())
    sinks.evaluated(step, EVALUATION)


def never(text: str) -> None:
    raise AssertionError(text)


# --- delivery ---


def test_a_sink_receives_finite_metrics_of_steps_and_evaluations_in_order(folder: Any) -> None:
    run = folder(CUSTOM)
    sinks = open_sinks(run, never)
    evaluate(run, sinks, 0)
    commit(run, sinks, 1, 2)
    evaluate(run, sinks, 2)
    sinks.ended("")
    finite = {"reward": 0.25, "loss/policy": -0.5}
    assert Recorder.received == [(0, "larger_number", 0.5), (1, finite), (2, finite), (2, "larger_number", 0.5)]
    assert Recorder.closed == 1


def test_a_resumed_run_delivers_nothing_twice_and_what_was_missed(folder: Any) -> None:
    run = folder(CUSTOM)
    sinks = open_sinks(run, never)
    evaluate(run, sinks, 0)
    commit(run, sinks, 1)
    commit(run, None, 2)  # killed between the ledger and the sink
    run = folder("tensorboard = false")
    off = open_sinks(run, never)
    commit(run, off, 3)
    evaluate(run, off, 3)
    run = folder(CUSTOM)
    sinks = open_sinks(run, never)
    commit(run, sinks, 4)
    sinks.step(4, METRICS)
    order = [row[:2] if len(row) == 3 else row[0] for row in Recorder.received]
    assert order == [(0, "larger_number"), 1, 2, 3, (3, "larger_number"), 4]


def test_evaluations_are_named_by_their_settings_table(folder: Any) -> None:
    run = folder(CUSTOM)
    sinks = open_sinks(run, never)
    evaluate(run, sinks, 0, "easy")
    evaluate(run, sinks, 0, "hard")  # both environments are larger_number
    assert [row[1] for row in Recorder.received] == ["easy", "hard"]


def test_a_failing_sink_is_disabled_with_a_notice_and_the_others_continue(folder: Any) -> None:
    run = folder(f"tensorboard = true\n{CUSTOM}")
    Recorder.fail_at = 2
    notices: list[str] = []
    sinks = open_sinks(run, notices.append)
    commit(run, sinks, 1, 2, 3)
    sinks.ended("")
    assert notices == ["metrics.custom_sink failed and is disabled: OSError: no space left"]
    assert [row[0] for row in Recorder.received] == [1]
    assert sorted({step for step, _, _ in scalars(run.path)}) == [1, 2, 3]


def test_a_sink_that_fails_to_close_gives_a_notice(folder: Any) -> None:
    Recorder.fail_to_close = True
    notices: list[str] = []
    open_sinks(folder(CUSTOM), notices.append).ended("")
    assert notices == ["metrics.custom_sink failed and is disabled: RuntimeError: connection lost"]


def test_a_delivery_log_that_cannot_be_written_gives_a_notice(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(CUSTOM)
    notices: list[str] = []
    sinks = open_sinks(run, notices.append)
    (run.path / "sinks.json").unlink()
    (run.path / "sinks.json").mkdir()
    commit(run, sinks, 1)
    assert len(notices) == 1
    assert Recorder.received == []


def test_a_damaged_delivery_log_is_an_error_that_names_it(folder: Any) -> None:
    run = folder(CUSTOM)
    (run.path / "sinks.json").write_text('{"format": 2}')
    with pytest.raises(KeelError, match=r"sinks\.json is damaged"):
        open_sinks(run, never)
    (run.path / "sinks.json").write_text('{"format": 9}')
    with pytest.raises(KeelError, match="has format 9, and this version of keel reads 2"):
        open_sinks(run, never)


# --- errors before a run ---


@pytest.mark.parametrize(
    ("package", "setting"),
    [("tensorboardX", {"tensorboard": True}), ("wandb", {"wandb": "offline"}), ("trackio", {"trackio": True})],
)
def test_a_missing_package_is_an_error_that_says_what_to_install(
    package: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf'needs the package {package}: pip install "keel-rl\[metrics\]"'):
        resolve_sinks(MetricsSettings(**setting))


def test_a_run_that_lacks_a_package_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    assert main(["train", str(recipe), "--run", str(tmp_path / "run"), "--metrics.wandb", "offline"]) == 2
    assert 'metrics.wandb = "offline" needs the package wandb' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Sink", "cannot be imported: No module named 'no_such_module'"),
        (f"{__name__}:Missing", "cannot be imported: module .* has no attribute 'Missing'"),
        (f"{__name__}:NOT_CALLABLE", "is a int, not a class or function; it must be callable and return a sink"),
    ],
)
def test_a_custom_sink_that_cannot_be_imported_is_an_error(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_sinks(MetricsSettings(custom_sink=path))


def test_an_object_without_the_sink_methods_is_an_error_and_the_other_sinks_are_closed(folder: Any) -> None:
    with pytest.raises(ConfigError, match=r'metrics\.custom_sink = ".*" cannot be opened: .* has no method step'):
        open_sinks(folder(f'tensorboard = true\ncustom_sink = "{__name__}:not_a_sink"'), never)


def test_metrics_settings_without_effect_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'metrics\.project = "x" has no effect: it is for wandb and trackio'):
        load_settings(None, ["--metrics.project=x", "--metrics.tensorboard=true"])
    with pytest.raises(ConfigError, match=r"metrics\.custom_sink"):
        load_settings(None, ["--metrics.custom_sink=no_colon"])


# --- TensorBoard ---


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an event file: length, its checksum, data, its checksum."""
    offset = 0
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        yield data[offset + 12 : offset + 12 + length]
        offset += 16 + length


def scalars(run: Path) -> list[tuple[int, str, float]]:
    from tensorboardX.proto.event_pb2 import Event

    rows = []
    for file in (run / "tensorboard").iterdir():
        for record in records(file.read_bytes()):
            event = Event.FromString(record)
            rows += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return sorted(rows)


def test_tensorboard_files_hold_the_metrics_of_both_starts_without_a_gap(folder: Any) -> None:
    run = folder("tensorboard = true")
    first = open_sinks(run, never)
    commit(run, first, 1)
    assert (1, "reward", 0.25) in scalars(run.path)  # on disk before anything is closed
    first.ended("")
    run = folder("tensorboard = true")
    second = open_sinks(run, never)
    commit(run, second, 2)
    evaluate(run, second, 2)
    second.ended("")
    assert len(list((run.path / "tensorboard").iterdir())) == 2
    written = scalars(run.path)
    assert [row for row in written if "/larger" not in row[1]] == [
        (1, "loss/policy", -0.5),
        (1, "reward", 0.25),
        (2, "loss/policy", -0.5),
        (2, "reward", 0.25),
    ]
    assert (2, "evaluation/larger_number/reward", 0.5) in written
    assert (2, "evaluation/larger_number/pass_1", 0.5) in written


# --- wandb and trackio start threads and processes: run both in one separate process ---

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.run.monitor import test_sinks as helpers
from keel.config import load_settings
from keel.run.folder import RunFolder
from keel.run.monitor.sinks import open_sinks
for step in (1, 2):
    folder = RunFolder.create(Path("run"), load_settings("recipe.toml")) if step == 1 else RunFolder.open(Path("run"))
    sinks = open_sinks(folder, helpers.never)
    helpers.commit(folder, sinks, step)
    helpers.evaluate(folder, sinks, step)
    sinks.ended("")
    folder.close()
    second = int(time.time())  # wandb's folders are named by it
    while int(time.time()) == second:
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run started twice, one step each, with both packages enabled; they print nothing on standard output."""
    root = tmp_path_factory.mktemp("two_starts")
    metrics = '[metrics]\nwandb = "offline"\ntrackio = true\nproject = "mine"\n'
    (root / "recipe.toml").write_text(f"{RECIPE}\n{metrics}")
    # settings of the machine for these packages must not affect the test
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT)],
        env={**clean, "TRACKIO_DIR": str(root / "trackio"), "HOME": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return root


def wandb_records(file: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    try:
        while (data := store.scan_data()) is not None:
            yield Record.FromString(data)
    finally:
        store.close()


@pytest.mark.process
def test_wandb_offline_files_hold_the_metrics_of_both_starts_of_one_run(two_starts: Path) -> None:
    rows, runs = [], set()
    for file in sorted((two_starts / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    run_id = json.loads((two_starts / "run" / "sinks.json").read_text())["run_id"]
    assert runs == {(run_id, "mine", "run")}
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    assert [row.get("reward") for row in rows] == [0.25, None, 0.25, None]
    assert [row.get("evaluation/larger_number/pass@1") for row in rows] == [None, 0.5, None, 0.5]


@pytest.mark.process
def test_trackio_holds_the_metrics_of_both_starts_as_one_run(two_starts: Path) -> None:
    run_id = json.loads((two_starts / "run" / "sinks.json").read_text())["run_id"]
    store = sqlite3.connect(two_starts / "trackio" / "mine.db")
    try:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    finally:
        store.close()
    assert {name for name, _, _ in rows} == {f"run-{run_id}"}
    assert [step for _, step, _ in rows] == [1, 1, 2, 2]
    metrics = [json.loads(text) for _, _, text in rows]
    assert metrics[0] == metrics[2] == {"reward": 0.25, "loss/policy": -0.5}
    assert metrics[1]["evaluation/larger_number/pass@1"] == 0.5
