"""What a file of Stable-Baselines 2 holds: named variables, settings, serialized objects as inert records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Integrity
from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.listed import Listed
from ckpttool.formats.pickled.load import Pickled, array_source, load_file
from ckpttool.formats.pickled.settings import parsed, settings
from ckpttool.formats.pickled.walk import Use, Walk
from ckpttool.formats.variables import Tensor, by_name, role_by_name
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, attr
from ckpttool.source import File, Shape, Span
from ckpttool.tree import Tree
from ckpttool.wire import npy, zip  # noqa: A004 - the module is named by its format
from ckpttool.wire.asked import Asked
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Global

# What stands in `data`, and variables without names, below these steps.
DATA: Path = (attr("data"),)
PARAMS: Path = (attr("params"),)

_WRITER = "Stable-Baselines 2"
_DATA, _PARAMETERS, _LIST = "data", "parameters", "parameter_list"


def from_zip(file: File) -> Listed:
    """Return what a zip file holds."""
    archive = zip.read(file)
    inner = _inner(archive)
    tensors, others, notes = _arrays(archive, inner)
    told: list[Asked] = []
    named = _DATA in archive.members
    data = settings(archive.source(_DATA), _DATA, file.path, told) if named else {}
    size = archive.members[_DATA].size if _DATA in archive.members else 0
    walk = Walk(_use)
    walk.add(Pickled(data, size, None, 0, tuple(told)), DATA)
    if others:
        walk.add(Pickled(others, len(others), None, 0), PARAMS)
    notes = (*_policy(data), *notes)
    integrity: Integrity = "crc32" if inner.recorded else "none"
    return Listed(_joined(tensors, walk), f"{_WRITER} (zip)", integrity, notes, asks=walk.asks)


def _inner(archive: zip.Archive) -> zip.Archive:
    source = archive.source(_PARAMETERS)
    if not isinstance(source, Span):
        raise UnsupportedError(
            "member 'parameters' is compressed, and is an archive itself",
            file=archive.file.path,
            hint="unpack the file and pack it again without compression (zip -0)",
        )
    return zip.read(archive.file, source.offset, source.length)


def _arrays(
    archive: zip.Archive, inner: zip.Archive
) -> tuple[dict[str, Tensor], dict[str, Any], tuple[str, ...]]:
    """Return the variables in the order of `parameter_list`, what is no tensor, and what to tell of them."""
    names = parsed(archive.source(_LIST), _LIST)
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise FormatError("member 'parameter_list' is no list of names")
    arrays = npy.members(inner)
    listed = dict.fromkeys(names)
    missing = [name for name in listed if name not in arrays]
    if missing or len(listed) != len(names):
        what = f"has no array {missing[0]!r}" if missing else "names a variable twice"
        raise FormatError(f"'parameter_list' and 'parameters' do not fit together: the file {what}")
    unlisted = [name for name in arrays if name not in listed]
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name in (*listed, *unlisted):
        dtype, shape, source = arrays[name].dtype, arrays[name].shape, arrays[name].source
        if dtype is None or source is None:
            others[name] = Record("numpy.ndarray", f"{arrays[name].descr}{list(shape)}")
        else:
            tensors[name] = Tensor(dtype, shape, source)
    note = f"arrays that 'parameter_list' does not name: {len(unlisted):,}"
    return tensors, others, (note,) if unlisted else ()


def from_pickle(file: File) -> Listed:
    """Return what a cloudpickle holds; statistics that SB2 saved alone are listed as they are."""
    pickled = load_file(file)
    value = pickled.value
    walk = Walk(_use)
    tensors: dict[str, Tensor] = {}
    notes: tuple[str, ...] = ()
    if _is_agent(value):
        data, parameters = value
        walk.add(pickled._replace(value=data), DATA)
        if isinstance(parameters, dict):
            tensors, parameters = _named(parameters, pickled)
        else:
            notes = ("the file does not name its variables: they stand in the order of the agent's graph",)
        if parameters:
            walk.add(pickled._replace(value=parameters, asked=()), PARAMS)
        notes = (*_policy(data), *notes)
    else:
        walk.add(pickled)
    return Listed(_joined(tensors, walk), f"{_WRITER} (cloudpickle)", notes=notes, asks=walk.asks)


def _is_agent(value: Any) -> bool:
    # base_class.py, _save_to_file_cloudpickle: (data, params).
    return (
        type(value) is tuple
        and len(value) == 2
        and isinstance(value[0], dict)
        and isinstance(value[1], dict | list)
    )


def _named(parameters: Mapping[Any, Any], pickled: Pickled) -> tuple[dict[str, Tensor], dict[Any, Any]]:
    """Return the arrays that have a variable's name, and whatever else the dict holds."""
    tensors: dict[str, Tensor] = {}
    others: dict[Any, Any] = {}
    for name, value in parameters.items():
        parts = value.parts() if type(value) is Array and type(name) is str else None
        if parts is None or parts.type.name is None or isinstance(parts.data, list):
            others[name] = value
        else:
            tensors[name] = Tensor(parts.type.name, parts.shape, array_source(parts, pickled))
    return tensors, others


def _joined(tensors: Mapping[str, Tensor], walk: Walk) -> Tree:
    """Return the tree of the named variables and of what the walk found."""
    # TensorFlow lists variables by their first output, `NAME:0`; scopes are the parts of NAME.
    plain = {name: name.removesuffix(":0") for name in tensors}
    if len(set(plain.values())) != len(plain):
        plain = {name: name for name in tensors}
    named = by_name({plain[name]: tensor for name, tensor in tensors.items()})
    listed = {short: name for name, short in plain.items()}
    leaves = {path: _listed(leaf, listed) for path, leaf in named.items()}
    aliases = {**named.aliases, **walk.tree().aliases}
    return Tree({**leaves, **walk.leaves}, aliases, {**named.containers, **walk.containers})


def _listed(leaf: Leaf | ValueLeaf, names: Mapping[str, str]) -> Leaf | ValueLeaf:
    return replace(leaf, key=names[leaf.key]) if isinstance(leaf, Leaf) else leaf


def _use(path: Path, dtype: str, shape: Shape) -> Use:
    """Say what stands in the settings ("other"), in an unnamed list of variables, or in saved statistics."""
    last = path[-1] if path else None
    if path[:1] == PARAMS and dtype:
        return Use(role_by_name(path, "", dtype, shape))
    # stable_baselines/common/running_mean_std.py, RunningMeanStd: what VecNormalize saves.
    if path[:1] != DATA and last is not None and last.value in ("mean", "var"):
        return Use("buffer")
    return Use("other")


def _policy(data: Mapping[Any, Any]) -> tuple[str, ...]:
    policy = data.get("policy")
    return (f"policy {policy.full}",) if isinstance(policy, Global) else ()
