"""Optimizer state as PyTorch, Keras and TensorFlow store it, bound to the canonical optimizer."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckpttool.core import deferred, dtypes, optimizers
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, DeadlineError, UnsupportedError, abbreviate_list
from ckpttool.core.optimizers import (
    ADAGRAD,
    ADAM,
    ADAMAX,
    BUFFER,
    FAMILIES,
    SGD,
    VELOCITY,
    DefaultSetting,
    list_slots,
)
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display
from ckpttool.libraries import schema
from ckpttool.libraries.optimizer_entries import ITERATIONS, KERAS_SETTINGS, POWERS, WITHOUT
from ckpttool.mapping.layer_kinds import Name
from ckpttool.mapping.rules import KEEP, FixedValue, Move, Rule, ToTensor, ToValue

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """The data that an optimizer's binder may read.

    `name` is canonical; `prefix` the segments before its state; `weights` its network's tensors in file
    order, each with its canonical path and its rule.
    """

    name: str
    prefix: tuple[str, ...]
    tree: Tree
    weights: tuple[tuple[Path, Path, Rule], ...]

    @property
    def own(self) -> dict[Name, Path]:
        """The optimizer's own leaves by their names within it, in file order."""
        if not self.prefix:
            return {tuple(name.split("/")): path for path, name in self.tree.names.items()}
        start = "/".join(self.prefix)
        below, cut = f"{start}/", len(self.prefix)
        return {
            tuple(name.split("/"))[cut:]: path
            for path, name in self.tree.names.items()
            if name.startswith(below) or name == start
        }


@dataclass(frozen=True, slots=True)
class OptimizerMoves:
    """An optimizer's moves, the leaves that only repeat others, and each slot's parameter.

    `defaults` are settings of its library if they differ from Keras's; `assumed` is a sentence on a class
    that the checkpoint does not name.
    """

    moves: tuple[Move, ...]
    consumed: frozenset[Path] = frozenset()
    of: Mapping[Path, Path] | None = None
    note: str = ""
    defaults: Mapping[str, DefaultSetting] = field(default_factory=dict)
    assumed: str = ""


def make_unconverted_note(name: str, cls: str) -> str:
    """Return the note that the state of optimizer `name`, of class `cls`, is not converted."""
    why = optimizers.UNCONVERTED.get(cls.lower())
    reason = f": {why}" if why else ""
    return f"{name} is {cls}, whose state is not converted{reason}; {WITHOUT}"


# The defaults of tensorflow/python/training/adam.py, and common values from "Attention Is All You Need" and
# DCGAN.
BETAS = ((0.9, 0.999), (0.9, 0.98), (0.5, 0.999))
_TAIL = deferred.compile(
    rf"(?:.*/)?({'|'.join(family.tf1 for family in FAMILIES if family.tf1)})(?:_\d+)?", re.DOTALL
)
_NUMBERED = deferred.compile(r"beta1_power(_\d+)?")


def _tf1_class(leaf: Leaf | ValueLeaf) -> str | None:
    """Return the class of TensorFlow 1 after which the slot is named."""
    match = _TAIL.fullmatch(leaf.name or leaf.key) if isinstance(leaf, Leaf) else None
    return match[1] if match else None


def _find_family_by_kinds(slots: Iterable[Path], tree: Tree) -> optimizers.OptimizerFamily | None:
    """Return the optimizer with these kinds of slots; None if there are none.

    Sources: tensorflow/python/training/{adam,rmsprop,momentum,adagrad,slot_creator}.py. RMSProp's mean of
    squares starts at one there, and it always has a momentum slot.
    """
    kinds = {leaf.slot for path in slots if isinstance(leaf := tree[path], Leaf)}
    ftrl = any(leaf.slot == "linear" for _, leaf in tree.tensors())
    for family in FAMILIES if kinds else ():
        sure = {family.keras_slots[slot].keras for slot in family.always}
        able = {spec.keras for spec in family.specs}
        # Ftrl also has an accumulator.
        if sure <= kinds <= able and not (ftrl and family is ADAGRAD):
            return family
    return ADAM if kinds else None


def _find_beta_powers(
    optimizer: StoredOptimizer, mine: Mapping[Name, Path], slots: Mapping[Path, Path]
) -> dict[str, Path]:
    """Return the powers of the optimizer's betas: its own, or those without a scope if it has none."""
    own = {name[0]: path for name, path in mine.items() if len(name) == 1 and name[0] in POWERS}
    below = any(slots[path] == path[: len(slots[path])] for path in slots)
    pairs = [] if own or not below else list(_pair_unscoped_powers(optimizer.tree))
    # TensorFlow numbers several optimizers' powers without recording which optimizer they belong to.
    if not pairs or len({infer_step_count(optimizer.tree, pair) for pair in pairs}) > 1:
        return own
    known = list(schema.OPTIMIZERS)
    number = known.index(optimizer.name) if optimizer.name in known else 0
    return dict(zip(POWERS, pairs[min(number, len(pairs) - 1)], strict=True))


def _pair_unscoped_powers(tree: Tree) -> Iterator[tuple[Path, Path]]:
    by_name = {name: path for path, name in tree.names.items()}
    for name, path in by_name.items():
        match = _NUMBERED.fullmatch(name)
        other = by_name.get(f"{POWERS[1]}{match[1] or ''}") if match else None
        if other is not None:
            yield path, other


