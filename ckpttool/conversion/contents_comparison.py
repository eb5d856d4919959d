"""Compare two checkpoints' contents exactly, for `verify --all`: every entry, fact, setting and receipt.

Entries are paired as in `diff`. Each discrepancy names its part, so that a caller can distinguish a wrong
optimizer from a wrong network, and what the tensor of B resembles: a transposed one, another one of A, a
rounded one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from ckpttool.conversion.alignment import By, ChangedEntry, CheckpointAlignment, Entry, align_checkpoints
from ckpttool.conversion.reconversion import ComparisonSide, Reconversion
from ckpttool.conversion.restoration import reverse_conversion
from ckpttool.core import text
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, abbreviate_list
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.source import keep_open
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, ValueLeaf, json_value
from ckpttool.evaluation.restore import FACTS, Agent, list_not_understood
from ckpttool.libraries.schema import NETWORKS, NORMALIZER, OPTIMIZERS, TEMPERATURE, VALUES, AgentNetwork
from ckpttool.verification.array_differences import round_to_float32

What = Literal["values", "shape", "dtype", "kind", "missing", "added", "fact", "setting", "receipt"]
COUNTERS, FACT, RECEIPT = "counters", "facts", "receipt"
# Larger tensors are not searched for a resemblance; their difference is reported anyway.
_MOST_BYTES = 64 << 20
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One difference between B and A.

    `part` is a network's title (`critic/q1`), an optimizer, `normalizer`, `temperature`, `counters`,
    `facts`, `receipt`, or the module of a model. `path` is the entry, fact or setting, `a` and `b`
    the values of each side, None if absent. `resembles` describes B's tensor.
    """

    part: str
    path: str
    what: What
    a: str | None = None
    b: str | None = None
    resembles: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ContentComparison:
    """Comparison of the complete contents of two checkpoints.

    `by` is how entries were paired, `equal` counts the equal ones, `facts` names the facts that
    agree. `not_compared` lists entries that the conversion declares as one-sided, and facts recorded
    on only one side.
    """

    by: By
    equal: int
    facts: tuple[str, ...]
    discrepancies: tuple[Discrepancy, ...]
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "by": self.by,
            "equal": self.equal,
            "facts": list(self.facts),
            "discrepancies": [discrepancy.document() for discrepancy in self.discrepancies],
        }


@keep_open()
def compare_contents(
    a: ComparisonSide, b: ComparisonSide, progress: Progress = ignore_progress
) -> ContentComparison:
    """Compare the complete contents; raise errors of reading, with the entry's path."""
    alignment = align_checkpoints(a, b)
    entries = list(_entry_discrepancies(a, b, alignment, progress))
    plan = alignment.conversion
    facts, unknown, agreed = _compare_facts(a.agent, b.agent, folded=plan is not None and plan.folded)
    linked = b.is_converted_from(a)
    plan = plan if not alignment.turned else None
    receipt = list(_receipt_discrepancies(a, b, plan, linked=linked))
    if plan is not None and plan.settings and (b.receipt.sidecar is None or not b.receipt.sidecar.optimizers):
        unknown.append(
            f"settings of {abbreviate_list(sorted(plan.settings), 3)} belong in B's sidecar, which "
            "contains none"
        )
    both = len(alignment.both)
    if b.receipt.origin is not None and not linked and not b.receipt.stale:
        unknown.append("B's receipt: its source is not A")
    return ContentComparison(
        alignment.by,
        both - sum(entry.what not in ("missing", "added") for entry in entries),
        tuple(agreed),
        (*entries, *facts, *receipt),
        (*_declared_notes(alignment), *unknown),
        alignment.notes,
    )


def _declared_notes(pairs: CheckpointAlignment) -> Iterator[str]:
    for side, word in (("left", "A"), ("right", "B")):
        for added, how in ((False, "recorded in the sidecar"), (True, "added by the format's writer")):
            names = [
                row.path for row in pairs.declared if row.side == side and (row.what == "added") is added
            ]
            if names:
                entries = format_count(len(names), "entry", "entries")
                yield f"{entries} only in {word}, {how}: {abbreviate_list(names, 3)}"


