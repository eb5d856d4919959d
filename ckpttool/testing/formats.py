"""The promises of every format, as classes that the tests of a format inherit."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
from collections.abc import Mapping
from pathlib import Path as Folder
from types import ModuleType

import numpy as np
import pytest

from ckpttool.core import (
    ChangedError,
    Checkpoint,
    CkpttoolError,
    Inline,
    Leaf,
    Path,
    Tree,
    UnsupportedError,
    ValueLeaf,
    index,
    key,
    plugins,
)
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, torch_zip

MIB = 1 << 20


class Megabyte(NamedTuple):
    """A source of a megabyte that is created when it is read."""

    number: int

    def read(self) -> bytes:
        # Random, so that a format that compresses stores as many bytes.
        return np.random.default_rng(self.number).bytes(MIB)


def agent() -> Tree:
    """Return an agent of state_dicts: nested paths, a counter, a value, Adam's slots by parameter number."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    slots = (key("optimizer"), key("state"), key(0))
    leaves: dict[Path, Leaf | ValueLeaf] = {
        (key("actor"), key("l1.weight")): build_leaf(weight, "actor.l1.weight"),
        (key("actor"), key("l1.bias")): build_leaf(weight[:, 0], "actor.l1.bias"),
        (*slots, key("step")): build_leaf(np.array(7.0, np.float32), "step"),
        (*slots, key("exp_avg")): build_leaf(weight / 2, "exp_avg"),
        (key("optimizer"), key("param_groups"), index(0), key("lr")): ValueLeaf(1e-3),
        (key("optimizer"), key("param_groups"), index(0), key("params"), index(0)): ValueLeaf(0),
        (key("total_it"),): ValueLeaf(14_000),
    }
    return Tree(leaves)


