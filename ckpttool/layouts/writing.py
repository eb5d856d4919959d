"""Makes a plan of a table of names, so that a layout's way back from the canonical agent is one call.

A layout chooses the rows that fit the agent (one Q-function or two, a Gaussian policy or not) and hands them
to `written`, in the order of its files. What has no row is left unused and listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.canonical import Binding, Default
from ckpttool.layouts.limits import consumed, notes, require
from ckpttool.layouts.naming import Lone, Names, Network, Writing
from ckpttool.layouts.placing import Placed, placed, trained
from ckpttool.leaf import Path, attr
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP, ToValue
from ckpttool.tree import Container, Tree

__all__ = [
    "DICT",
    "LIST",
    "Lone",
    "Names",
    "Network",
    "Placed",
    "Writing",
    "consumed",
    "critics",
    "gaussian",
    "notes",
    "placed",
    "require",
    "together",
    "trained",
    "valued",
    "written",
]

DICT, ORDERED, LIST = Container("dict"), Container("OrderedDict"), Container("list")
# torch/optim/adam.py, Adam.__init__: what an optimizer begins with that the agent does not have.
_ADAM: Mapping[str, Default] = {
    "learning_rate": Default(1e-3, "torch"),
    "beta_1": Default(0.9, "torch"),
    "beta_2": Default(0.999, "torch"),
    "epsilon": Default(1e-8, "torch"),
}


def written(writing: Writing, binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes in a file of torch's by the table.

    Targets that the agent lacks are copies of the online networks. Raise UnsupportedError for networks,
    Q-functions or an action map that the codebase's classes cannot be.
    """
    require(writing, binding, agent)
    rows = placed(writing, binding, agent)
    states = [
        _state(name, place, rows, binding, agent, told)
        for name, place in writing.optimizers.items()
        if writing.fresh or any(path[0] == attr(name.partition("/")[0]) for path in agent)
    ]
    counted = tuple(
        Move(path, place, ToValue())
        for name, place in writing.counters.items()
        if (path := (attr(name),)) in agent
    )
    if writing.joint is not None:
        held = [row for row in rows if row.place != canonical.NORMALIZER]
        weights = [move for row in held for move in row.moves]
        weights += [Move(path, path, KEEP) for row in held for path in row.added]
        states.append(_joint(weights, agent, told, binding, writing.joint))
    counts = {move.target for move in counted}
    return together(
        Plan(
            tuple(move for row in rows for move in row.moves),
            {path: leaf for row in rows for path, leaf in row.added.items()}
            | {path: leaf for path, leaf in writing.constants.items() if path not in counts},
            _containers(writing, rows),
            tuple(line for row in rows for line in row.assumed),
            tuple(line for row in rows for line in row.missing),
            (*consumed(agent), *(path for row in rows for path in row.consumed)),
            (*notes(writing, binding, agent), *(line for row in rows for line in row.notes)),
        ),
        *states,
        Plan(counted),
    )


def _state(
    name: str,
    place: Path,
    rows: Iterable[Placed],
    binding: Binding,
    agent: Tree,
    told: Settings,
) -> Plan:
    """Return the plan of one optimizer: Adam as torch's state_dict at `place`."""
    ours = name.partition("/")[0]
    weights = trained(name, rows)
    if not weights:
        return Plan(())
    if not any(path[0] == attr(ours) for path in agent):
        return _anew(ours, weights, place)
    return optimizers.ToTorch(ours, weights, agent, told.get(ours, {}), binding.defaults).plan(place)


def _joint(weights: Sequence[Move], agent: Tree, told: Settings, binding: Binding, place: Path) -> Plan:
    """Return the plan of the one optimizer of all networks: the agent's own, or one that has not begun."""
    name = canonical.JOINT
    if not any(path[0] == attr(name) for path in agent):
        return _anew(name, weights, place)
    return optimizers.ToTorch(name, weights, agent, told.get(name, {}), binding.defaults).plan(place)


def _anew(name: str, weights: Sequence[Move], place: Path) -> Plan:
    """Return the plan of an optimizer that has not begun, which the library's loader asks for."""
    state = optimizers.ToTorch(name, weights, Tree({}), {}, _ADAM).plan(place)
    said = f"{name} begins anew with the defaults of torch's Adam: the source has none"
    return replace(state, assumed=(said,))


def _containers(writing: Writing, rows: Iterable[Placed]) -> dict[Path, Container]:
    """Return the dicts of the file: an OrderedDict for every state_dict, plain ones around them."""
    entries = {row.entry for row in writing.held.values()}
    targets = [path for row in rows for path in (*(m.target for m in row.moves), *row.added)]
    found: dict[Path, Container] = {(): DICT}
    for target in targets:
        for depth in range(1, len(target)):
            found[target[:depth]] = DICT
    found |= {entry: ORDERED for entry in entries if entry in found}
    return {**found, **writing.containers}


def together(*plans: Plan) -> Plan:
    """Return one plan for several that write side by side."""
    return Plan(
        tuple(move for plan in plans for move in plan.moves),
        {path: leaf for plan in plans for path, leaf in plan.added.items()},
        {path: container for plan in plans for path, container in plan.containers.items()},
        tuple(dict.fromkeys(line for plan in plans for line in plan.assumed)),
        tuple(line for plan in plans for line in plan.missing),
        tuple(path for plan in plans for path in plan.consumed),
        tuple(line for plan in plans for line in plan.notes),
        {path: others for plan in plans for path, others in plan.aliases.items()},
        {path: label for plan in plans for path, label in plan.labels.items()},
        {name: settings for plan in plans for name, settings in plan.told.items()},
        partly=tuple(path for plan in plans for path in plan.partly),
        kept=tuple(path for plan in plans for path in plan.kept),
    )


def critics(binding: Binding) -> int:
    """Return how many Q-functions the agent has."""
    return sum(part.component == "critic" for part in binding.parts)


def gaussian(binding: Binding) -> bool:
    """Say whether the policy's deviation is a head of its own, as SAC's is."""
    return any(dict(part.branches).keys() & {"log_std", "std"} for part in binding.parts if part.acts)


def valued(binding: Binding) -> bool:
    """Say whether the agent is one of PPO's kind: a policy and a value of the state."""
    found = {part.component for part in binding.parts}
    return "value" in found and "critic" not in found