def _entry_discrepancies(
    a: ComparisonSide, b: ComparisonSide, alignment: CheckpointAlignment, progress: Progress
) -> Iterator[Discrepancy]:
    bindings = [side.binding for side in (a, b)]
    targets = [
        {} if binding is None else {move.source: move.target for move in reversed(binding.moves.moves)}
        for binding in bindings
    ]
    parts = [part for binding in bindings if binding is not None for part in binding.parts]

    def part_of(name: str) -> str:
        for places, there in zip(alignment.places, targets, strict=True):
            if (target := there.get(places.get(name, ()))) is not None:
                return _part_title(target, parts)
        steps = name.split("/")
        optimizer = next((at for at, step in enumerate(steps) if "optim" in step.lower()), None)
        return "/".join(steps[:-1] if optimizer is None else steps[: optimizer + 1]) or name

    others = _MistakeClassifier(alignment)
    for change in alignment.changes(progress):
        values = _sides(change)
        yield Discrepancy(part_of(change.path), change.path, change.what, *values, others.of(change))
    for name in alignment.only_left:
        yield Discrepancy(part_of(name), name, "missing", _format_entry(alignment.left[name]), None)
    for name in alignment.only_right:
        yield Discrepancy(part_of(name), name, "added", None, _format_entry(alignment.right[name]))


def _part_title(target: Path, parts: Sequence[AgentNetwork]) -> str:
    """Return the part of an agent that contains a canonical path."""
    top = str(target[0].value)
    if top in (*NETWORKS, *VALUES):
        return next((part.title for part in parts if target[: len(part.prefix)] == part.prefix), top)
    return top if top in (*OPTIMIZERS, NORMALIZER, TEMPERATURE) else COUNTERS


def _sides(change: ChangedEntry) -> tuple[str, str]:
    values = change.values
    if values is None:
        return _format_entry(change.left), _format_entry(change.right)
    at = f" at {list(values.at)}" if values.at else ""
    first, second = (
        f"{value:.9g}" if isinstance(value, float) else str(value) for value in (values.left, values.right)
    )
    return f"{first}{at}", f"{second}{at}, {values.different:,} of {values.size:,} differ"


def _format_entry(entry: Entry) -> str:
    if isinstance(entry, Leaf):
        return f"{entry.dtype}{list(entry.shape)}"
    return str(json_value(entry)["value"])[:60]


class _MistakeClassifier:
    """What B's differing tensor looks like, to detect common conversion errors."""

    def __init__(self, alignment: CheckpointAlignment) -> None:
        self._alignment = alignment
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] | None = None

    def of(self, change: ChangedEntry) -> str | None:
        """Return what B's tensor resembles, None if nothing."""
        left, right = change.left, change.right
        small = all(
            isinstance(e, Leaf) and e.dtype != "string" and e.nbytes <= _MOST_BYTES for e in (left, right)
        )
        if not (small and isinstance(left, Leaf) and isinstance(right, Leaf)) or left.size < 2:
            return None
        a, b = left.array(), right.array()
        if b.ndim > 1 and b.shape == a.T.shape and np.array_equal(a.T, b):
            return "A's transposed"
        name = self._names().get(_key(right))
        if name is not None and name != change.path and b.any():
            return f"A's {name}"
        if a.shape != b.shape:
            return None
        return _detect_rounding(a, b) or _detect_reordering(a, b)

    def _names(self) -> Mapping[tuple[str, tuple[int, ...], bytes], str]:
        if self._known is None:
            tensors = [
                (name, leaf)
                for name, leaf in self._alignment.left.items()
                if isinstance(leaf, Leaf) and leaf.nbytes <= _MOST_BYTES and leaf.dtype != "string"
            ]
            self._known = {_key(leaf): name for name, leaf in reversed(tensors)}
        return self._known


def _key(leaf: Leaf) -> tuple[str, tuple[int, ...], bytes]:
    return leaf.dtype, leaf.shape, hashlib.sha256(leaf.read()).digest()


def _detect_rounding(a: np.ndarray, b: np.ndarray) -> str | None:
    import ml_dtypes

    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):
        for name, kind in zip(_HALVES, (np.float16, ml_dtypes.bfloat16), strict=True):
            if np.array_equal(a.astype(kind).astype(np.float64), b.astype(np.float64), equal_nan=True):
                return f"A rounded to {name}"
        if a.dtype == b.dtype and (np.abs(a - b) <= np.spacing(np.maximum(np.abs(a), np.abs(b)))).all():
            return "A within 1 unit in the last place"
    return None


