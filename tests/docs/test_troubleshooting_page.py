"""The troubleshooting page lists messages that Keel really prints."""

import ast
import re

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)


def message_texts() -> list[str]:
    """Return every string of the package; values in f-strings are replaced by a gap."""
    texts = []
    for path in (ROOT / "keel").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                texts.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


TEXTS = message_texts()


def test_the_page_lists_messages() -> None:
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_listed_message_is_in_the_package(message: str) -> None:
    fragments = [fragment.strip() for fragment in message.split("...") if fragment.strip()]
    assert any(all(fragment in text for fragment in fragments) for text in TEXTS), message
