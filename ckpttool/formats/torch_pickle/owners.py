"""Which parameter each of an optimizer's slots belongs to, where only one network of the checkpoint fits.

torch numbers the parameters of an optimizer through its groups, in the order in which they were given to it,
and that of `module.parameters()` is the order of the module's state_dict without its buffers
(torch/optim/optimizer.py, state_dict(); torch/nn/modules/module.py, _save_to_state_dict). Optimizers made
from `named_parameters()` keep names in `param_names` (since torch 2.6), distributed ones use names for
numbers (torch/distributed/checkpoint/state_dict.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.leaf import Key, Leaf, Path, display, key
from ckpttool.tree import Tree

# A moment of another shape than its parameter (Adafactor's rows and columns) tells nothing of it.
_ALIKE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg")
) | {"acc_delta", "sum", "prev", "step_size", "ax"}
_STATE, _GROUPS, _PARAMS, _NAMES = key("state"), key("param_groups"), key("params"), key("param_names")
_FLAT = "state."  # distributed ones can be one dict of names like `state.l1.weight.exp_avg`
# Each optimizer is compared with each network; a checkpoint with more of them is left as it is.
_MOST = 64


class Joined(NamedTuple):
    """A tree whose slots name their parameters as far as that is sure, and what a person should know."""

    tree: Tree
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Optimizer:
    """One optimizer's state_dict.

    `slots` are by number, or by name, in `state`; `numbers` go through all `groups`.
    """

    slots: dict[str, dict[Path, Leaf]] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    groups: set[Key] = field(default_factory=set)

    def named(self) -> Mapping[str, str] | None:
        """Return the parameters' names by what stands for them in the state, None if not all are told."""
        if not any(step.isdigit() for step in self.slots):
            return {step: step for step in self.slots}
        if not self.names or len(self.names) != len(self.numbers) or not self.slots.keys() <= {*self.numbers}:
            return None
        told = dict(zip(self.numbers, self.names, strict=True))
        return {step: told[step] for step in self.slots}


def joined(tree: Tree) -> Joined:
    """Return the tree with `Leaf.of` for every slot whose parameter is known by name or by order.

    Order decides for an optimizer of one group only, and only if one network alone has as many parameters, of
    the shapes that the slots have.
    """
    optimizers = _optimizers(tree)
    if not optimizers or len(optimizers) > _MOST:
        return Joined(tree, ())
    networks = _networks(tree, optimizers.keys())
    leaves, notes = dict(tree.items()), []
    for top, optimizer in optimizers.items() if len(networks) <= _MOST else ():
        found = _found(tree, optimizer, networks)
        if found is None:
            continue
        network, order, how = found
        for step, slots in optimizer.slots.items():
            leaves |= {path: replace(leaf, of=order[step]) for path, leaf in slots.items()}
        mine, theirs = display(top) or "the optimizer", display(network) or "the weights"
        notes.append(f"{mine}: its state belongs to {theirs}, by {how} of the parameters")
    return Joined(Tree(leaves, tree.aliases, tree.containers) if notes else tree, tuple(notes))


def _found(
    tree: Tree, optimizer: _Optimizer, networks: Mapping[Path, Mapping[str, Path]]
) -> tuple[Path, Mapping[str, Path], str] | None:
    """Return the one network that fits, its parameters by what stands for them in the state, and by what."""
    names = optimizer.named()
    sure = []
    for top, parameters in networks.items():
        order: dict[str, Path] | None = None
        if names is not None:
            if parameters.keys() >= set(names.values()):
                order = {step: parameters[name] for step, name in names.items()}
        elif len(optimizer.groups) == 1 and len(parameters) == len(optimizer.numbers):
            order = dict(zip(optimizer.numbers, parameters.values(), strict=True))
        if order is not None and _agree(tree, optimizer, order):
            sure.append((top, order, "the order and the shapes" if names is None else "the names"))
    return sure[0] if len(sure) == 1 else None


def _agree(tree: Tree, optimizer: _Optimizer, order: Mapping[str, Path]) -> bool:
    """Say whether every slot that must have its parameter's shape has it, and there is such a slot."""
    if not optimizer.slots.keys() <= order.keys():
        return False
    pairs = [
        (leaf.shape, owner.shape)
        for step, slots in optimizer.slots.items()
        for leaf in slots.values()
        if leaf.slot in _ALIKE and isinstance(owner := tree[order[step]], Leaf)
    ]
    return bool(pairs) and all(one == other for one, other in pairs)


def _optimizers(tree: Tree) -> dict[Path, _Optimizer]:
    """Return the optimizers that have slots, by where they stand; each leaf is looked at once."""
    found: dict[Path, _Optimizer] = {}
    for path, leaf in tree.tensors():
        if leaf.slot is None:
            continue
        last = str(path[-1].value)
        if len(path) > 2 and path[-3] == _STATE:
            top, owner = path[:-3], str(path[-2].value)
        elif last.startswith(_FLAT) and last.endswith(f".{leaf.slot}"):
            top, owner = path[:-1], last[len(_FLAT) : -len(leaf.slot) - 1]
        else:
            continue
        found.setdefault(top, _Optimizer()).slots.setdefault(owner, {})[path] = leaf
    for path, value in tree.plain() if found else ():
        # `param_groups`, a group, `params` or `param_names`, a position.
        if len(path) < 4 or path[-4] != _GROUPS or path[:-4] not in found:
            continue
        optimizer = found[path[:-4]]
        if path[-2] == _PARAMS:
            optimizer.groups.add(path[-3])
            optimizer.numbers.append(str(value.value))
        elif path[-2] == _NAMES and isinstance(value.value, str):
            optimizer.names.append(value.value)
    return found


def _networks(tree: Tree, optimizers: Collection[Path]) -> dict[Path, dict[str, Path]]:
    """Return the parameters by name of every dict that holds tensors by name, optimizers apart."""
    found: dict[Path, dict[str, Path]] = {}
    depths = {len(top) for top in optimizers}
    for path, leaf in tree.tensors():
        if leaf.role != "parameter" or not path or path[-1].kind != "key":
            continue
        if isinstance(path[-1].value, str) and not any(path[:n] in optimizers for n in depths):
            found.setdefault(path[:-1], {})[path[-1].value] = path
    return found
