"""The promises of every format, as one class that each format's tests inherit."""

from __future__ import annotations

import json
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from ckpttool.conversion.write import save
from ckpttool.core import Checkpoint, Checksum, File, FormatError, Leaf, Plugin, Span, Tree, key, plugins
from ckpttool.core import Path as TreePath
from ckpttool.formats import (
    OutputFile,
    Probe,
    assign_names,
    decode_tree,
    encode_tree,
    tf_bundle,
    torch_zip,
)
from ckpttool.formats.torch_zip import PYTORCH_SET
from ckpttool.testing.formats import MIB, Megabyte, WritingContract
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.test_layouts import fujimoto_set
from tests.trees import torch_tree


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

    def large(self) -> Tree:
        """Its trees are those of agents: forty megabytes of the networks' own files."""
        places = [(key(member), key(f"w{n}")) for member in ("actor", "critic") for n in range(20)]
        return Tree({p: Leaf("uint8", (MIB,), Megabyte(n), f"w{n}") for n, p in enumerate(places)})


class ShelfSource(NamedTuple):
    """The bytes of a tensor in a zlib stream."""

    span: Span

    def read(self) -> bytes:
        try:
            return zlib.decompress(self.span.read())
        except zlib.error as error:
            raise FormatError(str(error), file=self.span.file.path) from None


class Shelf:
    """A folder of zlib streams, one for each tensor, and an index with its checksum."""

    NAME, TITLE, WRITES, FRAMEWORK = "shelf", "Shelf", True, "numpy"

    @staticmethod
    def claims(probe: Probe) -> str | None:
        return probe.path if probe.kind == "folder" and "shelf.json" in probe.names else None

    @staticmethod
    def read(location: str) -> Checkpoint:
        index = File.stamp(f"{location}/shelf.json")
        checksum, _, text = bytes(index.read(0, index.size)).partition(b"\n")
        if checksum != b"%08x" % zlib.crc32(text):
            raise FormatError("the index does not match its checksum", file=index.path)
        rows = json.loads(text)
        arrays, files = {}, [index]
        for number, (name, (dtype, shape, nbytes, crc)) in enumerate(rows["tensors"].items()):
            files.append(File.stamp(f"{location}/{number}.zz"))
            span = Span(files[-1], 0, nbytes, Checksum("crc32", crc))
            arrays[name] = Leaf(dtype, tuple(shape), ShelfSource(span), name)
        tree = decode_tree(rows["tree"].encode(), arrays)
        return Checkpoint(location, "shelf", tree, tuple(files), integrity="crc32")

    @staticmethod
    def pieces(tree: Tree) -> tuple[OutputFile, ...]:
        names = assign_names((path for path, _ in tree.tensors()), tree.names.__getitem__)
        rows: dict[str, object] = {}

        def write_tensor(path: TreePath, stream: IO[bytes]) -> None:
            leaf = dict(tree.tensors())[path]
            data = zlib.compress(leaf.read(), 1)
            rows[names[path]] = [leaf.dtype, leaf.shape, len(data), zlib.crc32(data)]
            stream.write(data)

        def write_index(stream: IO[bytes]) -> None:
            text = json.dumps({"tensors": rows, "tree": encode_tree(tree, names)}).encode()
            stream.write(b"%08x\n" % zlib.crc32(text) + text)

        writers = [partial(write_tensor, path) for path, _ in tree.tensors()]
        files = [OutputFile(f"/{number}.zz", writer) for number, writer in enumerate(writers)]
        return (*files, OutputFile("/shelf.json", write_index))


class TestShelf(WritingContract):
    """The laws hold for a folder, for compressed tensors and for files of a few bytes."""

    module = Shelf  # type: ignore[assignment]  # a class with the names of a module

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = Plugin("shelf", f"{__name__}:Shelf")
        monkeypatch.setitem(plugins.BUILT_IN, "formats", (*plugins.BUILT_IN["formats"], row))
