"""The receipt of a conversion: the sidecar that says what went where, by which rule, on what assumption."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ckpttool import documents
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.layouts.canonical import NO_LAYOUT, NORMALIZER, OPTIMIZERS, Binding
from ckpttool.layouts.policy_alone import computation, policy_alone
from ckpttool.layouts.recognise import recognised
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.mapping.report import Report
from ckpttool.ops import knowledge, optimizer_facts
from ckpttool.ops.digest import Digest, digest_of
from ckpttool.ops.restore import Own, networks
from ckpttool.ops.route import Route
from ckpttool.ops.rows import shown_value
from ckpttool.ops.undo import Undo
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

# Facts of a policy that a model's own configuration or code records, and its weights do not.
_RECORDED = frozenset(("activations", "head", "epsilon", "action_low", "action_high", "norm"))
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_LONGEST = 1000  # characters of a text in the sidecar


def with_policy_facts(
    checkpoint: Checkpoint, target: Checkpoint, own: Own, *, part: str | None = None, model: bool = False
) -> Own:
    """Return the source's sidecar with what only the source's own code records of its computation.

    The activations of a .keras file, TorchScript or a whole module are in no file of weights, and neither
    are those that the layout of an actor alone has. They are carried where all parameters are the policy's,
    and the target's policy has the same layers in order. Otherwise `computation` records that the target
    holds less than the source. Of a `part`, and of what fills a user's `model`, no facts are carried.
    """
    recorded = computation(checkpoint)
    followed, refused, policy = False, "", None
    try:
        policy = recognised(checkpoint)
        by_layout = policy is not None
        if policy is None:
            policy = policy_alone(checkpoint)
        followed = policy is not None
        facts = None if policy is None else _carried(checkpoint, target, policy, by_layout=by_layout)
        if facts is not None and (model or part is not None):
            return own
        if facts is not None:
            known = knowledge.merged(own.sidecar, facts)
            if recorded is not None and recorded.code:
                known = replace(known, computation={"origin": recorded.origin, "code": recorded.code})
            return replace(own, sidecar=known)
        if by_layout and policy is not None and _layout(target) == policy.layout:
            return own
    except UsageError:
        pass  # an option that is missing does not make the source one that cannot be played
    except CkpttoolError as error:
        refused = "" if followed else error.message + (f": {error.found}" if error.found else "")
    # The target of a chain whose class is not in the file is as much of it as the source.
    if recorded is None or (own.sidecar is not None and own.sidecar.computation is not None):
        return own
    kept = {"origin": recorded.origin, "code": recorded.code, "refused": refused[:_LONGEST]}
    kept = {name: text for name, text in kept.items() if text}
    return replace(own, sidecar=replace(own.sidecar or Sidecar(""), computation=kept))


def unplayable(own: Own) -> tuple[str, ...]:
    """Return a note where a policy's target does not play as its source does."""
    found = None if own.sidecar is None else own.sidecar.computation
    if found is None or {"code", "refused"} & found.keys():
        return ()
    return (
        f"the target holds weights alone: the computation stays in {found['origin']}, and eval refuses it",
    )


def _carried(
    checkpoint: Checkpoint, target: Checkpoint, policy: Binding, *, by_layout: bool
) -> Sidecar | None:
    """Return the facts of a policy with which its target is the same policy, None if it is not."""
    if not (by_layout or _RECORDED & policy.facts.said.keys()) or policy.fronts:
        return None
    bound = {move.source for move in policy.moves.moves} | policy.consumed
    names = checkpoint.tree.names
    parameters = (path for path, leaf in checkpoint.tree.tensors() if leaf.role == "parameter")
    # A SavedModel of Keras 3 holds every variable a second time, below this name.
    if any(path not in bound and not names[path].startswith("_all_variables/") for path in parameters):
        return None
    tree, again = networks(checkpoint.tree, policy), policy_alone(target)
    if again is None or not _is_same(tree, networks(target.tree, again)):
        return None
    read = knowledge.of_files(policy, tree)
    recorded = _RECORDED if by_layout else _RECORDED & policy.facts.said.keys()
    # Statistics of observations are a fact of their own name in a sidecar.
    recorded = frozenset("obs_norm" if name == "norm" else name for name in recorded)
    facts = {name: getattr(read, name) for name in sorted(recorded)}
    provenance = {name: read.provenance[name] for name in recorded if name in read.provenance}
    return Sidecar("", **facts, provenance=provenance)


