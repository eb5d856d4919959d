"""The sidecar: data with limits, bound to its weights, each fact with its provenance."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import FormatError, sidecar, sidecar_parsing

DRAWN = {"kind": "gaussian", "limits": [-20.0, 2.0], "limited": "clip", "place": "mean", "assumed": ""}
WHOLE: dict[str, Any] = {
    "schema": 1,
    "tool": "ckpttool 0.1.0",
    "target_sha256": "0" * 64,
    "env": {"id": "Pendulum-v1", "gymnasium": None},
    "obs_dim": 3,
    "action_low": [-2.0],
    "action_high": [2.0],
    "distribution": DRAWN,
    "head": "tanh",
    "activations": ["relu"],
    "epsilon": {"adam": 1e-7},
    "obs_norm": {"mean": [0.0], "var": [1.0], "epsilon": 1e-8, "clip": 10.0},
    "provenance": {"env": "given"},
    "residue": [],
}


def write(folder: Path, content: object) -> str:
    path = str(folder / "x.pt")
    text = content if isinstance(content, str) else json.dumps(content)
    Path(sidecar.sidecar_path(path)).write_text(text)
    return path


def test_a_sidecar_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    read_back = sidecar.load_sidecar(write(tmp_path, WHOLE))
    assert read_back is not None
    assert read_back.env == {"id": "Pendulum-v1", "gymnasium": None}
    Path(sidecar.sidecar_path(str(tmp_path / "y.pt"))).write_bytes(read_back.encode())
    again = sidecar.load_sidecar(str(tmp_path / "y.pt"))
    assert again is not None
    assert again.document() == read_back.document()
    assert again.encode() == read_back.encode()


def test_no_sidecar_is_no_error(tmp_path: Path) -> None:
    assert sidecar.load_sidecar(str(tmp_path / "x.pt")) is None


def test_keys_that_are_not_known_are_left_alone(tmp_path: Path) -> None:
    assert sidecar.load_sidecar(write(tmp_path, {**WHOLE, "later": 1})) is not None


def wrapped(*wrappers: object) -> dict[str, Any]:
    return {"env": {"id": "Pendulum-v1", "wrappers": list(wrappers)}}


CHOICES = {"counts": [2], "starts": [0], "scores": "values", "support": [], "single": True}
OBJECTS = {"graph": "", "keys": {}, "read": True}
WRONG: list[dict[str, Any]] = [
    {"schema": 2},
    {"target_sha256": None},
    {"target_sha256": 3},
    {"source": []},
    {"rules": {}},
    {"assumed": [3]},
    {"env": "Pendulum-v1"},
    {"env": {"id": 7}},
    {"env": {"id": "Pendulum-v1", "arguments": {"file": "model.xml"}}},
    wrapped("ClipAction"),
    wrapped({"name": 3}),
    wrapped({"name": "ClipAction", "arguments": [1]}),
    wrapped({"name": "ClipAction", "arguments": {"size": {"rows": 1}}}),
    {"obs_dim": -1},
    {"obs_dim": True},
    {"action_low": ["-2"]},
    {"action_low": [3.0]},
    {"action_high": 2.0},
    {"action_high": [1e308]},
    {"choices": {**CHOICES, "counts": [0]}},
    {"choices": {**CHOICES, "starts": []}},
    {"choices": {**CHOICES, "scores": "atoms"}},
    {"observation_space": {"library": "gymnasium", "parts": {"obs": {"low": [0.0]}}}},
    {"observation_space": {"library": "gymnasium", "parts": {"obs": {"low": [0.0], "high": []}}}},
    {"head": ["tanh"]},
    {"activations": "relu"},
    {"network_activations": {"actor": []}},
    {"epsilon": 1e-7},
    {"epsilon": {"adam": "1e-7"}},
    {"optimizers": {"actor": {"learning_rate": [1.0]}}},
    {"objects": {**OBJECTS, "read": 1}},
    {"objects": {**OBJECTS, "keys": {"a": 1}}},
    {"stripped": ["a"]},
    {"computation": {}},
    {"parity": ["a"]},
    {"verification": {"verified": "yes"}},
    {"obs_norm": {"mean": [0.0]}},
    {"obs_norm": {"mean": [0.0], "var": [-1.0]}},
    {"obs_norm": {"mean": [0.0], "var": [1.0], "clip": "a"}},
    {"obs_norm": {"mean": [0.0], "var": [1.0], "parts": {"obs": 2}}},
    {"obs_norm": {"mean": [0.0, 1.0], "var": [1.0]}},
    {"distribution": "gaussian"},
    {"distribution": {"kind": "gaussian"}},
    {"distribution": {**DRAWN, "kind": "uniform"}},
    {"distribution": {**DRAWN, "limits": [2.0, -20.0]}},
    {"provenance": []},
    {"residue": {}},
    {"undo": []},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_not_what_it_should_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        sidecar.load_sidecar(write(tmp_path, {**WHOLE, **wrong}))
    assert "sidecar" in str(caught.value)
    assert caught.value.file is not None


def test_each_field_has_a_wrong_value() -> None:
    assert {name for wrong in WRONG for name in wrong} == {"schema", "target_sha256", *sidecar_parsing._TYPES}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 100_000, "nonsense"])
def test_what_is_no_sidecar_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError):
        sidecar.load_sidecar(write(tmp_path, text))


@pytest.mark.long
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_is_a_sidecar_or_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, content: object
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for document in (content, {**WHOLE, "env": content}, {**WHOLE, "obs_norm": content}):
        with contextlib.suppress(FormatError):
            sidecar.load_sidecar(write(folder, document))
