"""Trees of pickled objects."""

from __future__ import annotations

import binascii
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ckpttool.core import dtypes, limits, text
from ckpttool.core.code_references import CodeReference, merge_references, relocate_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, FormatError, UnsupportedError
from ckpttool.core.source import File, Inline, Source, Span, Storage
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
    display_exact,
    index,
    key,
)
from ckpttool.encodings import pickle_values
from ckpttool.encodings.pickle_values import (
    CONTAINERS,
    Array,
    ArrayContents,
    Builder,
    Dict,
    Global,
    OpaqueKey,
    PickledDType,
    PickleObject,
    Set,
    StoredBytes,
    is_plain,
)
from ckpttool.formats import pickle_signatures, tensor_bytes
from ckpttool.formats.name_roles import TensorRole, dotted_name

if TYPE_CHECKING:
    from ckpttool.encodings import pickle_reader


PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
KEYS = frozenset((str, int, float, bool, type(None)))
_SUMMARY = 200
_SHOWN = 32  # displayed arguments of a call


def key_step(name: Any, position: int) -> PathStep:
    """Return the path step for a dict's key number `position`; a label if a path cannot hold the key."""
    if type(name) in KEYS:
        return key(name)
    if type(name) is OpaqueKey and is_plain(name.value):
        # As text: the hashes of paths must not collide, either.
        return key(repr(name.value))
    if isinstance(name, Global):
        return key(name.full)
    if isinstance(name, bytes | tuple):
        text = repr(name[: _SUMMARY + 1])
        # Two long keys may have the same start.
        return key(text if len(text) <= _SUMMARY else f"{text[:_SUMMARY]}... {position}")
    inner = name.value if isinstance(name, OpaqueKey) else name
    return key(f"<{inert_record(inner).name} {position}>")


def is_leaf(value: PickleObject) -> bool:
    """Return whether the object needs no separate lines for its parts."""
    if value.state or value.items or value.entries or value.kwargs:
        return False
    if len(value.args) > _SHOWN:
        return False
    return is_code(value) or all(type(arg) in PLAIN or isinstance(arg, Global) for arg in value.args)


def is_code(value: PickleObject) -> bool:
    """Return whether the object is a function's code, as in cloudpickle (`_builtin_type("CodeType")`)."""
    kind = value.function
    return isinstance(kind, PickleObject) and kind.args == ("CodeType",)


def inert_record(value: Any) -> Record:
    """Return the class of an unbuilt value, and its description in one line."""
    if isinstance(value, Global):
        return Record(value.full)
    if isinstance(value, PickleObject) and is_code(value):
        texts = [arg for arg in value.args[:_SHOWN] if type(arg) is str]
        return Record("types.CodeType", ", ".join(text[:_SUMMARY] for text in reversed(texts[:2]))[:_SUMMARY])
    if isinstance(value, PickleObject):
        return Record(value.name, ", ".join(_argument_text(arg) for arg in value.args[:_SHOWN])[:_SUMMARY])
    if isinstance(value, PickledDType):
        return Record("numpy.dtype", value.code)
    if isinstance(value, StoredBytes):
        return Record("bytes", f"{len(value):,} bytes")
    return Record(type(value).__name__)


def _argument_text(value: Any) -> str:
    if isinstance(value, Global):
        return value.full
    return repr(value[:_SUMMARY] if isinstance(value, str | bytes) else value)


# Shorter arrays are stored in the tree: a span would need as much memory.
_INLINE = 64


def _scalar_array(args: tuple[Any, ...]) -> object:
    """Convert a NumPy scalar to an array without dimensions, to keep its type (e.g. rank-0 variables)."""
    kind, data = pickle_values.scalar_parts(args)
    known = isinstance(kind, PickledDType) and kind.name is not None
    return pickle_values.make_array(1, (), kind, False, data) if known else NotImplemented


def _rebuild_jax_array(args: tuple[Any, ...]) -> object:
    """Return the array that JAX rebuilds: as NumPy does, from the same four parts, plus its own facts."""
    return pickle_values.make_array(*args[2]) if len(args) == 4 and type(args[2]) is tuple else NotImplemented


def _set_state(args: tuple[Any, ...]) -> object:
    """Attach the attributes that cloudpickle sets on a function or class by a call with unused result."""
    if len(args) == 2 and isinstance(args[0], PickleObject) and args[0].state is None:
        args[0].state = args[1]
    return NotImplemented


