"""The order of a PyTorch model's parameters, where a file holds them sorted by name.

`parameters()` goes through a module's own parameters, then through its submodules, each as a whole
(torch/nn/modules/module.py, `named_parameters`). A weight comes before its bias in the modules of torch.nn;
submodules whose names differ in a number only (`0`, `1`; `fc1`, `fc2`) come in the order of the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]
# Positions of the chains of one module that are followed at once.
_MOST_STATES = 5_000
_RECURRENT = re.compile(r"(weight|bias)_(ih|hh|hr)_l(\d+)(_reverse)?")
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Module:
    """A module: its own parameters by number, and its submodules."""

    own: dict[str, int] = field(default_factory=dict)
    inner: dict[str, _Module] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.own) + sum(each.size for each in self.inner.values())


def only(
    parameters: Sequence[tuple[Sequence[str], Shape]], wanted: Sequence[Shape], *, numbered: bool
) -> list[int] | None:
    """Return the numbers of named parameters in the only order with these shapes, None unless there is one.

    With `numbered`, submodules such as `fc1` and `fc2` come in the order of their numbers; those whose names
    are numbers always do.
    """
    root = _Module()
    for number, (name, _) in enumerate(parameters):
        module = root
        for step in name[:-1]:
            module = module.inner.setdefault(step, _Module())
        module.own[name[-1]] = number
    if root.size != len(wanted):
        return None
    return _Search([shape for _, shape in parameters], wanted, numbered=numbered).only(root)


class _AmbiguousError(Exception):
    """Several orders fit, or too many would have to be tried."""


class _Search:
    """Looks for the orders of parameters with `shapes` that have the shapes `wanted`."""

    def __init__(self, shapes: Sequence[Shape], wanted: Sequence[Shape], *, numbered: bool) -> None:
        self.shapes, self.wanted, self.numbered = shapes, wanted, numbered

    def only(self, root: _Module) -> list[int] | None:
        """Return the one order of a module's parameters, None unless there is one."""
        try:
            return self._module(root, 0)
        except _AmbiguousError:
            return None

    def _module(self, module: _Module, start: int) -> list[int] | None:
        """Return the one order, None where none fits; raise _AmbiguousError for several."""
        own = self._chained(_own_chains(module.own), start)
        if own is None:
            return None
        inner = self._chained(_inner_chains(module.inner, numbered=self.numbered), start + len(own))
        return None if inner is None else [*own, *inner]

    def _item(self, item: int | _Module, start: int) -> list[int] | None:
        if isinstance(item, _Module):
            return self._module(item, start)
        fits = start < len(self.wanted) and self.shapes[item] == self.wanted[start]
        return [item] if fits else None

    def _chained(self, chains: Sequence[Sequence[int | _Module]], start: int) -> list[int] | None:
        """Return the one way to merge chains of parameters or modules, each of which keeps its order."""
        ways: dict[tuple[int, ...], list[int]] = {(0,) * len(chains): []}
        for _ in range(sum(map(len, chains))):
            after: dict[tuple[int, ...], list[int]] = {}
            several: set[tuple[int, ...]] = set()
            for taken, order in ways.items():
                for n, chain in enumerate(chains):
                    if taken[n] == len(chain):
                        continue
                    more = self._item(chain[taken[n]], start + len(order))
                    if more is None:
                        continue
                    now = (*taken[:n], taken[n] + 1, *taken[n + 1 :])
                    if now in after:
                        several.add(now)
                    after[now] = [*order, *more]
            if len(after) > _MOST_STATES or several:
                raise _AmbiguousError
            ways = after
        (found,) = ways.values() or (None,)
        return found


def _own_chains(own: Mapping[str, int]) -> list[list[int]]:
    """Return parameters in chains: a weight is before its bias, those of a recurrent layer have one order."""
    chains: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for name, number in own.items():
        recurrent = _RECURRENT.fullmatch(name)
        if recurrent is not None:
            kind, gate, layer, reverse = recurrent.groups()
            place = (int(layer), bool(reverse), gate == "hr", kind == "bias", gate == "hh")
            chains.setdefault("recurrent", []).append((place, number))
        else:
            chains.setdefault(name.replace("bias", "weight"), []).append((("bias" in name,), number))
    return [[number for _, number in sorted(chain)] for chain in chains.values()]


def _inner_chains(inner: Mapping[str, _Module], *, numbered: bool) -> list[list[int | _Module]]:
    """Return submodules in chains: those whose names differ in a number only come in its order."""
    chains: dict[str, list[tuple[list[int], _Module]]] = {}
    for name, module in inner.items():
        numbers = [int(number) for number in _NUMBER.findall(name)]
        chains.setdefault(_NUMBER.sub("#", name) if numbered or name.isdecimal() else name, []).append(
            (numbers, module)
        )
    return [[module for _, module in sorted(chain, key=_numbers)] for chain in chains.values()]


def _numbers(item: tuple[list[int], _Module]) -> list[int]:
    return item[0]