def _detect_reordering(a: np.ndarray, b: np.ndarray) -> str | None:
    same = np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))
    return "A's values in a different order" if same else None


def _compare_facts(
    a: Agent | None, b: Agent | None, *, folded: bool
) -> tuple[list[Discrepancy], list[str], list[str]]:
    """Return differing facts, sentences on facts of only one side, and the names that agree.

    `folded` observation statistics are part of the other side's first layers.
    """
    differ: list[Discrepancy] = []
    unknown: list[str] = []
    agreed: list[str] = []
    if a is None or b is None:
        return differ, unknown, agreed
    for name in FACTS:
        first, second = (_fact_parts(name, getattr(side.known, name)) for side in (a, b))
        if stated := _compare_stated(name, a, b):
            differ += stated
            continue
        for key in dict.fromkeys((*first, *second)):
            title = f"{name}/{key}" if key else name
            if key in first and key in second:
                if _is_same(first[key], second[key]):
                    agreed.append(title)
                elif guess := next((w for w, array in (("A", a), ("B", b)) if _is_guess(array, name)), None):
                    other = "B" if guess == "A" else "A"
                    unknown.append(
                        f"{title}: only {other} records it; {guess} does not, and a different value is "
                        "assumed"
                    )
                else:
                    differ.append(Discrepancy(FACT, title, "fact", _text(first[key]), _text(second[key])))
            elif name == "obs_norm" and folded:
                agreed.append("obs_norm (folded into the first layers)")
                break
            elif name == "obs_norm" and not (first and second):
                what: What = "missing" if first else "added"
                differ.append(
                    Discrepancy(FACT, name, what, "statistics" * bool(first), "statistics" * bool(second))
                )
                break
            else:
                word, agent = ("A", a) if key in first else ("B", b)
                origin = agent.known.provenance.get(name, "origin unknown")
                unknown.append(f"{title}: only {word} records it ({origin})")
    return differ, unknown, agreed


def _compare_stated(name: str, a: Agent, b: Agent) -> list[Discrepancy]:
    """Return the difference in a fact that a side states in a form that is not understood."""
    values: list[str | None] = []
    for agent in (a, b):
        value, stated = getattr(agent.known, name), agent.binding.facts.stated.get(name)
        values.append(stated.text if value is None and stated is not None else value and _text(value))
    unclear = [name in list_not_understood(side.binding, side.known) for side in (a, b)]
    same = all(unclear) and values[0] == values[1]
    return [Discrepancy(FACT, name, "fact", *values)] if any(unclear) and not same else []


def _is_guess(agent: Agent, name: str) -> bool:
    """Return whether neither the checkpoint nor its sidecar contains a fact, so a default is used."""
    assumed = agent.known.is_assumed(name)
    return assumed and getattr(agent.sidecar, name, None) is None


def _fact_parts(name: str, value: Any) -> dict[str, Any]:
    """Return a fact's components by name, "" if it has none."""
    if value is None or (name == "obs_norm" and _is_identity(value)):
        return {}
    if name in ("env", "epsilon", "obs_norm", "network_activations"):
        return {
            key: part
            for key, part in value.items()
            if part is not None and (name, key) != ("env", "gymnasium")
        }
    if name == "activations":
        return {"": sorted(set(value)) if len(set(value)) == 1 else list(value)}
    return {"": value}


def _is_identity(norm: Mapping[str, Any]) -> bool:
    """Return whether statistics leave observations unchanged, which libraries write for no normalisation."""
    plain = not any(norm["mean"]) and all(variance == 1 for variance in norm["var"])
    return plain and not norm.get("epsilon") and norm.get("clip") is None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and not isinstance(one, str):
        return isinstance(other, Sequence) and len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        if math.isnan(one) and math.isnan(other):
            return True
        return one == other or round_to_float32(one) == round_to_float32(other)
    return bool(one == other)


def _text(value: Any) -> str:
    return str(text.replace_nonfinite({"value": value})["value"])[:80]


