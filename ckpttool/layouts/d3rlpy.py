"""d3rlpy's agents, versions 1 and 2: `.d3` files, and `model_N.pt` with a params.json beside it.

Sources, in github.com/takuseno/d3rlpy: d3rlpy/base.py (`dump_learnable`, `save_config`),
d3rlpy/torch_utility.py (`Checkpointer`; `get_state_dict` until 2.0, whose names begin with an underscore),
d3rlpy/models/torch/policies.py (an action is tanh of the last layer), d3rlpy/models/torch/encoders.py (norms
follow the activation), d3rlpy/algos/qlearning/base.py (`predict`: observation scaler before, action scaler
after), d3rlpy/preprocessing/action_scalers.py and observation_scalers.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.layouts import canonical, d3rlpy_settings, optimizers
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.d3rlpy_plan import plan, plan_d3
from ckpttool.layouts.distributions import distributions
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.ledger import Entry, unknown
from ckpttool.tree import Tree

__all__ = ["TABLE", "companions", "plan", "plan_d3", "recognise", "told_by"]

_LACKS = (
    unknown("action map", "the action scaler", decides=True),
    unknown("observation statistics", "the observation scaler", decides=True),
)

TABLE = Table(
    name="d3rlpy",
    title="d3rlpy's agents with continuous actions: TD3, DDPG, SAC, TD3+BC, CQL, IQL, AWAC, BC, ...",
    framework="torch",
    components={
        "policy": "actor",
        "targ_policy": "actor_target",
        "value_func": "value",
    },
    optimizers={
        "actor_optim": "actor_optimizer",
        "critic_optim": "critic_optimizer",
        "temp_optim": "temperature_optimizer",
    },
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5, lacks=_LACKS),
    optimizer=optimizers.from_torch,
    rooted=True,
    seen="written by d3rlpy 2.0.2, 2.3.0 and 2.8.1: TD3, DDPG, SAC, TD3+BC, CQL, IQL, AWAC, BC, ReBRAC, ...",
    branches=canonical.LOG_STD,
    tensors={
        "log_temp/_parameter": "temperature/log_alpha",
        "policy/_logstd": "actor/log_std",
        "targ_policy/_logstd": "actor_target/log_std",
    },
)

# Where Q-functions lie, and the policy of an imitator, which has no other.
_CRITICS = {"q_funcs": "critic", "targ_q_funcs": "critic_target"}
_OLD_CRITICS = {"_q_func/_q_funcs": "critic", "_targ_q_func/_q_funcs": "critic_target"}
_IMITATOR = {"imitator": "actor"}
_EVIDENCE = re.compile(r"(torch/)?(_?)(policy|imitator)/_encoder/(_layers|_fcs|_last_layers|_fc)/")
# Each Q-function is looked for by itself: no ensemble that anybody trains is larger.
_NUMBER, _ENSEMBLE = re.compile(r"[0-9]{1,4}"), 50
# Algorithms whose `policy` is no policy of the observation alone, or acts in a space of its own.
_DECODERS = ("vae_decoder", "imitator")


def recognise(tree: Tree, name: str) -> Binding | None:
    """Return the way to the canonical agent of a `.d3` file, or of a dict of its state_dicts.

    Agents with discrete actions are none.
    """
    match = next(filter(None, map(_EVIDENCE.match, tree.names.values())), None)
    # A part of a .d3 file without its configuration: that may say that actions are discrete.
    if match is None or (name.endswith(".d3") and not match[1]):
        return None
    found = _Found(tree, match[1] or "", match[2])
    said = d3rlpy_settings.below(tree, "config")
    if found.discrete() or str(said.get("config/type", "")).startswith("discrete"):
        return None
    table = found.table()
    if not table.components:
        return None
    binding = bind(tree, table)
    if binding is None:
        return None
    binding = binding.noted(*distributions(binding, tree))
    binding = replace(
        binding.entered(*found.chosen()),
        unplaced={**binding.unplaced, **found.left},
        consumed=binding.consumed | _said(tree),
    )
    return d3rlpy_settings.told(binding, said, "config") if said else binding


def _said(tree: Tree) -> frozenset[Path]:
    """Return what is no part of the networks: the settings, whose facts are taken, and absent schedulers."""
    return frozenset(
        path
        for path, leaf in tree.plain()
        if path[0].value in ("config", "version") or (path[-1].value == "lr_scheduler" and leaf.value is None)
    )


def companions(location: str) -> Sequence[str]:
    """Return the params.json that d3rlpy's logger writes into the folder of its model files."""
    return (os.path.join(os.path.dirname(location), "params.json"),) if location.endswith(".pt") else ()


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with what a params.json of version 2 says."""
    said = d3rlpy_settings.below(tree)
    return d3rlpy_settings.told(binding, said, os.path.basename(file)) if "config/type" in said else binding


class _Found:
    """What a file holds: `top` is what its names begin with, `mark` the underscore of versions until 2.0."""

    def __init__(self, tree: Tree, top: str, mark: str) -> None:
        self.top, self.mark = top, mark
        cut = len(top)
        self.leaves = {
            name[cut:]: leaf for path, name in tree.names.items() if isinstance(leaf := tree[path], Leaf)
        }
        self.plain = {name[cut:] for path, name in tree.names.items() if isinstance(tree[path], ValueLeaf)}
        self.left: dict[str, tuple[str, ...]] = {}

    def table(self) -> Table:
        """Return the names of this file's version, without the networks that cannot be run or converted."""
        named = {self.mark + theirs: ours for theirs, ours in TABLE.components.items()}
        if not self.has(self.mark + "policy"):
            named = {self.mark + theirs: ours for theirs, ours in _IMITATOR.items()}
        for theirs, ours in (_OLD_CRITICS if self.mark else _CRITICS).items():
            numbers = sorted({int(n) for n in self._steps(theirs) if _NUMBER.fullmatch(n)})[:_ENSEMBLE]
            named |= {f"{theirs}/{number}": f"{ours}/q{number + 1}" for number in numbers}
        components = {theirs: ours for theirs, ours in named.items() if self._usable(theirs, ours)}
        optimizers = {self._optimizer(self.mark + t): ours for t, ours in TABLE.optimizers.items()}
        if not self.has(self.mark + "policy"):
            optimizers = {self._optimizer(self.mark + "optim"): "actor_optimizer"}
        tensors = {self.mark + theirs: ours for theirs, ours in TABLE.tensors.items()}
        return replace(TABLE, components=components, optimizers=optimizers, tensors=tensors)

    def has(self, component: str) -> bool:
        """Say whether there is anything below the name."""
        return next(self._steps(component), None) is not None

    def discrete(self) -> bool:
        """Say whether the Q-functions take what the policy takes: then no action is among it."""
        if any(map(self._has_decoder, _DECODERS)):
            return False  # BCQ's policy takes an action too
        policy = self._first(self.mark + "policy")
        critic = self._first("_q_func/_q_funcs/0" if self.mark else "q_funcs/0")
        return policy is not None and policy == critic

    def chosen(self) -> Iterator[Entry]:
        """Yield an entry where d3rlpy chooses among actions that its policy samples."""
        # BEAR has a decoder beside a Gaussian policy; CRR's has a target, and neither a temperature (SAC,
        # AWAC) nor IQL's value (d3rlpy/algos/qlearning/torch/bear_impl.py, crr_impl.py).
        crr = self.has(f"{self.mark}targ_policy") and not any(
            self.has(self.mark + other) for other in ("log_temp", "value_func")
        )
        if self.has(f"{self.mark}policy/_mu") and (crr or any(map(self._has_decoder, _DECODERS))):
            value = "the choice of the sampled action with the highest value: the policy's mean acts"
            yield Entry("not used", "action map", value, decides=True)

    def _has_decoder(self, name: str) -> bool:
        return self.has(self.mark + name) and self.has(f"{self.mark}policy")

    def _steps(self, component: str) -> Iterator[str]:
        cut = component.count("/") + 1
        for name in self.leaves:
            if name.startswith(component + "/"):
                yield name.split("/")[cut]

    def _first(self, component: str) -> int | None:
        shapes = (
            leaf.shape
            for name, leaf in self.leaves.items()
            if name.startswith(f"{component}/_encoder/") and name.endswith("/weight")
        )
        first = next(shapes, ())
        return first[1] if len(first) == 2 else None

    def _optimizer(self, name: str) -> str:
        # Since 2.6 a scheduler of learning rates lies beside it (d3rlpy/optimizers/optimizers.py).
        return (
            f"{name}/optim"
            if self.has(f"{name}/optim") or any(plain.startswith(f"{name}/optim/") for plain in self.plain)
            else name
        )

    def _usable(self, theirs: str, ours: str) -> bool:
        """Say whether our networks can be this one; if not, remember why."""
        mine = {n: leaf for n, leaf in self.leaves.items() if n.startswith(theirs + "/")}
        component = ours.partition("/")[0]
        reason = _reason(mine)
        if reason is None and component in ("actor", "actor_target"):
            reason = self._no_policy(theirs)
        if reason is not None:
            self.left[component] = (*self.left.get(component, ()), f"{self.top}{theirs} ({reason})")
        return bool(mine) and reason is None

    def _no_policy(self, theirs: str) -> str | None:
        if any(map(self._has_decoder, _DECODERS)) and not self.has(f"{theirs}/_mu"):
            return "a part of the policy: a decoder or a perturbation makes the action"
        return None


def _reason(mine: Mapping[str, Leaf]) -> str | None:
    """Return why our networks cannot be this one, or None."""
    if any(len(leaf.shape) > 2 for leaf in mine.values()):
        return "convolutions"
    if any(name.endswith("/running_mean") for name in mine):
        return "batch norm"
    if any(name.count("/_layers/") > 1 for name in mine):
        return "residual blocks"
    if any(len(leaf.shape) == 1 and name.endswith("/weight") for name, leaf in mine.items()):
        return "layer norm after the activation"
    if any("/_embed/" in name for name in mine):
        return "implicit quantiles"
    return None