BUILDERS: Mapping[str, Builder] = {
    **CONTAINERS,
    **pickle_values.BUILDERS,
    "numpy.core.multiarray.scalar": _scalar_array,
    "numpy._core.multiarray.scalar": _scalar_array,
    # jax/_src/array.py, ArrayImpl.__reduce__
    "jax._src.array._reconstruct_array": _rebuild_jax_array,
    # cloudpickle/cloudpickle.py, _dynamic_function_reduce; RLlib has its own copy.
    **{
        f"{home}.{name}": _set_state
        for home in (
            "cloudpickle.cloudpickle",
            "cloudpickle.cloudpickle_fast",
            "ray.cloudpickle.cloudpickle",
            "ray.cloudpickle.cloudpickle_fast",
        )
        for name in ("_function_setstate", "_class_setstate")
    },
}


class LoadedPickle(NamedTuple):
    """A pickle's value and its location; `file` is None if the pickle is not stored verbatim in a file.

    `asked` is what unpickling would import and call; the caller that lists the value reports it.
    """

    value: Any
    size: int
    file: File | None
    base: int
    code_references: tuple[CodeReference, ...] = ()


def load_pickle_file(file: File, more: Mapping[str, Builder] = MappingProxyType({})) -> LoadedPickle:
    """Return the value of a single-pickle file; the bytes are read once, arrays are not copied.

    `more` are additional builders of calls, besides those of plain data and NumPy.
    """
    data = file.read(0, file.size)
    builders = {**BUILDERS, **more}
    try:
        return load_pickle(data, file, builders=builders)
    except FormatError as error:
        if pickle_signatures.JOBLIB in data[: 1 << 16]:
            try:
                return _load_joblib(data, file, builders)
            except CkpttoolError:
                raise UnsupportedError(
                    "this is a joblib file whose arrays cannot be read in place",
                    file=file.path,
                    hint="if you trust the file, load it with joblib.load and save its arrays with "
                    "numpy.savez",
                ) from error
        raise


# The bytes of joblib's arrays follow the opcodes that describe them (joblib/numpy_pickle.py,
# NumpyArrayWrapper.read_array and NumpyUnpickler.load_build).
_WRAPPER = "joblib.numpy_pickle.NumpyArrayWrapper"
_BUILD = ord("b")
_PADDED = "numpy_array_alignment_bytes"


def scan_joblib(data: bytes) -> pickle_reader.PickleScan:
    """Scan a pickle of joblib, past the arrays between its opcodes, as far as it is valid; never raise."""
    from ckpttool.encodings import pickle_reader

    machine = pickle_reader.PickleMachine(
        data, OpaqueKey, {**CONTAINERS, **pickle_values.BUILDERS}, sys.maxsize, None, 0
    )
    nested: list[CodeReference] = []
    try:
        value = machine.run(_joblib_table(nested))
    except CkpttoolError:
        references = merge_references(machine.list_code_references(), nested)
        return pickle_reader.PickleScan(None, None, references, cut=False)
    references = merge_references(machine.list_code_references(), nested)
    return pickle_reader.PickleScan(value, machine.position, references, cut=False)


def _load_joblib(data: bytes, file: File, builders: Mapping[str, Builder]) -> LoadedPickle:
    """Return the value of an uncompressed file of joblib, whose arrays stay where they are."""
    from ckpttool.encodings import pickle_reader

    machine = pickle_reader.PickleMachine(data, None, builders, _INLINE, file.path, 0)
    value = machine.run(_joblib_table(None))
    if machine.position != len(data):
        machine.fail("extra bytes after the end of the pickle", machine.position)
    # What unpickling calls for each array is replaced by the array.
    references = (reference for reference in machine.list_code_references() if reference.name != _WRAPPER)
    return LoadedPickle(value, len(data), file, 0, tuple(references))


def _joblib_table(nested: list[CodeReference] | None) -> list[pickle_reader.Opcode]:
    """Return the opcodes with which joblib's arrays take the place of their wrappers.

    `nested` receives what the pickles of arrays of objects would call; without it, such arrays are an error.
    """
    from ckpttool.encodings import pickle_reader

    def build(running: pickle_reader.PickleMachine, at: int) -> int:
        at = pickle_reader.TABLE[_BUILD](running, at)
        wrapper = running.stack[-1]
        if isinstance(wrapper, PickleObject) and wrapper.name == _WRAPPER and isinstance(wrapper.state, dict):
            at = _read_array(running, wrapper.state, at, nested)
            running.end = len(running.data)  # the frame has ended before the array
        return at

    table = list(pickle_reader.TABLE)
    table[_BUILD] = build
    return table


