"""Agents of Stable-Baselines 2 (TensorFlow 1): TD3, DDPG and SAC, with and without layer norm.

Sources in github.com/hill-a/stable-baselines: stable_baselines/td3/policies.py, sac/policies.py and
ddpg/policies.py for the networks (64 and 64 units, ReLU, both unless `policy_kwargs` says otherwise);
common/math_util.py, `unscale_action`, for the action: tanh, from [-1, 1] to [low, high]. The layer norm is
that of tensorflow/contrib/layers/python/layers/layers.py, whose epsilon is 1e-12. Optimizers are not saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpttool.layouts import baselines_settings, canonical, ddpg_statistics, zoo
from ckpttool.layouts.canonical import Binding, Facts, settings_stay
from ckpttool.layouts.stable_baselines2_plan import plan
from ckpttool.layouts.table import Optimizer, OptimizerMoves, Table, bind
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr, index, key
from ckpttool.ledger import unknown
from ckpttool.tree import Tree

__all__ = ["TABLE", "companions", "plan", "recognise", "told_by"]


def _none(optimizer: Optimizer) -> OptimizerMoves:  # noqa: ARG001 - the contract's
    return OptimizerMoves(())


TABLE = Table(
    name="stable_baselines2",
    title="Stable-Baselines 2 agent (TD3, DDPG, SAC)",
    framework="tensorflow",
    components={name: name for name in (*canonical.NETWORKS, *canonical.VALUES)},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-12, lacks=(zoo.UNTOLD,)),
    optimizer=_none,
    # Of two outputs in one scope TensorFlow calls the first `dense`, the mean, and the second so.
    branches={"dense_1": "log_std"},
    tensors={"model/log_ent_coef": "temperature/log_alpha"},
    seen="seven agents of rl-baselines-zoo; agents that the library 2.10.2 saved",
)
_DATA, _PARAMS = attr("data"), attr("params")
_PLACES = {
    ("model", "pi"): ("actor",),
    ("model", "values_fn"): ("critic",),
    ("model", "values_fn", "vf"): ("value",),
    ("model", "qf"): ("critic",),
    ("target", "pi"): ("actor_target",),
    ("target", "values_fn"): ("critic_target",),
    ("target", "values_fn", "vf"): ("value_target",),
    ("target", "qf"): ("critic_target",),
}
_NORM = re.compile(r"LayerNorm(?:_(\d+))?")
_POLICY = re.compile(r"stable_baselines\.(ddpg|sac|td3)\.policies\.(?:Mlp|FeedForward)Policy")
# In which order a policy makes its networks, which a file without names follows. A network is its place and
# the names of its layers after the hidden ones.
_ORDER: Mapping[str, Sequence[tuple[str, tuple[str, ...]]]] = {
    "ddpg": (
        ("model/pi", ("pi",)),
        ("model/qf", ("qf_output",)),
        ("target/pi", ("pi",)),
        ("target/qf", ("qf_output",)),
    ),
    "sac": (
        ("model/pi", ("dense", "dense_1")),
        ("model/values_fn/vf", ("vf",)),
        ("model/values_fn/qf1", ("qf1",)),
        ("model/values_fn/qf2", ("qf2",)),
        ("target/values_fn/vf", ("vf",)),
    ),
    "td3": (
        ("model/pi", ("dense",)),
        ("model/values_fn/qf1", ("qf1",)),
        ("model/values_fn/qf2", ("qf2",)),
        ("target/pi", ("dense",)),
        ("target/values_fn/qf1", ("qf1",)),
        ("target/values_fn/qf2", ("qf2",)),
    ),
}
_HIDDEN = 2


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent of an off-policy agent with continuous actions.

    A file that does not name its variables is one if its policy is the library's own and the variables fit
    the networks that this policy makes.
    """
    if not baselines_settings.is_box(tree):
        return None
    names = {path: tuple(str(step.value) for step in path) for path in tree if path[:1] != (_DATA,)}
    assumed: tuple[str, ...] = ()
    repeated: frozenset[Path] = frozenset()
    if not any(each[:2] in _PLACES and len(each) > 2 for each in names.values()):
        found = _unnamed(tree)
        if found is None:
            return None
        names, policy, repeated = found
        assumed = (f"the variables have no names: they are taken in the order in which {policy} makes them",)
    ours = {tuple(map(attr, _placed(each))): path for path, each in names.items()}
    renamed = {place: tree[path] for place, path in ours.items()}
    binding = bind(Tree(renamed), TABLE)
    if binding is None or not any(part.component == "actor" for part in binding.parts):
        return None
    moves = tuple(replace(move, source=ours[move.source]) for move in binding.moves.moves)
    used = {move.source for move in moves} | repeated
    settings = [path for path in tree if path[:1] == (_DATA,) and path not in used]
    notes = (settings_stay(len(settings), "data"),) if settings else ()
    binding = replace(binding, moves=replace(binding.moves, moves=moves))
    return replace(
        binding,
        moves=replace(
            binding.moves,
            assumed=(*binding.moves.assumed, *assumed),
            notes=(*binding.moves.notes, *notes),
        ),
        facts=_facts(tree, binding, ours),
        consumed=binding.consumed | frozenset(settings) | repeated | ddpg_statistics.used(tree),
    )


