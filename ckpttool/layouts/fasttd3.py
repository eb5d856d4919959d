"""FastTD3's and FastSAC's files: state_dicts of actor, qnet and its target, normalizers, and the arguments.

Sources, in github.com/younggyoseo/FastTD3: fast_td3/fast_td3_utils.py (`save_params`;
`EmpiricalNormalization`: `(x - mean) / (std + 0.01)`), fast_td3/fast_td3.py (`Actor`: tanh of the last
layer; `Critic`: two networks that give the logits of `num_atoms` atoms, whose values are the buffer
q_support; ReLU), fast_sac/fast_sac.py, fast_td3/environments (with Isaac Lab an action is multiplied by
the argument action_bounds).
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.canonical import Binding, Facts, Norm
from ckpttool.layouts.distributions import distributions
from ckpttool.layouts.normalizers import Statistics
from ckpttool.layouts.table import Table, bind
from ckpttool.layouts.writing import DICT, Lone, Names, Network, Writing, critics, gaussian, written
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, key
from ckpttool.ledger import NO_BOUNDS
from ckpttool.mapping.parts import filled
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.tree import Tree

_STATISTICS = {"_mean": "mean", "_var": "var", "_std": "std", "count": "count"}
_NORMALIZERS = {"obs_normalizer_state": "", "critic_obs_normalizer_state": "critic_"}

TABLE = Table(
    name="fasttd3",
    title="FastTD3's and FastSAC's: actor_state_dict, qnet_state_dict, normalizers, args",
    framework="torch",
    components={
        "actor_state_dict": "actor",
        "qnet_state_dict/qnet1": "critic/q1",
        "qnet_state_dict/qnet2": "critic/q2",
        "qnet_target_state_dict/qnet1": "critic_target/q1",
        "qnet_target_state_dict/qnet2": "critic_target/q2",
    },
    optimizers={},
    counters={"global_step": "global_step"},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5, lacks=(NO_BOUNDS,)),
    optimizer=optimizers.from_torch,
    branches=canonical.LOG_STD,
    tensors={
        "qnet_state_dict/q_support": "critic/q_support",
        "qnet_target_state_dict/q_support": "critic_target/q_support",
        **{
            f"{theirs}/{name}": f"normalizer/{whose}{ours}"
            for theirs, whose in _NORMALIZERS.items()
            for name, ours in _STATISTICS.items()
        },
    },
)

# SimNormLinear: a dense layer, a norm, and a softmax over groups of numbers.
_SIMPLICIAL = re.compile(r"\w+_state_dict/.*(fc_head|net/\d+)/(linear|\d+/linear|[a-z_]+)/")
# A view can be wider than its file.
_MOST = 1 << 16
# What the actor explores with; nothing of it makes the action without noise.
_EXPLORATION = ("noise_scales", "std_min", "std_max")


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent of a file with the names of `save_params`."""
    top = {path[0].value for path in tree if path}
    if not {"actor_state_dict", "qnet_state_dict"} <= top:
        return None
    binding = bind(tree, TABLE)
    if binding is None:
        return None
    for component, entry in {"actor": "actor_state_dict", "critic": "qnet_state_dict"}.items():
        if any(_SIMPLICIAL.match(tree.names[path]) for path, _ in tree.tensors() if path[0] == key(entry)):
            binding = binding.refused(component, "a simplicial embedding (sim_type)")
    behind = frozenset(path for path in tree if _stays(path))
    binding = binding.without({tree.names[path] for path in behind}).noted(*distributions(binding, tree))
    return replace(
        binding,
        facts=_normed(_told(binding.facts, tree), tree),
        consumed=binding.consumed | behind,
    )


def _stays(path: Path) -> bool:
    return path[0] == key("args") or (path[0] == key("actor_state_dict") and path[1].value in _EXPLORATION)


