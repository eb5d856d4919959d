"""Settings of a checkpoint that override the defaults of its library."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.errors import abbreviate_list
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.tree import Leaf, Plain, Record, Tree, ValueLeaf
from ckpttool.evaluation.vocabulary import OTHER_NETWORKS, activation_name, classify_topic, last_word

if TYPE_CHECKING:
    from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent


_NO_FUNCTION = frozenset(("", "none", "null", "default", "auto"))


def apply_stored_settings(binding: RecognizedAgent, tree: Tree, actions: int) -> RecognizedAgent:
    """Return the binding with the activation and action bounds from the checkpoint's own settings.

    They override a library's defaults, but not facts that the layout itself reads. Contradictory
    settings are left for the ledger.
    """
    from ckpttool.libraries.schema import NO_LAYOUT

    if binding.layout == NO_LAYOUT:
        return binding
    functions: dict[str, list[str]] = {}
    bounds: dict[str, list[float]] = {}
    for path, leaf in tree.items():
        name = tree.names.get(path)
        what = None if name is None or path in binding.consumed else classify_topic(name)
        if name is None or what not in ("activation", "action bounds"):
            continue
        above, _, last = name.rpartition("/")
        at = above if last.isdigit() else name
        if what == "action bounds":
            bounds.setdefault(at, []).extend(_small_numbers(leaf, actions))
            continue
        function = _stated_function(leaf.value) if isinstance(leaf, ValueLeaf) else None
        if function is not None and not OTHER_NETWORKS.search(name.lower()):
            functions.setdefault(at, []).append(function)
    facts = binding.facts
    if functions and not {"hidden", "activations"} & facts.origins.keys() and not facts.stated:
        facts = _with_functions(facts, binding, functions)
    if facts.action_low is None and "action_low" not in facts.origins:
        facts = _with_bounds(facts, bounds, actions)
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _stated_function(value: Plain) -> str | None:
    """Return the function that a setting of activations names, of any library."""
    if isinstance(value, Record):
        return activation_name(value) or value.name
    if not isinstance(value, str):
        return None
    return activation_name(value) or (None if value.strip().lower() in _NO_FUNCTION else value)


def _small_numbers(leaf: Leaf | ValueLeaf, most: int) -> list[float]:
    """Return a single number, or the numbers of a small tensor."""
    if isinstance(leaf, Leaf):
        is_small = leaf.size <= most and leaf.dtype.startswith(("float", "int"))
        return [float(number) for number in leaf.array().reshape(-1)] if is_small else []
    value = leaf.value
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _with_functions(
    facts: AgentMetadata, binding: RecognizedAgent, functions: Mapping[str, list[str]]
) -> AgentMetadata:
    hidden = [
        max(sum(layer.kind == "dense" for layer in part.layers) - 1, 0) for part in binding.parts if part.acts
    ]
    alternatives = {tuple(names) if len(set(names)) > 1 else names[:1][0] for names in functions.values()}
    chosen = next(iter(alternatives))
    if len(alternatives) != 1 or (isinstance(chosen, tuple) and [len(chosen)] != hidden):
        return facts
    facts = facts.without_lack("activation")
    where = next(iter(functions))
    if any(name not in ACTIVATIONS for names in functions.values() for name in names):
        return facts.not_understood("activations", abbreviate_list(functions[where], 3), where)
    if isinstance(chosen, tuple):
        return facts.read(where, activations=chosen)
    return facts._replace(activations=None).read(where, hidden=chosen)


def _with_bounds(facts: AgentMetadata, bounds: Mapping[str, Sequence[float]], actions: int) -> AgentMetadata:
    rows = {at: row for at, row in bounds.items() if len(row) == actions and all(map(math.isfinite, row))}
    lows = [at for at in rows if re.search("low|min", last_word(at))]
    highs = [at for at in rows if re.search("high|max", last_word(at))]
    limits = {
        row[0]: at
        for at, row in bounds.items()
        if len(row) == 1 and math.isfinite(row[0]) and re.search("max|limit|bound|high", last_word(at))
    }
    open_map = any(lack.what == "action map" for lack in facts.lacks)
    metadata: AgentMetadata | None = None
    if len(lows) == len(highs) == 1:
        low, high = rows[lows[0]], rows[highs[0]]
        if all(one < other for one, other in zip(low, high, strict=True)):
            metadata = facts.bounded(lows[0], low, high)
    elif facts.head == "tanh" and len(limits) == 1 and not lows and not open_map:
        ((limit, where),) = limits.items()
        metadata = facts.bounded(where, [-limit] * actions, [limit] * actions) if limit > 0 else None
    return facts if metadata is None else metadata.without_lack("action bounds")
