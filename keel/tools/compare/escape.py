"""Token texts as they may be shown: on one line, in quotes, with nothing left that a terminal or a page would obey.

Model text is untrusted. Control characters, escape sequences, marks that turn the writing direction, invisible signs
and broken UTF-8 become visible escapes, where the text is read and before it is counted or stored, so that no renderer
can forget it. Marks of HTML are ordinary characters here; whoever writes HTML escapes those.
"""

import unicodedata

MAX_CHARACTERS = 40
"""Characters of a token that are shown; the length of a longer one is said."""

_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}


def escape_token(raw: bytes) -> str:
    """A token's bytes for people. Different short tokens have different texts."""
    text = raw.decode("utf-8", "surrogateescape")
    shown = "".join(
        _escape_character(character, first=place == 0) for place, character in enumerate(text[:MAX_CHARACTERS])
    )
    rest = f" ({len(text):,} characters)" if len(text) > MAX_CHARACTERS else ""
    return f'"{shown}{"..." if rest else ""}"{rest}'


def _escape_character(character: str, *, first: bool) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    category = unicodedata.category(character)
    # control, format (direction marks), private, unassigned; separators but the plain space
    hidden = category[0] == "C" or (category[0] == "Z" and character != " ")
    # at the start a combining mark would sit on the quotation mark
    if not hidden and not (first and category[0] == "M"):
        return character
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
