"""Work of a command: reads of a tensor's bytes in a conversion, and calls for many tensors."""

from __future__ import annotations

import cProfile
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.commands.check import check
from ckpttool.commands.convert import convert
from ckpttool.commands.textconv import textconv
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core import (
    Buffer,
    Checkpoint,
    Checksum,
    File,
    Inline,
    KeptSource,
    Leaf,
    MappingError,
    Role,
    Source,
    Span,
    Tree,
    crc32,
    key,
)
from ckpttool.core import checkpoint as checkpoints
from ckpttool.formats import keras_h5, npz, safetensors, tf_bundle, torch_zip
from ckpttool.pages.report import report
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.trees import torch_tree

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
        saved: Checkpoint = list_tensors(location)
        leaves = {
            path: replace(
                leaf, source=CountedSource(leaf.source, reads, (saved.format, saved.tree.names[path]))
            )
            if isinstance(leaf, Leaf)
            else leaf
            for path, leaf in saved.tree.items()
        }
        return replace(saved, tree=Tree(leaves, saved.tree.aliases, saved.tree.containers))

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
    read, parts = File.read, []
    monkeypatch.setattr(File, "read", lambda self, *part: parts.append(part) or read(self, *part))
    assert bytes(span.part(2, 190)) == data[2:190]
    assert parts == [(0, 200)]
    assert bytes(span.part(5, 7)) == data[5:7]
    assert parts == [(0, 200), (5, 2)]


# Work grows as the tensors: the calls of every command, of 4 times as many tensors.

FEW, FACTOR, MOST_EXPONENT = 150, 4, 1.1
RARE = ("textconv", "report", "convert to npz", "convert to keras", "convert to safetensors")


def written(folder: Path, tensors: int, bias: int = 4) -> tuple[str, str]:
    """Return a safetensors and an npz file of a network with that many tensors."""
    tree = torch_tree(
        {
            f"layers.{n // 2}.{('weight', 'bias')[n % 2]}": np.ones(((4, 4), (bias,))[n % 2], np.float32)
            for n in range(tensors)
        }
    )
    files = str(folder / f"{tensors}-{bias}.safetensors"), str(folder / f"{tensors}-{bias}.npz")
    for file in files:
        ckpttool.save(tree, file, sync=False)
    return files


def convert_to(word: str) -> Callable[[str, str], object]:
    suffix = "weights.h5" if word == "keras" else word

    def run(source: str, _: str) -> object:
        return convert(source, f"{source}.{suffix}", ConversionOptions(to=word, sync=False))

    return run


COMMANDS: dict[str, Callable[[str, str], object]] = {
    "inspect": lambda a, _: ckpttool.summary(a).document(),
    "digest": lambda a, _: ckpttool.digest(a),
    "stats": lambda a, _: ckpttool.stats(a),
    "diff": lambda a, b: ckpttool.diff(a, b),
    "check": lambda a, _: check([a]),
    "textconv": lambda a, _: textconv(a),
    "report": lambda a, _: report(a, out=f"{a}.html"),
    **{f"convert to {word}": convert_to(word) for word in ("torch", "safetensors", "npz", "tf", "keras")},
}


def count_calls(run: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(run)
    return sum(entry.callcount for entry in profile.getstats())


def exponent(run: Callable[[str, str], object], folder: Path, bias: int = 4) -> float:
    """Return the power of the number of tensors with which the calls grow."""
    run(*written(folder, 2, bias))  # imports and tables
    few, many = (count_calls(partial(run, *written(folder, n, bias))) for n in (FEW, FEW * FACTOR))
    return math.log(many / few, FACTOR)


@pytest.mark.parametrize(
    "command", [pytest.param(item, marks=pytest.mark.slow if item in RARE else ()) for item in COMMANDS]
)
def test_work_grows_as_the_tensors(command: str, tmp_path: Path) -> None:
    assert exponent(COMMANDS[command], tmp_path) <= MOST_EXPONENT


def test_refusals_cost_as_much_as_conversions(tmp_path: Path) -> None:
    """Looking for options that would form layers from tensors of no known kind."""

    def refused(a: str, b: str) -> None:
        with pytest.raises(MappingError):
            COMMANDS["convert to tf"](a, b)

    assert exponent(refused, tmp_path, bias=16) <= MOST_EXPONENT
