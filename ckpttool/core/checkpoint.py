"""Checkpoint and its Python API: tensors by name, modules as mappings."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import MissingExtraError, NameNotFoundError, UnsupportedError, abbreviate_list
from ckpttool.core.source import (
    DeflatedSpan,
    File,
    Inline,
    KeptSource,
    Shape,
    Source,
    Span,
    StoragePart,
    StridedView,
    TransformedSource,
    as_array,
    gather_bytes,
    iter_pieces,
)
from ckpttool.core.text import clean, compile_glob, format_count, format_size, shorten
from ckpttool.core.tree import Leaf, Path, Plain, Role, Tree, ValueLeaf, display, iter_modules, suggest_names

if TYPE_CHECKING:
    import torch


# Code references of a file: names to import, functions to call, code; each with a verdict.
#
# The file is only read: nothing is imported, called or compiled.

# Plain data is rebuilt here as data, or is a data class of the standard library. Classes are names outside
# the standard library that are only imported, or known to create nothing but data. An unknown class is one
# of which an instance is created: its own code runs. Code acts by itself.
Verdict = Literal["plain data", "needs classes", "unknown class", "would run code"]
PLAIN: Verdict = "plain data"
CLASSES: Verdict = "needs classes"
UNKNOWN: Verdict = "unknown class"
CODE: Verdict = "would run code"
VERDICTS = (PLAIN, CLASSES, UNKNOWN, CODE)  # from harmless to dangerous
_RANK = {verdict: rank for rank, verdict in enumerate(VERDICTS)}
# Verdicts that fail a check: what an allow list does not name.
UNSAFE = frozenset((UNKNOWN, CODE))

# Loader that would import or run it: an unpickler, Keras, TorchScript's interpreter, TensorFlow's runtime,
# onnxruntime; for a program or library inside an archive, whatever unpacks it.
By = Literal["pickle", "keras", "torchscript", "tensorflow", "onnx", "program"]


@dataclass(frozen=True, slots=True)
class CodeReference:
    """One name that a file refers to.

    `calls` is the number of calls (0: only referenced), `offset` its first occurrence, in bytes of
    the file or of the member `where` (None: the file itself, or no bytes of any file).
    """

    name: str
    verdict: Verdict
    calls: int = 0
    offset: int | None = None
    where: str | None = None
    by: By = "pickle"

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def merge_references(*groups: Iterable[CodeReference]) -> tuple[CodeReference, ...]:
    """Merge the records of a checkpoint: one per name, with the worst verdict and its first occurrence."""
    found: dict[str, CodeReference] = {}
    for group in groups:
        for each in group:
            known = found.get(each.name)
            if known is None:
                found[each.name] = each
                continue
            worse = each if _RANK[each.verdict] > _RANK[known.verdict] else known
            found[each.name] = replace(worse, calls=known.calls + each.calls)
    return tuple(found.values())


def relocate_references(references: Iterable[CodeReference], where: str) -> tuple[CodeReference, ...]:
    """Return the records with their locations in the member or file `where`."""
    return tuple(replace(each, where=f"{where}/{each.where}" if each.where else where) for each in references)


def worse_verdict(one: Verdict, other: Verdict) -> Verdict:
    """Return the worse of two verdicts."""
    return one if _RANK[one] >= _RANK[other] else other


# Names of pickles that the user allows besides the built-in list.
_ALLOWED: ContextVar[frozenset[str]] = ContextVar("allowed", default=frozenset())


@contextlib.contextmanager
def allowing(names: Iterable[str]) -> Iterator[None]:
    """Treat these names in pickles as known classes, in checkpoints that are opened meanwhile.

    Names are dotted: a module stands for everything in it.
    """
    token = _ALLOWED.set(_ALLOWED.get() | frozenset(names))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def apply_allowed(references: Iterable[CodeReference]) -> tuple[CodeReference, ...]:
    """Return the records, with the names that the user allows as known classes (see `allowing`)."""
    allowed = _ALLOWED.get()
    return tuple(
        replace(each, verdict=CLASSES)
        if each.by == "pickle" and each.verdict in UNSAFE and _is_allowed(each.name, allowed)
        else each
        for each in references
    )


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if name in allowed:
        return True
    steps = name.split(".")
    known = next((end for end in range(1, len(steps)) if ".".join(steps[:end]) in allowed), None)
    # A module that the allowed one imports is not part of it: `my_project.os.system`.
    return known is not None and not any(
        step in sys.stdlib_module_names or step.startswith("__") for step in steps[known:]
    )


def worst_verdict(references: Iterable[CodeReference]) -> Verdict:
    """Return the worst verdict; a file without references is plain data."""
    return max((each.verdict for each in references), key=lambda each: _RANK[each], default=PLAIN)


def filter_verdict(references: Iterable[CodeReference], wanted: Verdict) -> list[CodeReference]:
    """Return the records with one verdict."""
    return [each for each in references if each.verdict == wanted]


def unsafe_references(references: Iterable[CodeReference]) -> list[CodeReference]:
    """Return the records that fail a check."""
    return [each for each in references if each.verdict in UNSAFE]


def dangerous_calls(references: Iterable[CodeReference]) -> list[str]:
    """Return the names of dangerous functions that unpickling would call."""
    return [each.name for each in references if each.verdict == CODE and each.calls and each.by == "pickle"]


# The Checkpoint class.

Integrity = Literal["crc32c", "crc32", "none"]


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """Contents of one checkpoint.

    `path` is the resolved path (a TensorFlow prefix rather than its `.index`), `files` everything
    that was read or that contains tensor bytes, `writer` the writer that the file names, `integrity`
    the checksum that covers every tensor, `stored_nbytes` the size of the files, `notes` information
    for people. `details` are format-specific facts (a SavedModel's signatures), as JSON values;
    docs/json.md describes it. `code_references` is what loading by the format's own library would
    import, call or run; `unjudged` has a sentence for each part that may contain code and cannot be judged.

    A checkpoint is a mapping from names to tensors and plain values: see `root`.

    >>> import ckpttool
    >>> checkpoint = ckpttool.open("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt")
    >>> checkpoint["actor/l1/weight"]
    <Handle actor/l1/weight float32[64, 3] parameter>
    >>> checkpoint["actor"]
    <Branch actor: 6 tensors, 4,481 parameters, 17.9 kB>
    >>> checkpoint["total_it"], "critic/l9" in checkpoint
    (14000, False)
    """

    path: str
    format: str
    tree: Tree
    files: tuple[File, ...]
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    code_references: tuple[CodeReference, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def stored_nbytes(self) -> int:
        """Size of the checkpoint on disk in bytes."""
        return sum(file.size for file in self.files)

    @property
    def root(self) -> Branch:
        """The whole checkpoint as a mapping from names to handles and values (see Branch)."""
        return Branch(self.tree, file=self.path)

    def __getitem__(self, name: str) -> Any:
        """Return the entry of a name: the Handle of a tensor, a plain value, or the Branch of a module.

        Names are display paths ("policy/actor/l1/kernel"), aliases, and the framework's own keys. Raise
        NameNotFoundError, which is a KeyError, if no entry has the name.
        """
        return self.root[name]

    def __contains__(self, name: object) -> bool:
        """Return whether `[]` would find the name."""
        return name in self.root

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all tensors and values."""
        return iter(self.root)

    def __len__(self) -> int:
        """Return the number of tensors and values."""
        return len(self.tree)

    def keys(self) -> KeysView[str]:
        """Return the names of all tensors and values."""
        return self.root.keys()

    def values(self) -> ValuesView[Any]:
        """Return handles and plain values."""
        return self.root.values()

    def items(self) -> ItemsView[str, Any]:
        """Return names, each with its handle or plain value."""
        return self.root.items()

    def tensor(self, name: str) -> Handle:
        """Return the tensor with that name; raise NameNotFoundError if there is none."""
        return self.root.tensor(name)

    def module(self, name: str) -> Branch:
        """Return the module with that name; raise NameNotFoundError if there is none."""
        return self.root.module(name)

    def glob(self, pattern: str) -> dict[str, Any]:
        """Return the entries whose names match a pattern: `*` within a segment, `**` across segments."""
        return self.root.glob(pattern)

    @property
    def title(self) -> str:
        """Return a one-line summary: location, format, counts and sizes."""
        return f"Checkpoint {clean(self.path)} ({self.format}): {self.root.summary}"

    def __repr__(self) -> str:
        return f"<{self.title}>"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Render the modules with their totals as a folded tree for a terminal (rich)."""
        for line in render_lines(self.title, self.root.listed(), options.max_width):
            yield console.render_str(line, markup=False, emoji=False, highlight=False)

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: a tree to unfold, with every name escaped as text."""
        return render_branch(self.title, self.root.listed())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that a notebook completes after `[`."""
        return self.root._ipython_key_completions_()


# Memory limit for the networks' tensors of one checkpoint while several readers use them in turn.
_KEPT_NBYTES = 8 << 20
_KEPT_ROLES: tuple[Role, ...] = ("parameter", "buffer", "counter")
_SCALARS_NBYTES = 64  # optimizer hyperparameters that several slots need


def keep_network_reads(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a cache of the networks' tensors.

    A conversion reads them for the digest, to write them and to compare outputs. The smallest
    tensors are kept, up to 8 MiB in all; optimizer slots and replay buffers are read again.
    """
    kept, room = {}, _KEPT_NBYTES
    for path, leaf in sorted(checkpoint.tree.tensors(), key=lambda each: each[1].nbytes):
        if leaf.nbytes <= (room if leaf.role in _KEPT_ROLES else _SCALARS_NBYTES):
            room -= leaf.nbytes
            kept[path] = replace(leaf, source=KeptSource(leaf.source))
    tree = checkpoint.tree
    leaves = {path: kept.get(path, leaf) for path, leaf in tree.items()}
    return replace(checkpoint, tree=Tree(leaves, tree.aliases, tree.containers))


# Slices of unread tensors as unread tensors: only the range that the slice spans is read.

_STORAGES = (Span, DeflatedSpan, StoragePart, Inline)


@dataclass(frozen=True, slots=True)
class AxisRange:
    """Selection along one axis: `count` elements from `start`, every `step`-th.

    `dropped` means that the index was a number.
    """

    start: int
    step: int
    count: int
    dropped: bool = False

    @property
    def slice(self) -> slice | int:
        """Return the equivalent Python index; a stop before the first element has no number in Python."""
        if self.dropped:
            return self.start
        stop = self.start + self.step * self.count
        return slice(self.start, stop if stop >= 0 else None, self.step) if self.count else slice(0)


class SliceOp(NamedTuple):
    """Slice an array that has been read (a source.Op)."""

    axes: tuple[AxisRange, ...]

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the dtype and shape of the slice."""
        del shape
        return dtype, sliced_shape(self.axes)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the slice."""
        taken: np.ndarray = np.asarray(array[tuple(axis.slice for axis in self.axes)])
        return taken


class StringSlice(NamedTuple):
    """A selection of a tensor's strings; all are read, since each begins where the previous one ends."""

    base: Leaf
    axes: tuple[AxisRange, ...]

    def read(self) -> bytes:
        """Return the selected strings, each after its length."""
        whole = np.empty(self.base.size, object)
        whole[:] = self.base.strings()
        taken = SliceOp(self.axes).apply(whole.reshape(self.base.shape)).reshape(-1)
        return b"".join(len(each).to_bytes(8, "little") + each for each in taken)


def slice_leaf(leaf: Leaf, index: object) -> Leaf:
    """Return the leaf for `leaf[index]`, where the index consists of numbers, slices and `...`.

    Raise IndexError for a number out of bounds or more indices than axes, and TypeError for any
    other index.
    """
    axes = _parse_index(index, leaf.shape)
    return replace(leaf, shape=sliced_shape(axes), source=_slice_source(leaf, axes))


def sliced_shape(axes: tuple[AxisRange, ...]) -> Shape:
    """Return the resulting shape."""
    return tuple(axis.count for axis in axes if not axis.dropped)


def _slice_source(leaf: Leaf, axes: tuple[AxisRange, ...]) -> Source:
    if leaf.dtype == "string":
        return StringSlice(leaf, axes)
    whole = _view_source(leaf)
    if whole is None or any(axis.step < 0 for axis in axes):
        return TransformedSource(leaf.source, leaf.dtype, leaf.shape, SliceOp(axes))
    steps = list(zip(axes, whole.strides, strict=True))
    return whole._replace(
        shape=sliced_shape(axes),
        strides=tuple(axis.step * stride for axis, stride in steps if not axis.dropped),
        offset=whole.offset + sum(axis.start * stride for axis, stride in steps),
    )


def _view_source(leaf: Leaf) -> StridedView | None:
    """Return the leaf's source as a storage view that can be read in part, or None if impossible."""
    source: object = leaf.source
    if isinstance(source, StridedView):
        return source
    if not isinstance(source, _STORAGES) or not leaf.size:
        return None
    strides = tuple(math.prod(leaf.shape[axis + 1 :]) for axis in range(len(leaf.shape)))
    return StridedView(source, dtypes.BY_NAME[leaf.dtype].itemsize, leaf.shape, strides, 0)


def _parse_index(index: object, shape: Shape) -> tuple[AxisRange, ...]:
    given = list(index) if isinstance(index, tuple) else [index]
    rest = [at for at, each in enumerate(given) if each is Ellipsis]
    if len(rest) > 1:
        raise IndexError("an index can have only one ellipsis (...)")
    free = len(shape) - len(given) + len(rest)
    if free < 0:
        many = format_count(len(given) - len(rest), "index is", "indices are")
        raise IndexError(f"{many} too many for {format_count(len(shape), 'axis', 'axes')}")
    at = rest[0] if rest else len(given)
    given[at : at + 1] = [slice(None)] * free
    return tuple(
        _parse_axis_index(each, extent, n) for n, (each, extent) in enumerate(zip(given, shape, strict=True))
    )


def _parse_axis_index(given: object, extent: int, number: int) -> AxisRange:
    if isinstance(given, slice):
        start, stop, step = given.indices(extent)
        return AxisRange(start, step, len(range(start, stop, step)))
    try:
        at = None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]  # it refuses what has none
    except TypeError:
        at = None
    if at is None:
        raise TypeError(
            "an unread tensor supports only integers, slices and ... as indices, not "
            f"{type(given).__name__}: call numpy() first to use other indices"
        )
    if not -extent <= at < extent:
        raise IndexError(f"index {at} is out of bounds for axis {number} with size {extent}")
    return AxisRange(at % extent, 1, 1, dropped=True)


