"""RLlib checkpoints."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import IO, Any

from ckpttool.core import filesystem, limits, text
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import relocate_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import FormatError, NotFoundError, UnsupportedError, locate_errors
from ckpttool.core.source import File, Shape
from ckpttool.core.tree import Leaf, Path, PathStep, Record, Tree, ValueLeaf, attr, display, key
from ckpttool.encodings import pickle_values
from ckpttool.encodings.pickle_values import Global, PickleObject, StoredBytes, dumps
from ckpttool.formats import pickles
from ckpttool.formats.file_listing import FileListing
from ckpttool.formats.name_roles import TensorRole, role_by_name
from ckpttool.formats.pickle_signatures import CHECKPOINT, find_pickle_format
from ckpttool.formats.pickles import LoadedPickle, PickleWalk, load_pickle, load_pickle_file
from ckpttool.formats.probe import OutputFile, Probe
from ckpttool.formats.tf_common import VariableInfo, tree_by_name

NAME = "rllib"
TITLE = "RLlib checkpoint (checkpoint-N, or a folder of pickles)"
WRITES = True
FRAMEWORK = "tensorflow"

# Marker files of a folder; in version 2.0 every component's folder has `class_and_ctor_args.pkl`.
_FORMS = (".pkl", ".msgpck", ".msgpack", ".pt")
_STATES = (f"{of}_state{form}" for of in ("algorithm", "policy", "module") for form in _FORMS)
_MARKS = frozenset(("rllib_checkpoint.json", "class_and_ctor_args.pkl", *_STATES))


def claims(probe: Probe) -> str | None:
    """Return a folder that RLlib wrote, its only `checkpoint-N`, or a pickle with RLlib classes."""
    if probe.kind == "folder":
        if not _MARKS.isdisjoint(probe.names):
            return probe.path
        old = [name for name in probe.names if CHECKPOINT.fullmatch(name)]
        inner = Probe(os.path.join(probe.path, old[0])) if len(old) == 1 else None
        return inner.path if inner is not None and find_pickle_format(inner) == NAME else None
    if probe.name == "rllib_checkpoint.json" and probe.kind == "file":
        return probe.folder
    return probe.path if find_pickle_format(probe) == NAME else None


def read(location: str) -> Checkpoint:
    """List every policy's weights, its optimizer's variables, filters, counters and settings.

    What unpickling would call is listed as a record and named in a note. Raise UnsupportedError for other
    forms than pickles (msgpack, PyTorch), FormatError for damage. Source: ray/rllib/utils/checkpoints.py in
    github.com/ray-project/ray (the history of versions above CHECKPOINT_VERSION, `get_checkpoint_info`,
    `Checkpointable`).
    """
    with locate_errors(file=location):
        listed, files = _list_folder(location) if filesystem.isdir(location) else _list_file(location)
    return listed.checkpoint(location, NAME, *files)


_WEIGHTS, _OPTIMIZER = "weights", "_optimizer_variables"
# RunningStat's count, sum of means and of squares, in the older and newer spellings.
_STATISTICS = frozenset(("_M", "_S", "M", "S", "mean_array", "std_array", "sum_sq_diff_array"))
_PUSHES = frozenset(("_n", "n", "num_pushes"))
_COUNTERS = frozenset(("counters", "global_timestep", "_counters", "timesteps_total", "iteration"))


def rllib_role(path: Path, dtype: str, shape: Shape) -> TensorRole:
    """Return the role of an array (or, without a type, a number) based on its path.

    Sources in github.com/ray-project/ray: rllib/utils/filter.py (`MeanStdFilter`, `RunningStat`),
    rllib/policy/tf_policy.py and torch_policy.py (`get_state`), rllib/agents/trainer.py (`__getstate__`).
    """
    steps: list[object] = [step.value for step in path]
    last = steps[-1] if steps else None
    if "local_replay_buffer" in steps:
        return TensorRole("replay")
    if not dtype:
        counts = last in _PUSHES and "filters" in steps
        return TensorRole("counter" if counts or not _COUNTERS.isdisjoint(steps) else "other")
    if _OPTIMIZER in steps:
        return _optimizer_role(steps[steps.index(_OPTIMIZER) + 1 :])
    if last in _STATISTICS:
        return TensorRole("buffer")
    if not _COUNTERS.isdisjoint(steps) and not shape:
        return TensorRole("counter")
    return TensorRole(role_by_name(path, "", dtype, shape) if _is_weight(steps) else "other")


def _optimizer_role(steps: list[object]) -> TensorRole:
    # A PyTorch policy stores its optimizers' state_dicts: [N]["state"][parameter number][name].
    if len(steps) == 4 and steps[1] == "state":
        return TensorRole("counter") if steps[3] == "step" else TensorRole("slot", str(steps[3]))
    return TensorRole("other")


def _is_weight(steps: list[object]) -> bool:
    """Return whether a policy's weights are at the path: under `weights`, or (older) in its state."""
    if _WEIGHTS in steps:
        return True
    # rollout_worker.py, save: {"filters", "state": {policy: state}}; a module's state is only weights.
    if steps[:2] == ["worker", "state"]:
        return len(steps) > 3 and not str(steps[3]).startswith("_")
    # A module's own folder begins with the names of its state_dict.
    return "rl_module" in steps or (len(steps) == 1 and str(steps[0]).endswith((".weight", ".bias")))


