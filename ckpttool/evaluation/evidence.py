"""Evidence that could change an agent's outputs but was not used: tensors, settings, classes, side files.

A tensor that has one number per observation and belongs to no layer is evidence under any name. A setting
that matches the value in use is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.deferred import DeferredModule
from ckpttool.core.sidecar import LedgerEntries, LedgerEntry, Sidecar, Topic
from ckpttool.core.tree import Leaf, Path, Tree
from ckpttool.evaluation.evidence_effect import ConversionUsage, PolicyUsage, make_entry
from ckpttool.evaluation.side_files import list_folder_evidence

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.evaluation import vocabulary
    from ckpttool.libraries.schema import RecognizedAgent
else:
    # Most checkpoints contain nothing but the agent.
    vocabulary = DeferredModule("ckpttool.evaluation.vocabulary")

# Names of vectors with one number per observation that are not statistics.
_OBSERVATION = deferred.compile(
    r"space|last|next|init|reset|sample|dummy|example|mask|goal|buffer|memory|rollout|replay|dataset|batch|rng|seed"
    r"|optim|target|running_loss|history|log"
)
_LAYER = frozenset(("weight", "bias", "kernel", "gamma", "beta", "w", "b", "weights", "biases"))
_MOST = 12  # maximum number of entries per topic


def unused_entries(
    checkpoint: Checkpoint, binding: RecognizedAgent, known: Sidecar, widths: tuple[int, int]
) -> Iterator[LedgerEntry]:
    """Yield an entry for each piece of evidence that no part of the restored agent uses.

    Args:
        checkpoint: the opened checkpoint; small files beside it are read.
        binding: the recognised agent.
        known: the facts that the agent is played with.
        widths: the numbers of observations and actions of the policy.
    """
    facts = PolicyUsage(known, binding, widths)
    yield from _limit_per_topic(_checkpoint_evidence(checkpoint.tree, binding, facts))
    names = checkpoint.tree.names
    yield from _limit_per_topic(
        _module_evidence(checkpoint.tree, {names[path] for path in _agent_entries(binding)})
    )
    yield from _limit_per_topic(list_folder_evidence(checkpoint, facts))


def unconverted_entries(
    checkpoint: Checkpoint, written: Collection[str], kept: Collection[str] = ()
) -> LedgerEntries:
    """Return an entry for each piece of evidence that the conversion of a model does not write.

    Args:
        checkpoint: the converted checkpoint; small files beside it are read.
        written: the names of its entries that the target contains.
        kept: the names of the entries that only the target's sidecar contains.
    """
    matrices = (
        leaf
        for path, leaf in checkpoint.tree.tensors()
        if checkpoint.tree.names[path] in written and len(leaf.shape) == 2 and "float" in leaf.dtype
    )
    extents = frozenset(extent for leaf in matrices for extent in leaf.shape)
    normalised = any(
        vocabulary.classify_topic(name) == vocabulary.OBSERVATION_STATISTICS
        and not _is_of_layer(name, written)
        for name in written
    )
    use = ConversionUsage(frozenset(written), extents, normalised)
    inside = _unconverted_evidence(checkpoint.tree, use, frozenset(kept))
    weights = _module_evidence(checkpoint.tree, use.written)
    return (
        *_limit_per_topic(inside),
        *_limit_per_topic(weights),
        *_limit_per_topic(list_folder_evidence(checkpoint, use)),
    )


def _unconverted_evidence(tree: Tree, use: ConversionUsage, kept: Collection[str]) -> Iterator[LedgerEntry]:
    """Yield evidence in a checkpoint outside its model: one entry per module of tensors, or per value."""
    modules: set[str] = set()
    names = tree.names.values()
    for path, leaf in tree.items():
        name = tree.names.get(path)
        if name is None or name in use.written or name in kept:
            continue
        above = name.rpartition("/")[0]
        ignored = isinstance(leaf, Leaf) and (leaf.role == "slot" or (above and above in modules))
        what = None if ignored or _is_of_layer(name, names) else vocabulary.classify_topic(name)
        entry = use.entry(vocabulary.AgentEvidence(what, name, leaf)) if what is not None else None
        if entry is not None:
            modules.add(above)
            yield entry


def _module_evidence(tree: Tree, written: Collection[str]) -> Iterator[LedgerEntry]:
    """Yield averages, low-rank weights, scales and running statistics that are not written, by module.

    They are decisive if the module that they belong to is written without them.
    """
    groups: dict[tuple[Topic, str], dict[str, Leaf]] = {}
    split = [name.replace(".", "/").split("/") for name in written]
    modules = {"/".join(steps[:depth]) for steps in split for depth in range(len(steps))}  # "" is the root
    for path, leaf in tree.tensors():
        name = tree.names.get(path)
        if name is None or name in written or leaf.role == "slot":
            continue
        kind = vocabulary.find_weight_kind(name)
        if kind is not None:
            groups.setdefault(kind, {})[name] = leaf
    for (what, module), leaves in groups.items():
        owned = module in modules
        if what == "running statistics" and not owned:
            continue  # belongs to a separate normaliser
        name, leaf = next(iter(leaves.items()))
        value = f"{leaf.dtype}{list(leaf.shape)}" if len(leaves) == 1 else f"{len(leaves)} tensors"
        yield LedgerEntry("not used", what, value, name, decides=owned and what != "averaged weights")


def _is_of_layer(name: str, names: Collection[str]) -> bool:
    """Return whether a tensor is a running statistic of a layer (a batch norm) that also has weights."""
    module, _, last = name.replace(".", "/").rpartition("/")
    pattern = vocabulary.SPECIAL_WEIGHTS["running statistics"]
    if not pattern.fullmatch(last.lower()):
        return False
    start = f"{module}/" if module else ""
    beside = (
        candidate.replace(".", "/").removeprefix(start)
        for candidate in names
        if candidate.replace(".", "/").startswith(start)
    )
    return any("/" not in part and part.lower() in _LAYER for part in beside)


def _limit_per_topic(entries: Iterator[LedgerEntry]) -> Iterator[LedgerEntry]:
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.what] = counts.get(entry.what, 0) + 1
        if counts[entry.what] <= _MOST or entry.decides:
            yield entry


def _checkpoint_evidence(tree: Tree, binding: RecognizedAgent, facts: PolicyUsage) -> Iterator[LedgerEntry]:
    """Yield evidence in the checkpoint itself: one entry per module of tensors, one per value."""
    agent_entries = _agent_entries(binding)
    used = {leaf.key for leaf in binding.facts.norm or () if isinstance(leaf, Leaf)}
    stated = tuple(origin for fact, origin in binding.facts.origins.items() if origin and facts.uses(fact))
    modules: set[Path] = set()
    paths: set[Path] = set()
    names = tree.names.values()
    for path, leaf in tree.items():
        name = tree.names.get(path)
        if (
            name is None
            or path in agent_entries
            or (isinstance(leaf, Leaf) and (leaf.role == "slot" or leaf.key in used))
        ):
            continue
        if any(name == path or name.startswith(f"{path}/") for path in stated):
            continue
        what = vocabulary.classify_topic(name)
        if what is None or (path[:-1] in modules and isinstance(leaf, Leaf)):
            continue
        if what == "reward statistics" and _is_of_layer(name, names):
            continue  # a batch norm of a critic
        paths.add(path)
        entry = facts.entry(vocabulary.AgentEvidence(what, name, leaf))
        if entry is not None:
            modules.add(path[:-1])
            yield entry
    if not facts.settled:
        yield from _per_observation(tree, agent_entries | paths, stated, facts.widths)


def _agent_entries(binding: RecognizedAgent) -> set[Path]:
    """Return the checkpoint entries that the agent consists of."""
    fronts = {move.source for front in binding.fronts.values() for move in front.moves}
    return {move.source for move in binding.moves.moves} | binding.consumed | fronts


def _per_observation(
    tree: Tree, used_paths: Collection[Path], stated: Collection[str], widths: tuple[int, int]
) -> Iterator[LedgerEntry]:
    """Yield an entry for each tensor outside layers that has one number per observation."""
    from ckpttool.libraries import schema

    obs, actions = widths
    if obs < 2:
        return
    rows = schema.list_rows(tree, used_paths)
    layers = {names[:-1] for names, _, _ in rows if names[-1].removesuffix(":0").lower() in _LAYER}
    for names, leaf, _ in rows:
        name = "/".join(names)
        if not isinstance(leaf, Leaf) or "float" not in leaf.dtype or names[:-1] in layers:
            continue
        if leaf.shape not in ((obs,), (1, obs), (obs, 1), (2, obs)) or _OBSERVATION.search(name.lower()):
            continue
        if any(name == path or name.startswith(f"{path}/") for path in stated):
            continue
        numbers = leaf.array()
        first = numbers.reshape(-1)[0]
        if (numbers == first).all() and float(abs(first)) in (0, 1, math.inf):
            continue  # zero means, unit deviations or infinite limits have no effect
        hint = "if these are observation statistics, use --obs-norm FILE (with mean and var) to apply them"
        evidence = vocabulary.AgentEvidence("observation statistics", name, leaf)
        yield make_entry(evidence, decides=obs != actions, hint=hint)