# Tensors by name: metadata at once, values on request, whole or in part.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Handle:
    """One unread tensor. `name` is its own name, `aliases` are all other names of the same storage.

    >>> import ckpttool
    >>> kernel = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")["policy/actor/l1/kernel"]
    >>> kernel
    <Handle policy/actor/l1/kernel float32[3, 64] parameter>
    >>> kernel.nbytes, kernel.key
    (768, 'policy/actor/l1/_kernel/.ATTRIBUTES/VARIABLE_VALUE')
    >>> kernel[:2, 10:40:10].numpy().shape
    (2, 3)
    """

    name: str
    leaf: Leaf
    aliases: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self.leaf.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.leaf.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.leaf.size

    @property
    def dtype(self) -> str:
        """Element type, such as "float32" or "bfloat16" (ckpttool.core.dtypes)."""
        return self.leaf.dtype

    @property
    def nbytes(self) -> int:
        """Size of the value in bytes; 0 for strings, which have no fixed size."""
        return self.leaf.nbytes

    @property
    def key(self) -> str:
        """Name of the tensor in the owning framework."""
        return self.leaf.key

    @property
    def role(self) -> Role:
        """Role of the tensor: a parameter, a buffer, an optimizer slot, a counter, ..."""
        return self.leaf.role

    @property
    def trainable(self) -> bool | None:
        """Whether the tensor is trainable; None if the file does not record it."""
        return self.leaf.trainable

    def numpy(self) -> np.ndarray:
        """Read the value into a new array; strings as `bytes` objects.

        Raise UnsupportedError for a type without numbers in NumPy (with ml_dtypes), FormatError for
        damaged bytes, ChangedError if the file changed after it was listed.
        """
        if self.leaf.dtype == "string":
            words = np.empty(self.leaf.size, object)
            words[:] = self.leaf.strings()
            return words.reshape(self.shape)
        dtypes.numpy_dtype(self.leaf.dtype)  # before anything is read
        return as_array(read_writable(self.leaf).data, self.leaf.dtype, self.leaf.shape)

    def torch(self, device: Any = None) -> torch.Tensor:
        """Read the value into a torch.Tensor with its own memory, on `device` if given.

        Raise UnsupportedError for a type that PyTorch lacks (strings), MissingExtraError without
        PyTorch.
        """
        made = to_torch(self.leaf)
        return made if device is None else made.to(device)

    def tf(self) -> Any:
        """Read the value into a tf.Tensor, including strings.

        Raise UnsupportedError for a type that TensorFlow lacks, MissingExtraError without TensorFlow.
        """
        return to_tensorflow(self)

    def item(self) -> Any:
        """Read a one-element tensor as a plain Python value; raise ValueError for more elements."""
        return self.numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the value for NumPy functions; `copy=False` is rejected, since reading creates an array."""
        if copy is False:
            raise ValueError("reading a tensor creates an array, so copy=False is not supported")
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Handle:
        """Return an unread part of the tensor, selected by numbers, slices (with steps) and `...`.

        For a tensor that a file stores as it is, only the bytes that the part spans are read; where a
        checksum covers more bytes than these, all of them are read and verified, once. Raise IndexError
        and TypeError as NumPy does.
        """
        return replace(self, leaf=slice_leaf(self.leaf, index))

    def __iter__(self) -> Iterator[Handle]:
        """Iterate over the first axis; raise TypeError for a tensor without axes."""
        if not self.shape:
            raise TypeError("cannot iterate over a tensor without axes")
        return (self[at] for at in range(self.shape[0]))

    def __repr__(self) -> str:
        extents = ", ".join(map(str, self.shape))
        return f"<Handle {clean(self.name)} {self.dtype}[{extents}] {self.role}>"

    def __rich_repr__(self) -> Iterator[Any]:
        """Render the handle for a terminal (rich)."""
        yield self.name
        yield "dtype", self.dtype
        yield "shape", self.shape
        yield "role", self.role
        yield "key", self.key, self.name
        yield "aliases", self.aliases, ()

    def _repr_html_(self) -> str:
        """Return the HTML of a handle for a notebook, with every name escaped as text."""
        return render_handle(self)


def read_writable(leaf: Leaf) -> np.ndarray:
    """Read a leaf's bytes into new writable memory: uint8 [nbytes]; large data is in memory only once.

    Raise FormatError unless the source returns all of them.
    """
    return gather_bytes(iter_pieces(leaf.source), leaf.nbytes)


# Modules as mappings from names to handles and plain values.

_LONGEST = 200
_SHOWN = 12
# Prefix of exact names (leaf.exact).
_EXACT = (".", "[")


class Branch(Mapping[str, Any]):
    """A module of a checkpoint, or the whole checkpoint: a mapping in file order.

    Iteration yields the names of tensors and values; `[]` and `in` also accept modules ("l1"),
    aliases, native keys and dotted names.

    >>> import ckpttool
    >>> actor = ckpttool.open("sample_ckpts/td3_pendulum_tf/ckpt-15000")["policy/actor"]
    >>> list(actor)[:2]
    ['l1/kernel', 'l1/bias']
    >>> actor["l1"]
    <Branch policy/actor/l1: 2 tensors, 256 parameters, 1.02 kB>
    >>> sum(handle.size for handle in actor.tensors().values())
    4481
    """

    def __init__(self, tree: Tree, name: str = "", file: str | None = None) -> None:
        """View the tree under `name`, by default the whole tree; `file` is for errors."""
        self.name = name
        self._tree, self._file = tree, file

    @cached_property
    def paths(self) -> Mapping[str, Path]:
        """Full path of every entry, by its name relative to this module."""
        names = self._tree.names
        if not self.name:
            return {shown: path for path, shown in names.items()}
        start = f"{self.name}/"
        found = {
            shown[len(start) :] if shown.startswith(start) else shown: path
            for path, shown in names.items()
            if shown.startswith(start) or (shown[:1] in _EXACT and display(path).startswith(start))
        }
        inside = set(found.values())
        for path, seconds in self._tree.aliases.items():
            for second in seconds:
                # Names without a path here, such as a weight that another module shares.
                if path not in inside and (shown := display(second.path)).startswith(start):
                    found.setdefault(shown[len(start) :], path)
                    inside.add(path)
        return found

    def tensor(self, name: str) -> Handle:
        """Return the tensor with that name; raise NameNotFoundError if there is none."""
        found = self[name]
        if not isinstance(found, Handle):
            message = f"{_quote_name(name)} is {_describe_kind(found)}, not a tensor"
            raise found._unknown("", message) if isinstance(found, Branch) else self._unknown(name, message)
        return found

    def module(self, name: str) -> Branch:
        """Return the module with that name; raise NameNotFoundError if there is none."""
        found = self[f"{name.rstrip('/')}/"]
        if not isinstance(found, Branch):
            raise self._unknown(name, f"{_quote_name(name)} is {_describe_kind(found)}, not a module")
        return found

    def tensors(self) -> dict[str, Handle]:
        """Return the tensors by their names relative to this module."""
        return {name: entry for name, entry in self.items() if isinstance(entry, Handle)}

    def plain(self) -> dict[str, Plain]:
        """Return the plain values by their names relative to this module."""
        return {name: entry for name, entry in self.items() if not isinstance(entry, Handle)}

    def modules(self) -> tuple[str, ...]:
        """Return the names of all submodules, outermost first."""
        return tuple(iter_modules(self.paths))

    def glob(self, pattern: str) -> dict[str, Any]:
        """Return the entries whose names match: `*` within a segment, `**` across segments.

        A pattern may begin at any segment: `actor/**` also finds `policy/actor/l1/kernel`.
        """
        keep = compile_glob(pattern)
        return {name: self._entry(path) for name, path in self.paths.items() if keep(name)}

    def __getitem__(self, name: str) -> Any:
        """Return a Handle, a plain value, or the Branch of a module; raise NameNotFoundError if none.

        A trailing slash selects the module where a tensor has the same name.
        """
        if not isinstance(name, str):
            raise TypeError(f"names of entries are strings, not {type(name).__name__}")
        found = self._meant(name)
        if found is None:
            raise self._unknown(name, f"no entry is named {_quote_name(name)}")
        if isinstance(found, str):
            return Branch(self._tree, found, self._file)
        if len(found) > 1:
            raise self._unknown(name, f"{len(found)} entries are named {_quote_name(name)}", found)
        return self._entry(found[0])

    def __contains__(self, name: object) -> bool:
        """Return whether one or more entries have the name."""
        return isinstance(name, str) and self._meant(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of tensors and values."""
        return iter(self.paths)

    def __len__(self) -> int:
        """Return the number of tensors and values."""
        return len(self.paths)

    def _meant(self, name: str) -> tuple[Path, ...] | str | None:
        """Return the paths of a name, or the full name of a module; None if nothing matches."""
        wanted = name.strip("/")
        for spelling in dict.fromkeys((name, wanted, wanted.replace(".", "/"))):
            whole = f"{self.name}/{spelling}".strip("/")
            # Display names and modules come first: the other names have to be collected.
            if not name.endswith("/") and (path := self._shown(spelling)) is not None:
                return (path,)
            if spelling and self._is_module(f"{whole}/"):
                return whole
            if not name.endswith("/") and (found := self._known(spelling)):
                return found
        return None

    def _shown(self, name: str) -> Path | None:
        return self.paths.get(name) if self.name else self._tree.naming.shown.get(name)

    def _is_module(self, start: str) -> bool:
        tree = self._tree
        if any(shown.startswith(start) for shown in tree.names.values()):
            return True
        seconds = (second.path for others in tree.aliases.values() for second in others)
        return any(display(path).startswith(start) for path in seconds)

    def _known(self, name: str) -> tuple[Path, ...]:
        naming = self._tree.naming
        if not self.name:
            return naming.find(name)
        # Native keys are global to the checkpoint.
        inside = set(self.paths.values())
        return naming.find(f"{self.name}/{name}") or tuple(p for p in naming.find(name) if p in inside)

    def listed(self) -> Iterator[tuple[str, Leaf | ValueLeaf]]:
        """Iterate over the leaves by their names relative to this module."""
        return ((name, self._tree[path]) for name, path in self.paths.items())

    def _entry(self, path: Path) -> Any:
        leaf = self._tree[path]
        if not isinstance(leaf, Leaf):
            return leaf.value
        names = (self._tree.alias_name(each) for each in self._tree.aliases.get(path, ()))
        return Handle(self._tree.names[path], leaf, tuple(names))

    def _unknown(self, name: str, message: str, several: tuple[Path, ...] = ()) -> NameNotFoundError:
        if several:
            hint = f"use a full name: {', '.join(clean(self._tree.names[path]) for path in several[:_SHOWN])}"
        elif close := suggest_names(name.strip("/"), [*self.paths, *self.modules()]):
            hint = f"did you mean {' or '.join(map(clean, close))}"
        else:
            tops = dict.fromkeys(each.partition("/")[0] for each in self.paths)
            hint = f"choose from {abbreviate_list([clean(each) for each in tops], _SHOWN)}"
        place = clean(self.name) or None
        return NameNotFoundError(message, file=self._file, path=place, hint=hint)

    def __repr__(self) -> str:
        return f"<Branch {clean(self.name) or '(all)'}: {self.summary}>"

    @property
    def summary(self) -> str:
        """Counts and sizes as text."""
        leaves = [leaf for path in self.paths.values() if isinstance(leaf := self._tree[path], Leaf)]
        parameters = sum(leaf.size for leaf in leaves if leaf.role == "parameter")
        words = [format_count(len(leaves), "tensor"), format_count(parameters, "parameter")]
        words.append(format_size(sum(leaf.nbytes for leaf in leaves)))
        plain = len(self) - len(leaves)
        return ", ".join(words if not plain else [*words, format_count(plain, "value")])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Render the modules with their totals as a folded tree for a terminal (rich)."""
        for line in render_lines(repr(self)[1:-1], self.listed(), options.max_width):
            yield console.render_str(line, markup=False, emoji=False, highlight=False)

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: a tree to unfold, with every name escaped as text."""
        return render_branch(repr(self)[1:-1], self.listed())

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that a notebook completes after `[`."""
        return [*self.modules(), *self]


def _quote_name(name: str) -> str:
    shown = clean(name)
    return repr(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}...")


def _describe_kind(entry: object) -> str:
    if isinstance(entry, Handle):
        return "a tensor"
    return "a module" if isinstance(entry, Branch) else "a plain value"


# Tree view of the modules under a branch: outermost first, unfolded as far as there is room.

# Rows that are readable in a terminal and in a notebook cell.
MOST = 48
_MAX_VALUE_TEXT = 120
Listed = tuple[str, Leaf | ValueLeaf]


@dataclass(slots=True)
class OutlineRow:
    """One row: its name, its leaf or the module's totals, and child rows; `more` counts omitted rows."""

    name: str
    leaf: Leaf | ValueLeaf | None = None
    below: dict[str, OutlineRow] = field(default_factory=dict)
    tensors: int = 0
    nbytes: int = 0
    more: int = 0

    @property
    def beside(self) -> str:
        """Text beside the name: a tensor's type and shape, a module's totals."""
        if self.leaf is None:
            return f"{format_count(self.tensors, 'tensor')}, {format_size(self.nbytes)}"
        if isinstance(self.leaf, ValueLeaf):
            value = self.leaf.value
            # A value can be a text of megabytes.
            return shorten(
                clean(repr(value[:_MAX_VALUE_TEXT] if isinstance(value, str | bytes) else value)),
                _MAX_VALUE_TEXT,
            )
        extents = ", ".join(map(str, self.leaf.shape))
        role = "" if self.leaf.role == "parameter" else f" {self.leaf.role}"
        return f"{self.leaf.dtype}[{extents}]{role}"


