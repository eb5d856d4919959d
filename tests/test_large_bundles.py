"""A bundle of one shard beyond 4 GiB, written by us, read by TensorFlow and by us: offsets past 32 bits."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.core import Inline, Leaf, Tree, attr
from ckpttool.formats import tf_bundle

run = runpy.run_path(str(Path(__file__).with_name("tensorflow_child.py")))["run"]

MIB = 1 << 20
EMPTY, SIZE = 80, 64 * MIB  # 5 GiB of zeros between two small tensors
ZEROS = bytes(SIZE)


class Zeros(NamedTuple):
    """A tensor of zeros, which all share one piece of memory."""

    size: int = SIZE

    def read(self) -> bytes:
        return ZEROS


class Sparse(io.FileIO):
    """A file in which zeros become holes."""

    def write(self, data: Any) -> int:
        if len(data) > 4096 and bytes(data) == ZEROS[: len(data)]:
            self.seek(len(data), os.SEEK_CUR)
            return len(data)
        return super().write(data) or 0


def values() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(1000).astype("<f4") for name in ("a_first", "z_last", "z_very")}


def read_far(folder: Path) -> dict[str, str]:
    """Return what TensorFlow reads of the small tensors (runs in a child process)."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(folder / "far"))
    contents = {name: reader.get_tensor(name).tobytes() for name in ("a_first", "z_last", "z_very")}
    assert len(reader.get_variable_to_shape_map()) == EMPTY + len(contents)
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}


@pytest.mark.tensorflow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_what_lies_beyond_four_gib_is_written_and_read(tmp_path: Path) -> None:
    leaves = {
        (attr(name),): Leaf("float32", array.shape, Inline(array.tobytes()), name)
        for name, array in values().items()
    }
    for number in range(EMPTY):
        name = f"m{number:02}"
        leaves[attr(name),] = Leaf("float32", (SIZE // 4,), Zeros(), name)
    for piece in tf_bundle.pieces(Tree(leaves), graph=False, shards=1):
        with Sparse(f"{tmp_path}/far{piece.suffix}", "w") as stream:
            piece.write(stream)  # type: ignore[arg-type]
    data = tmp_path / "far.data-00000-of-00001"
    assert data.stat().st_size > 5 << 30
    if data.stat().st_blocks * 512 > 1 << 30:
        data.unlink()
        pytest.skip("this filesystem makes no holes")
    right = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in values().items()}
    tree = tf_bundle.read(f"{tmp_path}/far").tree
    own_digests = {name: hashlib.sha256(tree[attr(name),].read()).hexdigest() for name in right}  # type: ignore[union-attr]
    reference = run(__file__, "read_far", tmp_path)
    data.unlink()
    assert own_digests == right
    assert reference == right
