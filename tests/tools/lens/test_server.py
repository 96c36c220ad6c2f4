"""The lens: its results match the recorded files, and only its own page can query it."""

import json
import math
import shutil
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from keel.errors import KeelError
from keel.objectives import resolve_objective
from keel.tools.lens import aggregates, run_reader
from keel.tools.lens.queries import Lens
from keel.tools.lens.server import SECURITY_HEADERS, build_app
from keel.tools.lens.trust_region_bands import statistics_of
from tests.support.lens_runs import make_run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a", noise=0.4)
    make_run(root / "deep" / "b[1]", seed=1, steps=2, objective="dppo_kl", status="stopped")
    return root


@pytest.fixture
def lens(world: Path) -> Any:
    lens = Lens(world, read_seconds=60)
    yield lens
    lens.close()


def query(lens: Lens, name: str, **params: object) -> dict[str, Any]:
    data = lens.query(name, {key: str(value) for key, value in params.items()})
    json.dumps(data, allow_nan=False)
    return data


def recorded_tokens(run: Path) -> list[dict[str, Any]]:
    """Return every token that trained or was dropped, from the files."""
    tokens = []
    for file in sorted((run / "rollouts").iterdir()):
        for row in pq.read_table(file).to_pylist():
            for position, logprob in enumerate(row["logprobs"] or []):
                if logprob is not None:
                    names = ("token_ids", "token_text", "logprobs", "sampler_logprobs", "versions", "drop_reason")
                    values = {name: row[name][position] for name in names}
                    tokens.append({**row, **values, "position": position})
    return tokens


# runs


def test_runs_are_found_below_a_folder_and_a_run_folder_is_one_run(world: Path, lens: Lens) -> None:
    result = query(lens, "runs")["runs"]
    assert {run["run"]: (run["status"], run["step"], run["objective"]) for run in result} == {
        "a": ("finished", 4, "icepop"),
        "deep/b[1]": ("stopped", 2, "dppo_kl"),
    }
    alone = Lens(world / "a")
    assert [run["run"] for run in query(alone, "runs")["runs"]] == ["a"]
    alone.close()


def test_a_folder_can_be_a_relative_path_or_a_symbolic_link(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(world)
    monkeypatch.chdir(tmp_path)
    for name in ("link", "link/a", "../" + tmp_path.name + "/link/a"):
        lens = Lens(Path(name), read_seconds=60)
        assert query(lens, "region", run="a")["read"] == 4
        lens.close()


def test_no_query_reads_outside_the_folder(world: Path) -> None:
    lens = Lens(world / "a")
    with pytest.raises(KeelError, match="cannot be read"):
        lens.database.query_rows("SELECT * FROM {files}", [world / "deep/b[1]/rollouts/step_000001.parquet"])
    lens.close()


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"contains no run: there is no run\.db in it"):
        Lens(tmp_path)
    with pytest.raises(KeelError, match="is not a folder"):
        Lens(tmp_path / "nowhere")


def test_series_match_the_ledger_and_missing_values_are_none(world: Path, lens: Lens) -> None:
    with sqlite3.connect(world / "a" / "run.db") as db:
        rows = [json.loads(text) for (text,) in db.execute("SELECT metrics FROM steps ORDER BY step")]
    db.close()
    result = query(lens, "series", run="a", names="reward,mismatch_kl,mismatch_kl_masked,nothing")
    assert result["step"] == [1, 2, 3, 4]
    for name in ("reward", "mismatch_kl"):
        assert result["values"][name] == [row[name] for row in rows]
    assert result["values"]["mismatch_kl_masked"] == [None, 0.5, None, None]
    assert result["values"]["nothing"] == [None] * 4


