"""Optimizer state as PyTorch, Keras and TensorFlow store it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core import dtypes
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display
from ckpttool.libraries import schema
from ckpttool.libraries.recognize import OptimizerMoves, StoredOptimizer
from ckpttool.libraries.schema import DefaultSetting
from ckpttool.mapping.layers import Name
from ckpttool.mapping.rules import KEEP, FixedValue, Move, Rule, ToTensor, ToValue

if TYPE_CHECKING:
    import numpy as np

# Supported optimizers, one table each: slots, settings and defaults in every framework.
#
# Canonical slots: Adam's m, v, vhat; RMSprop's rms (mean of squares) and mg (mean of gradients, if centered);
# Adagrad's squares (their sum); Adamax's m and u (the decaying maximum); Adadelta's mean_squares and
# mean_deltas (running means of the squares of gradients and of its own steps). Momentum's gradient sum is
# `buffer` if it does not include the learning rate (torch, TensorFlow 1's MomentumOptimizer), `velocity` if
# each term was multiplied by it (Keras, TensorFlow 1's RMSPropOptimizer); Keras's SGD subtracts its gradients
# there.
#
# Sources: torch/optim/{adam,rmsprop,sgd,adagrad,adamax,adadelta}.py;
# keras/src/optimizers/{adam,adamw,rmsprop,sgd,adagrad,adamax,adadelta}.py, tf_keras's of the same names and
# legacy/*.py; tensorflow/python/training/{adam,rmsprop,momentum,adagrad}.py.

BUFFER, VELOCITY = "buffer", "velocity"


class KerasSlot(NamedTuple):
    """A slot in Keras: its kind in the tree, Keras 3's list, and the end of its variable's name."""

    kind: str
    edge: str
    ending: str


@dataclass(frozen=True, slots=True)
class OptimizerFamily:
    """One update rule for weights, and the names of its parts in each framework.

    `torch_slots` and `torch_settings` map torch's names (a slash leads into a tuple) to canonical ones,
    in the order in which torch writes them. `keras` lists the slots in the rounds in which Keras
    creates them; `constructed` are arguments of Keras's class that no variable holds, `legacy` those
    that were variables up to Keras 2.10. `always` are slots that every state has. `folded` is the sign
    of the gradients in Keras's `velocity`. `tf1` is the class of TensorFlow 1, whose slots are
    `VARIABLE/NAME`, `VARIABLE/NAME_1`, ..., or "" for an optimizer whose slots are not read there.
    `zeros` means that slots start at zero.
    """

    name: str
    torch_slots: Mapping[str, str]
    torch_settings: Mapping[str, str]
    torch_defaults: Mapping[str, DefaultSetting]
    keras: tuple[tuple[str, ...], ...]
    keras_slots: Mapping[str, KerasSlot]
    keras_defaults: Mapping[str, DefaultSetting]
    constructed: tuple[str, ...]
    legacy: tuple[str, ...]
    keras_name: str
    tf1: str
    always: tuple[str, ...] = ()
    folded: int = 1
    tf1_defaults: Mapping[str, DefaultSetting] = field(default_factory=dict)
    counts: bool = True
    zeros: bool = True

    @property
    def uses_count(self) -> bool:
        """Whether updates depend on their count, which corrects the bias of the moments."""
        return "betas/0" in self.torch_settings

    @property
    def slots(self) -> tuple[str, ...]:
        """All canonical slots."""
        return tuple(dict.fromkeys((*self.torch_slots.values(), *self.keras_slots)))

    def torch_slot(self, slot: str) -> str:
        """Return torch's name of a canonical slot."""
        wanted = BUFFER if slot == VELOCITY else slot
        return next(theirs for theirs, ours in self.torch_slots.items() if ours == wanted)


def _make_defaults(owner: str, **values: float | bool | None) -> Mapping[str, DefaultSetting]:
    return MappingProxyType({name: DefaultSetting(value, owner) for name, value in values.items()})


# torch/optim/optimizer.py: options that change how the step is computed, not its result.
HOW = ("foreach", "capturable", "differentiable", "fused")
# Settings that are not numbers, for all optimizers.
FLAGS = frozenset((*HOW, "amsgrad", "maximize", "centered", "nesterov", "decoupled_weight_decay"))
_COMMON = {"weight_decay": 0, "maximize": False}
_UNSET = {"foreach": None, "differentiable": False}

ADAM = OptimizerFamily(
    name="Adam",
    torch_slots={"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "vhat"},
    torch_settings={
        "lr": "learning_rate",
        "betas/0": "beta_1",
        "betas/1": "beta_2",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "amsgrad", "maximize", *HOW, "decoupled_weight_decay")},
    },
    torch_defaults=_make_defaults(
        "torch",
        amsgrad=False,
        capturable=False,
        fused=None,
        decoupled_weight_decay=False,
        **_COMMON,
        **_UNSET,
    ),
    keras=(("m", "v"), ("vhat",)),
    keras_slots={
        "m": KerasSlot("m", "_momentums", "momentum"),
        "v": KerasSlot("v", "_velocities", "velocity"),
        "vhat": KerasSlot("vhat", "_velocity_hats", "velocity_hat"),
    },
    keras_defaults=_make_defaults("Keras", learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7),
    constructed=("beta_1", "beta_2", "epsilon", "amsgrad"),
    legacy=("learning_rate", "beta_1", "beta_2", "decay"),
    keras_name="adam",
    tf1="Adam",
    always=("m", "v"),
    tf1_defaults=_make_defaults("TensorFlow 1", epsilon=1e-8),
)