def _read_array(
    machine: pickle_reader.PickleMachine,
    state: Mapping[str, Any],
    at: int,
    nested: list[CodeReference] | None,
) -> int:
    """Put an array on the stack; return the position after its bytes, or after its pickle of objects."""
    kind, shape = state.get("dtype"), state.get("shape")
    counts = shape if isinstance(shape, tuple) else (None,)
    if not isinstance(kind, PickledDType) or any(type(n) is not int or n < 0 for n in counts):
        machine.fail("an array of joblib has no type or shape", at)
    if kind.code.startswith("O"):
        scan, _ = pickle_signatures.scan_head(
            lambda length: machine.data[at : at + length], len(machine.data) - at
        )
        if scan.end is None or nested is None:
            machine.fail("an array of objects", at)
        nested += scan.code_references
        return at + scan.end
    if state.get(_PADDED) is not None:
        at += 1 + machine.number(at, 1)
    length = int(kind.code[1:]) * (4 if kind.code.startswith("U") else 1) * math.prod(counts)
    if at + length > len(machine.data):
        machine.fail("an array of joblib is cut off", at)
    body = StoredBytes(machine.data, at, length)
    machine.stack[-1] = pickle_values.make_array(1, shape, kind, state.get("order") == "F", body)
    return at + length


def load_pickle(
    data: bytes,
    file: File | None,
    base: int = 0,
    *,
    name: str | None = None,
    builders: Mapping[str, Builder] = BUILDERS,
) -> LoadedPickle:
    """Return the value of a pickle; raise FormatError with the file's name if it is damaged.

    Args:
        data: the pickle's bytes.
        file: the file that has them, None if they were encoded.
        base: their position in it.
        name: what stands for the file in errors if there is none.
        builders: return the values of known calls, by dotted name.
    """
    from ckpttool.encodings import pickle_reader

    inline = _INLINE if file else sys.maxsize
    path = file.path if file else name
    try:
        rows = pickle_reader.parse_pickle(data, builders=builders, inline=inline, file=path, base=base)
    except FormatError as error:
        if file is None:
            # An offset into the decoded bytes would point to the wrong byte of the file.
            error.offset = None
        raise
    requested = (
        rows.code_references if file else tuple(replace(row, offset=None) for row in rows.code_references)
    )
    return LoadedPickle(rows.value, len(data), file, base, requested)


def array_source(parts: ArrayContents, pickled: LoadedPickle) -> Source:
    """Return the source of the array's bytes, in C order and little-endian; its type must be supported."""
    from ckpttool.encodings import npy  # most pickles contain no arrays

    data = parts.data
    if isinstance(data, StoredBytes) and pickled.file is not None:
        body: Span | Inline = Span(pickled.file, pickled.base + data.at, data.length)
    else:
        body = Inline(bytes(data))
    return npy.npy_source(body, parts.type.code, parts.shape, fortran=parts.fortran, big=parts.type.big)


# A protocol without line-based opcodes that every Python since 3.4 reads.
PROTOCOL = 4


def dtype_code(leaf: Leaf, path: Path) -> str:
    """Return NumPy's code of the tensor's type ("f4"); raise UnsupportedError if there is none."""
    code = dtypes.numpy_code(leaf.dtype)
    if code is None:
        raise UnsupportedError(f"a NumPy array cannot hold a tensor of type {leaf.dtype}", path=display(path))
    return code


def encode_array(leaf: Leaf, path: Path) -> PickleObject:
    """Return the tensor as the calls that build an array; reads its bytes."""
    return pickle_values.pickle_array(
        dtype_code(leaf, path), leaf.shape, bytes(tensor_bytes.read_exact(leaf, path))
    )


def encode_global(record: Record) -> Global:
    """Return the pickle global for a class or function."""
    module, _, name = record.name.rpartition(".")
    return Global(module, name)


def encode_box(kind: Global, low: PickleObject, high: PickleObject) -> PickleObject:
    """Return a call of a Box space; readers that ignore calls find the bounds in its state."""
    return PickleObject(kind, (low, high), 0, state={"low": low, "high": high})


SERIALIZED = ":serialized:"


def parse_json_member(source: Storage, name: str) -> Any:
    """Parse a JSON member; raise FormatError if it is too large, ambiguous or invalid."""
    what = f"member {name!r}"
    text.require_small(source.length, what)
    return text.parse_json_value(bytes(source.read()), what, once=True)