def _placed(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a variable's name below its component; the first layer norm of a scope is numbered too."""
    for length in (3, 2):
        place = _PLACES.get(names[:length])
        if place is not None and len(names) > length + 1:
            inner, layer = names[length:-2], names[-2]
            # A Q-function's last layer has its scope's name, whose number is no layer's.
            layer = "out" if inner and layer == inner[-1] else layer
            return (*place, *inner, _numbered(layer), names[-1])
    return names


def _numbered(step: str) -> str:
    found = _NORM.fullmatch(step)
    return f"LayerNorm_{found[1] or 0}" if found else step


def _facts(tree: Tree, binding: Binding, ours: Mapping[Path, Path]) -> Facts:
    facts = baselines_settings.facts(TABLE.facts, tree)
    if (_DATA, key("her_obs_space")) in tree.containers:
        facts = facts.lacking(unknown("architecture", "how HER joins the parts of an observation"))
    first = (attr("actor"), index(0), attr("kernel"))
    kernels = [tree[move.source] for move in binding.moves.moves if move.target == first]
    ddpg = any(str(path[1].value) == "qf_output" for path in ours if len(path) > 1)
    if ddpg and kernels and isinstance(kernels[0], Leaf):
        facts = ddpg_statistics.facts(facts, tree, kernels[0].shape[0])
    return facts


def _value(tree: Tree, name: str) -> object:
    leaf = tree.get((_DATA, key(name)))
    return leaf.value if isinstance(leaf, ValueLeaf) else None


def _unnamed(tree: Tree) -> tuple[dict[Path, tuple[str, ...]], str, frozenset[Path]] | None:
    """Return names for the variables of a list, the policy that makes them, and those that repeat others."""
    policy = _value(tree, "policy")
    found = _POLICY.fullmatch(policy.name) if isinstance(policy, Record) else None
    if found is None:
        return None
    listed = [path for path, leaf in tree.tensors() if len(path) == 2 and path[0] == _PARAMS]
    wanted = [name for place, last in _ORDER[found[1]] for name in _variables(tree, place, last)]
    # Older versions list the variables of both graphs, and then all of them once more.
    if not wanted or len(listed) % len(wanted) or not listed:
        return None
    first, rest = listed[: len(wanted)], listed[len(wanted) :]
    if [path[1] for path in listed] != [index(number) for number in range(len(listed))]:
        return None
    if not all(_same(tree, path, first[n % len(wanted)]) for n, path in enumerate(rest)):
        return None
    return dict(zip(first, wanted, strict=True)), found[0], frozenset(rest)


def _variables(tree: Tree, place: str, last: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    sizes = [path for path in tree if path[:3] == (_DATA, key("policy_kwargs"), key("layers"))]
    hidden = [f"fc{number}" for number in range(len(sizes) or _HIDDEN)]
    for layer in (*hidden, *last):
        for name in ("kernel", "bias"):
            yield (*place.split("/"), layer, name)


def _same(tree: Tree, one: Path, other: Path) -> bool:
    first, second = tree[one], tree[other]
    if not isinstance(first, Leaf) or not isinstance(second, Leaf) or first.shape != second.shape:
        return False
    return bytes(first.read()) == bytes(second.read())


def companions(location: str) -> Sequence[str]:
    """Return the files that the zoo of the library puts beside an agent: statistics and settings."""
    return zoo.companions(location)


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the observations' statistics or the environment that the file tells."""
    return ddpg_statistics.told_by(binding, file, tree)