RMSPROP = OptimizerFamily(
    name="RMSprop",
    torch_slots={"square_avg": "rms", "momentum_buffer": BUFFER, "grad_avg": "mg"},
    torch_settings={
        "lr": "learning_rate",
        "momentum": "momentum",
        "alpha": "rho",
        "eps": "epsilon",
        **{name: name for name in ("centered", "weight_decay", "capturable", "foreach", "maximize")},
        "differentiable": "differentiable",
    },
    torch_defaults=_make_defaults("torch", centered=False, capturable=False, **_COMMON, **_UNSET),
    keras=(("rms",), (VELOCITY,), ("mg",)),
    keras_slots={
        "rms": KerasSlot("rms", "_velocities", "velocity"),
        VELOCITY: KerasSlot("momentum", "_momentums", "momentum"),
        "mg": KerasSlot("mg", "_average_gradients", "average_gradient"),
    },
    keras_defaults=_make_defaults("Keras", learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7),
    constructed=("rho", "momentum", "epsilon", "centered"),
    legacy=("learning_rate", "rho", "momentum", "decay"),
    keras_name="rm_sprop",
    tf1="RMSProp",
    always=("rms",),
    tf1_defaults=_make_defaults("TensorFlow 1", rho=0.9, momentum=0.0, epsilon=1e-10),
)

SGD = OptimizerFamily(
    name="SGD",
    torch_slots={"momentum_buffer": BUFFER},
    torch_settings={
        "lr": "learning_rate",
        **{name: name for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize")},
        **{name: name for name in ("foreach", "differentiable", "fused")},
    },
    torch_defaults=_make_defaults("torch", dampening=0, nesterov=False, fused=None, **_COMMON, **_UNSET),
    keras=((VELOCITY,),),
    keras_slots={VELOCITY: KerasSlot("momentum", "momentums", "momentum")},
    keras_defaults=_make_defaults("Keras", learning_rate=0.01, momentum=0.0),
    constructed=("momentum", "nesterov"),
    legacy=("learning_rate", "momentum", "decay"),
    keras_name="sgd",
    tf1="Momentum",
    folded=-1,
    counts=False,
)

ADAGRAD = OptimizerFamily(
    name="Adagrad",
    torch_slots={"sum": "squares"},
    torch_settings={
        "lr": "learning_rate",
        "lr_decay": "lr_decay",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "initial_accumulator_value", "foreach", "maximize")},
        **{name: name for name in ("differentiable", "fused")},
    },
    torch_defaults=_make_defaults("torch", lr_decay=0, fused=None, **_COMMON, **_UNSET),
    keras=(("squares",),),
    keras_slots={"squares": KerasSlot("accumulator", "_accumulators", "accumulator")},
    keras_defaults=_make_defaults("Keras", learning_rate=0.001, epsilon=1e-7, initial_accumulator_value=0.1),
    constructed=("initial_accumulator_value", "epsilon"),
    legacy=("learning_rate", "decay"),
    keras_name="adagrad",
    tf1="Adagrad",
    always=("squares",),
    tf1_defaults=_make_defaults("TensorFlow 1", epsilon=0.0),
    zeros=False,
)

ADAMAX = OptimizerFamily(
    name="Adamax",
    torch_slots={"exp_avg": "m", "exp_inf": "u"},
    torch_settings={
        "lr": "learning_rate",
        "betas/0": "beta_1",
        "betas/1": "beta_2",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "foreach", "maximize", "differentiable", "capturable")},
    },
    torch_defaults=_make_defaults("torch", capturable=False, **_COMMON, **_UNSET),
    keras=(("m", "u"),),
    keras_slots={"m": KerasSlot("m", "_m", "momentum"), "u": KerasSlot("u", "_u", "norm")},
    keras_defaults=_make_defaults("Keras", learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7),
    constructed=("beta_1", "beta_2", "epsilon"),
    legacy=("learning_rate", "beta_1", "beta_2", "decay"),
    keras_name="adamax",
    tf1="",
    always=("m", "u"),
)

ADADELTA = OptimizerFamily(
    name="Adadelta",
    torch_slots={"square_avg": "mean_squares", "acc_delta": "mean_deltas"},
    torch_settings={
        "lr": "learning_rate",
        "rho": "rho",
        "eps": "epsilon",
        **{name: name for name in ("weight_decay", "maximize", "capturable", "foreach", "differentiable")},
    },
    torch_defaults=_make_defaults("torch", capturable=False, **_COMMON, **_UNSET),
    keras=(("mean_squares", "mean_deltas"),),
    keras_slots={
        "mean_squares": KerasSlot("accumulated_grad", "_accumulated_grads", "accumulated_grad"),
        "mean_deltas": KerasSlot("accumulated_delta", "_accumulated_delta_vars", "accumulated_delta_var"),
    },
    keras_defaults=_make_defaults("Keras", learning_rate=0.001, rho=0.95, epsilon=1e-7),
    constructed=("rho", "epsilon"),
    legacy=("learning_rate", "rho", "decay"),
    keras_name="adadelta",
    tf1="",
    always=("mean_squares", "mean_deltas"),
)

