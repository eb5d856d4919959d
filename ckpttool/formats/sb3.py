"""Stable-Baselines archives, versions 3 and 2."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path as Folder
from typing import IO, TYPE_CHECKING, Any

from ckpttool.core import filesystem, limits, search_paths
from ckpttool.core.checkpoint import Checkpoint, Integrity
from ckpttool.core.code_references import CodeReference, merge_references, relocate_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    FormatError,
    MissingExtraError,
    UnsupportedError,
    WorkerError,
    abbreviate_list,
    locate_errors,
)
from ckpttool.core.source import File, NestedSource, Shape, Span, Storage
from ckpttool.core.tree import Container, Leaf, Path, PathStep, Record, Tree, ValueLeaf, attr, index, key
from ckpttool.encodings import archives, npy
from ckpttool.encodings.archives import ZipWriter
from ckpttool.encodings.pickle_values import Array, Global, PickleObject, dumps
from ckpttool.formats import child_process, pickles, tensor_bytes, torch_legacy
from ckpttool.formats.file_listing import FileListing, join_trees
from ckpttool.formats.name_roles import TensorRole, role_by_name
from ckpttool.formats.pickle_signatures import find_pickle_format
from ckpttool.formats.pickles import (
    SERIALIZED,
    LoadedPickle,
    PickleWalk,
    array_source,
    load_pickle_file,
    parse_json_member,
    read_settings,
)
from ckpttool.formats.probe import OutputFile, Probe, WritingFormatDefinition
from ckpttool.formats.tf_common import VariableInfo, tree_by_name

if TYPE_CHECKING:
    from ckpttool.formats.sb3_child import AgentRequest, StateEntry

NAME = "stable_baselines3"
TITLE = "Stable-Baselines3 agent (zip)"
FRAMEWORK = "torch"

# The members: settings (versions 2 and 3), weights, and texts about the version and the machine.
_SETTINGS, _VERSION, _SYSTEM = "data", "_stable_baselines3_version", "system_info.txt"
_POLICY, _STATE = "policy.pth", ".pth"
# Paths of the settings, and of the system information, in the tree.
_DATA, _MACHINE = attr("data"), attr("system_info")


def claims(probe: Probe) -> str | None:
    """Return the path of a zip, or of the folder of an unpacked one, with the library's members."""
    names = probe.names if probe.kind == "folder" else probe.members
    # Before version 0.5 no member named the library.
    return probe.path if _VERSION in names or (_SETTINGS in names and _POLICY in names) else None


def read(location: str) -> Checkpoint:
    """List the content of every state_dict of the agent, and under `data` its settings and spaces.

    What unpickling would call is listed as a record and named in a note. Raise FormatError if the parts are
    inconsistent, UnsupportedError if a nested archive is compressed. Source:
    github.com/DLR-RM/stable-baselines3, stable_baselines3/common/save_util.py (`save_to_zip_file`,
    `load_from_zip_file`, `data_to_json`). Serialized objects in a file are never run.
    """
    with locate_errors(file=location):
        members = open_members(location)
        return _list_members(members).checkpoint(location, NAME, *members.files)


class Sb3Members(NamedTuple):
    """Every member's unread bytes by name; `packed` means that they are in one zip with checksums."""

    sources: Mapping[str, Storage]
    files: tuple[File, ...]
    packed: bool


def open_members(location: str) -> Sb3Members:
    """Return the members; for a folder its regular files, without following links."""
    if filesystem.isdir(location):
        paths = {name: os.path.join(location, name) for name in sorted(filesystem.listdir(location))}
        plain = (
            name for name, path in paths.items() if filesystem.isfile(path) and not filesystem.islink(path)
        )
        files = {name: File.stamp(paths[name]) for name in plain}
        sources = {name: Span(file, 0, file.size) for name, file in files.items()}
        return Sb3Members(sources, tuple(files.values()), packed=False)
    archive = archives.read_zip(File.stamp(location))
    names = [name for name in archive.members if not name.endswith("/")]
    return Sb3Members(
        {name: archive.source(name) for name in names}, (archive.file,), packed=archive.recorded
    )


