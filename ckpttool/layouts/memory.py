"""Recurrent layers before a policy's dense layers: which they are, and where their tensors go.

Names: torch/nn/modules/rnn.py, RNNBase (`weight_ih_l0`; a second direction ends in `_reverse`, a projection
is called `weight_hr_l0`); keras/src/layers/rnn/gru.py (a GRU that resets before the product has one bias, one
that resets after it two rows of them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpttool.layouts import fronts
from ckpttool.layouts.canonical import Binding, Part
from ckpttool.layouts.fronts import Front, Stream
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.mapping.kinds import Group, Row, candidates
from ckpttool.mapping.report import Move
from ckpttool.tree import Tree

_TORCH = re.compile(r"((?:.*/)?)((?:weight|bias)_(?:ih|hh))_l(\d+)")
_KERAS = re.compile(r"(.*)/(kernel|recurrent_kernel|bias)()")
_NAMES = {"torch": _TORCH, "tensorflow": _KERAS}
LSTM, GRU, GRU_BEFORE = "lstm", "gru", "gru_before"

Cells = tuple[tuple[str, ...], list[Move]]


def cells(tree: Tree, component: str, tensors: Mapping[str, Path], framework: str) -> Cells | None:
    """Return the kinds of the layers in their order, and the moves of their tensors; None for any others."""
    groups: dict[tuple[str, str], dict[str, Path]] = {}
    for whole, path in tensors.items():
        name = _NAMES[framework].fullmatch(whole)
        if name is None:
            return None
        groups.setdefault((name[1], name[3]), {})[name[2]] = path
    numbers: dict[str, list[str]] = {}
    for module, number in groups:
        numbers.setdefault(module, []).append(number)
    if framework == "torch" and any(own != [str(n) for n in range(len(own))] for own in numbers.values()):
        return None
    kinds: list[str] = []
    moves: list[Move] = []
    for place_number, paths in enumerate(groups.values()):
        group = {name: leaf for name, path in paths.items() if isinstance(leaf := tree[path], Leaf)}
        found = _cell(group, framework)
        if found is None:
            return None
        kinds.append(found[0])
        place = fronts.memory(component, place_number)
        moves += [Move(paths[row.stored], (*place, attr(row.canonical)), row.rule) for row in found[1]]
    return tuple(kinds), moves


def _cell(group: Group, framework: str) -> tuple[str, Iterable[Row]] | None:
    """Return the kind of one layer and the way of its tensors to canonical ones."""
    if framework == "tensorflow" and "bias" not in group:
        return None  # only the bias tells when a GRU resets
    kernel, recurrent = group.get("kernel"), group.get("recurrent_kernel")
    if kernel is not None and recurrent is not None and len(recurrent.shape) == 2:  # ConvLSTM's has four
        units, width = recurrent.shape
        if kernel.shape[1:] == group["bias"].shape == (width,) == (3 * units,):
            names = (("kernel", "kernel"), ("recurrent_kernel", "recurrent_kernel"), ("bias", "bias_input"))
            return GRU_BEFORE, [Row(*each) for each in names]
    found = [kind for kind in candidates(group, framework) if kind.name in (LSTM, GRU)]
    return (found[0].name, found[0].read(group).rows) if found else None


def remembered(binding: Binding, tree: Tree, framework: str) -> Binding:
    """Return the binding with what its policies remember in layers that come before all others."""
    found = {
        part.component: front
        for part in binding.parts
        if part.acts and (front := _front(binding, tree, part, framework)) is not None
    }
    return replace(binding, fronts={**binding.fronts, **found}) if found else binding


def _front(binding: Binding, tree: Tree, part: Part, framework: str) -> Front | None:
    left = frozenset(binding.unplaced.get(part.component, ()))
    if not left:
        return None
    placed = {move.source for move in binding.moves.moves if move.target[0] == attr(part.component)}
    own = [path for path, _ in tree.tensors() if path in placed or tree.names[path] in left]
    tensors = {tree.names[path]: path for path in own if path not in placed}
    # Only what comes first in the file can be taken to come first in the program.
    if len(tensors) != len(left) or own[: len(tensors)] != list(tensors.values()):
        return None
    read = cells(tree, part.component, tensors, framework)
    if read is None:
        return None
    kinds, moves = read
    inputs = moves[0].rule.leaf(tree[moves[0].source])
    if moves[0].target[-1] != fronts.KERNEL or not isinstance(inputs, Leaf):
        return None
    return Front(
        (Stream("obs", inputs.shape[:1]),),
        kinds,
        moves=tuple(moves),
        covers=frozenset(tensors),
        assumed=(f"{', '.join(kinds)} before the dense layers, as in the file, and nothing between them",),
    )
