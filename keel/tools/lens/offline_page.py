"""Build HTML files that work offline from the lens's assets: one inlined style sheet, one inlined script, and data.

Guarantees that a file needs no network and can reach none: its Content-Security-Policy contains the hashes of its one
script and its one style sheet and no source. Data is embedded as JSON in which no text can end the script element.
`keel report`, `keel compare --html` and `keel sweep --html` are built here. Imports neither torch nor duckdb.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.errors import KeelError

ASSETS = Path(__file__).parent / "assets"


def inline_assets(shell: str, modules: Sequence[str], styles: Sequence[str], data_id: str, data: Any) -> str:
    """Return `shell`, an HTML page with <title> and </body>, with the named assets and the data written into it."""
    script = (ASSETS / "vendor/uPlot.iife.min.js").read_text().strip() + "\n" + bundle_modules(modules)
    style = "\n".join((ASSETS / name).read_text() for name in ("vendor/uPlot.min.css", "style.css", *styles))
    if re.search(r"</(script|style)|<!--", script + style, re.IGNORECASE):
        raise KeelError("a file in keel/tools/lens/assets contains a closing tag of its element; reinstall keel")
    policy = (
        f"default-src 'none'; script-src '{_csp_hash(script)}'; style-src '{_csp_hash(style)}'; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n<style>{style}</style>\n'
    embedded = f'<script type="application/json" id="{data_id}">{script_json(data)}</script>\n'
    page = shell.replace("<title>", head + "<title>", 1)
    before, _, after = page.rpartition("</body>")
    return f"{before}{embedded}<script>{script}</script>\n</body>{after}"


def bundle_modules(modules: Sequence[str]) -> str:
    """Join JavaScript modules into one script, each after the modules it imports.

    Their top-level names must be distinct, because import and export statements are removed.
    """
    parts = []
    for name in modules:
        source = (ASSETS / f"{name}.js").read_text()
        source = re.sub(r"^import .*;\n", "", source, flags=re.MULTILINE)
        parts.append(re.sub(r"^export (?=async|function|const)", "", source, flags=re.MULTILINE))
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element: "<" in a string is written as an escape."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # lone surrogates cannot be encoded as UTF-8
    text = text.encode("utf-8", "replace").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _csp_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
