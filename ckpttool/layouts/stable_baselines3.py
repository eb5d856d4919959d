"""Agents of Stable-Baselines3 and its contrib: TD3, DDPG, SAC, TQC; PPO, A2C, TRPO; DQN, QR-DQN; ARS.

Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/td3/policies.py, sac/policies.py and
common/policies.py (ContinuousCritic, ActorCriticPolicy) for the networks; common/policies.py,
`BasePolicy.predict` and `unscale_action`, for the action: a squashed one goes from [-1, 1] to [low, high],
another is limited to the bounds. sac/policies.py, Actor: with gSDE the mean is limited to [-clip_mean,
clip_mean] before it is squashed. Hidden layers are ReLU, in common/policies.py Tanh. TQC:
github.com/Stable-Baselines-Team/stable-baselines3-contrib, sb3_contrib/tqc/policies.py; sb3_contrib/ars/
policies.py: ReLU and tanh to the bounds in ARSPolicy, one matrix limited to the bounds in ARSLinearPolicy.
dqn/policies.py: up to version 2.3 the optimizer has the target's parameters too, which it never updates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool.layouts import baselines_settings, canonical, optimizers, stable_baselines3_fronts, zoo
from ckpttool.layouts.canonical import Binding, Facts, settings_stay
from ckpttool.layouts.stable_baselines3_plan import plan, statistics_beside
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Path, ValueLeaf, attr, index, key
from ckpttool.ledger import Entry
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import ToTensor
from ckpttool.tree import Tree

__all__ = ["TABLE", "companions", "plan", "recognise", "statistics_beside", "told_by"]

_TITLE = "Stable-Baselines3 agent (TD3, DDPG, SAC, TQC; PPO, A2C, TRPO; DQN, QR-DQN; ARS)"
_SEEN = "agents of rl-trained-agents; every algorithm as the library 2.9.2 and its contrib save it"

# What the library compares with an environment's: a file of its own goes on with it.
OBSERVATION_SPACE: tuple[Path, ...] = tuple(
    (attr("data"), key("observation_space"), attr(end)) for end in ("low", "high")
)
TABLE = Table(
    name="stable_baselines3",
    title=_TITLE,
    framework="torch",
    components={f"policy/{name}": name for name in canonical.NETWORKS},
    optimizers={
        "actor/optimizer": "actor_optimizer",
        "critic/optimizer": "critic_optimizer",
        "ent_coef_optimizer": "temperature_optimizer",
    },
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5, lacks=(zoo.UNTOLD,)),
    optimizer=optimizers.from_torch,
    branches={"log_std": "log_std"},
    tensors={
        # gSDE's matrix of deviations is no layer: training draws noise with it.
        "policy/actor/log_std": "actor/log_std",
        **{
            f"{variables}/{theirs}": f"temperature/{ours}"
            for variables in ("pytorch_variables", "tensors")
            for theirs, ours in (("log_ent_coef", "log_alpha"), ("ent_coef_tensor", "alpha"))
        },
    },
    seen=_SEEN,
)
# The policies of PPO and A2C, their networks put together from the parts that the library keeps them in.
_ON_POLICY = replace(
    TABLE,
    components={"actor": "actor", "value": "value"},
    optimizers={"policy/optimizer": canonical.JOINT},
    facts=Facts(head="clip", hidden="tanh", epsilon=1e-5, lacks=(zoo.UNTOLD,)),
    branches={},
    tensors={"policy/log_std": "actor/log_std"},
)
# ARS: a policy alone, which has no optimizer; one layer of it may have no bias.
_SEARCHED = replace(
    _ON_POLICY,
    components={"actor": "actor"},
    optimizers={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5, lacks=(zoo.UNTOLD,)),
    tensors={},
    matrices=True,
)
# DQN and QR-DQN: a network that gives a value, or quantiles of it, for every action.
_Q_NETWORKS = {
    f"policy/{name}{target}/{name}": f"critic{target}/q1"
    for target in ("", "_target")
    for name in ("q_net", "quantile_net")
}
_DISCRETE = replace(
    TABLE,
    components=_Q_NETWORKS,
    optimizers={"policy/optimizer": "critic_optimizer"},
    facts=Facts(head="identity", hidden="relu", epsilon=1e-5),
    branches={},
    tensors={},
)
_PARTS = {"action_net": "actor", "mlp_extractor.policy_net": "actor", "mlp_extractor.shared_net": "actor"} | {
    "value_net": "value",
    "mlp_extractor.value_net": "value",
}
_PART = re.compile(r"(mlp_extractor\.(?:policy|value|shared)_net|action_net|value_net|features_extractor)\.")
_EXTRACTOR = re.compile(r"(?:(actor|actor_target|critic|critic_target)\.)?(?:pi_)?features_extractor\.")
# sb3_contrib/common/recurrent/policies.py; without an LSTM of its own a recurrent value has a layer `critic`.
_MEMORY = re.compile(r"lstm_actor\.|(lstm_critic\.|critic\.(?:weight|bias)$)")
_ACTOR = re.compile(r"actor\.(?:mu|latent_pi)\.")
_Q = re.compile(r"(q_net|quantile_net)\.\1\.")
_CHOICE = "the choice among discrete actions"
_VALUE = re.compile(r"(?:mlp_extractor\.value_net|value_net)\.")
_POLICY, _OPTIMIZER, _DATA = key("policy"), key("policy.optimizer"), attr("data")
_COUNTERS = {"_n_updates": "total_it", "num_timesteps": "num_timesteps"}
_CLIP_MEAN = 2.0
_EXTRACTOR_CLASS = "features_extractor_class"
_LIBRARIES = ("stable_baselines3.", "sb3_contrib.")


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent of what one algorithm's `save` wrote.

    Networks that are no perceptrons are left to be listed; a policy for discrete actions is not run.
    """
    names = [str(path[1].value) for path in tree if len(path) == 2 and path[0] == _POLICY]
    if any(map(_ACTOR.match, names)):
        binding = bind(_layers_alone(tree), TABLE)
    elif any(map(_Q.match, names)):
        binding = _discrete(tree)
    elif any(_PART.match(each) for each in names):
        binding = _on_policy(tree, _ON_POLICY if any(map(_VALUE.match, names)) else _SEARCHED)
    else:
        return None
    return _told(binding, tree).entered(*_own_code(tree)) if binding is not None else None