class _PolicyVariables(NamedTuple):
    """One policy's named variables: the path of each name in the tree."""

    weights: dict[str, Path]
    optimizer: dict[str, Path]


def assign_slots(tree: Tree) -> Tree:
    """Return the tree with optimizer variables assigned as slots to the weights they are named after."""
    policies: dict[Path, _PolicyVariables] = {}
    for path, _ in tree.tensors():
        for at, step in enumerate(path):
            if step.value in (_WEIGHTS, _OPTIMIZER) and len(path) > at + 1 and path[at + 1].kind == "attr":
                policy = policies.setdefault(path[:at], _PolicyVariables({}, {}))
                name = "/".join(str(step.value) for step in path[at + 1 :])
                (policy.weights if step.value == _WEIGHTS else policy.optimizer)[name] = path
                break
    leaves = dict(tree.leaves)
    for policy in policies.values():
        _assign_policy_slots(policy, leaves)
    return Tree(leaves, tree.aliases, tree.containers)


def _assign_policy_slots(policy: _PolicyVariables, leaves: dict[Path, Leaf | ValueLeaf]) -> None:
    named: dict[str, VariableInfo] = {}
    for name, target in (*policy.optimizer.items(), *policy.weights.items()):
        leaf = leaves[target]
        if isinstance(leaf, Leaf):
            leaves[target] = replace(leaf, name=name)
            named[name] = VariableInfo(leaf.dtype, leaf.shape, leaf.source)
    tree = tree_by_name(named)
    names: Mapping[Path, str] = {p: leaf.key for p, leaf in tree.tensors()}
    for path, slot_names in tree.tensors():
        if slot_names.role != "slot" or slot_names.of is None or names[path] not in policy.optimizer:
            continue
        where, of = policy.optimizer[names[path]], policy.weights.get(names.get(slot_names.of, ""))
        slot = leaves[where]
        if of is not None and isinstance(slot, Leaf):
            leaves[where] = replace(slot, role="slot", of=of, slot=slot_names.slot)


_JSON = "rllib_checkpoint.json"
_STATE_FILES = frozenset(("algorithm_state.pkl", "policy_state.pkl", "module_state.pkl", "state.pkl"))
_OTHERS = {
    ".msgpck": "msgpack, which is not supported; save it again as a pickle with RLlib",
    ".msgpack": "msgpack, which is not supported; save it again as a pickle with RLlib",
    ".pt": "a PyTorch file; point to the file itself to read it",
}


class _RllibWalk(PickleWalk):
    """A traversal that splits names of TensorFlow variables at their scopes."""

    def steps(self, path: Path, step: PathStep) -> Path:  # noqa: ARG002 - the name is sufficient
        """Return three steps for the dict key `default_policy/fc_1/kernel`, one for other keys."""
        if step.kind != "key" or not isinstance(step.value, str) or "/" not in step.value:
            return (step,)
        return tuple(attr(part) for part in step.value.split("/"))


