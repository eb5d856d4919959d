"""What the suite's refusals suggest: each hint states facts only if something else states them as well.

`in_process` passes every refused command here, test_hints.py every hint of the golden texts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator

# Options of facts that a training program, not the user, decides.
FACTS = (
    *("--activation", "--head", "--bounds", "--env"),
    *("--input-shape", "--flatten", "--wrapper", "--adapter"),
)
_OPTION = re.compile(rf"({'|'.join(FACTS)})[ =]('[^']*'|[^\s',;:)]+)")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*([,:][A-Z][A-Z_]*|,?\.\.\.)*")
# Answers that state no value: to play without wrappers, a layer that receives no flattened image.
_NONE = ("none", "no")


def hints_of(text: str) -> Iterator[str]:
    """Yield the hints in what a command printed: lines of text, or entries of JSON."""
    yield from re.findall(r"^ *hint: (.+)$", text, re.MULTILINE)
    for quoted in re.findall(r'"hint": ("(?:[^"\\]|\\.)*")', text):
        yield json.loads(quoted)


def invented_values(hint: str, stated: str) -> list[str]:
    """Return the options whose value is a guess.

    A value is none if `stated` contains it (the command and its message), if the hint lists several values
    of the option, or if a registry of environments lists it.
    """
    found = [(option, value.strip("'")) for option, value in _OPTION.findall(hint)]
    choices = Counter(option for option, _ in dict.fromkeys(found))
    return [
        f"{option} {value}"
        for option, value in found
        if not (
            _PLACEHOLDER.fullmatch(value.rpartition("=")[2])
            or value.rpartition("=")[2] in _NONE
            or choices[option] > 1
            or re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w-])", stated)
            or (option == "--env" and _is_registered(value))
        )
    ]


def _is_registered(env: str) -> bool:
    from ckpttool.evaluation import environments

    return env in environments.SIZES or env in environments.import_gymnasium().registry


def require_stated(words: tuple[object, ...], printed: str) -> None:
    """Assert that no hint of a refused command contains a value that nothing states."""
    for hint in hints_of(printed):
        rest = printed.replace(hint, "").replace(json.dumps(hint), "")
        stated = " ".join((*map(str, words), rest))
        assert not invented_values(hint, stated), f"{shlex.join(map(str, words))}\n{printed}"
