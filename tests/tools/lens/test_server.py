"""The lens reads run folders: what it counts is what was recorded, and nobody else's page can ask it."""

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
from keel.tools.lens import aggregates
from keel.tools.lens import run_reader as folders
from keel.tools.lens.queries import Lens
from keel.tools.lens.server import SECURITY_HEADERS, build_app
from keel.tools.lens.trust_region_bands import statistics_of
from tests.support.lens_world import make_run


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


def ask(lens: Lens, name: str, **words: object) -> dict[str, Any]:
    answer = lens.query(name, {key: str(value) for key, value in words.items()})
    json.dumps(answer, allow_nan=False)
    return answer


def tokens_of(run: Path) -> list[dict[str, Any]]:
    """Every token that a gate was asked about, straight from the files."""
    found = []
    for file in sorted((run / "rollouts").iterdir()):
        for row in pq.read_table(file).to_pylist():
            for position, logprob in enumerate(row["logprobs"] or []):
                if logprob is not None:
                    names = ("token_ids", "token_text", "logprobs", "sampler_logprobs", "versions", "drop_reason")
                    values = {name: row[name][position] for name in names}
                    found.append({**row, **values, "position": position})
    return found


# runs


def test_runs_are_found_below_a_folder_and_a_run_is_found_by_itself(world: Path, lens: Lens) -> None:
    told = ask(lens, "runs")["runs"]
    assert {run["run"]: (run["status"], run["step"], run["objective"]) for run in told} == {
        "a": ("finished", 4, "icepop"),
        "deep/b[1]": ("stopped", 2, "dppo_kl"),
    }
    alone = Lens(world / "a")
    assert [run["run"] for run in ask(alone, "runs")["runs"]] == ["a"]
    alone.close()


def test_a_folder_may_be_named_from_here_or_by_a_link(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(world)
    monkeypatch.chdir(tmp_path)
    for name in ("link", "link/a", "../" + tmp_path.name + "/link/a"):
        lens = Lens(Path(name), read_seconds=60)
        assert ask(lens, "region", run="a")["read"] == 4
        lens.close()


def test_no_query_reads_outside_of_the_folder(world: Path) -> None:
    lens = Lens(world / "a")
    with pytest.raises(KeelError, match="cannot be read"):
        lens.database.query_rows("SELECT * FROM {files}", [world / "deep/b[1]/rollouts/step_000001.parquet"])
    lens.close()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"contains no run: there is no run\.db in it"):
        Lens(tmp_path)
    with pytest.raises(KeelError, match="is not a folder"):
        Lens(tmp_path / "nowhere")


def test_series_are_the_ledgers_numbers_and_missing_ones_are_none(world: Path, lens: Lens) -> None:
    with sqlite3.connect(world / "a" / "run.db") as db:
        rows = [json.loads(text) for (text,) in db.execute("SELECT numbers FROM steps ORDER BY step")]
    db.close()
    told = ask(lens, "series", run="a", names="reward,mismatch_kl,mismatch_kl_masked,nothing")
    assert told["step"] == [1, 2, 3, 4]
    for name in ("reward", "mismatch_kl"):
        assert told["values"][name] == [row[name] for row in rows]
    assert told["values"]["mismatch_kl_masked"] == [None, 0.5, None, None]
    assert told["values"]["nothing"] == [None] * 4