def build_outline(leaves: Iterable[Listed], most: int = MOST) -> OutlineRow:
    """Return the root row of named leaves with about `most` rows under it, outermost first."""
    root = OutlineRow("")
    for name, leaf in leaves:
        _add_leaf(root, name, leaf)
    room = most
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        shown = list(node.below)[: max(room, 0)]
        if node is not root and len(shown) < len(node.below):
            shown = []  # a module is unfolded completely or not at all
        node.more = len(node.below) - len(shown)
        node.below = {name: node.below[name] for name in shown}
        room -= len(shown)
        waiting.extend(node.below.values())
    return root


def _add_leaf(root: OutlineRow, name: str, leaf: Leaf | ValueLeaf) -> None:
    way = [root]
    for step in name.split("/"):
        if step not in way[-1].below:
            way[-1].below[step] = OutlineRow(step)
        way.append(way[-1].below[step])
    way[-1].leaf = leaf
    if isinstance(leaf, Leaf):
        for node in way:
            node.tensors += 1
            node.nbytes += leaf.nbytes


def render_lines(title: str, leaves: Iterable[Listed], width: int) -> Iterator[str]:
    """Yield the lines for a terminal of that width."""
    root = build_outline(leaves)
    yield shorten(clean(title), width)
    yield from _row_lines(root, "  ", width)


