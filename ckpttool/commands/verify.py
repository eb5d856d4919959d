"""Verify that two checkpoints hold the same agent."""

from __future__ import annotations

import contextlib
import hashlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from ckpttool.commands.diff import CheckpointAlignment, DiffSide, Reconversion, align_checkpoints
from ckpttool.commands.stats import By, ChangedEntry, Entry, round_to_float32
from ckpttool.conversion.optimizer_options import NO_OPTIMIZER_OPTIONS, read_optimizer_options
from ckpttool.conversion.options import with_keywords
from ckpttool.conversion.reverse import reverse_conversion
from ckpttool.core import plugins, sidecar, text, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.errors import CkpttoolError, MappingError, UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar
from ckpttool.core.text import describe_record, format_count
from ckpttool.core.tree import Leaf, Path, ValueLeaf, json_value
from ckpttool.core.tree_views import render_record
from ckpttool.evaluation.agent_networks import (
    agent_network_settings,
    available_backend,
    missing_networks,
    pair_networks,
    require_facts,
    shared_networks,
)
from ckpttool.evaluation.evidence import NO_FACTS, AgentFacts
from ckpttool.evaluation.restore import (
    FACTS,
    Agent,
    VerifiedSidecar,
    build_agent,
    list_not_understood,
    read_any_sidecar,
    read_verified_sidecar,
    recognize_playable_agent,
    restore_agent,
)
from ckpttool.formats import onnx
from ckpttool.formats.detect import open_checkpoint
from ckpttool.libraries import optimizer_settings
from ckpttool.libraries.schema import (
    NETWORKS,
    NO_LAYOUT,
    NORMALIZER,
    OPTIMIZERS,
    RUN,
    TEMPERATURE,
    VALUES,
    AgentNetwork,
    RecognizedAgent,
)
from ckpttool.networks import numpy_backend
from ckpttool.networks.network import Network
from ckpttool.networks.policy_training import Dtype, Learner, TrainedWeights, TrainingBatch, train_learner
from ckpttool.networks.worker import TIMEOUT_S, ModelSpec, Worker
from ckpttool.verification import policy_training
from ckpttool.verification.output_comparison import (
    OWN_ERROR,
    Parity,
    failed_parity,
    make_observations,
    measure_parity,
    run_network,
)
from ckpttool.verification.training import TrainingOptions, relative_distance
from ckpttool.verification.two_models import (
    ModelComparison,
    ModelComparisonOptions,
    ModelSide,
    compare_models,
)

# `verify --all`: every entry, fact, setting and receipt of two checkpoints, compared exactly.
#
# Entries are paired as in `diff`. Each discrepancy names its part, so that a caller can distinguish a wrong
# optimizer from a wrong network, and what the tensor of B resembles: a transposed one, another one of A, a
# rounded one.

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
            "discrepancies": [each.document() for each in self.discrepancies],
        }


@dataclass(frozen=True, slots=True)
class VerificationSide:
    """One side: the checkpoint, its agent if it has one, and its sidecar."""

    checkpoint: Checkpoint
    agent: Agent | None = None
    receipt: VerifiedSidecar = field(default_factory=VerifiedSidecar)

    @property
    def binding(self) -> RecognizedAgent | None:
        """The agent's binding, None if no layout recognised it."""
        found = None if self.agent is None else self.agent.binding
        return None if found is None or found.layout == NO_LAYOUT else found


def compare_contents(
    a: VerificationSide, b: VerificationSide, progress: Progress = ignore_progress
) -> ContentComparison:
    """Compare the complete contents; raise errors of reading, with the entry's path."""
    source, target = (DiffSide(each.checkpoint, each.binding, each.receipt) for each in (a, b))
    found = align_checkpoints(source, target)
    entries = list(_entry_discrepancies(a, b, found, progress))
    made = found.conversion
    facts, unknown, agreed = _compare_facts(a.agent, b.agent, folded=made is not None and made.folded)
    linked = target.is_converted_from(source)
    made = made if not found.turned else None
    receipt = list(_receipt_discrepancies(a, b, made, linked=linked))
    if made is not None and made.settings and (b.receipt.sidecar is None or not b.receipt.sidecar.optimizers):
        unknown.append(
            f"settings of {abbreviate_list(sorted(made.settings), 3)} belong in B's sidecar, which "
            "contains none"
        )
    both = len(found.both)
    if b.receipt.origin is not None and not linked and not b.receipt.stale:
        unknown.append("B's receipt: its source is not A")
    return ContentComparison(
        found.by,
        both - sum(each.what not in ("missing", "added") for each in entries),
        tuple(agreed),
        (*entries, *facts, *receipt),
        (*_declared_notes(found), *unknown),
        found.notes,
    )


