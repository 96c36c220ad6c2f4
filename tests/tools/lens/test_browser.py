"""The lens page in a real browser: it shows the recorded data, escapes any text, and needs no network."""

import json
import re
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn

from keel.cli import main
from keel.errors import KeelError
from keel.tools.lens.offline_page import ASSETS, bundle_modules
from keel.tools.lens.report import JS_MODULES, write_report
from keel.tools.lens.server import build_app
from tests.support.lens_browser import Browser, browser, missing
from tests.support.lens_runs import make_run

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")

HOSTILE = {
    "script": "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "turned": "safe\u202egnp.exe\u202c\u2066x\u2069\u200b",
    "hidden": "a\u0000b\u0007\ufeff\U000e0041c",
    "broken": "\ufffd\ufffd",
    "long": "A" * 1_000_000,
}


def poison(run: Path) -> None:
    """Put the hostile texts into tokens of the first trained sample of step 2, and into its group and task names."""
    path = run / "rollouts/step_000002.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    row = next(row for row in rows if row["group"] == "sums/201" and row["member"] == 0)
    start = row["trainable"].index(True)
    for index, text in enumerate(HOSTILE.values(), start=start):
        row["token_text"][index] = text
        row["drop_reason"][index] = "gate 0 (ratio) low"
    for row in rows:
        if row["group"] == "sums/201":
            row["group"] = f"sums/201{HOSTILE['script']}"
            row["task_id"] = HOSTILE["turned"]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "first", noise=0.4)
    make_run(root / "second", seed=1, steps=3, objective="dppo_tv")
    poison(make_run(root / "poisoned <b>", seed=2, noise=0.4))
    return root


@pytest.fixture(scope="module")
def address(world: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_app(world), log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as window:
        yield window


def show(window: Browser, address: str, params: str = "", view: str = "overview") -> None:
    window.open("about:blank")
    window.open(f"{address}#view={view}&{params}")
    window.wait("return document.body.dataset.ready === arguments[0]", view)


def texts(window: Browser, selector: str) -> list[str]:
    result: list[str] = window.run(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector
    )
    return result


@pytest.mark.browser
@needs_browser
def test_the_overview_draws_every_chart_of_the_selected_runs(window: Browser, address: str) -> None:
    show(window, address, "runs=first|second&run=first")
    window.wait("return document.querySelectorAll('.outcomes tr').length > 0")
    assert texts(window, "figcaption")[:4] == [
        "Reward",
        "Loss",
        "Mismatch: KL between sampler and policy",
        "Share of tokens dropped",
    ]
    assert window.run("return document.querySelectorAll('figure canvas').length") == 9
    assert [text.split() for text in texts(window, ".outcomes tr")] == [
        ["trained", "47", "73", "%"],
        ["zero_variance", "16", "25", "%"],
        ["failed", "1", "1.6", "%"],
    ]
    legend = texts(window, "figure:nth-child(2) .entry")
    assert [entry.split()[0] for entry in legend] == ["first", "second"] or [e.split()[0] for e in legend] == [
        "second",
        "first",
    ]
    assert window.log() == []


@pytest.mark.browser
@needs_browser
def test_new_steps_appear_without_a_reload(window: Browser, address: str, world: Path) -> None:
    late = make_run(world / "late", seed=4, steps=4)
    with sqlite3.connect(late / "run.db") as db:
        rows = db.execute("SELECT * FROM steps WHERE step = 4").fetchall()
        db.execute("DELETE FROM steps WHERE step = 4")
        db.execute("UPDATE meta SET value = 'running' WHERE key = 'status'")
    show(window, address, "runs=late&run=late")
    shows_step = "return document.querySelector('.facts dl').innerText.includes(arguments[0])"
    window.wait(shows_step, "3 of 4")
    with db:
        db.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", rows)
    db.close()
    window.wait(shows_step, "4 of 4")
    with sqlite3.connect(late / "run.db") as db:
        db.execute("UPDATE meta SET value = 'finished' WHERE key = 'status'")
    db.close()


@pytest.mark.browser
@needs_browser
def test_the_trust_region_has_a_chart_and_a_row_for_each_staleness(window: Browser, address: str) -> None:
    show(window, address, "run=first", "region")
    assert texts(window, "figcaption") == ["ratio, policy / sampler", "probability, policy - sampler"]
    rows = [text.split("\t") for text in texts(window, ".staleness tbody tr")]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "all"]
    counts = [int(row[1].replace(",", "")) for row in rows]
    assert sum(counts[:-1]) == counts[-1] > 0
    # the area outside the band is shaded: the left end of the canvas has the colour of dropped tokens
    pixel = window.run(
        "const c = document.querySelector('.plots canvas'); const x = c.getContext('2d');"
        "return [...x.getImageData(70, c.height / 2, 1, 1).data]"
    )
    assert pixel[3] > 0
    assert pixel[0] > pixel[2]
    assert window.log() == []