FAMILIES = (ADAM, RMSPROP, SGD, ADAGRAD, ADAMAX, ADADELTA)
# Keras's classes in lower case. AdamW is Adam with decoupled weight decay.
CLASSES = {
    "adamw": ADAM,
    **{each.name.lower(): each for each in FAMILIES},
}
ADAMW = "adamw"
# keras/src/optimizers/adamw.py
ADAMW_DEFAULTS = _make_defaults("Keras's AdamW", weight_decay=0.004, decoupled_weight_decay=True)
# Keras optimizers whose state may look like one of the above but means something else.
OTHERS = frozenset("adafactor ftrl lamb lion muon nadam".split())  # noqa: SIM905
# Reasons why their state is not converted, by lower-case class, for both frameworks.
_DIFFERENCES = {
    "adafactor": "Keras and PyTorch factor its second moment and clip its updates differently",
    "asgd": "Keras has no averaged SGD",
    "ftrl": "PyTorch has no FTRL",
    "lamb": "PyTorch has no LAMB",
    "lbfgs": "Keras has no L-BFGS",
    "lion": "PyTorch has no Lion",
    "muon": "Keras's Muon updates some variables with Adam, PyTorch's accepts only matrices",
    "nadam": "its momentum schedule differs (0.96^t in Keras, 0.96^(0.004 t) by default in PyTorch)",
    "radam": "Keras has no RAdam",
    "rprop": "Keras has no Rprop",
}


# Suggestion in notes on optimizers without an equivalent.
WITHOUT = "use --optimizer none to convert without it"


def make_unconverted_note(name: str, cls: str) -> str:
    """Return the note that the state of optimizer `name`, of class `cls`, is not converted."""
    why = _DIFFERENCES.get(cls.lower())
    reason = f": {why}" if why else ""
    return f"{name} is {cls}, whose state is not converted{reason}; {WITHOUT}"


# Additional slots that training needs, and their PyTorch counterparts.
MORE_SLOTS = {
    "average": "moving averages of the weights (use_ema): PyTorch keeps these in a separate model "
    "(torch.optim.swa_utils.AveragedModel)",
    "gradient": "gradients of an incomplete update (gradient_accumulation_steps): PyTorch keeps these in "
    "the parameters (grad), not in checkpoints",
}
# Keys of a torch param group that are only used by unsupported optimizers: torch/optim/*.py.
TORCH_OTHERS = {
    "momentum_decay": "NAdam",
    "lambd": "ASGD",
    "etas": "Rprop",
    "max_iter": "LBFGS",
    "ns_steps": "Muon",
    "beta2_decay": "Adafactor",
}


def find_family(slots: frozenset[str]) -> OptimizerFamily | None:
    """Return the only optimizer with these canonical slots, None if none or several match."""
    if slots <= {BUFFER, VELOCITY}:
        return SGD if slots else None
    return next((family for family in FAMILIES if slots <= {*family.slots, BUFFER}), None)


# Differences in TensorFlow 1: slots under their variables, powers of betas instead of an update count.
#
# Sources: tensorflow/python/training/{adam,rmsprop,momentum,adagrad,slot_creator}.py. RMSProp's mean of
# squares starts at one there, and it always has a momentum slot.

POWERS = ("beta1_power", "beta2_power")
# The defaults of tensorflow/python/training/adam.py, and common values from "Attention Is All You Need" and
# DCGAN.
BETAS = ((0.9, 0.999), (0.9, 0.98), (0.5, 0.999))
_TAIL = re.compile(
    rf"(?:.*/)?({'|'.join(family.tf1 for family in FAMILIES if family.tf1)})(?:_\d+)?", re.DOTALL
)
_NUMBERED = re.compile(r"beta1_power(_\d+)?")


def is_momentum(leaf: Leaf | ValueLeaf) -> bool:
    """Return whether the slot has the name that tf.train.MomentumOptimizer uses."""
    return _slot_suffix(leaf) == SGD.tf1


def _slot_suffix(leaf: Leaf | ValueLeaf | None) -> str | None:
    found = _TAIL.fullmatch(leaf.name or leaf.key) if isinstance(leaf, Leaf) else None
    return found[1] if found else None


def is_named(slots: Mapping[Path, Path], tree: Tree) -> bool:
    """Return whether the slots have TensorFlow 1's names."""
    return any(_slot_suffix(tree[path]) for path in slots)


def is_proximal(leaf: Leaf | ValueLeaf) -> bool:
    """Whether the slot is named like one of tf.train.ProximalAdagradOptimizer, which is not Adagrad."""
    return isinstance(leaf, Leaf) and "ProximalAdagrad" in (leaf.name or leaf.key)


def find_tf1_family(slots: Mapping[Path, Path], tree: Tree) -> OptimizerFamily | None:
    """Return the optimizer with these kinds of slots; None if there is none."""
    kinds = {leaf.slot for path in slots if isinstance(leaf := tree[path], Leaf)}
    if not kinds:
        return None
    if "u" in kinds or "accumulated_grad" in kinds:
        return ADAMAX if "u" in kinds else ADADELTA
    if kinds == {"accumulator"} and not any(leaf.slot == "linear" for _, leaf in tree.tensors()):
        return ADAGRAD  # Ftrl also has an accumulator
    return RMSPROP if "rms" in kinds else SGD if kinds == {"momentum"} else ADAM


def list_slots_below_variables(
    optimizer: StoredOptimizer, weights: Mapping[Path, object]
) -> Iterator[tuple[Path, Path]]:
    """Yield the slots stored under their own variables, `actor/l1/kernel/Adam`."""
    for path, leaf in optimizer.tree.tensors():
        owner = leaf.of
        below = owner is not None and owner in weights and path[: len(owner)] == owner
        if leaf.role == "slot" and owner is not None and below and _slot_suffix(leaf):
            yield path, owner


def find_beta_powers(
    optimizer: StoredOptimizer, mine: Mapping[Name, Path], slots: Mapping[Path, Path]
) -> dict[str, Path]:
    """Return the powers of the optimizer's betas: its own, or those without a scope if it has none."""
    own = {name[0]: path for name, path in mine.items() if len(name) == 1 and name[0] in POWERS}
    below = any(slots[path] == path[: len(slots[path])] for path in slots)
    if own or not below:
        return own
    pairs = list(_pair_unscoped_powers(optimizer.tree))
    if not pairs:
        return {}
    # TensorFlow numbers several optimizers' powers without recording which optimizer they belong to.
    first, *others = [infer_step_count(optimizer.tree, pair) for pair in pairs]
    if any(other != first for other in others):
        return {}
    known = list(schema.OPTIMIZERS)
    number = known.index(optimizer.name) if optimizer.name in known else 0
    return dict(zip(POWERS, pairs[min(number, len(pairs) - 1)], strict=True))


