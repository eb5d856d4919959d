"""Compares documents with our JSON Schemas: fast, because every document that a test prints is compared.

A compiled schema is a function of (value, place) that raises MismatchError. It knows the words of draft
2020-12 that our schemas use (test_schemas.py compares it with the jsonschema library) and is stricter in one
thing: an object that lists its properties may have no others, so that no key is printed that nobody has
described.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpttool.commands.schemas import schema_names

FOLDER = Path(__file__).resolve().parent.parent / "ckpttool" / "schemas"
# A word that says nothing of a value.
SILENT = {"$schema", "$id", "$defs", "title", "description"}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "number": (int, float), "integer": int, "boolean": bool,
    "null": type(None),
}  # fmt: skip

Check = Callable[[Any, str], None]


class MismatchError(AssertionError):
    """A document is not what its schema says."""


@functools.cache
def stored(name: str) -> dict[str, Any]:
    """Return the schema as it lies in the package."""
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return record


@functools.cache
def compiled(name: str, *, strict: bool = True) -> Check:
    """Return the check of a whole document."""
    return _Compiler(strict=strict).reference(f"{stored(name)['$id']}#")


def require(name: str, document: Any) -> None:
    """Raise MismatchError unless the document is what the schema says, with no key besides."""
    compiled(name)(document, "")


def require_printed(arguments: Sequence[object], printed: str) -> None:
    """Compare what a command printed with its schema, if the arguments ask for a document."""
    words = [str(argument) for argument in arguments]
    if "--json" not in words or not printed.startswith("{"):
        return
    document = json.loads(printed)
    command = next((word for word in words if word in schema_names()), "error")
    require("error" if "error" in document and command != "error" else command, document)


class _Compiler:
    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.known: dict[str, Check] = {}

    def reference(self, target: str) -> Check:
        """Return the check of what a `$ref` leads to; schemas may refer to each other in circles."""
        if target not in self.known:
            self.known[target] = lambda value, location: self.known[target](value, location)
            document, _, pointer = target.partition("#")
            name = document.rpartition(":")[2]
            target_schema: Any = stored(name)
            for step in filter(None, pointer.split("/")):
                target_schema = target_schema[step]
            self.known[target] = self.schema(target_schema, document)
        return self.known[target]

    def schema(self, schema: dict[str, Any], base: str) -> Check:
        """Return the check of one schema; raise KeyError for a word that it does not know."""
        words = {word: value for word, value in schema.items() if word not in SILENT}
        beside = {"required", "properties", "additionalProperties", "minProperties", "maxProperties"}
        checks: list[Check] = []
        if words.keys() & (beside | {"additionalProperties"}):
            checks.append(self.object({word: words.pop(word) for word in beside & words.keys()}, base))
        checks += [getattr(self, word.strip("$"))(value, base) for word, value in words.items()]
        # What is compared first is the type, which all others take for granted.
        checks = sorted(checks, key=lambda check: check.__name__ != "typed")
        if len(checks) == 1:
            return checks[0]

        def all_of(value: Any, location: str) -> None:
            for check in checks:
                check(value, location)

        return all_of

    def object(self, words: dict[str, Any], base: str) -> Check:
        required = frozenset(words.get("required", ()))
        properties = {key: self.schema(part, base) for key, part in words.get("properties", {}).items()}
        rest = words.get("additionalProperties", not (self.strict and properties))
        others = self.schema(rest, base) if isinstance(rest, dict) else None
        least, most = words.get("minProperties", 0), words.get("maxProperties", float("inf"))

        def members(value: Any, location: str) -> None:
            if not isinstance(value, dict):
                return
            if not required <= value.keys():
                raise MismatchError(f"{location or 'the document'} lacks {sorted(required - value.keys())}")
            if not least <= len(value) <= most:
                raise MismatchError(f"{location} has {len(value)} keys")
            for key, item in value.items():
                check = properties.get(key, others)
                if check is not None:
                    check(item, f"{location}/{key}")
                elif key not in properties and rest is False:
                    raise MismatchError(f"{location}/{key} is in no schema")

        return members

    def ref(self, target: str, base: str) -> Check:
        return self.reference(base + target if target.startswith("#") else target)

    def type(self, text: str | list[str], base: str) -> Check:
        types = [text] if isinstance(text, str) else text
        kinds = tuple(kind for name in types for kind in _kinds(name))
        numbers = "number" in types or "integer" in types

        def typed(value: Any, location: str) -> None:
            known = bool in kinds if isinstance(value, bool) else isinstance(value, kinds)
            # JSON Schema takes 1.0 for an integer.
            if not known and not (numbers and isinstance(value, float) and value.is_integer()):
                raise MismatchError(f"{location or 'the document'} is {value!r:.80}, not {text}")

        return typed

    def const(self, text: Any, base: str) -> Check:
        return self.enum([text], base)

    def enum(self, text: list[Any], base: str) -> Check:
        def among(value: Any, location: str) -> None:
            if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in text):
                raise MismatchError(f"{location} is {value!r:.80}, none of {text}")

        return among

    def pattern(self, message: str, base: str) -> Check:
        matches = re.compile(message).search

        def matching(value: Any, location: str) -> None:
            if isinstance(value, str) and not matches(value):
                raise MismatchError(f"{location} is {value!r:.80}, not {message}")

        return matching

    def items(self, settings: dict[str, Any], base: str) -> Check:
        check = self.schema(settings, base)

        def item(value: Any, location: str) -> None:
            if isinstance(value, list):
                location = f"{location}/[]"
                for item in value:
                    check(item, location)

        return item

    def anyOf(self, settings: list[dict[str, Any]], base: str) -> Check:  # noqa: N802  # JSON Schema's word
        checks = [self.schema(part, base) for part in settings]

        def one_of(value: Any, location: str) -> None:
            wrong = []
            for check in checks:
                try:
                    return check(value, location)
                except MismatchError as error:
                    wrong.append(str(error))
            raise MismatchError(" and ".join(wrong))

        return one_of

    def minimum(self, text: float, base: str) -> Check:
        return self.bound(lambda value: value >= text, f"at least {text}")

    def exclusiveMinimum(self, text: float, base: str) -> Check:  # noqa: N802  # JSON Schema's word
        return self.bound(lambda value: value > text, f"more than {text}")

    def minItems(self, text: int, base: str) -> Check:  # noqa: N802  # JSON Schema's word
        return self.count(lambda count: count >= text)

    def maxItems(self, text: int, base: str) -> Check:  # noqa: N802  # JSON Schema's word
        return self.count(lambda count: count <= text)

    @staticmethod
    def count(fits: Callable[[int], bool]) -> Check:
        def counted(value: Any, location: str) -> None:
            if isinstance(value, list) and not fits(len(value)):
                raise MismatchError(f"{location} has {len(value)} items")

        return counted

    @staticmethod
    def bound(fits: Callable[[float], bool], message: str) -> Check:
        def bounded(value: Any, location: str) -> None:
            if isinstance(value, int | float) and not isinstance(value, bool) and not fits(value):
                raise MismatchError(f"{location} is {value}, not {message}")

        return bounded


def _kinds(name: str) -> tuple[type, ...]:
    kinds = TYPES[name]
    return kinds if isinstance(kinds, tuple) else (kinds,)