def build_leaf(array: np.ndarray, native: str = "", **facts: object) -> Leaf:
    """Return a leaf of an array in little-endian order; `native` is its name, `facts` are further fields."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return Leaf(array.dtype.name, array.shape, Inline(little.tobytes()), native, **facts)  # type: ignore[arg-type]


def build_tree(entries: Mapping[str, np.ndarray | int | float | bool | None]) -> Tree:
    """Return a tree of arrays and plain values by name: `/` separates keys, and a dot belongs to one."""
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for name, value in entries.items():
        path = tuple(key(part) for part in name.split("/"))
        leaves[path] = build_leaf(value, name) if isinstance(value, np.ndarray) else ValueLeaf(value)
    return Tree(leaves)


def read_so_far() -> int:
    """Return how many bytes this process has read from files, where the system counts them; else 0."""
    try:
        with open("/proc/self/io", encoding="ascii") as counts:
            return int(counts.readline().split()[1])  # rchar
    except OSError:
        return 0


def check_registration(kind: plugins.Kind, name: str) -> None:
    """Fail with what is missing if no row and no installed package provides the name."""
    assert name in [plugin.name for plugin in plugins.installed(kind)], (
        f"add a row to core/plugins.py, or the entry point ckpttool.{kind} to pyproject.toml and install it"
    )


class FormatContract:
    """Promises of every format; a subclass names the module and writes six tensors or more."""

    module: ModuleType

    def make(self, folder: Folder) -> str:
        """Put a whole checkpoint into the folder and return the path to open."""
        raise NotImplementedError(f"{type(self).__name__} must define make(folder), which returns a path")

    @pytest.fixture
    def path(self, tmp_path: Folder) -> str:
        return self.make(tmp_path)

    @pytest.fixture
    def checkpoint(self, path: str) -> Checkpoint:
        checkpoint = self.module.read(self.module.claims(Probe(path)))
        assert isinstance(checkpoint, Checkpoint)
        return checkpoint

    def test_it_is_registered_under_its_name(self) -> None:
        check_registration("formats", self.module.NAME)
        assert plugins.find("formats", self.module.NAME).load() is self.module
        assert self.module.TITLE
        assert self.module.FRAMEWORK in [plugin.name for plugin in plugins.installed("backends")]
        assert self.module.WRITES is hasattr(self.module, "pieces")

    def test_it_alone_claims_its_checkpoint(self, path: str) -> None:
        for plugin in plugins.installed("formats"):
            claimed = plugin.load().claims(Probe(path))
            assert (claimed is not None) is (plugin.name == self.module.NAME)

    def test_the_record_is_whole(self, checkpoint: Checkpoint, path: str) -> None:
        assert checkpoint.format == self.module.NAME
        assert checkpoint.path == path
        assert checkpoint.stored_nbytes == sum(os.path.getsize(file.path) for file in checkpoint.files)
        assert len(checkpoint.tree) > 5

    def test_names_and_keys_are_unique(self, checkpoint: Checkpoint) -> None:
        names = list(checkpoint.tree.names.values())
        keys = [leaf.key for _, leaf in checkpoint.tree.tensors()]
        assert len(set(names)) == len(names)
        assert len(set(keys)) == len(keys)

    def test_leaves_give_what_they_promise(self, checkpoint: Checkpoint) -> None:
        for path, leaf in checkpoint.tree.tensors():
            assert len(leaf.read()) == leaf.nbytes, path
            array = leaf.array()
            assert (array.shape, array.dtype.name) == (leaf.shape, leaf.dtype)
            assert not leaf.of or leaf.of in checkpoint.tree
            assert (leaf.slot is not None) <= (leaf.role == "slot")

    def test_leaves_are_values(self, checkpoint: Checkpoint) -> None:
        # A tree can be sent to another process and read there.
        again = pickle.loads(pickle.dumps(checkpoint))
        assert digest_checkpoint(again) == digest_checkpoint(checkpoint)

    def test_listing_twice_gives_the_same(self, checkpoint: Checkpoint) -> None:
        again = open_checkpoint(checkpoint.path)
        assert list(again.tree) == list(checkpoint.tree)
        assert digest_checkpoint(again).sha256 == digest_checkpoint(checkpoint).sha256

    def test_a_file_that_changed_is_not_read(self, checkpoint: Checkpoint) -> None:
        largest = max(checkpoint.files, key=lambda file: file.size)
        os.utime(largest.path, ns=(1, 1))
        with pytest.raises(ChangedError):
            digest_checkpoint(checkpoint)

    def test_reading_leaves_the_files_as_they_were(self, path: str) -> None:
        folder = Folder(path).parent
        before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
        digest_checkpoint(open_checkpoint(path))
        after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
        assert after == before

    def test_no_truncation_gets_through(self, path: str) -> None:
        files = [file.path for file in open_checkpoint(path).files]
        for name in files:
            whole = Folder(name).read_bytes()
            lengths = {0, 1, 47, len(whole) // 2, len(whole) - 8, len(whole) - 1}
            for length in sorted(lengths & set(range(len(whole)))):
                Folder(name).write_bytes(whole[:length])
                with pytest.raises(CkpttoolError):
                    digest_checkpoint(open_checkpoint(path))
            Folder(name).write_bytes(whole)

    @pytest.mark.parametrize("times", [5, pytest.param(60, marks=pytest.mark.slow)])
    def test_no_flipped_bit_gets_through(self, path: str, times: int) -> None:
        # Either it is refused, or (in padding, a date, a comment) it changed nothing that is read.
        right = digest_checkpoint(open_checkpoint(path)).sha256
        generator = np.random.default_rng(0)
        for name in {file.path for file in open_checkpoint(path).files}:
            whole = Folder(name).read_bytes()
            for _ in range(times):
                damaged = bytearray(whole)
                damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
                Folder(name).write_bytes(damaged)
                try:
                    assert digest_checkpoint(open_checkpoint(path)).sha256 == right
                except CkpttoolError as error:
                    assert str(error).isprintable()  # noqa: PT017  # both outcomes are right
            Folder(name).write_bytes(whole)


class WritingContract(FormatContract):
    """Promises of a format that also writes; `make` is for a format that needs a suffix or other tensors."""

    def make(self, folder: Folder) -> str:
        arrays = {f"w{n}": np.arange(n + 1, dtype=np.float32) for n in range(6)}
        return self.put(build_tree(arrays), folder / "six")

    def put(self, tree: Tree, target: Folder) -> str:
        """Write the tree and return the path to open."""
        for piece in self.module.pieces(tree):
            file = Folder(f"{target}{piece.suffix}")
            file.parent.mkdir(exist_ok=True)
            with file.open("wb") as stream:
                piece.write(stream)
        return str(target)

    def written(self, tree: Tree) -> dict[str, bytes]:
        streams = {piece.suffix: (piece, io.BytesIO()) for piece in self.module.pieces(tree)}
        for piece, stream in streams.values():
            piece.write(stream)
        return {suffix: stream.getvalue() for suffix, (_, stream) in streams.items()}

    def test_what_was_written_is_what_was_read(self, checkpoint: Checkpoint, tmp_path: Folder) -> None:
        again = self.module.read(self.put(checkpoint.tree, tmp_path / "again"))
        assert list(again.tree) == list(checkpoint.tree)
        assert dict(again.tree.containers) == dict(checkpoint.tree.containers)
        assert digest_checkpoint(again).sha256 == digest_checkpoint(checkpoint).sha256

    def test_an_agent_is_written_whole_or_refused(self, tmp_path: Folder) -> None:
        """An agent has nested paths, values, counters and optimizer slots: all of them come back."""
        for piece in torch_zip.pieces(agent()):
            with open(tmp_path / f"agent.pt{piece.suffix}", "wb") as stream:
                piece.write(stream)
        tree = open_checkpoint(str(tmp_path / "agent.pt")).tree
        try:
            again = self.module.read(self.put(tree, tmp_path / "agent")).tree
        except UnsupportedError:
            return
        assert list(again) == list(tree)
        values = {path: leaf.value for path, leaf in tree.plain()}
        assert {path: leaf.value for path, leaf in again.plain()} == values
        assert [leaf.role for leaf in again.values()] == [leaf.role for leaf in tree.values()]

    def test_writing_twice_gives_the_same_bytes(self, checkpoint: Checkpoint) -> None:
        assert self.written(checkpoint.tree) == self.written(checkpoint.tree)

    def large(self) -> Tree:
        """Return forty tensors of a megabyte each, which exist only while they are read."""
        return Tree({(key(f"w{n}"),): Leaf("uint8", (MIB,), Megabyte(n), f"w{n}") for n in range(40)})

    def test_one_leaf_is_in_memory_at_a_time(self, tmp_path: Folder) -> None:
        """Peak memory of a writer is a few tensors, whatever the size of the checkpoint."""
        tracemalloc.start()
        self.put(self.large(), tmp_path / "large")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB

    def test_listing_leaves_data_unread(self, tmp_path: Folder) -> None:
        """Listing reads an index; the bytes of tensors are read when a tensor is."""
        path = self.put(self.large(), tmp_path / "large")
        before = read_so_far()
        tracemalloc.start()
        checkpoint = self.module.read(self.module.claims(Probe(path)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB
        assert read_so_far() - before < 8 * MIB
        assert checkpoint.stored_nbytes > 39 * MIB