def _pair_unscoped_powers(tree: Tree) -> Iterator[tuple[Path, Path]]:
    by_name = {name: path for path, name in tree.names.items()}
    for name, path in by_name.items():
        found = _NUMBERED.fullmatch(name)
        other = by_name.get(f"{POWERS[1]}{found[1] or ''}") if found else None
        if other is not None:
            yield path, other


def move_step_count(optimizer: StoredOptimizer, found: Mapping[str, Path]) -> tuple[Move, ...]:
    """Return the moves of the update count computed from the beta powers, and of the betas."""
    if found.keys() != set(POWERS):
        return ()
    first, second = (found[power] for power in POWERS)
    inferred = infer_step_count(optimizer.tree, (first, second))
    if inferred is None:
        return ()
    steps, betas = inferred
    return tuple(
        Move(path, schema.canonical_setting_path(optimizer.name, name), FixedValue(value))
        for path, name, value in (
            (first, "step", steps),
            (first, "beta_1", betas[0]),
            (second, "beta_2", betas[1]),
        )
    )


def infer_step_count(tree: Tree, pair: tuple[Path, Path]) -> tuple[int, tuple[float, float]] | None:
    """Return the update count implied by two powers of common betas, and the betas; None otherwise.

    The two scalars are read; if one cannot be read, this returns None and its own reader raises the
    error.
    """
    from ckpttool.formats.tf_common import count_adam_steps

    try:
        values = [ToValue().leaf(tree[path]) for path in pair]
    except CkpttoolError:
        return None
    found = [value.value for value in values if isinstance(value, ValueLeaf)]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    for betas in BETAS if len(numbers) == len(pair) else ():
        steps = count_adam_steps(numbers[0], numbers[1], *betas)
        if steps is not None:
            return steps, betas
    return None


# An optimizer of Keras, Sonnet or TensorFlow 1 in a tree, bound to the canonical optimizer.

# Keras 3 and 2.11+ use a leading underscore, the legacy optimizers do not.
KERAS_SETTINGS = {
    "_iterations": "step",
    "iterations": "step",
    "iter": "step",
    "step": "step",  # Sonnet's (sonnet/src/optimizers/adam.py)
    "_learning_rate": "learning_rate",
    "learning_rate": "learning_rate",
    "beta_1": "beta_1",
    "beta_2": "beta_2",
    "epsilon": "epsilon",
    "rho": "rho",
    "momentum": "momentum",
    # Learning rate decay of the legacy optimizers; torch has no equivalent and keeps it unused.
    "decay": "decay",
}
_KNOWN = OTHERS | CLASSES.keys()
# Variables that only one class has: keras/src/optimizers/nadam.py, tf_keras's, and its legacy/nadam.py.
_OWN_VARIABLES = {"_u_product": "nadam", "u_product": "nadam", "_m_cache": "nadam", "momentum_cache": "nadam"}
# Classes with the same slots, which a file may contain without naming its class.
SAME_SLOTS = {
    "Adam": "AdamW, Lamb and old versions of Adamax have",
    "SGD": "Lion has",
}
_KINDS = frozenset(slot.kind for family in CLASSES.values() for slot in family.keras_slots.values())


def from_keras(optimizer: StoredOptimizer) -> OptimizerMoves:
    """Bind a Keras optimizer: the format has paired each slot with its variable where the file allows it.

    Keras 2.11 to 2.15 keeps no list of the variables: there the i-th moment belongs to the i-th weight
    of the optimizer's network, and the weight's name within the moment's must confirm it. Slots of
    TensorFlow 1 may be stored under their variables.
    """
    mine = optimizer.own
    tree = optimizer.tree
    kind = _stored_class(tree, mine)
    if kind in OTHERS:
        return OptimizerMoves((), note=make_unconverted_note(optimizer.name, str(kind)))
    weights: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        weights.setdefault(source, []).append((target, rule))
    counted = any(len(name) == 1 and KERAS_SETTINGS.get(name[0]) == "step" for name in mine)
    found = dict(_pair_slots(optimizer, mine, weights))
    family = CLASSES.get(kind or "") or find_tf1_family(found, tree) or ADAM
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    for path, owner in found.items():
        slot = _find_canonical_slot(tree[path], family, counted=counted)
        if slot is not None:
            places = (
                (schema.canonical_slot_path(optimizer.name, slot, t), rule) for t, rule in weights[owner]
            )
            moves += [Move(path, target, rule) for target, rule in places]
            of[path] = owner
    for name, path in mine.items():
        if len(name) == 1 and name[0] in KERAS_SETTINGS and isinstance(tree[path], Leaf):
            moves.append(
                Move(path, schema.canonical_setting_path(optimizer.name, KERAS_SETTINGS[name[0]]), KEEP)
            )
    powers = find_beta_powers(optimizer, mine, found) if family is ADAM else {}
    # Entries that TensorFlow 1 computes from the update count contain no further information.
    moves += () if counted else move_step_count(optimizer, powers)
    consumed = frozenset(powers.values()) if any(m.target[1:] == _STEP for m in moves) else frozenset()
    consumed |= frozenset(_placeholders(tree, mine, family))
    named = is_named(found, tree)
    defaults = {} if counted or not named else family.tf1_defaults
    guessed = SAME_SLOTS.get(family.name) if kind is None and of and not named else None
    assumed = (
        ""
        if guessed is None
        else (
            f"{optimizer.name} is {family.name}, by its slots: the checkpoint does not name its class, and "
            f"{guessed} the same slots"
        )
    )
    return OptimizerMoves(tuple(moves), consumed, of, defaults=defaults, assumed=assumed)