def _move_step_count(optimizer: StoredOptimizer, paths: Mapping[str, Path]) -> tuple[Move, ...]:
    """Return the moves of the update count computed from the beta powers, and of the betas."""
    pair = tuple(paths[power] for power in POWERS if power in paths)
    inferred = infer_step_count(optimizer.tree, pair)
    if inferred is None:
        return ()
    steps, betas = inferred
    values = ((pair[0], "step", steps), (pair[0], "beta_1", betas[0]), (pair[1], "beta_2", betas[1]))
    return tuple(
        Move(path, schema.canonical_setting_path(optimizer.name, name), FixedValue(value))
        for path, name, value in values
    )


def infer_step_count(tree: Tree, pair: Sequence[Path]) -> tuple[int, tuple[float, float]] | None:
    """Return the update count implied by two powers of common betas, and the betas; None otherwise.

    The two scalars are read; if one cannot be read, this returns None and its own reader raises the
    error.
    """
    from ckpttool.formats.tf_common import count_adam_steps

    try:
        values = [ToValue().leaf(tree[path]) for path in pair]
    except DeadlineError:
        raise
    except CkpttoolError:
        return None
    numbers_stored = [value.value for value in values if isinstance(value, ValueLeaf)]
    numbers = [float(value) for value in numbers_stored if isinstance(value, int | float)]
    for betas in BETAS if len(numbers) == len(POWERS) else ():
        steps = count_adam_steps(numbers[0], numbers[1], *betas)
        if steps is not None:
            return steps, betas
    return None


def from_keras(optimizer: StoredOptimizer) -> OptimizerMoves:
    """Bind a Keras optimizer: the format has paired each slot with its variable where the file allows it.

    Keras 2.11 to 2.15 keeps no list of the variables: there the i-th moment belongs to the i-th weight
    of the optimizer's network, and the weight's name within the moment's must confirm it. Slots of
    TensorFlow 1 may be stored under their variables.
    """
    mine, tree = optimizer.own, optimizer.tree
    kind = _stored_class(tree, mine)
    if kind in optimizers.UNCONVERTED:
        return OptimizerMoves((), note=make_unconverted_note(optimizer.name, str(kind)))
    weights: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        weights.setdefault(source, []).append((target, rule))
    own = {name[0]: path for name, path in mine.items() if len(name) == 1 and name[0] in KERAS_SETTINGS}
    counted = not ITERATIONS.isdisjoint(own)
    slots = dict(_pair_slots(optimizer, mine, weights))
    family = optimizers.find_class(kind) or _find_family_by_kinds(slots, tree) or ADAM
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    for path, owner in slots.items():
        slot = _find_canonical_slot(tree[path], family, counted=counted)
        if slot is not None:
            moves += [
                Move(path, schema.canonical_slot_path(optimizer.name, slot, target), rule)
                for target, rule in weights[owner]
            ]
            of[path] = owner
    moves += [
        Move(path, schema.canonical_setting_path(optimizer.name, KERAS_SETTINGS[name]), KEEP)
        for name, path in own.items()
        if isinstance(tree[path], Leaf)
    ]
    powers = _find_beta_powers(optimizer, mine, slots) if family is ADAM else {}
    # Entries that TensorFlow 1 computes from the update count contain no further information.
    moves += () if counted else _move_step_count(optimizer, powers)
    stepped = any(move.target == schema.canonical_setting_path(optimizer.name, "step") for move in moves)
    consumed = set(powers.values() if stepped else ())
    for path in mine.values() if family is ADAM else ():
        # Zeros that Keras 2 stores as maxima of an Adam without amsgrad (formats/keras_tree.py).
        leaf, node = tree[path], tree.containers.get(path[:1])
        off = node is not None and isinstance(node.state, dict) and node.state.get("amsgrad") is False
        if off and isinstance(leaf, Leaf) and (leaf.role, leaf.shape) == ("other", (1,)):
            consumed.add(path)
    named = any(_tf1_class(tree[path]) for path in slots)
    guessed = optimizers.SAME_SLOTS.get(family.name) if kind is None and of and not named else None
    assumed = (
        f"{optimizer.name} is {family.name}, by its slots: the checkpoint does not name its class, and "
        f"{guessed} the same slots"
    )
    return OptimizerMoves(
        tuple(moves),
        frozenset(consumed),
        of,
        defaults=family.tf1_defaults if named and not counted else {},
        assumed=assumed if guessed else "",
    )


def _is_class(name: str | None) -> bool:
    return name in optimizers.UNCONVERTED or optimizers.find_class(name) is not None


def _stored_class(tree: Tree, mine: Mapping[Name, Path]) -> str | None:
    """Return the class in lower case: by the configuration, a variable of that class only, or a name."""
    own = {name[0]: path for name, path in mine.items() if len(name) == 1}
    for path in own.values():
        node = tree.containers.get(path[:-1])
        if node is not None and node.kind == "module" and node.name and _is_class(node.name.lower()):
            return node.name.lower()
    only = (optimizers.OWN_VARIABLES[name] for name in own if name in optimizers.OWN_VARIABLES)
    return next(only, None) or keras_class(tree[path] for path in mine.values())


def keras_class(leaves: Iterable[Leaf | ValueLeaf]) -> str | None:
    """Return an optimizer's class in lower case, None if none of its variables is named after one.

    Keras 3 names all variables after it (`adam_1/iteration`), 2.11 to 2.15 only the slots
    (`AdamW/m/dense/kernel`).
    """
    named = [leaf for leaf in leaves if isinstance(leaf, Leaf) and leaf.name]
    named.sort(key=lambda leaf: leaf.role != "counter")
    firsts = (str(leaf.name).split("/")[0].lower() for leaf in named)
    names = (re.sub(r"_\d+$", "", first).replace("_", "") for first in firsts)
    return next(filter(_is_class, names), None)


