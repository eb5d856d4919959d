"""Files without a network: what they contain, and the checkpoint that they belong to."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress

from ckpttool.core import deferred, filesystem
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, MappingError, abbreviate_list
from ckpttool.core.filesystem import list_names
from ckpttool.core.tree import Tree
from ckpttool.formats.detect import find_location, open_checkpoint

_OPTIMIZER = deferred.compile(r"(?P<before>.*?)_?(?:actor|cri?tic)?_?[12]?_?optim(?:izer)?(?P<suffix>\.\w+)?")
# Classes of objects without a network, by the last part of their names.
_CLASSES = {
    "VecNormalize": "observation and reward statistics (VecNormalize)",
    "RunningMeanStd": "observation statistics (RunningMeanStd)",
    "ReplayBuffer": "a replay buffer",
    "DictReplayBuffer": "a replay buffer",
    "HerReplayBuffer": "a replay buffer",
    "RolloutBuffer": "a rollout buffer",
}
_PADDLE = "StructuredToParameterName@@"  # paddle/framework/io.py, `_build_saved_state_dict`
_MOST_OPTIONS = 24
_ABOVE = 4  # folders between a file and the checkpoint that contains it


def describe_other_content(tree: Tree) -> str | None:
    """Return what a tree contains instead of a network, None if it may contain one.

    Sources: torch/optim/optimizer.py, `state_dict`; github.com/sfujim/TD3, TD3.py, `save`;
    stable_baselines3/common/vec_env/vec_normalize.py and common/buffers.py; github.com/ray-project/ray,
    rllib/utils/checkpoints.py.
    """
    container = tree.containers.get(())
    kind = (container.name or "").rpartition(".")[2] if container is not None else ""
    if kind in _CLASSES:
        return _CLASSES[kind]
    tensors = [leaf for _, leaf in tree.tensors()]
    tops = {path[0].value for path in tree if path}
    if tops in ({"state", "param_groups"}, {"param_groups"}):
        return "optimizer state"
    if not tensors:
        return "settings and other values" if len(tree) else "no tensors"
    if all(leaf.role in ("slot", "counter", "other") for leaf in tensors) and any(
        leaf.role == "slot" for leaf in tensors
    ):
        return "optimizer state"
    return None


def no_layers_error(tree: Tree, framework: str) -> MappingError:
    """Return the error for a framework's tree without a tensor of any known kind of layer."""
    what = describe_other_content(tree)
    weights = [(path, leaf) for path, leaf in tree.tensors() if leaf.role in ("parameter", "buffer")]
    tensors = [f"{tree.names[path]} {list(leaf.shape)}" for path, leaf in weights or tree.tensors()]
    if what is None and not weights:
        what = "counters and other values"
    from ckpttool.mapping.layers import propose_options

    options = propose_options(tree, framework, [path for path, _ in weights]) if what is None else ()
    if options:
        hint = f"use {' '.join(options[:_MOST_OPTIONS])} to convert them as layers"
    elif what:
        hint = "convert the file that contains the network, or use --to npz to copy tensors unchanged"
    else:
        hint = "use --to npz to copy tensors unchanged, or --map FILE with your own rules"
    return MappingError(
        f"no network in the checkpoint: it contains {what}"
        if what
        else "no tensor belongs to a layer of a known kind",
        found=abbreviate_list(tensors, 3) or None,
        hint=hint,
    )


def no_network_error(checkpoint: Checkpoint, verb: str = "convert", rest: str = "") -> MappingError | None:
    """Return the error for a checkpoint without a network; None if it may contain one.

    The hint is the command with the checkpoint that the file belongs to, followed by `rest`.
    """
    if any(path and path[0].value == _PADDLE for path in checkpoint.tree):
        return MappingError(
            "PaddlePaddle parameters are not mapped (its Linear weights are [in, out])",
            file=checkpoint.path,
            hint="use --to npz to copy the arrays unchanged",
        )
    what = describe_other_content(checkpoint.tree)
    if what is None:
        return None
    owner = _find_owner(checkpoint.path)
    shown = shlex.quote(checkpoint.path if owner is None else owner)
    belongs = "" if owner is None else f"; it belongs to {owner}"
    return MappingError(
        f"no network in the checkpoint: it contains {what}{belongs}",
        file=checkpoint.path,
        hint=f"ckpttool inspect {shown}" if owner is None else f"ckpttool {verb} {shown}{rest}",
    )


def _find_owner(path: str) -> str | None:
    """Return the checkpoint that a file belongs to, with a path relative like the file's own."""
    if filesystem.find_store(path) is not None:
        return None
    owner = next(
        (owner for owner in _candidate_owners(os.path.abspath(path)) if owner != os.path.abspath(path)), None
    )
    return owner if owner is None or os.path.isabs(path) else os.path.relpath(owner)


def _candidate_owners(path: str) -> Iterator[str]:
    """Yield the checkpoints that the file may belong to, most likely first."""
    folder, name = os.path.split(path)
    optimizer = _OPTIMIZER.fullmatch(name)
    if optimizer is not None:
        prefix, suffix = optimizer["before"], optimizer["suffix"] or ""
        stems = (prefix, f"{prefix}{suffix}", re.sub(r"_?optim(izer)?", "", name))
        yield from (
            item for stem in stems if stem and (item := _resolve_if_readable(os.path.join(folder, stem)))
        )
    from ckpttool.libraries import sb3  # the library is not loaded for other agents

    for above in (folder, os.path.dirname(folder)):
        for agent in (
            os.path.join(above, name) for name in sorted(list_names(above)) if name.endswith(".zip")
        ):
            if path in map(os.path.normpath, sb3.companions(agent)):
                yield agent
    for _ in range(_ABOVE):
        if (whole := _resolve_if_readable(folder)) is not None:
            with suppress(CkpttoolError):
                if path in [os.path.abspath(file.path) for file in open_checkpoint(whole).files]:
                    yield whole
        folder = os.path.dirname(folder)


def _resolve_if_readable(path: str) -> str | None:
    """Return the checkpoint at a path if a format can read it."""
    try:
        location = find_location(path)
    except CkpttoolError:
        return None
    return None if location is None else location.location
