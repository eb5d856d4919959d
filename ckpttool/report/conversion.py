"""What the page says of how a checkpoint came about, and of the facts that its sidecar adds to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool import documents, sidecar
from ckpttool.errors import FormatError
from ckpttool.report import rows
from ckpttool.shown import clean, shortened

_FACTS = (
    "env",
    "obs_dim",
    "action_low",
    "action_high",
    "head",
    "activations",
    "obs_norm",
    "epsilon",
    "optimizers",
)
_TEXT, _RULES, _SENTENCES = 160, 2000, 50


@dataclass(frozen=True, slots=True)
class Conversion:
    """The receipt of a conversion, or a sidecar with facts alone: then `source` is empty.

    `facts` are name, value and provenance; `rules` source, rule and target; `belongs` says whether it was
    written for these very weights, None where it does not say for which.
    """

    source: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str, str], ...]
    rules: tuple[tuple[str, str, str], ...]
    more: int
    kinds: tuple[tuple[str, int], ...]
    parity: tuple[tuple[str, str, str, bool], ...]
    assumed: tuple[str, ...]
    residue: tuple[str, ...]
    unmapped: tuple[tuple[str, str], ...]
    belongs: bool | None


def given(file: str, sha256: str) -> Conversion:
    """Return what a sidecar or a document of `convert --json` says; raise FormatError for other files."""
    found = documents.load(file, "the conversion's report", "sidecar_bytes")
    if "target_sha256" in found:
        return of_sidecar(sidecar.read(file), sha256)
    if not isinstance(found.get("mapped"), list):
        raise FormatError(
            "this is no report of a conversion",
            file=file,
            expected="a sidecar, or what convert --json prints",
        )
    unmapped = tuple((word, each) for word in ("unused", "missing") for each in _words(found.get(word)))
    source = tuple((word, _text(found[word])) for word in ("source", "target") if word in found)
    digest = found.get("digest")
    belongs = digest == sha256 if isinstance(digest, str) else None
    return _made(found["mapped"], found, source=source, unmapped=unmapped, belongs=belongs)


def of_sidecar(found: sidecar.Sidecar, sha256: str) -> Conversion:
    """Return what a sidecar says."""
    values = found.document()
    facts = tuple(
        (name, _text(values[name]), _text(found.provenance.get(name, "")))
        for name in _FACTS
        if values[name] is not None
    )
    source = tuple((name, _text(value)) for name, value in (found.source or {}).items() if value is not None)
    return _made(found.rules, values, source=source, facts=facts, belongs=found.target_sha256 == sha256)


def _made(
    rules: Any,
    found: Mapping[str, Any],
    *,
    source: tuple[tuple[str, str], ...],
    facts: tuple[tuple[str, str, str], ...] = (),
    unmapped: tuple[tuple[str, str], ...] = (),
    belongs: bool | None,
) -> Conversion:
    moves = [each for each in rules if isinstance(each, dict)]
    told = [tuple(str(each.get(name, "")) for name in ("source", "rule", "target")) for each in moves]
    table = tuple((rows.path(one), _text(rule), rows.path(other)) for one, rule, other in told[:_RULES])
    kinds = Counter(_text(rule) for _, rule, _ in told).most_common()
    return Conversion(
        source,
        facts,
        table,
        max(0, len(moves) - _RULES),
        tuple(kinds),
        tuple(_network(each) for each in _list(found.get("parity")) if isinstance(each, dict)),
        _words(found.get("assumed")),
        tuple(_text(each) for each in _list(found.get("residue"))[:_SENTENCES]),
        unmapped[:_RULES],
        belongs,
    )


def _network(found: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    return (
        _text(found.get("name")),
        _text(found.get("max_abs")),
        _text(found.get("max_rel")),
        found.get("within") is True,
    )


def _words(found: object) -> tuple[str, ...]:
    return tuple(_text(each) for each in _list(found)[:_RULES])


def _list(found: object) -> Sequence[Any]:
    return found if isinstance(found, list | tuple) else ()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(clean(text), _TEXT)
