"""PyTorch zip files, TorchScript archives among them, and sets of files in one folder."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import IO, Any, NoReturn, Protocol

from ckpttool.core import code_references, deferred, dtypes, filesystem, limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CODE, CodeReference, merge_references, relocate_references
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import FormatError, NotFoundError, UnsupportedError, locate_errors
from ckpttool.core.source import DeflatedSpan, File, Shape, Span, Storage
from ckpttool.core.text import format_count
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    PathStep,
    Record,
    Tree,
    ValueLeaf,
    attr,
    display,
    key,
)
from ckpttool.encodings import archives, pickle_reader
from ckpttool.encodings.archives import ZipWriter
from ckpttool.encodings.pickle_values import Dict, Global, PersistentId, PickleObject, Set, dumps
from ckpttool.formats import file_listing, tensor_bytes, torch_tree
from ckpttool.formats.file_listing import FileListing, join_trees
from ckpttool.formats.name_roles import dotted_name
from ckpttool.formats.pickle_signatures import find_pickle_format
from ckpttool.formats.probe import OutputFile, Probe, WritingFormatDefinition
from ckpttool.formats.torch_tensors import BUILDERS, StorageTable
from ckpttool.formats.torch_tree import ClassMembers

NAME = "pytorch"
TITLE = "PyTorch checkpoint (zip, since 1.6)"
WRITES = True
FRAMEWORK = "torch"

_PICKLE = deferred.compile(r"[^/]+/data\.pkl")
# The first member's name in a local header, for archives whose end is damaged or missing.
_FIRST = deferred.compile(rb"[^/\0]{1,255}/(data\.pkl|data/\d+)", re.ASCII)


def claims(probe: Probe) -> str | None:
    """Return the path of a zip with one `*/data.pkl`, of a damaged zip of this kind, or its folder."""
    if probe.kind == "folder":
        return probe.path if find_data_folder(probe.path, probe.names) else None
    if probe.name == PICKLE and find_pickle_format(probe) == NAME:
        return probe.folder
    if probe.name.endswith(".distcp"):
        return None  # a shard of torch.distributed.checkpoint: concatenated archives
    if probe.damage is not None:
        return probe.path if _FIRST.match(probe.head, archives.LOCAL.size) else None
    return probe.path if any(map(_PICKLE.fullmatch, probe.members)) else None


def read(location: str) -> Checkpoint:
    """List every tensor and value of the file; nothing named in the pickle is imported or called.

    Raise FormatError if archive, pickle and storages do not match, or if the pickle contains a call
    with side effects.
    """
    with locate_errors(file=location):
        opened = _open_archive(location)
        listing = list_archive(opened)
    files = opened.opened.values() if isinstance(opened, UnpackedArchive) else (opened.file,)
    return listing.checkpoint(location, NAME, *files)


def _open_archive(location: str) -> archives.ZipArchive | UnpackedArchive:
    if not filesystem.isdir(location):
        return archives.read_zip(File.stamp(location))
    folder = find_data_folder(location, frozenset(filesystem.listdir(location)))
    if folder is None:
        raise NotFoundError("data.pkl is missing from the folder", file=location)
    return read_folder(folder)


_SMALL = 64
_NUMBER = deferred.compile(rb"[0-9]{1,9}\n?")


class TorchArchive(Protocol):
    """The members of a zip file, or of a folder with an unpacked one."""

    @property
    def file(self) -> File:
        """File named in errors."""
        ...

    @property
    def members(self) -> Mapping[str, object]:
        """The members by name."""
        ...

    @property
    def recorded(self) -> bool:
        """Whether there are checksums."""
        ...

    def source(self, name: str) -> Storage:
        """Return a member's bytes, unread."""
        ...


