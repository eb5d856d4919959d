"""What a codebase calls what it writes: tables of names, from which layouts/writing.py makes plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.layouts.canonical import Part, PartLayer
from ckpttool.layouts.normalizers import Statistics
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.mapping.kinds import SPELLING, Kind
from ckpttool.tree import Container

TORCH: Mapping[str, Kind] = {kind: SPELLING["torch", kind] for kind in ("dense", "layer_norm")}


class Names(NamedTuple):
    """What a codebase calls the layers of one network.

    Patterns may have holes: `{n}` is a dense layer's number from `first`, `{i}` from 0, `{s}` its place in a
    Sequential where an activation follows every hidden layer. `norm` is a layer norm's pattern, None where
    there can be none; its `{n}` and `{i}` are those of its dense layer. `branches` name further heads by
    their canonical names; with `joined` the last layer gives the mean and then the branch "log_std".
    """

    hidden: str
    last: str
    branches: Mapping[str, str] = {}  # a tuple's default, never changed
    norm: str | None = None
    joined: bool = False
    first: int = 1


class Network(NamedTuple):
    """One canonical network ("critic/q1"), the entry that holds its tensors, and its layers' names."""

    place: str
    entry: Path
    names: Names


class Lone(NamedTuple):
    """One tensor that is no layer's: its canonical place ("temperature/log_alpha") and the target's path.

    It gets `shape` (-1 is what remains) if the library demands one. If the agent lacks it, it is `default`,
    is missing, or with `optional` is left out; the logarithm of a deviation is computed.
    """

    place: str
    target: Path
    shape: tuple[int, ...] | None = None
    default: Leaf | None = None
    optional: bool = False


def torch_path(entry: Path, layer: str, weight: str) -> Path:
    """Return a tensor's path in a torch state_dict, which is one dict of dotted names."""
    return (*entry, key(f"{layer}.{weight}"))


@dataclass(frozen=True, slots=True)
class Writing:
    """All that a codebase writes, `whose` it is for people ("skrl").

    `optimizers` and `counters` lead from canonical names ("critic_optimizer/q1") to their places; with
    `fresh` the library needs the optimizers even where the agent has none; at `joint` it has one of all
    networks, which no canonical optimizer is. `head` is the action map of its classes (agents.components),
    `hidden` the activation that they have unless they are told another, `depth` the number of their layers;
    "" and 0 where these may be any. `alike` says that all networks have the same hidden sizes, `values` that
    Q-functions give one number, `late` that they may take the action after the first layer. An agent without
    one of `needs` is refused; `constants` are what else the library's loader asks for.
    """

    whose: str
    rows: Sequence[Network | Lone | Statistics]
    head: str
    hidden: str = "relu"
    depth: int = 0
    alike: bool = False
    optimizers: Mapping[str, Path] = field(default_factory=dict)
    counters: Mapping[str, Path] = field(default_factory=dict)
    fresh: bool = False
    joint: Path | None = None
    needs: tuple[str, ...] = ("actor",)
    values: bool = True
    late: bool = False
    kinds: Mapping[str, Kind] = field(default_factory=lambda: TORCH)
    path: Callable[[Path, str, str], Path] = torch_path
    containers: Mapping[Path, Container] = field(default_factory=dict)
    constants: Mapping[Path, ValueLeaf] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> dict[str, Network]:
        """The networks that the codebase has, by their canonical titles."""
        return {row.place: row for row in self.rows if isinstance(row, Network)}


def layer_names(part: Part, names: Names) -> Iterator[tuple[int | str, PartLayer, str]]:
    """Go through a network's layers and the branches that the codebase has: place, layer, name there."""
    dense = [position for position, layer in enumerate(part.layers) if layer.kind == "dense"]
    number = step = -1
    for position, layer in enumerate(part.layers):
        norm = layer.kind == "layer_norm"
        number += not norm
        # Linear 0, activation 1, Linear 2; with a norm Linear 0, norm 1, activation 2, Linear 3.
        step += 1 if norm or not position else 2
        pattern = names.norm if norm and names.norm is not None else names.hidden
        pattern = names.last if position == dense[-1] else pattern
        yield position, layer, pattern.format(n=number + names.first, i=number, s=step)
    for branch, layer in part.branches:
        if names.joined and branch == "log_std":
            yield branch, layer, names.last.format(n=number + names.first, i=number, s=step)
        elif branch in names.branches:
            yield branch, layer, names.branches[branch]