def _declared_notes(found: CheckpointAlignment) -> Iterator[str]:
    for side, word in (("left", "A"), ("right", "B")):
        for added, how in ((False, "recorded in the sidecar"), (True, "added by the format's writer")):
            names = [
                each.path for each in found.declared if each.side == side and (each.what == "added") is added
            ]
            if names:
                entries = format_count(len(names), "entry", "entries")
                yield f"{entries} only in {word}, {how}: {abbreviate_list(names, 3)}"


# Entries.


def _entry_discrepancies(
    a: VerificationSide, b: VerificationSide, found: CheckpointAlignment, progress: Progress
) -> Iterator[Discrepancy]:
    bindings = [each.binding for each in (a, b)]
    targets = [
        {} if each is None else {move.source: move.target for move in reversed(each.moves.moves)}
        for each in bindings
    ]
    parts = [part for each in bindings if each is not None for part in each.parts]

    def part_of(name: str) -> str:
        for places, there in zip(found.places, targets, strict=True):
            if (target := there.get(places.get(name, ()))) is not None:
                return _part_title(target, parts)
        steps = name.split("/")
        optimizer = next((at for at, step in enumerate(steps) if "optim" in step.lower()), None)
        return "/".join(steps[:-1] if optimizer is None else steps[: optimizer + 1]) or name

    others = _MistakeClassifier(found)
    for change in found.changes(progress):
        values = _sides(change)
        yield Discrepancy(part_of(change.path), change.path, change.what, *values, others.of(change))
    for name in found.only_left:
        yield Discrepancy(part_of(name), name, "missing", _format_entry(found.left[name]), None)
    for name in found.only_right:
        yield Discrepancy(part_of(name), name, "added", None, _format_entry(found.right[name]))


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
        f"{each:.9g}" if isinstance(each, float) else str(each) for each in (values.left, values.right)
    )
    return f"{first}{at}", f"{second}{at}, {values.different:,} of {values.size:,} differ"


def _format_entry(entry: Entry) -> str:
    if isinstance(entry, Leaf):
        return f"{entry.dtype}{list(entry.shape)}"
    return str(json_value(entry)["value"])[:60]


class _MistakeClassifier:
    """What B's differing tensor looks like, to detect common conversion errors."""

    def __init__(self, found: CheckpointAlignment) -> None:
        self._found = found
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
                for name, leaf in self._found.left.items()
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


# Facts.


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
        first, second = (_fact_parts(name, getattr(each.known, name)) for each in (a, b))
        if stated := _compare_stated(name, a, b):
            differ += stated
            continue
        for key in dict.fromkeys((*first, *second)):
            title = f"{name}/{key}" if key else name
            if key in first and key in second:
                if _is_same(first[key], second[key]):
                    agreed.append(title)
                elif guess := next((w for w, each in (("A", a), ("B", b)) if _is_guess(each, name)), None):
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
    unclear = [name in list_not_understood(each.binding, each.known) for each in (a, b)]
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
            key: each
            for key, each in value.items()
            if each is not None and (name, key) != ("env", "gymnasium")
        }
    if name == "activations":
        return {"": sorted(set(value)) if len(set(value)) == 1 else list(value)}
    return {"": value}


def _is_identity(norm: Mapping[str, Any]) -> bool:
    """Return whether statistics leave observations unchanged, which libraries write for no normalisation."""
    plain = not any(norm["mean"]) and all(each == 1 for each in norm["var"])
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


# The receipt beside B.


def _receipt_discrepancies(
    a: VerificationSide, b: VerificationSide, made: Reconversion | None, *, linked: bool
) -> Iterator[Discrepancy]:
    for word, each in (("A", a), ("B", b)):
        if each.receipt.stale:
            yield Discrepancy(
                RECEIPT, "target_sha256", "receipt", None, f"{word}'s sidecar belongs to different weights"
            )
    recorded = b.receipt.sidecar
    if recorded is None or made is None or not linked or b.receipt.stale:
        return
    known = a.receipt.sidecar
    before = (known.optimizers if known is not None else None) or {}
    if recorded.optimizers is not None:
        yield from _setting_discrepancies(
            before if made.settings is None else made.settings, recorded.optimizers
        )
    # A reverse conversion restores its source by the record in A's receipt, not by these rules.
    restored = known is not None and known.undo is not None and _format(known) == b.checkpoint.format
    if not (made.by_receipt or restored):
        rules = {(each.source, each.target): each.rule for each in made.rules}
        theirs = {
            (str(each.get("source")), str(each.get("target"))): str(each.get("rule"))
            for each in recorded.rules
        }
        for key in dict.fromkeys((*rules, *theirs)):
            if rules.get(key) != theirs.get(key):
                path = f"rules/{key[0]} -> {key[1]}"
                yield Discrepancy(RECEIPT, path, "receipt", rules.get(key), theirs.get(key))
    yield from _residue_discrepancies(a.checkpoint, b, made)