def read_settings(source: Storage, name: str, file: str, references: list[CodeReference]) -> dict[str, Any]:
    """Return the settings in member `name` of `file`; serialized objects become inert values.

    `references` collects what unpickling these would import and call. Sources:
    github.com/hill-a/stable-baselines, stable_baselines/common/save_util.py (`data_to_json`), and
    github.com/DLR-RM/stable-baselines3, stable_baselines3/common/save_util.py (the same function).
    """
    data = parse_json_member(source, name)
    if not isinstance(data, dict):
        raise FormatError(f"member {name!r} is not a dict")
    return {
        setting: _decode_setting(value, setting, name, file, references) for setting, value in data.items()
    }


def _decode_setting(value: Any, setting: str, name: str, file: str, references: list[CodeReference]) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(SERIALIZED), str):
        return value
    try:
        pickled = binascii.a2b_base64(value[SERIALIZED], strict_mode=True)
    except ValueError as error:
        raise FormatError(f"{setting!r} in {name!r} is not base64: {error}") from error
    try:
        loaded = load_pickle(pickled, None, name=file)
    except FormatError as error:
        raise error.located(path=f"{name}/{setting}") from error.__cause__
    references += relocate_references(loaded.code_references, f"{name}/{setting}")
    return loaded.value


# Allowance for a small pickle: repeated values, and letters in their names.
_SPARE, _SPARE_LETTERS = 10_000, 1 << 24
_LETTERS = 64  # letters in names per byte: nested module names are long but need few bytes each
_TRAVERSAL_SHOWN = 200
_NUMBER = 4  # letters of a step that is not text

# How a container holds a value: as a dict entry, a list item, an object attribute, or a constructor argument.
Via = Literal["entry", "item", "attr", "args"]
Place = TypeVar("Place")
Below = Callable[[PathStep, Via], Place]


class _ContainerFrame(Generic[Place]):
    """A container whose entries are being added: its path and its remaining entries."""

    __slots__ = ("below", "children", "context", "kind", "letters", "path", "value")

    def __init__(self, value: Any, path: Path, context: Place, kind: Container | None, letters: int) -> None:
        self.value = value
        self.path = path
        self.context = context
        self.kind = kind
        self.letters = letters
        self.below: Any = None
        self.children: Iterator[tuple[PathStep, Any, Via]] | None = None


