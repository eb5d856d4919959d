"""RLgraph's SAC agent: variables written by `agent.store_model`, TensorFlow 1.

Sources in github.com/rlgraph/rlgraph: rlgraph/graphs/tensorflow_executor.py (`store_model`: a
tf.train.Saver of everything, replay memory included), rlgraph/agents/sac_agent.py (scopes `policy`,
`sac-value-network`, the second one's `-1`, `target-`, `log_alpha`),
rlgraph/components/action_adapters/ (`action-layer`: the mean, then the logarithm of the standard
deviation), rlgraph/components/distributions/squashed_normal.py (an action without exploration is
tanh of the mean, scaled from [-1, 1] to the bounds),
rlgraph/components/neural_networks/value_function.py (`value-function-output`),
rlgraph/components/neural_networks/sac/sac_networks.py (observation, then action). Layer names come
from the user's configuration, which also is the only place with the activations; its examples use
ReLU (rlgraph/tests/configs/sac_agent_for_pendulum.json).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpttool.core import deferred
from ckpttool.core.tree import Tree
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import LEFT_OPEN, AgentMetadata, RecognizedAgent
from ckpttool.mapping.rules import Move

TABLE = LayoutTable(
    name="rlgraph",
    plays=("SAC",),
    title="RLgraph's SAC: policy, sac-value-network, log_alpha",
    framework="tensorflow",
    counters={"global-timestep": "num_timesteps", "global-training-timestep": "total_it"},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-3, lacks=LEFT_OPEN["rlgraph"]),
    seen="SAC built and saved by 0.5.5 under TensorFlow 1.14",
    tensors={"log_alpha": "temperature/log_alpha"},
    joined=True,
)

_CRITICS = {
    f"{prefix}sac-value-network{number}": f"{canonical}/{head}"
    for prefix, canonical in (("", "critic"), ("target-", "critic_target"))
    for number, head in (("", "q1"), ("-1", "q2"))
}
_HIDDEN, _ACTION = "policy/neural-network", "policy/action-adapter-0/action-network"
# The last layer of each network, and the name pattern of a stack's layers: SCOPE/dense/kernel.
_LAST = ("action-layer", "value-function-output")
_KERNEL = deferred.compile(r"(.+)/([^/]+)/dense/kernel")
_NUMBER = deferred.compile(r"(\d+)")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # a prefix's name is no evidence
    """Return the recognised agent of variables with the scopes of a SAC agent."""
    matches = [kernel for name in tree.names.values() if (kernel := _KERNEL.fullmatch(name))]
    stacks: dict[str, list[str]] = {}
    for match in matches:
        stacks.setdefault(match[1], []).append(match[2])
    if _ACTION not in stacks or not any(f"{critic}/dense-stack" in stacks for critic in _CRITICS):
        return None
    policy = [
        f"{stack}/{layer}" for stack in (_HIDDEN, _ACTION) for layer in _sort_stack(stacks.get(stack, ()))
    ]
    components = {"+".join(policy): "actor"}
    for critic, canonical in _CRITICS.items():
        stack = f"{critic}/dense-stack"
        if stack in stacks:
            components["+".join(f"{stack}/{layer}" for layer in _sort_stack(stacks[stack]))] = canonical
    # All other tensors of a network are unplaced.
    components |= {
        "policy": "actor",
        **{c: canonical for c, canonical in _CRITICS.items() if f"{c}/dense-stack" in stacks},
    }
    binding = bind(tree, replace(TABLE, components=components))
    return None if binding is None else _sort_moves(binding, tree, components)


def _sort_moves(binding: RecognizedAgent, tree: Tree, components: Iterable[str]) -> RecognizedAgent:
    """Return the binding with its moves in layer order, which the file does not preserve."""
    layers = [layer for names in components for layer in names.split("+")]
    ranks = {layer: number for number, layer in enumerate(layers)}

    def rank(move: Move) -> int:
        return ranks.get(tree.names[move.source].rpartition("/dense/")[0], len(ranks))

    moves = tuple(sorted(binding.moves.moves, key=rank))
    return replace(binding, moves=replace(binding.moves, moves=moves))


def _sort_stack(layers: Iterable[str]) -> list[str]:
    """Return a stack's layers sorted by name, numbers as numbers; the last layer is last."""

    def position(layer: str) -> tuple[bool, list[tuple[bool, int, str]]]:
        parts = _NUMBER.split(layer)
        return layer in _LAST, [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]

    return sorted(layers, key=position)