def test_a_long_series_is_averaged_to_a_bounded_number_of_points(lens: Lens, monkeypatch: pytest.MonkeyPatch) -> None:
    full_series = query(lens, "series", run="a", names="reward")["values"]["reward"]
    monkeypatch.setattr(run_reader, "MAX_POINTS", 2)
    result = query(lens, "series", run="a", names="reward")
    assert (result["steps_per_point"], result["step"]) == (2, [2, 4])
    assert result["values"]["reward"] == pytest.approx(
        [(full_series[0] + full_series[1]) / 2, (full_series[2] + full_series[3]) / 2]
    )


def test_every_rollout_is_counted_by_outcome(lens: Lens) -> None:
    assert query(lens, "outcomes", run="a") == {
        "rollouts": 64,
        "outcomes": {"trained": 47, "zero_variance": 16, "failed": 1},
    }
    assert query(lens, "outcomes", run="a")["rollouts"] == 64


def test_new_steps_of_a_running_run_are_read(tmp_path: Path, world: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(world / "a", run)
    with sqlite3.connect(run / "run.db") as db:
        late_steps = db.execute("SELECT * FROM steps WHERE step > 2").fetchall()
        late_rollouts = db.execute("SELECT * FROM rollouts WHERE step > 2").fetchall()
        db.execute("DELETE FROM steps WHERE step > 2")
        db.execute("DELETE FROM rollouts WHERE step > 2")
        db.execute("UPDATE meta SET value = 'running' WHERE key = 'status'")
    lens = Lens(run, read_seconds=60)
    first = query(lens, "region", run="run")
    # files of steps that were never committed do not count
    assert (first["read"], first["last"], query(lens, "outcomes", run="run")["rollouts"]) == (2, 2, 32)
    with db:
        db.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", late_steps)
        db.executemany("INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", late_rollouts)
    db.close()
    assert query(lens, "series", run="run", names="reward")["step"] == [1, 2, 3, 4]
    assert query(lens, "region", run="run")["read"] == 4
    assert query(lens, "outcomes", run="run")["rollouts"] == 64
    lens.close()


# the trust region


def test_histograms_count_every_token_once_by_staleness_advantage_and_outcome(world: Path, lens: Lens) -> None:
    result = query(lens, "region", run="a")
    expected: Counter[tuple[int, str, str, int]] = Counter()
    for token in recorded_tokens(world / "a"):
        sign = "positive" if token["advantage"] > 0 else "negative"
        scaled = (token["logprobs"] - token["sampler_logprobs"]) / result["statistics"][0]["scale"]
        bin_index = math.floor(math.asinh(scaled) * result["bins"])
        outcome = (token["drop_reason"] or "trained").split()[-1]
        expected[token["version"] - token["versions"], sign, outcome, bin_index] += 1
    counted: Counter[tuple[int, str, str, int]] = Counter()
    for line in result["series"]:
        if line["statistic"] == "ratio":
            for bin_index, count in enumerate(line["counts"], start=line["start"]):
                counted[line["staleness"], line["advantage_sign"], line["outcome"], bin_index] += count
    assert +counted == +expected
    assert {outcome for _, _, outcome, _ in expected} == {"trained", "low", "high"}


def test_the_drawn_band_separates_dropped_from_trained_tokens(world: Path, lens: Lens) -> None:
    """No trained token is outside the band, and no dropped token inside."""
    ratio = next(each for each in query(lens, "region", run="a")["statistics"] if each["name"] == "ratio")
    (band,) = ratio["bands"]
    assert (math.exp(band["low"]), math.exp(band["high"])) == pytest.approx((0.2, 5.0))
    for token in recorded_tokens(world / "a"):
        inside = band["low"] <= token["logprobs"] - token["sampler_logprobs"] <= band["high"]
        assert inside == (token["drop_reason"] is None)


@pytest.mark.parametrize(
    ("table", "statistic", "bounds"),
    [
        ({"name": "dppo_tv"}, "difference", None),
        ({"name": "dppo_kl"}, "difference", None),
        ({"gates": [{"statistic": "binary_kl", "high": 0.05}]}, "binary_kl", (None, 0.05)),
        ({"gates": [{"statistic": "symmetric_binary_kl", "high": 0.05}]}, "symmetric_binary_kl", (None, 0.05)),
        (
            {"gates": [{"statistic": "sequence_kl", "high": 1e-4, "when": "negative_advantage"}]},
            "sequence_kl",
            (None, 1e-4),
        ),
        (
            {"gates": [{"statistic": "ratio", "level": "geometric", "low": 0.5}]},
            "geometric_ratio",
            (math.log(0.5), None),
        ),
        ({"gates": [{"statistic": "ratio", "low": 0.0, "high": 2.0}]}, "ratio", (None, math.log(2))),
        ({"policy": {"surrogate": "clip", "eps": 0.2}}, "ratio", (math.log(0.8), math.log(1.2))),
    ],
)
def test_the_statistic_of_each_gate_is_drawn(
    table: dict[str, Any], statistic: str, bounds: tuple[float | None, float | None] | None, world: Path
) -> None:
    shown, _ = statistics_of(resolve_objective(table)[2])
    assert [each.name for each in shown[:2]] == ["ratio", "difference"]
    bands = next(each.bands for each in shown if each.name == statistic)
    assert bands
    if bounds is not None:
        assert (bands[0].low, bands[0].high) == pytest.approx(bounds)
    lens = Lens(world, read_seconds=60)
    region = aggregates.TrustRegionHistograms(lens.database, lens.runs.get("a"), 0, None, shown)
    counts = {each.name: 0 for each in shown}
    for line in region.advance(60)["series"]:
        counts[line["statistic"]] += sum(line["counts"])
    for each in shown:
        assert counts[each.name] == (len(recorded_tokens(world / "a")) if each.scope == "token" else 47)
    lens.close()


def test_a_band_that_cannot_be_drawn_is_described() -> None:
    _, notes = statistics_of(resolve_objective({"policy": {"surrogate": "clip", "eps": 0.2, "anchor": "proximal"}})[2])
    assert notes[0].startswith("the clip compares policy/proximal, which are equal at the start of the step")


def test_a_large_run_is_read_in_parts(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "CHUNK_BYTES", 1)
    lens = Lens(world, read_seconds=0)
    assert [query(lens, "region", run="a")["read"] for _ in range(5)] == [1, 2, 3, 4, 4]
    lens.close()


# tokens


def test_dropped_texts_are_counted_with_their_occurrences(world: Path, lens: Lens) -> None:
    result = query(lens, "texts", run="a")
    tokens = recorded_tokens(world / "a")
    dropped = Counter(token["token_text"] for token in tokens if token["drop_reason"] is not None)
    occurrences = Counter(token["token_text"] for token in tokens)
    assert result["dropped"] == dropped.total() > 0
    for line in result["texts"]:
        assert (line["dropped"], line["all"]) == (dropped[line["text"]], occurrences[line["text"]])
        assert line["low"] + line["high"] == line["positive"] + line["negative"] == line["dropped"]


@pytest.mark.parametrize("order", ["distance", "high", "low", "difference", "gradient", "entropy"])
def test_extremes_match_a_sort_of_all_tokens(world: Path, lens: Lens, order: str) -> None:
    result = query(lens, "extremes", run="a", order=order, outcome="trained", advantage="positive")
    values = {
        "distance": lambda t: abs(t["logprobs"] - t["sampler_logprobs"]),
        "high": lambda t: t["logprobs"] - t["sampler_logprobs"],
        "low": lambda t: t["sampler_logprobs"] - t["logprobs"],
        "difference": lambda t: abs(math.exp(t["logprobs"]) - math.exp(t["sampler_logprobs"])),
        "gradient": lambda t: abs(t["dloss_dlogprob"][t["position"]]),
        "entropy": lambda t: t["entropy"][t["position"]],
    }
    matching = [t for t in recorded_tokens(world / "a") if t["drop_reason"] is None and t["advantage"] > 0]
    best = sorted(map(values[order], matching), reverse=True)[:50]
    assert result["matching"] == len(matching)
    assert [abs(row["value"]) for row in result["tokens"]] == pytest.approx([abs(value) for value in best])


def test_dropped_tokens_with_a_positive_advantage_can_be_selected(world: Path, lens: Lens) -> None:
    result = query(lens, "extremes", run="a", outcome="dropped", advantage="positive", first=2, last=3)
    expected = {
        (t["step"], t["group"], t["member"], t["position"])
        for t in recorded_tokens(world / "a")
        if t["drop_reason"] is not None and t["advantage"] > 0 and t["step"] in (2, 3)
    }
    assert {(t["step"], t["group"], t["member"], t["position"]) for t in result["tokens"]} == expected != set()
    assert result["matching"] == len(expected)


def test_the_pages_of_a_sample_join_to_the_complete_sample(world: Path, lens: Lens) -> None:
    groups = query(lens, "groups", run="a", step=2)["groups"]
    assert [group["group"] for group in groups] == ["sums/200", "sums/201", "sums/202", "sums/203"]
    assert (groups[0]["trained"], groups[0]["reason"]) == (0, "zero_variance")
    (sample, *_) = query(lens, "members", run="a", step=2, group="sums/201")["samples"]
    sample_id = {key: sample[key] for key in ("group", "member", "attempt", "sample")}
    row = next(
        r for r in pq.read_table(world / "a/rollouts/step_000002.parquet").to_pylist() if r["group"] == "sums/201"
    )
    pages = [
        query(lens, "sample", run="a", step=2, **sample_id, offset=at, limit=10)
        for at in range(0, sample["length"], 10)
    ]
    for column in ("token_ids", "token_text", "trainable", "logprobs", "drop_reason", "versions"):
        assert [value for page in pages for value in page[column]] == row[column]


def test_a_sample_has_its_reward_components_unless_its_file_is_older(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "a", tmp_path / "a")
    sample = {"run": "a", "step": 2, "group": "sums/201", "member": 0, "attempt": 0, "sample": 0}
    opened = Lens(tmp_path)
    try:
        read = query(opened, "sample", **sample)
        assert read["reward_components"] == {"correct": read["reward"]}
        assert read["environment_metrics"].keys() == {"guess"}
        path = tmp_path / "a/rollouts/step_000002.parquet"
        older = pq.read_table(path).drop_columns(["reward_components", "environment_metrics"])
        pq.write_table(older, path)
        again = query(opened, "sample", **sample)
        assert "reward_components" not in again and again["reward"] == read["reward"]
    finally:
        opened.close()


def test_a_failed_rollout_has_an_error_and_no_tokens(lens: Lens) -> None:
    result = query(lens, "sample", run="a", step=1, group="sums/101", member=3, attempt=0, sample=-1)
    assert (result["reason"], result["length"], result["token_ids"]) == ("failed", 0, None)
    assert result["error"].startswith("TimeoutError")


def test_an_unreadable_file_is_named(tmp_path: Path, world: Path) -> None:
    shutil.copytree(world / "a", tmp_path / "run")
    (tmp_path / "run/rollouts/step_000003.parquet").write_bytes(b"PAR1 no more")
    lens = Lens(tmp_path / "run", read_seconds=60)
    result = query(lens, "region", run="run")
    assert result["read"] == 3
    assert result["unreadable"][0].startswith("step 3: ")
    with pytest.raises(KeelError, match=r"step_000003\.parquet cannot be read"):
        query(lens, "groups", run="run", step=3)
    lens.close()


def test_text_that_is_not_utf8_is_shown_with_replacement_characters(tmp_path: Path, world: Path) -> None:
    shutil.copytree(world / "a", tmp_path / "run")
    path = tmp_path / "run/rollouts/step_000002.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("token_text")
    lists = table.column("token_text").combine_chunks()
    broken = [b"\xff\xfe\xed\xa0\x80" if text == "." else text.encode() for text in lists.values.to_pylist()]
    ends = np.cumsum([0, *map(len, broken)], dtype=np.int32)
    values = pa.Array.from_buffers(
        pa.string(), len(broken), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(broken))]
    )
    mixed = pa.ListArray.from_arrays(lists.offsets, values)
    pq.write_table(table.set_column(column, "token_text", mixed), path)
    lens = Lens(tmp_path / "run", read_seconds=60)
    result = query(lens, "sample", run="run", step=2, group="sums/201", member=0, attempt=0, sample=0)
    assert any("\ufffd" in text for text in result["token_text"])
    assert not any("." in text for text in result["token_text"])
    assert query(lens, "texts", run="run")["read"] == 4
    assert query(lens, "extremes", run="run", text="\ufffd")["matching"] > 0
    lens.close()


