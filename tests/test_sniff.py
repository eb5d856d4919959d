"""Files that are no checkpoint: the sentence names what they are and what to point at."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.core import NotACheckpointError
from ckpttool.formats import open_checkpoint
from tests.bundle_writer import field

NODE = field(1, field(1, "x") + field(2, "Placeholder") + field(5, field(1, "dtype") + field(2, field(6, 1))))
META = field(1, field(2, field(1, field(1, "Add") + field(2, field(1, "x")))) + field(4, "serve")) + field(
    2, NODE
)


@pytest.mark.parametrize(
    ("name", "content", "word", "hint"),
    [
        ("model.tflite", b"\x1c\0\0\0TFL3\x14\0\x20\0" + bytes(100), "TensorFlow Lite model", "made from"),
        ("frozen.pb", NODE * 3 + field(4, field(1, 24)), "graph alone (a GraphDef", "SavedModel"),
        (
            "bare.pb",
            field(1, field(1, "a/b") + field(2, "NoOp")) + NODE,
            "graph alone (a GraphDef",
            "SavedModel",
        ),
        ("long.pb", field(1, field(1, "c") + field(2, "Const") + field(5, bytes(70_000))), "a GraphDef", ""),
        ("model.ckpt-7.meta", META, "graph alone (a MetaGraphDef", ".index"),
        ("renamed.pb", field(1, 1) + field(2, META), "graph of a SavedModel", "saved_model.pb"),
        ("model.gguf", b"GGUF\3\0\0\0" + bytes(20), "GGUF", "made from"),
        ("ggml.bin", b"lmgg" + bytes(20), "GGML", "numpy.savez"),
        ("cc.en.bin", b"\xba\x16\x4f\x2f\x0c" + bytes(20), "fastText", "numpy.savez"),
        ("net-0000.params", b"\x12\1" + bytes(40), "MXNet", "numpy.savez"),
        ("net.mlmodel", b"\x08\1\x12\x10\n\5input" + bytes(9), "Core ML", "made from"),
        ("net.caffemodel", b"\n\5LeNet\xa2\6\x10\n\4conv", "Caffe", "numpy.savez"),
        ("data.mat", b"MATLAB 5.0 MAT-file, Platform: GLNXA64\0", "MATLAB", "loadmat"),
        ("runs.db", b"SQLite format 3\0" + bytes(20), "SQLite", "weights"),
        ("table.parquet", b"PAR1" + bytes(20), "Parquet", "weights"),
        ("plot.png", b"\x89PNG\r\n\x1a\n" + bytes(20), "PNG", "weights"),
        ("paper.pdf", b"%PDF-1.4\n", "PDF", "weights"),
        ("film.mp4", b"\0\0\0\x18ftypmp42" + bytes(20), "video", "weights"),
        ("weights.7z", b"7z\xbc\xaf\x27\x1c" + bytes(20), "7z", "unpack"),
        ("config.json", b'{"hidden": 4}', "settings", "weights"),
        ("progress.csv", b"epoch,loss\n1,0.5\n", "table", "weights"),
        ("train.py", b"import torch\n", "program", "weights"),
        ("page.pt", b"<!DOCTYPE html>\n<html>", "HTML page", "download"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS", "git lfs pull"),
        ("noise.bin", bytes(range(128, 256)), "unrecognised file format", ""),
        ("counted.bin", b"\x08\x01\x12\x04\xff\xff", "unrecognised file format", ""),
    ],
)
def test_a_model_that_is_no_checkpoint_is_named(
    tmp_path: Path, name: str, content: bytes, word: str, hint: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(NotACheckpointError) as caught:
        open_checkpoint(str(file))
    assert word in str(caught.value)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_a_folder_of_orbax_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(NotACheckpointError, match="Orbax") as caught:
        open_checkpoint(str(tmp_path))
    assert "numpy.savez" in (caught.value.hint or "")