class PickleTraversal(ABC, Generic[Place]):
    """Collect a tree's entries; a subclass defines what each value is, and its place in the format."""

    whole = "file"

    def __init__(self, size: int) -> None:
        """Prepare to traverse the values of a pickle of `size` bytes.

        A list may be reached by many paths, and nested lists by exponentially many; a long name may occur
        in all of these paths.
        """
        self._limits = limits.current()
        self._allow(size)
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.containers: dict[Path, Container] = {}
        self._aliases: dict[Path, list[Alias]] = {}
        self._open: dict[int, Path] = {}
        self._visited: dict[int, Path] = {}
        # The number of letters in the path at which a value is added.
        self._named = 0
        self._waiting: list[_ContainerFrame[Place]] = []

    def _allow(self, size: int) -> None:
        self.left = self._limits.pickle_revisits * size + _SPARE
        self._letters = _LETTERS * self._limits.pickle_revisits * size + _SPARE_LETTERS

    @abstractmethod
    def value(self, value: Any, path: Path, context: Place) -> None:
        """Add the value at the path."""

    @abstractmethod
    def below(self, value: Any, context: Place) -> Below[Place]:
        """Return a function that gives the place of each entry of a container at `context`."""

    def native(self, path: Path) -> str:
        """Return the dotted name of a path."""
        return dotted_name(path)

    def steps(self, path: Path, step: PathStep) -> Path:  # noqa: ARG002 - for those who override it
        """Return the steps that an entry adds to the container at `path`: `step`, or those in its name."""
        return (step,)

    def kind(self, value: Any) -> Container:
        """Return the container's kind."""
        if isinstance(value, PickleObject | Set):
            return Container("record", value.name)
        if isinstance(value, Dict):
            ordered = value.name == "collections.OrderedDict"
            return Container("OrderedDict") if ordered else Container("dict", value.name)
        if isinstance(value, dict):
            # Keys that a path cannot hold are displayed as labels: such a dict cannot be written back.
            return Container("dict") if all(type(k) in KEYS for k in value) else Container("record", "dict")
        return Container("list" if isinstance(value, list) else "tuple")

    def container(self, value: Any, path: Path, context: Place, kind: Container | None = None) -> None:
        """Add a dict, a list, a tuple or an inert object, with all its content."""
        where = self._open.get(id(value)) if value != () else None
        if where is not None or self._again(value):
            first = self.native(where if where is not None else self._visited[id(value)])
            self.leaves[path] = ValueLeaf(Record("the same object as", first or f"the whole {self.whole}"))
            return
        if len(path) > self._limits.pickle_depth:
            whole = (len(frame.path) + _count_levels(frame.value) for frame in self._waiting[:1])
            depth = max([len(path), *whole])
            raise limits.limit_error("pickle_depth", "values are nested too deeply", depth, enough=True)
        if isinstance(value, PickleObject) and is_leaf(value):
            self.leaves[path] = ValueLeaf(inert_record(value))
            return
        outermost = not self._waiting
        self._waiting.append(_ContainerFrame(value, path, context, kind, self._named))
        if outermost:
            self._go_through()

    def _go_through(self) -> None:
        # In file order and without recursion, because the file controls the depth.
        waiting = self._waiting
        while waiting:
            at = len(waiting)
            frame = waiting[-1]
            if frame.children is None:
                self._begin(frame)
            if self._go_on(frame):
                del self._open[id(frame.value)]
                waiting.pop()
            elif len(waiting) > at + 1:
                waiting[at:] = waiting[: at - 1 : -1]

    def _begin(self, frame: _ContainerFrame[Place]) -> None:
        value, path = frame.value, frame.path
        self._visited.setdefault(id(value), path)
        self._open[id(value)] = path
        self.containers[path] = frame.kind or self.kind(value)
        frame.below = self.below(value, frame.context)
        frame.children = _iter_children(value)

    def _go_on(self, frame: _ContainerFrame[Place]) -> bool:
        """Add entries up to the next container, which is queued; return whether all were added."""
        waiting, at = self._waiting, len(self._waiting)
        path, below, letters, left = frame.path, frame.below, frame.letters, self._letters
        assert frame.children is not None  # noqa: S101 - it has begun
        for step, child, via in frame.children:
            name, kind = step.value, type(child)
            self._named = letters + (len(name) if type(name) is str else _NUMBER)
            left -= self._named
            if kind is str or kind is bytes:
                left -= len(child)
            if left < 0:
                what = "the names and texts of shared values are repeated too often"
                raise limits.limit_error("pickle_revisits", what, self._limits.pickle_revisits + 1)
            self.value(child, (*path, *self.steps(path, step)), below(step, via))
            if len(waiting) > at:
                self._letters = left
                return False
        self._letters = left
        return True

    @property
    def aliases(self) -> dict[Path, tuple[Alias, ...]]:
        """The other paths of entries, by their first paths."""
        return {path: tuple(others) for path, others in self._aliases.items()}

    def alias(self, first: Path, path: Path, name: str) -> None:
        """Add a path, with its native name, to an entry at another, first path."""
        self._aliases.setdefault(first, []).append(Alias(path, name))

    def forget(self, size: int) -> None:
        """Start another pickle of `size` bytes, whose values have separate identities."""
        self._allow(size)
        self._named = 0
        self._visited.clear()

    def require_free(self, path: Path) -> None:
        """Raise FormatError if the path already has another value."""
        if path in self.leaves or path in self.containers:
            raise FormatError(f"two values have the same name: {display_exact(path)[:_TRAVERSAL_SHOWN]!r}")

    def _again(self, value: Any) -> bool:
        # Return whether the value was listed before and the allowance for repeats is used up.
        if not self.left and id(value) in self._visited:
            return True
        self.left = max(0, self.left - 1 - (0 if isinstance(value, PickleObject) else len(value)))
        return False


def _iter_children(value: Any) -> Iterator[tuple[PathStep, Any, Via]]:
    if isinstance(value, dict):
        yield from _iter_entries(value)
    elif isinstance(value, PickleObject):
        yield from _iter_attributes(value)
    else:
        for position, item in enumerate(value):
            yield index(position), item, "item"


_NESTING = (dict, list, tuple, PickleObject)


def _count_levels(value: Any) -> int:
    """Return the number of containers in each other in a value, itself included; cycles are followed once."""
    levels: dict[int, int] = {}
    children: dict[int, list[Any]] = {}  # also keeps values that exist only here, whose ids would be reused
    stack = [value]
    while stack:
        node = stack[-1]
        if id(node) not in levels:
            levels[id(node)] = 0
            inner = [child for _, child, _ in _iter_children(node) if isinstance(child, _NESTING)]
            children[id(node)] = inner
            stack += [child for child in inner if id(child) not in levels]
        else:
            levels[id(node)] = 1 + max((levels[id(child)] for child in children[id(node)]), default=0)
            stack.pop()
    return levels[id(value)]