def test_closing_interrupts_a_long_query(world: Path) -> None:
    lens = Lens(world)
    slow_query = "SELECT count(*) AS n FROM {files}, range(10000000000) AS more(n), range(1000000) AS again(m)"
    errors: list[str] = []

    def run_query() -> None:
        with pytest.raises(KeelError) as caught:
            lens.database.query_rows(slow_query, [world / "a/rollouts/step_000001.parquet"])
        errors.append(str(caught.value))

    thread = threading.Thread(target=run_query, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not lens.database._active_cursors and time.monotonic() < deadline:
        time.sleep(0.01)
    lens.close()
    thread.join(30)
    assert "nterrupt" in errors[0]


# over HTTP


@pytest.fixture(scope="module")
def page(world: Path) -> Any:
    with TestClient(build_app(world), base_url="http://127.0.0.1:8010", client=("127.0.0.1", 5000)) as client:
        yield client


def test_every_response_has_a_policy_without_inline_scripts(page: TestClient) -> None:
    for path in ("/", "/assets/main.js", "/query/runs", "/query/nothing"):
        response = page.get(path)
        assert {name: response.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "unsafe" not in SECURITY_HEADERS["content-security-policy"]
    text = page.get("/").text
    assert "<style" not in text
    assert " onclick" not in text
    assert "https:" not in text


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"host": "evil.example:8010"}, "host evil.example is not this machine"),
        ({"host": "127.0.0.1.evil.example"}, "is not this machine"),
        ({"x-forwarded-for": "127.0.0.1"}, "its own machine only"),
        ({"sec-fetch-site": "cross-site"}, "pages of other sites"),
    ],
)
def test_requests_from_other_sites_are_rejected(page: TestClient, headers: dict[str, str], message: str) -> None:
    response = page.get("/query/runs", headers=headers)
    assert response.status_code == 403
    assert message in response.json()["error"]


