"""Makes an agent ready for training: its networks, targets, and optimizers as its checkpoint left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpttool.agents.components import Wiring
from ckpttool.agents.network import Network
from ckpttool.agents.training.learner import Adam, Learner
from ckpttool.errors import UnsupportedError, UsageError
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Part
from ckpttool.layouts.optimizers.families import ADAM
from ckpttool.layouts.optimizers.known import Known
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr
from ckpttool.mapping.plan import Settings
from ckpttool.mapping.rules import ToValue
from ckpttool.ops import optimizer_facts
from ckpttool.ops.restore import Agent, canonical_tree
from ckpttool.ops.wiring import network_of
from ckpttool.tree import Tree

_WEIGHTS = ("kernel", "bias", "scale", "offset")  # in the order of training.learner.TRAINED
_SETTINGS = ("learning_rate", "beta_1", "beta_2", "epsilon")
_UPDATES = (attr("total_it"),)


@dataclass(slots=True)
class Prepared:
    """A learner, and sentences on what its checkpoint does not hold."""

    learner: Learner
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def learner_of(agent: Agent, wiring: Wiring) -> Prepared:
    """Return the agent as TD3 (two critics or more) or DDPG (one) would go on with it.

    A target that the checkpoint lacks is a copy of its network. Raise UsageError if actor or critic is
    missing, UnsupportedError for agents that are trained otherwise, and for optimizers other than Adam.
    """
    parts = {part.title: part for part in agent.binding.parts}
    critics = tuple(title for title, part in parts.items() if part.component == "critic")
    if "actor" not in parts or not critics:
        raise UsageError(
            "a step of training needs an actor and a critic",
            file=agent.checkpoint.path,
            found=", ".join(parts),
        )
    notes: list[str] = []
    networks: dict[str, Network] = {}
    slow: dict[str, str] = {}
    for title in ("actor", *critics):
        networks[title] = _trainable(agent, title, wiring)
        component, _, head = title.partition("/")
        slow[title] = f"{component}_target" + (f"/{head}" if head else "")
        if slow[title] in parts:
            networks[slow[title]] = _trainable(agent, slow[title], wiring)
        else:
            networks[slow[title]] = networks[title]
            notes.append(f"there is no {slow[title]}: training begins with a copy of {title}")
    state = _State(agent)
    learner = Learner(
        networks,
        critics,
        slow,
        state.adam("actor_optimizer", [parts["actor"]]),
        state.adam("critic_optimizer", [parts[title] for title in critics]),
        np.asarray(wiring.action_low, np.float64),
        np.asarray(wiring.action_high, np.float64),
        state.updates(),
    )
    return Prepared(learner, state.assumed, notes)


def _trainable(agent: Agent, title: str, wiring: Wiring) -> Network:
    part = agent.runnable(title)
    if part is None or part.branches:
        raise UnsupportedError(
            f"{title} is a Gaussian policy, which TD3 does not train", file=agent.checkpoint.path
        )
    network = network_of(agent, part, wiring)
    if not part.acts and network.width != 1:
        raise UnsupportedError(
            f"{title} gives a distribution, which TD3 does not train", file=agent.checkpoint.path
        )
    return network


class _State:
    """The optimizers of an agent in its canonical tree."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._tree: Tree = canonical_tree(agent.checkpoint.tree, agent.binding.moves)
        self._told: Settings = optimizer_facts.settings(agent.sidecar)
        self._corrected = (
            optimizer_facts.epsilon(agent.sidecar, agent.binding.layout) == optimizer_facts.CORRECTED
        )
        self.assumed: list[str] = []

    def updates(self) -> int:
        """Return how many updates were made; what TD3's delay of the actor goes by."""
        count = ToValue().leaf(self._tree[_UPDATES]) if _UPDATES in self._tree else None
        value = count.value if isinstance(count, ValueLeaf) else None
        return value if isinstance(value, int) else 0

    def adam(self, name: str, parts: Sequence[Part]) -> Adam:
        """Return an optimizer's state for all weights of these networks; a new one where there is none."""
        weights = [path for part in parts for path in _weights(self._agent.tree, part)]
        known = Known(name, self._tree, self._told.get(name, {}), self._agent.binding.defaults)
        if known.family is not ADAM or known.value("maximize") or known.number("decay"):
            raise self._refused(f"{name} is no Adam as TD3 uses it", known.family.name)
        self._assume(name, known)
        decays = [known.number("weight_decay", weight) or 0.0 for weight in weights]
        apart = bool(known.value("decoupled_weight_decay"))
        if apart and len(set(decays)) > 1:
            raise self._refused(f"{name} decays some of its weights, apart from the gradient")
        rate, beta_1, beta_2, epsilon = (self._number(known, setting, weights) for setting in _SETTINGS)
        return Adam(
            rate,
            beta_1,
            beta_2,
            epsilon,
            corrected=self._corrected,
            step=int(known.number("step") or 0),
            m=self._moments(name, "m", weights),
            v=self._moments(name, "v", weights),
            vhat=self._moments(name, "vhat", weights) if known.value("amsgrad") else (),
            l2=tuple(0.0 if apart else decay for decay in decays),
            decoupled=decays[0] if apart else 0.0,
        )

    def _assume(self, name: str, known: Known) -> None:
        if any(path[0] == attr(name) for path in self._tree):
            self.assumed += [known.assumed(setting) for setting in _SETTINGS if not known.has(setting)]
        else:
            self.assumed.append(f"there is no {name}: training begins with a new Adam of Keras's defaults")

    def _number(self, known: Known, setting: str, weights: Sequence[Path]) -> float:
        """Return a setting that all weights share; what is told if that was rounded to what is stored."""
        values = {known.number(setting, weight) for weight in weights}
        if len(values) > 1:
            raise self._refused(f"{known.name} has a {setting} for each group of weights")
        value, told = values.pop() or 0.0, known.exact(setting)
        return told if told is not None and float(np.float32(told)) == value else value

    def _moments(self, name: str, slot: str, weights: Sequence[Path]) -> tuple[np.ndarray, ...]:
        """Return a moment for every weight; zeros, with which every Adam begins, where there is none."""
        found = []
        for weight in weights:
            leaf, owner = self._tree.get(canonical.slot(name, slot, weight)), self._agent.tree[weight]
            shape = owner.shape if isinstance(owner, Leaf) else ()
            if isinstance(leaf, Leaf) and leaf.shape != shape:
                raise self._refused(f"{name} has moments of another shape than its weights", str(leaf.shape))
            found.append(leaf.array().astype(np.float64) if isinstance(leaf, Leaf) else np.zeros(shape))
        return tuple(found)

    def _refused(self, reason: str, found: str | None = None) -> UnsupportedError:
        return UnsupportedError(reason, file=self._agent.checkpoint.path, found=found)


def _weights(tree: Tree, part: Part) -> Iterator[Path]:
    for position in range(len(part.layers)):
        for name in _WEIGHTS:
            path = canonical.weight(part, position, name)
            if path in tree:
                yield path