def test_a_long_series_is_averaged_to_a_bounded_number_of_points(lens: Lens, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(lens, "series", run="a", names="reward")["values"]["reward"]
    monkeypatch.setattr(folders, "MAX_POINTS", 2)
    told = ask(lens, "series", run="a", names="reward")
    assert (told["steps_per_point"], told["step"]) == (2, [2, 4])
    assert told["values"]["reward"] == pytest.approx([(whole[0] + whole[1]) / 2, (whole[2] + whole[3]) / 2])


def test_every_rollout_is_counted_under_its_fate(lens: Lens) -> None:
    assert ask(lens, "outcomes", run="a") == {
        "rollouts": 64,
        "outcomes": {"trained": 47, "zero_variance": 16, "failed": 1},
    }
    assert ask(lens, "outcomes", run="a")["rollouts"] == 64


def test_a_run_that_goes_on_is_seen_to(tmp_path: Path, world: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(world / "a", run)
    with sqlite3.connect(run / "run.db") as db:
        late = db.execute("SELECT * FROM steps WHERE step > 2").fetchall()
        fates = db.execute("SELECT * FROM rollouts WHERE step > 2").fetchall()
        db.execute("DELETE FROM steps WHERE step > 2")
        db.execute("DELETE FROM rollouts WHERE step > 2")
        db.execute("UPDATE meta SET value = 'running' WHERE key = 'status'")
    lens = Lens(run, read_seconds=60)
    first = ask(lens, "region", run="run")
    # files of steps that were never committed do not count
    assert (first["read"], first["last"], ask(lens, "outcomes", run="run")["rollouts"]) == (2, 2, 32)
    with db:
        db.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", late)
        db.executemany("INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", fates)
    db.close()
    assert ask(lens, "series", run="run", names="reward")["step"] == [1, 2, 3, 4]
    assert ask(lens, "region", run="run")["read"] == 4
    assert ask(lens, "outcomes", run="run")["rollouts"] == 64
    lens.close()


# the trust region


def test_histograms_count_every_token_once_by_staleness_side_and_outcome(world: Path, lens: Lens) -> None:
    told = ask(lens, "region", run="a")
    expected: Counter[tuple[int, str, str, int]] = Counter()
    for token in tokens_of(world / "a"):
        side = "positive" if token["advantage"] > 0 else "negative"
        scaled = (token["logprobs"] - token["sampler_logprobs"]) / told["statistics"][0]["scale"]
        place = math.floor(math.asinh(scaled) * told["bins"])
        expected[
            token["version"] - token["versions"], side, (token["drop_reason"] or "trained").split()[-1], place
        ] += 1
    counted: Counter[tuple[int, str, str, int]] = Counter()
    for line in told["series"]:
        if line["statistic"] == "ratio":
            for place, count in enumerate(line["counts"], start=line["start"]):
                counted[line["staleness"], line["advantage_sign"], line["outcome"], place] += count
    assert +counted == +expected
    assert {outcome for _, _, outcome, _ in expected} == {"trained", "low", "high"}


def test_the_band_drawn_is_the_one_that_dropped(world: Path, lens: Lens) -> None:
    """No kept token lies outside of the band, and no dropped one inside."""
    ratio = next(one for one in ask(lens, "region", run="a")["statistics"] if one["name"] == "ratio")
    (band,) = ratio["bands"]
    assert (math.exp(band["low"]), math.exp(band["high"])) == pytest.approx((0.2, 5.0))
    for token in tokens_of(world / "a"):
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
def test_each_gate_has_its_own_statistic_drawn(
    table: dict[str, Any], statistic: str, bounds: tuple[float | None, float | None] | None, world: Path
) -> None:
    shown, _ = statistics_of(resolve_objective(table)[2])
    assert [one.name for one in shown[:2]] == ["ratio", "difference"]
    bands = next(one.bands for one in shown if one.name == statistic)
    assert bands
    if bounds is not None:
        assert (bands[0].low, bands[0].high) == pytest.approx(bounds)
    lens = Lens(world, read_seconds=60)
    region = aggregates.TrustRegionHistograms(lens.database, lens.runs.get("a"), 0, None, shown)
    counts = {one.name: 0 for one in shown}
    for line in region.advance(60)["series"]:
        counts[line["statistic"]] += sum(line["counts"])
    for one in shown:
        assert counts[one.name] == (len(tokens_of(world / "a")) if one.scope == "token" else 47)
    lens.close()


def test_what_the_files_cannot_say_is_said() -> None:
    _, notes = statistics_of(resolve_objective({"policy": {"surrogate": "clip", "eps": 0.2, "anchor": "proximal"}})[2])
    assert notes[0].startswith("the clip compares policy/proximal, which are equal at the start of the step")


def test_a_large_run_is_read_a_little_at_a_time(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "CHUNK_BYTES", 1)
    lens = Lens(world, read_seconds=0)
    assert [ask(lens, "region", run="a")["read"] for _ in range(5)] == [1, 2, 3, 4, 4]
    lens.close()


# tokens


def test_the_most_dropped_texts_are_counted_with_how_often_they_occur(world: Path, lens: Lens) -> None:
    told = ask(lens, "texts", run="a")
    tokens = tokens_of(world / "a")
    dropped = Counter(token["token_text"] for token in tokens if token["drop_reason"] is not None)
    everywhere = Counter(token["token_text"] for token in tokens)
    assert told["dropped"] == dropped.total() > 0
    for line in told["texts"]:
        assert (line["dropped"], line["all"]) == (dropped[line["text"]], everywhere[line["text"]])
        assert line["low"] + line["high"] == line["positive"] + line["negative"] == line["dropped"]


@pytest.mark.parametrize("order", ["distance", "high", "low", "difference", "gradient", "entropy"])
def test_extremes_are_what_a_sort_of_all_tokens_finds(world: Path, lens: Lens, order: str) -> None:
    told = ask(lens, "extremes", run="a", order=order, outcome="trained", advantage="positive")
    values = {
        "distance": lambda t: abs(t["logprobs"] - t["sampler_logprobs"]),
        "high": lambda t: t["logprobs"] - t["sampler_logprobs"],
        "low": lambda t: t["sampler_logprobs"] - t["logprobs"],
        "difference": lambda t: abs(math.exp(t["logprobs"]) - math.exp(t["sampler_logprobs"])),
        "gradient": lambda t: abs(t["dloss_dlogprob"][t["position"]]),
        "entropy": lambda t: t["entropy"][t["position"]],
    }
    chosen = [t for t in tokens_of(world / "a") if t["drop_reason"] is None and t["advantage"] > 0]
    best = sorted(map(values[order], chosen), reverse=True)[:50]
    assert told["matching"] == len(chosen)
    assert [abs(row["value"]) for row in told["tokens"]] == pytest.approx([abs(value) for value in best])


def test_dropped_tokens_with_a_positive_advantage_can_be_asked_for(world: Path, lens: Lens) -> None:
    told = ask(lens, "extremes", run="a", outcome="dropped", advantage="positive", first=2, last=3)
    expected = {
        (t["step"], t["group"], t["member"], t["position"])
        for t in tokens_of(world / "a")
        if t["drop_reason"] is not None and t["advantage"] > 0 and t["step"] in (2, 3)
    }
    assert {(t["step"], t["group"], t["member"], t["position"]) for t in told["tokens"]} == expected != set()
    assert told["matching"] == len(expected)


def test_a_sample_is_read_in_pages_that_join_to_the_whole(world: Path, lens: Lens) -> None:
    groups = ask(lens, "groups", run="a", step=2)["groups"]
    assert [group["group"] for group in groups] == ["sums/200", "sums/201", "sums/202", "sums/203"]
    assert (groups[0]["trained"], groups[0]["reason"]) == (0, "zero_variance")
    (one, *_) = ask(lens, "members", run="a", step=2, group="sums/201")["samples"]
    name = {key: one[key] for key in ("group", "member", "attempt", "sample")}
    row = next(
        r for r in pq.read_table(world / "a/rollouts/step_000002.parquet").to_pylist() if r["group"] == "sums/201"
    )
    pages = [ask(lens, "sample", run="a", step=2, **name, offset=at, limit=10) for at in range(0, one["length"], 10)]
    for column in ("token_ids", "token_text", "trainable", "logprobs", "drop_reason", "versions"):
        assert [value for page in pages for value in page[column]] == row[column]


def test_a_rollout_that_failed_has_its_error_and_no_tokens(lens: Lens) -> None:
    told = ask(lens, "sample", run="a", step=1, group="sums/101", member=3, attempt=0, sample=-1)
    assert (told["reason"], told["length"], told["token_ids"]) == ("failed", 0, None)
    assert told["error"].startswith("TimeoutError")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, world: Path) -> None:
    shutil.copytree(world / "a", tmp_path / "run")
    (tmp_path / "run/rollouts/step_000003.parquet").write_bytes(b"PAR1 no more")
    lens = Lens(tmp_path / "run", read_seconds=60)
    told = ask(lens, "region", run="run")
    assert told["read"] == 3
    assert told["unreadable"][0].startswith("step 3: ")
    with pytest.raises(KeelError, match=r"step_000003\.parquet cannot be read"):
        ask(lens, "groups", run="run", step=3)
    lens.close()


def test_text_that_is_not_utf8_is_shown_with_replacement_characters(tmp_path: Path, world: Path) -> None:
    shutil.copytree(world / "a", tmp_path / "run")
    path = tmp_path / "run/rollouts/step_000002.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index("token_text")
    lists = table.column("token_text").combine_chunks()
    broken = [b"\xff\xfe\xed\xa0\x80" if text == "." else text.encode() for text in lists.values.to_pylist()]
    ends = np.cumsum([0, *map(len, broken)], dtype=np.int32)
    values = pa.Array.from_buffers(
        pa.string(), len(broken), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(broken))]
    )
    mixed = pa.ListArray.from_arrays(lists.offsets, values)
    pq.write_table(table.set_column(place, "token_text", mixed), path)
    lens = Lens(tmp_path / "run", read_seconds=60)
    told = ask(lens, "sample", run="run", step=2, group="sums/201", member=0, attempt=0, sample=0)
    assert any("\ufffd" in piece for piece in told["token_text"])
    assert not any("." in piece for piece in told["token_text"])
    assert ask(lens, "texts", run="run")["read"] == 4
    assert ask(lens, "extremes", run="run", text="\ufffd")["matching"] > 0
    lens.close()