_STEP = schema.canonical_setting_path("", "step")[1:]


def _placeholders(tree: Tree, mine: Mapping[Name, Path], family: OptimizerFamily) -> Iterator[Path]:
    """Yield the zeros that Keras 2 stores as maxima of an Adam without amsgrad (formats/keras_tree.py)."""
    for path in mine.values():
        leaf, held = tree[path], tree.containers.get(path[:1])
        off = held is not None and isinstance(held.state, dict) and held.state.get("amsgrad") is False
        if family is ADAM and off and isinstance(leaf, Leaf) and (leaf.role, leaf.shape) == ("other", (1,)):
            yield path


def _stored_class(tree: Tree, mine: Mapping[Name, Path]) -> str | None:
    """Return the class in lower case: by the configuration, a variable of that class only, or a name."""
    for name, path in mine.items():
        held = tree.containers.get(path[:-1]) if len(name) == 1 else None
        if held is not None and held.kind == "module" and held.name and held.name.lower() in _KNOWN:
            return held.name.lower()
    own = next(
        (_OWN_VARIABLES[name[0]] for name in mine if len(name) == 1 and name[0] in _OWN_VARIABLES), None
    )
    return own or keras_class(tree[path] for path in mine.values())


def keras_class(leaves: Iterable[Leaf | ValueLeaf]) -> str | None:
    """Return an optimizer's class in lower case, None if none of its variables is named after one.

    Keras 3 names all variables after it (`adam_1/iteration`), 2.11 to 2.15 only the slots
    (`AdamW/m/dense/kernel`).
    """
    found = [leaf for leaf in leaves if isinstance(leaf, Leaf)]
    found.sort(key=lambda leaf: leaf.role != "counter")
    return next((name for leaf in found if (name := optimizer_class(leaf)) in _KNOWN), None)


def optimizer_class(leaf: Leaf | ValueLeaf | None) -> str | None:
    """Return the first part of a variable's name, in lower case and without its number."""
    if not isinstance(leaf, Leaf) or not leaf.name:
        return None
    return re.sub(r"_\d+$", "", leaf.name.split("/")[0].lower()).replace("_", "")


def _pair_slots(
    optimizer: StoredOptimizer, mine: Mapping[Name, Path], weights: Mapping[Path, object]
) -> Iterator[tuple[Path, Path]]:
    """Yield the slots with the weights that they belong to."""
    for path in mine.values():
        leaf = optimizer.tree[path]
        if isinstance(leaf, Leaf) and leaf.role == "slot" and leaf.slot in _KINDS:
            if is_proximal(leaf):
                continue
            owner = leaf.of if leaf.of is not None else _match_by_order(path, leaf, optimizer)
            if owner is not None and owner in weights:
                yield path, owner
    yield from list_slots_below_variables(optimizer, weights)


def _find_canonical_slot(leaf: Leaf | ValueLeaf, family: OptimizerFamily, *, counted: bool) -> str | None:
    kind = leaf.slot if isinstance(leaf, Leaf) else None
    if family is ADAMAX and kind == "v":
        kind = "u"  # the name of the maximum in tf_keras/src/optimizers/legacy/adamax.py
    found = next((ours for ours, theirs in family.keras_slots.items() if theirs.kind == kind), None)
    # Keras counts updates in every optimizer; in TensorFlow 1 and Sonnet, momentum has no count.
    if found == VELOCITY and family is SGD and (not counted or is_momentum(leaf)):
        return BUFFER
    return found


def _match_by_order(path: Path, slot: Leaf, optimizer: StoredOptimizer) -> Path | None:
    number = path[-1].value
    owners = tuple(dict.fromkeys(source for source, _, _ in optimizer.weights))
    if not isinstance(number, int) or not 0 <= number < len(owners):
        return None
    if _is_named_after(slot, optimizer.tree[owners[number]]):
        return owners[number]
    # The program passed its variables in another order, so only the names identify them.
    named = [owner for owner in owners if _is_named_after(slot, optimizer.tree[owner])]
    return named[0] if len(named) == 1 else None


def _is_named_after(slot: Leaf, weight: Leaf | ValueLeaf) -> bool:
    if not isinstance(weight, Leaf) or not weight.name or not slot.name or weight.shape != slot.shape:
        return False
    return slot.name.endswith(f"/{weight.name}") or slot.name == weight.name


def find_optimizer_class(tree: Tree, name: str) -> str | None:
    """Return the class of an agent's canonical optimizer `name`, based on its variables' names."""
    top = schema.canonical_setting_path(name, "step")[0]
    return keras_class(leaf for path, leaf in tree.items() if path[0] == top)


# Known settings of a canonical optimizer: from the agent, a sidecar, its state, or a default.

