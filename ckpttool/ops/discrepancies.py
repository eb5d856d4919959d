"""`verify --all`: every entry, fact, setting and receipt of two checkpoints, compared exactly.

Entries are paired as `diff` pairs them. Each discrepancy names the part that it is in, so that a caller can
tell a wrong optimizer from a wrong network, and what the tensor of B resembles: a transposed one, another
one of A, a rounded one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckpttool import documents
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, some
from ckpttool.layouts.canonical import (
    NETWORKS,
    NO_LAYOUT,
    NORMALIZER,
    OPTIMIZERS,
    TEMPERATURE,
    VALUES,
    Binding,
)
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.ops.difference import By, Changed, Entry
from ckpttool.ops.knowledge import FACTS
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.reconversion import Conversion, Pair, Receipt
from ckpttool.ops.restore import Agent
from ckpttool.ops.rows import shown_value
from ckpttool.ops.side_by_side import Laid, Side, laid
from ckpttool.ops.undone import undone
from ckpttool.shown import count
from ckpttool.sidecar import Sidecar

if TYPE_CHECKING:
    import numpy as np

What = Literal["values", "shape", "dtype", "kind", "missing", "added", "fact", "setting", "receipt"]
COUNTERS, FACT, RECEIPT = "counters", "facts", "receipt"
# Larger tensors are not held against others: what differs is named all the same.
_MOST_BYTES = 64 << 20
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One thing in which B is not A.

    `part` is a network's title (`critic/q1`), an optimizer, `normalizer`, `temperature`, `counters`, `facts`,
    `receipt`, or the module of a model. `path` is the entry, fact or setting, `a` and `b` what either side
    has, None where nothing. `resembles` says what the tensor of B looks like.
    """

    part: str
    path: str
    what: What
    a: str | None = None
    b: str | None = None
    resembles: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in ("part", "path", "what", "a", "b", "resembles")}


@dataclass(frozen=True, slots=True)
class Contents:
    """All that two checkpoints hold, compared.

    `by` is how entries were paired, `equal` counts those that are the same, `facts` names the facts that
    agree. `not_compared` says what one side has alone by the declaration of the conversion, and which facts
    only one side knows.
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
            "discrepancies": [each.document() for each in self.discrepancies],
        }


@dataclass(frozen=True, slots=True)
class Party:
    """One of the two: the checkpoint, the agent in it if there is one, and its sidecar."""

    checkpoint: Checkpoint
    agent: Agent | None = None
    receipt: Receipt = field(default_factory=Receipt)

    @property
    def binding(self) -> Binding | None:
        """The agent's binding, None where no layout recognised it."""
        found = None if self.agent is None else self.agent.binding
        return None if found is None or found.layout == NO_LAYOUT else found


def contents(a: Party, b: Party, progress: Progress = silent) -> Contents:
    """Compare everything that the two hold; raise what reading raises, with the entry's path."""
    found = laid(Side(a.checkpoint, a.binding), Side(b.checkpoint, b.binding))
    names = _Parts(a, b, found)
    entries = list(_entries(found, names, progress))
    made = found.conversion
    facts, unknown, agreed = _facts(a.agent, b.agent, folded=made is not None and made.folded)
    linked = Pair(a.checkpoint, b.checkpoint, a.receipt, b.receipt).linked
    made = made if not found.turned else None
    receipt = list(_receipt(a, b, made, linked=linked))
    if made is not None and made.settings and (b.receipt.sidecar is None or not b.receipt.sidecar.optimizers):
        unknown.append(
            f"settings of {some(sorted(made.settings), 3)} beside the file: B's sidecar holds none"
        )
    both = len(found.both)
    if b.receipt.origin is not None and not linked and not b.receipt.stale:
        unknown.append("the receipt beside B: it names another source than A")
    return Contents(
        found.by,
        both - sum(each.what not in ("missing", "added") for each in entries),
        tuple(agreed),
        (*entries, *facts, *receipt),
        (*_declared(found), *unknown),
        found.notes,
    )


def _declared(found: Laid) -> Iterator[str]:
    for side, word in (("left", "A"), ("right", "B")):
        for added, how in ((False, "left to the sidecar"), (True, "that the format's writer adds")):
            names = [
                each.path for each in found.declared if each.side == side and (each.what == "added") is added
            ]
            if names:
                entries = count(len(names), "entry", "entries")
                yield f"{entries} only in {word}, {how}: {some(names, 3)}"


# Entries.


class _Parts:
    """The part of the agent or model that an entry belongs to."""

    def __init__(self, a: Party, b: Party, found: Laid) -> None:
        self._places = found.places
        self._targets = tuple(_targets(each.binding) for each in (a, b))
        self._titles = [
            (part.prefix, part.title)
            for each in (a, b)
            for part in (each.binding.parts if each.binding is not None else ())
        ]

    def of(self, name: str) -> str:
        """Return the part of the entry that has this name in the pairing."""
        for places, targets in zip(self._places, self._targets, strict=True):
            target = targets.get(places.get(name, ()))
            if target is not None:
                return self._title(target)
        steps = name.split("/")
        optimizer = next((at for at, step in enumerate(steps) if "optim" in step.lower()), None)
        return "/".join(steps[:-1] if optimizer is None else steps[: optimizer + 1]) or name

    def _title(self, target: Path) -> str:
        top = str(target[0].value)
        if top in (*NETWORKS, *VALUES):
            return next((title for prefix, title in self._titles if target[: len(prefix)] == prefix), top)
        return top if top in (*OPTIMIZERS, NORMALIZER, TEMPERATURE) else COUNTERS


