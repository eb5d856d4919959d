"""Where a canonical agent goes in the folder of one RLModule, and what makes that module.

Sources, in github.com/ray-project/ray: rllib/algorithms/sac/sac_catalog.py (a Q-function encodes observation
and action apart before it joins them: no perceptron is one; a module for inference has none),
rllib/algorithms/ppo/ppo_catalog.py, rllib/core/rl_module/default_model_config.py (one list of sizes for all
encoders, heads of one layer), rllib/core/models/torch/heads.py (`log_std_clip_param_const`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import writing
from ckpttool.layouts.action_maps import told_bounds
from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.limits import shapes
from ckpttool.layouts.writing import Names, Network, Writing
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.source import Inline
from ckpttool.tree import Tree

_WHOSE = "RLlib"
_ARGUMENTS = attr("arguments")
_ALGORITHMS = "ray.rllib.algorithms"
_ACTIVATIONS = ("relu", "tanh", "elu", "silu", "sigmoid", "linear")
_CLIP = 20.0  # default_model_config.py, log_std_clip_param


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where everything goes: a module of PPO for a policy with a value of the state, else one of SAC.

    SAC's is one for inference: it acts, and has no Q-functions. Raise UnsupportedError for a policy without a
    deviation that depends on the observation, UsageError when nobody says the action bounds.
    """
    ppo = writing.valued(binding)
    made = writing.written(_ppo() if ppo else _sac(), binding, agent, told)
    heads = ("pi", "vf") if ppo else ("pi",)
    clips: dict[Path, Leaf | ValueLeaf] = {
        (key(f"{head}.log_std_clip_param_const"),): Leaf(
            "float32", (1,), Inline(struct.pack("<f", _CLIP)), "", "buffer"
        )
        for head in heads
    }
    added = {**made.added, **clips, **_arguments(binding, agent, ppo=ppo)}
    return replace(made, added=added, containers={})


def _sac() -> Writing:
    names = Names("pi_encoder.net.mlp.{s}", "pi.net.mlp.0", joined=True)
    notes = ("the module is one for inference: RLlib's Q-functions encode observation and action apart",)
    return Writing(_WHOSE, [Network("actor", (), names)], "affine", hidden="", values=False, notes=notes)


def _ppo() -> Writing:
    rows = [
        Network("actor", (), Names("encoder.actor_encoder.net.mlp.{s}", "pi.net.mlp.0", joined=True)),
        Network("value", (), Names("encoder.critic_encoder.net.mlp.{s}", "vf.net.mlp.0")),
    ]
    return Writing(_WHOSE, rows, "clip_affine", hidden="")


def _arguments(binding: Binding, agent: Tree, *, ppo: bool) -> dict[Path, Leaf | ValueLeaf]:
    """Return the class of the module and its arguments: spaces, sizes, activation."""
    parts = [part for part in binding.parts if part.component in (("actor", "value") if ppo else ("actor",))]
    kernels = {part.title: shapes(part, agent) for part in parts}
    sizes = {tuple(shape[1] for shape in found[:-1]) for found in kernels.values()}
    if len(sizes) != 1:
        raise UnsupportedError(f"{_WHOSE} has hidden layers of the same sizes in all networks")
    low, high = told_bounds(binding.facts, agent, f"a module of {_WHOSE}")
    name, cls = ("ppo", "PPO") if ppo else ("sac", "SAC")
    infinite = float("inf")
    values: Mapping[str, object] = {
        "class": Record(
            f"{_ALGORITHMS}.{name}.torch.default_{name}_torch_rl_module.Default{cls}TorchRLModule"
        ),
        "catalog_class": Record(f"{_ALGORITHMS}.{name}.{name}_catalog.{cls}Catalog"),
        "inference_only": not ppo,
        "learner_only": False,
        "observation_space/low": [-infinite] * kernels["actor"][0][0],
        "observation_space/high": [infinite] * kernels["actor"][0][0],
        "action_space/low": list(low),
        "action_space/high": list(high),
        "model_config/fcnet_hiddens": list(sizes.pop()),
        "model_config/fcnet_activation": _activation(binding),
        **({"model_config/vf_share_layers": False} if ppo else {"model_config/twin_q": True}),
    }
    found: dict[Path, Leaf | ValueLeaf] = {}
    for argument, value in values.items():
        path = (_ARGUMENTS, *map(key, argument.split("/")))
        if isinstance(value, list):
            found |= {(*path, index(n)): ValueLeaf(each) for n, each in enumerate(value)}
        elif isinstance(value, Record | str | bool):
            found[path] = ValueLeaf(value)
    return found


def _activation(binding: Binding) -> str:
    facts = binding.facts
    hidden = set(facts.activations or (facts.hidden,))
    if len(hidden) != 1 or not hidden <= set(_ACTIVATIONS):
        raise UnsupportedError(
            f"{_WHOSE} has one activation in all hidden layers", found=", ".join(sorted(hidden))
        )
    return hidden.pop()
