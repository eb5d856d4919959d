"""Explains checkpoints that hold no network: what the file is, and which checkpoint it belongs to.

Sources: torch/optim/optimizer.py, `state_dict`; github.com/sfujim/TD3, TD3.py, `save`; stable_baselines3/
common/vec_env/vec_normalize.py and common/buffers.py; github.com/ray-project/ray, rllib/utils/checkpoints.py.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, MappingError, TruncatedError, some
from ckpttool.formats.resolve import open_checkpoint, resolve
from ckpttool.layouts import zoo
from ckpttool.leaf import Leaf
from ckpttool.mapping.layers import proposals
from ckpttool.source import MissingShard
from ckpttool.tree import Tree

_OPTIMIZER = re.compile(r"(?P<before>.*?)_?(?:actor|cri?tic)?_?[12]?_?optim(?:izer)?(?P<suffix>\.\w+)?")
# Classes whose objects hold no network, by the last part of their names.
_CLASSES = {
    "VecNormalize": "statistics of observations and rewards (VecNormalize)",
    "RunningMeanStd": "statistics of observations (RunningMeanStd)",
    "ReplayBuffer": "a replay buffer",
    "DictReplayBuffer": "a replay buffer",
    "HerReplayBuffer": "a replay buffer",
    "RolloutBuffer": "a rollout buffer",
}
_PADDLE = "StructuredToParameterName@@"  # paddle/framework/io.py, `_build_saved_state_dict`
_MOST_OPTIONS = 24
_ABOVE = 4  # folders between a file and the checkpoint that it is a part of


def no_network(tree: Tree) -> str | None:
    """Return what a tree holds in place of a network, None if it may hold one."""
    container = tree.containers.get(())
    kind = (container.name or "").rpartition(".")[2] if container is not None else ""
    if kind in _CLASSES:
        return _CLASSES[kind]
    tensors = [leaf for _, leaf in tree.tensors()]
    tops = {path[0].value for path in tree if path}
    if tops in ({"state", "param_groups"}, {"param_groups"}):
        return "the state of an optimizer"
    if not tensors:
        return "settings and other values" if len(tree) else "no tensors"
    if all(leaf.role in ("slot", "counter", "other") for leaf in tensors) and any(
        leaf.role == "slot" for leaf in tensors
    ):
        return "the state of an optimizer"
    return None


def no_layers(tree: Tree, framework: str) -> MappingError:
    """Return the error for a framework's tree none of whose tensors is of a layer of a known kind."""
    what = no_network(tree)
    weights = [(path, leaf) for path, leaf in tree.tensors() if leaf.role in ("parameter", "buffer")]
    tensors = [f"{tree.names[path]} {list(leaf.shape)}" for path, leaf in weights or tree.tensors()]
    if what is None and not weights:
        what = "counters and other values"
    options = proposals(tree, framework, [path for path, _ in weights]) if what is None else ()
    if options:
        hint = f"{' '.join(options[:_MOST_OPTIONS])} makes layers of them"
    elif what:
        hint = "convert the file that holds the network; --to npz copies tensors as they are"
    else:
        hint = "--to npz copies tensors as they are; --map FILE has rules of your own"
    return MappingError(
        f"the checkpoint holds {what}, and no network" if what else "no tensor is of a layer of a known kind",
        found=some(tensors, 3) or None,
        hint=hint,
    )


def refusal(checkpoint: Checkpoint, verb: str = "convert", rest: str = "") -> MappingError | None:
    """Return the error for a checkpoint without a network; None if it may hold one.

    The hint is the command with the checkpoint that the file belongs to, followed by `rest`.
    """
    if any(path and path[0].value == _PADDLE for path in checkpoint.tree):
        return MappingError(
            "parameters of PaddlePaddle, whose Linear weights are [in, out], are not mapped",
            file=checkpoint.path,
            hint="--to npz copies the arrays as they are",
        )
    what = no_network(checkpoint.tree)
    if what is None:
        return None
    owner = _owner(checkpoint.path)
    shown = shlex.quote(checkpoint.path if owner is None else owner)
    belongs = "" if owner is None else f"; it belongs to {owner}"
    return MappingError(
        f"the checkpoint holds {what}, and no network{belongs}",
        file=checkpoint.path,
        hint=f"ckpttool inspect {shown}" if owner is None else f"ckpttool {verb} {shown}{rest}",
    )


def require_shards(tree: Tree) -> None:
    """Raise TruncatedError that names the first shard which tensors of the tree need and which is missing."""
    from ckpttool.formats.tensor_bundle.sources import Missing

    lost: dict[str, list[Leaf]] = {}
    for _, leaf in tree.tensors():
        if isinstance(leaf.source, Missing | MissingShard):
            lost.setdefault(leaf.source.path, []).append(leaf)
    if not lost:
        return
    file, leaves = next(iter(lost.items()))
    names = ", ".join(os.path.basename(each) for each in lost)
    held = f"{sum(map(len, lost.values()))} of {sum(1 for _ in tree.tensors())}"
    raise TruncatedError(
        f"shard {names} is missing" if len(lost) == 1 else f"shards {names} are missing",
        file=file,
        found=f"{held} tensors, unknown data, e.g. {leaves[0].key}",
        hint=f"copy it to {os.path.dirname(file) or '.'}",
    )


def _owner(path: str) -> str | None:
    """Return the checkpoint that a file belongs to, relative as the file's own path is."""
    if places.store(path) is not None:
        return None
    found = next((each for each in _owners(os.path.abspath(path)) if each != os.path.abspath(path)), None)
    return found if found is None or os.path.isabs(path) else os.path.relpath(found)


def _owners(path: str) -> Iterator[str]:
    """Go through the checkpoints that the file may belong to, the likeliest first."""
    folder, name = os.path.split(path)
    optimizer = _OPTIMIZER.fullmatch(name)
    if optimizer is not None:
        prefix, suffix = optimizer["before"], optimizer["suffix"] or ""
        stems = (prefix, f"{prefix}{suffix}", re.sub(r"_?optim(izer)?", "", name))
        yield from (each for stem in stems if stem and (each := _read(os.path.join(folder, stem))))
    for above in (folder, os.path.dirname(folder)):
        for agent in (os.path.join(above, each) for each in sorted(_names(above)) if each.endswith(".zip")):
            if path in map(os.path.normpath, zoo.companions(agent)):
                yield agent
    for _ in range(_ABOVE):
        if (whole := _read(folder)) is not None and path in _files(whole):
            yield whole
        folder = os.path.dirname(folder)


def _files(location: str) -> list[str]:
    """Return the files of the checkpoint at a location."""
    try:
        return [os.path.abspath(file.path) for file in open_checkpoint(location).files]
    except CkpttoolError:
        return []


def _names(folder: str) -> list[str]:
    try:
        return places.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> str | None:
    """Return the checkpoint at a path if a format reads it."""
    try:
        return resolve(path).location
    except CkpttoolError:
        return None
