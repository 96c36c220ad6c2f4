"""The text and the bytes of single tokens, for responses with log-probs.

A token of a byte-level tokenizer may hold a part of a character. Its bytes are exact, so that the bytes of all tokens
of a completion are those of its text; its text has the replacement character in place of an incomplete character.
"""

import json
import re
from functools import cache
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A single byte in the vocabulary of a SentencePiece tokenizer."""
_SPACE_PIECE = "\u2581"
"""A space in the vocabulary of a SentencePiece tokenizer."""


class TokenTexts:
    """Texts and bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {int(token): str(text) for text, token in _added_tokens(tokenizer).items()}
        self._decoders = _decoder_kinds(tokenizer)
        self._cached: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Return the text of a token."""
        return self._lookup(token)[0]

    def raw_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return self._lookup(token)[1]

    def _lookup(self, token: int) -> tuple[str, bytes]:
        if token not in self._cached:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            raw = self._raw_bytes(token)
            self._cached[token] = str(text), str(text).encode() if raw is None else raw
        return self._cached[token]

    def _raw_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token from the vocabulary, or None if the kind of the tokenizer is not known."""
        if token in self._added:
            return self._added[token].encode()
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        piece = None if convert is None else convert(token)
        if not isinstance(piece, str):
            return None
        if "ByteLevel" in self._decoders:
            alphabet = byte_alphabet()
            return bytes(alphabet[character] for character in piece) if all(c in alphabet for c in piece) else None
        if "ByteFallback" in self._decoders or "Metaspace" in self._decoders:
            match = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE_PIECE, " ").encode()
        return None


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "get_added_vocab", None)
    return dict(added()) if added is not None else {}


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Return the types of the decoders of a fast tokenizer, including those of a sequence."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return {str(part.get("type")) for part in (decoder, *decoder.get("decoders", ()))}


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in the vocabulary of a byte-level tokenizer.

    Printable bytes stand for themselves; the other bytes are, in order, the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
