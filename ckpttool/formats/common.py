"""Shared parts of formats: probes, listings, settings, the embedded tree."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import math
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, get_args

from ckpttool.core import deferred, dtypes, filesystem, limits, search_paths
from ckpttool.core import text as documents
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.checkpoint import (
    CODE,
    Checkpoint,
    CodeReference,
    Integrity,
    merge_references,
    relocate_references,
)
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    LimitError,
    NotFoundError,
    UnsupportedError,
    abbreviate_list,
)
from ckpttool.core.source import Buffer, File, is_streamed, iter_pieces
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    PathStep,
    Record,
    Role,
    Tree,
    ValueLeaf,
    display,
    display_exact,
    index,
    key,
)
from ckpttool.encodings import archives

if TYPE_CHECKING:
    from ckpttool.encodings.pickle_reader import PickleScan


# The content of one part of a checkpoint file: a tree, and the notes about it.


@dataclass(frozen=True, slots=True)
class FileListing:
    """One file's part of a checkpoint; the fields are those of Checkpoint."""

    tree: Tree
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    code_references: tuple[CodeReference, ...] = ()
    unjudged: tuple[str, ...] = ()

    def checkpoint(self, location: str, name: str, *files: File) -> Checkpoint:
        """Return it as the checkpoint at `location`, in the named format, read from these files."""
        return Checkpoint(
            path=location,
            format=name,
            tree=self.tree,
            files=files,
            writer=self.writer,
            integrity=self.integrity,
            notes=self.notes,
            details=self.details,
            code_references=self.code_references,
            unjudged=self.unjudged,
        )


_NAMED = 3


