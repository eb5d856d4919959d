"""Protocol buffers as text: what a small `.pbtxt` says, as dicts, lists, numbers and texts.

Source: protobuf.dev/reference/protobuf/textformat-spec. A field is `name: value` or `name { ... }` (a colon
before the brace is allowed), fields end at white space, a comma or a semicolon; bytes have C's escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckpttool import limits, places
from ckpttool.errors import CkpttoolError, FormatError

_TOKEN = re.compile(
    r"""[ \t\r\n,;]+|\#[^\n]*"""
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+')"""  # possessive: never a look back
    r"""|(?P<word>[A-Za-z_0-9.+-]+)|(?P<mark>[{}<>\[\]:])"""
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9A-Fa-f]{1,2})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_OPEN, _CLOSE = "{<", "}>"

Fields = dict[str, list[Any]]


def read(file: str) -> Fields:
    """Return the message in a file: of each field all its values, in order, a text byte for byte (latin-1).

    Raise FormatError if it is larger or nested deeper than the limits allow, or no text of this kind.
    """
    size = places.getsize(file)
    if size > limits.current().state_bytes:
        raise limits.exceeded("state_bytes", "the file is too large for specs", size, file=file)
    text = places.content(file).decode("latin-1")
    try:
        return _message(_tokens(text))
    except CkpttoolError as error:
        raise error.located(file=file) from error.__cause__
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


def _message(tokens: Iterator[tuple[str, str]]) -> Fields:
    """Return the fields of the whole text."""
    open_ones: list[Fields] = [{}]  # the message that is read now is the last
    most = limits.current().message_depth
    for kind, name in tokens:
        if kind == "mark" and name in _CLOSE and len(open_ones) > 1:
            open_ones.pop()
            continue
        if kind != "word":
            raise ValueError(f"{name} where a field begins")
        kind, token = next(tokens, ("", "the end"))
        if (kind, token) == ("mark", ":"):
            kind, token = next(tokens, ("", "the end"))
        values = open_ones[-1].setdefault(name, [])
        if kind == "mark" and token in _OPEN:
            if len(open_ones) > most:
                raise limits.exceeded("message_depth", "the text is nested too deeply", len(open_ones))
            inner: Fields = {}
            values.append(inner)
            open_ones.append(inner)
        else:
            values.append(_value(kind, token))
    if len(open_ones) > 1:
        raise ValueError("a message without an end")
    return open_ones[0]


def _value(kind: str, token: str) -> Any:
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
