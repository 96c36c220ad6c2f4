"""Escape token texts for display: one line, in quotes, without characters that a terminal or a page would interpret.

Model text is untrusted. Control characters, escape sequences, direction marks, invisible characters and invalid UTF-8
become visible escapes when the text is read, before it is counted or stored, so that no renderer can forget it. HTML
markup is not escaped here; code that writes HTML must do that.
"""

import unicodedata

MAX_CHARACTERS = 40
"""Characters of a token that are shown; a longer one is truncated and its length appended."""

_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}


def escape_token(raw: bytes) -> str:
    """Return a token's bytes as quoted text. Distinct tokens up to MAX_CHARACTERS have distinct texts."""
    text = raw.decode("utf-8", "surrogateescape")
    shown = "".join(
        _escape_character(character, first=index == 0) for index, character in enumerate(text[:MAX_CHARACTERS])
    )
    rest = f" ({len(text):,} characters)" if len(text) > MAX_CHARACTERS else ""
    return f'"{shown}{"..." if rest else ""}"{rest}'


def _escape_character(character: str, *, first: bool) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not valid UTF-8
        return f"\\x{code - 0xDC00:02x}"
    category = unicodedata.category(character)
    # control, format (direction marks), private, unassigned; separators except the plain space
    hidden = category[0] == "C" or (category[0] == "Z" and character != " ")
    # at the start a combining mark would combine with the quotation mark
    if not hidden and not (first and category[0] == "M"):
        return character
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
