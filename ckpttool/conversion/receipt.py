"""Receipt of a conversion: the sidecar that records mappings, rules and assumptions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.conversion import targets
from ckpttool.conversion.reverse import ReverseRecord
from ckpttool.core import sidecar, text
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.digests import Digest, digest_checkpoint
from ckpttool.core.errors import CkpttoolError, UsageError, abbreviate_list
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, json_value
from ckpttool.evaluation import restore
from ckpttool.evaluation.restore import VerifiedSidecar, select_network_leaves
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import NO_LAYOUT, NORMALIZER, OPTIMIZERS, RecognizedAgent
from ckpttool.libraries.single_networks import read_computation, recognize_single_policy
from ckpttool.mapping.rules import MappingReport

if TYPE_CHECKING:
    from ckpttool.conversion.plan import ConversionPlan
    from ckpttool.evaluation.restore import Agent


# Policy facts recorded in a model's configuration or code, not in its weights.
_RECORDED = frozenset(("activations", "head", "epsilon", "action_low", "action_high", "choices", "norm"))
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_LONGEST = 1000  # maximum text length in the sidecar, in characters


def with_policy_facts(
    checkpoint: Checkpoint,
    target: Checkpoint,
    own: VerifiedSidecar,
    *,
    part: str | None = None,
    model: bool = False,
) -> VerifiedSidecar:
    """Return the source's sidecar with what only the source's own code records of its computation.

    The activations of a .keras file, TorchScript or a whole module are in no weights file, and neither are
    those of the layout of an actor alone. They are carried over if all parameters are the policy's, and the
    target's policy has the same layers in order. Otherwise `computation` records that the target contains
    less than the source.

    Args:
        checkpoint: the source.
        target: the written checkpoint, read back.
        own: the source's sidecar.
        part: the converted part; no facts of a part are carried over.
        model: the target fills a user's model; no facts are carried over.
    """
    # Recorded computations need modules that no agent of a layout needs.
    recorded, facts = read_computation(checkpoint), _read_policy_facts(checkpoint, target, own.sidecar)
    if facts.same_layout or (facts.facts is not None and (model or part is not None)):
        return own
    if facts.facts is not None:
        known = restore.merge_metadata(own.sidecar, facts.facts)
        if recorded is not None and recorded.code:
            known = replace(known, computation={"origin": recorded.origin, "code": recorded.code})
        return replace(own, sidecar=known)
    # A chain whose class is not in the file: the target contains as much of it as the source.
    if recorded is None or (own.sidecar is not None and own.sidecar.computation is not None):
        return own if model or part is not None else _with_norm_epsilon(checkpoint, target, own)
    kept = {"origin": recorded.origin, "code": recorded.code, "refused": facts.refused[:_LONGEST]}
    kept = {name: text for name, text in kept.items() if text}
    return replace(own, sidecar=replace(own.sidecar or Sidecar(""), computation=kept))


class _PolicyFacts(NamedTuple):
    """Facts of a policy that go with its target, or why the policy cannot be played.

    `same_layout` is whether the target has the source's layout, which records them itself.
    """

    facts: Sidecar | None = None
    same_layout: bool = False
    refused: str = ""


def _read_policy_facts(checkpoint: Checkpoint, target: Checkpoint, own: Sidecar | None) -> _PolicyFacts:
    policy = None
    try:
        policy = recognize_checkpoint(checkpoint)
        by_layout = policy is not None
        if policy is None:
            policy = recognize_single_policy(checkpoint)
        if policy is None:
            return _PolicyFacts()
        if restore.list_not_understood(policy, own):
            return _PolicyFacts()  # the target does not have what the source states
        facts = _portable_policy_facts(checkpoint, target, policy, by_layout=by_layout)
        return _PolicyFacts(facts, facts is None and by_layout and _layout(target) == policy.layout)
    except UsageError:
        return _PolicyFacts()  # a missing option does not make the source unplayable
    except CkpttoolError as error:
        why = error.message + (f": {error.found}" if error.found else "")
        return _PolicyFacts(refused="" if policy is not None else why)


def _with_norm_epsilon(checkpoint: Checkpoint, target: Checkpoint, own: VerifiedSidecar) -> VerifiedSidecar:
    """Return the sidecar with the epsilon of the source's norms, if the target's framework has another one.

    No file of weights records it: both sides assume the default of their framework.
    """
    try:
        one, other = (
            recognize_checkpoint(side) or recognize_single_policy(side) for side in (checkpoint, target)
        )
    except CkpttoolError:
        return own
    base = own.sidecar or Sidecar("")
    if one is None or other is None or base.epsilon is not None or one.norm_kind is None:
        return own
    if one.norm_kind != other.norm_kind or one.facts.epsilon == other.facts.epsilon:
        return own
    name = os.path.basename(checkpoint.path)
    origin = f"assumed: default of the framework of {name}, from which it was converted"
    provenance = {**base.provenance, "epsilon": origin}
    known = replace(base, epsilon={one.norm_kind: one.facts.epsilon}, provenance=provenance)
    return replace(own, sidecar=known)


def unplayable_note(own: VerifiedSidecar) -> tuple[str, ...]:
    """Return a note if a policy's target plays differently from its source."""
    facts = None if own.sidecar is None else own.sidecar.computation
    if facts is None or {"code", "refused"} & facts.keys():
        return ()
    return (
        f"the target contains only weights: the computation stays in {facts['origin']}, so eval refuses it",
    )