def list_archive(archive: TorchArchive) -> FileListing:
    """List every tensor and value of the archive; nothing named in the pickle is imported or called.

    Raise FormatError if archive, pickle and storages do not match. Source: torch/serialization.py (_save,
    _load), caffe2/serialize/inline_container.cc.
    """
    top = torch_tree.find_top_folder(archive.members, archive.file.path)
    _require_small(archive, top)
    _require_numbers(archive, top)
    used: set[str] = set()
    listing = (_list_script if is_script(archive.members, top) else _list_plain)(archive, top, used)
    references = merge_references(audit_programs(archive.members, top), listing.code_references)
    notes = (*listing.notes, *torch_tree.note_unused_members(archive.members, top, used))
    return replace(listing, notes=notes, code_references=references)


def _list_plain(
    archive: TorchArchive,
    top: str,
    used: set[str],
    name: str = "data",
    *,
    notes: tuple[str, ...] = (),
    details: Mapping[str, Any] | None = None,
    classes: Mapping[str, ClassMembers] | None = None,
) -> FileListing:
    storages = StorageTable(lambda key, nbytes: _storage_source(archive, f"{top}/{name}", key, nbytes))
    pickled = _unpickle(archive, top, name, storages)
    used.update(f"{top}/{name}/{key}" for key in storages.known)
    listing = torch_tree.list_pickle(
        pickled,
        _writer(archive, top),
        big=_is_big_endian(archive, top),
        integrity="crc32" if archive.recorded else "none",
        notes=notes,
        details=details,
        classes=classes,
    )
    plain = (archive.source(f"{top}/{name}.pkl"),) if pickled.plain else ()
    return replace(listing, plain=frozenset(plain))


def _list_script(archive: TorchArchive, top: str, used: set[str]) -> FileListing:
    members = archive.members
    module = _list_plain(
        archive,
        top,
        used,
        notes=note_script(members, top),
        details=script_facts(members, top, archive.source),
        classes=script_classes(members, top, archive.source),
    )
    listing = add_constants(module, _list_plain(archive, top, used, "constants"))
    return replace(listing, code_references=(*audit_script(members, top), *listing.code_references))


def traced_inputs(archive: TorchArchive, top: str) -> tuple[Leaf, ...]:
    """Return the inputs with which `forward` was traced, () if the archive has none; not to be read.

    The archive records the inputs' types and shapes, and storages without their bytes.
    """
    if f"{top}/traced_inputs.pkl" not in archive.members:
        return ()
    storages = StorageTable(lambda _, nbytes: Span(archive.file, 0, nbytes))
    contents = _unpickle(archive, top, "traced_inputs", storages)
    tree = torch_tree.list_pickle(contents, "").tree
    return tuple(leaf for path, leaf in tree.tensors() if path and path[0].value == "forward")


def _require_small(archive: TorchArchive, top: str) -> None:
    """Read the small members that describe the archive; their checksums also detect damage."""
    for name in torch_tree.description_members(archive.members, top) if archive.recorded else ():
        if archive.source(name).length <= _SMALL:
            archive.source(name).read()


def _require_numbers(archive: TorchArchive, top: str) -> None:
    """Raise FormatError unless version and alignment are numbers, as torch expects.

    torch does not read folders; there the two have no effect.
    """
    for name in ("version", ".storage_alignment") if isinstance(archive, archives.ZipArchive) else ():
        digits = _read_small(archive, f"{top}/{name}") or b""
        if f"{top}/{name}" in archive.members and not _NUMBER.fullmatch(digits):
            raise FormatError(
                f"the archive's {name.removeprefix('.')} is not a number",
                file=archive.file.path,
                found=repr(digits),
            )


def _unpickle(
    archive: TorchArchive, top: str, name: str, storages: StorageTable
) -> pickle_reader.PickleContents:
    # TorchScript has two pickles, each with its own folder for its storages.
    source = archive.source(f"{top}/{name}.pkl")
    data = pickle_reader.parse_pickle(
        bytes(source.read()),
        persistent=storages.persistent,
        builders=BUILDERS,
        file=archive.file.path,
        base=(source.base if isinstance(source, DeflatedSpan) else source).offset,
    )
    return data._replace(code_references=relocate_references(data.code_references, f"{top}/{name}.pkl"))