def _format(receipt: Sidecar) -> str | None:
    return receipt.source.get("format") if receipt.source is not None else None


def _setting_discrepancies(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> Iterator[Discrepancy]:
    for name in dict.fromkeys((*ours, *theirs)):
        first, second = ours.get(name, {}), theirs.get(name, {})
        for key in dict.fromkeys((*first, *second)):
            one, other = (_text(each[key]) if key in each else None for each in (first, second))
            if key not in first or key not in second or not _is_same(first[key], second[key]):
                yield Discrepancy(name, f"{name}/{key}", "setting", one, other)


def _residue_discrepancies(
    source: Checkpoint, b: VerificationSide, made: Reconversion
) -> Iterator[Discrepancy]:
    """Yield what only the sidecar and the file beside the target store of the source."""
    recorded = b.receipt.sidecar
    kept = {str(each.get("path")): each for each in recorded.residue} if recorded is not None else {}
    for path in (*made.kept, *made.dropped):
        leaf, line = source.tree[path], kept.get(source.tree.names[path], {})
        if not isinstance(leaf, ValueLeaf) or "value" not in line:
            continue
        value, other = json_value(leaf)["value"], line["value"]
        value = text.json_number(value) if isinstance(value, float) else value
        if value != other and not (isinstance(value, str) and value.startswith(str(other))):
            where = f"residue/{source.tree.names[path]}"
            yield Discrepancy(RECEIPT, where, "receipt", _text(value), _text(other))
    if recorded is not None and recorded.undo is not None:
        yield from _reverse_discrepancies(source, b.checkpoint, recorded.undo, made)


def _reverse_discrepancies(
    source: Checkpoint, target: Checkpoint, record: Mapping[str, Any], made: Reconversion
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
    for path in made.kept:
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


# Verifies optimizer state: both checkpoints continue training on the same batches, and stay together.
#
# Compared are the changes of the weights, not their values: an update is small relative to a weight.

STEPS = 100
# Relative to the length of A's own update, pooled over a network.
BOUNDS: Mapping[Dtype, float] = {"float32": 1e-4, "float64": 1e-10}
# A's own rounding may exceed that bound: B may then be OWN_ERROR times as far off as A, but at most a hundred
# bounds. Other mapping errors are far larger.
MOST = 100.0


@dataclass(frozen=True, slots=True)
class UpdateComparison:
    """How far one network moved: |update of A - update of B| / |update of A|, after `step` updates.

    `error_a` and `error_b` are the same for each side against the float64 reference, `tensors` of A
    and B for each trained tensor in order. An update of B where A makes none, or at another step, is
    infinitely wrong.
    """

    name: str
    dtype: Dtype
    step: int
    relative: float
    error_a: float
    error_b: float
    tensors: tuple[float, ...]
    within: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "tensors": list(self.tensors)}


@dataclass(frozen=True, slots=True)
class TrainStepComparison:
    """Both learners after equal updates: of every network the first update, and all of them."""

    algorithm: str
    steps: int
    moved: tuple[UpdateComparison, ...]
    missing: tuple[str, ...] = policy_training.MISSING
    differences: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Return whether every network moved as in A, and settings and state of the optimizers agree."""
        return all(each.within for each in self.moved) and not self.differences

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "algorithm": self.algorithm,
            "steps": self.steps,
            "batch": policy_training.BATCH,
            "bounds": dict(BOUNDS),
            "updates": [each.document() for each in self.moved],
            "differences": list(self.differences),
            "missing": list(self.missing),
        }


def compare_train_steps(
    learners: tuple[Learner, Learner], batches: Sequence[TrainingBatch], workers: Sequence[Worker]
) -> TrainStepComparison:
    """Train both sides on the batches, each in its worker and both float types, and A in float64."""
    first = learners[0]
    double = first.cast("float64")
    reference = train_learner(numpy_backend.learn(double), double, [each.cast("float64") for each in batches])
    exact = _updates(first, reference)
    moved: list[UpdateComparison] = []
    for dtype, bound in BOUNDS.items():
        given = [each.cast(dtype) for each in batches]
        sides = zip(learners, workers, strict=True)
        a, b = (_updates(each, worker.train(each.cast(dtype), given)) for each, worker in sides)
        moved += [_compare_updates(key, dtype, bound, (a, b, exact)) for key in sorted(a.keys() | b.keys())]
    slow = {*first.slow.values()}
    trained = [array for (title, _), arrays in exact.items() if title not in slow for array in arrays]
    if all(each.within for each in moved) and not any(each.any() for each in trained):
        raise UsageError(
            "the optimizers of A and B move no weight, so that their training steps show nothing",
            hint="compare checkpoints from before the learning rate reached 0",
        )
    different = policy_training.compare_states(*learners)
    return TrainStepComparison(first.algorithm, len(batches), tuple(moved), differences=different)


# By title and training step: how far each tensor of the network had moved, in float64.
_Updates = dict[tuple[str, int], list[np.ndarray]]


def _updates(learner: Learner, after: TrainedWeights) -> _Updates:
    found: _Updates = {}
    for title, step in after.moved.items():
        start = learner.arrays(title)
        # With only one step, the first update is the last one.
        for number, weights in ((step, after.first[title]), (after.steps, after.last[title])):
            pairs = zip(weights, start, strict=True)
            found[title, number] = [there.astype(np.float64) - here for there, here in pairs]
    return found


def _compare_updates(
    key: tuple[str, int], dtype: Dtype, bound: float, updates: tuple[_Updates, _Updates, _Updates]
) -> UpdateComparison:
    a, b, exact = (each.get(key) for each in updates)
    if a is None or b is None or exact is None or [x.shape for x in a] != [x.shape for x in b]:
        return UpdateComparison(key[0], dtype, key[1], np.inf, np.inf, np.inf, (), within=False)
    relative, error_a, error_b = (
        _relative_distance(a, b),
        _relative_distance(exact, a),
        _relative_distance(exact, b),
    )
    allowed = max(bound, min(OWN_ERROR * error_a, MOST * bound))
    tensors = tuple(_relative_distance([x], [y]) for x, y in zip(a, b, strict=True))
    return UpdateComparison(
        key[0], dtype, key[1], relative, error_a, error_b, tensors, within=relative <= allowed
    )


def _relative_distance(right: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return |right - other| / |right| of all arrays; 0 if neither moved."""
    pair = (np.concatenate([np.zeros(0), *(x.reshape(-1) for x in arrays)]) for arrays in (right, other))
    return relative_distance(*pair)


# `verify`: two checkpoints of one agent give the same outputs, each in its own framework.
#
# With `steps`, both also continue training on the same batches. With `whole`, everything in both is compared
# as well, also for models without an agent.


@dataclass(frozen=True, slots=True)
class Verification:
    """All networks that both checkpoints have; `backends` ran A and B.

    `training` and `contents` exist if requested. `not_compared` names contents that this verification
    does not cover.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    first: str
    second: str
    backends: tuple[str, str]
    networks: tuple[Parity, ...]
    tolerance: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    training: TrainStepComparison | None = None
    contents: ContentComparison | None = None
    not_compared: tuple[str, ...] = ()
    ledger: LedgerEntries = ()
    models: ModelComparison | None = None

    @property
    def within(self) -> bool:
        """Whether every network is within the tolerance, every update within its bound, and all equal."""
        forward = all(network.within for network in self.networks)
        trained = (self.training, None if self.models is None else self.models.training)
        return forward and all(each is None or each.within for each in trained) and not self.discrepancies

    @property
    def discrepancies(self) -> tuple[Discrepancy, ...]:
        """The differences other than the networks' outputs."""
        return () if self.contents is None else self.contents.discrepancies

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "a": self.first,
            "b": self.second,
            "backends": list(self.backends),
            "networks": [network.document() for network in self.networks],
            "tolerance": self.tolerance,
            "within": self.within,
            **({"training": self.training.document()} if self.training is not None else {}),
            **({"contents": self.contents.document()} if self.contents is not None else {}),
            **({"models": self.models.document()} if self.models is not None else {}),
            "not_compared": list(self.not_compared),
            "assumed": list(self.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class VerificationOptions:
    """The options of `verify`.

    Args:
        tolerance: replaces the default bound: B's largest error against float64, relative to the
            output's scale.
        steps: train both sides for that many updates, and compare the updates.
        layout: that of the first checkpoint, None for the recognized one.
        facts: facts of the common agent that no file contains.
        python: the interpreter that runs the frameworks.
        whole: also compare every entry, fact, setting and receipt exactly; checkpoints without an agent
            are compared by their entries.
        like_a: the user's code that builds the model of the first checkpoint, which is then loaded into it
            strictly: "module:factory", or a ModelSpec with arguments.
        like_b: the same for the second checkpoint.
        python_a: the interpreter that runs the first model; None for `python`.
        python_b: the same for the second model.
        input_shapes: shapes of the first model's inputs without the batch: "3,32,32" or "name=3,32,32".
        inputs: a `.npz` file with the inputs, instead of fixed random ones.
        transpose_inputs: whether the second model's inputs have channels on the other side; None decides
            by declared shapes and by convolutions.
        run_code: permit files that contain code: SavedModel, TorchScript, Lambda layers.
        loss_a: the loss of the first model's training steps, "module:function", called with its outputs
            and targets; None for the mean of 0.5 * (output - target)^2.
        loss_b: the same for the second model.
        optimizer_a: for a file of the first model with several optimizers: the name of the one to train with.
        optimizer_b: the same for the second model.

    """

    tolerance: float | None = None
    steps: int | None = None
    layout: str | None = None
    facts: AgentFacts = NO_FACTS
    python: str | None = None
    whole: bool = False
    like_a: ModelSpec | str | None = None
    like_b: ModelSpec | str | None = None
    python_a: str | None = None
    python_b: str | None = None
    input_shapes: Sequence[str] = ()
    inputs: str | None = None
    transpose_inputs: bool | None = None
    run_code: bool = False
    loss_a: str | None = None
    loss_b: str | None = None
    optimizer_a: str | None = None
    optimizer_b: str | None = None

    @property
    def of_training(self) -> tuple[str | None, str | None, str | None, str | None]:
        """The losses and optimizers of training steps."""
        return self.loss_a, self.loss_b, self.optimizer_a, self.optimizer_b

    @property
    def of_models(self) -> bool:
        """Whether an option applies to models only."""
        given = (self.like_a, self.like_b, self.inputs, self.transpose_inputs, *self.of_training)
        return bool(self.input_shapes or self.run_code) or any(each is not None for each in given)


class VerificationKeywords(TypedDict, total=False):
    """Fields of VerificationOptions as keywords, for type checkers and editors."""

    tolerance: float | None
    steps: int | None
    layout: str | None
    facts: AgentFacts
    python: str | None
    whole: bool
    like_a: ModelSpec | str | None
    like_b: ModelSpec | str | None
    python_a: str | None
    python_b: str | None
    input_shapes: Sequence[str]
    inputs: str | None
    transpose_inputs: bool | None
    run_code: bool
    loss_a: str | None
    loss_b: str | None
    optimizer_a: str | None
    optimizer_b: str | None


def verify(
    first: str,
    second: str,
    options: VerificationOptions | None = None,
    *,
    progress: Progress = ignore_progress,
    **keywords: Unpack[VerificationKeywords],
) -> Verification:
    """Compare every network of two agents, or two models, on the same fixed inputs.

    Two checkpoints of recognised agents are compared network by network on observations (and actions).
    Otherwise each side is a model that runs by itself (.keras, Keras .h5, ONNX, SavedModel, TorchScript)
    or one that `like_a` or `like_b` builds. `keywords` are VerificationOptions fields that override
    those of `options`: `verify(first, second, whole=True)`. Raise UsageError when the two have no
    network in common (unless `whole`), or a side cannot run.
    """
    options = with_keywords(options or VerificationOptions(), keywords, "verify")
    if any(options.of_training) and options.steps is None:
        raise UsageError("--loss, --optimizer-a and --optimizer-b require --train-step")
    if options.of_models and options.whole:
        raise UsageError("--all compares agents, not models that your code builds")
    sides = _model_sides(first, second, options)
    if options.of_models or (
        not options.whole and _are_models(sides, train=options.steps is not None, given=bool(options.facts))
    ):
        return _verify_models(sides, options, progress)
    if options.whole:
        return _verify_contents(first, second, options, progress)
    a = _restore_side(sides, 0, options.layout, options)
    b = _restore_side(sides, 1, None, options)
    found = _compare_networks(a, b, (first, second), options, progress)
    trained = options.steps is not None
    left = [list(_untested_parts(agent, trained=trained)) for agent in (a, b)]
    lines = [f"{word}: {', '.join(parts)}" for word, parts in zip("AB", left, strict=True) if parts]
    return replace(
        found,
        not_compared=(*found.not_compared, *([", ".join(left[0])] if left[0] == left[1] != [] else lines)),
    )


def _model_sides(first: str, second: str, options: VerificationOptions) -> tuple[ModelSide, ModelSide]:
    """Return both sides, each with its factory and its interpreter; nothing is opened yet."""
    likes = [ModelSpec(each) if isinstance(each, str) else each for each in (options.like_a, options.like_b)]
    pythons = [each or options.python or sys.executable for each in (options.python_a, options.python_b)]
    return ModelSide("A", first, likes[0], pythons[0]), ModelSide("B", second, likes[1], pythons[1])


def _are_models(sides: tuple[ModelSide, ModelSide], *, train: bool, given: bool) -> bool:
    """Return whether a side is a model that runs, and a side is no recognised agent.

    With `given` facts, agents are compared as agents.

    Two models that run are compared as such if the policy is not all that they compute, or if a fact of it
    would not come from its file; an actor alone, e.g. a chain of dense layers, is trained as such.
    """
    run = [side.own_kind is not None for side in sides]
    if all(run) and any(_has_other_outputs(side) or (not given and _is_partly_read(side)) for side in sides):
        return True
    parts = [() if side.agent is None else side.agent.parts for side in sides]
    actors = all(part.component.startswith("actor") for each in parts for part in each)
    return any(run) and (not all(parts) or (train and all(run) and actors))


def _has_other_outputs(side: ModelSide) -> bool:
    """Return whether the agent of a side omits outputs or layers of the model."""
    return side.agent is not None and any(" left out: " in note for note in side.agent.moves.notes)


def _is_partly_read(side: ModelSide) -> bool:
    """Return whether the activations or the action map of a policy alone are not read from its file."""
    if side.agent is None or side.agent.layout != NO_LAYOUT:
        return False
    facts = side.agent.facts
    read = {"activations" if name == "hidden" else name for name in facts.origins}
    hidden = any(sum(layer.kind == "dense" for layer in part.layers) > 1 for part in side.agent.parts)
    return bool(facts.stated) or "head" not in read or (hidden and "activations" not in read)


def _restore_side(
    sides: tuple[ModelSide, ModelSide], index: int, layout: str | None, options: VerificationOptions
) -> Agent:
    """Return a side as an agent; raise UsageError for weights that only the user's code can use."""
    side = sides[index]
    try:
        return restore_agent(side.checkpoint, layout, options.facts)
    except (UnsupportedError, UsageError) as error:
        own = read_verified_sidecar(side.checkpoint).sidecar
        computed = own is not None and own.computation is not None
        known = side.agent is not None and not computed
        if layout is not None or options.facts or known or side.own_kind is not None:
            raise
        bare = [
            each.word.lower()
            for each in sides
            if each.own_kind is None and (each.agent is None or (computed and each is side))
        ]
        factories = (word for name in bare for word in (f"--like-{name}", "MODULE:FACTORY"))
        hint = shlex.join(("ckpttool", "verify", *(each.path for each in sides), *factories))
        if side.agent is not None:
            error.hint = hint
            raise
        raise UsageError(
            f"{side.word} contains weights without the model that uses them, and is no recognised agent",
            file=side.path,
            hint=hint,
        ) from error


def _verify_models(
    sides: tuple[ModelSide, ModelSide], options: VerificationOptions, progress: Progress
) -> Verification:
    """Compare two models by their own frameworks, which start once every file is there."""
    for path in (*(side.path for side in sides), *(() if options.inputs is None else (options.inputs,))):
        open_checkpoint(path)
    chosen = ModelComparisonOptions(
        tuple(options.input_shapes),
        options.inputs,
        options.transpose_inputs,
        options.run_code,
        options.tolerance,
        options.facts,
        None if options.steps is None else TrainingOptions(options.steps, *options.of_training),
    )
    found = compare_models(sides[0], sides[1], chosen, progress)
    return Verification(
        urls.display_url(sides[0].path),
        urls.display_url(sides[1].path),
        found.engines,
        found.outputs,
        _describe_tolerance(options.tolerance),
        (*found.assumed, *(() if found.training is None else found.training.assumed)),
        (*found.notes, *(() if found.training is None else found.training.notes)),
        not_compared=found.not_compared,
        models=found,
    )


def _compare_networks(
    a: Agent, b: Agent, paths: tuple[str, str], options: VerificationOptions, progress: Progress
) -> Verification:
    """Compare the outputs of two agents' networks."""
    for one, other in ((a, b), (b, a)):
        require_facts(one, other=other)
    titles = shared_networks(a, b)
    if not titles:
        raise UsageError("the two checkpoints have no network in common", file=paths[1])
    assumed: list[str] = []
    compared, notes = pair_networks(a, b, titles, assumed)
    found, training = [], None
    backends = (available_backend(a), available_backend(b))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_start_worker(name, options)) for name in backends]
        for number, (title, (left, right)) in enumerate(compared.items()):
            progress(number, len(compared))
            found.append(_measure_network(title, left, right, workers, options.tolerance))
        if options.steps is not None:
            training, remarks = _compare_training(a, b, options.steps, workers, assumed)
            notes += remarks
    notes = [*notes, *(note for title, pair in compared.items() for note in _size_notes(title, *pair))]
    # If B lacks something of A, they differ, unless B is the conversion of a part; extra entries in B do not
    # count against it.
    part = _part_of(a, b) if missing_networks(a, b) else None
    outside = (
        [f"{title} (B was converted from {part} only)" for title in missing_networks(a, b)] if part else []
    )
    found += [failed_parity(title) for title in missing_networks(a, b)] if part is None else []
    return Verification(
        urls.display_url(a.checkpoint.path),
        urls.display_url(b.checkpoint.path),
        backends,
        tuple(found),
        _describe_tolerance(options.tolerance),
        tuple(dict.fromkeys(assumed)),
        tuple(dict.fromkeys((*_difference_notes(a, b), *notes, *a.notes, *b.notes))),
        training,
        ledger=sidecar.merge_entries(_side_entries("A", a, b), _side_entries("B", b, a)),
        not_compared=(*(title for title in titles if title not in compared), *outside),
    )


