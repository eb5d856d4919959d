"""`schema`: the JSON Schemas (draft 2020-12) of `--json` output and of files beside checkpoints.

Each is a file of `ckpttool/schemas/`; shared definitions are in `common.json` there.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError, suggest_choice

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "schemas")
_SHARED, _SUFFIX = "common", ".json"


@dataclass(frozen=True, slots=True)
class SchemaRow:
    """One schema: its name in the command; `id` contains the version of the document."""

    name: str
    id: str
    title: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"name": self.name, "id": self.id, "title": self.title}


def schema_names() -> tuple[str, ...]:
    """Return the names of all schemas."""
    names = (name.removesuffix(_SUFFIX) for name in os.listdir(_FOLDER) if name.endswith(_SUFFIX))
    return tuple(sorted(name for name in names if name != _SHARED))


def list_schemas() -> tuple[SchemaRow, ...]:
    """Return what can be printed, in the order of names."""
    return tuple(
        SchemaRow(name, (schema := _load_schema(name))["$id"], schema["title"]) for name in schema_names()
    )


def schema(name: str) -> dict[str, Any]:
    """Return the self-contained JSON Schema of that name; raise UsageError for an unknown one.

    Referenced schemas are in its `$defs` with their own `$id`, as draft 2020-12 bundles them
    (JSON Schema Core, section 9.3.1).

    >>> import ckpttool
    >>> ckpttool.schema("digest")["title"]
    'What `ckpttool digest --json` prints'
    """
    known = schema_names()
    if name not in known:
        raise UsageError(f"unknown schema {name!r}", hint=suggest_choice(name, known))
    whole = _load_schema(name)
    beside = {other: _load_schema(other) for other in _collect_references(name) if other != name}
    return {**whole, "$defs": {**whole.get("$defs", {}), **beside}} if beside else whole


def _collect_references(name: str) -> list[str]:
    """Return the schema and all schemas that it references, directly or indirectly."""
    names = [name]
    for schema_name in names:
        text = _read_schema(schema_name)
        names += [
            other
            for other in (_SHARED, *schema_names())
            if other not in names and f'"{_load_schema(other)["$id"]}#' in text
        ]
    return names


def _load_schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(_read_schema(name))
    return schema


@functools.cache
def _read_schema(name: str) -> str:
    with open(os.path.join(_FOLDER, name + _SUFFIX), encoding="utf-8") as file:
        return file.read()
