"""Variable names of TensorFlow libraries."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.optimizers import ADAM, RMSPROP, SGD, UNCONVERTED, OptimizerFamily, find_class
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display
from ckpttool.formats import tf_object_graph
from ckpttool.formats.tf_bundle import tree_from_graph
from ckpttool.formats.tf_common import VariableInfo
from ckpttool.formats.tf_object_graph import MARK, slot_optimizer, slot_path
from ckpttool.libraries.optimizer_entries import KERAS_SETTINGS, POWERS, path_texts
from ckpttool.libraries.optimizers_read import keras_class, make_zero_tensor
from ckpttool.mapping.keras_names import object_graph_paths
from ckpttool.mapping.rules import KEEP, Label, Move, Plan, Rule, Scale, Settings, ToTensor, ToValue

_BETAS = dict(zip(POWERS, ("beta_1", "beta_2"), strict=True))
_MOST_STEPS = 10_000_000  # by then, a usual beta's power is 0 in float32
_STEPS = tuple(name for name, canonical in KERAS_SETTINGS.items() if canonical == "step")
_RATES = ("_learning_rate", "learning_rate")
# Possible slot kinds by optimizer, in the order in which TensorFlow 1 creates them.
_KINDS = ((ADAM, ("m", "v")), (RMSPROP, ("rms", "mg", "momentum")), (SGD, ("momentum",)))


class _GraphOptimizer(NamedTuple):
    """An optimizer object: its family, its path, its slots, and its own variables used here."""

    family: OptimizerFamily
    path: Path
    slots: list[Path]
    powers: Mapping[str, Path]
    steps: Path | None
    rate: Path | None

    @property
    def title(self) -> str:
        """Its display name."""
        return display(self.path)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its slot kinds in TensorFlow 1's order."""
        return next(kinds for family, kinds in _KINDS if family is self.family)


def plan_variable_names(tree: Tree, settings: Settings) -> Plan:
    """Return the plan from an object graph to variables known by name, with readable paths.

    `settings` are optimizer settings from a sidecar. State of other optimizers keeps its path. Each of
    several optimizers has its own scope, as if created there (tensorflow/python/training/slot_creator.py):
    powers at `SCOPE/beta1_power`, moments at `SCOPE/VARIABLE/Adam`, so that the names identify their
    optimizer. Adam's moments are stored beside their variables, and the powers of its betas are computed from
    its update count. RMSProp's and Momentum's slots are stored there too; Momentum's do not include the
    learning rate in TensorFlow 1 (sources: tensorflow/python/training/{adam,rmsprop,momentum}.py,
    slot_creator.py).
    """
    optimizers = list(_list_optimizers(tree))
    names = {path: tree.names[path] for path, _ in tree.tensors()}
    rules: dict[Path, Rule] = {}
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    notes: list[str] = []
    used = set(names.values())
    for optimizer in optimizers:
        alone = len(optimizers) == 1 and (optimizer.powers or not used & set(POWERS))
        scope = "" if alone else f"{optimizer.title}/"
        if optimizer.family is SGD and optimizer.steps is not None:
            rate = _read_number(tree, optimizer.rate)
            rate = _find_setting(optimizer, settings, "learning_rate") if rate is None else rate
            if not rate:
                notes.append(f"{optimizer.title}: the learning rate included in its momentum is unknown")
                continue
            rules |= dict.fromkeys(optimizer.slots, Scale(SGD.folded * rate, divide=True))
            notes.append(f"{optimizer.title}: momentum is divided by the learning rate, with rounding")
        added |= _name_slots(tree, optimizer, scope, names, used)
        for power in POWERS if optimizer.family is ADAM else ():
            if power in optimizer.powers:
                names[optimizer.powers[power]] = scope + power
            elif optimizer.steps is None:
                missing.append(scope + power)
            else:
                value, whence = _make_power(tree, optimizer, power, settings)
                assumed += whence
                added[_parse_name(scope + power)] = ToTensor("float32").leaf(ValueLeaf(value))
    moves = tuple(Move(path, _parse_name(name), rules.get(path, KEEP)) for path, name in names.items())
    labels: dict[Path, Label] = {}
    for path, leaf in tree.tensors():
        of = _parse_name(names[leaf.of]) if leaf.of is not None and leaf.of in names else None
        labels[_parse_name(names[path])] = Label(leaf.role, names[path], of, leaf.slot)
    labels |= {path: Label("other", display(path)) for path in added}
    return Plan(
        moves,
        added,
        labels=labels,
        assumed=tuple(dict.fromkeys(assumed)),
        missing=tuple(missing),
        notes=tuple(notes),
        settings=settings,
    )