def _storage_source(archive: TorchArchive, folder: str, key: str, nbytes: int) -> Storage:
    name = f"{folder}/{key}"
    if name not in archive.members:
        raise FormatError(f"storage {key!r} is missing from the archive")
    source = archive.source(name)
    if source.length != nbytes:
        raise FormatError(
            f"the size of storage {key!r} does not match the pickle",
            expected=f"{nbytes:,} bytes",
            found=f"{source.length:,}",
        )
    return source


def _read_small(archive: TorchArchive, name: str) -> bytes | None:
    """Return a small member's bytes, None if it does not exist."""
    if name not in archive.members or archive.source(name).length > _SMALL:
        return None
    return bytes(archive.source(name).read())


def _is_big_endian(archive: TorchArchive, top: str) -> bool:
    name = f"{top}/byteorder"
    order = _read_small(archive, name)
    # Compared as in torch, which does not accept a newline after the word.
    if order not in (b"little", b"big") and name in archive.members:
        raise FormatError("unknown byte order", file=archive.file.path, found=repr(order))
    if order == b"big" and is_script(archive.members, top):
        # torch.jit.load ignores it, and reads storages as little-endian.
        raise UnsupportedError("TorchScript of a big-endian machine", file=archive.file.path)
    return order == b"big"


def _writer(archive: TorchArchive, top: str) -> str:
    kind = "TorchScript" if is_script(archive.members, top) else "torch"
    version = _read_small(archive, f"{top}/version") or _read_small(archive, f"{top}/.data/version")
    return f"{kind} archive version {version.decode('latin-1').strip()}" if version else f"{kind} archive"


ALIGNMENT = 64
_BUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_BUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_BUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_ORDERED = "collections.OrderedDict"
_SETS = ("builtins.set", "builtins.frozenset")


def pieces(tree: Tree) -> tuple[OutputFile]:
    """Return the single file that contains the tree.

    Leaves with a known `trainable` become Parameters, other tensors plain ones; NumPy arrays become tensors;
    aliases share one storage. Raise UnsupportedError, before anything is written, for values that a torch
    pickle cannot contain. Source: torch/serialization.py (_save), torch/_tensor.py (_reduce_ex_internal). The
    file can be loaded with `weights_only=True` and with `mmap=True`.
    """
    plan = PicklePlan(tree)
    pickle = dumps(plan.value(plan.root))
    return (OutputFile("", lambda stream: _write(plan, pickle, stream)),)


def stored(tree: Tree) -> Tree:
    """Return the tree with the paths used when it is read back: torch's file has only dicts and lists.

    An attribute step is read back as a key. Raise UnsupportedError as `pieces` does, and if two
    entries would have the same path.
    """
    plan = PicklePlan(tree)
    moved: dict[Path, Path] = {(): ()}
    waiting = [plan.root]
    while waiting:
        node = waiting.pop()
        kind = (plan.containers.get(node.path) or infer_container(node)).kind
        for step, child in node.children.items():
            stored_step = PathStep("key", step.value) if kind in ("dict", "OrderedDict") else step
            moved[child.path] = (*moved[node.path], stored_step)
            waiting.append(child)
    leaves = {moved[path]: leaf for path, leaf in tree.items()}
    if len(leaves) != len(tree):
        twice = next(path for path in tree if leaves[moved[path]] is not tree[path])
        _raise_unsupported("two entries have keys that Python treats as equal", twice)
    return Tree(
        leaves,
        {moved[p]: tuple(Alias(moved[a.path], a.key) for a in others) for p, others in tree.aliases.items()},
        {moved[path]: container for path, container in plan.containers.items()},
    )


def _write(plan: PicklePlan, pickle: bytes, stream: IO[bytes]) -> None:
    archive = ZipWriter(stream, ALIGNMENT)
    archive.add(f"{TOP}/data.pkl", pickle)
    archive.add(f"{TOP}/.format_version", b"1")
    archive.add(f"{TOP}/.storage_alignment", str(ALIGNMENT).encode())
    archive.add(f"{TOP}/byteorder", b"little")
    for number, path in enumerate(plan.stored):
        leaf = plan.tree[path]
        assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors are given a storage
        archive.add(f"{TOP}/data/{number}", tensor_bytes.exact_part(leaf, path))
    archive.add(f"{TOP}/version", b"3\n")
    archive.add(f"{TOP}/.data/serialization_id", _archive_identity(archive.checksums))
    archive.close()


