"""Files that are no checkpoint: the sentence names what they are and what to point at."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.core import NotACheckpointError
from ckpttool.formats import open_checkpoint
from tests.bundle_writer import field
from tests.golden_texts import Golden

NODE = field(1, field(1, "x") + field(2, "Placeholder") + field(5, field(1, "dtype") + field(2, field(6, 1))))
META = field(1, field(2, field(1, field(1, "Add") + field(2, field(1, "x")))) + field(4, "serve")) + field(
    2, NODE
)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("model.tflite", b"\x1c\0\0\0TFL3\x14\0\x20\0" + bytes(100), id="model.tflite"),
        pytest.param("frozen.pb", NODE * 3 + field(4, field(1, 24)), id="frozen.pb"),
        pytest.param("bare.pb", field(1, field(1, "a/b") + field(2, "NoOp")) + NODE, id="bare.pb"),
        pytest.param(
            "long.pb", field(1, field(1, "c") + field(2, "Const") + field(5, bytes(70_000))), id="long.pb"
        ),
        pytest.param("model.ckpt-7.meta", META, id="model.ckpt-7.meta"),
        pytest.param("renamed.pb", field(1, 1) + field(2, META), id="renamed.pb"),
        pytest.param("model.gguf", b"GGUF\3\0\0\0" + bytes(20), id="model.gguf"),
        pytest.param("ggml.bin", b"lmgg" + bytes(20), id="ggml.bin"),
        pytest.param("cc.en.bin", b"\xba\x16\x4f\x2f\x0c" + bytes(20), id="cc.en.bin"),
        pytest.param("net-0000.params", b"\x12\1" + bytes(40), id="net-0000.params"),
        pytest.param("net.mlmodel", b"\x08\1\x12\x10\n\5input" + bytes(9), id="net.mlmodel"),
        pytest.param("net.caffemodel", b"\n\5LeNet\xa2\6\x10\n\4conv", id="net.caffemodel"),
        pytest.param("data.mat", b"MATLAB 5.0 MAT-file, Platform: GLNXA64\0", id="data.mat"),
        pytest.param("runs.db", b"SQLite format 3\0" + bytes(20), id="runs.db"),
        pytest.param("table.parquet", b"PAR1" + bytes(20), id="table.parquet"),
        pytest.param("plot.png", b"\x89PNG\r\n\x1a\n" + bytes(20), id="plot.png"),
        pytest.param("paper.pdf", b"%PDF-1.4\n", id="paper.pdf"),
        pytest.param("film.mp4", b"\0\0\0\x18ftypmp42" + bytes(20), id="film.mp4"),
        pytest.param("weights.7z", b"7z\xbc\xaf\x27\x1c" + bytes(20), id="weights.7z"),
        pytest.param("config.json", b'{"hidden": 4}', id="config.json"),
        pytest.param("progress.csv", b"epoch,loss\n1,0.5\n", id="progress.csv"),
        pytest.param("train.py", b"import torch\n", id="train.py"),
        pytest.param("page.pt", b"<!DOCTYPE html>\n<html>", id="page.pt"),
        pytest.param(
            "model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", id="model.safetensors"
        ),
        pytest.param("noise.bin", bytes(range(128, 256)), id="noise.bin"),
        pytest.param("counted.bin", b"\x08\x01\x12\x04\xff\xff", id="counted.bin"),
    ],
)
def test_a_model_that_is_no_checkpoint_is_named(
    tmp_path: Path, name: str, content: bytes, golden: Golden
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(NotACheckpointError) as caught:
        open_checkpoint(str(file))
    golden(caught.value)


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_a_folder_of_orbax_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(NotACheckpointError, match="Orbax") as caught:
        open_checkpoint(str(tmp_path))
    assert "numpy.savez" in (caught.value.hint or "")