def test_closing_breaks_off_a_long_question(world: Path) -> None:
    lens = Lens(world)
    endless = "SELECT count(*) AS n FROM {files}, range(10000000000) AS more(n), range(1000000) AS again(m)"
    told: list[str] = []

    def ask_long() -> None:
        with pytest.raises(KeelError) as caught:
            lens.database.query_rows(endless, [world / "a/rollouts/step_000001.parquet"])
        told.append(str(caught.value))

    asking = threading.Thread(target=ask_long, daemon=True)
    asking.start()
    end = time.monotonic() + 30
    while not lens.database._active_cursors and time.monotonic() < end:
        time.sleep(0.01)
    lens.close()
    asking.join(30)
    assert "nterrupt" in told[0]


# over HTTP


@pytest.fixture(scope="module")
def page(world: Path) -> Any:
    with TestClient(build_app(world), base_url="http://127.0.0.1:8010", client=("127.0.0.1", 5000)) as client:
        yield client


def test_the_page_and_its_answers_carry_a_policy_without_inline_script(page: TestClient) -> None:
    for path in ("/", "/assets/main.js", "/query/runs", "/query/nothing"):
        answer = page.get(path)
        assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert "unsafe" not in SECURITY_HEADERS["content-security-policy"]
    text = page.get("/").text
    assert "<style" not in text
    assert " onclick" not in text
    assert "https:" not in text


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"host": "evil.example:8010"}, "host evil.example is not this machine"),
        ({"host": "127.0.0.1.evil.example"}, "is not this machine"),
        ({"x-forwarded-for": "127.0.0.1"}, "its own machine only"),
        ({"sec-fetch-site": "cross-site"}, "pages of other sites"),
    ],
)
def test_pages_of_other_sites_are_refused(page: TestClient, headers: dict[str, str], why: str) -> None:
    answer = page.get("/query/runs", headers=headers)
    assert answer.status_code == 403
    assert why in answer.json()["error"]


def test_other_machines_are_refused(world: Path) -> None:
    with TestClient(build_app(world), base_url="http://127.0.0.1", client=("10.0.0.9", 5000)) as other:
        assert other.get("/").status_code == 403


@pytest.mark.parametrize(
    ("path", "status", "why"),
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
def test_a_wrong_question_is_told_what_is_wrong(page: TestClient, path: str, status: int, why: str) -> None:
    answer = page.get(f"/query/{path}")
    assert (answer.status_code, why in answer.json()["error"]) == (status, True)


def test_nothing_outside_of_the_assets_is_served(page: TestClient) -> None:
    for path in ("/assets/../answers.py", "/assets/%2e%2e/answers.py", "/answers.py"):
        assert page.get(path).status_code == 404
    assert page.post("/query/runs").status_code == 405