def _archive_identity(checksums: tuple[int, ...]) -> bytes:
    # torch writes two 20-digit numbers computed from the members' names and checksums.
    packed = struct.pack(f"<{len(checksums)}I", *checksums)
    return f"{zlib.crc32(packed):020d}{zlib.adler32(packed):020d}".encode()


@dataclass(slots=True)
class NestedNode:
    """One place in the tree: its value, or its children."""

    path: Path
    leaf: Leaf | ValueLeaf | None = None
    canonical: Path = ()
    children: dict[PathStep, NestedNode] = field(default_factory=dict)


class PicklePlan:
    """The nested values for the pickle, and the leaves that become storages, in order."""

    def __init__(self, tree: Tree) -> None:
        """Arrange the entries; raise UnsupportedError if two have one path, or one is inside another."""
        self.tree = tree
        self.root = NestedNode(())
        self.stored: dict[Path, int] = {}
        for path, leaf in tree.items():
            self._put(path, leaf, path)
        # A "module" is the class of an object, not how to build it: only its tensors can be written.
        self.containers = {path: c for path, c in tree.containers.items() if c.kind != "module"}
        for path in self.containers:
            self._at(path)
        for path, aliases in tree.aliases.items():
            for alias in aliases:
                self._put(alias.path, tree[path], path)

    def _at(self, path: Path) -> NestedNode:
        node = self.root
        for depth, step in enumerate(path):
            if node.leaf is not None:
                _raise_unsupported("a tensor or value contains other entries", node.path)
            if step not in node.children:
                node.children[step] = NestedNode(path[: depth + 1])
            node = node.children[step]
        return node

    def _put(self, path: Path, leaf: Leaf | ValueLeaf, canonical: Path) -> None:
        node = self._at(path)
        if node.leaf is not None or node.children:
            _raise_unsupported("two entries have the same path", path)
        node.leaf, node.canonical = leaf, canonical

    def value(self, node: NestedNode) -> Any:
        """Return the value at the node in the pickle's form."""
        if isinstance(node.leaf, Leaf):
            return self._tensor(node.leaf, node)
        if node.leaf is not None:
            return _plain(node.leaf, node.path)
        kind = self.containers.get(node.path) or infer_container(node)
        if kind.kind == "record" and kind.name not in _SETS:
            _raise_unsupported(f"objects of class {kind.name} cannot be written", node.path)
        if kind.kind in ("dict", "OrderedDict"):
            return self._dict(node, kind)
        items = [self.value(child) for child in order_entries(node)]
        if kind.kind == "record":
            return Set(str(kind.name), items)
        if kind.name == "torch.Size":
            return PickleObject(Global("torch", "Size"), (tuple(items),), 0)
        return tuple(items) if kind.kind == "tuple" else items

    def _dict(self, node: NestedNode, kind: Container) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        if kind.kind == "OrderedDict":
            items = Dict(_ORDERED)
            items.state = kind.state
        for step, child in node.children.items():
            items[step.value] = self.value(child)
        if len(items) != len(node.children):
            _raise_unsupported("two entries have keys that Python treats as equal", node.path)
        return items

    def _tensor(self, leaf: Leaf, node: NestedNode) -> PickleObject:
        row = dtypes.BY_NAME[leaf.dtype]
        if row.torch is None or not row.itemsize or row.torch.startswith(("qint", "quint")):
            _raise_unsupported(f"tensors of type {leaf.dtype} cannot be written to a PyTorch file", node.path)
        number = self.stored.setdefault(node.canonical, len(self.stored))
        call = _rebuild_call(leaf, row, str(number))
        if leaf.trainable is None:
            return call
        return PickleObject(_BUILD_PARAMETER, (call, leaf.trainable, Dict(_ORDERED)), 0)