Setting = float | bool | str | None
# Entries that identify weights, and are not settings.
PLACES = (schema.GROUP, schema.NUMBER, schema.NAMES)
_SLOTS = frozenset(slot for family in FAMILIES for slot in family.torch_slots)


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
        self.slots = frozenset(
            str(path[1].value) for path in own if len(path) > 2 and path[1].value in schema.SLOTS
        )
        names = [str(path[1].value) for path in own if path[1].value not in schema.SLOTS]
        self.settings = tuple(dict.fromkeys((*names, *(each.partition("/")[0] for each in settings))))
        cls = find_optimizer_class(agent, name)
        self.family = (
            find_family(self.slots) or CLASSES.get(cls or "") or _find_family_by_settings(self.settings)
        )
        inferred = ADAMW_DEFAULTS if cls == ADAMW else {}
        self.defaults = {
            **self.family.keras_defaults,
            **self.family.torch_defaults,
            **inferred,
            **defaults,
        }
        self.certain = {"amsgrad": "vhat" in self.slots, "centered": "mg" in self.slots}

    def source(self, setting: str, weight: Path | None = None) -> Path | None:
        """Return where the agent stores a setting: the weight's own path, or the common one."""
        own = schema.canonical_slot_path(self.name, setting, weight) if weight is not None else None
        shared = schema.canonical_setting_path(self.name, setting)
        return next((path for path in (own, shared) if path is not None and path in self.agent), None)

    def has(self, setting: str, weight: Path | None = None) -> bool:
        """Return whether a setting is given: by the agent, a sidecar or the command line."""
        return self.source(setting, weight) is not None or self._told(setting, weight) is not None

    def value(self, setting: str, weight: Path | None = None) -> Setting:
        """Return a setting, or its default if it is not given; this may read a scalar."""
        source = self.source(setting, weight)
        if source is not None:
            return self._read(source)
        recorded = self._told(setting, weight)
        if recorded is not None:
            return self.stated[recorded]
        if self.certain.get(setting):
            return True
        default = self.defaults.get(setting)
        return default.value if default is not None else None

    def exact(self, setting: str, weight: Path | None = None) -> float | bool | None:
        """Return the given setting even if the agent has one: it may be the number before rounding."""
        recorded = self._told(setting, weight)
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
        """Return a slot for every weight, in float64; zeros, as in a new optimizer, if there is none."""
        import numpy as np

        found = []
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
            array = leaf.array().astype(np.float64) if isinstance(leaf, Leaf) else np.zeros(shape)
            found.append(array * factor)
        return tuple(found)

    def assumed(self, setting: str) -> str:
        """Return the sentence that a default was used."""
        default = self.defaults[setting]
        sentence = f"{self.name} {setting} = {default.value} (default of {default.library}; "
        return f"{sentence}the checkpoint does not hold it)"

    def flat(self) -> Iterator[tuple[str, Path]]:
        """Yield the agent's settings by their sidecar names, without step and slots."""
        for path in self.agent:
            name = str(path[1].value) if path[0] == attr(self.name) and len(path) > 1 else "step"
            if name != "step" and name not in schema.SLOTS:
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

    def _told(self, setting: str, weight: Path | None) -> str | None:
        own = (
            f"{setting}/{display(schema.get_optimizer_key(self.name, weight))}" if weight is not None else ""
        )
        return next((name for name in (own, setting) if name in self.stated), None)


def _find_family_by_settings(names: tuple[str, ...]) -> OptimizerFamily:
    # Among torch's optimizers with a rho only RMSprop has these; Keras's are distinguished by class.
    if {"rho", "weight_decay"} <= set(names) and not {"centered", "momentum"} & set(names):
        return ADADELTA
    if {"rho", "centered"} & set(names):
        return RMSPROP
    if {"lr_decay", "initial_accumulator_value"} & set(names):
        return ADAGRAD
    return SGD if {"nesterov", "dampening"} & set(names) else ADAM


def is_state(setting: str) -> bool:
    """Return whether a setting is an entry of torch's `state` without a tensor."""
    return setting in _SLOTS


# torch's parameter groups in a state_dict: the parameters of each, and their weights.
#
# Source: torch/optim/optimizer.py, state_dict(): parameters are numbered through all groups, in the order of
# the groups; `param_names` are beside them if the optimizer was created with named parameters.

# Limit of search states; networks with hundreds of layers in two groups need far fewer.
_MOST_STATES = 20_000


class GroupParameter(NamedTuple):
    """One parameter of a group: its number in `state`, the path listing it, and its name's path if any."""

    number: str
    listed: Path
    named: Path | None


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One group: its settings by torch's names (`betas/0`), and its parameters in order."""

    settings: Mapping[str, Path]
    members: tuple[GroupParameter, ...]


class NetworkParameter(NamedTuple):
    """One network parameter: its tensor, and its canonical paths with their rules."""

    source: Path
    places: tuple[tuple[Path, Rule], ...]


def list_network_parameters(optimizer: StoredOptimizer) -> tuple[NetworkParameter, ...]:
    """Return the network's parameters in file order; a layer that is split in two has two paths."""
    found: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        found.setdefault(source, []).append((target, rule))
    return tuple(NetworkParameter(source, tuple(places)) for source, places in found.items())


def read_parameter_groups(mine: Mapping[Name, Path], tree: Tree) -> tuple[ParameterGroup, ...] | None:
    """Return the groups of a state_dict's leaves (by name under it); None if a parameter has no number."""
    settings: dict[str, dict[str, Path]] = {}
    listed: dict[str, list[Path]] = {}
    named: dict[str, list[Path]] = {}
    for name, path in mine.items():
        if name[0] != "param_groups" or len(name) < 3:
            continue
        own = settings.setdefault(name[1], {})
        if name[2] == "params":
            listed.setdefault(name[1], []).append(path)
        elif name[2] == "param_names":
            named.setdefault(name[1], []).append(path)
        else:
            own["/".join(name[2:])] = path
    found = []
    for number, own in settings.items():
        paths, names = listed.get(number, []), named.get(number, [])
        values = [leaf.value for path in paths if isinstance(leaf := tree[path], ValueLeaf)]
        if len(values) != len(paths) or not paths or len(names) not in (0, len(paths)):
            return None
        marks: Sequence[Path | None] = names or [None] * len(paths)
        members = (GroupParameter(str(v), p, n) for v, p, n in zip(values, paths, marks, strict=True))
        found.append(ParameterGroup(own, tuple(members)))
    return tuple(found)