def _told(facts: Facts, tree: Tree) -> Facts:
    """Return the facts with what the arguments say: the environment, and whether it scales actions."""
    said = {
        path[1].value: leaf.value for path, leaf in tree.plain() if path[0] == key("args") and len(path) == 2
    }
    env, width = said.get("env_name"), _actions(tree)
    if not isinstance(env, str) or width is None or width > _MOST:
        return facts
    high = 1.0
    if env.startswith("Isaac-"):
        given = said.get("action_bounds")
        if not isinstance(given, int | float):
            return facts
        high = float(given)
    facts = facts._replace(lacks=()).read("args", action_low=(-high,) * width, action_high=(high,) * width)
    # Those of HumanoidBench are Gymnasium's; other names are of other suites.
    return facts.read("args", env=env) if env.startswith(("h1hand-", "h1-")) else facts


def _actions(tree: Tree) -> int | None:
    for path, leaf in tree.tensors():
        named = path[0] == key("actor_state_dict") and path[-1].value in ("fc_mu.0.weight", "fc_mu.weight")
        if named and len(leaf.shape) == 2:
            return leaf.shape[0]
    return None


def _normed(facts: Facts, tree: Tree) -> Facts:
    where = "obs_normalizer_state"
    mean, std = (tree.get((key(where), key(name))) for name in ("_mean", "_std"))
    if not isinstance(mean, Leaf) or not isinstance(std, Leaf):
        return facts
    return facts.read(where, norm=Norm(mean, std=std, epsilon=1e-2, outside=True))


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: `save_params`'s dict, without the arguments of the training.

    FastSAC's with a deviation that depends on the observation, else FastTD3's, whose critics give the logits
    of atoms: raise UnsupportedError for other critics, and for an action map that is not tanh's.
    """
    soft = gaussian(binding)
    atoms = isinstance(agent.get((attr("critic"), attr("q_support"))), Leaf)
    if critics(binding) and not soft and not atoms:
        raise UnsupportedError("FastTD3's critics give the logits of atoms, this agent's give values")
    return written(_writing(soft=soft), binding, agent, told)


_ACTOR = key("actor_state_dict")
_QNETS = {"critic": key("qnet_state_dict"), "critic_target": key("qnet_target_state_dict")}
# fast_td3.py, Actor.__init__: the bounds of the noise's scale, and its scale in one environment.
_BUFFERS = {"noise_scales": ((1, 1), 0.05), "std_min": ((), 0.05), "std_max": ((), 0.8)}
_ARGS = "the arguments of the training are not written: FastTD3 takes sizes and environment from them"


def _normalizer(entry: str, whose: str) -> Statistics:
    places = {ours: (key(entry), key(theirs)) for theirs, ours in _STATISTICS.items()}
    return Statistics(places, "float32", (1, -1), epsilon=1e-2, outside=True, whose=whose)


def _writing(*, soft: bool) -> Writing:
    rows: list[Network | Lone | Statistics] = []
    if not soft:
        rows += [
            Lone(f"actor/{name}", (_ACTOR, key(name)), default=filled("float32", shape, value))
            for name, (shape, value) in _BUFFERS.items()
        ]
    mean, spread = ("fc_mu", {"log_std": "fc_logstd"}) if soft else ("fc_mu.0", {})
    rows.append(Network("actor", (_ACTOR,), Names("net.{s}", mean, spread)))
    for component, entry in _QNETS.items():
        if not soft:
            rows.append(Lone(f"{component}/q_support", (entry, key("q_support"))))
        rows += [
            Network(f"{component}/q{n}", (entry,), Names(f"qnet{n}.net.{{s}}", f"qnet{n}.net.{{s}}"))
            for n in (1, 2)
        ]
    rows += [_normalizer(entry, whose) for entry, whose in _NORMALIZERS.items()]
    return Writing(
        "FastSAC" if soft else "FastTD3",
        rows,
        "affine",
        depth=4,
        counters={"global_step": (key("global_step"),)},
        needs=("actor", "critic"),
        values=soft,
        containers={(key(entry),): DICT for entry in _NORMALIZERS},
        constants={(key("global_step"),): ValueLeaf(0)},
        notes=(_ARGS,),
    )
