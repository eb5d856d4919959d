"""What filling a model comes to: which layer went where and how that was found, what stays open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttool.errors import MappingError, some
from ckpttool.leaf import Path
from ckpttool.mapping.report import Move
from ckpttool.mapping.solver import CONFIDENCE, By, Ordered
from ckpttool.tree import Tree

_MOST = 12
# What must hold if an order is to decide.
_HOLDS: dict[Ordered, str] = {
    "calls": "both programs call these layers in the same order",
    "numbers": "the numbers of both sides count the same layers in the same order",
}


@dataclass(frozen=True, slots=True)
class Match:
    """One layer's way: names of the source's and the target's, the kind, how it was found."""

    source: str
    target: str
    kind: str
    by: By

    def document(self) -> dict[str, str]:
        """Return the JSON object."""
        names = {"source": self.source, "target": self.target, "kind": self.kind}
        return {**names, "by": self.by, "confidence": CONFIDENCE[self.by]}


@dataclass(frozen=True, slots=True)
class Ambiguity:
    """Layers of both sides that fit each other, without evidence which is which.

    `ordered` is what the orders of both sides are, if they are of one kind.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ordered: Ordered | None = None

    def document(self) -> dict[str, list[str]]:
        """Return the JSON object."""
        return {"sources": list(self.sources), "targets": list(self.targets)}

    @property
    def sentence(self) -> str:
        """Both sides' candidates, none of them chosen, and the options that decide."""
        pairs = " ".join(f"--match '{name}=TARGET'" for name in self.sources[:_MOST])
        return (
            f"ambiguous: {some(self.sources, _MOST)} could fill {some(self.targets, _MOST)}, and "
            f"nothing tells which fills which; say it by {pairs}, each TARGET one of these, or by pairing "
            f"modules around them{self._accepted('--accept-order')}"
        )

    @property
    def argument(self) -> str:
        """The same for load_into."""
        pairs = ", ".join(f"{name!r}: TARGET" for name in self.sources[:_MOST])
        return (
            f"{some(self.sources, _MOST)} could fill {some(self.targets, _MOST)}, and "
            f"nothing tells which fills which: say it by match={{{pairs}}}, each TARGET one of these, or by "
            f"pairing modules around them{self._accepted('accept_order=True')}"
        )

    def _accepted(self, option: str) -> str:
        if self.ordered is None:
            return ""
        return f"; {option} only if {_HOLDS[self.ordered]}"


@dataclass(frozen=True, slots=True)
class Misfit:
    """Two that belong together, a layer or tensor of the source and one of the target, and do not fit."""

    source: str
    target: str
    found: str
    expected: str
    # The setting of both that differs, if the tensors fit.
    setting: str = ""

    @property
    def error(self) -> MappingError:
        """The error that says so."""
        if self.setting:
            return MappingError(
                f"{self.source} and {self.target} have the same weights and compute different things",
                expected=f"{self.setting} {self.expected}",
                found=f"{self.setting} {self.found}",
                hint=f"the model needs the checkpoint's {self.setting}",
            )
        unknown = "--kind '" in f"{self.expected} {self.found}"
        return MappingError(
            f"{self.source} and {self.target} belong together and do not fit",
            expected=self.expected,
            found=self.found,
            hint="--kind names what the layer computes, as shown"
            if unknown
            else "the model needs the checkpoint's layers and sizes; --match SOURCE=TARGET pairs others",
        )

    def document(self) -> dict[str, str]:
        """Return the JSON object."""
        return {
            "source": self.source,
            "target": self.target,
            "found": self.found,
            "expected": self.expected,
        }


@dataclass(frozen=True, slots=True)
class Filling:
    """The way into a skeleton: its tree with the source's values, the moves, and what stays open.

    `unfilled` are places in the skeleton that keep what their own program gave them, `unused` source leaves,
    `misfits` what belongs together and was left out because it does not fit. `evidence` says by place on what
    each pair rests.
    """

    tree: Tree
    moves: tuple[Move, ...]
    matched: tuple[Match, ...]
    ambiguous: tuple[Ambiguity, ...]
    unfilled: tuple[Path, ...]
    unused: tuple[Path, ...]
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    misfits: tuple[Misfit, ...] = ()
    evidence: Mapping[Path, By] = field(default_factory=dict)