def _rebuild_call(leaf: Leaf, row: dtypes.DType, key: str) -> PickleObject:
    # Types without their own storage class are bytes in torch, and v3 stores the type.
    typed = row.storage is not None
    kind = Global("torch", str(row.storage)) if typed else Global("torch.storage", "UntypedStorage")
    storage = PersistentId(("storage", kind, key, "cpu", leaf.size if typed else leaf.nbytes))
    args = (storage, 0, leaf.shape, _strides(leaf.shape), False, Dict(_ORDERED))
    if typed:
        return PickleObject(_BUILD_V2, args, 0)
    return PickleObject(_BUILD_V3, (*args, Global("torch", str(row.torch))), 0)


def _strides(shape: Shape) -> Shape:
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _raise_unsupported(message: str, path: Path) -> NoReturn:
    raise UnsupportedError(message, path=display(path))


def _plain(leaf: ValueLeaf, path: Path) -> Any:
    value = leaf.value
    if not isinstance(value, Record):
        return value
    module, _, name = value.name.rpartition(".")
    if module == "torch" and name in dtypes.BY_TORCH and not value.summary:
        return Global(module, name)
    _raise_unsupported(f"objects of class {value.name} cannot be written", path)


def infer_container(node: NestedNode) -> Container:
    """Return the container of a place for which the tree records none."""
    positions = {step.value for step in node.children if step.kind == "index"}
    # A list with missing items (such as layers without weights) keeps its numbers as keys.
    indexed = bool(positions) and positions == set(range(len(node.children)))
    return Container("list" if indexed else "dict")


def order_entries(node: NestedNode) -> list[NestedNode]:
    """Return the items of a list in order; raise UnsupportedError if one is missing."""
    items = {step.value: child for step, child in node.children.items()}
    if any(position not in items for position in range(len(items))):
        _raise_unsupported("a list's items are not numbered consecutively from 0", node.path)
    return [items[position] for position in range(len(items))]


TOP = "archive"
PICKLE = "data.pkl"


@dataclass(frozen=True, slots=True)
class UnpackedArchive:
    """The members under their names in the zip file; `file` is the pickle."""

    file: File
    members: Mapping[str, str]
    recorded: bool = False
    opened: dict[str, File] = field(default_factory=dict)

    def source(self, name: str) -> Span:
        """Return the member's bytes as an unread source; raise NotFoundError if the file has disappeared."""
        path = self.members.get(name)
        if path is None:
            raise FormatError(
                f"file {name.removeprefix(f'{TOP}/')!r} is missing from the folder", file=self.file.path
            )
        file = self.opened.setdefault(name, File.stamp(path))
        return Span(file, 0, file.size)


def find_data_folder(folder: str, names: frozenset[str]) -> str | None:
    """Return the folder with data.pkl: the given one, or the only entry in it; None if neither has it."""
    if PICKLE in names:
        return folder if filesystem.isfile(os.path.join(folder, PICKLE)) else None
    visible = [name for name in names if not name.startswith(".")]
    if len(visible) != 1:
        return None
    inner = os.path.join(folder, visible[0])
    return inner if filesystem.isfile(os.path.join(inner, PICKLE)) else None


def read_folder(folder: str) -> UnpackedArchive:
    """List the files of an unpacked archive; raise FormatError for a link that leads out of it.

    Source: torch/serialization.py (_save) for the members.
    """
    root = filesystem.realpath(folder)
    members = {f"{TOP}/{name}": os.path.join(folder, name) for name in _iter_files(folder, root)}
    return UnpackedArchive(File.stamp(os.path.join(folder, PICKLE)), members)


