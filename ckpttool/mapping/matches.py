"""What filling a model comes to: which layer went where and how that was found, what stays open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttool.errors import MappingError, some
from ckpttool.leaf import Path
from ckpttool.mapping.report import Move
from ckpttool.mapping.solver import CONFIDENCE, By
from ckpttool.tree import Tree


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

    `ordered` says that their order decides if it is accepted.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    ordered: bool = False

    def document(self) -> dict[str, list[str]]:
        """Return the JSON object."""
        return {"sources": list(self.sources), "targets": list(self.targets)}

    @property
    def sentence(self) -> str:
        """Both sides' candidates, none of them chosen, and the options that decide."""
        accepted = ", or --accept-order if both sides list them in the same order" if self.ordered else ""
        return (
            f"ambiguous: {some(self.sources, 4)} could fill {some(self.targets, 4)}; "
            f"--match SOURCE=TARGET pairs layers or modules around them{accepted}"
        )


@dataclass(frozen=True, slots=True)
class Misfit:
    """Two that belong together, a layer or tensor of the source and one of the target, and do not fit."""

    source: str
    target: str
    found: str
    expected: str

    @property
    def error(self) -> MappingError:
        """The error that says so."""
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