def note_unknown_members(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note that names members of an archive that its format does not define, if there are any."""
    files = [documents.clean(name) for name in names if not name.endswith("/")]
    return (f"members not read: {abbreviate_list(files, _NAMED)}",) if files else ()


def join_trees(parts: Mapping[PathStep, Tree], name: Callable[[PathStep, str], str], top: Container) -> Tree:
    """Merge several trees, each under its own step; `name` maps native keys to their new form."""
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases: dict[Path, tuple[Alias, ...]] = {}
    containers: dict[Path, Container] = {(): top}
    for step, tree in parts.items():
        for path, leaf in tree.items():
            leaves[step, *path] = (
                replace(leaf, key=name(step, leaf.key), of=(step, *leaf.of) if leaf.of else None)
                if isinstance(leaf, Leaf)
                else leaf
            )
        for path, others in tree.aliases.items():
            aliases[step, *path] = tuple(
                Alias((step, *a.path), None if a.key is None else name(step, a.key)) for a in others
            )
        containers |= {(step, *path): container for path, container in tree.containers.items()}
    return Tree(leaves, aliases, containers)


def member_key(member: PathStep, native: str) -> str:
    """Return the native key of a tensor in one of several files, e.g. `actor:l1.weight`."""
    return f"{member.value}:{native}"


def join_checkpoints(
    location: str, format_: str, parts: Mapping[str, Checkpoint], settings: Mapping[str, Tree] | None = None
) -> Checkpoint:
    """Merge several files into one checkpoint; the entries of each are under its member name.

    `settings` are additional trees of values that belong to the checkpoint.
    """
    trees = {key(member): one.tree for member, one in parts.items()}
    trees |= {key(member): tree for member, tree in (settings or {}).items()}
    files = tuple(parts.values())
    checksums = {one.integrity for one in files}
    return Checkpoint(
        path=location,
        format=format_,
        tree=join_trees(trees, member_key, Container("dict")),
        files=tuple(file for one in files for file in one.files),
        writer=files[0].writer,
        integrity=files[0].integrity if len(checksums) == 1 else "none",
        notes=tuple(dict.fromkeys(note for one in files for note in one.notes)),
        code_references=merge_references(
            *(relocate_references(one.code_references, member) for member, one in parts.items())
        ),
        unjudged=tuple(f"{member}: {each}" for member, one in parts.items() for each in one.unjudged),
    )


# The facts about a path that format detection may use.

HEAD = 1024
TAIL = 64


class Probe:
    """A path, its kind, its first and last bytes, and the names in its folder."""

    def __init__(self, path: str) -> None:
        """Create the probe without accessing the file system."""
        self.path = path
        self.refused: CkpttoolError | None = None
        """The error raised when an existing file could not be read."""

    @cached_property
    def kind(self) -> filesystem.Kind:
        """The kind of file at the path; "special" is a socket, a device or a FIFO, which is never opened."""
        return filesystem.path_kind(self.path)

    @cached_property
    def size(self) -> int:
        """The file's size in bytes; 0 for anything else."""
        return filesystem.getsize(self.path) if self.kind == "file" else 0

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file."""
        return self._bytes(0, HEAD)

    @property
    def members(self) -> Collection[str]:
        """The member names of a zip archive; empty for other files and damaged archives."""
        return () if isinstance(self._archive, CkpttoolError | None) else self._archive.members

    @property
    def damage(self) -> CkpttoolError | None:
        """The error for a file that begins like a zip archive but cannot be listed."""
        return self._archive if isinstance(self._archive, CkpttoolError) else None

    @cached_property
    def _archive(self) -> archives.ZipArchive | CkpttoolError | None:
        # Several formats are detected by their members; the archive is listed only once.
        if not self.head.startswith(b"PK\x03\x04"):
            return None
        try:
            return archives.read_zip(File.stamp(self.path))
        except CkpttoolError as error:
            return error

    @cached_property
    def tail(self) -> bytes:
        """The last bytes of the file."""
        return self._bytes(max(0, self.size - TAIL), TAIL)

    @cached_property
    def folder(self) -> str:
        """The folder itself, or the folder that contains the path."""
        return self.path if self.kind == "folder" else os.path.dirname(self.path) or "."

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in `folder`, without the leftovers of an interrupted conversion.

        A probe of a leftover (a file is read back before it gets its final name) returns all names. If a
        remote folder has too many names, it cannot be used for detection, but its files can still be read.
        """
        try:
            found = filesystem.listdir(self.folder)
        except (OSError, LimitError):
            return frozenset()
        return frozenset(
            found if is_hidden_name(self.name) else (name for name in found if not is_hidden_name(name))
        )

    @cached_property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(os.path.normpath(self.path))

    def start(self, length: int) -> bytes:
        """Return up to `length` bytes of a file; fewer if it is shorter or cannot be read."""
        return self.head[:length] if length <= HEAD else self._bytes(0, length)

    def _bytes(self, offset: int, length: int) -> bytes:
        if self.kind != "file":
            return b""
        try:
            return filesystem.read_bytes(self.path, offset, length)
        except OSError as error:
            self.refused = NotFoundError(f"cannot open the file: {error.strerror}", file=self.path)
            return b""


class Format(Protocol):
    """The interface of every format module; its names are at module level.

    `FRAMEWORK` is the backend that usually runs the format's networks. A format that finds a location
    through the content of a file may define `redirected(probe, location) -> str | None`, a note that is
    used if the location differs from the one recorded in the file.
    """

    NAME: str
    TITLE: str
    WRITES: bool
    FRAMEWORK: str

    def claims(self, probe: Probe) -> str | None:
        """Return the location to read (a prefix for its `.index`) if this format owns the path, else None."""
        ...

    def read(self, location: str) -> Checkpoint:
        """List everything at the location; raise FormatError if the bytes violate the format."""
        ...


@dataclass(frozen=True, slots=True)
class FormatDefinition:
    """A second format in a module: the names of Format, which the first format has at module level."""

    NAME: str
    TITLE: str
    FRAMEWORK: str
    claims: Callable[[Probe], str | None]
    read: Callable[[str], Checkpoint]
    WRITES: ClassVar[bool] = False


class OutputFile(NamedTuple):
    """One file of a checkpoint to be written: its suffix to the target's name, and its writer.

    A written buffer must not change afterwards. atomic_write.Output describes `indexes`, `meanwhile`
    and `extra`.
    """

    suffix: str
    write: Callable[[IO[bytes]], None]
    indexes: bool = False
    meanwhile: str = ""
    extra: bool = False


class WritingFormat(Format, Protocol):
    """A format module that can also write (its `WRITES` is true)."""

    def pieces(self, tree: Tree) -> Sequence[OutputFile]:
        """Return the files that contain the tree, in writing order, with an index last.

        Only one leaf is in memory at a time. Raise UnsupportedError, before anything is written, if the
        format cannot store the tree. A format may accept more keyword options (listed in
        commands.options.TARGETS). A format that changes the paths of leaves also defines
        `stored(tree, **options) -> Tree`, which returns the tree with those paths.
        """
        ...


@dataclass(frozen=True, slots=True)
class WritingFormatDefinition(FormatDefinition):
    """A second format of a module that can also write: the names of WritingFormat."""

    pieces: Callable[[Tree], Sequence[OutputFile]]
    stored: Callable[[Tree], Tree] | None = None
    members: Callable[[str], tuple[str, ...]] | None = None
    """The files that a location has, or would have if it were complete."""
    WRITES: ClassVar[bool] = True


# Subprocesses started by a format; they import modules from the same places as this process.

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def child_program(code: str) -> str:
    """Return the command of a subprocess that runs `code` with this process's module search path.

    Its first command line argument is the result of `child_paths`.
    """
    return f"""
import json, sys
sys.path += [path for path in json.loads(sys.argv[1]) if path not in sys.path]
{code}
"""


def child_paths() -> str:
    """Return this process's module search path as JSON, without the working directory."""
    return json.dumps([_PACKAGE, *search_paths.installed_folders(tuple(map(os.fsdecode, sys.path)))])


# First bytes of files written by torch.save; every command checks them, so this module imports nothing heavy.
#
# Source: torch/serialization.py (MAGIC_NUMBER, _legacy_save); Lib/pickle.py for a number in each protocol.

ZIP = b"PK\x03\x04"
MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as a separate pickle. From protocol 4 on the pickle may be framed.
STREAM = deferred.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a%b|L%dL?\n" % (re.escape(MAGIC.to_bytes(10, "little")), MAGIC),
    re.DOTALL,
)
STREAM_LENGTH = 32