def _iter_files(folder: str, root: str, below: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the names (with slashes) of all plain files; only links inside `root` are followed."""
    if depth > limits.current().folder_depth:
        raise limits.limit_error("folder_depth", "folders are nested too deeply", None, file=folder)
    try:
        entries = sorted(filesystem.listdir(os.path.join(folder, below)))
    except OSError as error:
        raise NotFoundError(f"cannot open the folder: {error.strerror}", file=folder) from error
    for entry in entries:
        name = f"{below}{entry}"
        path = os.path.join(folder, name)
        if filesystem.islink(path):
            _check_link(path, root)
        if filesystem.isdir(path) and not filesystem.islink(path):
            yield from _iter_files(folder, root, f"{name}/", depth + 1)
        elif filesystem.isfile(path):
            yield name


def _check_link(path: str, root: str) -> None:
    target = filesystem.realpath(path)
    if not filesystem.is_within(target, root):
        raise FormatError("a symbolic link points outside the folder", file=path)
    if filesystem.path_kind(target) != "file":
        raise FormatError("a symbolic link does not point to a file", file=path)


_CLASS = deferred.compile(r"class (\w+)\(Module\):")
_NAMES = deferred.compile(r"  __(parameters|buffers)__ = \[(.*)\]")
_QUOTED = deferred.compile(r'"([^"\\]*)"')
# Only the first lines of a class are needed, and no real file comes near this limit.
_FILE, _ALL = 4 << 20, 64 << 20
# Limit on code whose steps are analysed (libraries/model_steps.py).
_FOLLOWED = 256 << 10
_CONSTANTS = attr("CONSTANTS")


def is_script(members: Collection[str], top: str) -> bool:
    """Return whether the archive under the folder `top` is TorchScript."""
    return f"{top}/constants.pkl" in members


def script_classes(
    members: Collection[str], top: str, source: Callable[[str], Storage]
) -> dict[str, ClassMembers]:
    """Return the parameters and buffers of each class in the archive's code.

    Sources: torch/csrc/jit/serialization/export_module.cpp (ScriptModuleSerializer: `data.pkl`,
    `constants.pkl`, `code/`, `bytecode.pkl`), python_print.cpp (`__parameters__`, `__buffers__`).
    """
    classes: dict[str, ClassMembers] = {}
    for module, code in _iter_code(members, top, source, _FILE, _ALL):
        _read_classes(code, module, classes)
    return classes


def _iter_code(
    members: Collection[str], top: str, source: Callable[[str], Storage], largest: int, most: int
) -> Iterator[tuple[str, str]]:
    """Yield name and code of each module, without files larger than `largest`, or beyond `most` bytes."""
    for name in _code_files(members, top):
        code = source(name) if name.endswith(".py") else None
        if code is not None and code.length <= min(largest, most):
            most -= code.length
            module = name.removeprefix(f"{top}/code/").removesuffix(".py").replace("/", ".")
            yield module, bytes(code.read()).decode("utf-8", "replace")


def _read_classes(text: str, module: str, classes: dict[str, ClassMembers]) -> None:
    name = ""
    for line in text.splitlines():
        begins = _CLASS.match(line)
        if begins is not None:
            name = f"{module}.{begins[1]}"
        names = _NAMES.match(line) if name else None
        if names is not None:
            class_names = frozenset(_QUOTED.findall(names[2]))
            before = classes.get(name, ClassMembers(frozenset(), None))
            classes[name] = before._replace(**{names[1]: class_names})


def _code_files(members: Collection[str], top: str) -> list[str]:
    return [name for name in members if name.startswith(f"{top}/code/")]


def script_facts(members: Collection[str], top: str, source: Callable[[str], Storage]) -> dict[str, Any]:
    """Return `code` and `extra`, the names and sizes of files, for a checkpoint's details."""
    facts = {}
    for kind in ("code", "extra"):
        names = [name for name in members if name.startswith(f"{top}/{kind}/")]
        facts[kind] = [
            {"name": name.removeprefix(f"{top}/"), "nbytes": source(name).length} for name in sorted(names)
        ]
    return facts


def note_script(members: Collection[str], top: str) -> tuple[str, ...]:
    """Return notes on the code, and on the interpreter it was compiled for."""
    files = sum(name.endswith(".py") for name in _code_files(members, top))
    text = [f"TorchScript code in {format_count(files, 'file')}, listed by --json; no code was run"]
    if f"{top}/bytecode.pkl" in members:
        text.append("bytecode for PyTorch's mobile interpreter, not listed")
    return tuple(text)


def add_constants(module: FileListing, constants: FileListing) -> FileListing:
    """Return the module's tree with the constants of its code, named as in the code: `CONSTANTS.c0`."""

    def placed(path: Path) -> Path:
        return (_CONSTANTS, attr(f"c{path[0].value}"), *path[1:])

    tree = constants.tree
    leaves: dict[Path, Leaf | ValueLeaf] = {
        placed(p): replace(leaf, key=dotted_name(placed(p)), role="other") if isinstance(leaf, Leaf) else leaf
        for p, leaf in tree.items()
        if p
    }
    if not leaves:
        return module
    whole = module.tree
    top = whole.leaves.get(())
    if isinstance(top, ValueLeaf) and isinstance(top.value, Record):
        # A frozen module has no attributes: its weights became constants of its code.
        rest = {path: leaf for path, leaf in whole.items() if path}
        whole = Tree(rest, {}, {(): Container("record", top.value.name)})
    aliases = {
        placed(p): tuple(Alias(placed(a.path), dotted_name(placed(a.path))) for a in others)
        for p, others in tree.aliases.items()
    }
    containers = {placed(p): c for p, c in tree.containers.items() if p}
    containers[_CONSTANTS,] = Container("record", "CONSTANTS")
    merged = Tree({**whole, **leaves}, {**whole.aliases, **aliases}, {**whole.containers, **containers})
    references = code_references.merge_references(module.code_references, constants.code_references)
    return replace(module, tree=merged, notes=(*module.notes, *constants.notes), code_references=references)


def audit_script(members: Collection[str], top: str) -> tuple[CodeReference, ...]:
    """Return the code files, which torch.jit.load compiles; it runs their `__setstate__`."""
    return tuple(
        CodeReference(name.removeprefix(f"{top}/"), CODE, by="torchscript")
        for name in _code_files(members, top)
        # Others are positions in the source (`.debug_pkl`), for error messages.
        if name.endswith(".py")
    )


# Other code that TorchScript's loaders run: the mobile interpreter's (torch/csrc/jit/mobile/import.cpp), and
# that of PyTorch 1.0 and 1.1 (torch/csrc/jit/serialization/import_legacy.cpp).
_PROGRAMS = ("bytecode.pkl", "model.json")


def audit_programs(members: Collection[str], top: str) -> tuple[CodeReference, ...]:
    """Return the members that one of torch's loaders runs, whichever other members the archive has."""
    return tuple(
        CodeReference(name, CODE, by="torchscript") for name in _PROGRAMS if f"{top}/{name}" in members
    )


def script_texts(members: Collection[str], top: str, source: Callable[[str], Storage]) -> dict[str, str]:
    """Return the archive's code by module name (`__torch__.torch.nn.functional`), unparsed.

    The code of a large file is omitted: no policy is that large.
    """
    return dict(_iter_code(members, top, source, _FOLLOWED, _FOLLOWED))


SET_NAME = "pytorch_set"
SET_TITLE = "PyTorch files of one agent with a common prefix"

_CRITICS = ("critic", *(f"{name}{number}" for name in ("critic_", "crtic_", "critic") for number in (1, 2)))
_MEMBERS = tuple(
    f"{network}{end}" for network in ("actor", *_CRITICS) for end in ("", "_target", "_optimizer")
)
_SUFFIXES = ("", ".pth", ".pt", ".pkl")
_ACTOR = deferred.compile(r"(.+)_actor(\.pth|\.pt|\.pkl)?")


def set_claims(probe: Probe) -> str | None:
    """Return the prefix if it is not a file, but an actor's and a critic's files begin with it.

    A folder stands for the only set that it contains.
    """
    if probe.kind == "missing":
        return probe.path if _is_set(_member_files(probe.path, probe.names)) else None
    return _find_only_set(probe.path, probe.names) if probe.kind == "folder" else None


def read_set(location: str) -> Checkpoint:
    """List all files of the set as one tree: each file's entries under its member's name.

    Native keys are `actor:l1.weight`. The format of each file is recognised from its bytes. Source of the
    names: github.com/sfujim/TD3, TD3.py, `TD3.save`; copies of it store two critics separately
    (`PREFIX_critic_1`) and also save the targets.
    """
    from ckpttool.formats.detect import open_checkpoint

    folder = os.path.dirname(location) or "."
    names = _member_files(location, frozenset(filesystem.listdir(folder)))
    return file_listing.join_checkpoints(
        location, SET_NAME, {member: open_checkpoint(file) for member, file in names.items()}
    )


def set_members(location: str) -> tuple[str, ...]:
    """Return the files in a complete set with this prefix."""
    return tuple(_member_files(location, Probe(location).names).values())


def set_prefix(path: str) -> str | None:
    """Return the prefix of the set whose actor the file is; None for any other file."""
    folder, name = os.path.split(path)
    match = _ACTOR.fullmatch(name)
    if match is None:
        return None
    prefix = os.path.join(folder, match[1])
    return prefix if set_claims(Probe(prefix)) == prefix else None


def set_pieces(tree: Tree) -> tuple[OutputFile, ...]:
    """Return a torch file for every member at the top of the tree, without a suffix, as TD3.save does.

    Raise UnsupportedError, before anything is written, for a tree that is not such a set, and for
    values that a torch pickle cannot contain.
    """
    return tuple(
        OutputFile(f"_{member}", piece.write)
        for member, one in _members(tree).items()
        for piece in pieces(one)
    )


def set_stored(tree: Tree) -> Tree:
    """Return the tree with the paths used when it is read back; raise UnsupportedError as `pieces` does."""
    parts = {key(member): stored(one) for member, one in _members(tree).items()}
    return join_trees(parts, file_listing.member_key, Container("dict"))


def _members(tree: Tree) -> Mapping[str, Tree]:
    """Return the files' trees by member name, in the order of `_MEMBERS`."""
    steps = {str(path[0].value) if len(path) > 1 else display(path): path[0] for path in tree if path}
    strange = [name for name in steps if name not in _MEMBERS]
    if strange or not _is_set(steps):
        raise UnsupportedError(
            "a set of files can only contain an actor, its critic, their targets and their optimizers",
            found=", ".join(map(repr, strange or steps)),
        )
    for path, others in tree.aliases.items():
        if any(alias.path[:1] != path[:1] for alias in others):
            raise UnsupportedError("two files cannot share a tensor", path=display(path))
    return {member: tree.below((steps[member],)) for member in _MEMBERS if member in steps}


def _is_set(members: Iterable[str]) -> bool:
    there = set(members)
    return "actor" in there and not there.isdisjoint(_CRITICS)


def _find_only_set(folder: str, names: frozenset[str]) -> str | None:
    stems = {match[1] for name in names if (match := _ACTOR.fullmatch(name)) and not name.startswith(".")}
    sets = (stem for stem in sorted(stems) if _is_set(_member_files(os.path.join(folder, stem), names)))
    first, more = next(sets, None), next(sets, None)
    return os.path.join(folder, first) if first is not None and more is None else None


def _member_files(prefix: str, names: frozenset[str]) -> dict[str, str]:
    """Return the set's files by member: regular files only, so that no folder can contain itself."""
    folder, stem = os.path.split(prefix)
    files = {
        member: os.path.join(folder, f"{stem}_{member}{suffix}")
        for member in _MEMBERS
        for suffix in reversed(_SUFFIXES)
        if f"{stem}_{member}{suffix}" in names
    }
    return {member: file for member, file in files.items() if filesystem.isfile(file)}


PYTORCH_SET = WritingFormatDefinition(
    NAME=SET_NAME,
    TITLE=SET_TITLE,
    FRAMEWORK=FRAMEWORK,
    claims=set_claims,
    read=read_set,
    pieces=set_pieces,
    stored=set_stored,
    members=set_members,
)