def _describe_tolerance(tolerance: float | None) -> str:
    if tolerance is None:
        return f"B's error vs. float64 at most {OWN_ERROR:g}x A's, or within rounding of the largest sum"
    return f"B's error vs. float64 at most {tolerance:g} of the output's scale"


def _untested_parts(agent: Agent, *, trained: bool) -> Iterator[str]:
    """Yield the parts that affect no network's output; `trained` optimizers are compared."""
    tops = {str(move.target[0].value) for move in agent.binding.moves.moves} - {*RUN}
    yield from (name for name in OPTIMIZERS if name in tops and not trained)
    yield from sorted(tops - {*OPTIMIZERS})
    bound = {move.source for move in agent.binding.moves.moves} | agent.binding.consumed
    rest = sum(path not in bound for path in agent.checkpoint.tree)
    if rest:
        yield format_count(rest, "other entry", "other entries")


def _verify_contents(
    first: str, second: str, options: VerificationOptions, progress: Progress
) -> Verification:
    """Compare the networks of two agents that both can run, and the complete contents."""
    a, b = _open_side(first, options.layout, options.facts), _open_side(second, None, options.facts)
    found = Verification(
        urls.display_url(a.checkpoint.path), urls.display_url(b.checkpoint.path), ("-", "-"), (), "", (), ()
    )
    if a.agent is None or b.agent is None:
        lone = [word for word, party in (("A", a), ("B", b)) if party.agent is None]
        reason = f"network outputs: no agent is recognised in {' and '.join(lone)}"
        found = replace(found, tolerance="entries are equal", not_compared=(reason,))
    else:
        try:
            found = _compare_networks(a.agent, b.agent, (first, second), options, progress)
        except (MappingError, UnsupportedError, UsageError) as error:
            if options.steps is not None:
                raise
            reason = f"network outputs: {error.message}"
            found = replace(found, tolerance="entries are equal", not_compared=(reason,))
    every = compare_contents(a, b, progress)
    return replace(
        found,
        contents=every,
        notes=tuple(dict.fromkeys((*found.notes, *every.notes))),
        not_compared=(*found.not_compared, *every.not_compared),
    )