def _portable_policy_facts(
    checkpoint: Checkpoint, target: Checkpoint, policy: RecognizedAgent, *, by_layout: bool
) -> Sidecar | None:
    """Return the facts with which the target is the same policy, None if it is not."""
    if not (by_layout or _RECORDED & policy.facts.origins.keys()) or policy.fronts:
        return None
    bound = {move.source for move in policy.moves.moves} | policy.consumed
    names = checkpoint.tree.names
    parameters = (path for path, leaf in checkpoint.tree.tensors() if leaf.role == "parameter")
    # A SavedModel of Keras 3 contains every variable a second time, under this name.
    if any(path not in bound and not names[path].startswith("_all_variables/") for path in parameters):
        return None
    tree, again = select_network_leaves(checkpoint.tree, policy), recognize_single_policy(target)
    if again is None:
        return None
    # The only network of a file is an actor, also if the source has it as a Q-network that chooses actions.
    acting, actor = policy.policy, again.policy
    renamed = _rename_network(tree, acting.prefix, actor.prefix) if acting and actor else tree
    if not _has_same_numbers(renamed, select_network_leaves(target.tree, again)):
        return None
    read = restore.read_metadata(policy, tree)
    recorded = _RECORDED if by_layout else _RECORDED & policy.facts.origins.keys()
    # Observation statistics are a fact with a separate name in a sidecar.
    recorded = frozenset("obs_norm" if name == "norm" else name for name in recorded)
    facts = {name: getattr(read, name) for name in sorted(recorded)}
    provenance = {name: read.provenance[name] for name in sorted(recorded) if name in read.provenance}
    return Sidecar("", **facts, provenance=provenance)


def _rename_network(tree: Tree, prefix: Path, new: Path) -> Tree:
    """Return a canonical agent with the network at `prefix` under another path."""
    size = len(prefix)
    return Tree(
        {(*new, *path[size:]) if path[:size] == prefix else path: leaf for path, leaf in tree.items()}
    )


def _layout(target: Checkpoint) -> str | None:
    agent = recognize_checkpoint(target)
    return None if agent is None else agent.layout


def _has_same_numbers(one: Tree, other: Tree) -> bool:
    """Return whether two canonical agents have equal numbers at equal paths, statistics aside."""
    leaves, others = (
        {p: leaf for p, leaf in tree.items() if isinstance(leaf, Leaf) and p[0].value != NORMALIZER}
        for tree in (one, other)
    )
    return leaves.keys() == others.keys() and all(
        leaf.shape == others[path].shape
        and np.array_equal(leaf.array(), others[path].array(), equal_nan=True)
        for path, leaf in leaves.items()
    )


