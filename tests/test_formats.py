"""The promises of every format, as one class that each format's tests inherit."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from ckpttool.commands.save import save
from ckpttool.core import ChangedError, Checkpoint, CkpttoolError, Leaf, Tree, UnsupportedError, key, plugins
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, open_checkpoint, tf_bundle, torch_zip
from ckpttool.formats.torch_zip import PYTORCH_SET
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.test_layouts import fujimoto_set
from tests.trees import torch_tree

MIB = 1 << 20


class Made(NamedTuple):
    """A source whose megabyte exists only while it is read."""

    number: int

    def read(self) -> bytes:
        return bytes([self.number]) * MIB


class FormatContract:
    """What holds for every format; a subclass names the module and makes a checkpoint of six tensors."""

    module: ModuleType

    def make(self, folder: Path) -> str:
        """Put a whole checkpoint into the folder and return what a person would point at."""
        raise NotImplementedError

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        return self.make(tmp_path)

    @pytest.fixture
    def checkpoint(self, path: str) -> Checkpoint:
        found = self.module.read(self.module.claims(Probe(path)))
        assert isinstance(found, Checkpoint)
        return found

    def test_it_is_registered_under_its_name(self) -> None:
        assert plugins.find("formats", self.module.NAME).load() is self.module
        assert self.module.TITLE
        assert self.module.FRAMEWORK in [plugin.name for plugin in plugins.BUILT_IN["backends"]]
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
        folder = Path(path).parent
        before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
        digest_checkpoint(open_checkpoint(path))
        after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
        assert after == before

    def test_no_truncation_gets_through(self, path: str) -> None:
        files = [file.path for file in open_checkpoint(path).files]
        for name in files:
            whole = Path(name).read_bytes()
            for length in sorted({0, 1, 47, len(whole) // 2, len(whole) - 8, len(whole) - 1}):
                Path(name).write_bytes(whole[:length])
                with pytest.raises(CkpttoolError):
                    digest_checkpoint(open_checkpoint(path))
            Path(name).write_bytes(whole)

    @pytest.mark.parametrize("times", [5, pytest.param(60, marks=pytest.mark.slow)])
    def test_no_flipped_bit_gets_through(self, path: str, times: int) -> None:
        # Either it is refused, or (in padding, a date, a comment) it changed nothing that is read.
        right = digest_checkpoint(open_checkpoint(path)).sha256
        generator = np.random.default_rng(0)
        for name in {file.path for file in open_checkpoint(path).files}:
            whole = Path(name).read_bytes()
            for _ in range(times):
                damaged = bytearray(whole)
                damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
                Path(name).write_bytes(damaged)
                try:
                    assert digest_checkpoint(open_checkpoint(path)).sha256 == right
                except CkpttoolError as error:
                    assert str(error).isprintable()  # noqa: PT017  # both outcomes are right
            Path(name).write_bytes(whole)


class WritingContract(FormatContract):
    """What holds for a format that writes as well."""

    def put(self, tree: Tree, target: Path) -> str:
        """Write the tree and return what a person would point at."""
        for piece in self.module.pieces(tree):
            with open(f"{target}{piece.suffix}", "wb") as stream:
                piece.write(stream)
        return str(target)

    def written(self, tree: Tree) -> dict[str, bytes]:
        streams = {piece.suffix: (piece, io.BytesIO()) for piece in self.module.pieces(tree)}
        for piece, stream in streams.values():
            piece.write(stream)
        return {suffix: stream.getvalue() for suffix, (_, stream) in streams.items()}

    def test_what_was_written_is_what_was_read(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        again = self.module.read(self.put(checkpoint.tree, tmp_path / "again"))
        assert list(again.tree) == list(checkpoint.tree)
        assert dict(again.tree.containers) == dict(checkpoint.tree.containers)
        assert digest_checkpoint(again).sha256 == digest_checkpoint(checkpoint).sha256

    def test_an_agent_is_written_whole_or_refused(self, tmp_path: Path) -> None:
        """An agent has nested paths, values, counters and optimizer slots: all of them come back."""
        tree = open_checkpoint(str(TORCH_SAMPLE)).tree
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

    def test_one_leaf_is_in_memory_at_a_time(self, tmp_path: Path) -> None:
        import tracemalloc

        tree = Tree({(key(f"w{n}"),): Leaf("uint8", (MIB,), Made(n), f"w{n}") for n in range(40)})
        tracemalloc.start()
        self.put(tree, tmp_path / "large")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB


def test_an_archive_is_listed_once_to_find_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.encodings import archives
    from ckpttool.formats import resolve

    listed, read = [], archives.read_zip
    monkeypatch.setattr(archives, "read_zip", lambda file, *more: listed.append(file) or read(file, *more))
    assert resolve(str(TORCH_SAMPLE)).format is torch_zip
    assert len(listed) == 1


class TestTensorBundle(WritingContract):
    module = tf_bundle

    def make(self, folder: Path) -> str:
        for end in (".index", ".data-00000-of-00001"):
            shutil.copy(f"{TF_SAMPLE}{end}", folder)
        return str(folder / TF_SAMPLE.name)


class TestPytorch(WritingContract):
    module = torch_zip

    def make(self, folder: Path) -> str:
        shutil.copy(TORCH_SAMPLE, folder / "agent.pt")
        return str(folder / "agent.pt")


class TestPytorchSet(WritingContract):
    module = PYTORCH_SET

    def make(self, folder: Path) -> str:
        entries = fujimoto_set()
        for member in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
            mine = {n.removeprefix(f"{member}/"): v for n, v in entries.items() if n.startswith(f"{member}/")}
            save(torch_tree(mine), str(folder / f"TD3_Env_0_{member}"), "torch")  # type: ignore[arg-type]
        return str(folder / "TD3_Env_0")

    def test_one_leaf_is_in_memory_at_a_time(self, tmp_path: Path) -> None:
        # Its trees are those of agents: the same promise, of the networks' own files.
        import tracemalloc

        members = ("actor", "critic")
        places = [(key(member), key(f"w{n}")) for member in members for n in range(20)]
        tree = Tree({p: Leaf("uint8", (MIB,), Made(n), f"w{n}") for n, p in enumerate(places)})
        tracemalloc.start()
        self.put(tree, tmp_path / "large")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB
