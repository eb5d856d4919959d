"""Write checkpoints, verify them by reading back, and record how to reverse a conversion."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import keyword
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, cast

from ckpttool.commands import options as targets
from ckpttool.commands.options import TARGETS, TargetKind
from ckpttool.core import atomic_write, deferred, dtypes, plugins, sidecar
from ckpttool.core.atomic_write import (
    Output,
    Progress,
    WorkerThread,
    ignore_progress,
    keep_freed_memory,
    require_new,
    write_atomically,
)
from ckpttool.core.checkpoint import Checkpoint, keep_network_reads
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.digests import (
    SHARED,
    Digest,
    TeeSource,
    combine_digests,
    digest_checkpoint,
    hash_tensor,
    map_tensors,
)
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    NotFoundError,
    TargetExistsError,
    TruncatedError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.source import Buffer, File, Inline, Source, crc32c, iter_pieces
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, display, key
from ckpttool.formats import keras_h5, tf_common
from ckpttool.formats.detect import CheckpointLocation, matching_formats
from ckpttool.formats.embedded_tree import decode_tree, encode_tree
from ckpttool.formats.plain_json import decode_path, encode_path
from ckpttool.formats.probe import OutputFile, Probe, WritingFormat
from ckpttool.formats.tf_object_graph import MARK
from ckpttool.mapping.rules import (
    SEQUENTIAL_EDGES,
    Move,
    Plan,
    apply_plan,
    merge_parts,
    parse_rule,
    unfinished_source,
)

# Records a writer's input, leaf by leaf, and verifies that the new file contains exactly that.

_MANY = 64 << 20


class LeafChecksums:
    """The CRC-32C and SHA-256 of every leaf, computed by a background thread as the data is read.

    Read-back data is compared by CRC alone, ten times as fast: equal bytes have the SHA-256 computed
    on the way.
    """

    def __init__(self, lane: WorkerThread) -> None:
        """Start with no digests."""
        self._lane = lane
        self._crc: dict[Path, int] = {}
        self._sha256: dict[Path, str] = {}
        self._same: dict[Path, TeeSource] = {}

    def watch(self, tree: Tree, progress: Progress = ignore_progress) -> Tree:
        """Return the same tree with leaves that report the data read from them."""
        total = sum(leaf.nbytes for _, leaf in tree.tensors())
        if total >= _MANY:
            keep_freed_memory()
        # Unchanged bytes have the SHA-256 that is computed of the source anyway.
        self._same = {p: leaf.source for p, leaf in tree.tensors() if isinstance(leaf.source, TeeSource)}
        done = 0

        def seen(path: Path, data: Buffer, running: _RunningChecksums | None) -> None:
            nonlocal done
            nbytes = len(data)
            work = partial(self._note, path, data) if running is None else partial(running.update, data)
            if nbytes < SHARED:
                work()
            else:
                self._lane.do(work, nbytes)
            done += nbytes
            progress(done, total)

        def finish(path: Path, running: _RunningChecksums) -> None:
            self._lane.do(partial(self._keep, path, running))

        watched = {
            path: replace(leaf, source=_ReadbackSource(leaf.source, path, seen, finish))
            if isinstance(leaf, Leaf)
            else leaf
            for path, leaf in tree.items()
        }
        return Tree(watched, tree.aliases, tree.containers)

    def compared(self, written: Checkpoint) -> Digest:
        """Read everything back; raise FormatError unless all data matches byte for byte."""
        self._lane.wait()
        found = map_tensors(written, self._lane, self._again)
        for path in self._crc:
            if path not in found:
                raise _readback_error(path)
        return combine_digests(written, found)

    def _again(self, path: Path, leaf: Leaf) -> str:
        if path not in self._crc:
            return hash_tensor(leaf)
        running = 0
        for piece in iter_pieces(leaf.source):
            running = crc32c(piece, running)
        if running != self._crc[path]:
            raise _readback_error(path)
        return self._same[path].sha256() if path in self._same else self._sha256[path]

    def _note(self, path: Path, data: Buffer) -> None:
        running = _RunningChecksums(hashed=path not in self._same)
        running.update(data)
        self._keep(path, running)

    def _keep(self, path: Path, running: _RunningChecksums) -> None:
        self._crc[path] = running.crc
        if running.sha256 is not None:
            self._sha256[path] = running.sha256.hexdigest()


class _RunningChecksums:
    """CRC-32C of the pieces so far, and SHA-256 unless computed elsewhere."""

    def __init__(self, *, hashed: bool) -> None:
        self.crc, self.sha256 = 0, hashlib.sha256() if hashed else None

    def update(self, data: Buffer) -> None:
        """Add a piece."""
        self.crc = crc32c(data, self.crc)
        if self.sha256 is not None:
            self.sha256.update(data)


def _readback_error(path: Path) -> FormatError:
    return FormatError("the written data differs from the source", path=display(path))


@dataclass(frozen=True, slots=True)
class _ReadbackSource:
    """A source that reports to `seen` the data read from it, and to `finish` the end of its pieces."""

    base: Source
    path: Path
    seen: Callable[[Path, Buffer, _RunningChecksums | None], None]
    finish: Callable[[Path, _RunningChecksums], None]

    def read(self) -> Buffer:
        """Return the base source's bytes."""
        with self._located():
            data = self.base.read()
        self.seen(self.path, data, None)
        return data

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the base source's pieces; the first complete pass is reported."""
        running = _RunningChecksums(hashed=not isinstance(self.base, TeeSource))
        pieces = iter_pieces(self.base, verify=verify)
        while True:
            with self._located():
                piece = next(pieces, None)
            if piece is None:
                break
            if verify:
                piece = bytes(piece)
                self.seen(self.path, piece, running)
            yield piece
        if verify:
            self.finish(self.path, running)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except CkpttoolError as error:
            raise error.located(path=display(self.path)) from error


# The file that lists a folder's checkpoints and the latest, as TensorFlow writes it.


def state_file_output(target: str) -> Output:
    """Return the updated state file beside the target, with our checkpoint as the latest.

    It is read again when written, because another program may have saved in the meantime. Raise
    UsageError at once if it is damaged.
    """
    folder, name = os.path.split(target)
    path = os.path.join(folder, tf_common.NAME)
    _read_state(path)

    def put(stream: IO[bytes]) -> None:
        stream.write(_encode_with_target(_read_state(path), folder, name))

    return Output(path, put, replaces=True)


def _encode_with_target(known: tf_common.CheckpointState, folder: str, name: str) -> bytes:
    whole = os.path.abspath(os.path.join(folder, name))
    kept = [at for at, one in enumerate(known.every) if os.path.abspath(os.path.join(folder, one)) != whole]
    # TensorFlow reads times either for none or for every checkpoint.
    times = (*(known.times[at] for at in kept), time.time()) if known.times else ()
    every = (*(known.every[at] for at in kept), name)
    return tf_common.encode_state(tf_common.CheckpointState(name, every, times, known.preserved))


def _read_state(path: str) -> tf_common.CheckpointState:
    """Return the state file's contents, including its latest checkpoint; an empty state if missing."""
    if not os.path.lexists(path):
        return tf_common.CheckpointState("", ())
    if not os.path.isfile(path):
        raise UsageError("the folder's state file is not a regular file", file=path)
    try:
        known = tf_common.read_state(path)
    except (FormatError, OSError) as error:
        reason = error.message if isinstance(error, FormatError) else error.strerror
        raise UsageError(
            f"cannot update the folder's state file: {reason}",
            file=path,
            hint="repair it, remove it, or write into another folder",
        ) from error
    return (
        known if known.latest in known.every else known._replace(every=(*known.every, known.latest), times=())
    )


# Writes a tree as a checkpoint: beside the target, read back, compared, then renamed.


def require_writable_target(
    target: str, kind: TargetKind, sources: tuple[File, ...] = (), *, force: bool = False
) -> None:
    """Raise unless `target` may be written; the prefix of an existing checkpoint counts as taken."""
    if kind.prefix:
        _require_prefix(target)
    if target.endswith(sidecar.SUFFIX):
        raise UsageError(
            "the target has the name of another checkpoint's sidecar",
            file=target,
            hint="choose another name",
        )
    require_new(target, sources, force=force)
    probe = Probe(target)
    if probe.kind == "missing":
        with contextlib.suppress(NotFoundError, TruncatedError):
            for claim in matching_formats(probe, plugins.BUILT_IN["formats"]):
                if force and kind.format == claim.format.NAME:
                    _require_other(claim, sources)
                    continue
                raise TargetExistsError(
                    f"a checkpoint with this name already exists ({claim.format.NAME})",
                    file=target,
                    hint="use --force to replace it"
                    if kind.format == claim.format.NAME
                    else "choose another name",
                )


def require_new_target(target: str, kind: TargetKind, checkpoint: Checkpoint, *, force: bool) -> None:
    """Raise unless a conversion's target and its sidecar may be written."""
    require_writable_target(target, kind, checkpoint.files, force=force)
    require_new(sidecar.sidecar_path(target), checkpoint.files, force=force)


def _require_prefix(target: str) -> None:
    """Raise if the target exists: a checkpoint's prefix is not a file name."""
    if os.path.isdir(target) or not os.path.basename(target):
        raise TargetExistsError(
            "the target is a folder, but must be the common prefix of the checkpoint's files",
            file=target,
            hint=f"use {os.path.join(target, 'ckpt-1')}",
        )
    if os.path.lexists(target):
        raise TargetExistsError(
            "the target is an existing file, so the name would denote two checkpoints",
            file=target,
            hint="choose another name",
        )


def _require_other(claim: CheckpointLocation, sources: tuple[File, ...]) -> None:
    """Raise if the checkpoint to be replaced is the one being converted."""
    if _file_identities(claim.format.read(claim.location).files) & _file_identities(sources):
        raise UsageError("source and target are the same checkpoint", file=claim.location)


def _require_no_rest(target: str, writer: WritingFormat, outputs: list[Output]) -> None:
    """Raise if an existing file would become part of the new set without being replaced."""
    replaced = {os.path.abspath(output.file) for output in outputs}
    members = getattr(writer, "members", None)
    for file in members(target) if members is not None else ():
        if os.path.abspath(file) not in replaced:
            raise TargetExistsError(
                "an existing file would become part of the new checkpoint", file=file, hint="remove it first"
            )


def _file_identities(files: tuple[File, ...]) -> set[tuple[int, int]]:
    """Return the device and inode, which identify files independently of path spelling."""
    found = [os.stat(file.path) for file in files if os.path.exists(file.path)]
    return {(known.st_dev, known.st_ino) for known in found}


def save(
    tree: Tree,
    target: str,
    to: str | None = None,
    *,
    force: bool = False,
    sync: bool = True,
    progress: Progress = ignore_progress,
) -> Digest:
    """Write a tree unchanged to a new file and return the digest of the data read back."""
    kind = targets.parse_target_kind(target, to)
    require_writable_target(targets.target_stem(target, kind), kind, force=force)
    return write_checkpoint(tree, target, kind, WriteOptions((), force, sync, progress))


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How files are written.

    Args:
        sources: files that the tree is read from; ChangedError is raised if they changed meanwhile.
        force: replace what exists.
        sync: flush to disk before the rename.
        progress: called with the bytes written and the total.

    """

    sources: tuple[File, ...] = ()
    force: bool = False
    sync: bool = True
    progress: Progress = ignore_progress


def write_checkpoint(
    tree: Tree,
    target: str,
    kind: TargetKind,
    how: WriteOptions,
    *,
    receipt: Callable[[Digest, Checkpoint], Sidecar] | None = None,
    others: Callable[[Mapping[Path, Path], WorkerThread], Sequence[Output]] | None = None,
) -> Digest:
    """Write the tree with `others` and the sidecar that `receipt` builds from the file read back.

    `receipt` also gets the digest; if it raises, nothing is written. `others` gets a mapping from the
    tensors' paths to those read back, and the worker that compares files with trees. A checkpoint
    identified by a prefix becomes the latest in its folder's state file.
    """
    writer = cast(WritingFormat, plugins.find("formats", kind.format).load())
    target = targets.target_stem(target, kind)
    options = targets.writer_options(target, kind)
    stored = with_stored_paths(writer, tree, options)
    result: list[tuple[Digest, Checkpoint]] = []
    with WorkerThread() as lane:
        taken = LeafChecksums(lane)

        def check(temporary: str) -> None:
            location = writer.claims(Probe(temporary))
            found = keep_network_reads(writer.read(temporary if location is None else location))
            result.append((taken.compared(found), found))

        between = {"between": target} if kind.state else {}
        pieces = writer.pieces(taken.watch(stored, how.progress), **options, **between)
        outputs = _target_outputs(target.removesuffix(kind.ending), pieces, stored, check)
        for output in outputs if kind.prefix else ():
            if not output.extra:
                require_new(output.file, how.sources, force=how.force)
        if kind.prefix and not kind.state:
            _require_no_rest(target, writer, outputs)
        if others is not None:
            outputs += others(stored_paths(tree, stored), lane)
        if receipt is not None:
            make = receipt

            def put(stream: IO[bytes]) -> None:
                stream.write(make(*result[0]).encode())

            outputs.append(Output(sidecar.sidecar_path(target), put, follows=True))
        if kind.state:
            outputs.append(state_file_output(target))
        replaced = partial(_existing_files, writer, target) if kind.state else tuple
        write_atomically(outputs, force=how.force, sync=how.sync, sources=how.sources, replaced=replaced)
    return result[0][0]


def _target_outputs(
    base: str, pieces: Sequence[OutputFile], stored: Tree, check: Callable[[str], None]
) -> list[Output]:
    """Return the checkpoint's files; the last one is checked together with all of them."""
    outputs = [
        Output(
            base,
            piece.write,
            suffix=piece.suffix,
            indexes=piece.indexes,
            meanwhile=piece.meanwhile,
            extra=piece.extra,
        )
        for piece in pieces
    ]
    outputs[0] = outputs[0]._replace(nbytes=sum(leaf.nbytes for _, leaf in stored.tensors()))
    outputs[-1] = outputs[-1]._replace(check=check)
    return outputs


def _existing_files(writer: WritingFormat, target: str) -> tuple[str, ...]:
    """Return the files of the existing checkpoint at the target, none if none is complete.

    They are removed when the new files are in place, so only files starting with the target's name
    count.
    """
    begin = os.path.abspath(target) + "."
    with contextlib.suppress(CkpttoolError):
        if writer.claims(Probe(target)) is not None:
            paths = (file.path for file in writer.read(target).files)
            return tuple(path for path in paths if os.path.abspath(path).startswith(begin))
    return ()


def stored_paths(tree: Tree, stored: Tree) -> dict[Path, Path]:
    """Return the stored paths of a tree's tensors, by their paths in it."""
    # A format that changes paths keeps the same source objects.
    there = {id(leaf.source): path for path, leaf in stored.tensors()}
    return {path: there[id(leaf.source)] for path, leaf in tree.tensors() if id(leaf.source) in there}


def with_stored_paths(writer: WritingFormat, tree: Tree, options: Mapping[str, Any]) -> Tree:
    """Return the tree with read-back paths, if the format changes any."""
    change = getattr(writer, "stored", None)
    return tree if change is None else cast(Tree, change(tree, **options))


# Reversing a conversion: the source's structure, entry by entry, and what restores each entry.
#
# The receipt contains a record of the source's tree without its numbers. An entry is restored from the target
# by the inverse of its rule, from the record itself if it is small, or from `DST.ckpttool.residue.pt`, a
# PyTorch file beside the target for everything else. The record contains the digest of that file.

SUFFIX = ".ckpttool.residue.pt"
_FORMAT = "pytorch"
_SMALL = 64  # bytes of a tensor stored in the record itself
_MOST_BYTES = 4 << 20  # the limit for a sidecar is 16 MB
_TOP = Container("dict")
_IRREVERSIBLE = "not reversible: "
_FOREIGN = "the source contains objects of classes that the record cannot store"


def is_unavoidable_note(note: str) -> bool:
    """Return whether no option changes what a note reports: it concerns every such source."""
    return note.startswith(_IRREVERSIBLE + _FOREIGN)


@dataclass(slots=True)
class ReverseRecord:
    """The source's packed tree, None if not reversible (`why`), and data stored separately."""

    tree: str | None = None
    kept: Tree = field(default_factory=lambda: Tree({}))
    why: str | None = None
    _sha256: str | None = None

    @property
    def note(self) -> str | None:
        """The note shown when the source cannot be restored."""
        return None if self.why is None else f"{_IRREVERSIBLE}{self.why}"

    @property
    def record(self) -> Mapping[str, str | None] | None:
        """The record in the sidecar, after the residue file has been written."""
        return None if self.tree is None else {"tree": self.tree, "residue_sha256": self._sha256}

    def outputs(self, target: str, lane: WorkerThread) -> list[Output]:
        """Return the residue file to write beside the target, if any; the background thread compares it."""
        if not self.kept:
            return []
        writer = cast(WritingFormat, plugins.find("formats", _FORMAT).load())
        taken = LeafChecksums(lane)
        (piece,) = writer.pieces(taken.watch(self.kept))

        def check(temporary: str) -> None:
            self._sha256 = taken.compared(writer.read(temporary)).sha256

        nbytes = sum(leaf.nbytes for _, leaf in self.kept.tensors())
        return [Output(residue_path(target), piece.write, check, nbytes=nbytes, follows=True)]


def residue_path(path: str) -> str:
    """Return the name of the residue of the checkpoint at `path` (a file or a prefix)."""
    return path + SUFFIX


def record_reverse(source: Tree, moves: Sequence[Move], written: Mapping[Path, Path]) -> ReverseRecord:
    """Return how to restore `source` from a target; `written` are the tensors' paths as read back.

    Nothing is recorded when something cannot be restored: an object of a foreign class.
    """
    foreign = [held.name for held in source.containers.values() if held.kind in ("record", "module")]
    if foreign:
        named = abbreviate_list(sorted({name for name in foreign if name}), 2)
        return ReverseRecord(why=f"{_FOREIGN} ({named})" if named else _FOREIGN)
    ways: dict[Path, list[Move]] = {}
    for move in moves:
        if move.target in written and parse_rule(move.rule.name) == move.rule:
            ways.setdefault(move.source, []).append(move)
    names = {alias.path: alias.key for others in source.aliases.values() for alias in others if alias.key}
    kept: dict[Path, Leaf | ValueLeaf] = {}
    tensors: dict[str, Any] = {}
    for path, leaf in source.tensors():
        names[path] = name = str(len(tensors))
        tensors[name] = {"key": leaf.key, "dtype": leaf.dtype, "shape": leaf.shape}
        back = _inverse_moves(leaf, ways.get(path, ()))
        if back:
            tensors[name]["from"] = [[encode_path(written[move.target]), move.rule.name] for move in back]
        elif leaf.nbytes <= _SMALL and leaf.size <= _SMALL:
            tensors[name]["data"] = base64.b64encode(leaf.read()).decode()
        elif dtypes.BY_NAME[leaf.dtype].torch is not None:
            kept[key(name),] = Leaf(leaf.dtype, leaf.shape, leaf.source, name)
        else:
            return ReverseRecord(
                why=f"{source.names[path]} ({leaf.dtype}) cannot be stored beside the target"
            )
    try:
        text = json.dumps({"tree": encode_tree(source, names), "tensors": tensors})
    except CkpttoolError as error:
        return ReverseRecord(why=error.message)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > _MOST_BYTES:
        return ReverseRecord(why=f"the record would exceed {_MOST_BYTES >> 20} MB")
    return ReverseRecord(packed, Tree(kept, {}, {(): _TOP}))


def _inverse_moves(leaf: Leaf, ways: Sequence[Move]) -> list[Move]:
    """Return the moves whose inverses together restore the leaf, none if they do not."""
    parts: list[Move] = []
    whole: Leaf | ValueLeaf | None = None
    for move in ways:
        again = move.rule.inverse(leaf).leaf(move.rule.leaf(leaf))
        if unfinished_source(again) is None:
            return [move]
        whole = again if whole is None else merge_parts(whole, again)
        parts.append(move)
        if whole is None:
            return []
    made = unfinished_source(whole) if whole is not None else None
    return parts if made is not None and made.finished else []


# Reverses a conversion by its receipt: every source entry under its own path and name, bit for bit.

_MAX_RECORD_BYTES = 64 << 20


class ReverseConversion(NamedTuple):
    """The source's tree and its origin; None if it cannot be restored, and a note why."""

    tree: Tree | None = None
    moves: tuple[Move, ...] = ()
    note: str | None = None


def reverse_conversion(tree: Tree, record: Mapping[str, Any], path: str) -> ReverseConversion:
    """Return the source of `tree`, the target at `path`, from the record in its sidecar.

    Raise FormatError for an invalid record.
    """
    kept = _read_residue(path, record.get("residue_sha256"))
    if isinstance(kept, str):
        return ReverseConversion(note=kept)
    try:
        return _rebuild_tree(tree, _unpack_record(record.get("tree")), kept)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        zlib.error,
        CkpttoolError,
    ) as error:
        raise FormatError("the sidecar's record of its source is damaged", file=path) from error


def _read_residue(path: str, sha256: object) -> Tree | str:
    """Return the residue stored beside the checkpoint, or why it cannot be used."""
    file = residue_path(path)
    if sha256 is None:
        return Tree({})
    there = os.path.isfile(file)
    reader = cast(WritingFormat, plugins.find("formats", "pytorch").load())
    if there and digest_checkpoint(found := reader.read(file)).sha256 == sha256:
        return found.tree
    for each in atomic_write.find_pending_files(file):
        with contextlib.suppress(CkpttoolError):
            if digest_checkpoint(found := reader.read(each)).sha256 == sha256:
                return found.tree
    if not there:
        return f"{os.path.basename(file)} is missing, so the entries stored in it are not restored"
    return f"{os.path.basename(file)} belongs to another conversion and is not used"


def _unpack_record(text: object) -> Mapping[str, Any]:
    if not isinstance(text, str):
        raise TypeError("not a string")
    engine = zlib.decompressobj()
    data = engine.decompress(base64.b64decode(text, validate=True), _MAX_RECORD_BYTES)
    if not engine.eof:
        raise ValueError("truncated or too long")
    record = json.loads(data)
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    return record


def _rebuild_tree(tree: Tree, record: Mapping[str, Any], kept: Tree) -> ReverseConversion:
    """Return the recorded tree over the restored tensors, each by its number."""
    moves: list[Move] = []
    added: dict[Path, Leaf | ValueLeaf] = {}
    for name, recorded in record["tensors"].items():
        if "from" in recorded:
            moves += [_recorded_move(tree, recorded, name, *way) for way in recorded["from"]]
        else:
            added[key(name),] = kept[key(name),] if "data" not in recorded else _inline_leaf(recorded)
    flat = apply_plan(tree, Plan(tuple(moves), added))
    arrays = {name: _restore_key(flat[key(name),], recorded) for name, recorded in record["tensors"].items()}
    made = decode_tree(record["tree"].encode(), arrays)
    places = {id(leaf.source): place for place, leaf in made.tensors()}
    there = {name: places[id(leaf.source)] for name, leaf in arrays.items()}
    return ReverseConversion(
        made, tuple(replace(move, target=there[str(move.target[0].value)]) for move in moves)
    )


def _recorded_move(tree: Tree, recorded: Mapping[str, Any], name: str, at: object, text: str) -> Move:
    source, rule = decode_path(at, {}), parse_rule(text)
    if rule is None or source not in tree:
        raise ValueError("unknown rule or tensor")
    leaf = tree[source]
    if not isinstance(leaf, Leaf):
        raise TypeError("not a tensor")
    # The inverse of a cast or a reshape needs the tensor's original dtype and shape.
    return Move(
        source,
        (key(name),),
        rule.inverse(Leaf(recorded["dtype"], _recorded_shape(recorded), Inline(b""), "")),
    )


def _recorded_shape(recorded: Mapping[str, Any]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in recorded["shape"]):
        raise ValueError("invalid shape")
    return tuple(recorded["shape"])


def _inline_leaf(recorded: Mapping[str, Any]) -> Leaf:
    data = base64.b64decode(recorded["data"], validate=True)
    leaf = Leaf(recorded["dtype"], _recorded_shape(recorded), Inline(data), "")
    if leaf.nbytes != len(data) and leaf.dtype != "string":
        raise ValueError("the length does not match the shape")
    return leaf


def _restore_key(leaf: Leaf | ValueLeaf, recorded: Mapping[str, Any]) -> Leaf:
    if (
        not isinstance(leaf, Leaf)
        or leaf.shape != _recorded_shape(recorded)
        or not isinstance(recorded["key"], str)
    ):
        raise TypeError("the tensor does not match the record")
    return replace(leaf, key=recorded["key"])


# Python lines that load a conversion's output, built from the written tree.

_MOST, _WIDTH = 8, 80
_GROUPS = "param_groups"
_ENDINGS = ("_state_dict", "_state", ".state_dict")
_WHOLE = frozenset(("state_dict", "model", "module", "net", "network", "params", "weights", "policy_dict"))
_WEIGHTS = ".weights.h5"
_TRAINED = ("parameter", "buffer")
# tf.train.Checkpoint creates this variable itself.
_SAVES = "save_counter"
# Edges between a Keras model and its layers (keras/src/models, tf_keras): the object above them is a model.
_EDGE = deferred.compile(r"_functional|_layers|_operations|layers|layer_with_weights-\d+|layer-\d+")
_COUNTS = frozenset(("_iterations", "iterations", "iter"))
_MOST_NAMED = 4  # objects that are arguments of tf.train.Checkpoint


def format_loading_code(
    target: str, kind: TargetKind, tree: Tree, *, foreign: bool = False, root: bool = False
) -> tuple[str, ...]:
    """Return at most eight lines that load the target, none for targets in an RL library's own format.

    `tree` was written to `target`, a file or a TensorFlow prefix. `foreign` names, from another
    framework, may start with objects that no PyTorch model has. With `root`, the source is one model's
    state_dict.
    """
    if kind is TARGETS["torch"]:
        return _torch(target, tree, foreign=foreign)
    if kind is TARGETS["tf"]:
        return _objects(target, tree, root=root)
    if kind is TARGETS["tf1"]:
        return (f"tf.compat.v1.train.Saver().restore(session, {python_literal(target)})",)
    if kind is TARGETS["keras"]:
        return _keras(target, tree, str(kind.options.get("root", "")))
    return ()


def python_literal(value: object) -> str:
    """Return a string or number as a Python literal, double-quoted unless it needs escapes."""
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable() and '"' not in value and "\\" not in value
    return f'"{value}"' if plain else ascii(value)


def _torch(target: str, tree: Tree, *, foreign: bool) -> tuple[str, ...]:
    states, optimizers, partial_states = _find_state_dicts(tree)
    source = f"torch.load({python_literal(target)}, weights_only=True)"
    if not states:
        return (f"tensors = {source}",)

    def load(name: str, at: Path, state: str) -> str:
        return f"{name}.load_state_dict({state}{', strict=False' if at in partial_states else ''})"

    if len(states) == 1 and not optimizers:
        (at,) = states
        items = f"{source}{_items(at)}"
        paths = (path for path, leaf in tree.tensors() if path[:-1] == at and leaf.role in _TRAINED)
        modules = list(dict.fromkeys(str(path[-1].value).rpartition(".")[0] for path in paths))
        above = _shared_prefixes(modules) if foreign else ""
        about = _format_names("# modules of model: ", (name.removeprefix(above) for name in modules))
        if not above:
            return (load(_variable_name(at), at, items), *((about,) if foreign else ()))
        shorter = f"{{k.removeprefix({python_literal(above)}): v for k, v in state.items()}}"
        load_state = load(_variable_name(at), at, "state")
        return (f"state = {items}", f"state = {shorter}", load_state, about)
    names = _variable_names((*states, *optimizers))
    shown = list(names)[: _MOST - 1 if len(names) < _MOST else _MOST - 2]
    lines = [load(names[at], at, f"checkpoint{_items(at)}") for at in shown]
    rest = list(names.values())[len(shown) :]
    return (f"checkpoint = {source}", *lines, *([_format_names("# likewise ", rest)] if rest else ()))


def _shared_prefixes(modules: list[str]) -> str:
    """Return the objects above all modules, with a trailing dot: `model.` for model.fc1, model.fc2."""
    split = [name.split(".") for name in modules]
    depth = 0
    while all(len(each) > depth + 1 and each[depth] == split[0][depth] for each in split):
        depth += 1
    return "".join(f"{segment}." for segment in split[0][:depth])


def _find_state_dicts(tree: Tree) -> tuple[list[Path], list[Path], set[Path]]:
    """Return where the written dict contains state_dicts of modules and of optimizers.

    The last result are the dicts of modules that also contain entries which no module loads.
    """
    steps = {path: [step.value for step in path] for path in tree}
    optimizers = dict.fromkeys(
        path[: names.index(_GROUPS)] for path, names in steps.items() if _GROUPS in names
    )
    states = dict.fromkeys(
        path[:-1]
        for path, leaf in tree.tensors()
        if leaf.role in _TRAINED and path and isinstance(path[-1].value, str) and "." in path[-1].value
    )
    inside = [at for at in states if optimizers.keys().isdisjoint(at[:n] for n in range(len(at) + 1))]
    extended = {
        path[:depth] for path, leaf in tree.items() for depth in range(len(path) - isinstance(leaf, Leaf))
    }
    return inside, list(optimizers), extended.difference(optimizers)


def _items(at: Path) -> str:
    return "".join(f"[{python_literal(step.value)}]" for step in at)


def _variable_names(places: Collection[Path]) -> dict[Path, str]:
    """Return a unique variable name for each place: longer names or numbers where several would be equal."""
    names = {at: _variable_name(at) for at in places}
    wholes = {
        at: "_".join(re.sub(r"\W", "_", str(step.value), flags=re.ASCII) for step in at) for at in places
    }
    longer, several = Counter(wholes.values()), Counter(names.values())
    for number, (at, name) in enumerate(names.items()):
        if several[name] > 1:
            whole = wholes[at]
            names[at] = whole if longer[whole] == 1 and whole.isidentifier() else f"{name}_{number}"
    return names


def _variable_name(at: Path) -> str:
    """Return a variable name for a path: `actor` for checkpoint["actor_state_dict"]."""
    for step in reversed(at):
        name = str(step.value).replace("-", "_").replace(".", "_")
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        if name in _WHOLE:
            return "model"
        if is_word(name) and name.isascii():
            return name
    return "model"


def _objects(target: str, tree: Tree, *, root: bool) -> tuple[str, ...]:
    """Return how `tf.train.Checkpoint` restores the objects: one at the root, or several by name."""
    weights = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    tops = list(dict.fromkeys(str(path[0].value) for path in weights))
    objects = dict.fromkeys((*tops, *(str(top[0].value) for top in _keras_optimizers(tree))))
    names = dict.fromkeys(str(path[0].value) for path in tree)
    inside = {str(path[0].value) for path in tree if len(path) > 1}
    every = [name for name in objects if name in inside]
    others = [name for name in names if name not in objects and name != _SAVES]
    others += [name for name in objects if name not in inside]
    root = root or _is_model(weights)
    if root:
        others = [name for name in others if name not in {*tops}]
    # A file of `write` or `save_weights` has no save count, which `restore` expects.
    kept = any(MARK in leaf.key for _, leaf in tree.tensors())
    read = "read" if kept and _SAVES not in names else "restore"
    # `assert_consumed` would also need a variable for every counter.
    check = "assert_existing_objects_matched" if others else "assert_consumed"
    restore = f".{read}({python_literal(target)}).{check}()"
    if root:
        inner = [top for top in tops if not _EDGE.fullmatch(top)]
        lines = [f"tf.train.Checkpoint(model){restore}"]
        lines += [_format_names("# attributes of model: ", inner)] * bool(inner)
        lines += _other_content_lines(others)
        return (*lines, *_container_lines(tree, {}, _MOST - len(lines)))
    if not every:
        return (f"reader = tf.train.load_checkpoint({python_literal(target)})",)
    short = {name: _variable_name((key(name),)) for name in every}
    named = short if len({*short.values()}) == len(short) else {name: name for name in every}
    if all(map(is_word, every)) and len(every) <= _MOST_NAMED:
        values = ", ".join(
            f"{name}={_object_expression(name, variable, tree)}" for name, variable in named.items()
        )
        lines = [f"tf.train.Checkpoint({values}){restore}"]
    else:
        named = dict(zip(every, every, strict=True))
        lines = [_format_names("# objects is a dict of ", [python_literal(name) for name in every])]
        lines.append(f"tf.train.Checkpoint(**objects){restore}")
    for name in [name for name in every if name in tops][:_MOST_NAMED]:
        below = dict.fromkeys(str(path[1].value) for path in weights if str(path[0].value) == name)
        inner = [step for step in below if not _EDGE.fullmatch(step)]
        if inner:
            lines.append(_format_names(f"# attributes of {named[name]}: ", inner))
    lines += _other_content_lines(others) or [
        "# for a subset of the objects: .assert_existing_objects_matched()"
    ]
    lines = lines[:_MOST]
    return (*lines, *_container_lines(tree, named, _MOST - len(lines)))


# What the numbers in an object graph belong to: layers of a keras.Sequential, or items of a list.

_Objects = dict[str, Any]
_ARGUMENTS = "# add the activations, Dense(8, activation=...): the file has none"
_LISTS = "# lists of a tf.Module (a keras.Model saves none): "


def _container_lines(tree: Tree, named: Mapping[str, str], room: int) -> list[str]:
    """Return the code of the Sequentials in a tree, and the names of its lists, in at most `room` lines.

    `named` are the variables of the objects at the top; without them the root is `model`.
    """
    root: _Objects = {}
    for path, leaf in tree.tensors():
        if leaf.role in _TRAINED:
            node = root
            for step in path[:-1]:
                node = node.setdefault(str(step.value), {})
            node[str(path[-1].value).removeprefix("_")] = leaf
    owners: dict[str, list[str]] = {}
    lists: list[str] = []
    tops: dict[str, object] = {"model": root}
    if named:
        tops = {named.get(name, name): each for name, each in root.items()}
    waiting = [*tops.items()]
    waiting.reverse()
    while waiting:
        name, content = waiting.pop()
        if not isinstance(content, dict):
            continue
        if layers := _numbered_layers(content):
            owners.setdefault(_sequential_code(layers), []).append(name)
        elif content and all(step.isdecimal() for step in content):
            lists.append(name)
        inner = [(f"{name}.{step}", each) for step, each in content.items() if not _EDGE.fullmatch(step)]
        waiting += reversed(inner)
    lines = [line for code, names in owners.items() for line in _wrap_code(f"# {', '.join(names)}: ", code)]
    lines += [_ARGUMENTS] * bool(owners)
    lines += [_format_names(_LISTS, lists)] * bool(lists)
    if len(lines) > room:
        lines = [*lines[: max(room - 1, 0)], "# ..."][:room]
    return lines


def _numbered_layers(node: _Objects) -> dict[int, _Objects]:
    """Return the layers of a Sequential by their numbers, none if the object is not one."""
    inner, edge = SEQUENTIAL_EDGES
    held = node.get(inner, {})
    layers = held.get(edge, {}) if isinstance(held, dict) else {}
    return {int(number): layer for number, layer in layers.items() if number.isdecimal()}


def _sequential_code(layers: Mapping[int, _Objects]) -> str:
    """Return the call that makes a Sequential; `...` is a layer that the file does not determine."""
    first, shape = layers.get(1, {}), "..."
    cell = first.get("cell")
    kernel = (cell if isinstance(cell, dict) else first).get("kernel")
    if isinstance(kernel, Leaf):
        shape = repr((*(None,) * (1 if cell else len(kernel.shape) - 2), kernel.shape[-2]))
    elif "embeddings" in first:
        shape = "(None,)"
    code = [_layer_code(layers[n]) if n in layers else "..." for n in range(1, max(layers) + 1)]
    return f"keras.Sequential([{', '.join([f'keras.Input({shape})', *code])}])"


def _layer_code(layer: _Objects) -> str:
    """Return the call that makes a layer of these variables."""
    if inner := _numbered_layers(layer):
        return _sequential_code(inner)
    members = {name: each for name, each in layer.items() if isinstance(each, Leaf)}
    cell = layer.get("cell", {})
    if layer.keys() - members.keys() - {"cell"} or not isinstance(cell, dict):
        return "..."
    name = keras_h5.layer_class(members, cell)
    shapes = {name: leaf.shape for name, leaf in (members or cell).items()}
    bare = "" if "bias" in shapes else ", use_bias=False"
    if name == "dense":
        return f"Dense({shapes['kernel'][-1]}{bare})"
    if name in ("conv1d", "conv2d", "conv3d"):
        *size, _, filters = shapes["kernel"]
        form = size[0] if len({*size}) == 1 else tuple(size)
        return f"{name.replace('conv', 'Conv').replace('d', 'D')}({filters}, {form}{bare})"
    if name in ("lstm", "gru"):
        return f"{name.upper()}({shapes['recurrent_kernel'][0]}{bare})"
    if name == "embedding":
        return f"Embedding({', '.join(map(str, shapes['embeddings']))})"
    if name in ("batch_normalization", "layer_normalization"):
        absent = [word for word, own in (("center", "beta"), ("scale", "gamma")) if own not in shapes]
        return f"{name.split('_')[0].title()}Normalization({', '.join(f'{word}=False' for word in absent)})"
    return "..."


def _wrap_code(before: str, code: str) -> list[str]:
    """Return code in comment lines, broken between the layers."""
    lines = [before]
    for piece in re.split(r"(?<=, )(?=[A-Z.])", code):
        if len(lines[-1]) + len(piece.rstrip()) > _WIDTH - 6 and lines[-1] != before:
            lines.append("#     ")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _other_content_lines(others: Collection[str]) -> list[str]:
    return [_format_names("# the file also contains ", others)] if others else []


def _is_model(weights: Iterable[Path]) -> bool:
    """Whether the root is a model with layers as attributes, not a dict of objects."""
    deepest: dict[str, int] = {}
    for path in weights:
        top = str(path[0].value)
        deepest[top] = max(deepest.get(top, 0), len(path))
    if any(map(_EDGE.fullmatch, deepest)):
        return True
    # Variables of the root itself occur beside objects and beside layers.
    modules = [depth for depth in deepest.values() if depth > 1]
    return bool(deepest) and (not modules or (len(modules) > 1 and min(modules) == 2))


def _keras_optimizers(tree: Tree) -> list[Path]:
    """Return where optimizers are: above an update count, or at the top with only slots.

    A count at the root is a number of the program (`iter`), because the root holds the objects.
    """
    counted = dict.fromkeys(path[:-1] for path in tree if len(path) > 1 and str(path[-1].value) in _COUNTS)
    with_slots = (path[:1] for path, leaf in tree.tensors() if leaf.role == "slot")
    return [*counted, *(top for top in dict.fromkeys(with_slots) if all(at[:1] != top for at in counted))]


def _object_expression(name: str, variable: str, tree: Tree) -> str:
    """Return the expression for an object: a list if the file numbers optimizers."""
    numbers = [top[1].value for top in _keras_optimizers(tree) if str(top[0].value) == name and len(top) == 2]
    if not numbers or not all(str(number).isdecimal() for number in numbers):
        return variable
    if len(numbers) == 1:
        return "[optimizer]"
    return f"[{', '.join(f'optimizer_{number}' for number in range(len(numbers)))}]"


def is_word(name: str) -> bool:
    """Return whether a name can be a variable."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _keras(target: str, tree: Tree, root: str) -> tuple[str, ...]:
    load = target if target.endswith(_WEIGHTS) else f"{os.path.splitext(target)[0]}{_WEIGHTS}"
    # Keras requires this suffix.
    copied = () if load == target else (f"shutil.copyfile({python_literal(target)}, {python_literal(load)})",)
    paths = [path for path, leaf in tree.tensors() if leaf.role in _TRAINED]
    cut = int(bool(root) and all(str(path[0].value) == root and len(path) > 2 for path in paths))
    tops = dict.fromkeys(str(path[cut].value) for path in paths)
    about = [_format_names("# attributes of model: ", tops)]
    if all(top.isdigit() or _EDGE.fullmatch(top) for top in tops):
        about = ["# model: a Sequential or functional model of the same layers"]
    elif any(len(path) - cut > 3 and not _EDGE.fullmatch(str(path[cut].value)) for path in paths):
        # Keras first searches a model's contents below `layers`, and does not support models inside models.
        about.append("# objects between the model and its layers must be keras.layers.Layer, not keras.Model")
    return (*copied, f"model.load_weights({python_literal(load)})", *about)


def _format_names(before: str, names: Iterable[str]) -> str:
    """Return names in one line, cut after the last that fits; no more are read than fit."""
    end = ", ..."
    shown: list[str] = []
    width, cut = len(before), 1
    for name in names:
        shown.append(name if name.isprintable() else ascii(name))
        width += len(shown[-1]) + (2 if len(shown) > 1 else 0)
        if width > _WIDTH and len(shown) > 1:
            return f"{before}{', '.join(shown[:cut])}{end}"
        cut = len(shown) if width + len(end) <= _WIDTH else max(cut, 1)
    return before + ", ".join(shown)