_OPTIMIZER = ".optimizer"
_POLICY_STEP = key("policy")
# The entropy coefficient is stored alone, among the variables outside all state_dicts.
_SINGLE_VARIABLES = {"ent_coef_optimizer": "log_ent_coef"}
_VARIABLE_STEPS = (key("pytorch_variables"), key("tensors"))


def assign_agent_slots(tree: Tree) -> Tree:
    """Return the tree with `Leaf.of` for every slot whose parameter is identified by number and shape.

    Sources in github.com/DLR-RM/stable-baselines3: `_get_torch_save_params` of td3/td3.py, sac/sac.py,
    dqn/dqn.py and common/on_policy_algorithm.py for the names, `_build` of the policies for the parameters of
    an optimizer (sac/policies.py excludes a features extractor that the actor trains; before version 2.4
    DQN's included the target's parameters).
    """
    leaves = dict(tree.leaves)
    for step in dict.fromkeys(path[0] for path in tree if len(path) > 1):
        for candidates in _iter_candidates(tree, step):
            if _parameter_numbers(tree, step) != list(range(len(candidates))):
                continue
            slots = _slots(tree, step)
            if slots and all(_fits(tree, leaf, number, candidates) for _, leaf, number in slots):
                leaves |= {path: replace(leaf, of=candidates[number]) for path, leaf, number in slots}
                break
    return Tree(leaves, tree.aliases, tree.containers)


def _iter_candidates(tree: Tree, step: PathStep) -> Iterator[list[Path]]:
    """Yield the parameters that the optimizer of a member may train, in state_dict order."""
    name = str(step.value)
    if name in _SINGLE_VARIABLES:
        for variables in _VARIABLE_STEPS:
            path = (variables, key(_SINGLE_VARIABLES[name]))
            if path in tree:
                yield [path]
    if not name.endswith(_OPTIMIZER):
        return
    owner = name.removesuffix(_OPTIMIZER)
    if owner == _POLICY_STEP.value:
        yield _policy_parameters(tree, lambda _: True)
        yield _policy_parameters(tree, lambda name: "_target." not in name)
        return
    yield _policy_parameters(tree, lambda name: name.startswith(f"{owner}."))
    yield _policy_parameters(
        tree, lambda name: name.startswith(f"{owner}.") and "features_extractor." not in name
    )


def _policy_parameters(tree: Tree, accepts: Callable[[str], bool]) -> list[Path]:
    return [
        path
        for path, leaf in tree.tensors()
        if path[0] == _POLICY_STEP
        and len(path) == 2
        and leaf.role == "parameter"
        and accepts(str(path[1].value))
    ]


def _parameter_numbers(tree: Tree, step: PathStep) -> list[object]:
    """Return the parameter numbers of the only group; none if there are several groups."""
    numbered = [
        (path[2], leaf.value)
        for path, leaf in tree.plain()
        if path[0] == step and len(path) == 5 and (path[1], path[3]) == (key("param_groups"), key("params"))
    ]
    return [number for _, number in numbered] if len({group for group, _ in numbered}) == 1 else []


def _slots(tree: Tree, step: PathStep) -> list[tuple[Path, Leaf, int]]:
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


# Other algorithms of the library, by the module of their policy's class (users choose the class names).
_POLICY_KINDS = {
    "dqn": "a Q-network for discrete actions (DQN)",
    "qrdqn": "a quantile network for discrete actions (QR-DQN)",
    "ppo_mask": "a policy with action masking",
    "maskable": "a policy with action masking",
    "ars": "a policy without a critic (ARS)",
}
_DISCRETE = "a policy for discrete actions"


