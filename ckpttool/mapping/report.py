"""What a mapping did: which leaf went where by which rule, what stayed behind, what was assumed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.globs import matcher, nothing
from ckpttool.leaf import Path
from ckpttool.mapping.rules import Rule


@dataclass(frozen=True, slots=True)
class Move:
    """One leaf's way: from a path, to a path, by a rule. A source may feed several targets."""

    source: Path
    target: Path
    rule: Rule


@dataclass(frozen=True, slots=True)
class Moves:
    """A whole mapping: its moves in target order, and what it had to take for granted."""

    moves: tuple[Move, ...]
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mapped:
    """One line of the report: display paths, the rule's name, shapes before and after.

    `by` is the evidence that the two belong together, None where the target has the source's own names.
    """

    source: str
    target: str
    rule: str
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    by: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "source": self.source,
            "target": self.target,
            "rule": self.rule,
            "shape_in": list(self.shape_in),
            "shape_out": list(self.shape_out),
            **({} if self.by is None else {"by": self.by}),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Every source and where it went; `unused` sources and `missing` targets make a conversion fail."""

    mapped: tuple[Mapped, ...]
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Say whether nothing was left over on either side."""
        return not self.unused and not self.missing

    def shown(self, glob: str | None) -> Report:
        """Return the report with those moves alone of which a path matches; raise UsageError if none does."""
        keep = matcher(glob)
        kept = tuple(each for each in self.mapped if keep(each.source) or keep(each.target))
        if glob is not None and not kept:
            raise nothing(glob, [path for each in self.mapped for path in (each.source, each.target)])
        return replace(self, mapped=kept)
