"""ONNX: the format's rules, the onnx library as referee for every type, and files of external data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.check import CheckOptions, check
from ckpttool.commands.doctor import diagnose
from ckpttool.commands.verify import verify
from ckpttool.core import CkpttoolError, FormatError, Leaf, Record, UsageError, ValueLeaf, display
from ckpttool.core.code_references import CLASSES, CODE
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, onnx, open_checkpoint
from ckpttool.testing.formats import FormatContract
from ckpttool.verification.two_models import find_code
from tests.bundle_writer import field
from tests.conftest import in_process
from tests.golden_texts import Golden
from tests.hostile import crafted_onnx as crafted
from tests.mutants import require_refused_or_listed


class TestOnnx(FormatContract):
    module = onnx

    def make(self, folder: Path) -> str:
        (folder / "policy.onnx").write_bytes(crafted.agent())
        return str(folder / "policy.onnx")

    def test_no_flipped_bit_gets_through(self, path: str) -> None:
        # The format has no checksum, and says so; what is damaged is refused or is listed.
        require_refused_or_listed(path, 100)

    def test_it_is_known_by_its_content(self, path: str, tmp_path: Path) -> None:
        other = tmp_path / "model.bin"
        other.write_bytes(Path(path).read_bytes())
        assert (
            digest_checkpoint(open_checkpoint(str(other))).sha256
            == digest_checkpoint(open_checkpoint(path)).sha256
        )

    def test_facts_of_the_graph_are_details(self, checkpoint: Any) -> None:
        assert checkpoint.details["operators"] == {"Gemm": 2, "Relu": 1, "Constant": 1, "Mul": 1}
        assert checkpoint.details["opsets"] == {"ai.onnx": 13}
        assert checkpoint.writer == "hostile"


@pytest.mark.parametrize(
    "data",
    [b"\x08\x01\x12\x04\xff\xff", b"\x08\x01\x12\x02\x0a\x00", b"\x3a\x10" + bytes(16), b"\x08\x07", b"onnx"],
)
def test_other_bytes_are_not_taken_for_a_model(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "counted.bin"
    path.write_bytes(data)
    assert onnx.claims(Probe(str(path))) is None


@pytest.mark.parametrize("name", crafted.WRONG)
def test_what_breaks_a_rule_is_refused_before_it_is_read(name: str, tmp_path: Path, golden: Golden) -> None:
    path = crafted.WRONG[name](tmp_path)
    with pytest.raises(CkpttoolError) as caught:
        digest_checkpoint(open_checkpoint(str(path)))
    golden(caught.value)
    assert str(caught.value).isprintable()
    assert caught.value.file is not None


# The library as referee.


def read(path: Path) -> dict[str, Leaf | ValueLeaf]:
    return {display(p): leaf for p, leaf in open_checkpoint(str(path)).tree.items()}


def model_of(onnx: Any, *tensors: Any, nodes: Any = ()) -> Any:
    graph = onnx.helper.make_graph(list(nodes), "g", [], [], list(tensors))
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)])


def same(result: Leaf | ValueLeaf, expected: np.ndarray) -> None:
    assert isinstance(result, Leaf)
    array = result.array()
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    assert array.tobytes() == np.ascontiguousarray(expected).tobytes()


TYPES = (
    *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32"),
    *("INT64", "UINT64", "BOOL", "COMPLEX64", "COMPLEX128", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2"),
    *("FLOAT8E5M2FNUZ", "FLOAT8E8M0", "INT4", "UINT4"),
)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_read_as_the_library_reads_it(name: str, raw: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    code = onnx.TensorProto.DataType.Value(name)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(code)
    values = np.array([[1, 0, 3], [2, 1, 7], [0, 4, 5]])
    if not name.startswith(("U", "BOOL", "FLOAT8E8M0")):
        values[1, 1] = -1
    array = values.astype(dtype)
    if raw:
        tensor = onnx.numpy_helper.from_array(array, "w")
    else:
        tensor = onnx.helper.make_tensor("w", code, array.shape, array.reshape(-1))
    onnx.save(model_of(onnx, tensor), str(tmp_path / "m.onnx"))
    same(read(tmp_path / "m.onnx")["w"], onnx.numpy_helper.to_array(tensor))


@pytest.mark.parametrize("raw", [False, True])
def test_a_truth_value_keeps_its_byte(raw: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    numbers = range(256) if raw else (*range(256), 257, -1, -255, 0x7FFFFF01)
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.BOOL, dims=(len(numbers),))
    if raw:
        tensor.raw_data = bytes(numbers)
    else:
        tensor.int32_data.extend(numbers)
    onnx.save(model_of(onnx, tensor), str(tmp_path / "m.onnx"))
    same(read(tmp_path / "m.onnx")["w"], onnx.numpy_helper.to_array(tensor))


@pytest.mark.parametrize("number", [256, -256, 0x7FFFFF00])
def test_a_truth_value_that_readers_disagree_about_is_refused(number: int, tmp_path: Path) -> None:
    """The onnx library takes the low byte, ONNX Runtime the whole number."""
    onnx = pytest.importorskip("onnx")
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.BOOL, (2,), [True, False])
    tensor.int32_data[0] = number
    onnx.save(model_of(onnx, tensor), str(tmp_path / "m.onnx"))
    with pytest.raises(FormatError) as caught:
        digest_checkpoint(open_checkpoint(str(tmp_path / "m.onnx")))
    assert caught.value.file == str(tmp_path / "m.onnx")


def test_strings_are_those_of_the_library(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    texts = [b"one", b"", b"\xff\x00\x01"]
    onnx.save(model_of(onnx, onnx.helper.make_tensor("w", 8, (3,), texts)), str(tmp_path / "m.onnx"))
    leaf = read(tmp_path / "m.onnx")["w"]
    assert isinstance(leaf, Leaf)
    assert leaf.strings() == texts


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    arrays = {"none": np.zeros((0, 3), np.float32), "one": np.float32(2.5).reshape(())}
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    onnx.save(model_of(onnx, *tensors), str(tmp_path / "m.onnx"))
    leaves = read(tmp_path / "m.onnx")
    for name, array in arrays.items():
        same(leaves[name], array)


@pytest.mark.parametrize("one_file", [True, False])
def test_external_data_is_that_of_the_library(one_file: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    arrays = {name: np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32) for name in ("a", "b")}
    model = model_of(onnx, *(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()))
    onnx.save(
        model, str(tmp_path / "m.onnx"), save_as_external_data=True, size_threshold=0,
        all_tensors_to_one_file=one_file, location="m.onnx.data" if one_file else None,
    )  # fmt: skip
    checkpoint = open_checkpoint(str(tmp_path / "m.onnx"))
    assert len(checkpoint.files) == 2 if one_file else 3
    leaves = read(tmp_path / "m.onnx")
    for name, array in arrays.items():
        same(leaves[name], array)


def test_constants_of_inner_graphs_and_functions_have_paths_of_their_own(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    branches = {}
    for branch in ("then_branch", "else_branch"):
        tensor = onnx.numpy_helper.from_array(np.full(2, len(branch), np.float32), "w")
        out = helper.make_tensor_value_info("y", 1, [2])
        branches[branch] = helper.make_graph(
            [helper.make_node("Identity", ["w"], ["y"])], "b", [], [out], [tensor]
        )
    choice = helper.make_node("If", ["c"], ["y"], name="pick", **branches)
    constant = helper.make_node(
        "Constant", [], ["k"], value=onnx.numpy_helper.from_array(np.ones(3, np.float32), "")
    )
    function = helper.make_function("own", "f", ["x"], ["z"], [constant], [helper.make_opsetid("", 13)])
    model = model_of(onnx, nodes=[choice])
    model.functions.append(function)
    onnx.save(model, str(tmp_path / "m.onnx"))
    leaves = read(tmp_path / "m.onnx")
    assert sorted(leaves) == ["own/f/k", "pick/else_branch/w", "pick/then_branch/w"]


def test_what_no_array_holds_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(
        crafted.model(crafted.graph(crafted.tensor("w", (2,), 23, raw=b"\x21"), crafted.tensor("v")))
    )
    leaf = read(path)["w"]
    assert isinstance(leaf, ValueLeaf)
    assert isinstance(leaf.value, Record)


# --- What is neither an operator of ONNX nor a file beside the model -----------------------------------


def _topics(path: Path) -> set[str]:
    (checked,) = check([str(path)], CheckOptions(numbers=False)).checkpoints
    return {finding.topic for finding in checked.findings}


@pytest.mark.parametrize("name", crafted.CODE)
def test_an_operator_of_another_library_is_code(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(crafted.CODE[name])
    checkpoint = open_checkpoint(str(path))
    assert {reference.by for reference in checkpoint.code_references if reference.verdict == CODE} == {"onnx"}
    assert _topics(path) == {"loading"}
    assert "loading" in {finding.topic for finding in diagnose(str(path)).findings}
    assert in_process("inspect", path).out.startswith("RUNS CODE: ")
    assert find_code(checkpoint, "onnx") is not None
    with pytest.raises(UsageError) as caught:
        verify(str(path), str(path))
    assert "--run-code" in (caught.value.hint or "")


@pytest.mark.parametrize("name", crafted.ELSEWHERE)
def test_data_elsewhere_is_found_in_any_tensor(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(crafted.ELSEWHERE[name])
    assert _topics(path) == {"loading"}


@pytest.mark.parametrize("name", ["absolute", "parent", "link"])
def test_data_elsewhere_is_refused_and_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "bait.bin").write_bytes(bytes(64))
    (tmp_path / "model").mkdir()
    case = next(case for case in crafted.CASES if case.name == f"onnx-{name}")
    path = case.make(tmp_path / "model")
    (checked,) = check([str(path)]).checkpoints
    assert checked.error is not None
    assert {finding.topic for finding in checked.findings} == {"loading"}


def test_what_onnx_and_onnxruntime_define_is_no_finding(tmp_path: Path) -> None:
    two = crafted.node("Relu", ("x",), ("y",))
    models = {
        "function": crafted.with_nodes(crafted.custom("F", "pkg"), more=crafted.function(two)),
        "branch": crafted.with_nodes(crafted.branch(two)),
        "microsoft": crafted.with_nodes(crafted.custom("FusedMatMul", "com.microsoft")),
        "nchwc": crafted.with_nodes(crafted.custom("Conv", "com.microsoft.nchwc")),
        "ml": crafted.with_nodes(crafted.custom("Scaler", "ai.onnx.ml")),
        "beside": crafted.model(
            crafted.graph(crafted.tensor("w", (2,), 1, crafted.external(location="w.bin", length="8")))
        ),
    }
    (tmp_path / "w.bin").write_bytes(bytes(8))
    for name, data in models.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    result = check([str(tmp_path)], CheckOptions(strict=True))
    assert result.clean
    assert len(result.checkpoints) == len(models)
    assert find_code(open_checkpoint(str(tmp_path / "function.onnx")), "onnx") is None


def test_a_domain_without_a_node_needs_a_library_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    versions = [("", 13), ("my.ops", 1), ("com.microsoft.nchwc", 1), ("ai.onnx.ml", 3)]
    imports = b"".join(field(8, field(1, name) + field(2, version)) for name, version in versions)
    path.write_bytes(crafted.model(crafted.graph(crafted.tensor()), imports))
    assert [(name.name, name.verdict) for name in open_checkpoint(str(path)).code_references] == [
        ("domain 'my.ops'", CLASSES)
    ]
    assert _topics(path) == set()
    assert not check([str(path)], CheckOptions(strict=True)).clean


def test_the_allow_list_is_complete() -> None:
    """A version of onnx or onnxruntime with new domains or operators needs a decision on each."""
    defs = pytest.importorskip("onnx.defs")
    assert {schema.domain for schema in defs.get_all_schemas()} <= onnx._STANDARD
    runtime = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas = [(schema.domain, schema.name) for schema in runtime.get_all_operator_schema()]
    unlisted = {f"{domain}.{name}" for domain, name in schemas if not onnx._is_pure(domain, name)}
    assert unlisted == {"com.microsoft.EPContext", "com.microsoft.SampleOp", "com.microsoft.Snpe"}