def _row_lines(node: OutlineRow, indent: str, width: int) -> Iterator[str]:
    for each in node.below.values():
        mark = "/" if each.below or each.more else ""
        yield shorten(f"{indent}{clean(each.name)}{mark}  {each.beside}", width)
        yield from _row_lines(each, f"{indent}  ", width)
    if node.more and not node.name:
        yield f"{indent}and {node.more:,} more"


# Notebook view of a checkpoint: HTML without scripts, with every name escaped as text.

_MAX_HTML_TEXT = 160
_ROW = '<div style="margin-left:1.2em">'
_BESIDE = '<span style="opacity:.7">'


def render_handle(shown: Handle) -> str:
    """Return a table of the tensor's facts."""
    facts = {
        "type": shown.dtype,
        "shape": "[" + ", ".join(map(str, shown.shape)) + "]",
        "bytes": f"{shown.nbytes:,}",
        "role": shown.role,
        "key": shown.key,
        "also": ", ".join(shown.aliases[:8]),
    }
    rows = "".join(
        f"<tr><th>{name}</th><td>{html_text(value)}</td></tr>" for name, value in facts.items() if value
    )
    return f"<table><caption>{html_text(shown.name)}</caption>{rows}</table>"


def render_branch(title: str, leaves: Iterable[Listed]) -> str:
    """Return the modules as a tree that unfolds without a script, limited to a few dozen rows."""
    root = build_outline(leaves)
    inside = "".join(_html_rows(root))
    return f"<details open><summary><b>{html_text(title)}</b></summary>{inside}</details>"