def conversion_receipt(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    own: VerifiedSidecar,
    written: Digest,
    undone: ReverseRecord,
    part: str | None = None,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Sidecar:
    """Return the target's sidecar: the source's facts (or the layout's defaults) and their provenance.

    Args:
        checkpoint: the source.
        plan: the plan of its conversion.
        own: the source's sidecar.
        written: the target's digest.
        undone: what the reverse conversion restores.
        part: the path of the converted part.
        options: the conversion's options, with which `verify --all` plans it again.
    """
    binding, report = plan.binding, plan.report
    base = own.sidecar or Sidecar("")
    if binding is not None:
        read = restore.read_metadata(binding, select_network_leaves(plan.ready.tree, binding))
        base = restore.without_statistics(binding, restore.merge_metadata(own.sidecar, read))
        base = _with_refusals(base, checkpoint, binding)
    if plan.settings is not None:
        provenance = {name: origin for name, origin in base.provenance.items() if name != "optimizers"}
        if plan.settings:
            provenance["optimizers"] = f"read from {os.path.basename(checkpoint.path)}"
        base = replace(base, optimizers=plan.settings or None, provenance=provenance)
    return replace(
        base,
        provenance={**base.provenance, **plan.origins},
        target_sha256=written.sha256,
        source={
            **describe_source(checkpoint, binding, own.sha256, **_source_details(own, binding, part)),
            **({"options": dict(options)} if options else {}),
        },
        rules=receipt_rules(report),
        assumed=report.assumed,
        objects=plan.objects,
        stripped=plan.ready.stripped,
        parity=None,
        verification=None,
        residue=tuple(_residue_entries(plan, (*report.unused, *plan.kept))),
        undo=undone.record,
    )


def _with_refusals(base: Sidecar, checkpoint: Checkpoint, binding: RecognizedAgent) -> Sidecar:
    """Return the facts with the reasons why the source's networks cannot be run, which hold for its target.

    The target has the weights of their layers only, which would play as a chain.
    """
    acting = [part.component for part in binding.parts if part.acts]
    reasons = dict.fromkeys(reason for name in acting for reason in binding.unplaced.get(name, ()))
    if not reasons or base.computation is not None:
        return base
    computation = {"origin": os.path.basename(checkpoint.path), "unplaced": abbreviate_list(list(reasons), 4)}
    return replace(base, computation=computation)


def _source_details(
    own: VerifiedSidecar, binding: RecognizedAgent | None, part: str | None
) -> dict[str, str]:
    """Return more facts of the source: the part converted, and where its Adam adds epsilon."""
    details = {"part": part} if part is not None else {}
    optimized = binding is not None and any(m.target[0].value in OPTIMIZERS for m in binding.moves.moves)
    if binding is not None and optimized:
        from ckpttool.libraries.optimizer_settings import epsilon_placement

        details["epsilon"] = epsilon_placement(own.sidecar, binding.layout)
    return details


def describe_source(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, sha256: str | None, **more: str
) -> dict[str, str | None]:
    """Return the receipt's record of the source; its digest is computed if unknown."""
    return {
        "path": os.path.basename(checkpoint.path),
        "sha256": sha256 or digest_checkpoint(checkpoint).sha256,
        "format": checkpoint.format,
        "layout": binding.layout if binding is not None and binding.layout != NO_LAYOUT else None,
        **more,
    }


def receipt_rules(report: MappingReport) -> list[dict[str, str]]:
    """Return a receipt's line for each move."""
    return [
        {"source": m.source, "target": m.target, "rule": m.rule, **({} if m.by is None else {"by": m.by})}
        for m in report.mapped
    ]


def _residue_entries(plan: ConversionPlan, unused: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what is left behind; a value that is no tensor as `inspect` displays it."""
    values = {
        name: plan.ready.tree[path] for path, name in plan.ready.names.items() if path in plan.ready.tree
    }
    for name in unused:
        leaf = values.get(name)
        shown = json_value(leaf) if isinstance(leaf, ValueLeaf) else {}
        value = shown.get("value")
        if isinstance(value, float):
            shown["value"] = text.json_number(value)
        elif isinstance(value, str):
            shown["value"] = value[:_LONGEST]
        yield {"path": name, **shown}


def converted_part(source: Agent, target: Agent) -> str | None:
    """Return the source part or the only network that the target's receipt records, None for the whole."""
    receipt = target.sidecar
    if target.checkpoint.format == targets.ONNX:  # whose own graph replaces the receipt's facts
        receipt = sidecar.load_sidecar(target.checkpoint.path)
    recorded = None if receipt is None else receipt.source
    part = None if recorded is None else recorded.get("part") or recorded.get("network")
    if recorded is None or not part:
        return None
    is_source = recorded.get("sha256") == digest_checkpoint(source.checkpoint).sha256
    return str(part) if is_source else None
