"""How TensorFlow and PyTorch store Adam's state, and the way of each to the canonical optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Default
from ckpttool.layouts.modules import Segments
from ckpttool.layouts.table import Optimizer, OptimizerMoves
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, display, index, key
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Cast, Rule, ToTensor, ToValue
from ckpttool.tree import Container, Tree

# torch/optim/adam.py: names in `state`; the canonical slot names are TensorFlow's short ones.
TORCH_SLOTS = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "vhat"}
TORCH_SETTINGS = {"lr": "learning_rate", "betas/0": "beta_1", "betas/1": "beta_2", "eps": "epsilon"}


# keras/src/optimizers/adam.py: only the learning rate is a variable; the rest are constructor defaults.
KERAS_DEFAULTS: dict[str, Default] = {
    "learning_rate": Default(0.001, "Keras"),
    "beta_1": Default(0.9, "Keras"),
    "beta_2": Default(0.999, "Keras"),
    "epsilon": Default(1e-7, "Keras"),
}
# torch/optim/adam.py, Adam.__init__ and __setstate__: what load_state_dict takes from a param group.
TORCH_DEFAULTS: dict[str, Default] = {
    "weight_decay": Default(0, "torch"),
    "amsgrad": Default(False, "torch"),
    "maximize": Default(False, "torch"),
    "foreach": Default(None, "torch"),
    "capturable": Default(False, "torch"),
    "differentiable": Default(False, "torch"),
    "fused": Default(None, "torch"),
    "decoupled_weight_decay": Default(False, "torch"),
}

_DICT, _LIST, _TUPLE = Container("dict"), Container("list"), Container("tuple")
_BACK = {slot: theirs for theirs, slot in TORCH_SLOTS.items()}
# The order in which torch.optim.Adam writes a param group; a slash leads into a tuple.
_GROUP = ("lr", "betas/0", "betas/1", "eps", *TORCH_DEFAULTS)
_MATTERS = ("lr", "betas/0", "betas/1", "eps", "weight_decay", "amsgrad")

# Keras 3 and 2.11+ use a leading underscore, the legacy optimizer does not.
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
    # The legacy optimizer's decay of the learning rate; torch has no such thing and keeps it unused.
    "decay": "decay",
}

# tensorflow/python/training/adam.py
_POWERS = (("beta1_power",), ("beta2_power",))

# Keras optimizers with a state that looks like Adam's and means something else, or does more with it.
NOT_ADAM = frozenset(
    "adadelta adafactor adagrad adamax adamw ftrl lamb lion muon nadam rmsprop sgd".split()  # noqa: SIM905
)


def from_keras(optimizer: Optimizer) -> OptimizerMoves:
    """Bind a Keras optimizer: the format has paired each slot with its variable wherever the file says so.

    Keras 2.11 to 2.15 keeps no list of the variables: there the i-th moment belongs to the i-th weight of
    the optimizer's network, which the weight's own name in the moment's must confirm.
    """
    mine = _below(optimizer)
    kind = _keras_kind(mine, optimizer.tree)
    if kind in NOT_ADAM:
        return OptimizerMoves((), note=f"{optimizer.name} is {kind}, whose state is not converted yet")
    weights: dict[Path, list[tuple[Path, Rule]]] = {}
    for source, target, rule in optimizer.weights:
        weights.setdefault(source, []).append((target, rule))
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    for name, path in mine.items():
        leaf = optimizer.tree[path]
        if not isinstance(leaf, Leaf):
            continue
        if leaf.role == "slot" and leaf.slot in canonical.SLOTS:
            owner = leaf.of if leaf.of is not None else _by_order(path, leaf, optimizer)
            if owner in weights:
                places = ((canonical.slot(optimizer.name, leaf.slot, t), rule) for t, rule in weights[owner])
                moves += [Move(path, target, rule) for target, rule in places]
                of[path] = owner
        elif len(name) == 1 and name[0] in KERAS_SETTINGS:
            moves.append(Move(path, canonical.setting(optimizer.name, KERAS_SETTINGS[name[0]]), KEEP))
    # What TensorFlow 1 computes from the count of updates says nothing that the count does not.
    counted = any(move.target == canonical.setting(optimizer.name, "step") for move in moves)
    powers = frozenset(path for name, path in mine.items() if name in _POWERS) if counted else frozenset()
    return OptimizerMoves(tuple(moves), powers, of)


def _below(optimizer: Optimizer) -> dict[Segments, Path]:
    """Return the optimizer's own leaves by their names below it, in the order of the file."""
    cut = len(optimizer.prefix)
    split = ((tuple(name.split("/")), path) for path, name in optimizer.tree.names.items())
    return {name[cut:]: path for name, path in split if name[:cut] == optimizer.prefix}