def _parse_name(name: str) -> Path:
    return tuple(attr(part) for part in name.split("/"))


def _list_optimizers(tree: Tree) -> Iterator[_GraphOptimizer]:
    """Yield the optimizers that also exist in TensorFlow 1, in the order of their first moments."""
    slots: dict[Path, list[Path]] = {}
    children: dict[Path, dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        children.setdefault(path[:-1], {})[str(path[-1].value) if path else ""] = path
        if leaf.role == "slot" and is_trained(tree, leaf):
            slots.setdefault(slot_optimizer(path, leaf), []).append(path)
    for top, moments in slots.items():
        mine = children.get(top, {})
        leaves = [tree[path] for path in (*mine.values(), *moments)]
        kinds = {first_moment.slot for path in moments if isinstance(first_moment := tree[path], Leaf)}
        cls = keras_class(leaves)
        if cls in UNCONVERTED:
            continue
        for family, kinds_of in _KINDS:
            if (find_class(cls) or family) is family and set(family.always) <= kinds <= set(kinds_of):
                powers = {power: mine[power] for power in POWERS if power in mine}
                yield _GraphOptimizer(
                    family, top, moments, powers, _find_first(mine, _STEPS), _find_first(mine, _RATES)
                )
                break


def _find_first(mine: Mapping[str, Path], names: tuple[str, ...]) -> Path | None:
    return next((mine[name] for name in names if name in mine), None)


def is_trained(tree: Tree, slot: Leaf) -> bool:
    """Return whether a slot is known to belong to a variable, and not to another slot."""
    owner = tree.get(slot.of) if slot.of is not None else None
    return isinstance(owner, Leaf) and owner.role != "slot"


def _name_slots(
    tree: Tree, optimizer: _GraphOptimizer, scope: str, names: dict[Path, str], used: set[str]
) -> dict[Path, Leaf]:
    """Name the slots, and return those that TensorFlow 1's RMSProp always has and this one lacks."""
    by_owner: dict[Path, dict[str, Path]] = {}
    for path in optimizer.slots:
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            by_owner.setdefault(leaf.of, {})[str(leaf.slot)] = path
            used.discard(names[path])
    added: dict[Path, Leaf] = {}
    for owner, moments in by_owner.items():
        kinds = [kind for kind in optimizer.kinds if kind in moments or kind == "momentum"]
        # An optimizer whose names are taken adds a counter to them.
        number, name = 0, f"{scope}{names[owner]}/{optimizer.family.tf1}"
        while used & {_number_name(name, number + position) for position in range(len(kinds))}:
            number += len(kinds)
        for position, kind in enumerate(kinds):
            own = _number_name(name, number + position)
            used.add(own)
            weight = tree[owner]
            if kind in moments:
                names[moments[kind]] = own
            elif isinstance(weight, Leaf):
                added[_parse_name(own)] = make_zero_tensor(weight)
    return added


def _number_name(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _make_power(tree: Tree, adam: _GraphOptimizer, power: str, settings: Settings) -> tuple[float, list[str]]:
    """Return a power of a beta and the assumptions: it starts at beta and is multiplied by it per update."""
    count = _read_number(tree, adam.steps)
    steps = max(0, count) if isinstance(count, int) else 0
    name = _BETAS[power]
    beta = _read_number(tree, (*adam.path, attr(name)))
    if beta is None:
        beta = _find_setting(adam, settings, name)
    if isinstance(beta, float) and 0 <= beta < 1:
        return _multiply_float32(beta, steps), []
    default = ADAM.defaults[name]
    sentence = f"{adam.title} {name} = {default.value} (default of {default.library}; "
    return _multiply_float32(default.value or 0, steps), [f"{sentence}the checkpoint does not hold it)"]


def _find_setting(optimizer: _GraphOptimizer, settings: Settings, name: str) -> float | None:
    value = settings.get(str(optimizer.path[-1].value) if optimizer.path else "", {}).get(name)
    return value if isinstance(value, float) else None


def _multiply_float32(beta: float, steps: int) -> float:
    """Return beta in float32 after this many multiplications by itself, rounded each time."""
    factors = np.full(min(steps, _MOST_STEPS) + 1, beta, np.float32)
    with np.errstate(under="ignore"):
        return float(np.multiply.accumulate(factors)[-1])


def _read_number(tree: Tree, path: Path | None) -> float | None:
    leaf = tree.get(path) if path is not None else None
    if not isinstance(leaf, Leaf) or leaf.size != 1:
        return None
    value = ToValue().leaf(leaf)
    number = value.value if isinstance(value, ValueLeaf) else None
    return number if isinstance(number, int | float) else None


_ADAM = ("m", "v")
# Slots of optimizers without their own variables, as named by `_create_slots`
# (tensorflow/python/training/{momentum,rmsprop,adagrad,adadelta,ftrl}.py).
_SLOTS_ALONE = frozenset(("momentum", "rms", "mg", "accumulator", "accum", "accum_update", "linear"))
_POWER = deferred.compile(r"beta[12]_power(_\d+)?")
_PLAIN = "optimizer"  # the object's name if the variables' names contain none


def is_object_graph(tree: Tree) -> bool:
    """Return whether the tree is an object graph, which its keys show."""
    return any(MARK in leaf.key for _, leaf in tree.tensors())


def has_named_variables(tree: Tree) -> bool:
    """Return whether the tree's variables are identified only by name."""
    return all("/".join(path_texts(path)) == leaf.key for path, leaf in tree.tensors())


class _BetaPowers(NamedTuple):
    """The powers of one Adam's betas: their scope and their paths.

    An optimizer of another class has the scope of its slots and no powers.
    """

    scope: tuple[str, ...]
    powers: Mapping[str, Path]


def plan_variable_objects(tree: Tree) -> Plan:
    """Return the plan from variables known by name to an object graph: each keeps its path.

    Adam's moments become slot variables of an optimizer, named after the scope of its beta powers, or
    `optimizer` if they have none. Moments that cannot be assigned to one pair of powers stay where they are.
    The slots of other optimizers become slot variables of one named after the scope around them. By name,
    Adam's moments are `VARIABLE/Adam` and `VARIABLE/Adam_1` beside two powers of its betas; as an object it
    owns them. Adam's object here is the one that tf.train.Checkpoint saves for a
    tf.compat.v1.train.AdamOptimizer: children beta1_power and beta2_power, slot variables m and v
    (tensorflow/python/training/adam.py, tensorflow/python/training/optimizer.py).
    """
    pairs, notes = _pair_powers(tree)
    leaves = dict(tree.tensors())
    moments = ((path, leaf) for path, leaf in leaves.items() if leaf.role == "slot" and leaf.slot in _ADAM)
    slots = {path: leaf.of for path, leaf in moments if leaf.of and is_trained(tree, leaf)}
    owners = _find_owners(leaves, slots, pairs)
    if not owners:
        pairs = []
    others = _list_other_slots(tree)
    first = len(pairs)
    scopes = list(dict.fromkeys(scope for scope, _ in others.values()))
    pairs += [_BetaPowers(scope, {}) for scope in scopes]
    owners |= {path: first + scopes.index(scope) for path, (scope, _) in others.items()}
    slots_of = slots | {path: of for path, (_, of) in others.items()}
    names = {path: _variable(path, leaf) for path, leaf in leaves.items() if path not in owners}
    tops = _list_optimizer_paths(pairs, names)
    for number, pair in enumerate(pairs):
        names |= {path: (*tops[number], power) for power, path in pair.powers.items()}
    if slots and not slots.keys() & owners.keys():
        notes = (
            *notes,
            f"{format_count(len(slots), 'moment of Adam is', 'moments of Adam are')} kept as plain "
            "variables: it is unknown which optimizer they belong to",
        )
    paths = object_graph_paths(names.values())
    placed = {path: paths[name] for path, name in names.items()}
    for path, number in owners.items():
        powers = pairs[number].powers
        top = placed[powers[POWERS[0]]][:-1] if powers else tuple(map(attr, tops[number]))
        placed[path] = slot_path(top, leaves[path].slot or "", placed[slots_of[path]])
    moves = tuple(Move(path, placed[path], KEEP) for path in leaves)
    assumed = [
        (
            f"Adam in scope {'/'.join(pair.scope) or '(none)'} trains the variables in that scope: it is "
            f"{'/'.join(top)}"
        )
        for pair, top in zip(pairs[:first], tops, strict=False)
        if first > 1
    ]
    labels = {
        placed[path]: _label(path, leaf, placed, has_owner=path in owners) for path, leaf in leaves.items()
    }
    return Plan(moves, labels=labels, assumed=tuple(assumed), notes=notes)


def _list_other_slots(tree: Tree) -> dict[Path, tuple[tuple[str, ...], Path]]:
    """Return the scope and the variable of every slot `[SCOPE/]VARIABLE/NAME` except Adam's.

    Return nothing if two slots in one scope have the same name and variable.
    """
    slots: dict[Path, tuple[tuple[str, ...], Path]] = {}
    keys = set()
    for path, leaf in tree.tensors():
        if leaf.role != "slot" or leaf.slot not in _SLOTS_ALONE or leaf.of is None:
            continue
        name, of = path_texts(path)[:-1], path_texts(leaf.of)
        if not is_trained(tree, leaf) or name[len(name) - len(of) :] != of:
            continue
        scope = name[: len(name) - len(of)]
        if (scope, leaf.slot, of) in keys:
            return {}
        keys.add((scope, leaf.slot, of))
        slots[path] = scope, leaf.of
    return slots


def _variable(path: Path, leaf: Leaf) -> tuple[str, ...]:
    # Some programs store a variable under its output's name, `w:0`.
    if leaf.name and leaf.key == f"{leaf.name}:0" == "/".join(path_texts(path)):
        return tuple(leaf.name.split("/"))
    return path_texts(path)


def _label(path: Path, leaf: Leaf, placed: Mapping[Path, Path], *, has_owner: bool) -> Label:
    name = leaf.name or leaf.key or display(path)
    if leaf.of is None or leaf.of not in placed:
        return Label(leaf.role, name)
    return Label(leaf.role, name, placed[leaf.of] if has_owner else None, leaf.slot if has_owner else None)


def _pair_powers(tree: Tree) -> tuple[list[_BetaPowers], tuple[str, ...]]:
    powers: dict[tuple[tuple[str, ...], str], dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        match = _POWER.fullmatch(str(path[-1].value)) if path and leaf.size == 1 else None
        if match:
            power = match[0][: len(POWERS[0])]
            powers.setdefault((path_texts(path[:-1]), match[1] or ""), {})[power] = path
    pairs = [
        _BetaPowers(scope, powers) for (scope, _), powers in powers.items() if len(powers) == len(POWERS)
    ]
    scopes = [pair.scope for pair in pairs]
    if len(set(scopes)) == len(scopes):
        return pairs, ()
    # TensorFlow numbers several optimizers' powers without recording which optimizer they belong to.
    return [], (f"{len(pairs)} Adam optimizers share one scope: their state is kept as plain variables",)


def _find_owners(
    leaves: Mapping[Path, Leaf], slots: Mapping[Path, Path], pairs: list[_BetaPowers]
) -> dict[Path, int]:
    """Return the number of every moment's optimizer: the only one, or the one with the moment's scope.

    Return nothing if a moment has no optimizer, or if two moments have the same optimizer, slot and
    variable.
    """
    numbers = {pair.scope: number for number, pair in enumerate(pairs)}
    owners: dict[Path, int] = {}
    keys = set()
    for path, of in slots.items():
        name = path_texts(path)
        scopes = (name[:depth] for depth in range(len(name), -1, -1))
        scope = next((scope for scope in scopes if scope in numbers), None)
        number = 0 if len(pairs) == 1 else numbers.get(scope) if scope is not None else None
        if number is None or (number, leaves[path].slot, of) in keys:
            return {}
        keys.add((number, leaves[path].slot, of))
        owners[path] = number
    return owners


def _list_optimizer_paths(
    pairs: list[_BetaPowers], names: Mapping[Path, tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return each optimizer's path, chosen so that no other entries are under it."""
    powers = {path for pair in pairs for path in pair.powers.values()}
    scopes = {pair.scope for pair in pairs}
    used = {
        name[:depth]
        for path, name in names.items()
        if path not in powers and not (name[:-1] in scopes and name[-1] in KERAS_SETTINGS)
        for depth in range(1, len(name) + 1)
    }
    tops = []
    for pair in pairs:
        top, number = pair.scope, 0
        while not top or top in used:
            top = (*pair.scope, f"{_PLAIN}_{number}" if number else _PLAIN)
            number += 1
        used.add(top)
        tops.append(top)
    return tops


# A sidecar may have 16 MB; a graph of 10,000 objects has about 1 MB.
_MOST_BYTES = 4 << 20


def record_objects(tree: Tree, plan: Plan) -> dict[str, Any] | None:
    """Return the sidecar's record of the tree's objects after `plan` named its variables.

    None if they cannot be stored as objects, are too many for a sidecar, or changed during conversion.
    TensorFlow 1's format cannot store edges, keys and an optimizer's kind. The sidecar of a conversion to it
    contains the object graph, as TensorFlow stores it, and each variable's key in it.
    """
    if any(move.rule != KEEP for move in plan.moves):
        return None  # the variables differ from those of the objects
    with contextlib.suppress(CkpttoolError):
        objects, stored = tf_object_graph.plan_graph(tree)
        graph = tf_object_graph.encode_graph(objects)
        if len(graph) <= _MOST_BYTES:
            keys = {"/".join(path_texts(move.target)): stored[move.source] for move in plan.moves}
            return {"graph": base64.b64encode(graph).decode(), "keys": keys, "read": is_object_graph(tree)}
    return None


def restore_objects(tree: Tree, objects: Mapping[str, Any]) -> Plan | None:
    """Return the plan from variables known by name back to their objects; None if it does not fit.

    Powers of Adam's betas that no object had are omitted: the conversion computed them.
    """
    keys = objects["keys"]
    sources = {keys["/".join(path_texts(path))]: path for path in tree if "/".join(path_texts(path)) in keys}
    computed = tuple(path for path in tree if "/".join(path_texts(path)) not in keys)
    complete = sources.keys() == set(keys.values()) and len(sources) == len(keys)
    if not complete or not all(path[-1].value in POWERS for path in computed):
        return None
    try:
        tensors = {key: _tensor(tree, path) for key, path in sources.items()}
        graph = base64.b64decode(objects["graph"], validate=True)
        restored, _ = tree_from_graph(graph, tensors)
    except (CkpttoolError, binascii.Error, ValueError):
        return None
    if not graph:
        return None
    placed = {leaf.key: path for path, leaf in restored.tensors()}
    return Plan(
        tuple(Move(sources[key], path, KEEP) for key, path in placed.items()),
        aliases={path: tuple(alias.path for alias in others) for path, others in restored.aliases.items()},
        labels={
            path: Label(leaf.role, leaf.name, leaf.of, leaf.slot, leaf.key if objects["read"] else None)
            for path, leaf in restored.tensors()
        },
        consumed=computed,
    )


def _tensor(tree: Tree, path: Path) -> VariableInfo:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101  # `again` goes through tensors
    return VariableInfo(leaf.dtype, leaf.shape, leaf.source)
