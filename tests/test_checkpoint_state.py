"""TensorFlow's state file: what is read, what is written, what is refused, and TensorFlow's own opinion."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckpttool.core import CkpttoolError, FormatError, limits
from ckpttool.formats import CheckpointState, tf_common
from tests import tensorflow_child
from tests.conftest import TF_SAMPLE
from tests.golden_texts import Golden

NAMES = ("ckpt-1", "a b-2", 'quo"te', "back\\slash", "tab\tline\n", "umlaut-ä", "/gone/run/x", "c\x7f\x01")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def test_a_file_of_tensorflow_is_read_and_written_back_to_the_byte() -> None:
    path = TF_SAMPLE.parent / "checkpoint"
    state = tf_common.read_state(str(path))
    assert state.latest == state.every[-1] == "ckpt-15000"
    assert len(state.every) == len(state.times) == 6
    assert state.times[0] == 1795234191.5377774
    assert state.preserved is not None
    assert tf_common.encode_state(state) == path.read_bytes()


def test_every_name_survives(file: Path) -> None:
    state = CheckpointState(NAMES[2], (*NAMES, "byte\udcff"), (), 1.5)
    file.write_bytes(tf_common.encode_state(state))
    assert file.read_bytes().isascii()
    assert tf_common.read_state(str(file)) == state


@pytest.mark.parametrize(
    ("text", "latest"),
    [
        ("model_checkpoint_path:'x'", "x"),
        ('# a comment\n\n model_checkpoint_path : "x" # and "one" more', "x"),
        ('model_checkpoint_path: "a" "b"\n  \'c\'', "abc"),
        ('model_checkpoint_path: "one", model_checkpoint_path: "two";', "two"),
        ('later_field: 7 other: NAME model_checkpoint_path: "x"', "x"),
        (r'model_checkpoint_path: "\143\x6b\u00e4\U0001F600\"\'\\\n"', "ckä😀\"'\\\n"),
    ],
)
def test_the_ways_to_write_it(file: Path, text: str, latest: str) -> None:
    file.write_text(text, encoding="utf-8")
    assert tf_common.read_state(str(file)).latest == latest


def test_times_without_a_name_each_are_left_out(file: Path) -> None:
    file.write_text(
        'model_checkpoint_path: "x" all_model_checkpoint_paths: "x"'
        "all_model_checkpoint_timestamps: 1 all_model_checkpoint_timestamps: 2"
    )
    assert tf_common.read_state(str(file)) == CheckpointState("x", ("x",))


@pytest.mark.parametrize(
    "text",
    [
        "",
        'all_model_checkpoint_paths: "x"',
        'model_checkpoint_path: ""',
        "model_checkpoint_path: x",
        'model_checkpoint_path: "x',
        'model_checkpoint_path: "x\n"',
        'model_checkpoint_path "x"',
        'model_checkpoint_path: "x" }',
        'model_checkpoint_path: "x" all_model_checkpoint_timestamps: soon',
        'model_checkpoint_path: "x" last_preserved_timestamp: nan',
        r'model_checkpoint_path: "\ud800"',
        r'model_checkpoint_path: "\UFFFFFFFF"',
    ],
)
def test_damage_is_named(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(FormatError) as caught:
        tf_common.read_state(str(file))
    assert caught.value.file == str(file)


def test_a_file_without_end_is_refused(file: Path, golden: Golden) -> None:
    with file.open("wb") as stream:
        stream.truncate(limits.Limits().state_bytes + 1)
    with pytest.raises(FormatError) as caught:
        tf_common.read_state(str(file))
    golden(caught.value)


@pytest.mark.parametrize("piece", [b"# ", b"a:", b'"', b"\\", b"a : 'b' "])
def test_long_nonsense_takes_no_longer_than_it_is(file: Path, piece: bytes) -> None:
    file.write_bytes(b'model_checkpoint_path: "x"\n' + piece * (1_000_000 // len(piece)) + b"!")
    try:
        tf_common.read_state(str(file))
    except FormatError:
        pass
    else:
        assert piece == b"# "


def test_whatever_happens_to_the_bytes_the_error_is_ours(file: Path) -> None:
    data = (TF_SAMPLE.parent / "checkpoint").read_bytes()
    generator = random.Random(7)
    damaged = [data[:end] for end in range(len(data))]
    for _ in range(400):
        flipped = bytearray(data)
        flipped[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        damaged.append(bytes(flipped))
    refused = 0
    for content in damaged:
        file.write_bytes(content)
        try:
            assert tf_common.read_state(str(file)).latest
        except CkpttoolError:
            refused += 1
    assert 0 < refused < len(damaged)


@pytest.mark.parametrize(
    ("head", "begins"),
    [
        (b"model_checkpoint_path: ", True),
        (b"  # comment\n all_model_checkpoint_paths:", True),
        (b"model_checkpoint_path", False),
        (b"my_model_checkpoint_path:", False),
        (b"", False),
    ],
)
def test_what_begins_as_a_state_file(head: bytes, begins: bool) -> None:
    assert tf_common.is_state_file(head) is begins


def exchange(folder: Path) -> None:
    """In TensorFlow's process: read what we wrote, write what we read."""
    import tensorflow as tf

    own_state = tf.train.get_checkpoint_state(str(folder / "ours"))
    record = [own_state.model_checkpoint_path, *own_state.all_model_checkpoint_paths]
    (folder / "told.json").write_text(
        json.dumps({"names": record, "times": list(own_state.all_model_checkpoint_timestamps)})
    )
    names = ["/x/" + name for name in NAMES]
    tf.compat.v1.train.update_checkpoint_state(
        str(folder / "theirs"), names[-1], names, all_model_checkpoint_timestamps=[1.25] * len(names)
    )


@pytest.mark.tensorflow
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs tensorflow")
def test_tensorflow_agrees(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    names = tuple(f"/x/{name}" for name in NAMES)
    times = tuple(1e9 + n / 3 for n in range(len(names)))
    own_state = CheckpointState(names[0], names, times)
    (tmp_path / "ours" / "checkpoint").write_bytes(tf_common.encode_state(own_state))
    tensorflow_child.run(__file__, "exchange", tmp_path)
    record = json.loads((tmp_path / "told.json").read_text())
    assert record == {"names": [names[0], *names], "times": list(times)}
    other_state = tf_common.read_state(str(tmp_path / "theirs" / "checkpoint"))
    assert other_state[:3] == (names[-1], names, (1.25,) * len(names))
