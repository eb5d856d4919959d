"""RLlib's agents of the new API stack: the RLModules of SAC, PPO and their relatives, on PyTorch.

Sources, in github.com/ray-project/ray: rllib/algorithms/sac/sac_catalog.py and
torch/default_sac_torch_rl_module.py (`pi_encoder`, `pi`, `qf_encoder`, `qf`, their twins and targets),
rllib/algorithms/ppo/ppo_catalog.py (`encoder`, `pi`, `vf`), rllib/core/rl_module/default_model_config.py
(activations), rllib/models/torch/torch_distributions.py (the last layer gives means, then log standard
deviations; without noise SAC's action is tanh of the mean, PPO's the mean), rllib/utils/spaces/space_utils.py
(`unsquash_action`: [-1, 1] goes to the bounds and is limited to them).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool import places
from ckpttool.layouts import optimizers
from ckpttool.layouts.canonical import Binding, Facts, settings_stay
from ckpttool.layouts.rllib_plan import plan
from ckpttool.layouts.small_arrays import numbers
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.tree import Tree

__all__ = ["TABLE", "companions", "plan", "recognise", "told_by"]

_MODULES = "learner_group/learner/rl_module"
_ARGUMENTS = "class_and_ctor_args.pkl"
# With which a module's own folder begins: SAC's, PPO's.
_ENCODERS = ("pi_encoder", "encoder")
_LACKS = ("the environment",)

TABLE = Table(
    name="rllib",
    title="RLlib agent of the new API stack (SAC, PPO, APPO)",
    framework="torch",
    components={},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="tanh", epsilon=1e-5, lacks=_LACKS),
    optimizer=optimizers.from_torch,
    seen="SAC and PPO as Ray 2.60 saves them",
    joined=True,
)
# PPO's mean is limited to the bounds, not squashed.
_PPO = Facts(head="clip_affine", hidden="tanh", epsilon=1e-5, lacks=_LACKS)


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the folder's name says nothing
    """Return the way to the canonical agent of a checkpoint with one RLModule, or of its own folder."""
    names = list(_names(tree))
    stored = [parts for parts in names if parts[:3] == _MODULES.split("/") and len(parts) > 4]
    modules = {"/".join(parts[:4]) + "/" for parts in stored}
    if not modules and any(parts[0] in _ENCODERS and parts[-3:-2] == ["mlp"] for parts in names):
        stored, modules = names, {""}
    if len(modules) != 1:
        return None
    (module,) = modules
    gaussian = any("pi_encoder" in parts[:5] for parts in stored)
    table = _table(module, gaussian=gaussian)
    binding = bind(tree, table)
    if binding is None or not any(part.acts for part in binding.parts):
        return None
    return _without_settings(replace(binding, facts=_activations(binding)), tree)


def _activations(binding: Binding) -> Facts:
    """Return the facts with ReLU for hidden layers of the head, which by default has none."""
    actor = next(part for part in binding.parts if part.acts)
    encoder = ["encoder" in layer.name[0] for layer in actor.layers[:-1]]
    if all(encoder):
        return binding.facts
    habits = tuple(binding.facts.hidden if inside else "relu" for inside in encoder)
    return binding.facts._replace(activations=habits)


def _names(tree: Tree) -> Iterator[list[str]]:
    return (tree.names[path].split("/") for path, _ in tree.tensors())


def _table(module: str, *, gaussian: bool) -> Table:
    """Return the table of SAC's networks, which squash, or of PPO's."""
    if gaussian:
        names = {
            "pi_encoder+pi": "actor",
            "qf_encoder+qf": "critic/q1",
            "qf_twin_encoder+qf_twin": "critic/q2",
        }
        names |= {
            "target_qf_encoder+target_qf": "critic_target/q1",
            "target_qf_twin_encoder+target_qf_twin": "critic_target/q2",
        }
    else:
        names = {"encoder/actor_encoder+pi": "actor", "encoder/critic_encoder+vf": "value"}
        names["encoder/encoder+pi"] = "actor"  # one encoder for both
    placed = {"+".join(f"{module}{part}" for part in name.split("+")): ours for name, ours in names.items()}
    return replace(TABLE, components=placed, facts=TABLE.facts if gaussian else _PPO)


def _without_settings(binding: Binding, tree: Tree) -> Binding:
    """Leave what only training reads: settings, metrics, and the limit of the log standard deviation."""
    clips = {path for path, _ in tree.tensors() if tree.names[path].endswith("/log_std_clip_param_const")}
    left = {path for path, _ in tree.plain()} | {
        path for path, leaf in tree.tensors() if leaf.role == "other"
    }
    moved = {move.source for move in binding.moves.moves}
    binding = binding.without({tree.names[path] for path in clips})
    consumed = binding.consumed | frozenset((clips | left) - moved)
    return replace(binding.noted(settings_stay(len(left - moved))), consumed=consumed)


def companions(location: str) -> Sequence[str]:
    """Return the files in which RLlib keeps what each module was made with."""
    folder = os.path.join(location, *_MODULES.split("/"))
    try:
        names = sorted(places.listdir(folder))
    except OSError:
        return (os.path.join(location, _ARGUMENTS),) if places.isdir(location) else ()
    folders = [os.path.join(folder, name) for name in names]
    return [os.path.join(inner, _ARGUMENTS) for inner in folders if places.isdir(inner)]


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:  # noqa: ARG001  # there is one kind
    """Return the binding with the action's bounds and the activation of the module's arguments."""
    said = {tree.names[path]: leaf for path, leaf in tree.items()}
    facts = binding.facts
    low, high = (numbers(_one(said, f"action_space/{end}")) for end in ("low", "high"))
    facts = facts.bounded(_ARGUMENTS, low, high) or facts
    activation = _one(said, "model_config/fcnet_activation")
    if isinstance(activation, ValueLeaf) and isinstance(activation.value, str):
        facts = facts.read(_ARGUMENTS, hidden=activation.value)
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _one(said: dict[str, Leaf | ValueLeaf], ending: str) -> Leaf | ValueLeaf | None:
    found = [leaf for name, leaf in said.items() if name.endswith(f"/{ending}")]
    return found[0] if len(found) == 1 else None
