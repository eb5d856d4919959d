"""Files that are no checkpoint: the sentence names what they are and what to point at."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.errors import NotACheckpointError
from ckpttool.formats.resolve import open_checkpoint
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