def _receipt_discrepancies(
    a: ComparisonSide, b: ComparisonSide, reconversion: Reconversion | None, *, linked: bool
) -> Iterator[Discrepancy]:
    for word, side in (("A", a), ("B", b)):
        if side.receipt.stale:
            yield Discrepancy(
                RECEIPT, "target_sha256", "receipt", None, f"{word}'s sidecar belongs to different weights"
            )
    recorded = b.receipt.sidecar
    if recorded is None or reconversion is None or not linked or b.receipt.stale:
        return
    known = a.receipt.sidecar
    before = (known.optimizers if known is not None else None) or {}
    if recorded.optimizers is not None:
        yield from _setting_discrepancies(
            before if reconversion.settings is None else reconversion.settings, recorded.optimizers
        )
    # A reverse conversion restores its source by the record in A's receipt, not by these rules.
    restored = known is not None and known.undo is not None and _format(known) == b.checkpoint.format
    if not (reconversion.by_receipt or restored):
        rules = {(rule.source, rule.target): rule.rule for rule in reconversion.rules}
        recorded_rules = {
            (str(rule.get("source")), str(rule.get("target"))): str(rule.get("rule"))
            for rule in recorded.rules
        }
        for key in dict.fromkeys((*rules, *recorded_rules)):
            if rules.get(key) != recorded_rules.get(key):
                path = f"rules/{key[0]} -> {key[1]}"
                yield Discrepancy(RECEIPT, path, "receipt", rules.get(key), recorded_rules.get(key))
    yield from _residue_discrepancies(a.checkpoint, b, reconversion)


def _format(receipt: Sidecar) -> str | None:
    return receipt.source.get("format") if receipt.source is not None else None


def _setting_discrepancies(
    settings_a: Mapping[str, Mapping[str, Any]], settings_b: Mapping[str, Mapping[str, Any]]
) -> Iterator[Discrepancy]:
    for name in dict.fromkeys((*settings_a, *settings_b)):
        first, second = settings_a.get(name, {}), settings_b.get(name, {})
        for key in dict.fromkeys((*first, *second)):
            one, other = (_text(settings[key]) if key in settings else None for settings in (first, second))
            if key not in first or key not in second or not _is_same(first[key], second[key]):
                yield Discrepancy(name, f"{name}/{key}", "setting", one, other)


def _residue_discrepancies(
    source: Checkpoint, b: ComparisonSide, reconversion: Reconversion
) -> Iterator[Discrepancy]:
    """Yield what only the sidecar and the file beside the target store of the source."""
    recorded = b.receipt.sidecar
    kept = {str(entry.get("path")): entry for entry in recorded.residue} if recorded is not None else {}
    for path in (*reconversion.kept, *reconversion.dropped):
        leaf, line = source.tree[path], kept.get(source.tree.names[path], {})
        if not isinstance(leaf, ValueLeaf) or "value" not in line:
            continue
        value, other = json_value(leaf)["value"], line["value"]
        value = text.json_number(value) if isinstance(value, float) else value
        if value != other and not (isinstance(value, str) and value.startswith(str(other))):
            where = f"residue/{source.tree.names[path]}"
            yield Discrepancy(RECEIPT, where, "receipt", _text(value), _text(other))
    if recorded is not None and recorded.undo is not None:
        yield from _reverse_discrepancies(source, b.checkpoint, recorded.undo, reconversion)


def _reverse_discrepancies(
    source: Checkpoint, target: Checkpoint, record: Mapping[str, Any], reconversion: Reconversion
) -> Iterator[Discrepancy]:
    """Yield what the source's record restores, among the entries that the target lacks."""
    try:
        back = reverse_conversion(target.tree, record, target.path)
    except CkpttoolError as error:
        yield Discrepancy(RECEIPT, "undo", "receipt", None, error.message)
        return
    if back.tree is None:
        yield Discrepancy(RECEIPT, "undo", "receipt", None, back.note)
        return
    there = {name: back.tree[path] for path, name in back.tree.names.items()}
    for path in reconversion.kept:
        name = source.tree.names[path]
        leaf, other = source.tree[path], there.get(name)
        if not _is_equal(leaf, other):
            shown = None if other is None else _format_entry(other)
            yield Discrepancy(RECEIPT, f"undo/{name}", "receipt", _format_entry(leaf), shown)


def _is_equal(one: Entry, other: Entry | None) -> bool:
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bytes(one.read()) == bytes(
            other.read()
        )
    if isinstance(one, ValueLeaf) and isinstance(other, ValueLeaf):
        return repr(one.value) == repr(other.value)
    return False
