"""Where a canonical agent goes in the dict of state_dicts that d3rlpy's `save_model` writes.

Sources, in github.com/takuseno/d3rlpy: d3rlpy/torch_utility.py (`Checkpointer`: every module and optimizer
of the algorithm must be there), ddpg_impl.py, sac_impl.py and bc_impl.py in d3rlpy/algos/qlearning/torch
(`Modules`), encoders.py and policies.py in d3rlpy/models/torch (names), d3rlpy/optimizers/optimizers.py.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.d3rlpy_config import VERSION, config, leaves
from ckpttool.layouts.writing import DICT, Lone, Names, Network, Writing, critics, gaussian, written
from ckpttool.leaf import Path, ValueLeaf, key
from ckpttool.mapping.parts import filled
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.tree import Container, Tree

_HIDDEN = "_encoder._layers.{s}"
_OPTIMIZERS = {"actor_optimizer": "actor_optim", "critic_optimizer": "critic_optim"}
_CONFIG = "scalers and activations are no part of this file: d3rlpy is to be told them"
_TORCH = (key("torch"),)
_TRAINING = "the settings of training (gamma, tau, ...) are the library's defaults"
_SCALED = "observation statistics are the configuration's observation scaler"
_LIMIT = "observation statistics are in the sidecar: d3rlpy has no limit after it"
_MEAN = Names(_HIDDEN, "_mu", {"log_std": "_logstd"})
_PLAIN = Names(_HIDDEN, "_fc")


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where everything goes: TD3's or DDPG's file, SAC's, or BC's for a policy alone.

    Targets that the agent lacks are copies, optimizers begin anew. Raise UnsupportedError for networks or an
    action map that the library's modules cannot be.
    """
    return written(_writing(binding), binding, agent, told)


def plan_d3(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where everything goes in a `.d3` file: that dict below `torch`, and the configuration.

    Raise as `plan` does, and for a configuration that cannot be made (see d3rlpy_config.config).
    """
    # What the other form must be told stands in the configuration.
    writing = replace(_writing(binding), hidden="", notes=(_TRAINING,))
    found = written(writing, binding, agent, told)
    said = dict(leaves(config(binding, agent), (key("config"),)))
    norm = binding.facts.norm
    values = {path: each for path, each in said.items() if isinstance(each, ValueLeaf)}
    return replace(
        found,
        moves=tuple(replace(move, target=(*_TORCH, *move.target)) for move in found.moves),
        added={
            **{(*_TORCH, *path): leaf for path, leaf in found.added.items()},
            **values,
            (key("version"),): ValueLeaf(VERSION),
        },
        containers={
            (): DICT,
            **{(*_TORCH, *path): each for path, each in found.containers.items()},
            **{path: each for path, each in said.items() if isinstance(each, Container)},
        },
        notes=(*found.notes, *([_SCALED if norm.clip is None else _LIMIT] if norm is not None else ())),
    )


def _writing(binding: Binding) -> Writing:
    soft, count = gaussian(binding), critics(binding)
    names = _MEAN if soft else _PLAIN
    if not count:
        rows: list[Network | Lone] = [Network("actor", (key("imitator"),), names)]
        return _made(rows, {"actor_optimizer": "optim"})
    rows = [Network("actor", (key("policy"),), names)]
    for component, entry in (("critic", "q_funcs"), ("critic_target", "targ_q_funcs")):
        rows += [_q(component, entry, number) for number in range(count)]
    if not soft:
        rows.append(Network("actor_target", (key("targ_policy"),), names))
        return _made(rows, _OPTIMIZERS)
    # sac.py, initial_temperature: 1, whose logarithm is 0.
    zero = filled("float32", (1, 1), 0)
    rows.append(Lone("temperature/log_alpha", (key("log_temp"), key("_parameter")), (1, 1), zero))
    return _made(rows, {**_OPTIMIZERS, "temperature_optimizer": "temp_optim"})


def _q(component: str, entry: str, number: int) -> Network:
    return Network(f"{component}/q{number + 1}", (key(entry),), Names(f"{number}.{_HIDDEN}", f"{number}._fc"))


def _made(rows: list[Network | Lone], optimizers: dict[str, str]) -> Writing:
    places: dict[str, Path] = {ours: (key(name), key("optim")) for ours, name in optimizers.items()}
    return Writing(
        "d3rlpy",
        rows,
        "affine",
        optimizers=places,
        fresh=True,
        constants={(place[0], key("lr_scheduler")): ValueLeaf(None) for place in places.values()},
        notes=(_CONFIG,),
    )
