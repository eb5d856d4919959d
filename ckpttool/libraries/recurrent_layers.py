"""Recurrent layers of a policy, which precede its other layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.tree import Leaf, Path, Tree, attr
from ckpttool.libraries.schema import (
    KERNEL,
    AgentNetwork,
    EncoderInput,
    PolicyEncoder,
    RecognizedAgent,
    recurrent_layer_path,
)
from ckpttool.mapping.rules import Move

if TYPE_CHECKING:
    from ckpttool.mapping.layer_kinds import Group, TensorMapping


_TORCH = deferred.compile(r"((?:.*/)?)((?:weight|bias)_(?:ih|hh))_l(\d+)")
_KERAS = deferred.compile(r"(.*)/(kernel|recurrent_kernel|bias)()")
_NAMES = {"torch": _TORCH, "tensorflow": _KERAS}
LSTM, GRU, GRU_BEFORE = "lstm", "gru", "gru_before"
RecurrentLayers = tuple[tuple[str, ...], list[Move]]


def read_recurrent_layers(
    tree: Tree, component: str, tensors: Mapping[str, Path], framework: str
) -> RecurrentLayers | None:
    """Return the layer kinds in order, and the moves of their tensors; None for unsupported ones.

    Names: torch/nn/modules/rnn.py, RNNBase (`weight_ih_l0`; a second direction ends in `_reverse`, a
    projection is named `weight_hr_l0`); keras/src/layers/rnn/gru.py (a GRU that resets before the product has
    one bias, one that resets after it two rows of them).
    """
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
        cell = _read_cell(group, framework)
        if cell is None:
            return None
        kinds.append(cell[0])
        layer_path = recurrent_layer_path(component, place_number)
        moves += [Move(paths[row.stored], (*layer_path, attr(row.canonical)), row.rule) for row in cell[1]]
    return tuple(kinds), moves


def _read_cell(group: Group, framework: str) -> tuple[str, Iterable[TensorMapping]] | None:
    """Return the kind of one layer and the mapping of its tensors to canonical ones."""
    from ckpttool.mapping.kind_table import candidate_kinds
    from ckpttool.mapping.layer_kinds import TensorMapping

    if framework == "tensorflow" and "bias" not in group:
        return None  # only the bias shape shows when a GRU resets
    kernel, recurrent = group.get("kernel"), group.get("recurrent_kernel")
    if kernel is not None and recurrent is not None and len(recurrent.shape) == 2:  # ConvLSTM's has four axes
        units, width = recurrent.shape
        if kernel.shape[1:] == group["bias"].shape == (width,) == (3 * units,):
            names = (("kernel", "kernel"), ("recurrent_kernel", "recurrent_kernel"), ("bias", "bias_input"))
            return GRU_BEFORE, [TensorMapping(*row) for row in names]
    kinds = [kind for kind in candidate_kinds(group, framework) if kind.name in (LSTM, GRU)]
    return (kinds[0].name, kinds[0].read(group).rows) if kinds else None


def add_recurrent_layers(binding: RecognizedAgent, tree: Tree, framework: str) -> RecognizedAgent:
    """Return the binding with its policies' recurrent layers, if they precede all others."""
    encoders = {
        part.component: front
        for part in binding.parts
        if part.acts and (front := _read_recurrent_encoder(binding, tree, part, framework)) is not None
    }
    return replace(binding, fronts={**binding.fronts, **encoders}) if encoders else binding


def _read_recurrent_encoder(
    binding: RecognizedAgent, tree: Tree, part: AgentNetwork, framework: str
) -> PolicyEncoder | None:
    left = frozenset(binding.unplaced.get(part.component, ()))
    if not left:
        return None
    placed = {move.source for move in binding.moves.moves if move.target[0] == attr(part.component)}
    own = [path for path, _ in tree.tensors() if path in placed or tree.names[path] in left]
    tensors = {tree.names[path]: path for path in own if path not in placed}
    # Only a recurrent layer that is first in the file is assumed to be first in the program.
    if len(tensors) != len(left) or own[: len(tensors)] != list(tensors.values()):
        return None
    read = read_recurrent_layers(tree, part.component, tensors, framework)
    if read is None:
        return None
    kinds, moves = read
    inputs = moves[0].rule.leaf(tree[moves[0].source])
    if moves[0].target[-1] != KERNEL or not isinstance(inputs, Leaf):
        return None
    return PolicyEncoder(
        (EncoderInput("obs", inputs.shape[:1]),),
        kinds,
        moves=tuple(moves),
        covers=frozenset(tensors),
        assumed=(f"{', '.join(kinds)} before the dense layers, in file order, with nothing between them",),
    )