def _pair_slots(
    optimizer: StoredOptimizer, mine: Mapping[Name, Path], weights: Mapping[Path, object]
) -> Iterator[tuple[Path, Path]]:
    """Yield the slots with the weights that they belong to."""
    kinds = optimizers.list_keras_kinds()
    for path in mine.values():
        leaf = optimizer.tree[path]
        if isinstance(leaf, Leaf) and leaf.role == "slot" and leaf.slot in kinds:
            if "ProximalAdagrad" in (leaf.name or leaf.key):
                continue  # tf.train.ProximalAdagradOptimizer is not Adagrad
            owner = leaf.of if leaf.of is not None else _match_by_order(path, leaf, optimizer)
            if owner is not None and owner in weights:
                yield path, owner
    # Slots stored under their own variables, `actor/l1/kernel/Adam`.
    for path, leaf in optimizer.tree.tensors():
        owner = leaf.of
        below = owner is not None and owner in weights and path[: len(owner)] == owner
        if leaf.role == "slot" and owner is not None and below and _tf1_class(leaf):
            yield path, owner


def _find_canonical_slot(
    leaf: Leaf | ValueLeaf, family: optimizers.OptimizerFamily, *, counted: bool
) -> str | None:
    kind = leaf.slot if isinstance(leaf, Leaf) else None
    if family is ADAMAX and kind == "v":
        kind = "u"  # the name of the maximum in tf_keras/src/optimizers/legacy/adamax.py
    canonical = next((target for target, spec in family.keras_slots.items() if spec.keras == kind), None)
    # Keras counts updates in every optimizer; in TensorFlow 1 and Sonnet, momentum has no count.
    if canonical == VELOCITY and family is SGD and (not counted or _tf1_class(leaf) == SGD.tf1):
        return BUFFER
    return canonical


def _match_by_order(path: Path, slot: Leaf, optimizer: StoredOptimizer) -> Path | None:
    number = path[-1].value
    owners = tuple(dict.fromkeys(source for source, _, _ in optimizer.weights))
    if not isinstance(number, int) or not 0 <= number < len(owners):
        return None
    named = [
        owner
        for owner in owners
        if isinstance(weight := optimizer.tree[owner], Leaf)
        and weight.name
        and weight.shape == slot.shape
        and f"/{slot.name}".endswith(f"/{weight.name}")
    ]
    # If the program passed its variables in another order, only the names identify them.
    return owners[number] if owners[number] in named else named[0] if len(named) == 1 else None


Setting = float | bool | str | None
# Entries that identify weights, and are not settings.
PLACES = (schema.GROUP, schema.NUMBER, schema.NAMES)


