"""How often the bytes of a tensor are read in a conversion: the source's at most twice, the target's once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import (
    Buffer,
    Checkpoint,
    Checksum,
    File,
    Inline,
    KeptSource,
    Leaf,
    Role,
    Source,
    Span,
    Tree,
    crc32,
    key,
)
from ckpttool.core import checkpoint as checkpoints
from ckpttool.formats import keras_h5, npz, safetensors, tf_bundle, torch_zip
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE

Reads = Counter[tuple[str, str]]


@dataclass
class CountedSource:
    """A source that counts how often it is read, by the format and the name of its tensor."""

    base: Source
    reads: Reads
    key: tuple[str, str]

    def read(self) -> Buffer:
        self.reads[self.key] += 1
        return self.base.read()


def count_reads(patch: pytest.MonkeyPatch, reads: Reads, module: ModuleType) -> None:
    """Have the format's reader list tensors that count how often they are read."""
    list_tensors = module.read

    def read(location: str) -> Checkpoint:
        found: Checkpoint = list_tensors(location)
        leaves = {
            path: replace(
                leaf, source=CountedSource(leaf.source, reads, (found.format, found.tree.names[path]))
            )
            if isinstance(leaf, Leaf)
            else leaf
            for path, leaf in found.tree.items()
        }
        return replace(found, tree=Tree(leaves, found.tree.aliases, found.tree.containers))

    patch.setattr(module, "read", read)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("source", "name", "to", "formats"),
    [
        (TF_SAMPLE, "a.pt", None, (tf_bundle, torch_zip)),
        (TORCH_SAMPLE, "ckpt-1", "tf", (torch_zip, tf_bundle)),
        ("a.safetensors", "a.npz", None, (safetensors, npz)),
        ("a.h5", "a.pt", None, (keras_h5, torch_zip)),
    ],
    ids=["tf-torch", "torch-tf", "safetensors-npz", "keras-torch"],
)
@pytest.mark.parametrize("sidecar", [True, False])
def test_a_conversion_reads_the_source_twice_and_the_target_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Any,
    name: str,
    to: str | None,
    formats: tuple[ModuleType, ModuleType],
    verify: bool,
    sidecar: bool,
) -> None:
    if isinstance(source, str):
        convert(str(TORCH_SAMPLE), str(tmp_path / source))
        source = tmp_path / source
    if not sidecar:
        own = Path(f"{source}.ckpttool.json")
        assert own.is_file()
        monkeypatch.setattr("ckpttool.core.sidecar.load_sidecar", lambda path: None)
    reads: Reads = Counter()
    for module in formats:
        count_reads(monkeypatch, reads, module)
    assert convert(str(source), str(tmp_path / name), to=to, verify=verify).written
    of_source, of_target = (
        {title: times for (format_, title), times in reads.items() if format_ == module.NAME}
        for module in formats
    )
    assert max(of_source.values()) <= 2, of_source
    assert set(of_target.values()) == {1}, of_target


def test_small_networks_and_scalars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_KEPT_NBYTES", 1000)
    rows: dict[str, tuple[int, Role]] = {
        "large": (800, "parameter"),
        "small": (400, "buffer"),
        "slot": (100, "slot"),
        "rate": (4, "other"),
    }
    leaves = {
        (key(n),): Leaf("uint8", (size,), Inline(bytes(size)), n, role) for n, (size, role) in rows.items()
    }
    tree = checkpoints.keep_network_reads(Checkpoint("x", "npz", Tree(leaves), ())).tree
    kept = [leaf.key for _, leaf in tree.tensors() if isinstance(leaf.source, KeptSource)]
    assert kept == ["small", "rate"]
    assert [leaf.key for _, leaf in tree.tensors()] == list(rows)


def test_the_checksum_over_many_parts_is_verified_by_the_first_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(200))
    (tmp_path / "x").write_bytes(data)
    span = Span(File.stamp(str(tmp_path / "x")), 0, len(data), Checksum("crc32", crc32(data)))
    read, asked = File.read, []
    monkeypatch.setattr(File, "read", lambda self, *part: asked.append(part) or read(self, *part))
    assert bytes(span.part(2, 190)) == data[2:190]
    assert asked == [(0, 200)]
    assert bytes(span.part(5, 7)) == data[5:7]
    assert asked == [(0, 200), (5, 2)]