def _own_code(tree: Tree) -> Iterator[Entry]:
    """Yield an entry for a policy or a features extractor whose class is the program's own: it is not run."""
    for names, what in ((("policy_class",), "policy"), (("policy_kwargs", _EXTRACTOR_CLASS), "extractor")):
        kind = baselines_settings.class_of(tree, *names)
        if kind is not None and not kind.startswith(_LIBRARIES):
            value = f"{what} class {kind}: the library's own is played in its place"
            yield Entry("not used", "custom code", value, "/".join(("data", *names)), decides=True)


def _on_policy(tree: Tree, table: Table) -> Binding | None:
    """Bind a tree whose policy and value are put together under names of their own."""
    ours = {_placed(path): path for path in tree}
    binding = bind(Tree({place: tree[path] for place, path in ours.items()}), table)
    if binding is None or not any(part.component == "actor" for part in binding.parts):
        return None
    binding = binding.moved(lambda path: ours[path])
    if not baselines_settings.is_box(tree):
        return binding.refused("actor", _CHOICE)
    return _searched(binding, tree) if table is _SEARCHED else binding


def _searched(binding: Binding, tree: Tree) -> Binding:
    """Return the binding of ARS's policy with the action map that its class has."""
    kind = (baselines_settings.class_of(tree, "policy_class") or "").rpartition(".")[2]
    numbered = any(layer.name[-1].isdigit() for part in binding.parts for layer in part.layers)
    # Since contrib 1.7 a linear policy is an MLP without hidden layers, numbered as one.
    linear = kind == "ARSLinearPolicy" if kind.startswith("ARS") else not numbered
    squashed = baselines_settings.setting(tree, "policy_kwargs", "squash_output", not linear)
    if squashed is False and not linear:
        # Some versions build a tanh nevertheless.
        return binding.refused("actor", "squash_output=False, which depends on the version")
    return binding if squashed else replace(binding, facts=binding.facts._replace(head="clip"))


def _discrete(tree: Tree) -> Binding | None:
    """Bind the networks of DQN or QR-DQN; parameters that their optimizer never updated are the target's."""
    online = sum(path[0] == _POLICY and _Q.match(str(path[1].value)) is not None for path in tree)
    group = (_OPTIMIZER, key("param_groups"), index(0), key("params"))
    updated = {path[2].value for path in tree if path[:2] == (_OPTIMIZER, key("state"))}
    targets = {(*group, index(number)) for number in range(online, 2 * online) if number not in updated}
    more = frozenset(targets & tree.keys())
    binding = bind(
        replace(tree, leaves={path: leaf for path, leaf in tree.items() if path not in more}), _DISCRETE
    )
    if binding is None:
        return None
    return replace(binding, consumed=binding.consumed | more).noted("critic gives a value for each action")