class CanonicalOptimizer:
    """The settings of the canonical optimizer `name` of `agent`, each for all weights or for one.

    `told` are the settings from a sidecar or the command line, by name, or by name and weight
    (`weight_decay/q1/0/kernel`); the agent's own settings take precedence over them, `defaults` come
    last.
    """

    def __init__(
        self, name: str, agent: Tree, settings: Mapping[str, Setting], defaults: Mapping[str, DefaultSetting]
    ) -> None:
        """Collect the optimizer's settings and slots from the agent."""
        self.name, self.agent, self.stated = name, agent, settings
        self._values: dict[Path, Setting] = {}
        own = [path for path in agent if path[0] == attr(name) and len(path) > 1]
        slots = list_slots()
        self.slots = frozenset(str(path[1].value) for path in own if len(path) > 2 and path[1].value in slots)
        names = [str(path[1].value) for path in own if path[1].value not in slots]
        self.settings = tuple(dict.fromkeys((*names, *(setting.partition("/")[0] for setting in settings))))
        # The class after which the agent's variables are named.
        cls = keras_class(leaf for path, leaf in agent.items() if path[0] == attr(name))
        by_slots, by_class = optimizers.find_family(self.slots), optimizers.find_class(cls)
        self.family = by_slots or by_class or optimizers.find_by_settings(self.settings)
        inferred = optimizers.ADAMW_DEFAULTS if cls == optimizers.ADAMW else {}
        self.defaults = {**self.family.defaults, **inferred, **defaults}
        self.certain = self.family.flags(self.slots)

    def source(self, setting: str, weight: Path | None = None) -> Path | None:
        """Return where the agent stores a setting: the weight's own path, or the common one."""
        own = schema.canonical_slot_path(self.name, setting, weight) if weight is not None else None
        shared = schema.canonical_setting_path(self.name, setting)
        return next((path for path in (own, shared) if path is not None and path in self.agent), None)

    def has(self, setting: str, weight: Path | None = None) -> bool:
        """Return whether a setting is given: by the agent, a sidecar or the command line."""
        return self.source(setting, weight) is not None or self._stated(setting, weight) is not None

    def value(self, setting: str, weight: Path | None = None) -> Setting:
        """Return a setting, or its default if it is not given; this may read a scalar."""
        source = self.source(setting, weight)
        if source is not None:
            return self._read(source)
        recorded = self._stated(setting, weight)
        if recorded is not None:
            return self.stated[recorded]
        if self.certain.get(setting):
            return True
        default = self.defaults.get(setting)
        return default.value if default is not None else None

    def exact(self, setting: str, weight: Path | None = None) -> float | bool | None:
        """Return the given setting even if the agent has one: it may be the number before rounding."""
        recorded = self._stated(setting, weight)
        value = self.stated[recorded] if recorded is not None else None
        return value if isinstance(value, int | float) else None

    def number(self, setting: str, weight: Path | None = None) -> float | None:
        """Return a numeric setting, None if it is not a number."""
        value = self.value(setting, weight)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def common_number(self, setting: str, weights: Iterable[Path], file: str) -> float:
        """Return a setting that all weights share; the stated value if that was rounded when stored.

        Raise UnsupportedError if the weights have several.
        """
        import numpy as np

        values = {self.number(setting, weight) for weight in weights}
        if len(values) > 1:
            raise UnsupportedError(
                f"{self.name} has a different {setting} for each group of weights", file=file
            )
        value, exact = values.pop() or 0.0, self.exact(setting)
        return exact if exact is not None and float(np.float32(exact)) == value else value

    def decays(self, weights: Iterable[Path], file: str) -> tuple[list[float], bool]:
        """Return the weight decay of each weight, and whether it is decoupled: then they must be equal."""
        decays = [self.number("weight_decay", weight) or 0.0 for weight in weights]
        apart = self.family.name == "Adam" and bool(self.value("decoupled_weight_decay"))
        if apart and len(set(decays)) > 1:
            raise UnsupportedError(
                f"{self.name} has decoupled weight decays that differ between its weights", file=file
            )
        return decays, apart

    def slot_arrays(
        self, slot: str, weights: Iterable[Path], file: str, factor: float = 1.0
    ) -> tuple[np.ndarray, ...]:
        """Return a slot for every weight, in float64; that of a new optimizer if there is none."""
        import numpy as np

        start = 0.0 if self.family.zeros else self.number("initial_accumulator_value") or 0.0
        arrays = []
        for weight in weights:
            leaf, owner = (
                self.agent.get(schema.canonical_slot_path(self.name, slot, weight)),
                self.agent[weight],
            )
            shape = owner.shape if isinstance(owner, Leaf) else ()
            if isinstance(leaf, Leaf) and leaf.shape != shape:
                raise UnsupportedError(
                    f"{self.name} has state whose shape differs from its weights",
                    file=file,
                    found=str(leaf.shape),
                )
            array = leaf.array().astype(np.float64) if isinstance(leaf, Leaf) else np.full(shape, start)
            arrays.append(array * factor)
        return tuple(arrays)

    def assumed(self, setting: str) -> str:
        """Return the sentence that a default was used."""
        default = self.defaults[setting]
        sentence = f"{self.name} {setting} = {default.value} (default of {default.library}; "
        return f"{sentence}the checkpoint does not hold it)"

    def flat(self) -> Iterator[tuple[str, Path]]:
        """Yield the agent's settings by their sidecar names, without step and slots."""
        for path in self.agent:
            name = str(path[1].value) if path[0] == attr(self.name) and len(path) > 1 else "step"
            if name != "step" and name not in list_slots():
                yield display(path[1:]), path

    @property
    def momentum_unknown(self) -> bool:
        """Return whether there are gradient sums whose momentum is unknown."""
        if not self.slots & {BUFFER, VELOCITY} or self.has("momentum"):
            return False
        default = self.defaults.get("momentum")
        return self.family is SGD or default is None or default.library == "Keras"

    def idle(self, weight: Path | None = None) -> bool:
        """Return whether the gradient sums are known to be unused, because there is no momentum."""
        return not self.momentum_unknown and not self.number("momentum", weight)

    def _read(self, source: Path) -> Setting:
        if source not in self._values:
            leaf = ToValue().leaf(self.agent[source])
            value = leaf.value if isinstance(leaf, ValueLeaf) else None
            self._values[source] = value if isinstance(value, int | float | str) else None
        return self._values[source]

    def _stated(self, setting: str, weight: Path | None) -> str | None:
        own = (
            f"{setting}/{display(schema.get_optimizer_key(self.name, weight))}" if weight is not None else ""
        )
        return next((name for name in (own, setting) if name in self.stated), None)


def is_state(setting: str) -> bool:
    """Return whether a setting is an entry of torch's `state` without a tensor."""
    return setting in optimizers.list_torch_slots()


Shape = tuple[int, ...]
_Item = TypeVar("_Item")
_Part = TypeVar("_Part")
# Limit on the positions in several chains that are searched at once; networks with hundreds of layers in two
# groups need far fewer.
_MOST_STATES = 20_000


class ParameterGroup(NamedTuple):
    """One group: its settings by torch's names (`betas/0`), and its parameters in order.

    The parameters are the numbers in `state`, with the paths that list them, and those of their names if the
    groups have names.
    """

    settings: Mapping[str, Path]
    members: Mapping[str, Path]
    named: Mapping[str, Path]


class _AmbiguousOrderError(Exception):
    """Several orders fit, or there are too many to try."""