@pytest.mark.browser
@needs_browser
def test_a_rollout_can_be_read_with_the_keyboard(window: Browser, address: str) -> None:
    show(window, address, "run=first&step=3&colour=ratio", "tokens")
    window.wait("return document.querySelectorAll('.t.dropped').length > 1")
    window.run("document.querySelector('.text').focus()")
    window.press("d")
    first = window.wait("return document.querySelector('.t.at')?.dataset.n")
    assert window.run("return document.querySelector('.t.at').classList.contains('dropped')")
    window.press("\ue014")  # right
    assert int(window.run("return document.querySelector('.t.at').dataset.n")) == int(first) + 1
    window.press("n")
    at = int(window.run("return document.querySelector('.t.at').dataset.n"))
    distances = window.run(
        "return fetch(arguments[0]).then((a) => a.json())"
        ".then((s) => s.logprobs.map((l, n) => (l === null ? -1 : Math.abs(l - s.sampler_logprobs[n]))))",
        "query/sample?"
        + window.run(
            "const name = document.querySelector('.about b').innerText.split('/');"
            "return new URLSearchParams({run: 'first', step: 3, group: name.slice(0, 2).join('/'), member: name[2],"
            " attempt: 0, sample: 0}).toString()"
        ),
    )
    assert distances[at] == max(distances)
    window.press("1")
    window.wait("return document.body.dataset.ready === 'overview'")
    window.press("3")
    window.wait("return document.querySelector('.t.at') !== null && document.body.dataset.ready === 'tokens'")


@pytest.mark.browser
@needs_browser
def test_a_rollout_shows_its_reward_components_and_metrics(window: Browser, address: str) -> None:
    show(window, address, "run=first&step=3", "tokens")
    window.wait("return document.querySelector('.t.dropped') !== null")
    facts = window.run("return document.querySelector('.about').innerText")
    reward = re.search(r"reward\s+([01])\b", facts)
    assert reward is not None
    assert re.search(rf"components\s+correct {reward[1]}\b", facts)
    assert re.search(r"metrics\s+guess \d+", facts)


@pytest.mark.browser
@needs_browser
def test_pointing_at_a_token_shows_its_numbers(window: Browser, address: str) -> None:
    show(window, address, "run=first&step=3", "tokens")
    window.wait("return document.querySelector('.t.dropped') !== null")
    window.point(".block.own .t.dropped")
    facts = window.run("return document.querySelector('.token-facts').innerText")
    assert re.search(r"outcome\ngate 0 \(ratio\)", facts)
    for name in ("ratio", "p policy", "q sampler", "advantage", "gradient", "entropy", "stale"):
        assert name in facts


@pytest.mark.browser
@needs_browser
def test_the_filter_finds_dropped_tokens_with_a_positive_advantage(window: Browser, address: str) -> None:
    show(window, address, "run=first&scope=run&outcome=dropped&advantage=positive", "tokens")
    window.wait("return document.querySelectorAll('.hits .hit').length > 0")
    window.run("document.querySelector('.hits .hit').click()")
    window.wait("return document.querySelector('.t.at')?.classList.contains('dropped')")
    advantage = window.run("return document.querySelector('.token-facts').innerText").split("advantage\n")[1].split()[0]
    assert float(advantage) > 0


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("colour", ["reason", "ratio", "advantage", "difference", "gradient", "entropy", "staleness"])
def test_each_colour_mode_colours_some_token(window: Browser, address: str, colour: str) -> None:
    show(window, address, f"run=first&step=4&colour={colour}", "tokens")
    window.wait(
        "return [...document.querySelectorAll('.t')].some((t) => Number(t.style.getPropertyValue('--much')) > 0)"
    )