def test_other_machines_are_rejected(world: Path) -> None:
    with TestClient(build_app(world), base_url="http://127.0.0.1", client=("10.0.0.9", 5000)) as other:
        assert other.get("/").status_code == 403


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("groups?run=../a&step=1", 404, "is not in"),
        ("groups?run=a&step=99", 404, "has no recorded rollouts"),
        ("groups?run=a", 400, "step is missing"),
        ("groups?run=a&step=1x", 400, "step = '1x' must be an integer"),
        ("groups?run=a&step=1&order=reward;drop", 400, "must be one of name, dropped"),
        ("extremes?run=a&outcome=all", 400, "outcome = 'all' must be one of any, trained"),
        ("sample?run=a&step=1&group='&member=0&attempt=0&sample=0", 400, "has no sample '/0/0/0"),
        ("nothing", 404, "is not a query"),
    ],
)
def test_an_invalid_query_gets_an_error_message(page: TestClient, path: str, status: int, message: str) -> None:
    response = page.get(f"/query/{path}")
    assert (response.status_code, message in response.json()["error"]) == (status, True)


def test_only_assets_are_served(page: TestClient) -> None:
    for path in ("/assets/../queries.py", "/assets/%2e%2e/queries.py", "/queries.py"):
        assert page.get(path).status_code == 404
    assert page.post("/query/runs").status_code == 405