def read_parameter_groups(mine: Mapping[Name, Path], tree: Tree) -> tuple[ParameterGroup, ...] | None:
    """Return the groups of a state_dict's leaves (by name under it); None if a parameter has no number.

    Source: torch/optim/optimizer.py, state_dict(): parameters are numbered through all groups, in the order
    of the groups; `param_names` are beside them if the optimizer was created with named parameters.
    """
    groups: dict[str, dict[str, list[tuple[str, Path]]]] = {}
    for name, path in mine.items():
        if name[0] == "param_groups" and len(name) > 2:
            kind = name[2] if name[2] in ("params", "param_names") else "settings"
            groups.setdefault(name[1], {}).setdefault(kind, []).append(("/".join(name[2:]), path))
    result = []
    for own in groups.values():
        paths, names = ([path for _, path in own.get(kind, ())] for kind in ("params", "param_names"))
        numbers = [str(leaf.value) for path in paths if isinstance(leaf := tree[path], ValueLeaf)]
        if len({*numbers}) != len(paths) or not paths or len(names) not in (0, len(paths)):
            return None
        named = dict(zip(numbers, names, strict=True)) if names else {}
        members = dict(zip(numbers, paths, strict=True))
        result.append(ParameterGroup(dict(own.get("settings", ())), members, named))
    return tuple(result)


def slot_shapes(mine: Mapping[Name, Path], tree: Tree) -> dict[str, set[Shape]]:
    """Return the shapes of each parameter's slots by its number, which show its place in the network."""
    shapes: dict[str, set[Shape]] = {}
    for name, path in mine.items():
        leaf = tree[path]
        if name[0] == "state" and len(name) == 3 and name[2] != "step" and isinstance(leaf, Leaf):
            shapes.setdefault(name[1], set()).add(leaf.shape)
    return shapes


def _merge_chains(
    chains: Sequence[Sequence[_Item]], extend: Callable[[_Item, int], list[_Part] | None]
) -> list[_Part] | None:
    """Return the only merge of chains, each of which keeps its order; None if none fits.

    `place` returns the parts of an item at a position in the merge, None where the item does not fit. All
    fitting merges are followed at once, keyed by how many items of each chain are used. Raise
    _AmbiguousOrderError if several fit.
    """
    ways: dict[tuple[int, ...], tuple[int, list[_Part]]] = {(0,) * len(chains): (1, [])}
    for _ in range(sum(map(len, chains))):
        after: dict[tuple[int, ...], tuple[int, list[_Part]]] = {}
        for used, (count, order) in ways.items():
            for n, chain in enumerate(chains):
                parts = extend(chain[used[n]], len(order)) if used[n] < len(chain) else None
                if parts is not None:
                    now = (*used[:n], used[n] + 1, *used[n + 1 :])
                    after[now] = after.get(now, (0, order))[0] + count, [*order, *parts]
        if len(after) > _MOST_STATES:
            raise _AmbiguousOrderError
        ways = after
    for count, merged in ways.values():
        if count > 1:
            raise _AmbiguousOrderError
        return merged
    return None


def match_parameters(
    groups: Sequence[ParameterGroup], mine: Mapping[Name, Path], optimizer: StoredOptimizer
) -> dict[str, Path] | None:
    """Return the weight of every number; None unless counts, names or shapes determine it.

    Names decide if the groups have them. Without names, one group has the network's parameters in their
    order. Each of several groups has its parameters in that order, and only one assignment may fit the
    moments' shapes.
    """
    tree = optimizer.tree
    weights = tuple(dict.fromkeys(source for source, _, _ in optimizer.weights))
    numbers = [number for group in groups for number in group.members]
    shapes = slot_shapes(mine, tree)

    def fits(number: str, weight: Path) -> bool:
        leaf = tree[weight]
        return not shapes.get(number) or (isinstance(leaf, Leaf) and shapes[number] == {leaf.shape})

    if len(numbers) != len(weights):
        return None
    pairs: dict[str, Path] | None
    if all(group.named for group in groups):
        pairs = _match_by_name(groups, weights, tree)
    elif len(groups) == 1:
        pairs = dict(zip(numbers, weights, strict=True))
    else:
        try:
            order = _merge_chains(
                [list(group.members) for group in groups],
                lambda number, at: [number] if fits(number, weights[at]) else None,
            )
        except _AmbiguousOrderError:
            order = None
        owners = dict(zip(order, weights, strict=True)) if order is not None else {}
        pairs = {number: owners[number] for number in numbers if number in owners}
    if pairs is None or len(pairs) != len(weights):
        return None
    return pairs if all(fits(number, weight) for number, weight in pairs.items()) else None


def _match_by_name(
    groups: Sequence[ParameterGroup], weights: Sequence[Path], tree: Tree
) -> dict[str, Path] | None:
    left = {tree.names[weight]: weight for weight in weights}
    paths = {}
    for number, path in (item for group in groups for item in group.named.items()):
        leaf = tree[path]
        name = str(leaf.value).replace(".", "/") if isinstance(leaf, ValueLeaf) else ""
        fits = [candidate for candidate in left if candidate == name or candidate.endswith(f"/{name}")]
        if len(fits) != 1:
            return None
        paths[number] = left.pop(fits[0])
    return paths


