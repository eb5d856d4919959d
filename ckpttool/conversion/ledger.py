"""Account for every tensor of a checkpoint that fills a user's model.

A tensor is used, left out for a reason (state of an optimizer, a counter, another part of the
checkpoint, a pattern of the user), or unused, which is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.conversion.preparation import PreparedTree
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, OmittedTensor, merge_entries
from ckpttool.core.text import compile_glob, format_count, no_match_error, suggest_glob
from ckpttool.core.tree import Leaf, Path
from ckpttool.evaluation.vocabulary import weight_kind
from ckpttool.formats import onnx
from ckpttool.libraries import onnx_policies

if TYPE_CHECKING:
    from ckpttool.mapping.solver import FillResult


# Reasons by role; the other reasons depend on where a tensor is.
_BY_ROLE = {"counter": "counter", "slot": "optimizer state", "replay": "replay data", "other": "no weight"}
_OUTSIDE, _NO_STATE = "outside the selected part", "not in the model's state_dict"
_BUFFER, _SHARED = "buffer that the target does not have", "same values as another tensor"
_CONSTANT = "constant of the graph"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ModelLedger:
    """Tensors of a source that fill nothing: `unused` ones are errors, those that are `left_out` are not."""

    unused: tuple[str, ...] = ()
    left_out: tuple[OmittedTensor, ...] = ()
    allowed: Mapping[str, str] = field(default_factory=dict)
    """by name, the option that permits leaving a tensor out"""

    def kinds(self) -> Iterator[str]:
        """Yield the unused tensors by kind where their names show it."""
        kinds: dict[str, list[str]] = {}
        for name in self.unused:
            kinds.setdefault(weight_kind(name) or "", []).append(name)
        yield from (f"{kind}: {abbreviate_list(names, _SHOWN)}" for kind, names in kinds.items() if kind)

    def notes(self) -> Iterator[str]:
        """Yield a sentence per kind of unused tensors, and one on what is left out."""
        yield from (f"unused {kind}" for kind in self.kinds())
        counts: dict[str, list[str]] = {}
        for tensor in self.left_out:
            counts.setdefault(tensor.reason, []).append(tensor.path)
        known = {*_BY_ROLE.values()} - {"counter"}
        rows = [
            f"{format_count(len(names), 'tensor')} ({reason})"
            for reason, names in counts.items()
            if reason not in known
        ]
        if rows:
            yield f"left out: {'; '.join(rows)}"

    def settle(self, *entries: Iterable[LedgerEntry]) -> LedgerEntries:
        """Return all entries; those of tensors that the user leaves out do not affect the exit status."""
        return tuple(
            replace(entry, decides=False, origin=self.allowed[entry.where])
            if entry.where in self.allowed
            else entry
            for entry in merge_entries(*entries)
        )

    def without(self, constants: Collection[str]) -> ModelLedger:
        """Return the ledger in which these constants of the graph are no weights."""
        spare = [name for name in self.unused if name in constants]
        left = (*self.left_out, *(OmittedTensor(name, _CONSTANT) for name in spare))
        return replace(self, unused=tuple(name for name in self.unused if name not in spare), left_out=left)

    def residue(self) -> list[dict[str, str]]:
        """Return the tensors that the user leaves out, for the receipt."""
        return [tensor.document() for tensor in self.left_out if tensor.path in self.allowed]


def account_for_tensors(
    checkpoint: Checkpoint,
    ready: PreparedTree,
    filling: FillResult,
    *,
    used: Collection[Path],
    part: str | None,
    patterns: Sequence[str],
    option: str,
    agent: bool,
) -> ModelLedger:
    """Return what becomes of the tensors that fill nothing.

    Args:
        checkpoint: the source.
        ready: its tree, prepared for the mapping.
        filling: the mapping.
        used: paths whose values go elsewhere in the target (an optimizer).
        part: the part of the source that fills the model.
        patterns: tensors that may be left out; UsageError for a pattern that matches none.
        option: what precedes such a pattern where the user writes it.
        agent: the tree contains the networks of a recognised agent.
    """
    reached = {move.source for move in filling.moves} | set(used)
    unused = [*(ready.names[path] for path in filling.unused), *ready.lost]
    left: dict[str, str] = {}
    for path, leaf in ready.tree.tensors():
        if path not in reached and ready.names[path] not in unused:
            left[ready.names[path]] = _reason(leaf)
    if checkpoint.format == onnx.NAME:
        lost, constants = onnx_policies.list_unread_constants(checkpoint)
        unused += lost
        left |= dict.fromkeys(constants, _CONSTANT)
    else:
        known = {*ready.names.values(), *ready.lost, *_merged_names(ready)}
        left |= dict(_outside(checkpoint, known, part, agent=agent))
    names_of_targets = [name for path, name in ready.names.items() if path in reached]
    allowed = _match_patterns(patterns, (*unused, *left), names_of_targets, option)
    left |= allowed
    return ModelLedger(
        tuple(name for name in unused if name not in allowed),
        tuple(OmittedTensor(name, reason) for name, reason in left.items()),
        allowed,
    )


def _reason(leaf: Leaf) -> str:
    if leaf.role in _BY_ROLE:
        return _BY_ROLE[leaf.role]
    return _BUFFER if leaf.role == "buffer" else _SHARED


def _merged_names(ready: PreparedTree) -> Iterator[str]:
    """Yield the names of tensors that were merged before the mapping (weight norm)."""
    for path in ready.rules:
        if " and " in ready.names[path]:
            yield from ready.names[path].split(" and ")


def _outside(
    checkpoint: Checkpoint, known: Collection[str], part: str | None, *, agent: bool
) -> Iterator[tuple[str, str]]:
    """Yield the checkpoint's tensors that were not prepared for the mapping, with the reason."""
    start = "" if part is None else part.strip("/") + "/"
    for path, leaf in checkpoint.tree.tensors():
        name = checkpoint.tree.names[path]
        if name in known:
            continue
        if leaf.role in _BY_ROLE:
            yield name, _BY_ROLE[leaf.role]
        else:
            yield name, _OUTSIDE if agent or not name.startswith(start) else _NO_STATE


def _match_patterns(
    patterns: Sequence[str], candidates: Collection[str], used: Sequence[str], option: str
) -> dict[str, str]:
    """Return by name the option that permits leaving a candidate out.

    Raise UsageError for a pattern that matches none.
    """
    allowed: dict[str, str] = {}
    for pattern in patterns:
        matches, reason = compile_glob(pattern), f"{option}'{pattern}'"
        names = [name for name in candidates if matches(name)]
        if not names and (not candidates or any(map(matches, used))):
            what = (
                "every tensor of the checkpoint" if not candidates else f"every tensor that {reason} matches"
            )
            raise UsageError(f"{what} is used", hint=f"leave out {reason}")
        if not names:
            error = no_match_error(pattern, [*candidates], option=option)
            meant = suggest_glob(pattern, [*candidates], option=option)
            error.hint = meant or f"unused: {abbreviate_list([*candidates], _SHOWN)}"
            raise error
        allowed |= {name: reason for name in names if name not in allowed}
    return allowed