def _keras_kind(mine: Mapping[Segments, Path], tree: Tree) -> str | None:
    for theirs, ours in KERAS_SETTINGS.items():
        found = optimizer_class(tree[mine[theirs,]]) if ours == "step" and (theirs,) in mine else None
        if found is not None:
            return found
    return None


def optimizer_class(counter: Leaf | ValueLeaf | None) -> str | None:
    """Return an optimizer's class in lower case, as Keras calls its count of updates (`adam_1/iteration`)."""
    if not isinstance(counter, Leaf) or not counter.name:
        return None
    return re.sub(r"_\d+$", "", counter.name.split("/")[0].lower()).replace("_", "")


def _by_order(path: Path, slot: Leaf, optimizer: Optimizer) -> Path | None:
    number = path[-1].value
    owners = tuple(dict.fromkeys(source for source, _, _ in optimizer.weights))
    if not isinstance(number, int) or not 0 <= number < len(owners):
        return None
    if _is_named_after(slot, optimizer.tree[owners[number]]):
        return owners[number]
    # A program that handed its variables over in another order: then only the names speak.
    named = [owner for owner in owners if _is_named_after(slot, optimizer.tree[owner])]
    return named[0] if len(named) == 1 else None


def _is_named_after(slot: Leaf, weight: Leaf | ValueLeaf) -> bool:
    if not isinstance(weight, Leaf) or not weight.name or not slot.name or weight.shape != slot.shape:
        return False
    return slot.name.endswith(f"/{weight.name}") or slot.name == weight.name


def from_torch(optimizer: Optimizer) -> OptimizerMoves:
    """Bind a torch optimizer's state_dict: the i-th state belongs to the i-th parameter of its group.

    Source: torch/optim/optimizer.py, state_dict(). Several groups are left unmapped: their
    hyperparameters may differ.
    """
    mine = _below(optimizer)
    order = _parameter_order(mine, optimizer)
    if order is None:
        note = f"{optimizer.name}: its parameter groups do not match the network, none is mapped"
        return OptimizerMoves((), note=note if mine else "")
    moves: list[Move] = []
    of: dict[Path, Path] = {}
    for number, (source, target, rule) in order.items():
        for theirs, slot in TORCH_SLOTS.items():
            path = mine.get(("state", number, theirs))
            if path is not None:
                moves.append(Move(path, canonical.slot(optimizer.name, slot, target), rule))
                of[path] = source
    steps = _steps(mine, optimizer)
    moves += steps + _settings(mine, optimizer)
    repeated = frozenset(step.source for step in steps[1:])
    indices = frozenset(path for name, path in mine.items() if name[:3] == ("param_groups", "0", "params"))
    return OptimizerMoves(tuple(moves), indices | repeated, of)


def _parameter_order(
    mine: Mapping[Segments, Path], optimizer: Optimizer
) -> dict[str, tuple[Path, Path, Rule]] | None:
    listed = [p for name, p in mine.items() if name[:3] == ("param_groups", "0", "params")]
    several = any(name[:2] == ("param_groups", "1") for name in mine)
    if several or len(listed) != len(optimizer.weights):
        return None
    numbers = [leaf.value for p in listed if isinstance(leaf := optimizer.tree[p], ValueLeaf)]
    if len(numbers) != len(listed):
        return None
    order = {str(n): weight for n, weight in zip(numbers, optimizer.weights, strict=True)}
    return order if all(_fits(mine, n, weight[0], optimizer) for n, weight in order.items()) else None


def _fits(mine: Mapping[Segments, Path], number: str, owner: Path, optimizer: Optimizer) -> bool:
    """Say whether a parameter's moments have its shape; another order of parameters shows itself so."""
    weight = optimizer.tree[owner]
    moments = [optimizer.tree[p] for n in TORCH_SLOTS if (p := mine.get(("state", number, n))) is not None]
    return all(isinstance(m, Leaf) and isinstance(weight, Leaf) and m.shape == weight.shape for m in moments)


def _steps(mine: Mapping[Segments, Path], optimizer: Optimizer) -> list[Move]:
    # torch counts updates once per parameter; all move to one counter, which must be the same number.
    target = canonical.setting(optimizer.name, "step")
    return [
        Move(path, target, ToTensor("int64"))
        for name, path in mine.items()
        if name[:1] == ("state",) and name[2:] == ("step",)
    ]


def _settings(mine: Mapping[Segments, Path], optimizer: Optimizer) -> list[Move]:
    moves = []
    for name, path in mine.items():
        if name[:2] == ("param_groups", "0") and name[2] != "params":
            theirs = "/".join(name[2:])
            ours = canonical.setting(optimizer.name, TORCH_SETTINGS.get(theirs, theirs))
            moves.append(Move(path, ours, KEEP))
    return moves


