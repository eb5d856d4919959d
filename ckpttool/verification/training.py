"""Train any two models from the state of their checkpoints, and compare the updates of their weights."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.optimizers import find_torch_row
from ckpttool.core.text import format_count
from ckpttool.core.tree import display
from ckpttool.evaluation.restore import read_any_sidecar
from ckpttool.formats.detect import open_checkpoint
from ckpttool.formats.keras_config import audit_document
from ckpttool.libraries import optimizer_settings
from ckpttool.libraries.optimizer_entries import OPTIMIZER, path_texts
from ckpttool.libraries.optimizer_states import KERAS_ARGUMENTS, KerasStates, OptimizerSettings
from ckpttool.libraries.optimizers_read import CanonicalOptimizer
from ckpttool.mapping.rules import KEEP, Move, MoveList, canonical_tree
from ckpttool.networks.model_training import choose_optimizer
from ckpttool.verification.causes import Cause
from ckpttool.verification.tolerances import BOUNDS, OWN_ERROR, STATE_BOUND, is_equal, relative_distance

if TYPE_CHECKING:
    from ckpttool.verification.two_models import ModelClient


_MOST_AXES = 5
_CHUNKS = (2, 3, 4, 6, 8)
_CLOSE = 1e-5


class TensorPair(NamedTuple):
    """A tensor of A, or a part of it, and its counterpart in B, or a part of that.

    `at_a` and `at_b` are the positions of the paired numbers in the flat tensors, both in one shape. `more`
    names a second tensor of A that B adds to the first.
    """

    a: str
    b: str
    at_a: np.ndarray
    at_b: np.ndarray
    more: str | None = None

    @property
    def title(self) -> str:
        """A's name, with the tensor that B adds."""
        return self.a if self.more is None else f"{self.a} + {self.more}"

    def part(self, array: np.ndarray) -> np.ndarray:
        """Return the paired numbers of a tensor of A."""
        return np.asarray(array.reshape(-1)[self.at_a])

    def of_a(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return A's numbers."""
        value = self.part(arrays[self.a])
        return value if self.more is None else value + self.part(arrays[self.more])

    def of_b(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return B's numbers in the order of A's."""
        return np.asarray(arrays[self.b].reshape(-1)[self.at_b])


class TensorPairs(NamedTuple):
    """Pairs, the tensors of each side without a counterpart, and whether equal tensors went by order."""

    pairs: tuple[TensorPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    by_order: tuple[str, ...] = ()


def _positions(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _values_key(array: np.ndarray) -> tuple[int, bytes]:
    """Return a key that every reordering keeps."""
    flat = np.sort(array.astype(np.float32).reshape(-1), kind="stable") + np.float32(0)
    return flat.size, hashlib.sha256(flat.tobytes()).digest()


def _layer(name: str) -> str:
    return name.rpartition("/" if "/" in name else ".")[0]


def find_reordering(x: np.ndarray, y: np.ndarray, *, close: bool = False) -> np.ndarray | None:
    """Return the positions in the flat `y` of the numbers of `x`, in its shape; None if there are none.

    Axes may be reordered, neighboring axes merged or split, and the slices along one axis permuted, e.g.
    gates, or a flattened image; the last resort is the order of the values themselves.
    """
    if max(x.ndim, y.ndim) > _MOST_AXES or x.size != y.size:
        return None
    tolerance, flat = _CLOSE * float(np.abs(x).max(initial=0.0)) if close else 0.0, y.reshape(-1)
    orders = itertools.chain(_axis_orders(x.shape, y.shape), () if close else _value_orders(x, y))
    return next((at for at in orders if np.allclose(x, flat[at], rtol=0, atol=tolerance)), None)


def _axis_orders(x: tuple[int, ...], y: tuple[int, ...]) -> Iterator[np.ndarray]:
    for axes in itertools.permutations(range(len(y))):
        yield _positions(y).transpose(axes).reshape(x)
    for axes in itertools.permutations(range(len(x))):
        at = np.empty(math.prod(x), int)
        at[_positions(x).transpose(axes).reshape(-1)] = np.arange(at.size)
        yield at.reshape(x)


def _value_orders(x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    for axes in itertools.permutations(range(y.ndim)):
        turned = y.transpose(axes)
        for axis in range(x.ndim if turned.shape == x.shape else 0):
            rows, others = (_slice_keys(array, axis) for array in (x, turned))
            places = {key: index for index, key in enumerate(others)}
            if len(places) == len(rows) and places.keys() == {*rows}:
                yield _positions(y.shape).transpose(axes).take([places[key] for key in rows], axis)
    if np.unique(x).size == x.size:
        at = np.empty(x.size, int)
        at[np.argsort(x, axis=None)] = np.argsort(y, axis=None)
        yield at.reshape(x.shape)


def _slice_keys(array: np.ndarray, axis: int) -> list[bytes]:
    moved = np.moveaxis(array, axis, 0) + 0.0
    return [hashlib.sha256(np.ascontiguousarray(row).tobytes()).digest() for row in moved]


class TensorMatcher:
    """Pairs the trained tensors of two models by their values."""

    def __init__(self, a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> None:
        self._a, self._b = dict(a), dict(b)
        self._left, self._right = list(a), list(b)
        self._layers: dict[str, str] = {}
        self._matches: list[TensorPair] = []
        self._ordered: list[str] = []

    def match(self) -> TensorPairs:
        """Return all pairs: whole tensors first, then parts, sums, and tensors that are only close."""
        self._whole()
        for name in list(self._left):
            for at, other in self._split(self._a[name], self._b, self._right):
                self._pair(name, other, at_a=at)
        for other in list(self._right):
            for at, name in self._split(self._b[other], self._a, self._left):
                self._pair(name, other, at_b=at)
        # Both biases of a recurrent layer, which B may add, and tensors that are equal up to rounding.
        for one, two in itertools.combinations(list(self._left), 2):
            if (_layer(one), self._a[one].shape) == (_layer(two), self._a[two].shape):
                self._take(one, list(self._right), two)
        for name in list(self._left):
            self._take(name, list(self._right))
        rank = {name: index for index, name in enumerate(self._a)}
        pairs = tuple(sorted(self._matches, key=lambda pair: rank[pair.a]))
        return TensorPairs(pairs, tuple(self._left), tuple(self._right), tuple(self._ordered))

    def _whole(self) -> None:
        keys_b: dict[tuple[int, bytes], list[str]] = {}
        for name in self._right:
            keys_b.setdefault(_values_key(self._b[name]), []).append(name)
        keys_a = {name: _values_key(self._a[name]) for name in self._left}
        counts = Counter(keys_a.values())
        # Unique values first: they show which layers belong together.
        for alone in (True, False):
            for name in list(self._left):
                equal = keys_b.get(keys_a[name], [])
                if alone != (counts[keys_a[name]] == 1 == len(equal)):
                    continue
                candidates = [name for name in equal if name in self._right]
                near = [item for item in candidates if _layer(item) == self._layers.get(_layer(name))]
                if len(candidates) > 1 and not near:
                    self._ordered.append(name)
                any(self._pair(name, other) for other in near or candidates)

    def _take(self, name: str, candidates: Sequence[str], more: str | None = None) -> None:
        """Pair a tensor, or the sum of two, with the first candidate that is equal up to rounding."""
        if {name, more} <= {*self._left, None}:
            any(self._pair(name, other, more=more, close=True) for other in candidates)

    def _pair(
        self,
        name: str,
        other: str,
        *,
        at_a: np.ndarray | None = None,
        at_b: np.ndarray | None = None,
        more: str | None = None,
        close: bool = False,
    ) -> bool:
        """Pair two tensors, or the parts at these positions, if one is a reordering of the other."""
        at_a = _positions(self._a[name].shape) if at_a is None else at_a
        at_b = _positions(self._b[other].shape) if at_b is None else at_b
        value = self._a[name] if more is None else self._a[name] + self._a[more]
        at = find_reordering(value.reshape(-1)[at_a], self._b[other].reshape(-1)[at_b], close=close)
        if at is None:
            return False
        self._matches.append(TensorPair(name, other, at_a, at_b.reshape(-1)[at], more))
        self._layers.setdefault(_layer(name), _layer(other))
        self._left = [left_name for left_name in self._left if left_name not in (name, more)]
        self._right = [name for name in self._right if name != other]
        return True

    def _split(
        self, whole: np.ndarray, others: Mapping[str, np.ndarray], free: Iterable[str]
    ) -> list[tuple[np.ndarray, str]]:
        """Return the parts of a tensor that have the values of other tensors, e.g. query, key and value."""
        keys: dict[tuple[int, bytes], list[str]] = {}
        for name in free:
            if others[name].size < whole.size:
                keys.setdefault(_values_key(others[name]), []).append(name)
        for axis, count in itertools.product(range(whole.ndim), _CHUNKS if keys else ()):
            if whole.shape[axis] % count:
                continue
            waiting = {key: list(names) for key, names in keys.items()}
            parts = np.split(_positions(whole.shape), count, axis)
            equal = [waiting.get(_values_key(whole.reshape(-1)[at]), []) for at in parts]
            chosen = [names.pop(0) for names in equal if names]
            if len(chosen) == count:
                return list(zip(parts, chosen, strict=True))
        return []


STEPS = 100
# In float32, A's own rounding may exceed the bound: B may be OWN_ERROR times as far off as A's tensor that is
# farthest from float64, up to these errors, if both or only A have a float64 run.
_MOST_ROUNDING, _ROUNDING_ALONE = 0.1, 1e-2
# Gradients that the loss hardly depends on are rounding noise, which Adam scales to full updates.
_NOISE = {"float32": 4e-6, "float64": 7e-15}
_GRADIENTS = {"float32": 1e-3, "float64": 1e-7}
# A hypothesis is confirmed if it brings updates within that many bounds.
_NEAR = 10.0
_DEFAULT = ("SGD", {"learning_rate": 0.01})
MISSING = (
    "random numbers (dropout, shuffling, augmentation): neither file contains a generator's state",
    "the order of batches",
    "learning-rate schedules outside the optimizer",
    "loss scale and accumulated gradients",
)
_EVALUATION = "both models train in evaluation mode: dropout is off, batch norms use their stored statistics"
_FIXES = {
    "Adam": "use examples/keras_adam.py, an Adam for PyTorch that places epsilon as Keras does",
    "RMSprop": "use RMSpropTFLike of Stable-Baselines3, which adds epsilon under the root",
}
_TINY = 1e-30
_COUNTED = frozenset(("Adam", "Adamax", "NAdam", "RAdam", "Nadam", "Lamb"))
# Settings with state.
_WITH_STATE = ("amsgrad", "centered", "momentum", "use_ema")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of training steps: how many, and the loss and optimizer of each side.

    A loss is "module:function"; an optimizer is the name of one of several in the file.
    """

    steps: int = STEPS
    loss_a: str | None = None
    loss_b: str | None = None
    optimizer_a: str | None = None
    optimizer_b: str | None = None


class OutputTarget(NamedTuple):
    """One output in the loss: its name on each side, its size in A, and how A's array becomes B's."""

    a: str
    b: str
    values: np.ndarray
    to_b: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """How differently one pair of tensors moved: |update of A - update of B| / |update of A|.

    `error_a` is A's own error against its run in float64, None without one. `rounding` means that the
    gradient is only rounding noise, so that the pair is not judged.
    """

    a: str
    b: str
    dtype: str
    step: int
    relative: float
    error_a: float | None
    within: bool
    rounding: bool = False

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """One side's optimizer: class, settings, and whether its file contains it.

    `corrected` is where the framework adds epsilon (see core.optimizers.epsilon_factor). `own` are the
    settings of each tensor, which differ between PyTorch's groups of parameters, `counts` the numbers in the
    state of each: of updates, and NAdam's product of momenta.
    """

    title: str
    family: str
    settings: Mapping[str, Any]
    decoupled: bool
    stored: bool
    corrected: bool
    own: Mapping[str, Mapping[str, Any]]
    counts: Mapping[str, Mapping[str, float]]

    @property
    def step(self) -> int:
        """The number of updates of most tensors."""
        steps = Counter(int(count["step"]) for count in self.counts.values() if "step" in count)
        return steps.most_common(1)[0][0] if steps else 0

    @property
    def counted(self) -> bool:
        """Whether updates depend on their number."""
        return self.family in _COUNTED or bool(self.settings.get("lr_decay"))

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        plain = {name: value for name, value in self.settings.items() if value is not None}
        return {"class": self.title, "settings": plain, "step": self.step, "stored": self.stored}


@dataclass(frozen=True, slots=True)
class EpsilonEffect:
    """What the place of epsilon changes: the frameworks add it at different points of the update.

    The other updates are judged without this difference; `worst` is the largest one with it.
    """

    text: str
    fix: str | None
    worst: TensorUpdate

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"text": self.text, "fix": self.fix, "worst": self.worst.document()}


@dataclass(frozen=True, slots=True)
class ModelTraining:
    """Both models after equal training steps: per pair of tensors the first update and all of them.

    `hidden` means that settings or state differ, which these updates do not show; `cause` names it.
    """

    loss: str
    steps: int
    optimizers: tuple[OptimizerState, OptimizerState]
    updates: tuple[TensorUpdate, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    epsilon: EpsilonEffect | None = None
    cause: Cause | None = None
    hidden: bool = False
    missing: tuple[str, ...] = MISSING
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Whether every trained tensor has a counterpart that moved alike, and settings and state agree."""
        placed = self.epsilon is None or self.epsilon.worst.within
        alone = self.only_a or self.only_b or self.hidden
        return placed and not alone and all(update.within for update in self.updates)

    @property
    def worst(self) -> TensorUpdate | None:
        """The update that differs most, None if all agree."""
        wrong = [update for update in self.updates if not update.within]
        if not wrong and self.epsilon is not None and not self.epsilon.worst.within:
            return self.epsilon.worst
        return max(wrong, key=lambda update: update.relative, default=None)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        cause = self.cause
        return {
            "loss": self.loss,
            "steps": self.steps,
            "bounds": dict(BOUNDS),
            "optimizers": [optimizer.document() for optimizer in self.optimizers],
            "updates": [update.document() for update in self.updates],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "epsilon": None if self.epsilon is None else self.epsilon.document(),
            "cause": None if cause is None else cause.text,
            "confirmed": cause is not None and cause.confirmed,
            "fix": None if cause is None else cause.fix,
            "missing": list(self.missing),
            "within": self.within,
        }


_Arrays = dict[str, np.ndarray]
# Gradients of A and B, and their updates by step.
_Both = tuple[_Arrays, _Arrays]
_Updates = tuple[dict[int, _Arrays], dict[int, _Arrays]]


class _TrainedModel:
    """One side: its process, its optimizer, and the names of its trained tensors."""

    def __init__(
        self, process: ModelClient, framework: str, loss: str | None, chosen: str | None = None
    ) -> None:
        self.process, self.framework, self._loss, self._chosen = process, framework, loss, chosen
        self.word, self.path = process.side.word, process.side.path
        self.optimizer: OptimizerState | None = None
        self.tensors: list[str] = []
        self.outputs: list[str] = []
        self.assumed: list[str] = []
        self.notes: list[str] = []

    def restore(self) -> bool:
        """Restore the file's optimizer by the framework's own loader; return whether there is one."""
        file = os.path.abspath(self.path)
        _require_plain(self.process.ask.optimizer_config(file=file)["config"], self.path)
        text = self._prepare(self.process.ask.optimizer(file=file, spec=None, chosen=self._chosen))
        other = text or self.framework == "torch"
        described = None if other else describe_keras_optimizer(self.path, self._chosen)
        if described is not None:
            self.assumed += described[1]
            text = self._prepare(
                self.process.ask.optimizer(file=file, spec=described[0], chosen=self._chosen)
            )
        return text

    def create(self, cls: str, settings: Mapping[str, Any]) -> None:
        """Create an optimizer without state."""
        created = {"class": cls, "settings": dict(settings)}
        self._prepare(self.process.ask.optimizer(create=created))

    def _prepare(self, answer: Mapping[str, Any]) -> bool:
        self.tensors = list(answer["tensors"])
        self.assumed += [note for note in answer["assumed"] if note not in self.assumed]
        self.notes += [note for note in answer["notes"] if note not in self.notes]
        if answer["optimizer"] is not None:
            self.optimizer = OptimizerState(**answer["optimizer"])
        return bool(answer["found"])

    @property
    def loss(self) -> str:
        """The name of the loss."""
        return self._loss or "quadratic"

    @property
    def state(self) -> OptimizerState:
        """The optimizer after `restore` or `create`."""
        assert self.optimizer is not None  # noqa: S101 - one of them has run
        return self.optimizer

    def weights(self) -> _Arrays:
        """Return the trained tensors."""
        return self._read("trained")

    def _read(self, stem: str) -> _Arrays:
        return {name: self.process.read(f"{stem}-{index}.npy") for index, name in enumerate(self.tensors)}

    def slots(self) -> dict[str, _Arrays]:
        """Return the optimizer's state by kind and tensor."""
        slots = self.process.ask.slots()["slots"]
        return {
            kind: {self.tensors[at]: self.process.read(f"slot-{kind}-{at}.npy") for at in places}
            for kind, places in slots.items()
        }

    def give(self, outputs: Sequence[str], targets: Sequence[np.ndarray]) -> None:
        """Write the targets of the loss."""
        self.outputs = list(outputs)
        for index, target in enumerate(targets):
            self.process.write(f"target-{index}.npy", target)

    def gradients(self) -> _Arrays:
        """Return the gradients before the first update of the last run."""
        return self._read("gradient")

    def train(
        self, dtype: str, steps: Sequence[int], changes: Mapping[str, Any], corrected: bool | None = None
    ) -> dict[int, _Arrays]:
        """Return the updates after the given steps, with other settings or another place of epsilon."""
        answer = self.process.ask.train(
            names=self.process.names,
            outputs=self.outputs,
            exact=dtype == "float64",
            loss=self._loss,
            steps=list(steps),
            changes=dict(changes),
            corrected=corrected,
        )
        if not answer["finite"] and not changes and self.word == "A":
            raise UsageError(
                "the loss of A becomes infinite in training, so that updates cannot be compared",
                hint="use fewer --steps, or your own loss: --loss MODULE:FUNCTION",
            )
        return {step: self._read(f"update-{step}") for step in steps}


def compare_training(
    processes: Sequence[ModelClient],
    frameworks: Sequence[str],
    targets: Sequence[OutputTarget],
    options: TrainingOptions,
) -> ModelTraining:
    """Train both models with the optimizers of their checkpoints, and compare the updates.

    Args:
        processes: both sides, with the same inputs.
        frameworks: that of each side's model, "agent" for a recognised agent.
        targets: the outputs that the quadratic loss uses.
        options: steps, losses and optimizers.
    """
    rows = zip(
        processes,
        frameworks,
        (options.loss_a, options.loss_b),
        (options.optimizer_a, options.optimizer_b),
        strict=True,
    )
    a, b = (_TrainedModel(*row) for row in rows)
    for model in (a, b):
        if model.framework == "agent":
            raise UsageError(
                f"{model.word} is an agent, which training steps compare with another agent only",
                file=model.path,
            )
    comparison = _TrainingComparison(a, b, options.steps)
    comparison.prepare(targets)
    return comparison.run()


def _make_targets(outputs: Sequence[OutputTarget]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return seeded targets for both sides: normal, as large as A's outputs."""
    generator = np.random.default_rng(1)
    a, b = [], []
    for output in outputs:
        size = float(np.sqrt(np.mean(np.square(output.values.astype(np.float64))))) or 1.0
        drawn = (size * generator.standard_normal(output.values.shape)).astype(np.float32)
        a.append(drawn)
        b.append(output.to_b(drawn))
    return a, b


def _require_plain(config: object, file: str) -> None:
    """Raise UnsupportedError unless a configuration of Keras names only what computes."""
    audit = audit_document(config, file)
    if audit:
        raise UnsupportedError(
            "the model's optimizer is not one of Keras's own",
            file=file,
            found=abbreviate_list([reference.name for reference in audit], 3),
        )


@dataclass(slots=True)
class _TrainingComparison:
    """Trains two models in every float type that both have."""

    a: _TrainedModel
    b: _TrainedModel
    steps: int
    pairs: TensorPairs = field(default_factory=lambda: TensorPairs((), (), ()))
    assumed: list[str] = field(default_factory=lambda: [_EVALUATION])
    notes: list[str] = field(default_factory=list)
    rounded: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)
    corrected: bool | None = None

    def prepare(self, outputs: Sequence[OutputTarget]) -> None:
        """Restore the optimizers, pair the tensors and write the targets."""
        self._complete([model.restore() for model in (self.a, self.b)])
        for model in (self.a, self.b):
            if not model.tensors:
                raise UsageError(f"{model.word} has no trained tensors", file=model.path)
        self.pairs = TensorMatcher(self.a.weights(), self.b.weights()).match()
        if self.pairs.by_order:
            named = abbreviate_list(list(self.pairs.by_order), 3)
            self.assumed.append(f"tensors with equal values are paired by order: {named}")
        targets = _make_targets(outputs)
        self.a.give([output.a for output in outputs], targets[0])
        self.b.give([output.b for output in outputs], targets[1])
        for model in (self.a, self.b):
            self.assumed += [f"{model.word}: {note}" for note in model.assumed]
            self.notes += [f"{model.word}: {note}" for note in model.notes]
        a, b = self.a.state, self.b.state
        self.rounded = _rounded_settings(a, b)
        if a.corrected != b.corrected and a.family == b.family and a.settings.get("epsilon"):
            if a.family == "Adam":
                self.corrected = a.corrected
            elif _epsilon_clause(a.family) and is_equal(a.settings["epsilon"], b.settings["epsilon"]):
                self.tiny = {"epsilon": _TINY}

    def _complete(self, has_optimizer: Sequence[bool]) -> None:
        """Create the optimizer of a side whose file contains none."""
        if not any(has_optimizer):
            cls, settings = _DEFAULT
            for model in (self.a, self.b):
                model.create(cls, settings)
            self.assumed.append("neither file contains an optimizer: both train with SGD, learning rate 0.01")
            return
        for model, other, own in ((self.a, self.b, has_optimizer[0]), (self.b, self.a, has_optimizer[1])):
            if not own:
                model.create(*_translated(other.state, model.framework))
                self.assumed.append(
                    f"{model.word} contains no optimizer: it starts with a new {other.state.title} that has "
                    f"{other.word}'s settings"
                )

    def run(self) -> ModelTraining:
        """Train both sides and return the comparison."""
        steps = sorted({1, self.steps})
        both = self.a.process.exact and self.b.process.exact
        rows: list[TensorUpdate] = []
        gradients: dict[str, _Both] = {}
        reference = self.a.train("float64", steps, self.tiny) if self.a.process.exact and not both else None
        for dtype in ("float64", "float32") if both else ("float32",):
            changes = {**(self.rounded if dtype == "float64" else {}), **self.tiny}
            updates = (
                self.a.train(dtype, steps, changes),
                self.b.train(dtype, steps, changes, self.corrected),
            )
            gradients[dtype] = self._gradients()
            noise = _noise(self.pairs.pairs, gradients[dtype], _NOISE[dtype])
            for step in steps:
                errors = self._own_errors(updates[0][step], None if reference is None else reference[step])
                rows += self._compare(dtype, step, updates, noise, errors)
            reference = updates[0] if dtype == "float64" else reference
        unmoved = [pair.title for pair in self.pairs.pairs if not _moves(pair, updates, self.steps)]
        effect = self._epsilon_effect(steps, rows, noise)
        rows.sort(key=lambda row: (row.within, -row.relative))
        self._note_rounding(rows)
        wrong = [row for row in rows if not row.within]
        agree = not (wrong or self.pairs.only_a or self.pairs.only_b)
        if agree:
            cause = self._hidden_cause(still=len(unmoved) == len(self.pairs.pairs))
        else:
            cause = self._find_cause(wrong, gradients)
        hidden = agree and cause is not None
        if effect is not None and cause is None and not effect.worst.within:
            cause = Cause(effect.text, effect.fix, confirmed=agree)
        if unmoved:
            named = abbreviate_list(unmoved, 4)
            self.notes.append(f"neither side moves {named}: only the optimizer's state is compared")
        return ModelTraining(
            self.a.loss,
            self.steps,
            (self.a.state, self.b.state),
            tuple(rows),
            self.pairs.only_a,
            self.pairs.only_b,
            effect,
            cause,
            hidden,
            (*MISSING, *(cause.text for cause in self._lone_settings())),
            tuple(self.assumed),
            tuple(self.notes),
        )

    def _gradients(self) -> _Both:
        """Return both gradients before the first update; raise UsageError if all are zero."""
        gradients = self.a.gradients(), self.b.gradients()
        if not any(gradient.any() for side in gradients for gradient in side.values()):
            raise UsageError(
                "the gradients of all weights are 0 in A and B, so that their training steps show nothing",
                hint="use other inputs (--inputs FILE.npz) or your own loss (--loss MODULE:FUNCTION)",
            )
        return gradients

    def _own_errors(self, update: _Arrays, reference: _Arrays | None) -> list[float | None]:
        """Return A's own rounding error of each pair, None without a reference in float64."""
        return [
            None if reference is None else relative_distance(pair.of_a(reference), pair.of_a(update))
            for pair in self.pairs.pairs
        ]

    def _compare(
        self, dtype: str, step: int, updates: _Updates, noise: frozenset[int], errors: Sequence[float | None]
    ) -> Iterator[TensorUpdate]:
        """Yield how differently the pairs moved; rounding grows, and spreads between the tensors."""
        judged = [own for index, own in enumerate(errors) if own is not None and index not in noise]
        both = self.a.process.exact and self.b.process.exact
        most = _MOST_ROUNDING if both else _ROUNDING_ALONE
        allowed = max(BOUNDS[dtype], min(OWN_ERROR * max(judged, default=0.0), most))
        for index, (pair, own) in enumerate(zip(self.pairs.pairs, errors, strict=True)):
            relative = relative_distance(pair.of_a(updates[0][step]), pair.of_b(updates[1][step]))
            rounding = relative > allowed and index in noise
            within = relative <= allowed or rounding
            yield TensorUpdate(pair.title, pair.b, dtype, step, relative, own, within, rounding)

    def _epsilon_effect(
        self, steps: Sequence[int], strict: Sequence[TensorUpdate], noise: frozenset[int]
    ) -> EpsilonEffect | None:
        """Train with epsilon where each framework adds it; return the largest difference.

        The run is in float64 if there is one. Otherwise rounding is part of the difference, and what it was
        with equal places is allowed as well.
        """
        if (self.corrected is None and not self.tiny) or not strict:
            return None
        dtype = strict[0].dtype
        changes = self.rounded if dtype == "float64" else {}
        updates = self.a.train(dtype, steps, changes), self.b.train(dtype, steps, changes)
        before = {(row.a, row.b, row.step): row.relative for row in strict if row.dtype == dtype}
        rows = []
        for step in steps:
            for row in self._compare(dtype, step, updates, noise, [None] * len(self.pairs.pairs)):
                own = 0.0 if dtype == "float64" else OWN_ERROR * before[row.a, row.b, row.step]
                fine = row.relative <= max(BOUNDS["float32"], own)
                rows.append(replace(row, within=fine or row.rounding, rounding=row.rounding and not fine))
        a = self.a.state
        text = f"epsilon, {a.settings['epsilon']:g}: {_epsilon_clause(a.family)}"
        fix = None if a.corrected else _FIXES.get(a.family)
        return EpsilonEffect(text, fix, max(rows, key=lambda row: (not row.within, row.relative)))

    def _hidden_cause(self, *, still: bool) -> Cause | None:
        """Return a difference of settings or state that equal updates do not show.

        Raise UsageError if there is none and no weight moves.
        """
        causes = itertools.chain(self._different_settings(), self._different_counts())
        cause = next((cause for cause, _ in causes), None) or self._state_cause()
        if cause is not None:
            return replace(cause, confirmed=True)
        if still:
            raise UsageError(
                "no weight of A or B moves, so that their training steps show nothing",
                found=f"learning rate {self.a.state.settings.get('learning_rate')}",
                hint="compare checkpoints from before the learning rate reached 0",
            )
        return None

    def _note_rounding(self, rows: Sequence[TensorUpdate]) -> None:
        names = list(dict.fromkeys(row.a for row in rows if row.rounding))
        if names:
            self.notes.append(
                f"the loss does not depend on {abbreviate_list(names, 4)}: their gradients are rounding "
                "noise, their updates are not judged"
            )

    # Causes.

    def _find_cause(self, wrong: Sequence[TensorUpdate], gradients: Mapping[str, _Both]) -> Cause | None:
        """Return why updates differ: facts first, then settings of B replaced by those of A."""
        alone = (("A", self.pairs.only_a), ("B", self.pairs.only_b))
        if any(names for _, names in alone):
            texts = [
                f"only {word} trains {abbreviate_list(list(names), 3)}" for word, names in alone if names
            ]
            return Cause("; ".join(texts), confirmed=True)
        row = min(wrong, key=lambda pair: (pair.step, pair.dtype == "float32"))
        return (
            self._gradient_cause(gradients)
            or self._family_cause()
            or self._test_settings(row.dtype, row.step, wrong)
            or self._state_cause()
            or self._sum_cause(wrong)
        )

    def _gradient_cause(self, gradients: Mapping[str, _Both]) -> Cause | None:
        for dtype, (one, other) in gradients.items():
            noise = _noise(self.pairs.pairs, (one, other), _NOISE[dtype])
            judged = [pair for index, pair in enumerate(self.pairs.pairs) if index not in noise]
            errors = {pair.title: relative_distance(*_gradient_pair(pair, one, other)) for pair in judged}
            name = max(errors, key=errors.__getitem__, default=None)
            if name is not None and errors[name] > _GRADIENTS[dtype]:
                return Cause(
                    f"the gradients differ before the first update, by {errors[name]:.1e} for {name}: the "
                    "models or the losses compute something else",
                    confirmed=True,
                )
        return None

    def _family_cause(self) -> Cause | None:
        a, b = self.a.state, self.b.state
        if a.family != b.family:
            return Cause(f"the optimizer is {a.title} in A and {b.title} in B", confirmed=True)
        return None

    def _test_settings(self, dtype: str, step: int, wrong: Sequence[TensorUpdate]) -> Cause | None:
        """Return the differing setting whose value in A makes B's updates right."""
        candidates = list(self._candidates())
        tested = [(cause, change) for cause, change in candidates if change is not None]
        for cause, change in tested:
            if self._agrees(dtype, step, change, wrong):
                return replace(cause, confirmed=True)
        together = {name: value for _, change in tested for name, value in change.items()}
        if len(tested) > 1 and self._agrees(dtype, step, together, wrong):
            return Cause("; ".join(cause.text for cause, _ in tested), confirmed=True)
        return candidates[0][0] if candidates else None

    def _agrees(
        self, dtype: str, step: int, change: Mapping[str, Any], wrong: Sequence[TensorUpdate]
    ) -> bool:
        """Return whether B with changed settings makes A's updates."""
        own = {**(self.rounded if dtype == "float64" else {}), **self.tiny}
        a = self.a.train(dtype, [step], own)[step]
        b = self.b.train(dtype, [step], {**own, **change}, self.corrected)[step]
        known = {(row.a, row.b) for row in wrong if row.dtype == dtype and row.step == step}
        return all(
            relative_distance(pair.of_a(a), pair.of_b(b)) <= _NEAR * BOUNDS[dtype]
            for pair in self.pairs.pairs
            if (pair.title, pair.b) in known
        )

    def _candidates(self) -> Iterator[tuple[Cause, dict[str, Any] | None]]:
        """Yield possible causes with the change of B that tests each, None if none does."""
        a, b = self.a.state, self.b.state
        if a.stored != b.stored:
            word = "B" if a.stored else "A"
            lost = Cause(f"{word} contains no optimizer state: its training starts anew", confirmed=True)
            yield lost, None
        yield from self._different_counts()
        yield from self._different_settings()
        yield from ((cause, None) for cause in self._lone_settings())

    def _different_counts(self) -> Iterator[tuple[Cause, dict[str, Any] | None]]:
        """Yield the numbers in both states that differ, with the change of B that tests each."""
        a, b = self.a.state, self.b.state
        if not (a.stored and b.stored and a.counted and b.counted):
            return
        if a.step != b.step:
            text = f"the number of updates is {a.step} in A and {b.step} in B: the bias correction differs"
            yield Cause(text), {"step": a.step}
        for pair in self.pairs.pairs:
            one, other = a.counts.get(pair.a, {}), b.counts.get(pair.b, {})
            for kind in sorted(set(one) & set(other)):
                if kind == "step" and (one[kind], other[kind]) == (a.step, b.step):
                    continue
                if not is_equal(one[kind], other[kind]):
                    what = "the number of updates" if kind == "step" else kind
                    text = f"{what} of {pair.title} is {one[kind]:g} in A and {other[kind]:g} in B"
                    yield Cause(text, confirmed=True), None

    def _different_settings(self) -> Iterator[tuple[Cause, dict[str, Any] | None]]:
        """Yield the settings that differ, for all tensors or some, with the change of B that tests each."""
        a, b = self.a.state, self.b.state
        for name in sorted(set(a.settings) & set(b.settings)):
            if name == "nesterov" and not (a.settings.get("momentum") or b.settings.get("momentum")):
                continue  # without momentum it changes nothing
            values = [(a.own[pair.a].get(name), b.own[pair.b].get(name)) for pair in self.pairs.pairs]
            apart = [index for index, row in enumerate(values) if not is_equal(*row)]
            if not apart:
                continue
            one, other = values[apart[0]]
            if all(row == (one, other) for row in values):
                untested = one is None or (name in _WITH_STATE and not other)
                text = f"{name} is {one} in A and {other} in B"
                yield Cause(text, f"set {name}={one} in B"), None if untested else {name: one}
            else:
                title = self.pairs.pairs[apart[0]].title
                yield Cause(f"{name} of {title} is {one} in A and {other} in B"), None
        if any(settings.get("weight_decay") for settings in a.own.values()) and a.decoupled != b.decoupled:
            yield Cause("weight decay is decoupled from the gradient on one side only"), None

    def _lone_settings(self) -> Iterator[Cause]:
        """Yield the settings of one side that the other side's optimizer does not have."""
        a, b = self.a.state, self.b.state
        for word, other, own, lacking in (("A", "B", a, b), ("B", "A", b, a)):
            for name in sorted(set(own.settings) - set(lacking.settings)):
                if own.family == lacking.family and own.settings[name]:
                    yield Cause(
                        f"{name} is {own.settings[name]} in {word}; {other}'s {lacking.title} has none"
                    )

    def _state_cause(self) -> Cause | None:
        """Return which part of the optimizer's state differs."""
        one, other = self.a.slots(), self.b.slots()
        a, b = self.a.state, self.b.state
        unread = {"vhat"} if not (a.settings.get("amsgrad") or b.settings.get("amsgrad")) else set()
        for kind in [name for name in dict.fromkeys((*one, *other)) if name not in unread]:
            for pair in self.pairs.pairs:
                x, y = one.get(kind, {}).get(pair.a), other.get(kind, {}).get(pair.b)
                if pair.more is not None or not any(array is not None and array.any() for array in (x, y)):
                    continue
                if x is None or y is None:
                    word = "A" if y is None else "B"
                    return Cause(f"only {word} contains {kind} of {pair.title}", confirmed=True)
                error = relative_distance(pair.of_a({pair.a: x}), pair.of_b({pair.b: y}))
                if error > STATE_BOUND:
                    text = f"{kind}, a moment of the optimizer, differs for {pair.title} by {error:.1e}"
                    return Cause(text, confirmed=True)
        return None

    def _sum_cause(self, wrong: Sequence[TensorUpdate]) -> Cause | None:
        sums = {pair.title for pair in self.pairs.pairs if pair.more is not None}
        names = [row.a for row in wrong if row.a in sums]
        if not names:
            return None
        return Cause(
            f"A trains two biases ({names[0]}), B their sum: A's sum moves twice as fast", confirmed=True
        )


def _gradient_pair(pair: TensorPair, one: _Arrays, other: _Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return both gradients; two biases that are added have the gradient of their sum each."""
    return pair.part(one[pair.a]), pair.of_b(other)


def _epsilon_clause(cls: str) -> str:
    """Return where the frameworks add epsilon in a class of PyTorch, "" if in one place."""
    row = find_torch_row(cls)
    return "" if row is None else row.epsilon


def _rounded_settings(a: OptimizerState, b: OptimizerState) -> dict[str, Any]:
    """Return the settings that differ by float32's rounding only, as they were before.

    Keras stores the learning rate as a float32 variable.
    """
    rounded = {}
    for name in (set(a.settings) & set(b.settings)) - {"weight_decay"}:
        one, other = a.settings[name], b.settings[name]
        if isinstance(one, float) and isinstance(other, float) and one != other and is_equal(one, other):
            rounded[name] = one if float(np.float32(one)) != one else other
    return rounded


def _noise(pairs: Sequence[TensorPair], gradients: tuple[_Arrays, _Arrays], limit: float) -> frozenset[int]:
    """Return the places of pairs whose gradients are tiny on both sides, relative to the largest one."""
    sizes = [
        max(float(np.sqrt(np.mean(np.square(array)))) for array in _gradient_pair(pair, *gradients))
        for pair in pairs
    ]
    largest = max(sizes, default=0.0)
    return frozenset(index for index, size in enumerate(sizes) if size <= limit * largest)


def _moves(pair: TensorPair, updates: _Updates, step: int) -> bool:
    return bool(pair.of_a(updates[0][step]).any() or pair.of_b(updates[1][step]).any())


def _translated(state: OptimizerState, framework: str) -> tuple[str, dict[str, Any]]:
    """Return class and settings of an equal optimizer in another framework."""
    settings = dict(state.settings)
    if len({settings.get("weight_decay") for settings in state.own.values()}) > 1:
        del settings["weight_decay"]
    if framework == "torch":
        decoupled = state.family == "Adam" and state.decoupled and settings.get("weight_decay")
        return ("AdamW" if decoupled else state.family), settings
    if state.family not in KERAS_ARGUMENTS:
        raise UnsupportedError(f"Keras has no optimizer like {state.title}")
    names = ("learning_rate", *KERAS_ARGUMENTS[state.family])
    return state.family, {name: settings[name] for name in names if name in settings}


def describe_state(state: OptimizerState) -> str:
    """Return one optimizer as words: class, number of updates, origin."""
    origin = "from its file" if state.stored else "new"
    return f"{state.title}, {format_count(state.step, 'update')}, {origin}"


def describe_keras_optimizer(
    path: str, optimizer_name: str | None = None
) -> tuple[dict[str, Any], list[str]] | None:
    """Return how Keras creates the optimizer of a TensorFlow checkpoint or weights file, None if it has none.

    The first part is the request to the model's process, the second what had to be assumed. `optimizer_name`
    names one of several optimizers.
    """
    checkpoint = open_checkpoint(path)
    tree = checkpoint.tree
    known = optimizer_settings.sidecar_settings(read_any_sidecar(checkpoint).sidecar)
    settings = OptimizerSettings(known)
    rows = [(path, path_texts(path), KEEP) for path, leaf in tree.tensors() if leaf.role == "parameter"]
    states = KerasStates(tree, settings)
    states.root = states.is_root([source for source, _, _ in rows])
    bound, notes, _ = states.bind_states(rows)
    titles = [display(state.top) or OPTIMIZER for state in bound]
    if optimizer_name is not None or len(bound) > 1:
        bound = [bound[titles.index(str(choose_optimizer(path, titles, optimizer_name)))]]
    if not bound:
        if notes:
            raise UnsupportedError(f"the optimizer cannot be restored: {notes[0]}", file=path)
        return None
    (state,) = bound
    weights = [Move(source, states.canonical[source], KEEP) for source in state.weights]
    agent = canonical_tree(tree, MoveList((*weights, *state.moves.moves)))
    title = display(state.top) or OPTIMIZER
    stated = settings.of(state.name, title, OPTIMIZER)
    canonical = CanonicalOptimizer(state.name, agent, stated, state.moves.defaults)
    if canonical.momentum_unknown:
        raise UsageError(
            f"{title} has momentum, but no file records its value",
            hint=f"convert with --optimizer {title}/momentum=0.9, which records it beside the file",
        )
    arguments: dict[str, Any] = {}
    assumed = [state.moves.assumed] if state.moves.assumed else []
    for name in KERAS_ARGUMENTS[canonical.family.name]:
        exact = canonical.exact(name)
        value = canonical.value(name) if exact is None else exact
        if value is None or (name == "weight_decay" and not value):
            continue
        # Keras refuses integers.
        arguments[name] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if name in canonical.defaults and not canonical.has(name) and not isinstance(value, bool):
            assumed.append(canonical.assumed(name))
    return {"name": title, "class": canonical.family.name, "arguments": arguments}, assumed
