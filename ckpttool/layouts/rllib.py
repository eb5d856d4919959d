"""RLlib's agents of the new API stack: the RLModules of SAC, PPO and their relatives, on PyTorch.

Sources, in github.com/ray-project/ray: rllib/algorithms/sac/sac_catalog.py and
torch/default_sac_torch_rl_module.py (`pi_encoder`, `pi`, `qf_encoder`, `qf`, their twins and targets),
rllib/algorithms/ppo/ppo_catalog.py (`encoder`, `pi`, `vf`), rllib/core/rl_module/default_model_config.py
(activations), rllib/models/torch/torch_distributions.py (the last layer gives means, then log standard
deviations), rllib/core/distribution/torch/torch_distribution.py (what acts without noise: PPO's mean; SAC's
mean too, without the tanh that its samples go through, github.com/ray-project/ray/issues/51544),
rllib/core/models/torch/primitives.py (layer norms), rllib/utils/spaces/space_utils.py
(`unsquash_action`: [-1, 1] goes to the bounds and is limited to them),
rllib/connectors/env_to_module/mean_std_filter.py and rllib/utils/filter.py (observations become
`(x - mean) / (std + 1e-8)`, limited to `clip_by_value`), rllib/connectors/connector_pipeline_v2.py (each
connector has a folder that is called after its class).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttool import places
from ckpttool.layouts import activations, optimizers
from ckpttool.layouts.canonical import Binding, Facts, settings_stay
from ckpttool.layouts.rllib_plan import plan
from ckpttool.layouts.rllib_policy import mean_std
from ckpttool.layouts.small_arrays import numbers
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.ledger import NO_ENVIRONMENT, NO_STATISTICS, Entry, unknown
from ckpttool.tree import Tree

__all__ = ["TABLE", "companions", "plan", "recognise", "told_by"]

_MODULES = "learner_group/learner/rl_module"
_ARGUMENTS = "class_and_ctor_args.pkl"
# With which a module's own folder begins: SAC's, PPO's.
_ENCODERS = ("pi_encoder", "encoder")
_LACKS = (NO_ENVIRONMENT,)
# Training samples tanh of a Gaussian; the action without noise has no tanh in the library's own code.
_SQUASHED = unknown(
    "action map",
    "whether tanh bounds the mean (yes in training: --head affine; no where RLlib acts with explore=False: "
    "--head clip_affine)",
    decides=True,
)
_LAYER_NORM = 1e-3

TABLE = Table(
    name="rllib",
    title="RLlib agent of the new API stack (SAC, PPO, APPO)",
    framework="torch",
    components={},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="tanh", epsilon=_LAYER_NORM, lacks=(*_LACKS, _SQUASHED)),
    optimizer=optimizers.from_torch,
    seen="SAC and PPO as Ray 2.60 saves them",
    joined=True,
)
# PPO's mean is limited to the bounds, not squashed.
_CONNECTORS = "env_runner/env_to_module_connector"
# Connectors that change no observation of a single agent, and those whose effect shows in its size.
_NEUTRAL = re.compile(
    "AddObservationsFromEpisodesToBatch|AddStatesFromEpisodesToBatch|AddTimeDimToBatchAndZeroPad"
    "|AgentToModuleMapping|BatchIndividualItems|NumpyToTensor|FlattenObservations|WriteObservationsToEpisodes"
)
_FILTER = "MeanStdFilter"
_PPO = Facts(head="clip_affine", hidden="tanh", epsilon=_LAYER_NORM, lacks=_LACKS)


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
    deviation = f"{module}pi/log_std"
    if deviation in tree.names.values():  # DefaultModelConfig.free_log_std
        table = replace(table, joined=False, tensors={deviation: "actor/log_std"})
    binding = bind(tree, table)
    if binding is None or not any(part.acts for part in binding.parts):
        return None
    facts = _filtered(_activations(binding), tree)
    return _without_settings(replace(binding, facts=facts), tree)


def _filtered(facts: Facts, tree: Tree) -> Facts:
    """Return the facts with the statistics of a MeanStdFilter among the connectors, if there is one."""
    said = {tree.names[path]: leaf for path, leaf in tree.items()}
    means = [name for name in said if name.startswith(_CONNECTORS) and name.endswith("/mean_array")]
    if not means:
        return facts
    agent = means[0].rpartition("/running_stats/")[0]
    norm = mean_std(said, f"{agent}/running_stats/0") if len(means) == 1 else None
    flags = [said.get(f"{agent}/{name}") for name in ("de_mean_to_zero", "de_std_to_one")]
    whole = all(isinstance(flag, ValueLeaf) and flag.value is True for flag in flags)
    clip = said.get(f"{agent}/clip_by_value")
    limit = clip.value if isinstance(clip, ValueLeaf) else ""
    pushes = said.get(f"{agent}/running_stats/0/num_pushes")
    alone = isinstance(pushes, ValueLeaf) and pushes.value == 1  # its variance differs among versions
    if norm is None or alone or not whole or not isinstance(limit, int | float | None):
        return facts.lacking(NO_STATISTICS)
    where = f"{agent.rpartition('/')[0] or agent}/state.pkl"
    return facts.read(where, norm=norm._replace(clip=float(limit) if limit else None))


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
    modules = _arguments_below(os.path.join(location, *_MODULES.split("/")))
    if modules is None:
        return (os.path.join(location, _ARGUMENTS),) if places.isdir(location) else ()
    return [*modules, *(_arguments_below(os.path.join(location, *_CONNECTORS.split("/"))) or ())]


def _arguments_below(folder: str) -> list[str] | None:
    """Return the arguments' files in the folders of a folder, None if that cannot be listed."""
    try:
        names = sorted(places.listdir(folder))
    except OSError:
        return None
    folders = [os.path.join(folder, name) for name in names]
    return [os.path.join(inner, _ARGUMENTS) for inner in folders if places.isdir(inner)]


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with what the arguments of a module, or the class of a connector, say.

    A module's are the action's bounds and the activations.
    """
    above, name = os.path.split(os.path.dirname(file))
    if os.path.basename(above) == os.path.basename(_CONNECTORS):
        return _connected(binding, name)
    said = {tree.names[path]: leaf for path, leaf in tree.items()}
    facts = binding.facts
    low, high = (numbers(_one(said, f"action_space/{end}")) for end in ("low", "high"))
    facts = facts.bounded(_ARGUMENTS, low, high) or facts
    names = [_one(said, f"model_config/{name}fcnet_activation") for name in ("", "head_")]
    inside, head = (
        activations.RLLIB.get(leaf.value, leaf.value)
        if isinstance(leaf, ValueLeaf) and isinstance(leaf.value, str)
        else None
        for leaf in names
    )
    actor = next(part for part in binding.parts if part.acts)
    encoder = ["encoder" in layer.name[0] for layer in actor.layers[:-1]]
    if not all(encoder) and (inside or head):
        habit = facts.hidden
        own = tuple((inside or habit) if each else (head or "relu") for each in encoder)
        facts = facts.read(_ARGUMENTS, activations=own)
    elif inside:
        facts = facts.read(_ARGUMENTS, hidden=inside)
    return binding if facts is binding.facts else replace(binding, facts=facts)


def _connected(binding: Binding, name: str) -> Binding:
    """Return the binding with a connector that changes observations and is not applied, by its class."""
    name = re.sub(r"^\d+[-_]", "", name)
    if _NEUTRAL.fullmatch(name) or (name == _FILTER and binding.facts.norm is not None):
        return binding
    if name == _FILTER:
        return replace(binding, facts=binding.facts.lacking(NO_STATISTICS))
    where = f"{_CONNECTORS}/{name}"
    return binding.entered(Entry("not used", "wrapper", f"connector {name}", where, decides=True))


def _one(said: dict[str, Leaf | ValueLeaf], ending: str) -> Leaf | ValueLeaf | None:
    found = [leaf for name, leaf in said.items() if name.endswith(f"/{ending}")]
    return found[0] if len(found) == 1 else None