# Detect the format of a pickled file from its first bytes; nothing is unpickled.

Owner = Literal["stable_baselines2", "rllib", "pytorch", "pytorch_dcp", "d3rlpy", "pickle"]

# Lib/pickle.py: protocols 2 and above begin with PROTO and their number; unpicklers also accept 0 and 1
# there.
_PROTOCOL = deferred.compile(rb"\x80[\x00-\x05]")
# Protocols 0 and 1 begin with the first value: a mark, an empty container, or a class name.
_OLD = (b"(", b"]", b"}", b")", b"c")
_SUFFIXES = (".pkl", ".pickle", ".p")
# Opcodes that need nothing on the stack: a pickle without PROTO begins with one of them. PERSID is excluded,
# because only torch could load it, and does not; so are the first bytes of other file types.
_STARTS = frozenset(b"(])}cNIJKLMFGSTUVXBCi\x82\x83\x84\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96")
_OTHERS = (b"BZh", b"\x89HDF\r\n")
# BINSTRING, BINUNICODE and BINBYTES: the length of the following data, in four bytes.
_LENGTHY = b"TXB"
# ray/rllib/utils/checkpoints.py, get_checkpoint_info: file names of version 0.1 and later versions.
CHECKPOINT = deferred.compile(r"checkpoint-\d+")
_STATES = ("algorithm_state.pkl", "policy_state.pkl", "module_state.pkl")
# torch/serialization.py, _save: the pickle of an unpacked archive, and the files next to it.
_UNPACKED, _BESIDE = "data.pkl", {"data", "version"}
# torch/distributed/checkpoint/metadata.py: the pickle begins with the name of its class.
_DCP = deferred.compile(rb".{0,16}torch\.distributed\.checkpoint\.metadata.{1,8}Metadata", re.DOTALL)
# d3rlpy/base.py, dump_learnable: a dict whose first entry is `torch`, in bytes (protocols 3, 4 and above, and
# as ckpttool writes it, without memoizing the dict).
_D3 = deferred.compile(
    rb"\x80.(\x95.{8})?\}(\x94|q\0)?\((\x8c\x05|X\x05\0\0\0)torch(\x94|q[\0\x01])(\x95.{8})?[BC\x8e]",
    re.DOTALL,
)
# The module of joblib's arrays (joblib/numpy_pickle.py).
JOBLIB = b"joblib.numpy_pickle"
# Names of both libraries' own classes occur early in the file: SB2 pickles its data before the weights (and
# each of its agents has an attribute of this name, stable_baselines/common/base_class.py), RLlib its filters.
_RLLIB = deferred.compile(rb"ray\.rllib\.")
_SB2 = deferred.compile(rb"stable_baselines\.|_vectorize_action")
_LOOKED_AT = 1 << 20
_GROWTH = 16
_NAME = deferred.compile(r"[^\W\d][\w.<>]*")


def find_pickle_format(probe: Probe) -> Owner | None:
    """Return the format that reads the file; None if it is not a pickle, or one of torch's own forms."""
    if STREAM.match(probe.head) or _is_safetensors_length(probe.head):
        return None
    if _PROTOCOL.match(probe.head) is None:
        return "pickle" if _lacks_proto(probe) else None
    if CHECKPOINT.fullmatch(probe.name) or probe.name in _STATES:
        return "rllib"
    if probe.name == _UNPACKED and _BESIDE & probe.names:
        return "pytorch"
    if _DCP.match(probe.head):
        return "pytorch_dcp"
    if _D3.match(probe.head):
        return "d3rlpy"
    return _find_by_content(probe)


@lru_cache(maxsize=4)
def _lacks_proto(probe: Probe) -> bool:
    """Return whether this is a pickle without PROTO: protocol 0 or 1, the default of Python 2.

    The check uses the opcodes, not the file name. Text may parse as a few opcodes, so they must reach
    STOP and build a container or an object, or call a standard library function that acts before it
    fails.
    """
    if not may_be_pickle(probe.head, probe.size):
        return False
    named = os.path.splitext(probe.name)[1].lower() in _SUFFIXES
    if named and probe.head[:1] in _OLD and probe.tail[-1:] == b".":
        return True
    return is_pickle(*scan_head(probe.start, probe.size), probe.size)


