"""An optimizer's state_dict of torch, bound to the canonical optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.layouts import canonical
from ckpttool.layouts.modules import Segments
from ckpttool.layouts.optimizers.families import (
    ADADELTA,
    ADAGRAD,
    ADAM,
    ADAMAX,
    FAMILIES,
    RMSPROP,
    SGD,
    TORCH_OTHERS,
    WITHOUT,
    Family,
    not_converted,
)
from ckpttool.layouts.optimizers.torch_groups import Group, Weight, groups, owners
from ckpttool.layouts.table import Optimizer, OptimizerMoves
from ckpttool.leaf import Path, ValueLeaf
from ckpttool.mapping.numbers import Given
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Rule, ToTensor
from ckpttool.tree import Tree

# Settings of torch/optim/adam.py that RAdam, Adamax and SparseAdam lack beside the younger ones.
_AMSGRAD, _YOUNGER = "amsgrad", frozenset(("foreach", "maximize"))


def from_torch(optimizer: Optimizer) -> OptimizerMoves:
    """Bind a torch optimizer's state_dict: the i-th state belongs to the i-th parameter of its groups.

    Where several groups differ in a setting, every weight has its own: `NAME_optimizer/SETTING/WEIGHT`. An
    optimizer that is not known, or whose parameters are not sure, stays unmapped, with a note.
    """
    mine = optimizer.own
    found = groups(mine, optimizer.tree) if mine else ()
    keys = {name.partition("/")[0] for group in found or () for name in group.settings}
    slots = {name[2] for name in mine if name[0] == "state" and len(name) == 3}
    other = _other(keys, slots)
    if other:
        note = not_converted(optimizer.name, other)
        return OptimizerMoves((), note=note)
    order = owners(found, mine, optimizer) if found else None
    if order is None or found is None:
        note = f"{optimizer.name}: its parameter groups do not match the network, none is mapped; {WITHOUT}"
        return OptimizerMoves((), note=note if mine else "")
    family = _family(keys, slots)
    moves, of = _slots(mine, order, family, optimizer)
    steps = [
        Move(path, canonical.setting(optimizer.name, "step"), ToTensor("int64"))
        for name, path in mine.items()
        if name[:1] == ("state",) and name[2:] == ("step",)
    ]
    # torch counts updates once per parameter; all move to one counter, which must be the same number.
    moves += steps
    told = [*_settings(found, order, family, optimizer), *_grouped(found, order, optimizer)]
    listed = {member.listed for group in found for member in group.members}
    repeated = {path for group in found for path in group.settings.values()} - {m.source for m in told}
    consumed = frozenset((*listed, *repeated, *(step.source for step in steps[1:])))
    return OptimizerMoves((*moves, *told), consumed, of)


def _other(keys: set[str], slots: set[str]) -> str | None:
    """Return the class of an optimizer that is none of ours, by its settings' names."""
    found = next((whose for name, whose in TORCH_OTHERS.items() if name in keys), None)
    others = "betas" in keys and _AMSGRAD not in keys and bool(keys & _YOUNGER)
    if found is None and others and "exp_inf" not in slots:
        return "RAdam, Adamax or SparseAdam"
    return found


def _family(keys: set[str], slots: set[str]) -> Family:
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


def _slots(
    mine: Mapping[Segments, Path], order: Mapping[str, Weight], family: Family, optimizer: Optimizer
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
                # An SGD of old without momentum keeps None; it is told like a setting.
                places = ((canonical.slot(optimizer.name, theirs, t), KEEP) for t, _ in weight.places)
            else:
                places = ((canonical.slot(optimizer.name, slot, t), rule) for t, rule in weight.places)
                of[path] = weight.source
            moves += [Move(path, target, rule) for target, rule in places]
    return moves, of


def _settings(
    found: Sequence[Group], order: Mapping[str, Weight], family: Family, optimizer: Optimizer
) -> Iterator[Move]:
    """Go through the settings: one for all where the groups agree, else one for each weight."""
    names = dict.fromkeys(name for group in found for name in group.settings)
    for theirs in names:
        ours = family.torch_settings.get(theirs, theirs)
        paths = [group.settings.get(theirs) for group in found]
        if paths[0] is not None and _agree(paths, optimizer.tree):
            yield Move(paths[0], canonical.setting(optimizer.name, ours), KEEP)
            continue
        for path, group in zip(paths, found, strict=True):
            for member in group.members if path is not None else ():
                for target, _ in order[member.number].places:
                    assert path is not None  # noqa: S101  # the loop's own condition
                    yield Move(path, canonical.slot(optimizer.name, ours, target), KEEP)


def _agree(paths: Sequence[Path | None], tree: Tree) -> bool:
    if len(paths) == 1:
        return True
    values = [tree[path] if path is not None else None for path in paths]
    first = values[0]
    return isinstance(first, ValueLeaf) and all(
        isinstance(each, ValueLeaf) and repr(each.value) == repr(first.value) for each in values
    )


def _grouped(found: Sequence[Group], order: Mapping[str, Weight], optimizer: Optimizer) -> Iterator[Move]:
    """Go through what says which weight is where: its name, its group, its number if the order is another."""
    ranks = {weight: n for n, weight in enumerate(dict.fromkeys(s for s, _, _ in optimizer.weights))}
    for number, group in enumerate(found):
        inside = [ranks[order[member.number].source] for member in group.members]
        for member in group.members:
            for target, _ in order[member.number].places:
                if member.named is not None:
                    yield Move(member.named, canonical.slot(optimizer.name, canonical.NAMES, target), KEEP)
                if len(found) > 1:
                    place = canonical.slot(optimizer.name, canonical.GROUP, target)
                    yield Move(member.listed, place, Given(number))
                if inside != sorted(inside):
                    yield Move(member.listed, canonical.slot(optimizer.name, canonical.NUMBER, target), KEEP)