def _list_file(location: str) -> tuple[FileListing, list[File]]:
    """Return a single file, with the `.tune_metadata` that Tune writes next to it: content and files.

    Sources in github.com/ray-project/ray: rllib/evaluation/rollout_worker.py (`save`),
    rllib/agents/trainer.py (`__getstate__`), rllib/policy/policy.py, tf_policy.py and eager_tf_policy.py
    (`get_state`), rllib/utils/checkpoints.py (`Checkpointable.save_to_path`), python/ray/tune/trainable.py
    (`save`).
    """
    file = File.stamp(location)
    walk = _RllibWalk(rllib_role)
    _add_state(walk, load_pickle_file(file), ())
    beside = f"{location}.tune_metadata"
    files = [file]
    if filesystem.isfile(beside):
        more = File.stamp(beside)
        walk.add(_load_state(more, os.path.basename(beside)), (attr("tune_metadata"),))
        files.append(more)
    return _build_listing(walk, "RLlib (one file)"), files


def _load_state(file: File, where: str) -> LoadedPickle:
    loaded = load_pickle_file(file)
    return loaded._replace(code_references=relocate_references(loaded.code_references, where))


def _build_listing(walk: PickleWalk, writer: str, notes: tuple[str, ...] = ()) -> FileListing:
    return FileListing(assign_slots(walk.tree()), writer, notes=notes, code_references=walk.code_references)


def _add_state(walk: PickleWalk, pickled: LoadedPickle, path: Path) -> None:
    """Add a state; it may contain a worker's state as bytes, which are another pickle."""
    value = pickled.value
    worker = value.get("worker") if isinstance(value, dict) else None
    if not isinstance(worker, bytes | StoredBytes):
        walk.add(pickled, path)
        return
    base = pickled.base + worker.at if isinstance(worker, StoredBytes) else 0
    inner = load_pickle(bytes(worker), pickled.file if isinstance(worker, StoredBytes) else None, base)
    walk.add(
        inner._replace(code_references=relocate_references(inner.code_references, "worker")),
        (*path, key("worker")),
    )
    walk.add(pickled._replace(value={k: v for k, v in value.items() if k != "worker"}), path)


def _list_folder(location: str) -> tuple[FileListing, list[File]]:
    """Return the content of the pickled states in a folder and its subfolders, and their files."""
    facts: dict[str, Any] = {}
    files: list[File] = []
    about = os.path.join(location, _JSON)
    if filesystem.isfile(about):
        files.append(File.stamp(about))
        facts = text.load_json(about, "RLlib's checkpoint description")
    walk = _RllibWalk(rllib_role)
    others: list[str] = []
    states = 0
    for name, path in _iter_states(location, others):
        file = File.stamp(name)
        _add_state(walk, _load_state(file, os.path.relpath(name, location)), path)
        files.append(file)
        states += 1
    if not states:
        raise _empty_folder_error(location, others)
    notes = tuple(
        f"not listed: {os.path.relpath(name, location)} is {_unsupported_reason(name)}" for name in others
    )
    return _build_listing(walk, _writer(facts), notes), files