def may_be_pickle(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes with this start may be a pickle without PROTO."""
    if not head or head[0] not in _STARTS or head.startswith(_OTHERS):
        return False
    return head[0] not in _LENGTHY or 5 + int.from_bytes(head[1:5], "little") <= size


def scan_head(start: Callable[[int], bytes], size: int, length: int = HEAD) -> tuple[PickleScan, bytes]:
    """Scan the opcodes at the start of a file of `size` bytes, over as many bytes as they need.

    `start` returns the first bytes of the file; `length` is the number of bytes for the first attempt.
    Return the scan and the scanned bytes.
    """
    # Not a top-level import: every command runs format detection.
    from ckpttool.encodings.pickle_reader import scan_pickle

    while True:
        data = start(min(length, size))
        found = scan_pickle(data)
        if not found.cut or length >= size or len(data) < length:
            return found, data
        length *= _GROWTH


def is_pickle(found: PickleScan, data: bytes, size: int) -> bool:
    """Return whether the scanned bytes begin a pickle, not text that looks like one."""
    names = [each.name for each in found.code_references]
    real = bool(names) and all(map(_NAME.fullmatch, names))
    if found.end is None:
        return real and any(each.verdict == CODE and each.calls for each in found.code_references)
    if names:
        return real
    plain = isinstance(found.value, list | dict | tuple)
    return plain and len(data) == size and not data[found.end :].strip()


def _is_safetensors_length(head: bytes) -> bool:
    # A safetensors header whose length begins like a protocol number; no pickle continues this way.
    return head[4:9] == b"\0\0\0\0{"


@lru_cache(maxsize=4)
def _find_by_content(probe: Probe) -> Owner:
    # Three formats check the same probe one after the other.
    try:
        data = filesystem.read_bytes(probe.path, 0, _LOOKED_AT)
    except OSError:
        return "pickle"
    if _RLLIB.search(data):
        return "rllib"
    return "stable_baselines2" if _SB2.search(data) else "pickle"


# Plain data as JSON and back, without loss: numbers that JSON lacks, bytes, tuples, keys of any plain type.

# Longer integers are written in hexadecimal, which parses in linear time.
_LONG = 64
# No more digits than Python prints, and no deeper than the state of a container can be (torch_zip.pieces).
_DIGITS, _DEPTH = 3500, 64
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_KINDS: tuple[str, ...] = ("attr", "key", "index")


def encode_value(value: Any) -> Any:
    """Return the JSON form of a plain value, a Record, or lists, tuples and dicts of them.

    A value without a JSON form becomes an object with one entry that names the type:
    `{"float": "nan"}`. Raise UnsupportedError for an integer with more digits than Python prints.
    """
    if isinstance(value, list):
        return [encode_value(item) for item in value]
    if isinstance(value, dict):
        word = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        return {word: [[encode_value(name), encode_value(item)] for name, item in value.items()]}
    if value is None or type(value) is bool:
        return value
    return _WRITERS[type(value)](value)


def _encode_text(value: str) -> Any:
    return value if is_text(value) else {"text": _base64(value.encode("utf-8", "surrogatepass"))}


def _encode_int(value: int) -> Any:
    if value.bit_length() <= _LONG:
        return value
    if value.bit_length() > 4 * (_DIGITS - len("-0x")):
        raise UnsupportedError(f"cannot record an integer of {value.bit_length():,} bits")
    return {"int": hex(value)}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    str: _encode_text,
    int: _encode_int,
    float: lambda value: value if math.isfinite(value) else {"float": str(value)},
    complex: lambda value: {"complex": [encode_value(value.real), encode_value(value.imag)]},
    bytes: lambda value: {"bytes": _base64(value)},
    Record: lambda value: {"record": [encode_value(value.name), encode_value(value.summary)]},
    tuple: lambda value: {"tuple": [encode_value(item) for item in value]},
}


def is_text(value: str) -> bool:
    """Return whether the text can be encoded; an unpaired surrogate cannot."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode_value(value: Any, depth: int = _DEPTH) -> Any:
    """Return the value that `encoded` converted to this; raise FormatError for anything else."""
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise _damage_error()
    if isinstance(value, list):
        return [decode_value(item, depth - 1) for item in value]
    if len(value) != 1:
        raise _damage_error()
    ((word, inner),) = value.items()
    return _decode_text(word, inner) if isinstance(inner, str) else _decode_list(word, inner, depth - 1)


def _decode_text(word: str, text: str) -> Any:
    try:
        if word == "int" and len(text) <= _DIGITS:
            return int(text, 16)
        if word == "float":
            return _WORDS[text]
        if word == "bytes":
            return base64.b64decode(text, validate=True)
        if word == "text":
            return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
    except (ValueError, KeyError, binascii.Error) as error:
        raise _damage_error() from error
    raise _damage_error()


def _decode_list(word: str, inner: Any, depth: int) -> Any:
    if not isinstance(inner, list):
        raise _damage_error()
    items = decode_value(inner, depth)
    if word == "tuple":
        return tuple(items)
    if word == "complex" and len(items) == 2 and all(type(i) is float for i in items):
        return complex(*items)
    if word == "record" and len(items) == 2 and all(isinstance(i, str) for i in items):
        return Record(*items)
    if word in ("dict", "OrderedDict") and all(isinstance(i, list) and len(i) == 2 for i in items):
        try:
            return OrderedDict(items) if word == "OrderedDict" else dict(items)
        except TypeError as error:
            raise _damage_error() from error
    raise _damage_error()


def encode_path(path: Path) -> list[Any]:
    """Return a path as JSON: text keys as strings, list indices as numbers, other keys with their type."""
    return [_encode_step(step) for step in path]


def _encode_step(step: PathStep) -> Any:
    if step.kind == "key" and type(step.value) is str and is_text(step.value):
        return step.value
    if step.kind == "index" and type(step.value) is int:
        return step.value
    return {step.kind: encode_value(step.value)}


def decode_path(steps: Any, known: dict[str, PathStep]) -> Path:
    """Return the path of `steps`; `known` caches steps, because thousands of paths share them."""
    if not isinstance(steps, list):
        raise _damage_error()
    return tuple(
        [
            known.get(s) or known.setdefault(s, PathStep("key", s)) if type(s) is str else _decode_step(s)
            for s in steps
        ]
    )


def _decode_step(step: Any) -> PathStep:
    if type(step) is int:
        return PathStep("index", step)
    if not isinstance(step, dict) or len(step) != 1:
        raise _damage_error()
    ((kind, inner),) = step.items()
    value = decode_value(inner)
    if kind not in _KINDS or not (value is None or type(value) in (str, int, float, bool)):
        raise _damage_error()
    return PathStep(kind, value)


def _damage_error() -> FormatError:
    return FormatError("the embedded tree is damaged")


# A tree embedded as text, for formats that store only named arrays: paths, values, aliases, containers.
#
# Formats without a place for a tree (safetensors, npz) keep it with their arrays as one ASCII JSON document,
# so that the output is read back as the same tree. docs/formats/safetensors.md describes it. It is data:
# nothing in it is imported or called.

KEY = "ckpttool.tree"


# Unique names for the entries of a tree, for formats with names instead of paths.


def assign_names(
    paths: Iterable[Path],
    spelled: Callable[[Path], str],
    reserved: Collection[str] = (),
    safe: Callable[[str], str] = str,
) -> dict[Path, str]:
    """Return a name for each path: `spelled`, or an unambiguous name if that is taken or not text.

    Paths come in order, and the first of several with the same spelling gets it. `safe` converts an
    unambiguous name to one that the format can store.
    """
    taken = set(reserved)
    names: dict[Path, str] = {}
    for path in paths:
        name = spelled(path)
        if name in taken or not _is_text(name):
            name = _unused_name(safe(display_exact(path)), taken)
        taken.add(name)
        names[path] = name
    return names


def _unused_name(name: str, taken: set[str]) -> str:
    plain = name.encode("ascii", "backslashreplace").decode("ascii").replace("\0", "\\0")
    number, found = 1, plain
    while found in taken:
        number += 1
        found = f"{plain} {number}"
    return found


def _is_text(name: str) -> bool:
    return "\0" not in name and is_text(name)


# Encode a tree as the text that `read` decodes.

VERSION = 1


def encode_tree(tree: Tree, names: Mapping[Path, str]) -> str:
    """Return the tree as JSON; `names` are the names of its arrays and aliases in the file.

    A value may also have a name: that of an array that repeats it for other readers.
    """
    places = {path: number for number, path in enumerate(tree)}
    document = {
        "version": VERSION,
        "leaves": [_encode_leaf(tree, path, names.get(path), places) for path in tree],
        "aliases": [
            [places[path], encode_path(alias.path), None if alias.key is None else names.get(alias.path)]
            for path, others in tree.aliases.items()
            for alias in others
        ],
        "containers": [
            [encode_path(path), kind.kind, encode_value(kind.name), encode_value(kind.state)]
            for path, kind in tree.containers.items()
        ],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _encode_leaf(tree: Tree, path: Path, name: str | None, places: Mapping[Path, int]) -> list[Any]:
    leaf = tree[path]
    facts: dict[str, Any] = {} if leaf.role == "parameter" else {"role": leaf.role}
    if not isinstance(leaf, Leaf):
        facts["value"] = encode_value(leaf.value)
        return [encode_path(path), name, facts]
    facts["dtype"] = leaf.dtype
    if leaf.of is not None and leaf.of in places:
        facts["of"] = places[leaf.of]
    for fact in ("slot", "trainable", "name"):
        value = getattr(leaf, fact)
        if value is not None:
            facts[fact] = encode_value(value)
    return [encode_path(path), name, facts]


def needs_record(tree: Tree, bare: Tree) -> bool:
    """Return whether the file without the embedded tree (`bare`) would be read as a different tree."""
    if list(tree) != list(bare) or tree.containers not in ({}, bare.containers):
        return True
    return _aliases(tree) != _aliases(bare) or any(
        _leaf_facts(tree, path) != _leaf_facts(bare, path) for path in tree
    )


def _leaf_facts(tree: Tree, path: Path) -> tuple[Any, ...]:
    leaf = tree[path]
    if not isinstance(leaf, Leaf):
        return (type(leaf.value).__name__, leaf.value, leaf.role)
    return (leaf.dtype, leaf.shape, leaf.role, leaf.of, leaf.slot, leaf.trainable, leaf.name)


def _aliases(tree: Tree) -> dict[Path, list[tuple[Path, bool]]]:
    return {
        path: [(a.path, a.key is None) for a in others] for path, others in tree.aliases.items() if others
    }


# Decode the embedded tree over the arrays in the file.

_ROLES = get_args(Role)
_PLAIN = (bool, int, float, complex, str, bytes, Record)
_CONTAINER_KINDS = ("dict", "OrderedDict", "list", "tuple", "record", "module")


class EmbeddedTreeError(FormatError):
    """The embedded tree is invalid, or another program kept it while replacing the arrays."""


def decode_tree(text: bytes, arrays: Mapping[str, Leaf], untyped: Mapping[str, int] | None = None) -> Tree:
    """Decode the tree in `text` over a file's arrays, by name.

    `untyped` maps names to element sizes in bytes of arrays whose type the file cannot record (NumPy's
    void). Raise DamagedError unless every array has one place in the tree, or repeats a value.
    """
    try:
        return _TreeDecoder(arrays, untyped or {}).tree(
            documents.parse_strict_json(text, "the embedded tree", "header_bytes")
        )
    except (FormatError, RecursionError) as error:
        reason = error.message if isinstance(error, FormatError) else "the embedded tree is nested too deeply"
        raise EmbeddedTreeError(reason) from error


class _TreeDecoder:
    """Decode the document in a single pass."""

    def __init__(self, arrays: Mapping[str, Leaf], untyped: Mapping[str, int]) -> None:
        self.arrays = arrays
        self.untyped = untyped
        self.steps: dict[str, PathStep] = {}
        self.used: set[str] = set()

    def tree(self, document: dict[str, Any]) -> Tree:
        if (
            document.keys() != {"version", "leaves", "aliases", "containers"}
            or document["version"] != VERSION
        ):
            raise EmbeddedTreeError("the embedded tree has an unsupported version")
        leaves = self._leaves(_require_rows(document["leaves"]))
        if self.used != self.arrays.keys():
            raise EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        aliases = self._aliases(_require_rows(document["aliases"]), list(leaves), set(leaves))
        return Tree(leaves, aliases, self._containers(document["containers"]))

    def _leaves(self, rows: list[Any]) -> dict[Path, Leaf | ValueLeaf]:
        paths = [decode_path(row[0], self.steps) for row in rows]
        leaves = {path: self._leaf(row[1], row[2], paths) for path, row in zip(paths, rows, strict=True)}
        if len(leaves) != len(rows):
            raise EmbeddedTreeError("the embedded tree lists two leaves under one path")
        return leaves

    def _leaf(self, name: Any, facts: Any, paths: list[Path]) -> Leaf | ValueLeaf:
        if not isinstance(facts, dict):
            raise EmbeddedTreeError("the embedded tree is damaged")
        role = facts.get("role", "parameter")
        if role not in _ROLES:
            raise EmbeddedTreeError("the embedded tree contains an unknown role")
        if name is not None:
            self._use(name)
        if "value" in facts:
            value = decode_value(facts["value"])
            if value is not None and type(value) not in _PLAIN:
                raise EmbeddedTreeError("the embedded tree contains an unsupported value")
            return ValueLeaf(value, role)
        leaf = self._array(name, facts.get("dtype"))
        slot, trainable, second = (decode_value(facts.get(fact)) for fact in ("slot", "trainable", "name"))
        if not isinstance(trainable, bool | None) or not all(
            isinstance(t, str | None) for t in (slot, second)
        ):
            raise EmbeddedTreeError("the embedded tree is damaged")
        of = self._owner(facts.get("of"), paths)
        return replace(leaf, role=cast(Role, role), of=of, slot=slot, trainable=trainable, name=second)

    def _array(self, name: Any, dtype: Any) -> Leaf:
        """Return the array of that name if its type, or its element size, matches."""
        leaf = self.arrays.get(name) if isinstance(name, str) else None
        if leaf is not None and leaf.dtype == dtype:
            return leaf
        row = dtypes.BY_NAME.get(dtype) if isinstance(dtype, str) else None
        if leaf is None or row is None or not row.itemsize or self.untyped.get(name) != row.itemsize:
            raise EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        return replace(leaf, dtype=row.name)

    def _use(self, name: Any) -> None:
        if not isinstance(name, str) or name in self.used or name not in self.arrays:
            raise EmbeddedTreeError("the embedded tree does not match the tensors in this file")
        self.used.add(name)

    def _owner(self, of: Any, paths: list[Path]) -> Path | None:
        if of is None:
            return None
        if type(of) is not int or not 0 <= of < len(paths):
            raise EmbeddedTreeError("the embedded tree refers to an owner that does not exist")
        return paths[of]

    def _aliases(self, rows: list[Any], paths: list[Path], taken: set[Path]) -> dict[Path, tuple[Alias, ...]]:
        found: dict[Path, list[Alias]] = {}
        for place, steps, name in rows:
            path = decode_path(steps, self.steps)
            if type(place) is not int or not 0 <= place < len(paths) or not isinstance(name, str | None):
                raise EmbeddedTreeError("the embedded tree has an alias without a target")
            if path in taken:
                raise EmbeddedTreeError("the embedded tree lists two entries under one path")
            taken.add(path)
            found.setdefault(paths[place], []).append(Alias(path, name))
        return {path: tuple(others) for path, others in found.items()}

    def _containers(self, rows: Any) -> dict[Path, Container]:
        found: dict[Path, Container] = {}
        for row in rows if isinstance(rows, list) else [None]:
            if not isinstance(row, list) or len(row) != 4 or row[1] not in _CONTAINER_KINDS:
                raise EmbeddedTreeError("the embedded tree is damaged")
            name = decode_value(row[2])
            if not isinstance(name, str | None):
                raise EmbeddedTreeError("the embedded tree is damaged")
            found[decode_path(row[0], self.steps)] = Container(row[1], name, decode_value(row[3]))
        return found


def _require_rows(rows: Any) -> list[Any]:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise EmbeddedTreeError("the embedded tree is damaged")
    return rows


# JSON and gin-config settings as plain values.


def tree_from_json(settings: dict[str, Any], what: str) -> Tree:
    """Return a JSON object as a tree: a leaf for every string, number, true, false and null.

    `what` is its name in errors; raise LimitError if the object is nested too deeply.
    """
    most = limits.current().json_depth
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    containers: dict[Path, Container] = {}

    def add(value: Any, path: Path) -> None:
        if len(path) > most:
            raise limits.limit_error("json_depth", f"{what} is nested too deeply", len(path))
        if isinstance(value, dict):
            containers[path] = Container("dict")
            for name, inner in value.items():
                add(inner, (*path, key(name)))
        elif isinstance(value, list):
            containers[path] = Container("list")
            for number, inner in enumerate(value):
                add(inner, (*path, index(number)))
        else:
            leaves[path] = ValueLeaf(value)

    add(settings, ())
    return Tree(leaves, {}, containers)


# github.com/google/gin-config, docs/index.md: `scope/module.Name.parameter = value`; also used for operative
# configs.
_BINDING = deferred.compile(r"^(?:[\w./-]+/)?([\w.]+)\.(\w+)\s*=\s*\\?\s*(.+)$|^(\w+)\s*=\s*\\?\s*(.+)$")


def parse_gin(text: str) -> dict[str, Any]:
    """Return the bindings of a gin-config file, by configurable name and parameter.

    A reference (`@tf.keras.activations.tanh`) becomes its last name; other non-literals are omitted.
    """
    found: dict[str, Any] = {}
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        match = _BINDING.match(line.partition("#")[0].strip())
        owner, name, value, macro, other = match.groups() if match is not None else (None,) * 5
        plain = _gin_value(str(value if macro is None else other))
        place = found if macro is not None else found.setdefault(str(owner).rpartition(".")[2], {})
        if plain is not None and isinstance(place, dict):
            place[str(macro or name)] = plain
    return {name: value for name, value in found.items() if value != {}}


def _gin_value(text: str) -> Any:
    text = text.strip()
    if text.startswith("@"):
        return re.split(r"[./]", text[1:].removesuffix("()"))[-1]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, tuple) else value


# Determine the role of a tensor in a torch checkpoint from its name and its neighbours.

# Buffer names of torch modules (torch/nn/modules/batchnorm.py).
_BUFFERS: dict[object, Role] = {
    "running_mean": "buffer",
    "running_var": "buffer",
    "num_batches_tracked": "counter",
}


class TorchTensorRole(NamedTuple):
    """The role of a tensor; the fields are those of Leaf."""

    role: Role
    slot: str | None = None


def role_by_module_name(path: Path) -> Role | None:
    """Return the role of a standard buffer or counter name in torch modules; None for other names."""
    last = path[-1].value if path else None
    return _BUFFERS.get(last.rpartition(".")[2]) if isinstance(last, str) else None


def find_optimizers(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the paths of optimizer state_dicts (torch/optim/optimizer.py): `state` and `param_groups`.

    Also handle those that torch.distributed.checkpoint.state_dict flattened into names like
    `state.l1.weight.exp_avg`.
    """
    found: dict[Path, set[str]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            first = str(step.value).partition(".")[0]
            if step.kind == "key" and first in ("state", "param_groups"):
                found.setdefault(path[:depth], set()).add(first)
    return frozenset(top for top, names in found.items() if len(names) == 2)


def tensor_role(path: Path, known: Collection[Path]) -> TorchTensorRole:
    """Return the role of the tensor at the path; `known` are the optimizer paths."""
    for depth in range(len(path)):
        if path[:depth] in known:
            return _optimizer_role(path[depth:])
    return TorchTensorRole(role_by_module_name(path) or "parameter")


def _optimizer_role(path: Path) -> TorchTensorRole:
    if str(path[0].value).partition(".")[0] != "state":
        return TorchTensorRole("other")
    last = str(path[-1].value)
    name = last.rpartition(".")[2] if len(path) == 1 else last
    return TorchTensorRole("counter") if name == "step" else TorchTensorRole("slot", name)


# Return all bytes of a tensor for a writer, and check their number.


def read_exact(leaf: Leaf, path: Path) -> Buffer:
    """Return the tensor's bytes; raise FormatError unless their number matches its shape and type."""
    found = leaf.read()
    _require_exact(leaf, path, memoryview(found).nbytes)
    return found


class ExactPieces(NamedTuple):
    """The bytes of a large tensor for a writer, read in pieces in every pass."""

    leaf: Leaf
    path: Path

    def pieces(self, *, verify: bool = True) -> Iterator[bytes]:
        """Yield the bytes; raise FormatError at the end unless their number matches shape and type."""
        nbytes = 0
        for piece in iter_pieces(self.leaf.source, verify=verify):
            nbytes += len(piece)
            yield bytes(piece)  # the writer's thread keeps it
        _require_exact(self.leaf, self.path, nbytes)


def exact_part(leaf: Leaf, path: Path) -> Buffer | ExactPieces:
    """Return the tensor's bytes for a writer, a large one in pieces; raises like `read_exact`."""
    return ExactPieces(leaf, path) if is_streamed(leaf.source) else read_exact(leaf, path)


def iter_exact(leaf: Leaf, path: Path) -> Iterator[Buffer]:
    """Yield the tensor's bytes, those of a large one in pieces; raises like `read_exact`."""
    part = exact_part(leaf, path)
    yield from part.pieces() if isinstance(part, ExactPieces) else (part,)


def _require_exact(leaf: Leaf, path: Path, nbytes: int) -> None:
    if nbytes != leaf.nbytes:
        raise FormatError(
            "the tensor's bytes do not match its shape",
            path=display(path),
            expected=f"{leaf.nbytes:,} bytes",
            found=f"{nbytes:,}",
        )


# YAML settings as data: every tag is inert, no object is created, aliases and depth are bounded.
#
# PyYAML's parser produces nodes (yaml/composer.py); only its rules for plain numbers, booleans and null are
# used (yaml/constructor.py, SafeConstructor). RL-Zoo's files are dumps of `collections.OrderedDict`, a list
# of pairs under a Python tag (rl_zoo3/exp_manager.py, `_save_config`).

# The parser's run time grows with the square of the nesting depth of flow collections.
_FLOWS = 500
_LONGEST_NAME = 200
_STANDARD = "tag:yaml.org,2002:"
_ORDERED = "collections.OrderedDict"


def read_yaml(file: str) -> Tree:
    """Return the values of a YAML file by path; raise FormatError if it is too large or invalid YAML."""
    most, size = limits.current(), filesystem.getsize(file)
    if size > most.yaml_bytes:
        raise limits.limit_error("yaml_bytes", "the settings file is too large", size, file=file)
    # Not a top-level import: few commands read YAML.
    import yaml

    text = filesystem.read_bytes(file)
    if text.count(b"[") + text.count(b"{") > _FLOWS:
        raise FormatError("the settings hold too many lists", file=file, expected=f"at most {_FLOWS:,}")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        leaves: dict[Path, ValueLeaf] = {}
        # Each node has its own bytes, unless it is repeated by an alias.
        for path, value in _iter_values(node, yaml.SafeLoader(""), 2 + 2 * len(text), most.json_depth):
            leaves[path] = ValueLeaf(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] if type(error) is ValueError else None
        raise FormatError("cannot parse the settings as YAML", file=file, found=reason) from error
    return Tree(leaves)


def _iter_values(node: Any, loader: Any, visits: int, levels: int) -> Iterator[tuple[Path, Any]]:
    """Yield every scalar under a node; a dump of an OrderedDict is read as a mapping.

    Raise ValueError for more than `visits` nodes (aliases count each time) or more than `levels`
    levels.
    """
    stack: list[tuple[Any, Path]] = [(node, ())]
    for _ in range(visits):
        if not stack:
            return
        node, path = stack.pop()
        if len(path) > levels:
            raise ValueError("the values are nested too deeply")
        kind = getattr(node, "id", None)
        below: list[tuple[Any, Path]] = []
        if kind == "scalar":
            yield path, _scalar(node, loader)
        elif kind == "mapping" or str(getattr(node, "tag", "")).endswith(_ORDERED):
            below = [(value, (*path, _mapping_key(name))) for name, value in _pairs(node)]
        elif kind == "sequence":
            below = [(value, (*path, index(position))) for position, value in enumerate(node.value)]
        stack += reversed(below)
        if len(stack) > visits:
            break
    if stack:
        raise ValueError("expanding the aliases gives more values than the file has bytes")


def _mapping_key(node: Any) -> PathStep:
    name = str(node.value)
    if node.id != "scalar":
        raise ValueError("a key must be a scalar, not a list or a mapping")
    if node.tag == f"{_STANDARD}merge" or len(name) > _LONGEST_NAME:
        # The values merged by << would be missing, and users of the settings would silently fall back to
        # defaults.
        raise ValueError(f"unsupported key {name[:40]!r}")
    return key(name)


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    if node.id == "mapping":
        yield from node.value
        return
    # - - - name
    #     - value
    for each in node.value[0].value if node.value and node.value[0].id == "sequence" else ():
        if each.id == "sequence" and len(each.value) == 2 and each.value[0].id == "scalar":
            yield each.value[0], each.value[1]


def _scalar(node: Any, loader: Any) -> Any:
    plain = {
        "null": loader.construct_yaml_null,
        "bool": loader.construct_yaml_bool,
        "int": loader.construct_yaml_int,
        "float": loader.construct_yaml_float,
    }
    tag = node.tag.removeprefix(_STANDARD)
    found = plain.get(tag)
    if found is None:
        return str(node.value)
    try:
        value = found(node)
        # Python refuses to print numbers with more digits by default.
        return value if not isinstance(value, int) or str(value) else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML converts text without validating it: !!bool maybe, !!float "".
        raise ValueError(f"{str(node.value)[:40]!r} is not a valid {tag}") from error
