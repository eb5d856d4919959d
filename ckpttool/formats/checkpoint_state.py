"""TensorFlow's state file `checkpoint`: which checkpoints a folder has, and which one is the latest.

It is a CheckpointState message (tensorflow/python/training/checkpoint_state.proto) in protobuf's text form
(https://protobuf.dev/reference/protobuf/textformat-spec/); TensorFlow writes and reads it in
tensorflow/python/checkpoint/checkpoint_management.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from ckpttool import limits, places
from ckpttool.errors import FormatError

NAME = "checkpoint"

# Possessive repeats (*+, ++) never look back, so that no text takes more than linear time.
_SPACE = rb"(?:[ \t\r\n\f\v]|#[^\n]*+)*+"
_STRING = rb"""(?:"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+')"""
_FIELD = re.compile(
    rb"(?P<name>\w++)%b:%b(?:(?P<text>%b(?:%b%b)*+)|(?P<word>[-+.\w]++))%b[,;]?%b"
    % (_SPACE, _SPACE, _STRING, _SPACE, _STRING, _SPACE, _SPACE),
    re.DOTALL,
)
_PART = re.compile(_SPACE + rb"""(["'])(?P<inner>(?:(?!\1)[^\\\n]|\\.)*+)\1""", re.DOTALL)
_BLANK = re.compile(_SPACE)
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_STARTS = re.compile(_SPACE + rb"(?:all_)?model_checkpoint_paths?%b:" % _SPACE)


class State(NamedTuple):
    """What a state file says.

    `latest` and `every` are names as the file spells them, relative to its folder or absolute on the machine
    that wrote it; `every` goes from the oldest to the newest. `times` are seconds since 1970, one for each of
    `every`, or empty. `preserved` is the time of the last checkpoint that is kept for good
    (keep_checkpoint_every_n_hours).
    """

    latest: str
    every: tuple[str, ...]
    times: tuple[float, ...] = ()
    preserved: float | None = None


def begins(head: bytes) -> bool:
    """Return whether a file that begins so is a state file."""
    return _STARTS.match(head) is not None


def read(path: str) -> State:
    """Read the state file; raise FormatError when it is damaged, too large, or names no latest checkpoint."""
    most = limits.current().state_bytes
    data = places.content(path, 0, most + 1)
    if len(data) > most:
        found = places.getsize(path)
        raise limits.exceeded("state_bytes", "the state file is too large", found, file=path)
    try:
        return _state(data)
    except FormatError as error:
        raise error.located(file=path) from error.__cause__


def encode(state: State) -> bytes:
    """Return the state file's bytes, as TensorFlow writes them; names that are not ASCII are escaped."""
    lines = [f'model_checkpoint_path: "{_escaped(state.latest)}"']
    lines += [f'all_model_checkpoint_paths: "{_escaped(name)}"' for name in state.every]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in state.times]
    if state.preserved is not None:
        lines.append(f"last_preserved_timestamp: {state.preserved!r}")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _state(data: bytes) -> State:
    latest, preserved = "", None
    every: list[str] = []
    times: list[float] = []
    for field in _fields(data):
        # The last of several values counts where the message has room for one.
        match field["name"].decode("ascii", "replace"):
            case "model_checkpoint_path":
                latest = _text(field)
            case "all_model_checkpoint_paths":
                every.append(_text(field))
            case "all_model_checkpoint_timestamps":
                times.append(_number(field))
            case "last_preserved_timestamp":
                preserved = _number(field)
    if not latest:
        raise FormatError("the state file names no latest checkpoint")
    return State(latest, tuple(every), tuple(times) if len(times) == len(every) else (), preserved)


def _fields(data: bytes) -> Iterator[re.Match[bytes]]:
    """Go through the message's fields."""
    blank = _BLANK.match(data)
    at = blank.end() if blank is not None else 0
    while at < len(data):
        found = _FIELD.match(data, at)
        if found is None:
            raise FormatError("the state file is damaged: no field with a value is here", offset=at)
        at = found.end()
        yield found


def _text(field: re.Match[bytes]) -> str:
    if field["text"] is None:
        raise FormatError("the state file is damaged: a name in quotes is missing", offset=field.start())
    try:
        # Strings side by side are one string.
        parts = [_ESCAPE.sub(_character, part["inner"]) for part in _PART.finditer(field["text"])]
    except (ValueError, OverflowError) as error:
        raise FormatError(
            "the state file is damaged: an escape means no character", offset=field.start()
        ) from error
    return os.fsdecode(b"".join(parts))


def _character(match: re.Match[bytes]) -> bytes:
    octal, digits, short, long, letter = match.groups()
    if octal or digits:
        return bytes([int(octal or digits, 8 if octal else 16) & 255])
    if short or long:
        return chr(int(short or long, 16)).encode()
    return _LETTERS.get(letter, letter)


def _number(field: re.Match[bytes]) -> float:
    try:
        found = float(field["word"] or b"nan")
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise FormatError("the state file is damaged: a time is not a number", offset=field.start())
    return found


def _escaped(name: str) -> str:
    return "".join(
        f"\\{character}"
        if character in '"\\'
        else character
        if character.isascii() and character.isprintable()
        else "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
        for character in name
    )