def _open_side(path: str, layout: str | None, facts: AgentFacts) -> VerificationSide:
    """Open one side; a sidecar of other weights is a discrepancy and provides no agent facts."""
    checkpoint = open_checkpoint(path)
    receipt = read_any_sidecar(checkpoint)
    try:
        binding = recognize_playable_agent(checkpoint, layout)
        own = VerifiedSidecar() if receipt.stale else VerifiedSidecar(receipt.sidecar)
        agent = None if binding is None else build_agent(checkpoint, binding, own, facts)
    except (MappingError, UnsupportedError, UsageError):
        if layout is not None:
            raise
        agent = None
    return VerificationSide(checkpoint, agent, receipt)


def _side_entries(side: str, agent: Agent, other: Agent) -> Iterator[LedgerEntry]:
    """Yield one side's ledger entries; those equal on both sides belong to neither."""
    for entry in agent.ledger:
        yield entry if entry in other.ledger else replace(entry, where=f"{side}: {entry.where}".rstrip(": "))


def _start_worker(backend: str, options: VerificationOptions) -> Worker:
    timeout = TIMEOUT_S + (options.steps or 0)
    python = sys.executable if options.python is None else options.python
    return Worker(backend, python=python, timeout=timeout, threads=1)


def _substitute_backend_note(agent: Agent) -> str:
    extra = plugins.find("backends", agent.framework).extra
    has_it = f" (pip install 'ckpttool[{extra}]')" if extra else ""
    return (
        f"{agent.framework} is not installed{has_it}: {urls.display_url(agent.checkpoint.path)} "
        "was run with numpy"
    )