def _targets(binding: Binding | None) -> dict[Path, Path]:
    return {} if binding is None else {move.source: move.target for move in reversed(binding.moves.moves)}


def _entries(found: Laid, parts: _Parts, progress: Progress) -> Iterator[Discrepancy]:
    others = _Likeness(found)
    for change in found.changes(progress):
        a, b = _sides(change)
        yield Discrepancy(parts.of(change.path), change.path, change.what, a, b, others.of(change))
    for name in found.only_left:
        yield Discrepancy(parts.of(name), name, "missing", _shown(found.left[name]), None)
    for name in found.only_right:
        yield Discrepancy(parts.of(name), name, "added", None, _shown(found.right[name]))


def _sides(change: Changed) -> tuple[str, str]:
    values = change.values
    if values is None:
        return _shown(change.left), _shown(change.right)
    at = f" at {list(values.at)}" if values.at else ""
    first, second = (
        f"{each:.9g}" if isinstance(each, float) else str(each) for each in (values.left, values.right)
    )
    return f"{first}{at}", f"{second}{at}, {values.different:,} of {values.size:,} differ"


def _shown(entry: Entry) -> str:
    if isinstance(entry, Leaf):
        return f"{entry.dtype}{list(entry.shape)}"
    return str(shown_value(entry)["value"])[:60]


class _Likeness:
    """What a tensor of B that differs looks like: tells the usual mistakes of a conversion apart."""

    def __init__(self, found: Laid) -> None:
        self._found = found
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] | None = None

    def of(self, change: Changed) -> str | None:
        """Return what B's tensor resembles, None where nothing."""
        import numpy as np

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
        return _rounded(a, b) or _reordered(a, b)

    def _names(self) -> Mapping[tuple[str, tuple[int, ...], bytes], str]:
        if self._known is None:
            tensors = [
                (name, leaf)
                for name, leaf in self._found.left.items()
                if isinstance(leaf, Leaf) and leaf.nbytes <= _MOST_BYTES and leaf.dtype != "string"
            ]
            self._known = {_key(leaf): name for name, leaf in reversed(tensors)}
        return self._known


def _key(leaf: Leaf) -> tuple[str, tuple[int, ...], bytes]:
    import hashlib

    return leaf.dtype, leaf.shape, hashlib.sha256(leaf.read()).digest()


def _rounded(a: np.ndarray, b: np.ndarray) -> str | None:
    import ml_dtypes
    import numpy as np

    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):
        for name, kind in zip(_HALVES, (np.float16, ml_dtypes.bfloat16), strict=True):
            if np.array_equal(a.astype(kind).astype(np.float64), b.astype(np.float64), equal_nan=True):
                return f"A's rounded to {name}"
        if a.dtype == b.dtype and (np.abs(a - b) <= np.spacing(np.maximum(np.abs(a), np.abs(b)))).all():
            return "A's within 1 unit in the last place"
    return None


def _reordered(a: np.ndarray, b: np.ndarray) -> str | None:
    import numpy as np

    same = np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))
    return "A's numbers in another order" if same else None


# Facts.


