"""Which parameter each slot of an agent's optimizers belongs to, by the names that the members have.

Sources in github.com/DLR-RM/stable-baselines3: `_get_torch_save_params` of td3/td3.py, sac/sac.py, dqn/dqn.py
and common/on_policy_algorithm.py for the names, `_build` of the policies for what an optimizer is given
(sac/policies.py leaves out a features extractor that the actor trains; before version 2.4 DQN's had the
target's parameters too).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpttool.leaf import Key, Leaf, Path, key
from ckpttool.tree import Tree

_SUFFIX = ".optimizer"
_POLICY = key("policy")
# The entropy coefficient stands alone among the variables that no state_dict has.
_ALONE = {"ent_coef_optimizer": "log_ent_coef"}
_VARIABLES = (key("pytorch_variables"), key("tensors"))


def joined(tree: Tree) -> Tree:
    """Return the tree with `Leaf.of` for every slot whose parameter is known by number and shape."""
    leaves = dict(tree.leaves)
    for step in dict.fromkeys(path[0] for path in tree if len(path) > 1):
        for candidates in _candidates(tree, step):
            if _numbered(tree, step) != list(range(len(candidates))):
                continue
            slots = _slots(tree, step)
            if slots and all(_fits(tree, leaf, number, candidates) for _, leaf, number in slots):
                leaves |= {path: replace(leaf, of=candidates[number]) for path, leaf, number in slots}
                break
    return Tree(leaves, tree.aliases, tree.containers)


def _candidates(tree: Tree, step: Key) -> Iterator[list[Path]]:
    """Give what the optimizer of a member may have been given, in the order of the state_dict."""
    name = str(step.value)
    if name in _ALONE:
        for variables in _VARIABLES:
            path = (variables, key(_ALONE[name]))
            if path in tree:
                yield [path]
    if not name.endswith(_SUFFIX):
        return
    owner = name.removesuffix(_SUFFIX)
    if owner == _POLICY.value:
        yield _below(tree, lambda _: True)
        yield _below(tree, lambda name: "_target." not in name)
        return
    yield _below(tree, lambda name: name.startswith(f"{owner}."))
    yield _below(tree, lambda name: name.startswith(f"{owner}.") and "features_extractor." not in name)


def _below(tree: Tree, wanted: Callable[[str], bool]) -> list[Path]:
    return [
        path
        for path, leaf in tree.tensors()
        if path[0] == _POLICY and len(path) == 2 and leaf.role == "parameter" and wanted(str(path[1].value))
    ]


def _numbered(tree: Tree, step: Key) -> list[object]:
    """Return the numbers of the one group's parameters; none for several groups."""
    found = [
        (path[2], leaf.value)
        for path, leaf in tree.plain()
        if path[0] == step and len(path) == 5 and (path[1], path[3]) == (key("param_groups"), key("params"))
    ]
    return [number for _, number in found] if len({group for group, _ in found}) == 1 else []


def _slots(tree: Tree, step: Key) -> list[tuple[Path, Leaf, int]]:
    return [
        (path, leaf, int(str(path[2].value)))
        for path, leaf in tree.tensors()
        if path[0] == step and leaf.slot is not None and len(path) == 4 and str(path[2].value).isdecimal()
    ]


def _fits(tree: Tree, slot: Leaf, number: int, candidates: list[Path]) -> bool:
    if number >= len(candidates):
        return False
    owner = tree[candidates[number]]
    return isinstance(owner, Leaf) and owner.shape == slot.shape