def _layout(target: Checkpoint) -> str | None:
    found = recognised(target)
    return None if found is None else found.layout


def _is_same(one: Tree, other: Tree) -> bool:
    """Return whether two canonical agents have the same numbers at the same places, statistics apart."""
    import numpy as np

    leaves, others = (
        {p: leaf for p, leaf in tree.items() if isinstance(leaf, Leaf) and p[0].value != NORMALIZER}
        for tree in (one, other)
    )
    return leaves.keys() == others.keys() and all(
        leaf.shape == others[path].shape
        and np.array_equal(leaf.array(), others[path].array(), equal_nan=True)
        for path, leaf in leaves.items()
    )


def receipt(
    checkpoint: Checkpoint,
    way: Route,
    own: Own,
    written: Digest,
    undone: Undo,
    part: str | None = None,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Sidecar:
    """Return the target's sidecar: the source's facts (or the layout's habit) and how they were carried.

    `options` are those of the conversion, from which `verify --all` plans it again.
    """
    binding, report = way.binding, way.report
    base = own.sidecar or Sidecar("")
    if binding is not None:
        read = knowledge.of_files(binding, networks(way.source, binding))
        base = knowledge.without_statistics(binding, knowledge.merged(own.sidecar, read))
    if way.settings is not None:
        provenance = {name: said for name, said in base.provenance.items() if name != "optimizers"}
        if way.settings:
            provenance["optimizers"] = f"read from {os.path.basename(checkpoint.path)}"
        base = replace(base, optimizers=way.settings or None, provenance=provenance)
    return replace(
        base,
        provenance={**base.provenance, **way.said},
        target_sha256=written.sha256,
        source={
            **origin(checkpoint, binding, own.sha256, **_more(own, binding, part)),
            **({"options": dict(options)} if options else {}),
        },
        rules=rules(report),
        assumed=report.assumed,
        objects=way.objects,
        stripped=way.stripped,
        parity=None,
        residue=tuple(_residue(way, (*report.unused, *way.kept))),
        undo=undone.record,
    )


def _more(own: Own, binding: Binding | None, part: str | None) -> dict[str, str]:
    """Return what else is known of the source: the part that was taken, and where its Adam adds epsilon."""
    found = {"part": part} if part is not None else {}
    optimized = binding is not None and any(m.target[0].value in OPTIMIZERS for m in binding.moves.moves)
    if binding is not None and optimized:
        found["epsilon"] = optimizer_facts.epsilon(own.sidecar, binding.layout)
    return found


def origin(
    checkpoint: Checkpoint, binding: Binding | None, sha256: str | None, **more: str
) -> dict[str, str | None]:
    """Return what a receipt says of the source; its digest is computed if nobody knows it yet."""
    return {
        "path": os.path.basename(checkpoint.path),
        "sha256": sha256 or digest_of(checkpoint).sha256,
        "format": checkpoint.format,
        "layout": binding.layout if binding is not None and binding.layout != NO_LAYOUT else None,
        **more,
    }


def rules(report: Report) -> list[dict[str, str]]:
    """Return a receipt's line for each move."""
    return [
        {"source": m.source, "target": m.target, "rule": m.rule, **({} if m.by is None else {"by": m.by})}
        for m in report.mapped
    ]


def _residue(way: Route, unused: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Go through what is left behind; of a value that is no tensor, what `inspect` shows of it."""
    values = {name: way.source[path] for path, name in way.names.items() if path in way.source}
    for name in unused:
        leaf = values.get(name)
        shown = shown_value(leaf) if isinstance(leaf, ValueLeaf) else {}
        value = shown.get("value")
        if isinstance(value, float):
            shown["value"] = documents.finite(value)
        elif isinstance(value, str):
            shown["value"] = value[:_LONGEST]
        yield {"path": name, **shown}
