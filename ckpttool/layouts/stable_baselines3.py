"""Agents of Stable-Baselines3: TD3, DDPG and SAC, TQC of its contrib, the Gaussian policies of PPO and A2C.

Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/td3/policies.py, sac/policies.py and
common/policies.py (ContinuousCritic, ActorCriticPolicy) for the networks; common/policies.py,
`BasePolicy.predict` and `unscale_action`, for the action: a squashed one goes from [-1, 1] to [low, high],
another is limited to the bounds. sac/policies.py, Actor: with gSDE the mean is limited to [-clip_mean,
clip_mean] before it is squashed. Hidden layers are ReLU, in common/policies.py Tanh. TQC:
github.com/Stable-Baselines-Team/stable-baselines3-contrib, sb3_contrib/tqc/policies.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ckpttool.layouts import baselines_settings, canonical, optimizers, stable_baselines3_fronts, zoo
from ckpttool.layouts.canonical import Binding, Facts, settings_stay
from ckpttool.layouts.stable_baselines3_plan import plan
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Path, ValueLeaf, attr, key
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import ToTensor
from ckpttool.tree import Tree

__all__ = ["TABLE", "companions", "plan", "recognise", "told_by"]

_TITLE = "Stable-Baselines3 agent (TD3, DDPG, SAC, TQC; PPO, A2C)"
_SEEN = "DDPG agents of rl-trained-agents; every algorithm as the library 2.9.2 and its contrib save it"

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
    optimizers={},
    facts=Facts(head="clip", hidden="tanh", epsilon=1e-5, lacks=(zoo.UNTOLD,)),
    branches={},
    tensors={"policy/log_std": "actor/log_std"},
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
_POLICY, _DATA = key("policy"), attr("data")
_COUNTERS = {"_n_updates": "total_it", "num_timesteps": "num_timesteps"}
_CLIP_MEAN = 2.0


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent of what one algorithm's `save` wrote.

    Discrete actions, and networks that are no perceptrons, are left to be listed.
    """
    names = [str(path[1].value) for path in tree if len(path) == 2 and path[0] == _POLICY]
    if any(map(_ACTOR.match, names)):
        binding = bind(_layers_alone(tree), TABLE)
    elif any(_PART.match(each) for each in names) and baselines_settings.is_box(tree):
        binding = _on_policy(tree)
    else:
        return None
    return _told(binding, tree) if binding is not None else None


def _on_policy(tree: Tree) -> Binding | None:
    """Bind a tree whose policy and value are put together under names of their own."""
    ours = {_placed(path): path for path in tree}
    binding = bind(Tree({place: tree[path] for place, path in ours.items()}), _ON_POLICY)
    if binding is None or not any(part.component == "actor" for part in binding.parts):
        return None
    moves = tuple(replace(move, source=ours[move.source]) for move in binding.moves.moves)
    return replace(binding, moves=replace(binding.moves, moves=moves))


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