def _placed(path: Path) -> Path:
    if len(path) != 2 or path[0] != _POLICY:
        return path
    found = _PART.match(str(path[1].value))
    component = _PARTS.get(found[1]) if found else None
    return (key(component), path[1]) if component is not None else path


def _told(binding: Binding, tree: Tree) -> Binding:
    """Return the binding with what the file says: bounds, activations, counters; settings stay behind."""
    facts = baselines_settings.facts(binding.facts, tree)
    unplaced = dict(binding.unplaced)
    limited = (_POLICY, key("actor.mu.0.weight")) in tree and (_POLICY, key("actor.log_std")) in tree
    if limited:
        clip = baselines_settings.setting(tree, "policy_kwargs", "clip_mean", _CLIP_MEAN)
        facts = facts._replace(head="clip_tanh_affine")
        if clip != _CLIP_MEAN:
            unplaced["actor"] = (*unplaced.get("actor", ()), f"a mean limited to {clip}")
    if baselines_settings.setting(tree, "policy_kwargs", "squash_output", False) is True:
        facts = facts._replace(head="affine")
    facts = _by_class(facts, tree)
    images = baselines_settings.images(tree)
    if images:
        unplaced["actor"] = (*unplaced.get("actor", ()), images)
    for component, paths in _extractors(tree).items():
        names = [tree.names[path] for path in paths]
        unplaced[component] = tuple(dict.fromkeys((*unplaced.get(component, ()), *names)))
    fronts = {
        part.component: front
        for part in binding.parts
        if part.acts
        and (front := stable_baselines3_fronts.found(tree, part.component, unplaced.get(part.component, ())))
    }
    if fronts:
        facts = facts._replace(lacks=())
    counters = tuple(_counters(tree))
    moves = (*binding.moves.moves, *counters)
    used = {move.source for move in moves}
    settings = [path for path in tree if path and path[0].kind == "attr" and path not in used]
    empty = [path for path, leaf in tree.plain() if len(path) == 1 and leaf.value is None]
    notes = binding.moves.notes
    if settings:
        notes = (*notes, settings_stay(len(settings), "data"))
    return replace(
        binding,
        moves=replace(binding.moves, moves=moves, notes=notes),
        facts=facts,
        consumed=binding.consumed | frozenset(settings) | frozenset(empty),
        unplaced=unplaced,
        fronts=fronts,
    )


def _by_class(facts: Facts, tree: Tree) -> Facts:
    """Return the facts with what the library's own policy class does where its arguments ask for no other.

    The file holds the class and all arguments that it was made with: what they leave out is the default.
    """
    kind = baselines_settings.class_of(tree, "policy_class")
    arguments = (_DATA, key("policy_kwargs"))
    given = arguments in tree.containers or any(path[:2] == arguments for path in tree)
    if kind is None or not kind.startswith(_LIBRARIES) or not given:
        return facts
    if "hidden" not in facts.said:
        facts = facts.read("data/policy_kwargs", hidden=facts.hidden)
    return facts.read("data/policy_class", head=facts.head)


def _layers_alone(tree: Tree) -> Tree:
    """Return the tree without features extractors: a dense layer of one would pass for a policy's first."""
    inside = {path for paths in _extractors(tree).values() for path in paths}
    leaves = {path: leaf for path, leaf in tree.items() if path not in inside}
    return replace(tree, leaves=leaves, aliases={p: a for p, a in tree.aliases.items() if p in leaves})


def _extractors(tree: Tree) -> dict[str, list[Path]]:
    """Return the tensors of features extractors and of memory, which layers do not hold, by component."""
    found: dict[str, list[Path]] = {}
    for path in tree:
        name = str(path[1].value) if len(path) == 2 and path[0] == _POLICY else ""
        if extractor := _EXTRACTOR.match(name):
            # A policy of PPO or A2C has one for all, or one each.
            found.setdefault(extractor[1] or "actor", []).append(path)
        elif memory := _MEMORY.match(name):
            found.setdefault("value" if memory[1] else "actor", []).append(path)
    return found


def _counters(tree: Tree) -> list[Move]:
    """Return the moves of the counts of updates and of steps of the environment."""
    found = []
    for theirs, ours in _COUNTERS.items():
        path = (_DATA, key(theirs))
        leaf = tree.get(path)
        if isinstance(leaf, ValueLeaf) and type(leaf.value) is int and 0 <= leaf.value < 1 << 62:
            found.append(Move(path, (attr(ours),), ToTensor("int64")))
    return found


def companions(location: str) -> Sequence[str]:
    """Return the files that RL-Zoo, callbacks and the hub put beside an agent: statistics and settings."""
    return zoo.companions(location)


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the observations' statistics or the environment that the file tells."""
    return zoo.told_by(binding, file, tree)