def _iter_states(location: str, others: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield every pickled state with its path in the tree; states in other forms go to `others`."""
    todo: list[tuple[str, Path]] = [(location, ())]
    count, most = 0, limits.current()
    while todo:
        folder, path = todo.pop(0)
        for name in _names(folder):
            count += 1
            if count > most.folder_files:
                what = "the folder contains too many files for a checkpoint"
                raise limits.limit_error("folder_files", what, None, file=location)
            full = os.path.join(folder, name)
            if filesystem.isdir(full):
                # A link may lead out of the checkpoint, or back into it.
                if len(path) < most.folder_depth and not filesystem.islink(full):
                    todo.append((full, (*path, attr(name))))
            elif not filesystem.isfile(full):
                continue
            elif name in _STATE_FILES:
                yield full, (*path, attr("algorithm_state")) if name == "algorithm_state.pkl" else path
            elif os.path.splitext(name)[0] + ".pkl" in _STATE_FILES and os.path.splitext(name)[1] in _OTHERS:
                others.append(full)


def _names(folder: str) -> list[str]:
    try:
        return sorted(filesystem.listdir(folder))
    except OSError as error:
        raise NotFoundError(f"cannot list the folder: {error.strerror}", file=folder) from error


def _unsupported_reason(name: str) -> str:
    return _OTHERS[os.path.splitext(name)[1]]


def _empty_folder_error(location: str, others: list[str]) -> UnsupportedError | FormatError:
    if others:
        return UnsupportedError(
            f"{os.path.relpath(others[0], location)} is {_unsupported_reason(others[0])}", file=location
        )
    return FormatError("the folder has an RLlib description but no pickled state", file=location)


def _writer(facts: dict[str, Any]) -> str:
    version, ray = facts.get("checkpoint_version"), facts.get("ray_version")
    words = ["RLlib checkpoint"]
    words += [f"version {version}"] if isinstance(version, str) else []
    words += [f"of type {facts['type']}"] if isinstance(facts.get("type"), str) else []
    words += [f"(ray {ray})"] if isinstance(ray, str) else []
    return " ".join(words)


# The tree's record of the module's class and arguments, as plain values; they are written to a separate file.
ARGUMENTS = attr("arguments")
CLASS = (ARGUMENTS, key("class"))
_STATE, _MADE, _ABOUT = "module_state.pkl", "class_and_ctor_args.pkl", "metadata.json"
_VERSION = "2.1"
_BOX = Global("gymnasium.spaces.box", "Box")


def pieces(tree: Tree) -> tuple[OutputFile, ...]:
    """Return the files of an RLModule's folder; raise UnsupportedError for any other tree.

    libraries/rllib.py describes the content of such a tree. Sources, in github.com/ray-project/ray:
    rllib/utils/checkpoints.py (`Checkpointable.save_to_path`, `from_checkpoint`),
    rllib/core/rl_module/rl_module.py (`get_ctor_args_and_kwargs`). The pickles name RLlib's classes, and call
    gymnasium's Box with its two arrays.
    """
    record = tree.get(CLASS)
    if not isinstance(record, ValueLeaf) or not isinstance(record.value, Record):
        raise UnsupportedError("an RLlib module can only store an agent")
    state = {path: leaf for path, leaf in tree.tensors() if path[0] != ARGUMENTS}
    for path, leaf in state.items():
        _require_array(leaf, path)
    about = {"class_and_ctor_args_file": _MADE, "state_file": "module_state", "checkpoint_version": _VERSION}
    arguments = dumps(_encode_arguments(tree, record.value), pickles.PROTOCOL)
    text = json.dumps(about).encode("ascii")
    return (
        OutputFile(f"/{_MADE}", lambda stream: _write_data(stream, arguments)),
        OutputFile(f"/{_ABOUT}", lambda stream: _write_data(stream, text)),
        OutputFile(f"/{_STATE}", lambda stream: _write(stream, state)),
    )


def _write_data(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)


def _require_array(leaf: Leaf, path: Path) -> None:
    pickles.dtype_code(leaf, path)
    if len(path) != 1:
        raise UnsupportedError("an RLlib module stores its tensors in a single dict", path=display(path))


def _write(stream: IO[bytes], state: Mapping[Path, Leaf]) -> None:
    arrays = {str(path[0].value): pickles.encode_array(leaf, path) for path, leaf in state.items()}
    stream.write(dumps(arrays, pickles.PROTOCOL))


def _encode_arguments(tree: Tree, record: Record) -> dict[str, Any]:
    arguments: dict[Any, Any] = {}
    values: dict[Path, Any] = {path: leaf.value for path, leaf in tree.plain()}
    # Only a list without entries is a container here.
    values |= dict.fromkeys(tree.containers, ())
    for path, value in values.items():
        if path[:1] == (ARGUMENTS,) and path != CLASS:
            at = arguments
            for step in path[1:-1]:
                at = at.setdefault(step.value, {})
            at[path[-1].value] = value
    return {
        "class": pickles.encode_global(record),
        "ctor_args_and_kwargs": ((), {name: _encode_argument(value) for name, value in arguments.items()}),
    }


def _encode_argument(value: Any) -> Any:
    """Return an argument: a dict with keys counted from 0 is a list, one with `low` and `high` a space."""
    if isinstance(value, Record):
        return pickles.encode_global(value)
    if value == ():
        return []
    if not isinstance(value, dict):
        return value
    inner = {name: _encode_argument(item) for name, item in value.items()}
    if inner and all(isinstance(name, int) for name in inner):
        return list(inner.values())
    if inner.keys() == {"low", "high"}:
        return pickles.encode_box(_BOX, *(_numbers(inner[end]) for end in ("low", "high")))
    return inner


def _numbers(values: list[float]) -> PickleObject:
    return pickle_values.pickle_array("f4", (len(values),), struct.pack(f"<{len(values)}f", *values))
