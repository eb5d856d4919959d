"""Acme's TensorFlow agents with Sonnet modules: learner checkpoint, or snapshot of one network.

Sources in github.com/google-deepmind/acme: acme/tf/savers.py (Checkpointer:
`checkpoints/learner/ckpt-N` with policy, critic, target_policy, target_critic, their optimizers;
CheckpointingRunner: the same under `wrapped`; Snapshotter: `snapshots/policy`, a SavedModel whose
variables are stored in a list), acme/agents/tf/{ddpg,d4pg,dmpo}/ learning.py (what is saved) and
acme/tf/networks/continuous.py (LayerNormMLP: a layer norm and tanh after the first layer, ELU after
the others). acme/tf/networks/rescaling.py: TanhToSpec maps tanh to the bounds, ClipToSpec clips;
neither has variables, and acme's own control agents have the former.
acme/tf/networks/distributional.py: D4PG's critic outputs the logits of atoms, DMPO's policy a mean
and a standard deviation (before a softplus); the mean is clipped to [-1, 1] and scaled by
acme/wrappers/canonical_spec.py. Sonnet's MLP has ReLU (sonnet/src/nets/mlp.py), its layer norm an
epsilon of 1e-5 (sonnet/src/layer_norm.py).
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.optimizers import DefaultSetting
from ckpttool.core.tree import Path, Tree
from ckpttool.libraries import optimizers_write
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import (
    LEFT_OPEN,
    NETWORKS,
    AgentMetadata,
    RecognizedAgent,
    list_distribution_notes,
)
from ckpttool.libraries.write import (
    SONNET,
    LayerNames,
    NetworkRow,
    WritingTable,
    make_edge_path,
    parse_edge_path,
    plan_object_graph,
)
from ckpttool.mapping.rules import Plan, Settings

TABLE = LayoutTable(
    name="acme",
    plays=("DDPG", "D4PG", "DMPO"),
    writes=("DDPG",),
    title="Acme's TensorFlow agents (DDPG, D4PG, DMPO) with Sonnet networks: learner or snapshots",
    framework="tensorflow",
    components={
        "policy": "actor",
        "target_policy": "actor_target",
        "critic": "critic/q1",
        "target_critic": "critic_target/q1",
    },
    optimizers={"policy_optimizer": "actor_optimizer", "critic_optimizer": "critic_optimizer"},
    counters={"num_steps": "total_it", "save_counter": "save_counter"},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5, lacks=LEFT_OPEN["acme"]),
    rooted=True,
    user_written=True,
    seen="DDPG, D4PG, DMPO networks saved by acme 0.4.0's Checkpointer and Snapshotter, Sonnet 2.0.2",
    branches={"_scale_layer": "std"},
)

# sonnet/src/optimizers/adam.py, Adam.__init__.
_SONNET = {
    name: DefaultSetting(value, "Sonnet")
    for name, value in (("learning_rate", 0.001), ("beta_1", 0.9), ("beta_2", 0.999), ("epsilon", 1e-8))
}
_ROOTS = ("policy", "critic")
_TARGETS = frozenset(("target_policy", "target_critic"))
_SNAPSHOT = "_variables"


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of a learner's networks, or of a snapshot identified by its name."""
    names = [name.split("/") for name in tree.names.values()]
    if not any(name[-1] == "w" for name in names):
        return None
    if any(_TARGETS & set(name[:2]) for name in names):
        table = TABLE
    elif name in _ROOTS and all(name[0] == _SNAPSHOT for name in names):
        table = replace(TABLE, components={_SNAPSHOT: TABLE.components[name]}, optimizers={}, rooted=False)
    else:
        return None
    binding = bind(tree, table)
    if binding is None:
        return None
    binding = binding.noted(*list_distribution_notes(binding, tree))
    return _add_metadata(binding, {segment for name in names for segment in name})


def _add_metadata(binding: RecognizedAgent, segments: set[str]) -> RecognizedAgent:
    """Return the binding with facts from module names: activations, and whether the mean is clipped."""
    facts = binding.facts
    layers = [layer.kind for layer in binding.parts[0].layers]
    if layers[1:2] == ["layer_norm"]:
        # LayerNormMLP, whose activations no argument changes.
        facts = facts.without_lack("activation")._replace(activations=("tanh", "elu"))
    if "_mean_layer" in segments:
        facts = facts._replace(head="clip_affine")
    return replace(binding, facts=facts, defaults=_SONNET)


_WHOSE = "Acme's DDPG"
# snt.nets.MLP, followed by acme's LayerNormMLP.
_MLP = LayerNames("_layers/{i}")
_LAYER_NORM_MLP = LayerNames("{i}", norm="norm")
_NORMED = ["dense", "layer_norm"]


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan a checkpoint that the Checkpointer of acme's DDPG learner restores.

    The policy is `snt.Sequential([mlp, TanhToSpec(...)])`, the critic
    `CriticMultiplexer(critic_network=mlp)`, where `mlp` is `snt.nets.MLP`, or LayerNormMLP if the
    agent's networks have its layer norms. Raise UnsupportedError for networks that these cannot
    represent.
    """
    normed = _is_layer_norm_mlp(binding)
    names = _LAYER_NORM_MLP if normed else _MLP
    entries = {part: canonical for part, canonical in TABLE.components.items() if part != "critic"}
    rows = [
        NetworkRow(
            canonical,
            parse_edge_path(f"{component}/{'_critic_network' if 'critic' in component else '_layers/0'}"),
            names,
        )
        for component, canonical in {"critic": "critic/q1", **entries}.items()
    ]
    written = WritingTable(
        _WHOSE,
        rows,
        "affine",
        hidden="" if normed else "relu",
        optimizers={canonical: parse_edge_path(name) for name, canonical in TABLE.optimizers.items()},
        counters={"total_it": parse_edge_path("num_steps"), "save_counter": parse_edge_path("save_counter")},
        needs=("actor", "critic"),
        kinds=SONNET,
        path=_layer_norm_mlp_path if normed else make_edge_path,
        notes=(f"build with {'LayerNormMLP' if normed else 'snt.nets.MLP'} and TanhToSpec",),
    )
    return plan_object_graph(written, binding, agent, settings, optimizers_write.SONNET, "int32")


def _is_layer_norm_mlp(binding: RecognizedAgent) -> bool:
    """Return whether the networks are LayerNormMLPs; raise UnsupportedError if they only resemble them."""
    kinds = [[layer.kind for layer in part.layers] for part in binding.parts if part.component in NETWORKS]
    if not any("layer_norm" in kind for kind in kinds):
        return False
    facts = binding.facts
    every = {facts.activations_of(part.component) for part in binding.parts if part.component in NETWORKS}
    hidden = every.pop() if len(every) == 1 else ("several",)
    first = all(kind[:2] == _NORMED and "layer_norm" not in kind[2:] for kind in kinds)
    if not first or hidden[0] != "tanh" or set(hidden[1:]) - {"elu"} or facts.epsilon != TABLE.facts.epsilon:
        raise UnsupportedError(
            "Acme's LayerNormMLP requires a layer norm with epsilon 1e-5 after the first layer, then "
            "tanh, then ELU",
            found=f"{', '.join(hidden)}, epsilon {facts.epsilon:g}",
        )
    return True


def _layer_norm_mlp_path(entry: Path, layer: str, weight: str) -> Path:
    """Return a tensor's path in a LayerNormMLP: the first layer, its norm, and an MLP of the others."""
    inner = {"0": "0", "norm": "1"}.get(layer) or f"3/_layers/{int(layer) - 1}"
    return make_edge_path(entry, f"_network/_layers/{inner}", weight)
