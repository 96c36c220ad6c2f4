"""Token texts are untrusted: terminals and pages show them as text and never interpret them."""

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from keel.cli import main
from keel.cli.display.compare_display import print_report
from keel.tools.compare.escape import MAX_CHARACTERS, escape_token
from keel.tools.compare.html import render_report
from tests.support.recorded_rows import compare, row, write_json, write_parquet

SCRIPT = "<script>alert(1)</script><img src=http://x>"
HOSTILE = [
    "\x1b[31mred\x1b[2J",
    "\u202eright to left",
    "\u200bno width",
    "\x07\x08\x00",
    "line\nbreak\r\t",
    "\u2028separator",
    "[bold]markup[/bold]",
    SCRIPT,
    '"quoted" \\n',
    "\u0301combining",
    "\U000e0041tag",
    "\xa0no break",
    "日本語 é",
    "x" * 1_000_000,
]


def hostile_rows(texts: list[Any]) -> list[dict[str, Any]]:
    """Return a sequence in which each text is a token with ratio 10, which icepop drops."""
    return [row([10.0] * len(texts), 1.0, token_text=texts)]


def shown(report: Any) -> str:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system=None, width=160, markup=False, highlight=False)
    print_report(terminal, report)
    return out.getvalue()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b" the", '" the"'),
        (b"\n\t\r", '"\\n\\t\\r"'),
        (b"\x1b[2J", '"\\x1b[2J"'),
        ("\u202e".encode(), '"\\u202e"'),
        ("\U000e0041".encode(), '"\\U000e0041"'),
        (b"\\n", '"\\\\n"'),
        (b'"', '"\\""'),
        (b"\xff\xfe", '"\\xff\\xfe"'),
        ("é日".encode(), '"é日"'),
        ("e\u0301".encode(), '"e\u0301"'),
        ("\u0301".encode(), '"\\u0301"'),
        (b"\xc2\xa0", '"\\xa0"'),
        (b"", '""'),
    ],
)
def test_a_token_text_is_quoted_with_invisible_characters_escaped(raw: bytes, expected: str) -> None:
    assert escape_token(raw) == expected


def test_a_long_token_text_is_truncated_and_its_length_shown() -> None:
    text = escape_token(b"y" * 1_000_000)
    assert text == f'"{"y" * MAX_CHARACTERS}..." (1,000,000 characters)'


def test_long_texts_that_are_truncated_alike_are_counted_together(tmp_path: Path) -> None:
    path = write_json(tmp_path / "t.jsonl", hostile_rows(["z" * 50 + "a", "z" * 50 + "b"]))
    (text,) = compare(path, "icepop").objectives[0].texts
    assert (text.tokens, text.dropped) == (2, 2)


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_token_texts_print_no_control_characters_in_a_terminal(tmp_path: Path, form: str) -> None:
    path = tmp_path / "t"
    rows = hostile_rows(HOSTILE)
    report = compare(write_json(path, rows) if form == "json" else write_parquet(path, rows), "icepop", texts=50)
    text = shown(report)
    # except for newlines all characters are printable; styles are off, so Keel prints no escape sequences either
    unprintable = {character for character in text if not character.isprintable()} - {"\n"}
    assert unprintable == set()
    assert "[bold]markup[/bold]" in text
    assert "\\u202eright to left" in text


def test_a_token_that_looks_like_markup_is_escaped_in_html(tmp_path: Path) -> None:
    report = compare(write_json(tmp_path / "t.jsonl", hostile_rows(HOSTILE)), "icepop", texts=50)
    text = render_report(report)
    assert text.count("<script") == 2  # the chart data and the page's own script
    assert "<script>alert" not in text
    assert "<img" not in text
    assert html.escape(escape_token(SCRIPT.encode())[: MAX_CHARACTERS - 2]) in text
    assert len(text) < 200_000
    assert "\u202e" not in text


def test_the_html_file_references_nothing_else(tmp_path: Path) -> None:
    rows = [row([10.0, 1.0], 1.0, step=step) for step in (1, 2, 3)]
    text = render_report(compare(write_json(tmp_path / "t.jsonl", rows), "icepop,dppo_tv,opsm"))
    shell = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"src\s*=|href\s*=(?!\"data:,\")|url\(|@import|https?:", shell)
    assert "default-src &#x27;none&#x27;" in text
    assert "unsafe" not in text.partition("<style>")[0]
    assert text.count("<figure") >= 7


def test_names_and_paths_are_escaped_in_html(tmp_path: Path) -> None:
    folder = tmp_path / "<b>x"
    folder.mkdir()
    objective = folder / "a&b.toml"
    objective.write_text('[objective]\nname = "icepop"\n')
    text = render_report(compare(write_json(folder / "t.jsonl", hostile_rows(["a"])), f"{objective},opsm"))
    assert "<b>x" not in text
    assert "&lt;b&gt;x" in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)  # JSON in a script element is not markup
    assert "a&b.toml" not in markup
    assert "a&amp;b.toml" in markup


def test_invalid_utf8_is_shown_as_bytes_from_parquet_and_json(tmp_path: Path) -> None:
    binary = hostile_rows([b"\xff\xfe", b"ok"])
    parquet = write_parquet(tmp_path / "t.parquet", binary, token_text=pa.list_(pa.binary()))
    raw = json.dumps(hostile_rows(["BROKEN", "ok"])[0]).encode().replace(b"BROKEN", b"\xff\xfe")
    lines = tmp_path / "t.jsonl"
    lines.write_bytes(raw)
    for path in (parquet, lines):
        assert {text.text for text in compare(path, "icepop").objectives[0].texts} == {'"\\xff\\xfe"', '"ok"'}


def test_a_string_column_with_invalid_utf8_is_read(tmp_path: Path) -> None:
    """Arrow does not validate the contents of a string column."""
    raw_texts = pa.array([[b"\xff", b"ok"]], pa.list_(pa.binary()))
    text = pa.ListArray.from_arrays(raw_texts.offsets, raw_texts.values.view(pa.string()))
    rows = hostile_rows(["a", "b"])
    table = pq.read_table(write_parquet(tmp_path / "t.parquet", rows))
    pq.write_table(table.set_column(table.column_names.index("token_text"), "token_text", text), tmp_path / "u.parquet")
    texts = compare(tmp_path / "u.parquet", "icepop").objectives[0].texts
    assert {text.text for text in texts} == {'"\\xff"', '"ok"'}


def test_half_a_surrogate_pair_in_json_can_be_printed_and_stored(tmp_path: Path, capsys: Any) -> None:
    path, target = tmp_path / "t.jsonl", tmp_path / "out.parquet"
    line = json.dumps(hostile_rows(["HALF", "ok"])[0]).replace("HALF", "\\ud800")
    path.write_text(line)
    args = ["compare", str(path), "--objectives", "icepop", "--parquet", str(target), "--json"]
    assert main([*args, "--html", str(tmp_path / "r.html")]) == 0
    (summary,) = json.loads(capsys.readouterr().out)["objectives"]
    assert {text["text"] for text in summary["texts"]} == {'"\\xed\\xa0\\x80"', '"ok"'}
    assert '"\\xed\\xa0\\x80"' in pq.read_table(target)["key"].to_pylist()


def test_token_texts_of_another_type_are_an_error(tmp_path: Path, capsys: Any) -> None:
    path = write_json(tmp_path / "t.jsonl", hostile_rows([1, {"a": 2}]))
    assert main(["compare", str(path)]) == 2
    assert "token_text cannot be read" in capsys.readouterr().err
