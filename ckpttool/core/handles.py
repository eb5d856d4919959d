"""Tensors by name and modules as mappings: metadata at once, values on request, whole or in part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ckpttool.core import dtypes
from ckpttool.core.deferred import dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    MissingExtraError,
    NameNotFoundError,
    UnsupportedError,
    abbreviate_list,
    did_you_mean,
)
from ckpttool.core.slices import slice_leaf
from ckpttool.core.source import Shape, as_array, gather_bytes, iter_pieces
from ckpttool.core.text import clean, compile_glob, format_count, format_size
from ckpttool.core.tree import Leaf, Path, Plain, Role, Tree, ValueLeaf, display, iter_modules, suggest_names
from ckpttool.core.tree_views import render_branch, render_handle, render_lines

if TYPE_CHECKING:
    import torch


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
        tensor = to_torch(self.leaf)
        return tensor if device is None else tensor.to(device)

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
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

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
        paths = {
            shown[len(start) :] if shown.startswith(start) else shown: path
            for path, shown in names.items()
            if shown.startswith(start) or (shown[:1] in _EXACT and display(path).startswith(start))
        }
        inside = set(paths.values())
        for path, seconds in self._tree.aliases.items():
            for second in seconds:
                # Names without a path here, such as a weight that another module shares.
                if path not in inside and (shown := display(second.path)).startswith(start):
                    paths.setdefault(shown[len(start) :], path)
                    inside.add(path)
        return paths

    def tensor(self, name: str) -> Handle:
        """Return the tensor with that name; raise NameNotFoundError if there is none."""
        entry = self[name]
        if not isinstance(entry, Handle):
            message = f"{_quote_name(name)} is {_describe_kind(entry)}, not a tensor"
            raise entry._unknown("", message) if isinstance(entry, Branch) else self._unknown(name, message)
        return entry

    def module(self, name: str) -> Branch:
        """Return the module with that name; raise NameNotFoundError if there is none."""
        branch = self[f"{name.rstrip('/')}/"]
        if not isinstance(branch, Branch):
            raise self._unknown(name, f"{_quote_name(name)} is {_describe_kind(branch)}, not a module")
        return branch

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
        paths = self._meant(name)
        if paths is None:
            raise self._unknown(name, f"no entry is named {_quote_name(name)}")
        if isinstance(paths, str):
            return Branch(self._tree, paths, self._file)
        if len(paths) > 1:
            raise self._unknown(name, f"{len(paths)} entries are named {_quote_name(name)}", paths)
        return self._entry(paths[0])

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
        stripped = name.strip("/")
        for spelling in dict.fromkeys((name, stripped, stripped.replace(".", "/"))):
            whole = f"{self.name}/{spelling}".strip("/")
            # Display names and modules come first: the other names have to be collected.
            if not name.endswith("/") and (path := self._shown(spelling)) is not None:
                return (path,)
            if spelling and self._is_module(f"{whole}/"):
                return whole
            if not name.endswith("/") and (paths := self._known(spelling)):
                return paths
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
        names = (self._tree.alias_name(alias) for alias in self._tree.aliases.get(path, ()))
        return Handle(self._tree.names[path], leaf, tuple(names))

    def _unknown(self, name: str, message: str, several: tuple[Path, ...] = ()) -> NameNotFoundError:
        if several:
            hint = f"use a full name: {', '.join(clean(self._tree.names[path]) for path in several[:_SHOWN])}"
        elif close := suggest_names(name.strip("/"), [*self.paths, *self.modules()]):
            hint = did_you_mean(*map(clean, close))
        else:
            tops = dict.fromkeys(path.partition("/")[0] for path in self.paths)
            hint = f"choose from {abbreviate_list([clean(top) for top in tops], _SHOWN)}"
        location = clean(self.name) or None
        return NameNotFoundError(message, file=self._file, path=location, hint=hint)

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


def to_tensorflow(handle: Handle) -> Any:
    """Read the handle's value into a tf.Tensor; quantized types as plain integers.

    Raise UnsupportedError for a type that this TensorFlow version lacks, MissingExtraError without
    TensorFlow.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        from ckpttool.core.installation import install_extra

        raise MissingExtraError(
            "tf() needs TensorFlow, which is not installed", hint=install_extra("tensorflow")
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


def to_torch(leaf: Leaf) -> torch.Tensor:
    """Read the leaf into a CPU tensor with its own memory; quantized types as plain integers.

    Raise UnsupportedError for a type that this PyTorch version lacks, MissingExtraError without
    PyTorch.
    """
    try:
        import torch
    except ImportError as error:
        from ckpttool.core.installation import install_extra

        raise MissingExtraError(
            "torch() needs PyTorch, which is not installed", hint=install_extra("torch")
        ) from error
    name = dtypes.plain_name(leaf.dtype)
    kind = getattr(torch, dtypes.BY_NAME[name].torch or "", None)
    if kind is None or name in dtypes.PACKED:
        raise UnsupportedError(f"PyTorch {torch.__version__} does not support tensors of type {leaf.dtype}")
    if not leaf.size:
        return torch.empty(leaf.shape, dtype=kind)
    # The tensor takes over the array's memory.
    return torch.frombuffer(read_writable(leaf), dtype=kind).reshape(leaf.shape)