def from_torch(optimizer: StoredOptimizer) -> OptimizerMoves:
    """Bind a torch optimizer's state_dict: the i-th state belongs to the i-th parameter of its groups.

    Where groups differ in a setting, every weight has its own: `NAME_optimizer/SETTING/WEIGHT`. An
    unknown optimizer, or one whose parameters are ambiguous, stays unmapped, with a note.
    """
    mine, tree = optimizer.own, optimizer.tree
    groups = read_parameter_groups(mine, tree) or ()
    keys = frozenset(name.partition("/")[0] for group in groups for name in group.settings)
    slots = frozenset(name[2] for name in mine if name[0] == "state" and len(name) == 3)
    other = optimizers.find_unconverted(keys, slots)
    if other:
        return OptimizerMoves((), note=make_unconverted_note(optimizer.name, other))
    order = match_parameters(groups, mine, optimizer) if groups else None
    if order is None:
        note = f"{optimizer.name}: its parameter groups do not match the network, so no state is converted"
        return OptimizerMoves((), note=f"{note}; {WITHOUT}" if mine else "")
    family = optimizers.find_torch_family(keys, slots)
    targets: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        targets.setdefault(source, []).append((target, rule))
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    for number, weight in order.items():
        for torch_name, slot in family.torch_slots.items():
            path = mine.get(("state", number, torch_name))
            if path is None:
                continue
            # An old SGD without momentum stores None, which is read like a setting.
            stored = isinstance(tree[path], Leaf)
            of |= {path: weight} if stored else {}
            moves += [
                Move(
                    path,
                    schema.canonical_slot_path(optimizer.name, slot if stored else torch_name, target),
                    rule if stored else KEEP,
                )
                for target, rule in targets[weight]
            ]
    # torch counts updates once per parameter; all move to one counter, which must be the same number.
    steps = [path for name, path in mine.items() if name[:1] == ("state",) and name[2:] == ("step",)]
    count = schema.canonical_setting_path(optimizer.name, "step")
    moves += [Move(path, count, ToTensor("int64")) for path in steps]
    settings = list(_move_settings(groups, order, family, targets, optimizer))
    listed = {path for group in groups for path in group.members.values()}
    repeated = {path for group in groups for path in group.settings.values()}
    consumed = frozenset((*listed, *(repeated - {move.source for move in settings}), *steps[1:]))
    doubt = optimizers.doubt_torch_class(family, keys, slots) if slots else ""
    assumed = f"{optimizer.name} {doubt}" if doubt else ""
    return OptimizerMoves((*moves, *settings), consumed, of, assumed=assumed)


def _move_settings(
    groups: Sequence[ParameterGroup],
    order: Mapping[str, Path],
    family: optimizers.OptimizerFamily,
    targets: Mapping[Path, Sequence[tuple[Path, Rule]]],
    optimizer: StoredOptimizer,
) -> Iterator[Move]:
    """Yield the settings, one for all where the groups agree, else one per weight, and weights' identities.

    These are names, groups, and numbers if the order differs.
    """

    def move_each(path: Path, numbers: Iterable[str], entry: str, rule: Rule = KEEP) -> Iterator[Move]:
        for target in (target for number in numbers for target, _ in targets[order[number]]):
            yield Move(path, schema.canonical_slot_path(optimizer.name, entry, target), rule)

    canonical = family.torch_settings
    for stored in dict.fromkeys(setting for group in groups for setting in group.settings):
        setting = canonical.get(stored, stored)
        paths = [group.settings.get(stored) for group in groups]
        leaves = [optimizer.tree[path] if path is not None else None for path in paths]
        values = {repr(leaf.value) if isinstance(leaf, ValueLeaf) else None for leaf in leaves}
        agree = len(paths) == 1 or (len(values) == 1 and None not in values)
        if paths[0] is not None and agree:
            yield Move(paths[0], schema.canonical_setting_path(optimizer.name, setting), KEEP)
            continue
        for path, group in zip(paths, groups, strict=True):
            yield from move_each(path, group.members, setting) if path is not None else ()
    ranks = {weight: n for n, weight in enumerate(targets)}
    for position, group in enumerate(groups):
        inside = [ranks[order[number]] for number in group.members]
        for number, listed in group.members.items():
            identity: list[tuple[Path, str, Rule]] = []
            identity += [(group.named[number], schema.NAMES, KEEP)] if number in group.named else []
            identity += [(listed, schema.GROUP, FixedValue(position))] if len(groups) > 1 else []
            identity += [(listed, schema.NUMBER, KEEP)] if inside != sorted(inside) else []
            for path, entry, rule in identity:
                yield from move_each(path, [number], entry, rule)


_RECURRENT = deferred.compile(r"(weight|bias)_(ih|hh|hr)_l(\d+)(_reverse)?")
_NUMBER = deferred.compile(r"\d+")


def find_only_order(
    parameters: Sequence[tuple[Sequence[str], Shape]], shapes: Sequence[Shape], *, numbered: bool
) -> list[int] | None:
    """Return the numbers of named parameters in the only order with these shapes, None if not unique.

    With `numbered`, submodules such as `fc1` and `fc2` are ordered by their numbers; those whose names are
    numbers always are. `parameters()` yields a module's own parameters, then those of its submodules, one
    submodule at a time (torch/nn/modules/module.py, `named_parameters`). A weight comes before its bias in
    the modules of torch.nn; submodules whose names differ in a number only (`0`, `1`; `fc1`, `fc2`) come in
    the order of the numbers.
    """
    # A module: its parameters' numbers by name, and its submodules by a tuple of their name.
    root: dict[Any, Any] = {}
    for number, (name, _) in enumerate(parameters):
        module = root
        for step in name[:-1]:
            module = module.setdefault((step,), {})
        module[name[-1]] = number

    def position(item: Any, at: int) -> list[int] | None:
        if not isinstance(item, dict):
            return [item] if at < len(shapes) and parameters[item][1] == shapes[at] else None
        own = {name: part for name, part in item.items() if isinstance(name, str)}
        inner = {name[0]: part for name, part in item.items() if not isinstance(name, str)}
        first = _merge_chains(_parameter_chains(own), lambda number, n: position(number, at + n))
        chains = _submodule_chains(inner, numbered=numbered)
        start = at + len(own)
        rest = None if first is None else _merge_chains(chains, lambda number, n: position(number, start + n))
        return None if first is None or rest is None else [*first, *rest]

    try:
        return position(root, 0) if len(parameters) == len(shapes) else None
    except _AmbiguousOrderError:
        return None