def _difference_notes(a: Agent, b: Agent) -> Iterator[str]:
    """Yield the differences other than their numbers."""
    for agent in (a, b):
        if available_backend(agent) != agent.framework:
            yield _substitute_backend_note(agent)
    if missing_networks(a, b):
        yield f"B lacks {', '.join(missing_networks(a, b))}"
    if missing_networks(b, a):
        yield f"only B has {', '.join(missing_networks(b, a))}"
    normalised = [agent.known.obs_norm is not None for agent in (a, b)]
    if normalised[0] != normalised[1]:
        yield f"only {'A' if normalised[0] else 'B'} records how observations are normalised"


def _size_notes(title: str, left: Network, right: Network) -> Iterator[str]:
    """Yield the sizes of two networks that cannot be compared because these differ."""
    if left.inputs == right.inputs and left.width == right.width:
        return
    a, b = (f"{', '.join(f'{name} {size}' for name, size in n.inputs)} -> {n.width}" for n in (left, right))
    yield f"{title} has other sizes: A {a}; B {b}"


def _measure_network(
    title: str, left: Network, right: Network, workers: list[Worker], tolerance: float | None
) -> Parity:
    if left.inputs != right.inputs or left.width != right.width:
        return failed_parity(title)
    given = make_observations(left)
    outputs = [run_network(w.build(n), given) for w, n in zip(workers, (left, right), strict=True)]
    return measure_parity(title, left, given, (outputs[0], outputs[1]), tolerance)


