"""What RLlib's pickles hold, and which files of a folder are pickles of states.

Sources in github.com/ray-project/ray: rllib/evaluation/rollout_worker.py (`save`), rllib/agents/trainer.py
(`__getstate__`), rllib/policy/policy.py, tf_policy.py and eager_tf_policy.py (`get_state`),
rllib/utils/checkpoints.py (`Checkpointable.save_to_path`), python/ray/tune/trainable.py (`save`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpttool import documents, limits, places
from ckpttool.errors import FormatError, NotFoundError, UnsupportedError
from ckpttool.formats.listed import Listed
from ckpttool.formats.pickled.load import Pickled, load, load_file
from ckpttool.formats.pickled.walk import Walk
from ckpttool.formats.rllib.uses import slots, use
from ckpttool.leaf import Key, Path, attr, key
from ckpttool.source import File
from ckpttool.wire.asked import standing
from ckpttool.wire.pickle_reader import Stored

_JSON = "rllib_checkpoint.json"
_STATES = frozenset(("algorithm_state.pkl", "policy_state.pkl", "module_state.pkl", "state.pkl"))
_OTHERS = {
    ".msgpck": "msgpack, which is not read: RLlib can save it again as a pickle",
    ".msgpack": "msgpack, which is not read: RLlib can save it again as a pickle",
    ".pt": "a PyTorch file: point at it to read it alone",
}


class Found(NamedTuple):
    """What was read, and from which files."""

    listed: Listed
    files: tuple[File, ...]


class _Walk(Walk):
    """Names of TensorFlow's variables are split at their scopes."""

    def steps(self, path: Path, step: Key) -> Path:  # noqa: ARG002 - a name tells by itself
        """Return three steps for the dict key `default_policy/fc_1/kernel`, one for others."""
        if step.kind != "key" or not isinstance(step.value, str) or "/" not in step.value:
            return (step,)
        return tuple(attr(part) for part in step.value.split("/"))


def of_file(location: str) -> Found:
    """Return what a single file holds, and the `.tune_metadata` that Tune writes beside it."""
    file = File.stamp(location)
    walk = _Walk(use)
    _add(walk, load_file(file), ())
    beside = f"{location}.tune_metadata"
    files: tuple[File, ...] = (file,)
    if places.isfile(beside):
        more = File.stamp(beside)
        walk.add(_loaded(more, os.path.basename(beside)), (attr("tune_metadata"),))
        files = (file, more)
    return Found(_listed(walk, "RLlib (one file)"), files)


def _loaded(file: File, where: str) -> Pickled:
    found = load_file(file)
    return found._replace(asked=standing(found.asked, where))


def _listed(walk: Walk, writer: str, notes: tuple[str, ...] = ()) -> Listed:
    return Listed(slots(walk.tree()), writer, notes=notes, asks=walk.asks)


def _add(walk: Walk, pickled: Pickled, path: Path) -> None:
    """Add a state; a worker's own state may stand in it as bytes, which are a pickle again."""
    value = pickled.value
    worker = value.get("worker") if isinstance(value, dict) else None
    if not isinstance(worker, bytes | Stored):
        walk.add(pickled, path)
        return
    base = pickled.base + worker.at if isinstance(worker, Stored) else 0
    inner = load(bytes(worker), pickled.file if isinstance(worker, Stored) else None, base)
    walk.add(inner._replace(asked=standing(inner.asked, "worker")), (*path, key("worker")))
    walk.add(pickled._replace(value={k: v for k, v in value.items() if k != "worker"}), path)


def of_folder(location: str) -> Found:
    """Return what the pickled states in a folder and below it hold."""
    facts: dict[str, Any] = {}
    files: list[File] = []
    about = os.path.join(location, _JSON)
    if places.isfile(about):
        files.append(File.stamp(about))
        facts = documents.load(about, "RLlib's description of a checkpoint")
    walk = _Walk(use)
    others: list[str] = []
    states = 0
    for name, path in _states(location, others):
        file = File.stamp(name)
        _add(walk, _loaded(file, os.path.relpath(name, location)), path)
        files.append(file)
        states += 1
    if not states:
        raise _nothing(location, others)
    notes = tuple(f"not listed: {os.path.relpath(name, location)} is {_why(name)}" for name in others)
    return Found(_listed(walk, _writer(facts), notes), tuple(files))


def _states(location: str, others: list[str]) -> Iterator[tuple[str, Path]]:
    """Give every pickled state with its path in the tree; `others` gets the states of other forms."""
    todo: list[tuple[str, Path]] = [(location, ())]
    seen, most = 0, limits.current()
    while todo:
        folder, path = todo.pop(0)
        for name in _names(folder):
            seen += 1
            if seen > most.folder_files:
                what = "the folder holds more files than a checkpoint has"
                raise limits.exceeded("folder_files", what, None, file=location)
            full = os.path.join(folder, name)
            if places.isdir(full):
                # A link may lead out of the checkpoint, or back into it.
                if len(path) < most.folder_depth and not places.islink(full):
                    todo.append((full, (*path, attr(name))))
            elif not places.isfile(full):
                continue
            elif name in _STATES:
                yield full, (*path, attr("algorithm_state")) if name == "algorithm_state.pkl" else path
            elif os.path.splitext(name)[0] + ".pkl" in _STATES and os.path.splitext(name)[1] in _OTHERS:
                others.append(full)


def _names(folder: str) -> list[str]:
    try:
        return sorted(places.listdir(folder))
    except OSError as error:
        raise NotFoundError(f"cannot be listed: {error.strerror}", file=folder) from error


def _why(name: str) -> str:
    return _OTHERS[os.path.splitext(name)[1]]


def _nothing(location: str, others: list[str]) -> UnsupportedError | FormatError:
    if others:
        return UnsupportedError(f"{os.path.relpath(others[0], location)} is {_why(others[0])}", file=location)
    return FormatError("the folder is described as RLlib's and holds no pickled state", file=location)


def _writer(facts: dict[str, Any]) -> str:
    version, ray = facts.get("checkpoint_version"), facts.get("ray_version")
    words = ["RLlib checkpoint"]
    words += [f"version {version}"] if isinstance(version, str) else []
    words += [f"of type {facts['type']}"] if isinstance(facts.get("type"), str) else []
    words += [f"(ray {ray})"] if isinstance(ray, str) else []
    return " ".join(words)