def check_hostile_text(window: Browser) -> None:
    window.wait("return document.querySelectorAll('.block.own .t').length > 5")
    shown = texts(window, ".block.own .t")[:5]
    assert shown[0] == HOSTILE["script"]
    assert shown[1] == "safeU+202Egnp.exeU+202CU+2066xU+2069U+200B"
    assert shown[2] == "aU+0000bU+0007U+FEFFU+E0041c"
    assert shown[3] == "\ufffd\ufffd"
    assert shown[4] == "A" * 400 + "… truncated; the token has 1,000,000 characters"
    assert "U+202E" in window.run("return document.querySelector('.about').innerText")
    assert window.run("return document.title") == "keel lens"
    assert window.run("return document.querySelectorAll('main img, main script, main b b').length") == 0
    assert window.log() == []


@pytest.mark.browser
@needs_browser
def test_hostile_text_is_shown_as_text(window: Browser, address: str) -> None:
    window.open("about:blank")
    params = {"view": "tokens", "run": "poisoned <b>", "step": 2, "group": f"sums/201{HOSTILE['script']}", "member": 0}
    window.open(address)
    window.run("location.hash = new URLSearchParams(arguments[0])", params | {"attempt": 0, "sample": 0})
    check_hostile_text(window)


@pytest.mark.browser
@needs_browser
def test_the_page_loads_nothing_from_other_machines(window: Browser, address: str) -> None:
    for view in ("overview", "region", "tokens"):
        show(window, address, "run=first", view)
        urls = window.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert urls
        assert all(url.startswith((address, "data:")) for url in urls)


# the report


@pytest.fixture(scope="module")
def report(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", str(world / "poisoned <b>"), "--out", str(out)]) == 0
    return out


@pytest.mark.browser
@needs_browser
def test_a_report_works_without_a_server(window: Browser, report: Path) -> None:
    show(window, report.as_uri(), "")
    window.wait("return document.querySelectorAll('.outcomes tr').length > 0")
    assert window.run("return document.querySelectorAll('figure canvas').length") == 9
    assert "rollouts of 4 of 4 steps: 64 of the 64 rollouts" in window.text()
    show(window, report.as_uri(), "", "region")
    assert "all" in texts(window, ".staleness tbody tr")[-1]
    show(window, report.as_uri(), "step=2", "tokens")
    window.wait("return document.querySelectorAll('.pick.group').length === 4")
    window.run("[...document.querySelectorAll('.pick.group')].find((b) => b.innerText.includes('201')).click()")
    window.wait("return document.querySelectorAll('.pick.member').length === 4")
    window.run("document.querySelector('.pick.member').click()")
    check_hostile_text(window)
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_the_policy_of_a_report_allows_only_its_own_script(report: Path) -> None:
    text = report.read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "default-src &#x27;none&#x27;" in policy
    assert text.count("<script") == 2  # the data and the page's own script
    assert len(re.findall(r'(?:src|href)="(?!#|data:)', text)) == 0


def test_a_report_respects_its_size_limit_and_states_what_is_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=14, groups=5, members=6, paragraphs=6)
    assert write_report(run, tmp_path / "small.html", 700_000) <= 700_000
    text = (tmp_path / "small.html").read_text()
    (data,) = re.findall(r'id="keel-results">(.*?)</script>', text, re.DOTALL)
    payload = json.loads(data)
    steps, of, samples, total = map(int, re.findall(r"\d+", payload["omissions"])[:4])
    assert (len(payload["steps"]), of) == (steps, 14)
    assert samples == sum(key.startswith("sample|") for key in payload["results"])
    assert 0 < samples < total


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", "nowhere"], "nowhere is not a run folder: it has no run.db"),
        (["report", "nowhere", "--megabytes", "0.1"], "--megabytes 0.1 must be between 0.5 and 1000"),
        (["lens", "nowhere"], "nowhere is not a folder; give a run folder, or a folder that contains runs"),
    ],
)
def test_invalid_arguments_are_errors(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == f"keel: {message}\n"


def test_a_report_that_cannot_be_written_is_an_error(world: Path, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="choose another file with --out"):
        write_report(world / "first", tmp_path / "no" / "report.html", 5_000_000)


def test_every_module_of_the_page_is_bundled() -> None:
    assert {path.stem for path in ASSETS.glob("*.js")} == {*JS_MODULES, "static_report"}
    assert not re.search(r"^(import|export) ", bundle_modules(JS_MODULES), re.MULTILINE)
    for path in ASSETS.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text())


@pytest.mark.process
def test_the_lens_does_not_import_torch() -> None:
    code = "import sys; import keel.tools.lens.server, keel.tools.lens.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