def match_parameters(
    found: Sequence[ParameterGroup], mine: Mapping[Name, Path], optimizer: StoredOptimizer
) -> dict[str, NetworkParameter] | None:
    """Return the weight of every number; None unless counts, names or shapes determine it.

    Names decide if the groups have them. Without names, one group has the network's parameters in their
    order. Each of several groups has its parameters in that order, and only one assignment may fit the
    moments' shapes.
    """
    theirs = list_network_parameters(optimizer)
    members = [member for group in found for member in group.members]
    if len(members) != len(theirs):
        return None
    shapes = _slot_shapes_by_number(mine, optimizer.tree)
    order: Sequence[NetworkParameter] | None
    if all(member.named for member in members):
        order = _match_by_name(members, theirs, optimizer.tree)
    elif len(found) == 1:
        order = theirs
    else:
        order = _match_by_shape(found, theirs, shapes, optimizer.tree)
    if order is None:
        return None
    pairs = {member.number: weight for member, weight in zip(members, order, strict=True)}
    fits = all(_fits(shapes.get(number), w, optimizer.tree) for number, w in pairs.items())
    return pairs if fits and len(pairs) == len(members) else None


def _slot_shapes_by_number(mine: Mapping[Name, Path], tree: Tree) -> dict[str, set[tuple[int, ...]]]:
    """Return the shapes of each number's moments, to detect another parameter order."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, path in mine.items():
        leaf = tree[path]
        if name[0] == "state" and len(name) == 3 and name[2] != "step" and isinstance(leaf, Leaf):
            found.setdefault(name[1], set()).add(leaf.shape)
    return found


def _fits(shapes: set[tuple[int, ...]] | None, weight: NetworkParameter, tree: Tree) -> bool:
    leaf = tree[weight.source]
    return not shapes or (isinstance(leaf, Leaf) and shapes == {leaf.shape})


def _match_by_name(
    members: Sequence[GroupParameter], theirs: Sequence[NetworkParameter], tree: Tree
) -> list[NetworkParameter] | None:
    places = {tree.names[weight.source]: weight for weight in theirs}
    found = []
    for member in members:
        leaf = tree[member.named] if member.named is not None else None
        name = str(leaf.value).replace(".", "/") if isinstance(leaf, ValueLeaf) else ""
        fits = [each for each in places if each == name or each.endswith(f"/{name}")]
        if len(fits) != 1:
            return None
        found.append(places.pop(fits[0]))
    return found


def _match_by_shape(
    found: Sequence[ParameterGroup],
    theirs: Sequence[NetworkParameter],
    shapes: Mapping[str, set[tuple[int, ...]]],
    tree: Tree,
) -> list[NetworkParameter] | None:
    """Return the only order in which the groups can divide the weights among them, None if there is none.

    Each weight in turn is the next parameter of one of the groups: all fitting assignments are followed
    at once, keyed by how many parameters of each group are used.
    """
    start = (0,) * len(found)
    ways: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {start: (1, ())}
    for weight in theirs:
        after: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for taken, (count, way) in ways.items():
            for n in _open_groups(found, taken):
                if not _fits(shapes.get(found[n].members[taken[n]].number), weight, tree):
                    continue
                now = (*taken[:n], taken[n] + 1, *taken[n + 1 :])
                before = after.get(now, (0, ()))[0]
                after[now] = (before + count, (*way, n))
        if not after or len(after) > _MOST_STATES:
            return None
        ways = after
    ((count, way),) = ways.values()
    if count != 1:
        return None
    shared: list[list[NetworkParameter]] = [[] for _ in found]
    for n, weight in zip(way, theirs, strict=True):
        shared[n].append(weight)
    return [weight for each in shared for weight in each]


def _open_groups(found: Sequence[ParameterGroup], taken: Sequence[int]) -> Iterator[int]:
    return (n for n, group in enumerate(found) if taken[n] < len(group.members))


# Bind a torch optimizer state_dict to the canonical optimizer.

# Settings of torch/optim/adam.py that RAdam, Adamax and SparseAdam lack while having the newer ones.
_AMSGRAD, _YOUNGER = "amsgrad", frozenset(("foreach", "maximize"))


def from_torch(optimizer: StoredOptimizer) -> OptimizerMoves:
    """Bind a torch optimizer's state_dict: the i-th state belongs to the i-th parameter of its groups.

    Where groups differ in a setting, every weight has its own: `NAME_optimizer/SETTING/WEIGHT`. An
    unknown optimizer, or one whose parameters are ambiguous, stays unmapped, with a note.
    """
    mine = optimizer.own
    found = read_parameter_groups(mine, optimizer.tree) if mine else ()
    keys = {name.partition("/")[0] for group in found or () for name in group.settings}
    slots = {name[2] for name in mine if name[0] == "state" and len(name) == 3}
    other = _find_foreign_class(keys, slots)
    if other:
        note = make_unconverted_note(optimizer.name, other)
        return OptimizerMoves((), note=note)
    order = match_parameters(found, mine, optimizer) if found else None
    if order is None or found is None:
        note = (
            f"{optimizer.name}: its parameter groups do not match the network, so no state is "
            f"converted; {WITHOUT}"
        )
        return OptimizerMoves((), note=note if mine else "")
    family = _find_torch_family(keys, slots)
    moves, of = _move_slots(mine, order, family, optimizer)
    steps = [
        Move(path, schema.canonical_setting_path(optimizer.name, "step"), ToTensor("int64"))
        for name, path in mine.items()
        if name[:1] == ("state",) and name[2:] == ("step",)
    ]
    # torch counts updates once per parameter; all move to one counter, which must be the same number.
    moves += steps
    settings = [
        *_move_settings(found, order, family, optimizer),
        *_move_group_settings(found, order, optimizer),
    ]
    listed = {member.listed for group in found for member in group.members}
    repeated = {path for group in found for path in group.settings.values()} - {m.source for m in settings}
    consumed = frozenset((*listed, *repeated, *(step.source for step in steps[1:])))
    return OptimizerMoves((*moves, *settings), consumed, of)


# torch/optim/lr_scheduler.py and swa_utils.py: what schedulers store in an optimizer's groups.
_SCHEDULED = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))


def is_scheduled(path: Path) -> bool:
    """Return whether a value of an optimizer's group belongs to a scheduler, not to the optimizer."""
    return len(path) > 2 and path[-3].value == "param_groups" and path[-1].value in _SCHEDULED


