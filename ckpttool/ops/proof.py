"""The proof of a conversion: what was written computes what was read, before it gets its name.

Both sides run in numpy, in float64: that shows the mapping and costs no framework's start. What frameworks
themselves make of the two files shows `verify`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpttool import plugins
from ckpttool.agents.backends import numpy as reference
from ckpttool.agents.network import Network
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import EnvironmentMismatchError, MappingError, UnsupportedError, UsageError
from ckpttool.layouts import joints, plan
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.recognise import recognised
from ckpttool.ops import knowledge
from ckpttool.ops.pairs import network, shared
from ckpttool.ops.parity import Parity, doubled, measured, observations, run, unlike
from ckpttool.ops.restore import Agent, Own, agent_of, networks
from ckpttool.sidecar import Sidecar
from ckpttool.tree import Tree

OBSERVATIONS = 100
_CANNOT = (EnvironmentMismatchError, MappingError, UnsupportedError, UsageError)


class DiffersError(Exception):
    """What was written computes something else: this stops the writing, and only `convert` hears of it."""

    def __init__(self, proof: Proof) -> None:
        """Keep the proof."""
        super().__init__()
        self.proof = proof


@dataclass(frozen=True, slots=True)
class Proof:
    """Every network that source and target have, compared; notes say which were not."""

    networks: tuple[Parity, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Say whether every network computes the same."""
        return all(network.within for network in self.networks)

    def entry(self) -> list[dict[str, Any]]:
        """Return what the sidecar keeps of it."""
        kept = ("name", "max_abs", "max_rel", "within")
        return [{name: getattr(each, name) for name in kept} for each in self.networks]


def as_read(checkpoint: Checkpoint, tree: Tree, binding: Binding, own: Own) -> Agent:
    """Return the source's agent: the part of the checkpoint that is converted, as it was prepared."""
    found, binding = networks(tree, binding), joints.joined(binding)
    known = knowledge.merged(own.sidecar, knowledge.of_files(binding, found))
    return Agent(checkpoint, binding, found, own.sidecar, known, ())


def prove(source: Agent, written: Checkpoint, target: str, told: Sidecar) -> Proof:
    """Compare the source with what was written for `target`, read anew, its layout recognised anew.

    `told` is the sidecar that will lie beside it. Raise DiffersError if a network computes something else.
    """
    written = replace(written, path=target)
    binding = recognised(written)
    if binding is None:
        return Proof(notes=("no layout recognises what was written: its networks were not compared",))
    there = agent_of(written, binding, Own(replace(told, computation=None)))
    found: list[Parity] = []
    notes: list[str] = []
    never = plan.never_run(plugins.find("layouts", there.binding.layout).load())
    for title in shared(source, there):
        if title.partition("/")[0] in never:
            notes.append(f"{title} was not compared: no file of {there.binding.layout} tells how it is run")
            continue
        try:
            left = network(source, there, title, [])
        except _CANNOT as error:
            notes.append(f"{title} was not compared: {error.message}")
            continue
        found.append(_compared(title, left, source, there))
    proof = Proof(tuple(found), tuple(notes))
    if not proof.within:
        raise DiffersError(proof)
    return proof


def _compared(title: str, left: Network, source: Agent, there: Agent) -> Parity:
    try:
        right = network(there, source, title, [])
    except _CANNOT:
        return unlike(title)  # it could be run where it came from
    if left.inputs != right.inputs or left.width != right.width:
        return unlike(title)
    given = observations(left, OBSERVATIONS)
    with np.errstate(all="ignore"):
        first, second = (run(reference.build(n.cast("float64")), doubled(given)) for n in (left, right))
    if not np.isfinite(first).all():
        # An agent whose training failed is converted like any other: the same NaN are the same outputs.
        same = np.array_equal(first, second, equal_nan=True)
        return Parity(title, len(first), 0.0, 0.0, 0.0, 0.0, within=True) if same else unlike(title)
    return measured(title, left, given, (first, second), exact=first)