class ToTorch:
    """One canonical Adam as torch's state_dict; `weights` are its network's moves in parameter order."""

    def __init__(
        self,
        name: str,
        weights: Sequence[Move],
        agent: Tree,
        told: Mapping[str, float | bool | None],
        defaults: Mapping[str, Default],
    ) -> None:
        """Take the canonical optimizer `name` of the canonical `agent`.

        `told` are settings that it may lack, `defaults` those of its library.
        """
        self.defaults = {**KERAS_DEFAULTS, **TORCH_DEFAULTS, **defaults}
        self.name = name
        self.weights = weights
        self.told = told
        self.agent = agent
        self.top = key(name)
        self.group = (self.top, key("param_groups"), index(0))

    def moves(self) -> list[Move]:
        """Return every moment, the step once per parameter, and the hyperparameters that are known."""
        step = canonical.setting(self.name, "step")
        found = []
        for number, weight in enumerate(self.weights):
            place = (self.top, key("state"), key(number))
            if self.started and step in self.agent:
                found.append(Move(step, (*place, key("step")), Cast("float32")))
            for slot in canonical.SLOTS:
                source = canonical.slot(self.name, slot, weight.source)
                if source in self.agent:
                    found.append(Move(source, (*place, key(_BACK[slot])), weight.rule))
        return found + [
            Move(s, t, ToValue(exact=self.told.get(str(s[1].value))))
            for s, t in self._settings()
            if s in self.agent
        ]

    @property
    def started(self) -> bool:
        """Whether there are moments at all; torch keeps no state before the first update."""
        return any(
            canonical.slot(self.name, slot, w.source) in self.agent
            for slot in canonical.SLOTS
            for w in self.weights
        )

    def added(self) -> dict[Path, ValueLeaf]:
        """Return the defaults of what the source does not hold, and the list of parameter numbers."""
        values = {}
        for source, target in self._settings():
            if source not in self.agent:
                values[target] = ValueLeaf(self._default(str(source[1].value)))
        for number in range(len(self.weights)):
            values[*self.group, key("params"), index(number)] = ValueLeaf(number)
        return values

    def containers(self) -> dict[Path, Container]:
        """Return the dicts, lists and the tuple of a torch optimizer's state_dict."""
        top = (self.top,)
        found = {top: _DICT, (*top, key("state")): _DICT, (*top, key("param_groups")): _LIST}
        found |= {self.group: _DICT, (*self.group, key("betas")): _TUPLE, (*self.group, key("params")): _LIST}
        if self.started:
            found |= {(*top, key("state"), key(n)): _DICT for n in range(len(self.weights))}
        return found

    def assumed(self) -> list[str]:
        """Return a sentence for every default that training depends on."""
        return [
            f"{self.name} {source[1].value} = {self._default(str(source[1].value))} "
            f"(default of {self._whose(str(source[1].value))}; the checkpoint does not hold it)"
            for source, target in self._settings()
            if source not in self.agent
            and source[1].value not in self.told
            and display(target[3:]) in _MATTERS
        ]

    def consumed(self) -> list[Path]:
        """Return what need not be written: torch has no state before the first update, so no count of 0."""
        step = canonical.setting(self.name, "step")
        if self.started or step not in self.agent:
            return []
        count = ToValue().leaf(self.agent[step])
        return [step] if isinstance(count, ValueLeaf) and count.value == 0 else []

    def missing(self) -> list[str]:
        """Return the moments that other weights of the network have and one lacks."""
        kinds = [s for s in canonical.SLOTS if any(self._has(s, w) for w in self.weights)]
        kinds = list(dict.fromkeys(("m", "v", *kinds))) if self.started else []
        lost = [
            f"{self.name}/state/{number}/{_BACK[slot]}"
            for number, weight in enumerate(self.weights)
            for slot in kinds
            if not self._has(slot, weight)
        ]
        if self.started and canonical.setting(self.name, "step") not in self.agent:
            lost.append(f"{self.name}/state/0/step")
        return lost

    def _has(self, slot: str, weight: Move) -> bool:
        return canonical.slot(self.name, slot, weight.source) in self.agent

    def _settings(self) -> list[tuple[Path, Path]]:
        known = [TORCH_SETTINGS.get(theirs, theirs) for theirs in _GROUP]
        others = [
            str(path[1].value)
            for path in self.agent
            if path[0] == attr(self.name) and len(path) == 2 and path[1].value not in (*known, "step")
        ]
        names = [*zip(known, _GROUP, strict=True), *((other, other) for other in others)]
        return [(canonical.setting(self.name, ours), self._target(theirs)) for ours, theirs in names]

    def _target(self, theirs: str) -> Path:
        name, _, position = theirs.partition("/")
        return (*self.group, key(name), *((index(int(position)),) if position else ()))

    def _default(self, ours: str) -> float | bool | None:
        if ours in self.told:
            return self.told[ours]
        if ours == "amsgrad" and any(self._has("vhat", w) for w in self.weights):
            return True
        return self.defaults[ours].value

    def _whose(self, ours: str) -> str:
        return self.defaults[ours].whose
