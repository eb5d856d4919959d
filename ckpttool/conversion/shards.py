"""Write a target in shards: each is written, read back and recorded alone, so that a rerun continues."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from ckpttool.conversion.readback import LeafChecksums, checksum_tensor
from ckpttool.core import deferred, filesystem, limits, text
from ckpttool.core.atomic_write import (
    TEMPORARY,
    Output,
    Progress,
    WorkerThread,
    create_file,
    describe_os_error,
    hidden_path,
    ignore_progress,
    is_hidden_name,
    lock_folders,
    remove_files,
    require_free_space,
    require_new,
    temporary_path,
)
from ckpttool.core.checkpoint import Checkpoint, keep_network_reads
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.digests import Digest, DigestRecorder, combine_digests
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, FormatError, TargetExistsError, UsageError, WorkerError
from ckpttool.core.filesystem import WritableStore
from ckpttool.core.sidecar import Sidecar, sidecar_path
from ckpttool.core.source import File
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, display
from ckpttool.formats.plain_json import decode_path, encode_path
from ckpttool.formats.probe import OutputFile, Probe, Shard, ShardPlan, WritingFormat
from ckpttool.verification.output_comparison import OutputMismatchError
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.conversion.write import WriteOptions


_FOLDER = "shards"
_JOURNAL = "journal.json"
_RECORD = ".record"
# The default representation of an object, which has no content, contains an address.
_ADDRESS = deferred.compile(r" at 0x[0-9a-f]+")
_SECONDS = 0.5


class ShardedWrite(NamedTuple):
    """What is written in shards: `stored` is the tree as it will be read back.

    `target` is the checkpoint's path, `base` the beginning of its files' names.
    """

    writer: WritingFormat
    plan: ShardPlan
    stored: Tree
    target: str
    base: str
    how: WriteOptions


def plan_shards(writer: WritingFormat, stored: Tree, base: str, options: Mapping[str, Any]) -> ShardPlan:
    """Return the shards of a tree; `base` is the target's name without the shards' suffixes."""
    # The index of Hugging Face's shards contains their names.
    names = {"stem": os.path.basename(base)} if writer.NAME == "sharded" else {}
    plan: ShardPlan = cast(Any, writer).plan_shards(stored, **options, **names)
    return plan


class ShardRecord(NamedTuple):
    """What is known of a complete shard.

    `indexed` is what the index records about it, `tensors` the CRC-32C and SHA-256 of its tensors in the
    shard's order, `read` the SHA-256 of the source's tensors that were read for it, `stored` the identity of
    an object (filesystem.FileStat).
    """

    indexed: Any
    tensors: list[tuple[int, str]]
    read: Mapping[Path, str]
    stored: Sequence[int] = ()

    def encode(self) -> bytes:
        """Return the record as JSON."""
        read = [[encode_path(path), sha256] for path, sha256 in self.read.items()]
        document = {"indexed": self.indexed, "tensors": self.tensors, "read": read, "stored": self.stored}
        return json.dumps(document).encode()

    @classmethod
    def parse(cls, file: str) -> ShardRecord:
        """Return the record in a file; raise FormatError if it is not a record."""
        document = text.load_json(file, "the record of a shard", "header_bytes")
        try:
            tensors = [(int(crc), str(sha256)) for crc, sha256 in document["tensors"]]
            read = {decode_path(path, {}): str(sha256) for path, sha256 in document["read"]}
            return cls(document["indexed"], tensors, read, tuple(document["stored"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError("the record of a shard is damaged", file=file) from error


@contextlib.contextmanager
def working_folder(write: ShardedWrite) -> Iterator[str]:
    """Yield the locked working folder; it stays for a rerun if the block fails after a shard is complete.

    Raise UsageError if it belongs to a conversion of another source, plan or version, TargetExistsError if a
    file of the target exists. The folder beside the target contains complete shards under their final names,
    a record beside each, and the journal, which states what they are shards of. It is removed when the target
    has its name.
    """
    suffixes = [*(shard.suffix for shard in write.plan.shards), write.plan.index_suffix]
    for suffix in suffixes if not write.plan.index_suffix.startswith("/") else ():
        require_new(write.base + suffix, write.how.sources, force=write.how.force)
    folder = hidden_path(write.target, TEMPORARY, _FOLDER)
    try:
        os.makedirs(folder, exist_ok=True)
        with lock_folders([folder]):
            if os.path.islink(folder) or not os.path.isdir(folder):
                raise TargetExistsError(
                    "another program has replaced the folder of this conversion", file=folder
                )
            try:
                _enter_journal(folder, write)
                yield folder
            except BaseException as error:
                recorded = (name.endswith(_RECORD) for _, _, names in os.walk(folder) for name in names)
                if isinstance(error, OutputMismatchError) or not any(recorded):
                    remove_files([folder])
                raise
            remove_files([folder])
    except OSError as error:
        raise describe_os_error(error, write.target, (Output(write.target, _write_nothing),), ()) from error


def _enter_journal(folder: str, write: ShardedWrite) -> None:
    """Write the journal, or compare it with this conversion; remove what no record covers."""
    journal = os.path.join(folder, _JOURNAL)
    own = _require_same_conversion(journal, write)
    _write_small(journal, json.dumps(own).encode(), sync=write.how.sync)
    for top, _, names in os.walk(folder):
        remove_files(os.path.join(top, name) for name in names if is_hidden_name(name))


def _require_same_conversion(journal: str, write: ShardedWrite) -> Mapping[str, Any]:
    """Return what the journal states of this conversion; raise UsageError if it is of another one."""
    own, folder = _describe_conversion(write), os.path.dirname(journal)
    known = text.load_json(journal, "the journal") if filesystem.isfile(journal) else own
    local = filesystem.find_store(folder) is None
    anew = f": rm -r {shlex.quote(folder)}" if local else " under another name"
    for what, value in own.items():
        if known.get(what) != value:
            raise UsageError(
                f"an unfinished conversion to this target had another {what}",
                file=folder,
                hint=f"repeat that conversion to complete it, or begin anew{anew}",
            )
    return own


def _describe_conversion(write: ShardedWrite) -> dict[str, Any]:
    """Return what makes two runs the same conversion; names are words of the error."""
    tree = write.stored
    plan = hashlib.sha256()
    # The tensors' sources contain their files, places and rules; an array in one is written out.
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        for item in (*tree.items(), *tree.aliases.items(), *tree.containers.items()):
            words = repr(item)
            # What is in memory, or does not show its content, is never the same in another run.
            known = write.how.sources and not _ADDRESS.search(words)
            plan.update((words if known else os.urandom(16).hex()).encode(errors="surrogatepass"))
    for shard in write.plan.shards:
        plan.update(repr((shard.suffix, shard.paths)).encode(errors="surrogatepass"))
    return {
        "version of ckpttool": __version__,
        "format": write.writer.NAME,
        "source": [[filesystem.abspath(file.path), *file[1:]] for file in write.how.sources],
        "plan": plan.hexdigest(),
    }


class ShardTask(NamedTuple):
    """A shard to be completed as `file`; picklable. An object has its record elsewhere."""

    shard: Shard
    tree: Tree
    leaves: Callable[[File, Shard, Any], Mapping[Path, Leaf]]
    file: str
    recorder: DigestRecorder | None
    sync: bool
    record: str

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(leaf.nbytes for _, leaf in self.tree.tensors())

    def run(self) -> ShardRecord | CkpttoolError:
        """Complete the shard in a separate process; return the error that prevented it."""
        with WorkerThread() as lane:
            _bound_memory()
            if self.recorder is not None:
                self.recorder.attach(lane)
            try:
                return self.complete(lane)
            except CkpttoolError as error:
                return error
            except MemoryError:
                return limits.limit_error("worker_bytes", "a process needs more memory", None, file=self.file)

    def complete(self, lane: WorkerThread, progress: Progress = ignore_progress) -> ShardRecord:
        """Return the record of the shard, which is written unless it is complete."""
        return self._intact() or self._write(lane, progress)

    def is_recorded(self) -> bool:
        """Return whether the shard is complete, in the folder of a conversion that is running."""
        with filesystem.read_session() as session:
            session.entries.pop(self.record, None)  # another process may have written it
            return filesystem.isfile(self.record)

    def _intact(self) -> ShardRecord | None:
        """Return the record of a shard that an earlier run completed, if its tensors still match it."""
        if not filesystem.isfile(self.file) or not filesystem.isfile(self.record):
            return None
        try:
            record = ShardRecord.parse(self.record)
            if filesystem.find_store(self.file) is not None:
                return record if tuple(record.stored) == filesystem.stat_file(self.file) else None
            leaves = self._read(self.file, record.indexed)
            checksums = [checksum_tensor(leaves[path]) for path in self.shard.paths]
        except CkpttoolError:
            return None
        return record if checksums == [crc for crc, _ in record.tensors] else None

    def _read(self, file: str, indexed: Any) -> Mapping[Path, Leaf]:
        """Return the tensors of a written shard; raise FormatError unless they are of the expected types."""
        leaves = self.leaves(File.stamp(file), self.shard, indexed)
        for path, leaf in self.tree.tensors():
            _require_same(leaves.get(path), leaf, path, whole=False)
        return leaves

    def _write(self, lane: WorkerThread, progress: Progress) -> ShardRecord:
        store = filesystem.find_store(self.file)
        if store is not None:
            return self._upload(cast(WritableStore, store), lane, progress)
        temporary = temporary_path(self.file)
        try:
            record = self._fill(temporary, lane, progress)
            remove_files([self.record])
            filesystem.rename(temporary, self.file, replace=True)
            _write_small(self.record, record.encode(), sync=self.sync)
        except OSError as error:
            outputs = (Output(self.file, _write_nothing, nbytes=self.nbytes),)
            raise describe_os_error(error, self.file, outputs, (temporary,)) from error
        finally:
            remove_files([temporary])
        return record

    def _fill(self, temporary: str, lane: WorkerThread, progress: Progress) -> ShardRecord:
        """Write the file under its temporary name and read it back."""
        checksums = LeafChecksums(lane)
        with WorkerThread() as disk, create_file(temporary, disk if self.sync else None) as stream:
            indexed = self.shard.write(checksums.watch(self.tree, progress), stream)
        written = Checkpoint(temporary, "", Tree(self._read(temporary, indexed)), (File.stamp(temporary),))
        sha256 = checksums.compared_tensors(written)
        tensors = [(checksums.crc32c[path], sha256[path]) for path in self.shard.paths]
        return ShardRecord(indexed, tensors, {} if self.recorder is None else self.recorder.take())

    def _upload(self, store: WritableStore, lane: WorkerThread, progress: Progress) -> ShardRecord:
        """Write the object; compare what was sent, and the store has confirmed, with the source."""
        checksums = LeafChecksums(lane)
        with store.upload(self.file, self.nbytes) as stream:
            indexed = self.shard.write(checksums.watch(self.tree, progress), cast(IO[bytes], stream))
        # The store's copy has the bytes that were sent; its header states where the tensors are.
        leaves = self._read(self.file, indexed)
        sha256 = checksums.sent_tensors({path: leaves[path] for path in self.shard.paths}, stream.has_bytes)
        tensors = [(checksums.crc32c[path], sha256[path]) for path in self.shard.paths]
        read = {} if self.recorder is None else self.recorder.take()
        record = ShardRecord(indexed, tensors, read, filesystem.stat_file(self.file))
        put_object(store, self.record, record.encode())
        return record


def _bound_memory() -> None:
    """Limit the private memory of this process, except on Windows."""
    with contextlib.suppress(ImportError):
        import resource

        nbytes, (_, most) = limits.current().worker_bytes, resource.getrlimit(resource.RLIMIT_DATA)
        if most == resource.RLIM_INFINITY or nbytes < most:
            resource.setrlimit(resource.RLIMIT_DATA, (nbytes, most))


def put_object(store: WritableStore, key: str, data: bytes) -> None:
    """Write a small object."""
    with store.upload(key, len(data)) as stream:
        stream.write(data)


def _write_small(file: str, data: bytes, *, sync: bool) -> None:
    """Replace a small file; with `sync`, flush it and the folder to the disk."""
    temporary = temporary_path(file)
    with open(temporary, "xb") as stream:
        stream.write(data)
    if sync:
        filesystem.fsync_path(temporary)
    filesystem.rename(temporary, file, replace=True)
    if sync:
        filesystem.fsync_path(os.path.dirname(file))


def complete_shards(
    write: ShardedWrite, folder: str, lane: WorkerThread
) -> tuple[Checkpoint, dict[Path, str], list[Output]]:
    """Complete all shards and the index in the working folder.

    Return the checkpoint in it, the SHA-256 of its tensors, and the outputs that give its files their names,
    the index last. Raise the error of a shard: the complete ones stay.
    """
    base = os.path.join(folder, os.path.basename(write.base))
    tasks = [_task(write, shard, base + shard.suffix) for shard in write.plan.shards]
    left = [task for task in tasks if not os.path.isfile(task.file)]
    require_free_space([Output(task.file, _write_nothing, nbytes=task.nbytes) for task in left])
    for parent in {os.path.dirname(task.file) for task in tasks}:
        os.makedirs(parent, exist_ok=True)
    records = _run(write, tasks, lane, partial(_shard_bytes, folder))
    listed = write.plan.finish([record.indexed for record in records])
    index = next(shard for shard in listed if shard.indexes)
    remove_files([base + index.suffix])
    with WorkerThread() as disk, create_file(base + index.suffix, disk if write.how.sync else None) as stream:
        index.write(stream)
    name = os.path.join(folder, os.path.basename(write.target))
    checkpoint, hashes = _read_index(write, name, tasks, records)
    return checkpoint, hashes, list(_outputs(write, base, listed))


def _run(
    write: ShardedWrite, tasks: Sequence[ShardTask], lane: WorkerThread, filled: Callable[[], int]
) -> list[ShardRecord]:
    """Complete all shards; `filled` returns the bytes that other processes have written so far."""
    here = (write.how.jobs, write.how.ray) == (None, None)
    records = list(_run_here(write, tasks, lane) if here else _spread(write, tasks, filled))
    if write.how.recorder is not None:
        for record in records:
            write.how.recorder.learn(record.read)
    return records


def _read_index(
    write: ShardedWrite, name: str, tasks: Sequence[ShardTask], records: Sequence[ShardRecord]
) -> tuple[Checkpoint, dict[Path, str]]:
    """Return the complete checkpoint and the SHA-256 of its tensors; raise FormatError for a wrong index."""
    checkpoint = write.writer.read(write.writer.claims(Probe(name)) or name)
    hashes: dict[Path, str] = {}
    for task, record in zip(tasks, records, strict=True):
        for path, leaf in task.leaves(File.stamp(task.file), task.shard, record.indexed).items():
            _require_same(checkpoint.tree.get(path), leaf, path)
        hashes |= {path: sha256 for path, (_, sha256) in zip(task.shard.paths, record.tensors, strict=True)}
    if hashes.keys() != {path for path, _ in checkpoint.tree.tensors()}:
        raise FormatError("the index does not list the tensors of the shards", file=write.target)
    return checkpoint, hashes


def _task(write: ShardedWrite, shard: Shard, file: str) -> ShardTask:
    tree = Tree({path: write.stored[path] for path in shard.paths})
    how = write.how
    return ShardTask(shard, tree, write.plan.leaves, file, how.recorder, how.sync, file + _RECORD)


def _require_same(listed: Leaf | ValueLeaf | None, leaf: Leaf, path: Path, *, whole: bool = True) -> None:
    """Raise FormatError unless a tensor has the expected type, shape and, as a `whole`, source."""
    if not isinstance(listed, Leaf) or (
        (listed.dtype, listed.shape) != (leaf.dtype, leaf.shape) or (whole and listed.source != leaf.source)
    ):
        raise FormatError("a tensor is not listed as it was written", path=display(path))


def _run_here(write: ShardedWrite, tasks: Sequence[ShardTask], lane: WorkerThread) -> Iterator[ShardRecord]:
    total, done = sum(task.nbytes for task in tasks), 0
    for task in tasks:
        yield task.complete(lane, partial(_report_within, write.how.progress, done, total))
        done += task.nbytes
        write.how.progress(done, total)


def _report_within(
    progress: Progress, before: int, total: int, done: int, _: int, steps: int | None = None
) -> None:
    """Report the bytes of a shard as a part of all shards."""
    progress(before + done, total, steps)


def _spread(
    write: ShardedWrite, tasks: Sequence[ShardTask], filled: Callable[[], int]
) -> Iterator[ShardRecord]:
    """Yield the records of all shards; where a process ended twice, complete the others first."""
    from ckpttool.evaluation import scheduling  # the pool needs modules that no other conversion needs

    lost: WorkerError | None = None
    total = sum(task.nbytes for task in tasks)
    with _watch_growth(filled, total, write.how.progress):
        files = (*(source.path for source in write.how.sources), tasks[0].file, tasks[0].record)
        jobs, ray = write.how.jobs, write.how.ray
        for result in scheduling.map_tasks(ShardTask.run, tasks, files, jobs=jobs, ray=ray):
            if isinstance(result, ShardRecord):
                yield result
            elif isinstance(result, WorkerError):
                lost = result
            else:
                raise result
    if lost is not None:
        lost.hint = "run the same command again: it continues after the complete shards"
        raise lost.located(file=write.target)


@contextlib.contextmanager
def _watch_growth(filled: Callable[[], int], total: int, progress: Progress) -> Iterator[None]:
    """Report how many bytes other processes have written, until the block ends."""
    if progress is ignore_progress:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SECONDS):
            progress(min(total, filled()), total)

    thread = threading.Thread(target=watch, name="ckpttool-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _shard_bytes(folder: str) -> int:
    """Return the size of all files in the folder; one may disappear meanwhile."""
    files = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
    nbytes = 0
    for file in files:
        with contextlib.suppress(OSError):
            nbytes += os.path.getsize(file)
    return nbytes


def write_objects(
    write: ShardedWrite,
    lane: WorkerThread,
    others: Sequence[Output],
    receipt: Callable[[Digest, Checkpoint], Sidecar] | None,
) -> Digest:
    """Write all shards, the `others`, the index and the sidecar that `receipt` returns; return the digest.

    Raise UsageError or TargetExistsError as `working_folder` does. An object has its name when all of its
    bytes have arrived, so each shard is written under its own name; the index, written last, makes the whole
    valid. The working folder contains the journal and the records. No object of another conversion is
    replaced.
    """
    store = cast(WritableStore, filesystem.find_store(write.target))
    folder = hidden_path(write.target, TEMPORARY, _FOLDER)
    tasks = []
    for shard in write.plan.shards:
        record = os.path.join(folder, os.path.basename(write.base) + shard.suffix + _RECORD)
        tasks.append(_task(write, shard, write.base + shard.suffix)._replace(record=record))
    sidecar = sidecar_path(write.target)
    try:
        _enter_object_journal(store, folder, write, [*others, Output(sidecar, _write_nothing)])
        records = _run(write, tasks, lane, lambda: sum(task.nbytes for task in tasks if task.is_recorded()))
        for source in write.how.sources:
            source.require_unchanged()
        index = next(value for value in write.plan.finish([row.indexed for row in records]) if value.indexes)
        for output in (*others, Output(write.base, index.write, suffix=index.suffix)):
            put_object(store, output.file, _filled(output.write))
        try:
            checkpoint, hashes = _read_index(write, write.target, tasks, records)
            digest = combine_digests(checkpoint, hashes)
            if receipt is not None:
                put_object(store, sidecar, receipt(digest, keep_network_reads(checkpoint)).encode())
        except BaseException:
            store.remove(write.base + index.suffix)  # without it, the shards are no checkpoint
            raise
        for path in (*(task.record for task in tasks), os.path.join(folder, _JOURNAL)):
            store.remove(path)
    except CkpttoolError as error:
        if error.file is not None and f"{TEMPORARY}{_FOLDER}/" in error.file:
            error.file = write.target  # users name no journal
        raise
    return digest


def _enter_object_journal(
    store: WritableStore, folder: str, write: ShardedWrite, others: Sequence[Output]
) -> None:
    """Write the journal, or compare it with this conversion; without one, no file of the target may exist."""
    journal = os.path.join(folder, _JOURNAL)
    if filesystem.isfile(journal):
        _require_same_conversion(journal, write)
        return
    suffixes = [*(shard.suffix for shard in write.plan.shards), write.plan.index_suffix]
    for file in (*(write.base + suffix for suffix in suffixes), *(other.file for other in others)):
        if filesystem.path_kind(file) != "missing":
            raise TargetExistsError("the target already exists", file=file, hint="choose another name")
    put_object(store, journal, json.dumps(_describe_conversion(write)).encode())


def _filled(fill: Callable[[IO[bytes]], None]) -> bytes:
    """Return the content of a small file."""
    stream = io.BytesIO()
    fill(stream)
    return stream.getvalue()


def _outputs(write: ShardedWrite, base: str, listed: Sequence[OutputFile]) -> Iterator[Output]:
    """Yield the outputs that give the files in the working folder their names."""
    for shard in write.plan.shards:
        ready = base + shard.suffix
        yield Output(write.base, _write_nothing, suffix=shard.suffix, meanwhile=shard.meanwhile, ready=ready)
    for output in listed:
        ready = base + output.suffix if output.indexes else ""
        yield Output(write.base, **output._asdict(), ready=ready)


def _write_nothing(_: IO[bytes]) -> None:
    """Write nothing: the file is complete."""
