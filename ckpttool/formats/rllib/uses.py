"""What RLlib's arrays and numbers are for, by the place where they stand.

Sources in github.com/ray-project/ray: rllib/utils/filter.py (`MeanStdFilter`, `RunningStat`),
rllib/policy/tf_policy.py and torch_policy.py (`get_state`), rllib/agents/trainer.py (`__getstate__`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ckpttool.formats.pickled.walk import Use
from ckpttool.formats.variables import Tensor, by_name, role_by_name
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.source import Shape
from ckpttool.tree import Tree

_WEIGHTS, _OPTIMIZER = "weights", "_optimizer_variables"
# RunningStat's count, sum of means and of squares; older and newer spellings.
_STATISTICS = frozenset(("_M", "_S", "M", "S", "mean_array", "std_array", "sum_sq_diff_array"))
_PUSHES = frozenset(("_n", "n", "num_pushes"))
_COUNTERS = frozenset(("counters", "global_timestep", "_counters", "timesteps_total", "iteration"))


def use(path: Path, dtype: str, shape: Shape) -> Use:
    """Say what an array (or, without a type, a number) is for by the steps that lead to it."""
    steps: list[object] = [step.value for step in path]
    last = steps[-1] if steps else None
    if "local_replay_buffer" in steps:
        return Use("replay")
    if not dtype:
        counts = last in _PUSHES and "filters" in steps
        return Use("counter" if counts or not _COUNTERS.isdisjoint(steps) else "other")
    if _OPTIMIZER in steps:
        return _optimizer(steps[steps.index(_OPTIMIZER) + 1 :])
    if last in _STATISTICS:
        return Use("buffer")
    if not _COUNTERS.isdisjoint(steps) and not shape:
        return Use("counter")
    return Use(role_by_name(path, "", dtype, shape) if _is_weight(steps) else "other")


def _optimizer(steps: list[object]) -> Use:
    # A PyTorch policy keeps its optimizers' state_dicts: [N]["state"][parameter's number][name].
    if len(steps) == 4 and steps[1] == "state":
        return Use("counter") if steps[3] == "step" else Use("slot", None, str(steps[3]))
    return Use("other")


def _is_weight(steps: list[object]) -> bool:
    """Say whether a policy's weights stand there: below `weights`, or (older releases) right in its state."""
    if _WEIGHTS in steps:
        return True
    # rollout_worker.py, save: {"filters", "state": {policy: state}}; a module's state is all weights.
    if steps[:2] == ["worker", "state"]:
        return len(steps) > 3 and not str(steps[3]).startswith("_")
    # A module's own folder begins with the names of its state_dict.
    return "rl_module" in steps or (len(steps) == 1 and str(steps[0]).endswith((".weight", ".bias")))


class _Policy(NamedTuple):
    """One policy's named variables: by name, where each stands in the tree."""

    weights: dict[str, Path]
    optimizer: dict[str, Path]


def slots(tree: Tree) -> Tree:
    """Return the tree with the optimizers' variables that are named after a weight told as its slots."""
    policies: dict[Path, _Policy] = {}
    for path, _ in tree.tensors():
        for at, step in enumerate(path):
            if step.value in (_WEIGHTS, _OPTIMIZER) and len(path) > at + 1 and path[at + 1].kind == "attr":
                policy = policies.setdefault(path[:at], _Policy({}, {}))
                name = "/".join(str(step.value) for step in path[at + 1 :])
                (policy.weights if step.value == _WEIGHTS else policy.optimizer)[name] = path
                break
    leaves = dict(tree.leaves)
    for policy in policies.values():
        _tell(policy, leaves)
    return Tree(leaves, tree.aliases, tree.containers)


def _tell(policy: _Policy, leaves: dict[Path, Leaf | ValueLeaf]) -> None:
    named: dict[str, Tensor] = {}
    for name, place in (*policy.optimizer.items(), *policy.weights.items()):
        leaf = leaves[place]
        if isinstance(leaf, Leaf):
            leaves[place] = replace(leaf, name=name)
            named[name] = Tensor(leaf.dtype, leaf.shape, leaf.source)
    found = by_name(named)
    names: Mapping[Path, str] = {p: leaf.key for p, leaf in found.tensors()}
    for path, told in found.tensors():
        if told.role != "slot" or told.of is None or names[path] not in policy.optimizer:
            continue
        where, of = policy.optimizer[names[path]], policy.weights.get(names.get(told.of, ""))
        slot = leaves[where]
        if of is not None and isinstance(slot, Leaf):
            leaves[where] = replace(slot, role="slot", of=of, slot=told.slot)
