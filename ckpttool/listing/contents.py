"""The contents of a checkpoint as one record, without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.core import code_references, urls
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import LimitError
from ckpttool.core.text import compile_glob, describe_record, render_record, suggest_glob
from ckpttool.core.tree import Path, Role, Tree
from ckpttool.listing.audit import LoadingVerdict, audit_notes, build_audit_document, judge_loading
from ckpttool.listing.findings import unjudged_findings
from ckpttool.listing.modules import ModuleSummary, group_by_module
from ckpttool.listing.rows import CheckpointRow, TensorRow, ValueRow
from ckpttool.listing.training_counters import update_count_notes

if TYPE_CHECKING:
    from ckpttool.libraries.schema import RecognizedAgent


_ROLES: tuple[Role, ...] = ("parameter", "buffer", "slot", "counter", "replay", "other")


class RoleTotals(NamedTuple):
    """Sums over the tensors of one role."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the listed tensors: `parameters` counts the elements of trained tensors only.

    Optimizer state, counters and replayed experience are in `roles`, each separately.
    """

    tensors: int
    parameters: int
    nbytes: int
    stored_nbytes: int
    roles: Mapping[Role, RoleTotals] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "stored_nbytes": self.stored_nbytes,
            "roles": {role: sums._asdict() for role, sums in self.roles.items()},
        }


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """Everything that `inspect` prints.

    `binding` is the agent that a layout recognises. `modules` begins with the root, parents first.
    `checkpoints` are those of the folder, if the path is one and its latest checkpoint is used.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    checkpoint: Checkpoint
    binding: RecognizedAgent | None
    tensors: tuple[TensorRow, ...]
    values: tuple[ValueRow, ...]
    totals: Totals
    notes: tuple[str, ...]
    modules: tuple[ModuleSummary, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()

    @property
    def layout(self) -> str | None:
        """The layout that recognises an agent; None if none does."""
        return None if self.binding is None else self.binding.layout

    @property
    def verdict(self) -> LoadingVerdict:
        """The consequence of loading the file by its own library: SAFE to load, NEEDS CLASSES, ..."""
        return judge_loading(self.checkpoint)

    @property
    def evidence(self) -> str:
        """The evidence by which the layout recognised it; empty without one."""
        return "" if self.binding is None else self.binding.evidence

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        content = self.listed()
        rows = ("tensors", "values", "modules", "checkpoints")
        return {**content, **{name: [row.document() for row in content[name]] for name in rows}}

    def listed(self) -> dict[str, Any]:
        """Return the JSON document with records for tensors, values, modules and checkpoints.

        Each record has a `document`; those of hundreds of thousands of tensors need as much memory as the
        tree.
        """
        return {
            "path": urls.display_url(self.checkpoint.path),
            "format": self.checkpoint.format,
            "writer": self.checkpoint.writer,
            "layout": self.layout,
            "tensors": self.tensors,
            "values": self.values,
            "totals": self.totals.document(),
            "modules": [module for module in self.modules if module.path or module.kind],
            "notes": list(self.notes),
            "asks": build_audit_document(self.checkpoint.code_references),
            "details": {**self.checkpoint.details, **self._calls()},
            "checkpoints": self.checkpoints,
        }

    def _calls(self) -> dict[str, Any]:
        # The short audit text of each verdict.
        names = code_references.dangerous_calls(self.checkpoint.code_references)
        return {"calls": names} if names else {}


def summarize_checkpoint(
    checkpoint: Checkpoint, glob: str | None = None, layout: str | None = None
) -> CheckpointSummary:
    """Return the listing of an open checkpoint."""
    from ckpttool.libraries.recognize import recognize_checkpoint

    return summarize_recognized(checkpoint, recognize_checkpoint(checkpoint, layout), glob)


def summarize_recognized(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, glob: str | None = None
) -> CheckpointSummary:
    """Return the listing of an open checkpoint, whose agent is known."""
    tree = checkpoint.tree
    owners: Mapping[Path, Path] = binding.of if binding is not None else {}
    keep = compile_glob(glob)
    rows = []
    for at, leaf in tree.tensors():
        if keep(tree.names[at]):
            owner = leaf.of or owners.get(at)
            aliases = tuple(tree.alias_name(alias) for alias in tree.aliases.get(at, ()))
            of = tree.names.get(owner) if owner is not None else None
            rows.append(TensorRow(tree.names[at], at, leaf, of, aliases))
    values = tuple(ValueRow(tree.names[at], at, leaf) for at, leaf in tree.plain() if keep(tree.names[at]))
    totals = _totals(rows, checkpoint.stored_nbytes)
    audit = audit_notes(checkpoint.code_references)
    notes = (
        *audit,
        *(finding.sentence for finding in unjudged_findings(checkpoint.unjudged)),
        *checkpoint.notes,
        *list_wrapper_notes(tree, agent=binding is not None),
        *update_count_notes(tree),
    )
    if glob is not None and not rows and not values:
        meant = suggest_glob(glob, list(tree.names.values()))
        notes = (*notes, "; ".join(filter(None, (f"no path matches the pattern '{glob}'", meant))))
    entries: list[TensorRow | ValueRow] = [*rows, *values]
    try:
        modules = group_by_module(((entry.path, entry) for entry in entries), tree.containers)
    except LimitError as error:
        raise error.located(file=checkpoint.path) from None
    return CheckpointSummary(checkpoint, binding, tuple(rows), values, totals, notes, modules)


def _totals(rows: list[TensorRow], stored_nbytes: int) -> Totals:
    counts: dict[Role, list[int]] = {}
    for row in rows:
        leaf = row.leaf
        sums = counts.setdefault(leaf.role, [0, 0, 0])
        sums[0] += 1
        sums[1] += leaf.size
        sums[2] += leaf.nbytes
    roles = {role: RoleTotals(*counts[role]) for role in _ROLES if role in counts}
    trained = roles["parameter"].elements if "parameter" in roles else 0
    return Totals(len(rows), trained, sum(r.nbytes for r in roles.values()), stored_nbytes, roles)


def may_describe_layers(checkpoint: Checkpoint) -> bool:
    """Return whether the file may list the layers of a model, and not only weights."""
    from ckpttool.libraries.recognize import KERAS_FORMATS, PICKLED_MODULES, has_saver_graph, is_script

    if checkpoint.format in (*KERAS_FORMATS, "onnx") or is_script(checkpoint.tree):
        return True
    if has_saver_graph(checkpoint):
        return True
    return any(path and path[-1] == PICKLED_MODULES for path in checkpoint.tree.containers)


# Names under which training programs store a network's state_dict beside other data, and averages of it.
_NETWORKS = frozenset(
    ("state_dict", "model", "model_state_dict", "net", "network", "module", "weights", "policy")
) | {"policy_state_dict", "model_state", "params"}
_AVERAGES = frozenset(
    ("ema", "model_ema", "ema_model", "ema_state_dict", "state_dict_ema", "ema_params", "swa", "swa_model")
) | {"average_model", "averaged_model"}


def list_wrapper_notes(tree: Tree, *, agent: bool = False) -> tuple[str, ...]:
    """Return the notes of `inspect` on wrapper prefixes, and on the paths of a network and its average.

    For an agent, the layout already lists its networks.
    """
    from ckpttool.mapping.wrappers import describe_prefixes, find_prefixes  # a digest has no notes

    wrappers = (
        f"{line}: use convert --strip to remove it" for line in describe_prefixes(find_prefixes(tree))
    )
    return (*wrappers, *_average_lines(tree, agent=agent))


def _average_lines(tree: Tree, *, agent: bool) -> Iterator[str]:
    tops = {path[0].value: None for path, _ in tree.tensors() if len(path) > 1 and path[0].kind == "key"}
    others = {path[0] for path in tree} if tops else set()
    if len(others) < 2:
        return
    for name in tops:
        if name in _NETWORKS and not agent:
            yield (
                f"{name} contains a network and other entries; use --part {name} to convert only the network"
            )
        elif name in _AVERAGES:
            yield f"{name} contains an average of the weights; use --part {name} to convert only that"