def _list_members(members: Sb3Members) -> FileListing:
    """Return the content of the members.

    Sources in github.com/DLR-RM/stable-baselines3: stable_baselines3/common/save_util.py
    (`save_to_zip_file`), stable_baselines3/common/utils.py (`get_system_info`), the `_get_torch_save_params`
    of every algorithm.
    """
    states = {name: _list_state(name, source) for name, source in members.sources.items() if _is_state(name)}
    text: list[CodeReference] = []
    data = _sb3_settings(members, text)
    walk = PickleWalk(_sb3_role)
    if data is not None:
        walk.add(LoadedPickle(data, members.sources[_SETTINGS].length, None, 0, tuple(text)), (_DATA,))
    system = _read_system_info(members)
    stems = {key(name.removesuffix(_STATE)): state.tree for name, state in states.items()}
    tree = assign_agent_slots(_merge_parts(join_trees(stems, _native, Container("dict")), walk, system))
    named = [_SETTINGS, _VERSION, _SYSTEM, *states]
    others = [name for name in members.sources if name not in named]
    notes = (
        *_sb3_policy(data or {}),
        *((f"members not listed: {abbreviate_list(others, 5)}",) if others else ()),
        *(f"{name}: {note}" for name, state in states.items() for note in state.notes),
    )
    checked = members.packed and all(state.integrity == "crc32" for state in states.values())
    inner = (relocate_references(state.code_references, name) for name, state in states.items())
    return FileListing(
        tree,
        _writer(members),
        "crc32" if checked else "none",
        notes,
        code_references=merge_references(walk.code_references, *inner),
        unjudged=tuple(f"{name}: {part}" for name, state in states.items() for part in state.unjudged),
    )


def _is_state(name: str) -> bool:
    # save_util.py, load_from_zip_file: every .pth is a state_dict, or the variables outside all of them.
    return name.endswith(_STATE) and "/" not in name


def _list_state(name: str, source: Storage) -> FileListing:
    if not isinstance(source, Span):
        raise UnsupportedError(
            f"member {name!r} is a nested archive and must not be compressed",
            hint="unpack the file and point to the folder, or repack it without compression (zip -0)",
        )
    with locate_errors(path=name):
        listing = torch_legacy.list_embedded(source.file, source.offset, source.length)
    # The library opens the member with zipfile, which verifies the checksum of all of it.
    tree = listing.tree
    leaves = {
        path: replace(leaf, source=NestedSource(leaf.source, source)) if isinstance(leaf, Leaf) else leaf
        for path, leaf in tree.leaves.items()
    }
    if not any(isinstance(leaf, Leaf) for leaf in leaves.values()):
        source.read()
    return replace(listing, tree=Tree(leaves, tree.aliases, tree.containers))


def _native(step: PathStep, name: str) -> str:
    return f"{step.value}{_STATE}.{name}"


def _sb3_settings(members: Sb3Members, references: list[CodeReference]) -> dict[str, Any] | None:
    if _SETTINGS not in members.sources:
        return None
    return read_settings(members.sources[_SETTINGS], _SETTINGS, members.files[0].path, references)


def _merge_parts(states: Tree, walk: PickleWalk, system: Mapping[Path, ValueLeaf]) -> Tree:
    return Tree(
        {**states.leaves, **walk.leaves, **system},
        {**states.aliases, **walk.aliases},
        {**states.containers, **walk.containers},
    )


def _sb3_role(path: Path, dtype: str, shape: Shape) -> TensorRole:  # noqa: ARG001 - the contract's
    # sbx stores whole networks in the settings (flax/training/train_state.py, TrainState).
    names = [step.value for step in path]
    trained = "params" in names or "target_params" in names
    return TensorRole("parameter" if dtype and trained and "opt_state" not in names else "other")


def _text(members: Sb3Members, name: str) -> str | None:
    source = members.sources.get(name)
    if source is None:
        return None
    if source.length > limits.current().text_bytes:
        raise limits.limit_error("text_bytes", f"member {name!r} is too long", source.length)
    return bytes(source.read()).decode("utf-8", "replace").strip()


def _writer(members: Sb3Members) -> str:
    version = _text(members, _VERSION)
    return f"Stable-Baselines3 {version[:40]}" if version else "Stable-Baselines3"


def _read_system_info(members: Sb3Members) -> dict[Path, ValueLeaf]:
    """Return the lines `- NAME: VALUE` of the writer's system information (utils.py, get_system_info)."""
    lines = (line.removeprefix("- ").partition(": ") for line in (_text(members, _SYSTEM) or "").splitlines())
    return {(_MACHINE, key(name)): ValueLeaf(value) for name, colon, value in lines if colon}


