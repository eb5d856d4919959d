"""The canonical agent tree that every layout maps to and from, and what a layout found out on the way.

actor/<n>/kernel                      the policy's n-th layer, dense kernels [in, out]
critic/q1/<n>/kernel                  each Q-function has a head of its own
actor_target/..., critic_target/...   the slow copies
actor_optimizer/m/<n>/kernel          a moment lies where its weight lies, under its slot's name
actor_optimizer/step                  updates made; learning_rate, beta_1, ... beside it
total_it, save_counter                counters of the agent and of its checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.leaf import Path, attr, index
from ckpttool.mapping.report import Moves

NETWORKS = ("actor", "actor_target", "critic", "critic_target")
OPTIMIZED = {"actor_optimizer": "actor", "critic_optimizer": "critic"}
SLOTS = ("m", "v", "vhat")


class PartLayer(NamedTuple):
    """One layer: the module's name below its component, as a torch module would have it, and its kind."""

    name: tuple[str, ...]
    kind: str


class Part(NamedTuple):
    """One network: a component ("critic"), its head ("q1"; None for a policy), its layers in order."""

    component: str
    head: str | None
    layers: tuple[PartLayer, ...]

    @property
    def prefix(self) -> Path:
        """The network's place in the canonical tree."""
        return (attr(self.component),) + ((attr(self.head),) if self.head else ())

    @property
    def title(self) -> str:
        """The network's name for people, such as `critic/q1`."""
        return f"{self.component}/{self.head}" if self.head else self.component


class Facts(NamedTuple):
    """What a codebase's habit says about its networks, where no file says it.

    `head` is what turns the last layer into an action (see agents.components), `hidden` the activation
    after every hidden layer, `epsilon` that of its layer norms.
    """

    head: str
    hidden: str
    epsilon: float


@dataclass(frozen=True, slots=True)
class Binding:
    """A tree recognised as an agent: every leaf's way to the canonical tree.

    `consumed` are leaves that carry no information of their own once the rest is mapped (indices);
    `unplaced` names, by component, the trained tensors that no known kind of layer took: such a network
    can be listed, but running it without them would be running another one.
    """

    layout: str
    moves: Moves
    parts: tuple[Part, ...]
    facts: Facts
    consumed: frozenset[Path] = frozenset()
    unplaced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evidence: str = ""
    of: Mapping[Path, Path] = field(default_factory=dict)


def weight(part: Part, position: int, name: str) -> Path:
    """Return the canonical path of a layer's tensor."""
    return (*part.prefix, index(position), attr(name))


def slot(optimizer: str, name: str, weight_path: Path) -> Path:
    """Return the canonical path of a weight's moment: the weight's own path below optimizer and slot."""
    return (attr(optimizer), attr(name), *weight_path[1:])


def setting(optimizer: str, name: str) -> Path:
    """Return the canonical path of an optimizer's counter or hyperparameter."""
    return (attr(optimizer), attr(name))