def _html_rows(node: OutlineRow) -> Iterator[str]:
    for each in node.below.values():
        sentence = f"<code>{html_text(each.name)}</code> {_BESIDE}{html_text(each.beside)}</span>"
        if each.below:
            inside = "".join(_html_rows(each))
            yield f"{_ROW}<details><summary>{sentence}</summary>{inside}</details></div>"
        else:
            yield f"{_ROW}{sentence}</div>"
    if node.more and not node.name:
        yield f"{_ROW}and {node.more:,} more</div>"


def html_text(text: str) -> str:
    """Return text from a file for HTML: escaped, without control characters, and shortened."""
    from html import escape  # only notebooks need it

    return escape(shorten(clean(text), _MAX_HTML_TEXT))


# Handle to tf.Tensor: the only place in this file that imports TensorFlow.


def to_tensorflow(handle: Handle) -> Any:
    """Read the handle's value into a tf.Tensor; quantized types as plain integers.

    Raise UnsupportedError for a type that this TensorFlow version lacks, MissingExtraError without
    TensorFlow.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtraError(
            "tf() needs TensorFlow, which is not installed", hint="pip install 'ckpttool[tensorflow]'"
        ) from error
    number = dtypes.BY_NAME[dtypes.plain_name(handle.dtype)].tensorflow
    missing = f"TensorFlow {tf.__version__} does not support tensors of type {handle.dtype}"
    if number is None:
        raise UnsupportedError(missing)
    value = handle.numpy()
    try:
        return tf.convert_to_tensor(value, dtype=tf.dtypes.as_dtype(number))
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise UnsupportedError(missing) from error


# Leaf to torch.Tensor: the only place in this file that imports PyTorch.


def to_torch(leaf: Leaf) -> torch.Tensor:
    """Read the leaf into a CPU tensor with its own memory; quantized types as plain integers.

    Raise UnsupportedError for a type that this PyTorch version lacks, MissingExtraError without
    PyTorch.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "torch() needs PyTorch, which is not installed", hint="pip install 'ckpttool[torch]'"
        ) from error
    name = dtypes.plain_name(leaf.dtype)
    kind = getattr(torch, dtypes.BY_NAME[name].torch or "", None)
    if kind is None or name in dtypes.PACKED:
        raise UnsupportedError(f"PyTorch {torch.__version__} does not support tensors of type {leaf.dtype}")
    if not leaf.size:
        return torch.empty(leaf.shape, dtype=kind)
    # The tensor takes over the array's memory.
    return torch.frombuffer(read_writable(leaf), dtype=kind).reshape(leaf.shape)