def _parameter_chains(own: Mapping[str, int]) -> list[list[int]]:
    """Return parameters in chains: weight before bias; those of a recurrent layer in a fixed order."""
    chains: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for name, number in own.items():
        recurrent = _RECURRENT.fullmatch(name)
        if recurrent is not None:
            kind, gate, layer, reverse = recurrent.groups()
            rank = (int(layer), bool(reverse), gate == "hr", kind == "bias", gate == "hh")
            chains.setdefault("recurrent", []).append((rank, number))
        else:
            chains.setdefault(name.replace("bias", "weight"), []).append((("bias" in name,), number))
    return [[number for _, number in sorted(chain)] for chain in chains.values()]


def _submodule_chains(inner: Mapping[str, dict[Any, Any]], *, numbered: bool) -> list[list[dict[Any, Any]]]:
    """Return submodules in chains: those whose names differ only in a number are ordered by it."""
    chains: dict[str, list[str]] = {}
    for name in inner:
        chains.setdefault(_NUMBER.sub("#", name) if numbered or name.isdecimal() else name, []).append(name)
    return [
        [inner[name] for name in sorted(chain, key=lambda name: [*map(int, _NUMBER.findall(name))])]
        for chain in chains.values()
    ]


# Words that do not distinguish one network or optimizer from another.
_COMMON = frozenset(
    (
        *("optimizer", "optimizers", "optim", "opt", "state", "states", "dict", "model", "models", "net"),
        *("nets", "network", "networks", "module", "weights", "params"),
    )
)
# Words for copies of a network, which no optimizer trains.
_COPIES = frozenset(("ema", "swa", "average", "averaged", "target", "targ", "teacher", "old"))
_WORD = deferred.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_MOST_TOGETHER = 4  # networks that one optimizer may train, in any order


class BoundOptimizer(NamedTuple):
    """One optimizer of the source: its name, where it is, and its bound state."""

    name: str
    top: Path
    moves: OptimizerMoves
    weights: tuple[Path, ...]


# A network that fits an optimizer: its name, the bound state, its trained parameters in order.
_Fit = tuple[str, OptimizerMoves, tuple[Path, ...]]


def bind_torch_optimizers(
    tree: Tree,
    tops: Iterable[Path],
    networks: Mapping[str, tuple[Path, ...]],
    names: Mapping[Path, Path],
) -> tuple[list[BoundOptimizer], list[str], list[str]]:
    """Assign each optimizer to the network that it trains; return the states, notes, and assumptions.

    `networks` are the parameters of each in their order, `names` the weights' canonical paths. Names decide
    (`param_names`). Without names PyTorch's own rule does: param_groups list the parameters in the order of
    the module, which the shapes of all slots must confirm, and only one network or one choice of parameters
    may fit (torch/optim/optimizer.py, state_dict()). A file that sorts its tensors by name, as safetensors
    does, loses that order: then only one module order may fit (`find_only_order`).
    """
    states: list[BoundOptimizer] = []
    notes: list[str] = []
    assumed: list[str] = []
    for top in tops:
        stored = _TorchOptimizer(tree, top, names)
        title = stored.title
        orders = {name: stored.order(own) for name, own in networks.items()}
        fits = list(stored.fits((name, own) for name, own in orders.items() if own is not None))
        lost = [name for name, order in orders.items() if order is None]
        if lost:
            notes.append(
                f"{title}: the file sorts the tensors of {lost[0] or 'the network'} by name, and their "
                "shapes fit several module orders; the optimizer state is not converted: use --part "
                f"{shlex.quote(lost[0] or '.')} to convert the network alone"
            )
            continue
        sure = {name: own for name, own in networks.items() if not _is_sorted(tree, own)}
        joined = (
            (" and ".join(names), tuple(path for name in names for path in sure[name]))
            for count in (range(2, len(sure) + 1) if len(sure) <= _MOST_TOGETHER else ())
            for names in itertools.permutations(sure, count)
        )
        fits = fits or list(stored.fits(joined)) or list(stored.fits(stored.subsets(sure)))
        # The optimizer's name may refer to a network, and no optimizer trains copies.
        called = [fit for fit in fits if _words(fit[0]) == _words(title)]
        trained = [fit for fit in fits if not _words(fit[0]) & _COPIES]
        chosen = next((candidates[0] for candidates in (fits, called, trained) if len(candidates) == 1), None)
        if chosen is None:
            fitting = abbreviate_list([name for name, _, _ in fits], 3)
            why = f"fit several networks ({fitting})" if fits else "match the parameters of no network"
            notes.append(f"{title}: its param_groups {why}; its state is not converted; {WITHOUT}")
            continue
        name, bound, own = chosen
        if bound.note:
            notes.append(bound.note)
            continue
        network, whole = name or "the network", networks.get(name, own)
        how = "the order of param_groups and the shapes of all slots"
        if any(move.target[1] == attr(schema.NAMES) for move in bound.moves):
            how = "param_names"
        elif own != whole and len(own) == len(whole):
            how = "the only module order that fits the shapes of all slots"
            assumed.append(
                f"{title}: the file sorts tensors by name; they are read in PyTorch's order: weight "
                "before bias, numbered modules in numeric order"
            )
        notes.append(f"{title} trains {network}, matched by {how}")
        if len(own) < len(whole):
            assumed.append(
                f"{title} trains {len(own)} of {len(whole)} parameters of {network}: "
                "the only ones whose shapes fit its slots in this order"
            )
        states.append(BoundOptimizer(title, top, bound, own))
    return states, notes, assumed


