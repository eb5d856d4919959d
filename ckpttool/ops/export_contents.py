"""Says what an exported file holds: which leaves and facts went into it, and what its parts are called."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ckpttool.agents.components import widths
from ckpttool.agents.network import Dense, LayerNorm, Network
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import VALUES, Part
from ckpttool.leaf import Leaf, Path, display
from ckpttool.mapping.report import Mapped, Report
from ckpttool.ops.restore import Agent
from ckpttool.shown import count
from ckpttool.sidecar import Sidecar
from ckpttool.version import __version__

# A statistic or a bound becomes numbers of the arithmetic before or after the layers.
FOLDED = "folded"
_FACTS = ("obs_dim", "action_low", "action_high", "head", "activations")


def report(agent: Agent, part: Part, facts: Sidecar, assumed: tuple[str, ...]) -> Report:
    """Return what goes into the file, under its canonical name, and a note on all that does not.

    What belongs to other networks and to training is not missing from an export, so nothing is unused.
    """
    tree, layers = agent.checkpoint.tree, _layers(part)
    lines, used = [], set()
    for move in agent.binding.moves.moves:
        rule = move.rule.name if move.target[:-1] in layers else FOLDED
        if part.program is None and rule == FOLDED and not _counts(move.target, agent, part, facts):
            continue
        before, after = tree[move.source], agent.tree.get(move.target)
        shape_in, shape_out = (each.shape if isinstance(each, Leaf) else () for each in (before, after))
        lines.append(Mapped(tree.names[move.source], display(move.target), rule, shape_in, shape_out))
        used.add(move.source)
    left = dict.fromkeys(
        str(move.target[0].value) for move in agent.binding.moves.moves if move.source not in used
    )
    stay = count(sum(path not in used for path in tree), "entry stays", "entries stay")
    stays = f"only {part.title} is exported, {stay} behind: {', '.join(left)}"
    return Report(tuple(lines), assumed=assumed, notes=(*agent.notes, *([stays] if left else [])))


def _layers(part: Part) -> tuple[Path, ...]:
    """Return the canonical place of every layer."""
    return tuple(canonical.weight(part, position, "kernel")[:-1] for position in range(len(part.layers)))


def _counts(target: Path, agent: Agent, part: Part, facts: Sidecar) -> bool:
    """Say whether a leaf holds statistics, or an action's map, that are part of what the network computes."""
    if not canonical.mapped_by_sidecar(target):
        return False
    if target[0].value != canonical.NORMALIZER:
        return part.acts
    size = len(facts.obs_norm["mean"]) if facts.obs_norm is not None else None
    return size is not None and (part.component not in VALUES or widths(agent.tree, part)[0] == size)


def places(network: Network, part: Part) -> list[str]:
    """Return a name for each node: its layer's canonical place, or what stands before or after the layers."""
    if part.program is not None:
        return [f"graph/{n}" for n in range(len(network.nodes))]
    layers = [n for n, node in enumerate(network.nodes) if isinstance(node.layer, Dense | LayerNorm)]
    names = dict(zip(layers, map(display, _layers(part)), strict=True))
    return [names.get(n) or f"{_between(n, layers)}/{n}" for n in range(len(network.nodes))]


def _between(number: int, layers: Sequence[int]) -> str:
    if number < layers[0]:
        return "obs"
    return "action" if number > layers[-1] else "hidden"


def metadata(made: Sidecar) -> dict[str, str]:
    """Return the texts that the file carries, out of its receipt.

    There is no time and no folder among them, so that the same conversion gives the same file.
    """
    source, env = made.source or {}, made.env or {}
    known = {name: getattr(made, name) for name in _FACTS}
    said = {
        "tool": f"ckpttool {__version__}",
        "source": source.get("path"),
        **{f"source_{name}": source.get(name) for name in ("sha256", "format", "layout")},
        "network": source.get("network"),
        "env": env.get("id"),
        **{name: json.dumps(value) for name, value in known.items() if value is not None},
        "assumed": json.dumps(made.assumed),
        "provenance": json.dumps(dict(made.provenance), sort_keys=True),
    }
    return {name: value for name, value in said.items() if value is not None}