def _compare_training(
    a: Agent, b: Agent, steps: int, workers: list[Worker], assumed: list[str]
) -> tuple[TrainStepComparison, list[str]]:
    """Train both sides; return results and notes, and add assumptions to `assumed`."""
    prepared, notes = [], []
    for side, agent, other in (("A", _with_stated_settings(a, b), b), ("B", b, a)):
        settings, _ = agent_network_settings(agent, other)
        made = policy_training.LearnerReader(agent, settings).setup()
        prepared.append(made.learner)
        assumed += [f"{side}: {sentence}" for sentence in made.assumed]
        notes += [f"{side}: {note}" for note in made.notes]
        if any(each.family == "Adam" for each in made.learner.optimizers.values()):
            notes += _epsilon_notes(side, agent)
    if prepared[0].algorithm != prepared[1].algorithm:
        raise UnsupportedError(
            "the two agents are trained by different algorithms",
            file=b.checkpoint.path,
            expected=prepared[0].algorithm,
            found=prepared[1].algorithm,
        )
    given = policy_training.make_batches(prepared[0], steps, a.known.obs_norm)
    return compare_train_steps((prepared[0], prepared[1]), given, workers), notes


def _epsilon_notes(side: str, agent: Agent) -> Iterator[str]:
    stands = optimizer_settings.epsilon_placement(agent.sidecar, agent.binding.layout)
    if stands != optimizer_settings.epsilon_placement(None, agent.binding.layout):
        yield (
            f"{side}: epsilon is added to the {stands} second moment, as in training; "
            f"{agent.framework} adds it elsewhere, so a different value was passed to it at every step"
        )


def _part_of(source: Agent, target: Agent) -> str | None:
    """Return the source part or the only network that the target's receipt records, None for the whole."""
    receipt = target.sidecar
    if target.checkpoint.format == onnx.NAME:  # whose own graph replaces the receipt's facts
        receipt = sidecar.load_sidecar(target.checkpoint.path)
    recorded = None if receipt is None else receipt.source
    part = None if recorded is None else recorded.get("part") or recorded.get("network")
    if recorded is None or not part:
        return None
    is_source = recorded.get("sha256") == digest_checkpoint(source.checkpoint).sha256
    return str(part) if is_source else None


def _with_stated_settings(source: Agent, target: Agent) -> Agent:
    """Return the source with the optimizer options of its conversion, which no file of it records."""
    receipt = target.sidecar
    before = {} if source.sidecar is None else source.sidecar.provenance
    if receipt is None or receipt.source is None or "l2" in before or "optimizer" in before:
        return source
    stated = read_optimizer_options(receipt)
    if (
        stated == NO_OPTIMIZER_OPTIONS
        or receipt.source.get("sha256") != digest_checkpoint(source.checkpoint).sha256
    ):
        return source
    return replace(source, sidecar=stated.into(source.sidecar, source.binding, source.checkpoint.tree))