def _sb3_policy(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the policy's class and, if ckpttool cannot play such an agent, its type."""
    policy = data.get("policy_class")
    if not isinstance(policy, Global):
        return ()
    steps = policy.full.split(".")
    if steps[0] == "sbx":
        return (f"policy {policy.full}: an sbx agent (JAX), whose networks are pickled in its settings",)
    space = data.get("action_space")
    discrete = isinstance(space, PickleObject) and not space.name.endswith(".Box")
    kind = next(
        (_POLICY_KINDS[step] for step in steps if step in _POLICY_KINDS), _DISCRETE if discrete else None
    )
    return (f"policy {policy.full}" + (f": {kind}" if kind else ""),)


class _PolicyKind(NamedTuple):
    """The algorithm that a policy class belongs to: its package, its name, its networks in `net_arch`."""

    package: str
    algorithm: str
    networks: tuple[str, ...]


_POLICY_CLASSES = {
    "stable_baselines3.sac.policies.SACPolicy": _PolicyKind("stable_baselines3", "SAC", ("pi", "qf")),
    "stable_baselines3.td3.policies.TD3Policy": _PolicyKind("stable_baselines3", "TD3", ("pi", "qf")),
    "stable_baselines3.common.policies.ActorCriticPolicy": _PolicyKind(
        "stable_baselines3", "PPO", ("pi", "vf")
    ),
    "stable_baselines3.dqn.policies.DQNPolicy": _PolicyKind("stable_baselines3", "DQN", ()),
    "sb3_contrib.qrdqn.policies.QRDQNPolicy": _PolicyKind("sb3_contrib", "QRDQN", ()),
}
_PLAIN_ARGUMENTS = ("n_critics", "n_quantiles")
_COUNTERS = ("_n_updates", "num_timesteps")
_SECONDS = 600
_LAST = 400
_PROGRAM = child_process.child_program(
    "from ckpttool.core.sandbox import begin; begin(*sys.argv[2:]); "
    "from ckpttool.formats.sb3_child import main; main(sys.argv[2])"
)


def pieces(tree: Tree) -> tuple[OutputFile]:
    """Return the single file, which the library writes in a separate process.

    Raise MissingExtraError if the library is not installed, UnsupportedError if the tree is not one of its
    agents (see libraries/sb3.py). The process gets a folder with `request.json` (what to build, and where
    each tensor's bytes are) and `tensors.bin`, and writes `agent.zip` there.
    """
    requested = build_request(tree)
    package = requested["package"]
    if importlib.util.find_spec(package) is None:
        from ckpttool.core.installation import install_command, install_extra

        is_sb3 = package == "stable_baselines3"
        raise MissingExtraError(
            f"writing a Stable-Baselines3 file requires {package}, which is not installed",
            hint=install_extra("sb3") if is_sb3 else install_command("sb3-contrib"),
        )
    return (OutputFile("", lambda stream: _write_sb3(tree, requested, stream)),)


def build_request(tree: Tree) -> AgentRequest:
    """Return what to build: algorithm, sizes, spaces (their small tensors are read), counters.

    Raise UnsupportedError if the tree is not an agent of the library.
    """
    policy = tree.get((_DATA, key("policy_class")))
    name = policy.value.name if isinstance(policy, ValueLeaf) and isinstance(policy.value, Record) else None
    if name not in _POLICY_CLASSES:
        raise UnsupportedError("a Stable-Baselines3 file can only store an agent", found=name)
    activation = _value(tree, "policy_kwargs", key("activation_fn"))
    kind = _POLICY_CLASSES[name]
    arguments = {n: value for n in _PLAIN_ARGUMENTS if (value := _value(tree, "policy_kwargs", key(n)))}
    sizes = key("net_arch")
    net_arch: Any = {net: _list_values(tree, "policy_kwargs", sizes, key(net)) for net in kind.networks}
    return {
        "package": kind.package,
        "algorithm": _algorithm(tree, kind, arguments),
        "obs_dim": _value(tree, "observation_space", attr("_shape"), index(0)),
        "observation_space": [_bounds(tree, end) for end in ("low", "high")],
        "action_space": _action_space(tree),
        "policy_kwargs": {
            "net_arch": net_arch or _list_values(tree, "policy_kwargs", sizes),
            **arguments,
        },
        "activation": activation.name.rpartition(".")[2] if isinstance(activation, Record) else None,
        "counters": {
            counter: setting for counter in _COUNTERS if (setting := _value(tree, counter)) is not None
        },
    }


def _algorithm(tree: Tree, kind: _PolicyKind, arguments: Mapping[str, Any]) -> str:
    """Return the class: one critic is DDPG's, the optimizer distinguishes A2C (RMSprop) from PPO (Adam)."""
    if (kind.algorithm, arguments.get("n_critics")) == ("TD3", 1):
        return "DDPG"
    root_mean_square = (key("policy.optimizer"), key("param_groups"), index(0), key("alpha")) in tree
    return "A2C" if (kind.algorithm, root_mean_square) == ("PPO", True) else kind.algorithm


def _action_space(tree: Tree) -> dict[str, list[Any]]:
    """Return the arguments of a Box, a Discrete or a MultiDiscrete space."""
    for name in ("n", "nvec"):
        counts = _list_values(tree, "action_space", attr(name))
        if counts:
            return {name: counts, "start": _list_values(tree, "action_space", attr("start"))}
    return {"low": _numbers(tree, "low"), "high": _numbers(tree, "high")}


def _value(tree: Tree, name: str, *steps: PathStep) -> Any:
    leaf = tree.get((_DATA, key(name), *steps))
    return leaf.value if isinstance(leaf, ValueLeaf) else None


def _numbers(tree: Tree, end: str) -> list[float]:
    leaf = tree[_DATA, key("action_space"), attr(end)]
    return leaf.array().tolist() if isinstance(leaf, Leaf) else []


def _bounds(tree: Tree, end: str) -> list[Any]:
    """Return the dtype and numbers of one bound of the observation space; empty without a bound."""
    leaf = tree.get((_DATA, key("observation_space"), attr(end)))
    return [leaf.dtype, [repr(n) for n in leaf.array().tolist()]] if isinstance(leaf, Leaf) else []


def _list_values(tree: Tree, name: str, *steps: PathStep) -> list[Any]:
    """Return the items of a list in the settings, or a single value as a list."""
    prefix = (_DATA, key(name), *steps)
    return [leaf.value for path, leaf in tree.plain() if path == prefix or path[:-1] == prefix]


def _entries(tree: Tree) -> Iterator[tuple[Path, Leaf | ValueLeaf]]:
    """Yield the entries of the state_dicts; a tensor with several names is repeated under each."""
    for path, leaf in tree.items():
        if path[0] != _DATA:
            yield path, leaf
            yield from ((alias.path, leaf) for alias in tree.aliases.get(path, ()))


def _write_sb3(tree: Tree, requested: AgentRequest, stream: IO[bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="ckpttool-") as name:
        folder = Folder(name)
        entries: list[StateEntry] = []
        with open(folder / "tensors.bin", "wb") as tensors:
            for path, leaf in _entries(tree):
                what: StateEntry = {"path": [[step.kind, step.value] for step in path]}
                if isinstance(leaf, Leaf):
                    what |= {"dtype": leaf.dtype, "shape": list(leaf.shape), "offset": tensors.tell()}
                    tensors.write(leaf.read())
                else:
                    what["value"] = leaf.value
                entries.append(what)
        (folder / "request.json").write_text(json.dumps({**requested, "entries": entries}))
        _run_library(name)
        with open(folder / "agent.zip", "rb") as archive:
            shutil.copyfileobj(archive, stream)


def _run_library(folder: str) -> None:
    """Run the library; raise WorkerError with its last output line if it fails."""
    from ckpttool.core import sandbox  # not needed to read

    restricted = sandbox.settings((), limits.current().model_memory, now=True)
    command = [sys.executable, "-I", "-c", _PROGRAM, child_process.child_paths(), folder, restricted]
    try:
        done = subprocess.run(  # noqa: S603  # our own module, run by our own interpreter
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            cwd=folder,  # the library imports matplotlib, which reads ./matplotlibrc
            env={**search_paths.child_environment(), "OMP_NUM_THREADS": "1"},  # no computation is needed
        )
    except subprocess.TimeoutExpired:
        raise WorkerError(f"Stable-Baselines3 did not write the agent within {_SECONDS} s") from None
    if done.returncode:
        last_line = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        words = "".join(letter for letter in " ".join(last_line) if letter.isprintable())[:_LAST]
        raise WorkerError(f"Stable-Baselines3 did not write the agent; its last output: {words}")


SB2_NAME = "stable_baselines2"
SB2_TITLE = "Stable-Baselines 2 agent (zip, or cloudpickle)"
WRITES = True
SB2_FRAMEWORK = "tensorflow"


def sb2_claims(probe: Probe) -> str | None:
    """Return the path of a zip with `parameters` and `parameter_list`, or of an SB2 pickle."""
    zipped = "parameters" in probe.members and "parameter_list" in probe.members
    return probe.path if zipped or find_pickle_format(probe) == SB2_NAME else None


def read_sb2(location: str) -> Checkpoint:
    """List the agent's variables, by name, and under `data` its settings and spaces.

    What unpickling would call is listed as a record and named in a note. Raise FormatError if archive, arrays
    and names are inconsistent. Sources, in github.com/hill-a/stable-baselines:
    stable_baselines/common/base_class.py (`_save_to_file_zip`, `_save_to_file_cloudpickle`,
    `_load_from_file`) and stable_baselines/common/save_util.py (`data_to_json`, `params_to_bytes`).
    Serialized objects in a file are never run.
    """
    file = File.stamp(location)
    zipped = file.read(0, min(2, file.size)) == b"PK"
    with locate_errors(file=location):
        listing = list_sb2_zip(file) if zipped else list_sb2_pickle(file)
    return listing.checkpoint(location, SB2_NAME, file)


# Variables without names are under this step.
_PARAMS: Path = (attr("params"),)

_SB2_WRITER = "Stable-Baselines 2"
_PARAMETERS, _LIST = "parameters", "parameter_list"


def list_sb2_zip(file: File) -> FileListing:
    """Return the content of a zip file."""
    archive = archives.read_zip(file)
    inner = _open_parameters(archive)
    tensors, others, notes = _read_parameters(archive, inner)
    text: list[CodeReference] = []
    named = _SETTINGS in archive.members
    data = read_settings(archive.source(_SETTINGS), _SETTINGS, file.path, text) if named else {}
    size = archive.members[_SETTINGS].size if _SETTINGS in archive.members else 0
    walk = PickleWalk(_sb2_role)
    walk.add(LoadedPickle(data, size, None, 0, tuple(text)), (_DATA,))
    if others:
        walk.add(LoadedPickle(others, len(others), None, 0), _PARAMS)
    notes = (*_sb2_policy(data), *notes)
    integrity: Integrity = "crc32" if inner.recorded else "none"
    return FileListing(
        _join_tree(tensors, walk),
        f"{_SB2_WRITER} (zip)",
        integrity,
        notes,
        code_references=walk.code_references,
    )


def _open_parameters(archive: archives.ZipArchive) -> archives.ZipArchive:
    source = archive.source(_PARAMETERS)
    if not isinstance(source, Span):
        raise UnsupportedError(
            "member 'parameters' is a nested archive and must not be compressed",
            file=archive.file.path,
            hint="unpack the file and repack it without compression (zip -0)",
        )
    return archives.read_zip(archive.file, source.offset, source.length)


def _read_parameters(
    archive: archives.ZipArchive, inner: archives.ZipArchive
) -> tuple[dict[str, VariableInfo], dict[str, Any], tuple[str, ...]]:
    """Return the variables in the order of `parameter_list`, the other arrays, and notes about them."""
    names = parse_json_member(archive.source(_LIST), _LIST)
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise FormatError("member 'parameter_list' is not a list of names")
    arrays = npy.list_npz(inner)
    listed = dict.fromkeys(names)
    missing = [name for name in listed if name not in arrays]
    if missing or len(listed) != len(names):
        what = f"has no array {missing[0]!r}" if missing else "lists a variable twice"
        raise FormatError(f"'parameter_list' and 'parameters' do not match: the file {what}")
    unlisted = [name for name in arrays if name not in listed]
    tensors: dict[str, VariableInfo] = {}
    others: dict[str, Any] = {}
    for name in (*listed, *unlisted):
        dtype, shape, source = arrays[name].dtype, arrays[name].shape, arrays[name].source
        if dtype is None or source is None:
            others[name] = Record("numpy.ndarray", f"{arrays[name].descr}{list(shape)}")
        else:
            tensors[name] = VariableInfo(dtype, shape, source)
    note = f"arrays not listed in 'parameter_list': {len(unlisted):,}"
    return tensors, others, (note,) if unlisted else ()


def list_sb2_pickle(file: File) -> FileListing:
    """Return the content of a cloudpickle; statistics saved separately by SB2 are listed as they are."""
    pickled = load_pickle_file(file)
    value = pickled.value
    walk = PickleWalk(_sb2_role)
    tensors: dict[str, VariableInfo] = {}
    notes: tuple[str, ...] = ()
    if _is_agent(value):
        data, parameters = value
        walk.add(pickled._replace(value=data), (_DATA,))
        if isinstance(parameters, dict):
            tensors, parameters = _split_named_arrays(parameters, pickled)
        else:
            notes = (
                "the file does not record variable names; variables are in the order of the agent's graph",
            )
        if parameters:
            walk.add(pickled._replace(value=parameters, code_references=()), _PARAMS)
        notes = (*_sb2_policy(data), *notes)
    else:
        walk.add(pickled)
    return FileListing(
        _join_tree(tensors, walk),
        f"{_SB2_WRITER} (cloudpickle)",
        notes=notes,
        code_references=walk.code_references,
    )


def _is_agent(value: Any) -> bool:
    # base_class.py, _save_to_file_cloudpickle: (data, params).
    return (
        type(value) is tuple
        and len(value) == 2
        and isinstance(value[0], dict)
        and isinstance(value[1], dict | list)
    )


def _split_named_arrays(
    parameters: Mapping[Any, Any], pickled: LoadedPickle
) -> tuple[dict[str, VariableInfo], dict[Any, Any]]:
    """Return the arrays with a variable's name, and the rest of the dict."""
    tensors: dict[str, VariableInfo] = {}
    others: dict[Any, Any] = {}
    for name, value in parameters.items():
        parts = value.parts() if type(value) is Array and type(name) is str else None
        if parts is None or parts.type.name is None or isinstance(parts.data, list):
            others[name] = value
        else:
            tensors[name] = VariableInfo(parts.type.name, parts.shape, array_source(parts, pickled))
    return tensors, others


def _join_tree(tensors: Mapping[str, VariableInfo], walk: PickleWalk) -> Tree:
    """Return the tree of the named variables and the results of the traversal."""
    # TensorFlow lists variables by their first output, `NAME:0`; scopes are the parts of NAME.
    plain = {name: name.removesuffix(":0") for name in tensors}
    if len(set(plain.values())) != len(plain):
        plain = {name: name for name in tensors}
    named = tree_by_name({plain[name]: tensor for name, tensor in tensors.items()})
    listed = {short: name for name, short in plain.items()}
    leaves = {path: _set_variable_key(leaf, listed) for path, leaf in named.items()}
    aliases = {**named.aliases, **walk.tree().aliases}
    return Tree({**leaves, **walk.leaves}, aliases, {**named.containers, **walk.containers})


def _set_variable_key(leaf: Leaf | ValueLeaf, names: Mapping[str, str]) -> Leaf | ValueLeaf:
    return replace(leaf, key=names[leaf.key]) if isinstance(leaf, Leaf) else leaf


def _sb2_role(path: Path, dtype: str, shape: Shape) -> TensorRole:
    """Return the role in settings ("other"), in an unnamed list of variables, or in saved statistics."""
    last = path[-1] if path else None
    if path[:1] == _PARAMS and dtype:
        return TensorRole(role_by_name(path, "", dtype, shape))
    # stable_baselines/common/running_mean_std.py, RunningMeanStd, which VecNormalize saves.
    if path[:1] != (_DATA,) and last is not None and last.value in ("mean", "var"):
        return TensorRole("buffer")
    return TensorRole("other")


def _sb2_policy(data: Mapping[Any, Any]) -> tuple[str, ...]:
    policy = data.get("policy")
    return (f"policy {policy.full}",) if isinstance(policy, Global) else ()


_BOX = Global("gym.spaces.box", "Box")
_POLICY_CLASS = (_DATA, key("policy"))


def sb2_pieces(tree: Tree) -> tuple[OutputFile]:
    """Return the single zip file; raise UnsupportedError if the tree is not an agent of the library.

    libraries/sb2.py describes the content of such a tree. Sources, in github.com/hill-a/stable-baselines:
    stable_baselines/common/base_class.py (`_save_to_file_zip`, `_load_from_file`),
    stable_baselines/common/save_util.py (`data_to_json`, `params_to_bytes`). Values that JSON cannot hold
    become a pickle that names a class of the library, or calls gym's Box with its two arrays
    (gym/spaces/box.py), which every version of gym supports.
    """
    policy = tree.get(_POLICY_CLASS)
    if not isinstance(policy, ValueLeaf) or not isinstance(policy.value, Record):
        raise UnsupportedError("a Stable-Baselines 2 file can only store an agent")
    variables = {path: leaf for path, leaf in tree.tensors() if path[:1] != (_DATA,)}
    codes = {path: pickles.dtype_code(leaf, path) for path, leaf in variables.items()}
    data = _encode_settings(tree)
    return (OutputFile("", lambda stream: _write_sb2(stream, data, variables, codes)),)


def _write_sb2(
    stream: IO[bytes], data: Mapping[str, Any], variables: Mapping[Path, Leaf], codes: Mapping[Path, str]
) -> None:
    inner = io.BytesIO()
    arrays = ZipWriter(inner)
    for path, leaf in variables.items():
        header = npy.encode_npy_header(("|" if codes[path].endswith("1") else "<") + codes[path], leaf.shape)
        arrays.add(_variable_name(path) + npy.SUFFIX, header, tensor_bytes.read_exact(leaf, path))
    arrays.close()
    archive = ZipWriter(stream)
    archive.add("data", json.dumps(data, indent=4).encode("ascii"))
    archive.add("parameters", inner.getbuffer())
    archive.add("parameter_list", json.dumps([_variable_name(path) for path in variables]).encode("ascii"))
    archive.close()


def _variable_name(path: Path) -> str:
    """Return a variable's name; TensorFlow lists variables by their first output."""
    return "/".join(str(step.value) for step in path) + ":0"


def _encode_settings(tree: Tree) -> dict[str, Any]:
    """Return the settings as JSON, with pickles for values that JSON cannot hold."""
    settings: dict[str, Any] = {}
    for path, leaf in tree.items():
        if path[:1] == (_DATA,) and len(path) > 1:
            _put_value(settings, path[1:], leaf)
    return {name: _encode_setting(value) for name, value in settings.items()}


def _put_value(settings: dict[str, Any], path: Path, leaf: Leaf | ValueLeaf) -> None:
    at: Any = settings
    for step, after in pairwise(path):
        at = _get_or_add(at, step, [] if after.kind == "index" else {})
    _get_or_add(at, path[-1], leaf.value if isinstance(leaf, ValueLeaf) else pickles.encode_array(leaf, path))


def _get_or_add(at: Any, step: PathStep, value: Any) -> Any:
    """Return the entry of a dict or list at the step; add `value` if there is none yet."""
    if isinstance(at, list):
        if step.value == len(at):
            at.append(value)
        return at[-1]
    return at.setdefault(step.value, value)


def _encode_setting(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() >= {"low", "high"}:
        return _encode_pickled(
            f"<class '{_BOX.full}'>", pickles.encode_box(_BOX, value["low"], value["high"])
        )
    named = _encode_globals(value)
    if named is value or named == value:
        return value
    kind = "type" if isinstance(named, Global) else type(value).__name__
    return _encode_pickled(f"<class '{kind}'>", named)


def _encode_globals(value: Any) -> Any:
    """Return the value with each inert name replaced by the pickle global for that class or function."""
    if isinstance(value, Record):
        return pickles.encode_global(value)
    if isinstance(value, dict):
        return {step: _encode_globals(inner) for step, inner in value.items()}
    if isinstance(value, list):
        return [_encode_globals(inner) for inner in value]
    return value


def _encode_pickled(kind: str, value: Any) -> dict[str, str]:
    return {":type:": kind, SERIALIZED: base64.b64encode(dumps(value, pickles.PROTOCOL)).decode("ascii")}


STABLE_BASELINES2 = WritingFormatDefinition(
    NAME=SB2_NAME,
    TITLE=SB2_TITLE,
    FRAMEWORK=SB2_FRAMEWORK,
    claims=sb2_claims,
    read=read_sb2,
    pieces=sb2_pieces,
)
