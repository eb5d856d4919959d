"""Where a codebase keeps the statistics of observations, and how it normalises with them.

The same numbers mean another function where epsilon stands elsewhere or the result is limited otherwise. Then
they are computed anew so that the function stays, or are left to the sidecar where no numbers can do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.layouts.canonical import NORMALIZER, Binding, Norm
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, index
from ckpttool.mapping.parts import filled
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, Cast, Reshape, Rule, chain
from ckpttool.source import Inline
from ckpttool.tree import Tree

if TYPE_CHECKING:
    import numpy as np

_SAME = 1e-6  # twice the rounding of the float32 numbers that most libraries keep
_FIRST = (index(0), attr("kernel"))
_NOTE = "observation statistics are in the sidecar"


class Made(NamedTuple):
    """Moves of statistics that are there, and those that are computed."""

    moves: tuple[Move, ...] = ()
    added: Mapping[Path, Leaf | ValueLeaf] = {}  # a tuple's default, never changed
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Statistics(NamedTuple):
    """The places of mean, var, std and count ([obs_dim] each but the last), and what is done with them.

    `whose` is "critic_" for those of what a critic sees, which are only carried. `shape` is that of the
    tensors (-1 is obs_dim); `epsilon`, `outside` and `clip` are those of canonical.Norm. Where they are
    `required` an agent that has none gets such as change nothing, and one whose cannot be held is refused.
    """

    places: Mapping[str, Path]
    dtype: str
    shape: tuple[int, ...] = (-1,)
    epsilon: float = 0.0
    outside: bool = False
    clip: float | None = None
    counter: str = "int64"
    whose: str = ""
    required: bool = False

    def placed(self, binding: Binding, agent: Tree, library: str) -> Made:
        """Return where the agent's statistics go, if it has any."""
        there = {name: agent.get(self.source(name)) for name in (*self.places, "mean", "var", "std")}
        found = {name: leaf for name, leaf in there.items() if isinstance(leaf, Leaf)}
        norm = binding.facts.norm or _plain(found)
        if norm is None or (self.whose and not found):
            return self._neutral(agent, binding) if self.required else Made()
        if self.places.keys() - {"count"} <= found.keys() and (self.whose or self._is(norm, found)):
            return self._kept(found)
        if self.whose:
            return Made(notes=(f"{_NOTE}: {library} keeps them otherwise",))
        return self._computed(norm, found, library)

    def source(self, name: str) -> Path:
        """Return the canonical path of one of the statistics."""
        return (attr(NORMALIZER), attr(f"{self.whose}{name}"))

    def _is(self, norm: Norm, found: Mapping[str, Leaf]) -> bool:
        """Say whether the tensors that are there are the agent's statistics by the library's formula."""
        import numpy as np

        if norm.clip != self.clip or any(found[n].dtype != self.dtype for n in self.places if n != "count"):
            return False
        std = found["std"] if "std" in self.places else None
        ours = Norm(found["mean"], found.get("var"), std, self.epsilon, outside=self.outside)
        pairs = ((spread(ours), spread(norm)), (flat(ours.mean), flat(norm.mean)))
        return all(one.shape == two.shape and np.allclose(one, two, rtol=_SAME, atol=0) for one, two in pairs)

    def _kept(self, found: Mapping[str, Leaf]) -> Made:
        moves = []
        for name in self.places:
            if name not in found:
                continue
            leaf = found[name]
            shape = () if name == "count" else _filled_in(self.shape, leaf.size)
            rule: Rule = KEEP if leaf.shape == shape else Reshape(shape)
            if name == "count" and leaf.dtype != self.counter:
                rule = chain(rule, Cast(self.counter))
            moves.append(Move(self.source(name), self.places[name], rule))
        return self._counted(Made(tuple(moves)), found)

    def _computed(self, norm: Norm, found: Mapping[str, Leaf], library: str) -> Made:
        """Return numbers with which the library's own formula is the agent's."""
        import numpy as np

        mean, wide = flat(norm.mean), spread(norm)
        std = wide - self.epsilon if self.outside else np.sqrt(np.maximum(wide**2 - self.epsilon, 0))
        if norm.clip != self.clip or not (std > 0).all():
            limit = "no limit" if self.clip is None else f"a limit of {self.clip:g}"
            why = f"{library} has {limit} after it" if norm.clip != self.clip else "one varies too little"
            if self.required:
                raise UnsupportedError(f"the observation statistics cannot be those of {library}", found=why)
            return Made(notes=(f"{_NOTE}: {why}",))
        numbers = {"mean": mean, "var": std**2, "std": std}
        added: dict[Path, Leaf | ValueLeaf] = {
            self.places[name]: self._leaf(array) for name, array in numbers.items() if name in self.places
        }
        note = f"observation statistics are computed so that {library}'s formula is the agent's"
        count = {name: leaf for name, leaf in found.items() if name == "count"}
        made = self._kept(count)
        return made._replace(added={**added, **made.added}, notes=(note,))

    def _neutral(self, agent: Tree, binding: Binding) -> Made:
        """Return statistics that change nothing: the library keeps some in every network."""
        import numpy as np

        part = next(part for part in binding.parts if part.acts)
        kernel = agent[(*part.prefix, *_FIRST)]
        width = kernel.shape[0] if isinstance(kernel, Leaf) else 0
        numbers = {"mean": np.zeros(width), "var": np.ones(width), "std": np.ones(width)}
        added: dict[Path, Leaf | ValueLeaf] = {
            self.places[name]: self._leaf(array) for name, array in numbers.items() if name in self.places
        }
        return Made(added=added)

    def _counted(self, made: Made, found: Mapping[str, Leaf]) -> Made:
        if "count" not in self.places or "count" in found:
            return made
        zero = filled(self.counter, (), 0, role="counter")
        said = f"{NORMALIZER}/{self.whose}count = 0 (the source has none)"
        return made._replace(added={self.places["count"]: zero}, assumed=(said,))

    def _leaf(self, numbers: np.ndarray) -> Leaf:
        from ckpttool import dtypes

        shape = _filled_in(self.shape, numbers.size)
        data = numbers.astype(dtypes.numpy_dtype(self.dtype)).tobytes()
        return Leaf(self.dtype, shape, Inline(data), "", "buffer")


def _filled_in(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(size if extent == -1 else extent for extent in shape)


def _plain(found: Mapping[str, Leaf]) -> Norm | None:
    """Return the statistics of an agent of which nothing says how it uses them."""
    if "mean" not in found or not {"var", "std"} & found.keys():
        return None
    return Norm(found["mean"], found.get("var"), None if "var" in found else found["std"])


def spread(norm: Norm) -> np.ndarray:
    """Return what the centred observations are divided by, float64 [obs_dim]."""
    import numpy as np

    std = flat(norm.std) if norm.std is not None else np.sqrt(flat(norm.var))
    return std + norm.epsilon if norm.outside else np.sqrt(std**2 + norm.epsilon)


def flat(leaf: Leaf | None) -> np.ndarray:
    """Return a tensor's numbers in one row, float64 [obs_dim]."""
    assert leaf is not None  # noqa: S101 - a Norm has a deviation or a variance
    return leaf.array().astype("f8").reshape(-1)