def _facts(
    a: Agent | None, b: Agent | None, *, folded: bool
) -> tuple[list[Discrepancy], list[str], list[str]]:
    """Return the facts that differ, sentences on those that only one side has, and the names that agree.

    `folded` statistics of observations are part of the other side's first layers.
    """
    differ: list[Discrepancy] = []
    unknown: list[str] = []
    agreed: list[str] = []
    if a is None or b is None:
        return differ, unknown, agreed
    for name in FACTS:
        first, second = (_fact(name, getattr(each.known, name)) for each in (a, b))
        for key in dict.fromkeys((*first, *second)):
            title = f"{name}/{key}" if key else name
            if key in first and key in second:
                if _is_same(first[key], second[key]):
                    agreed.append(title)
                elif guess := next((w for w, each in (("A", a), ("B", b)) if _is_guess(each, name)), None):
                    other = "B" if guess == "A" else "A"
                    unknown.append(
                        f"{title}: only {other} has it; {guess} holds none, and another is assumed"
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
                origin = agent.known.provenance.get(name, "of unknown origin")
                unknown.append(f"{title}: only {word} holds it ({origin})")
    return differ, unknown, agreed


def _is_guess(agent: Agent, name: str) -> bool:
    """Say whether neither the checkpoint nor its sidecar holds a fact, and a default stands in for it."""
    assumed = agent.known.is_assumed(name)
    return assumed and getattr(agent.sidecar, name, None) is None


def _fact(name: str, value: Any) -> dict[str, Any]:
    """Return the parts of a fact by name, "" for one that has none."""
    if value is None or (name == "obs_norm" and _is_identity(value)):
        return {}
    if name in ("env", "epsilon", "obs_norm"):
        return {
            key: each
            for key, each in value.items()
            if each is not None and (name, key) != ("env", "gymnasium")
        }
    if name == "activations":
        return {"": sorted(set(value)) if len(set(value)) == 1 else list(value)}
    return {"": value}


def _is_identity(norm: Mapping[str, Any]) -> bool:
    """Say whether statistics leave observations as they are, as a library writes them for none."""
    plain = not any(norm["mean"]) and all(each == 1 for each in norm["var"])
    return plain and not norm.get("epsilon") and norm.get("clip") is None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and not isinstance(one, str):
        return isinstance(other, Sequence) and len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        if math.isnan(one) and math.isnan(other):
            return True
        return one == other or _float32(one) == _float32(other)
    return bool(one == other)


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float(value)


def _text(value: Any) -> str:
    return str(documents.plain({"value": value})["value"])[:80]


# The receipt beside B.


def _receipt(a: Party, b: Party, made: Conversion | None, *, linked: bool) -> Iterator[Discrepancy]:
    for word, each in (("A", a), ("B", b)):
        if each.receipt.stale:
            yield Discrepancy(
                RECEIPT, "target_sha256", "receipt", None, f"{word}'s sidecar is of other weights"
            )
    told = b.receipt.sidecar
    if told is None or made is None or not linked or b.receipt.stale:
        return
    known = a.receipt.sidecar
    before = (known.optimizers if known is not None else None) or {}
    if told.optimizers is not None:
        yield from _settings(before if made.settings is None else made.settings, told.optimizers)
    # A conversion back restores its source by the record in A's receipt, not by these rules.
    restored = known is not None and known.undo is not None and _format(known) == b.checkpoint.format
    if not (made.by_receipt or restored):
        rules = {(each.source, each.target): each.rule for each in made.rules}
        theirs = {
            (str(each.get("source")), str(each.get("target"))): str(each.get("rule")) for each in told.rules
        }
        for key in dict.fromkeys((*rules, *theirs)):
            if rules.get(key) != theirs.get(key):
                path = f"rules/{key[0]} -> {key[1]}"
                yield Discrepancy(RECEIPT, path, "receipt", rules.get(key), theirs.get(key))
    yield from _kept(a.checkpoint, b, made)


def _format(receipt: Sidecar) -> str | None:
    return receipt.source.get("format") if receipt.source is not None else None


def _settings(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Discrepancy]:
    for name in dict.fromkeys((*ours, *theirs)):
        first, second = ours.get(name, {}), theirs.get(name, {})
        for key in dict.fromkeys((*first, *second)):
            one, other = (_text(each[key]) if key in each else None for each in (first, second))
            if key not in first or key not in second or not _is_same(first[key], second[key]):
                yield Discrepancy(name, f"{name}/{key}", "setting", one, other)


def _kept(source: Checkpoint, b: Party, made: Conversion) -> Iterator[Discrepancy]:
    """Go through what only the sidecar keeps of the source, and the file beside the target."""
    told = b.receipt.sidecar
    kept = {str(each.get("path")): each for each in told.residue} if told is not None else {}
    for path in (*made.kept, *made.dropped):
        leaf, line = source.tree[path], kept.get(source.tree.names[path], {})
        if not isinstance(leaf, ValueLeaf) or "value" not in line:
            continue
        value, other = shown_value(leaf)["value"], line["value"]
        value = documents.finite(value) if isinstance(value, float) else value
        if value != other and not (isinstance(value, str) and value.startswith(str(other))):
            where = f"residue/{source.tree.names[path]}"
            yield Discrepancy(RECEIPT, where, "receipt", _text(value), _text(other))
    if told is not None and told.undo is not None:
        yield from _undone(source, b.checkpoint, told.undo, made)


def _undone(
    source: Checkpoint, target: Checkpoint, record: Mapping[str, Any], made: Conversion
) -> Iterator[Discrepancy]:
    """Go through what the record of the source gives back, of the entries that the target does not hold."""
    try:
        back = undone(target.tree, record, target.path)
    except CkpttoolError as error:
        yield Discrepancy(RECEIPT, "undo", "receipt", None, error.message)
        return
    if back.tree is None:
        yield Discrepancy(RECEIPT, "undo", "receipt", None, back.note)
        return
    there = {name: back.tree[path] for path, name in back.tree.names.items()}
    for path in made.kept:
        name = source.tree.names[path]
        leaf, other = source.tree[path], there.get(name)
        if not _is_equal(leaf, other):
            shown = None if other is None else _shown(other)
            yield Discrepancy(RECEIPT, f"undo/{name}", "receipt", _shown(leaf), shown)


def _is_equal(one: Entry, other: Entry | None) -> bool:
    if isinstance(one, Leaf) and isinstance(other, Leaf):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bytes(one.read()) == bytes(
            other.read()
        )
    if isinstance(one, ValueLeaf) and isinstance(other, ValueLeaf):
        return repr(one.value) == repr(other.value)
    return False