def _find_foreign_class(keys: set[str], slots: set[str]) -> str | None:
    """Return the class of an unsupported optimizer, based on its settings' names."""
    found = next((owner for name, owner in TORCH_OTHERS.items() if name in keys), None)
    others = "betas" in keys and _AMSGRAD not in keys and bool(keys & _YOUNGER)
    if found is None and others and "exp_inf" not in slots:
        return "RAdam, Adamax or SparseAdam"
    return found


def _find_torch_family(keys: set[str], slots: set[str]) -> OptimizerFamily:
    if "betas" in keys:
        return ADAMAX if "exp_inf" in slots else ADAM
    if "alpha" in keys:
        return RMSPROP
    if "rho" in keys:
        return ADADELTA
    if "lr_decay" in keys:
        return ADAGRAD
    if keys & {"dampening", "nesterov"}:
        return SGD
    return next((family for family in FAMILIES if slots & family.torch_slots.keys()), ADAM)


def _move_slots(
    mine: Mapping[Name, Path],
    order: Mapping[str, NetworkParameter],
    family: OptimizerFamily,
    optimizer: StoredOptimizer,
) -> tuple[list[Move], dict[Path, Path]]:
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    places: Iterator[tuple[Path, Rule]]
    for number, weight in order.items():
        for theirs, slot in family.torch_slots.items():
            path = mine.get(("state", number, theirs))
            if path is None:
                continue
            if isinstance(optimizer.tree[path], ValueLeaf):
                # An old SGD without momentum stores None, which is read like a setting.
                places = (
                    (schema.canonical_slot_path(optimizer.name, theirs, t), KEEP) for t, _ in weight.places
                )
            else:
                places = (
                    (schema.canonical_slot_path(optimizer.name, slot, t), rule) for t, rule in weight.places
                )
                of[path] = weight.source
            moves += [Move(path, target, rule) for target, rule in places]
    return moves, of


def _move_settings(
    found: Sequence[ParameterGroup],
    order: Mapping[str, NetworkParameter],
    family: OptimizerFamily,
    optimizer: StoredOptimizer,
) -> Iterator[Move]:
    """Yield the settings: one for all where the groups agree, else one per weight."""
    names = dict.fromkeys(name for group in found for name in group.settings)
    for theirs in names:
        ours = family.torch_settings.get(theirs, theirs)
        paths = [group.settings.get(theirs) for group in found]
        if paths[0] is not None and _values_agree(paths, optimizer.tree):
            yield Move(paths[0], schema.canonical_setting_path(optimizer.name, ours), KEEP)
            continue
        for path, group in zip(paths, found, strict=True):
            for member in group.members if path is not None else ():
                for target, _ in order[member.number].places:
                    assert path is not None  # noqa: S101  # the loop's own condition
                    yield Move(path, schema.canonical_slot_path(optimizer.name, ours, target), KEEP)


def _values_agree(paths: Sequence[Path | None], tree: Tree) -> bool:
    if len(paths) == 1:
        return True
    values = [tree[path] if path is not None else None for path in paths]
    first = values[0]
    return isinstance(first, ValueLeaf) and all(
        isinstance(each, ValueLeaf) and repr(each.value) == repr(first.value) for each in values
    )


def _move_group_settings(
    found: Sequence[ParameterGroup], order: Mapping[str, NetworkParameter], optimizer: StoredOptimizer
) -> Iterator[Move]:
    """Yield what identifies weights: names, groups, and numbers if the order differs."""
    ranks = {weight: n for n, weight in enumerate(dict.fromkeys(s for s, _, _ in optimizer.weights))}
    for number, group in enumerate(found):
        inside = [ranks[order[member.number].source] for member in group.members]
        for member in group.members:
            for target, _ in order[member.number].places:
                if member.named is not None:
                    yield Move(
                        member.named, schema.canonical_slot_path(optimizer.name, schema.NAMES, target), KEEP
                    )
                if len(found) > 1:
                    place = schema.canonical_slot_path(optimizer.name, schema.GROUP, target)
                    yield Move(member.listed, place, FixedValue(number))
                if inside != sorted(inside):
                    yield Move(
                        member.listed, schema.canonical_slot_path(optimizer.name, schema.NUMBER, target), KEEP
                    )


# Initial moments: zero tensors created when they are read.


@dataclass(frozen=True, slots=True)
class _ZeroSource:
    """A source of the given number of zero bytes."""

    nbytes: int

    def read(self) -> bytes:
        return bytes(self.nbytes)


def make_zero_tensor(like: Leaf) -> Leaf:
    """Return a zero tensor with the dtype and shape of another."""
    nbytes = math.prod(like.shape) * dtypes.BY_NAME[like.dtype].itemsize
    return Leaf(like.dtype, like.shape, _ZeroSource(nbytes), "")