def _words(name: str) -> frozenset[str]:
    words = (word.lower() for word in _WORD.findall(name))
    return frozenset(word for word in words if word not in _COMMON and word != "0")


def _is_sorted(tree: Tree, own: tuple[Path, ...]) -> bool:
    """Whether a plain dict contains a network's parameters sorted by name, as safetensors writes them."""
    container = tree.containers.get(own[0][:-1]) if own else None
    if container is not None and container.kind != "dict":
        return False
    by_type: dict[str, list[str]] = {}
    for path in own:
        leaf = tree[path]
        if isinstance(leaf, Leaf):
            by_type.setdefault(leaf.dtype, []).append(str(path[-1].value))
    return len(own) > 1 and all(names == sorted(names) for names in by_type.values())


class _TorchOptimizer:
    """One state_dict at `top`; `names` are the weights' canonical paths."""

    def __init__(self, tree: Tree, top: Path, names: Mapping[Path, Path]) -> None:
        self.tree, self.names, self.title = tree, names, display(top)
        self.prefix = tuple(self.title.split("/")) if top else ()
        mine = StoredOptimizer(self.title, self.prefix, tree, ()).own
        self.groups = read_parameter_groups(mine, tree)
        numbers = [number for group in self.groups or () for number in group.members]
        shapes = slot_shapes(mine, tree)
        self.shapes = [shapes.get(number, set()) for number in numbers]
        # The shape of every parameter, None unless each has slots of one shape.
        sure = bool(self.groups) and all(len(shape) == 1 for shape in self.shapes)
        self.expected_shapes = [shape for group in self.shapes for shape in group] if sure else None

    def fits(self, networks: Iterable[tuple[str, tuple[Path, ...]]]) -> Iterator[_Fit]:
        """Yield the networks whose parameters are those of the groups, with the state bound to them."""
        for name, own in networks:
            if self.groups is not None and len(self.shapes) == len(own):
                weights = tuple((path, self.names[path], KEEP) for path in own)
                bound = from_torch(StoredOptimizer(self.title, self.prefix, self.tree, weights))
                if bound.moves or "do not match" not in bound.note:
                    yield name, bound, own

    def order(self, own: tuple[Path, ...]) -> tuple[Path, ...] | None:
        """Return a network's parameters in PyTorch's order, None if the file does not determine it."""
        groups = self.groups
        if not _is_sorted(self.tree, own):
            return own
        if groups is None or len(self.shapes) != len(own) or all(group.named for group in groups):
            return own  # names decide, or nothing fits
        leaves = [leaf for path in own if isinstance(leaf := self.tree[path], Leaf)]
        if not any(self.shapes) and len(groups) == 1:
            return own
        if self.expected_shapes is not None and Counter(leaf.shape for leaf in leaves) != Counter(
            self.expected_shapes
        ):
            return own  # nothing fits
        if len(groups) > 1 or self.expected_shapes is None:
            return None
        parameters = [
            (tuple(str(path[-1].value).split(".")), leaf.shape)
            for path, leaf in zip(own, leaves, strict=True)
        ]
        orders = (find_only_order(parameters, self.expected_shapes, numbered=flag) for flag in (False, True))
        order = next(filter(None, orders), None)
        return None if order is None else tuple(own[number] for number in order)

    def subsets(self, networks: Mapping[str, tuple[Path, ...]]) -> Iterator[tuple[str, tuple[Path, ...]]]:
        """Yield the networks of which an optimizer trains a subset, if only one subset of parameters fits.

        Every parameter of the optimizer must have a slot with the parameter's shape.
        """
        if self.groups is None or len(self.groups) != 1 or not self.expected_shapes:
            return
        for name, own in networks.items():
            shapes = [(path, leaf.shape) for path in own if isinstance(leaf := self.tree[path], Leaf)]
            # The earliest and the latest choice are only equal if there is no other.
            first = _match_shapes(self.expected_shapes, shapes)
            last = _match_shapes(self.expected_shapes[::-1], shapes[::-1])
            if first is not None and last is not None and first == last[::-1]:
                yield name, first


def _match_shapes(shapes: Sequence[Shape], own: Sequence[tuple[Path, Shape]]) -> tuple[Path, ...] | None:
    """Return the earliest parameters with these shapes in this order, None if there are none."""
    left = iter(own)
    paths = tuple(next((path for path, other in left if other == shape), None) for shape in shapes)
    return tuple(path for path in paths if path is not None) if None not in paths else None


@dataclass(frozen=True, slots=True)
class _ZeroSource:
    """Zero bytes, created when they are read."""

    nbytes: int

    def read(self) -> bytes:
        return bytes(self.nbytes)


def make_zero_tensor(like: Leaf) -> Leaf:
    """Return a zero tensor with the dtype and shape of another: an initial moment."""
    nbytes = math.prod(like.shape) * dtypes.BY_NAME[like.dtype].itemsize
    return Leaf(like.dtype, like.shape, _ZeroSource(nbytes), "")
