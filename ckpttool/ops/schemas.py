"""`schema`: the JSON Schemas (draft 2020-12) of what `--json` prints and of what lies beside files.

Each is a file of `ckpttool/schemas/`; what several share stands in `common.json` there.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import UsageError, choice

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "schemas")
_SHARED, _SUFFIX = "common", ".json"


@dataclass(frozen=True, slots=True)
class Listed:
    """One schema: its name, which is the command's; `id` carries the version of the document."""

    name: str
    id: str
    title: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"name": self.name, "id": self.id, "title": self.title}


def names() -> tuple[str, ...]:
    """Return the names of all schemas."""
    found = (name.removesuffix(_SUFFIX) for name in os.listdir(_FOLDER) if name.endswith(_SUFFIX))
    return tuple(sorted(name for name in found if name != _SHARED))


def listing() -> tuple[Listed, ...]:
    """Return what there is to print, in the order of the names."""
    return tuple(Listed(name, (found := _stored(name))["$id"], found["title"]) for name in names())


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of that name as it can be used alone; raise UsageError for an unknown one.

    The schemas that it refers to stand among its `$defs` with their own `$id`, as draft 2020-12 bundles them
    (JSON Schema Core, section 9.3.1).
    """
    known = names()
    if name not in known:
        raise UsageError(f"there is no schema {name!r}", hint=choice(name, known))
    whole = _stored(name)
    beside = {other: _stored(other) for other in _needed(name) if other != name}
    return {**whole, "$defs": {**whole.get("$defs", {}), **beside}} if beside else whole


def _needed(name: str) -> list[str]:
    """Return the schema and all that it refers to, directly or not."""
    found = [name]
    for each in found:
        text = _text(each)
        found += [
            other
            for other in (_SHARED, *names())
            if other not in found and f'"{_stored(other)["$id"]}#' in text
        ]
    return found


def _stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_text(name))
    return found


@functools.cache
def _text(name: str) -> str:
    with open(os.path.join(_FOLDER, name + _SUFFIX), encoding="utf-8") as file:
        return file.read()
