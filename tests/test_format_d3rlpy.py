"""d3rlpy's `.d3` files: what lies where, what is refused; files built as its dump_learnable builds them."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.core import CkpttoolError, FormatError, Leaf, Span, ValueLeaf, display
from ckpttool.formats import Probe, d3rlpy, open_checkpoint, torch_legacy
from ckpttool.testing.formats import FormatContract
from tests.golden_texts import Golden
from tests.pickles import damaged

CONFIG = {
    "observation_shape": [3],
    "action_size": 2,
    "config": {"type": "td3", "params": {"gamma": 0.99, "action_scaler": {"type": "none", "params": {}}}},
}


def states() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"_encoder._layers.0.weight": (64, 3), "_encoder._layers.0.bias": (64,), "_fc.weight": (2, 64)}
    policy = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {"policy": policy, "targ_policy": {name: tensor + 1 for name, tensor in policy.items()}}


def archive(value: Any = None, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(states() if value is None else value, stream, **how)
    return stream.getvalue()


def written(path: Path, protocol: int = 4, **entries: Any) -> str:
    """dump_learnable of d3rlpy/base.py."""
    contents = {"torch": archive(), "config": json.dumps(CONFIG), "version": "2.8.1", **entries}
    path.write_bytes(pickle.dumps(contents, protocol))
    return str(path)


class TestD3(FormatContract):
    module = d3rlpy

    def make(self, folder: Path) -> str:
        return written(folder / "agent.d3")

    def test_no_flipped_bit_gets_through(self, path: str) -> None:
        # The archive has checksums; the pickle around it, and so the configuration, has none.
        whole = Path(path).read_bytes()
        start = whole.index(b"PK\x03\x04")
        stop = start + len(archive())
        right = {display(p): bytes(leaf.read()) for p, leaf in open_checkpoint(path).tree.tensors()}
        generator = np.random.default_rng(0)
        for _ in range(60):
            data = bytearray(whole)
            data[generator.integers(start, stop)] ^= 1 << generator.integers(8)
            Path(path).write_bytes(data)
            try:
                tensors = open_checkpoint(path).tree.tensors()
                assert {display(p): bytes(leaf.read()) for p, leaf in tensors} == right
            except CkpttoolError as error:
                assert str(error).isprintable()  # noqa: PT017  # both outcomes are right


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_tensors_lie_in_the_file_where_they_are(protocol: int, tmp_path: Path) -> None:
    path = written(tmp_path / "x.d3", protocol)
    tree = open_checkpoint(path).tree
    whole = Path(path).read_bytes()
    state = states()
    leaves = {tree.names[p]: leaf for p, leaf in tree.tensors()}
    assert len(leaves) == 6
    for owner, tensors in state.items():
        for name, tensor in tensors.items():
            leaf = leaves[f"torch/{owner}/{name.replace('.', '/')}"]
            np.testing.assert_array_equal(leaf.array(), tensor.numpy())
            assert leaf.key == f"{owner}.{name}"
            assert isinstance(leaf.source, Span)
            start = leaf.source.offset
            assert whole[start : start + leaf.nbytes] == tensor.numpy().tobytes()


def test_the_configuration_is_values(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path / "x.d3"))
    plain = {display(p): leaf.value for p, leaf in checkpoint.tree.plain()}
    assert plain["config/observation_shape/0"] == 3
    assert plain["config/config/params/gamma"] == 0.99
    assert plain["config/config/params/action_scaler/type"] == "none"
    assert plain["version"] == "2.8.1"
    assert checkpoint.writer is not None
    assert checkpoint.writer.startswith("d3rlpy 2.8.1")
    assert checkpoint.integrity == "crc32"


def test_the_form_before_the_archive_is_read_too(tmp_path: Path) -> None:
    tree = open_checkpoint(
        written(tmp_path / "x.d3", torch=archive(_use_new_zipfile_serialization=False))
    ).tree
    assert sum(isinstance(leaf, Leaf) for leaf in tree.values()) == 6


def test_infinity_in_a_scaler_is_a_number(tmp_path: Path) -> None:
    path = written(tmp_path / "x.d3", config='{"maximum": [Infinity, NaN], "none": null}')
    values = [leaf.value for p, leaf in open_checkpoint(path).tree.plain() if p[0].value == "config"]
    assert values[0] == float("inf")
    assert values[2] is None


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"config": "{"}, id="cut JSON"),
        pytest.param({"config": "[1]"}, id="JSON list"),
        pytest.param({"config": "\udc80"}, id="surrogate"),
        pytest.param({"config": 3}, id="number"),
        pytest.param({"config": '{"a": ' + "[" * 220 + "]" * 220 + "}"}, id="deep"),
        pytest.param({"config": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"}, id="very deep"),
        pytest.param({"more": 1}, id="one entry more"),
        pytest.param({"torch": bytes(500)}, id="zeros"),
        pytest.param({"torch": b"PK"}, id="short bytes"),
    ],
)
def test_what_d3rlpy_does_not_write_is_refused(
    entries: dict[str, Any], tmp_path: Path, golden: Golden
) -> None:
    path = written(tmp_path / "x.d3", **entries)
    with pytest.raises(FormatError) as raised:
        d3rlpy.read(path)
    golden(raised.value)
    assert raised.value.file == path


def test_nothing_is_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (flag,)

    path = written(tmp_path / "x.d3", version=Evil())
    with pytest.raises(CkpttoolError):
        d3rlpy.read(path)
    tree = open_checkpoint(written(tmp_path / "y.d3", torch=archive({"policy": Evil()}))).tree
    assert any(isinstance(leaf, ValueLeaf) for p, leaf in tree.items() if p[0].value == "torch")
    assert not flag.exists()


def test_damage_ends_in_a_sentence(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "x.d3"))
    for data in damaged(path.read_bytes(), 150):
        path.write_bytes(data)
        try:
            for _, leaf in d3rlpy.read(str(path)).tree.tensors():
                leaf.read()
        except CkpttoolError as error:
            assert str(error).isprintable()  # noqa: PT017  # both outcomes are right


def test_other_pickles_of_that_key_are_not_claimed(tmp_path: Path) -> None:
    for name, value in {"a": {"torch": "1.13"}, "b": {"numpy": 1, "torch": bytes(9)}, "c": ["torch"]}.items():
        path = tmp_path / name
        path.write_bytes(pickle.dumps(value))
        assert d3rlpy.claims(Probe(str(path))) is None
        assert torch_legacy.pickle_claims(Probe(str(path))) == str(path)