def _iter_entries(value: dict[Any, Any]) -> Iterator[tuple[PathStep, Any, Via]]:
    labels: set[Any] = set()
    for position, (name, child) in enumerate(value.items()):
        step = key_step(name, position)
        if type(name) not in KEYS:
            # The label of one key may equal the text of another key, or its label.
            while step.value in value or step.value in labels:
                step = step._replace(value=f"{step.value} {position}")
            labels.add(step.value)
        yield step, child, "entry"


def _iter_attributes(value: PickleObject) -> Iterator[tuple[PathStep, Any, Via]]:
    if value.args:
        yield attr("__args__"), value.args, "args"
    if value.kwargs:
        yield attr("__kwargs__"), dict(value.kwargs), "args"
    yield from _state(value.state)
    yield from _iter_children(value.entries or {})
    yield from _iter_children(value.items or ())


def _state(state: Any) -> Iterator[tuple[PathStep, Any, Via]]:
    # Lib/pickle.py, load_build: a dict of attributes, or a pair of it and the slot values.
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(s, dict | None) for s in state):
        for part in state:
            yield from _state(part)
    elif isinstance(state, dict) and all(type(name) is str for name in state):
        for name, child in state.items():
            yield attr(name), child, "attr"
    elif state is not None:
        yield attr("__state__"), state, "args"


# Determine the role of an array or number at a path from its dtype and shape ("" and () for a number).
Uses = Callable[[Path, str, tuple[int, ...]], TensorRole]


class PickleWalk(PickleTraversal[None]):
    """Collect a tree's entries from the values of pickles in one pass.

    `code_references` is what unpickling them would import and call.
    """

    def __init__(self, uses: Uses) -> None:
        """Store `uses`, which determines the role of each array."""
        super().__init__(0)
        self.uses = uses
        self.keys: set[str] = set()
        self.code_references: tuple[CodeReference, ...] = ()
        self._pickled = LoadedPickle(None, 0, None, 0)
        self._arrays: dict[int, Path] = {}

    def add(self, pickled: LoadedPickle, path: Path = ()) -> None:
        """Add a pickle's value at the path."""
        self._pickled = pickled
        self.code_references = merge_references(self.code_references, pickled.code_references)
        self._arrays.clear()
        self.forget(pickled.size)
        self.value(pickled.value, path, None)

    def tree(self) -> Tree:
        """Return the tree of everything that was added."""
        return Tree(self.leaves, self.aliases, self.containers)

    def below(self, value: Any, context: None) -> Below[None]:  # noqa: ARG002 - one place is like another
        """Return a function for the places of entries; they have none here."""
        return lambda step, via: None  # noqa: ARG005

    def value(self, value: Any, path: Path, context: None) -> None:
        """Add the value at the path."""
        self.require_free(path)
        kind = type(value)
        if kind in PLAIN:
            self.leaves[path] = ValueLeaf(value, self.uses(path, "", ()).role)
        elif kind is Array:
            self._array(value, path)
        elif kind is Record:
            self.leaves[path] = ValueLeaf(value)
        elif isinstance(value, dict | list | tuple | PickleObject) and kind is not Global:
            self.container(value, path, context)
        else:
            self.leaves[path] = ValueLeaf(inert_record(value))

    def _array(self, array: Array, path: Path) -> None:
        parts = array.parts()
        if parts is not None and isinstance(parts.data, list):
            self.container(parts.data, path, None, Container("record", "numpy.ndarray"))
        elif parts is None or parts.type.name is None:
            shown = f"{parts.type.code}{list(parts.shape)}" if parts else ""
            self.leaves[path] = ValueLeaf(Record("numpy.ndarray", shown))
        else:
            first = self._arrays.setdefault(id(array), path)
            if first != path:
                self.alias(first, path, dotted_name(path))
                return
            use = self.uses(path, parts.type.name, parts.shape)
            self.leaves[path] = Leaf(
                dtype=parts.type.name,
                shape=parts.shape,
                source=array_source(parts, self._pickled),
                key=self._unique(path),
                role=use.role,
                slot=use.slot,
            )

    def _unique(self, path: Path) -> str:
        name = dotted_name(path)
        name = display_exact(path) if name in self.keys else name
        self.keys.add(name)
        return name
