"""Protocol buffers as text: what a small `.pbtxt` says, as dicts, lists, numbers and texts.

Source: protobuf.dev/reference/protobuf/textformat-spec. A field is `name: value` or `name { ... }` (a colon
before the brace is allowed), fields end at white space, a comma or a semicolon; bytes have C's escapes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from ckpttool.errors import FormatError

_BYTES = 1 << 20
_LEVELS = 60
_TOKEN = re.compile(
    r"""[ \t\r\n,;]+|\#[^\n]*"""
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[A-Za-z_0-9.+-]+)|(?P<mark>[{}<>\[\]:])"""
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9A-Fa-f]{1,2})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_OPEN, _CLOSE = "{<", "}>"

Fields = dict[str, list[Any]]


def read(file: str) -> Fields:
    """Return the message in a file: of each field all its values, in order, a text byte for byte (latin-1).

    Raise FormatError if it is larger than 1 MiB, nested more than 60 deep or no text of this kind.
    """
    if os.path.getsize(file) > _BYTES:
        raise FormatError("the file is too large for specs", file=file, expected=f"at most {_BYTES:,} bytes")
    with open(file, encoding="latin-1", newline="") as stream:
        text = stream.read()
    try:
        return _message(_tokens(text), 0, top=True)
    except ValueError as error:
        raise FormatError("the file is no protocol buffer's text", file=file, found=str(error)) from error


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at]!r} at character {at}")
        at = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match[0]


def _message(tokens: Iterator[tuple[str, str]], depth: int, *, top: bool = False) -> Fields:
    """Return the fields up to the brace that ends the message, or to the end of the text."""
    if depth > _LEVELS:
        raise ValueError(f"more than {_LEVELS} levels")
    found: Fields = {}
    for kind, name in tokens:
        if kind == "mark" and name in _CLOSE and not top:
            return found
        if kind != "word":
            raise ValueError(f"{name} where a field begins")
        found.setdefault(name, []).append(_value(tokens, depth))
    if not top:
        raise ValueError("a message without an end")
    return found


def _value(tokens: Iterator[tuple[str, str]], depth: int) -> Any:
    kind, token = next(tokens, ("", "the end"))
    if (kind, token) == ("mark", ":"):
        kind, token = next(tokens, ("", "the end"))
    if kind == "mark" and token in _OPEN:
        return _message(tokens, depth + 1)
    if kind == "text":
        return _ESCAPE.sub(_unescaped, token[1:-1])
    if kind != "word":
        raise ValueError(f"{token} where a value begins")
    try:
        return int(token) if token.lstrip("+-").isdigit() else float(token)
    except ValueError:
        return token  # an enum's name, true or false


def _unescaped(match: re.Match[str]) -> str:
    octal, hexadecimal, letter = match.groups()
    if octal:
        return chr(int(octal, 8) & 0xFF)
    return chr(int(hexadecimal, 16)) if hexadecimal else _LETTERS.get(letter, letter)
