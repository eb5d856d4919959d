"""Operations of TensorFlow graphs: the list against the registry, real graphs that act, and ordinary ones."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.commands.check import check
from ckpttool.core import CkpttoolError
from ckpttool.core.code_references import CODE
from ckpttool.formats import open_checkpoint, tf_operations
from tests.bundle_writer import field
from tests.conftest import CORPUS, ROOT, TORCH_SAMPLE, in_process
from tests.tensorflow_child import run_each

SEED = ROOT / "tests" / "hostile" / "seed_files" / "saved_model"
CHILD = str(Path(__file__).with_name("saved_models.py"))
without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
CONDITIONAL = {
    *tf_operations.SAVER_OPERATIONS,
    *tf_operations.TABLE_OPERATIONS,
    *tf_operations.CACHE_OPERATIONS,
    *tf_operations.ATTRIBUTE_OPERATIONS,
}


def acting(path: Path | str) -> set[str]:
    """Return the names in a checkpoint that run code."""
    return {name.name for name in open_checkpoint(str(path)).code_references if name.verdict == CODE}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("graphs")
    names = ("build_pure", "build_acting", "list_registry")
    return folder, run_each(CHILD, dict.fromkeys(names, folder))


# The list.


@pytest.mark.tensorflow
@without_tensorflow
def test_the_list_against_the_registry(written: tuple[Path, dict[str, Any]]) -> None:
    registry = written[1]["list_registry"]
    stateless = {name for name, op in registry.items() if not op["stateful"]}
    assert stateless >= tf_operations.STATELESS_OPERATIONS
    assert registry.keys() - stateless >= tf_operations.STATEFUL_OPERATIONS
    assert not tf_operations.OLDER_OPERATIONS & registry.keys()
    assert registry.keys() >= CONDITIONAL
    assert not CONDITIONAL & tf_operations.PURE_OPERATIONS
    calling = {name for name in tf_operations.PURE_OPERATIONS if registry[name]["functions"]}
    assert calling == tf_operations.CALLING_OPERATIONS


# Words in the names of arguments and attributes that are paths, addresses, programs or graphs.
OUTSIDE = (
    *("file", "path", "directory", "url", "address", "token", "graph_def", "mlir", "logdir", "memory_region"),
    *("descriptor_source", "module", "call_target", "target", "serialized_metadata", "program"),
)
# These only make names of files or read ones that nothing opens, or are numbers.
HARMLESS = {
    *("ShardedFilename", "ShardedFilespec", "CTCBeamSearchDecoder", "BoostedTreesCreateEnsemble"),
    *("BoostedTreesDeserializeEnsemble", "InTopK", "InTopKV2", "QuantizeDownAndShrinkRange"),
}


@pytest.mark.tensorflow
@without_tensorflow
def test_no_listed_operation_names_anything_outside(written: tuple[Path, dict[str, Any]]) -> None:
    registry = written[1]["list_registry"]
    suspicious = {
        name
        for name in tf_operations.PURE_OPERATIONS
        if any(word in argument for argument in registry[name]["strings"] for word in OUTSIDE)
    }
    assert suspicious <= HARMLESS
    words = ("File", "Reader", "Rpc", "TPU", "Collective", "Nccl", "PyFunc", "Debug", "Snapshot", "Service")
    named = {node for node in tf_operations.PURE_OPERATIONS if any(word in node for word in words)}
    assert named <= {"ShardedFilename", "ShardedFilespec", "Snapshot", "DebugGradientIdentity"} | {
        "BoostedTreesExampleDebugOutputs",
        "DebugGradientRefIdentity",
    }


@pytest.mark.tensorflow
@without_tensorflow
def test_every_other_operation_is_a_finding(written: tuple[Path, dict[str, Any]]) -> None:
    others = sorted(written[1]["list_registry"].keys() - tf_operations.PURE_OPERATIONS - CONDITIONAL)
    assert len(others) > 400
    graph = b"".join(field(1, field(1, f"n{at}") + field(2, op)) for at, op in enumerate([*others, "MyOp"]))
    references = tf_operations.audit_graph(memoryview(graph), "x")
    assert references is not None
    assert {reference.name for reference in references} == {*others, "MyOp"}


# Graphs that TensorFlow wrote.


@pytest.mark.tensorflow
@without_tensorflow
def test_ordinary_graphs(written: tuple[Path, dict[str, Any]]) -> None:
    folder, answers = written
    for name, operations in answers["build_pure"].items():
        checkpoint = open_checkpoint(str(folder / "pure" / name))
        assert (name, checkpoint.code_references, checkpoint.unjudged) == (name, (), ())
        assert not operations or operations["nodes"] > 0
    assert len(answers["build_pure"]) >= 20
    result = check([str(folder / "pure")])
    assert [checkpoint.path for checkpoint in result.checkpoints if checkpoint.error] == []
    assert [f for checkpoint in result.checkpoints for f in checkpoint.findings if f.topic == "loading"] == []


@pytest.mark.tensorflow
@without_tensorflow
def test_graphs_that_act(written: tuple[Path, dict[str, Any]]) -> None:
    folder, answers = written
    expected = answers["build_acting"]
    assert len(expected) >= 30
    operations = {name: sorted(acting(folder / "acting" / name) & set(ops)) for name, ops in expected.items()}
    assert operations == {name: sorted(ops) for name, ops in expected.items()}
    verdicts = check([str(folder / "acting")]).checkpoints
    judged = {Path(row.path).name for row in verdicts if any(f.topic == "loading" for f in row.findings)}
    assert judged >= expected.keys()


@pytest.mark.tensorflow
@without_tensorflow
def test_an_asset_that_is_a_link(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model = Path(shutil.copytree(written[0] / "pure" / "text_table", tmp_path / "model"))
    asset = model / "assets" / "words.txt"
    assert acting(model) == set()
    asset.unlink()
    assert acting(model) == set()
    asset.symlink_to(model / "fingerprint.pb")
    assert acting(model) == set()
    asset.unlink()
    asset.symlink_to(written[0] / "pure" / "words.txt")
    assert acting(model) == {"InitializeTableFromTextFileV2"}


@pytest.mark.tensorflow
@without_tensorflow
def test_every_command_reports_it(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    model = written[0] / "acting" / "write"
    listing = in_process("inspect", model, "--json").json()
    assert listing["asks"]["verdict"] == CODE
    assert [name["name"] for name in listing["asks"]["names"]] == ["WriteFile"]
    assert in_process("inspect", model, "--strict").status == 1
    diagnosis = in_process("doctor", model, "--json")
    assert diagnosis.status == 1
    assert "loading" in {row["topic"] for row in diagnosis.json()["findings"]}
    assert in_process("check", model, "--sarif", "x.sarif", cwd=tmp_path).status == 1
    results = json.loads((tmp_path / "x.sarif").read_text())["runs"][0]["results"]
    assert "ckpttool/loading" in {result["ruleId"] for result in results}


@pytest.mark.corpus
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the shared corpus is not beside the project")
def test_graphs_of_the_corpus() -> None:
    metas = sorted((CORPUS / "tf").rglob("*.meta"))
    assert len(metas) >= 3
    for path in metas:
        assert tf_operations.audit_graph(memoryview(path.read_bytes()), path.name) == ()
    models = sorted((CORPUS / "tf").rglob("saved_model.pb"))
    assert len(models) >= 8
    assert [path for path in models if acting(path.parent)] == []


# Graphs made byte by byte.


def node(op: str, name: str, *inputs: str, attributes: bytes = b"") -> bytes:
    return field(1, field(1, name) + field(2, op) + b"".join(field(3, item) for item in inputs) + attributes)


def audit(data: bytes) -> set[str] | None:
    references = tf_operations.audit_graph(memoryview(data), "x.pb")
    return None if references is None else {reference.name for reference in references}


WRITE = node("WriteFile", "w", "x")


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda graph: graph, id="GraphDef"),
        pytest.param(lambda graph: field(1, field(4, "serve")) + field(2, graph), id="MetaGraphDef"),
        pytest.param(lambda graph: field(2, b"") + field(2, graph), id="two graphs"),
        pytest.param(lambda graph: field(1, 1) + field(2, field(2, graph)), id="SavedModel"),
        pytest.param(lambda graph: field(99, "x") + field(4, b"") + graph, id="unknown field"),
    ],
)
def test_messages_with_a_graph(wrap: Any) -> None:
    assert audit(wrap(WRITE)) == {"WriteFile"}
    assert audit(wrap(node("MatMul", "w", "x"))) == set()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(WRITE[:-1], id="cut"),
        pytest.param(b"\x0b" + WRITE + b"\x0c", id="group"),
        pytest.param(field(1, field(1, "w") + field(2, 7)), id="number for an operation"),
        pytest.param(field(1, "text") * 9, id="text"),
    ],
)
def test_bytes_that_are_no_graph(data: bytes) -> None:
    assert audit(data) is None


@pytest.mark.parametrize("data", [WRITE[:-1], b"\x0b" + WRITE + b"\x0c", field(1, field(2, 7))])
def test_a_graph_that_cannot_be_decoded_is_not_clean(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CkpttoolError):
        tf_operations.audit_saved_model(memoryview(field(2, field(2, data))), "x", str(tmp_path))
    for name in ("x.pb", "x.meta"):
        (tmp_path / name).write_bytes(data)
        assert not check([str(tmp_path / name)]).clean


def test_a_graph_that_begins_like_another_file(tmp_path: Path) -> None:
    """The name of the first node makes the file look like TensorFlow Lite's, or like text."""
    for name in ("TFL3", "PTMF", "ET12", "x" * 5000):
        (tmp_path / "x.pb").write_bytes(node("NoOp", name) + WRITE)
        result = check([str(tmp_path)])
        assert [f.topic for saved in result.checkpoints for f in saved.findings] == ["loading"], name
        # A group, which other parsers skip, keeps it from being judged.
        (tmp_path / "x.pb").write_bytes(node("NoOp", name) + b"\x7b\x7c" + WRITE)
        assert not check([str(tmp_path)]).clean, name


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param(field(5, field(1, "f") + field(2, field(10, field(1, "g")))), id="function"),
        pytest.param(
            field(5, field(1, "f") + field(2, field(1, field(9, field(1, "g"))))), id="list of functions"
        ),
        pytest.param(
            field(
                5,
                field(1, "f")
                + field(
                    2,
                    field(
                        10,
                        field(1, "known") + field(2, field(1, "n") + field(2, field(10, field(1, "g")))),
                    ),
                ),
            ),
            id="function of a function",
        ),
    ],
)
def test_a_function_that_the_graph_does_not_contain(attributes: bytes) -> None:
    known = field(2, field(1, field(1, field(1, "known"))))
    assert audit(node("PartitionedCall", "c", attributes=attributes) + known) == {"g"}
    both = known + field(2, field(1, field(1, field(1, "g"))))
    assert audit(node("PartitionedCall", "c", attributes=attributes) + both) == set()


def test_a_function_named_like_an_operation_is_judged_by_its_body() -> None:
    body = field(2, field(1, field(1, field(1, "MyOp")) + b"\x1a" + WRITE[1:]))
    assert audit(node("MyOp", "c") + body) == {"WriteFile"}
    assert audit(node("MyOp", "c") + body.replace(b"WriteFile", b"Transpose")) == set()


def text(name: str, value: bytes, *, content: bool = False) -> bytes:
    tensor = field(1, 7) + field(8, value) + (field(4, b"\x05/etc/") if content else b"")
    return node("Const", name, attributes=field(5, field(1, "value") + field(2, field(8, tensor))))


@pytest.mark.parametrize(
    ("path", "pure"),
    [
        pytest.param(text("p", b"model"), True, id="default"),
        pytest.param(text("p", b"/tmp/x"), False, id="constant"),
        pytest.param(text("p", b"model", content=True), False, id="replaced constant"),
        pytest.param(node("Placeholder", "p"), True, id="placeholder"),
        pytest.param(node("PlaceholderWithDefault", "p", "d") + text("d", b"model"), True, id="with default"),
        pytest.param(node("PlaceholderWithDefault", "p", "d") + text("d", b"/x"), False, id="other default"),
        pytest.param(node("PlaceholderWithDefault", "p", "p"), False, id="loop"),
        pytest.param(node("Identity", "p", "p"), True, id="no origin"),
        pytest.param(node("StringLower", "p", "d") + text("d", b"model"), False, id="computed"),
        pytest.param(
            node("StringJoin", "p", "d", "e") + text("d", b"model") + text("e", b"/../x"), False, id="up"
        ),
        pytest.param(
            node("StringJoin", "p", "d", "e") + text("d", b"model") + text("e", b"_temp/part"),
            True,
            id="shard",
        ),
        pytest.param(b"", False, id="absent"),
    ],
)
def test_paths_of_a_saver(path: bytes, pure: bool) -> None:
    assert audit(node("SaveV2", "s", "p") + path) == (set() if pure else {"SaveV2"})


def test_a_print_or_a_cache_in_memory() -> None:
    def stream(value: str) -> bytes:
        return node(
            "PrintV2", "p", "x", attributes=field(5, field(1, "output_stream") + field(2, field(2, value)))
        )

    assert audit(stream("stderr") + stream("log(info)") + node("PrintV2", "q", "x")) == set()
    assert audit(stream("file:///tmp/x")) == {"PrintV2"}
    cache = node("CacheDatasetV2", "c", "d", "p", "m")
    assert audit(cache + text("p", b"")) == set()
    assert audit(cache + text("p", b"/tmp/x")) == audit(cache) == {"CacheDatasetV2"}


def test_graphs_side_by_side(tmp_path: Path) -> None:
    """Whichever graph TensorFlow loads, the one that is not parsed may be another."""
    good = (SEED / "saved_model.pb").read_bytes()
    for at, names in enumerate((["pbtxt"], ["cpb"], ["pb", "pbtxt"], ["pb", "cpb"], ["pb", "pbtxt", "cpb"])):
        folder = tmp_path / str(at)
        folder.mkdir()
        for name in names:
            (folder / f"saved_model.{name}").write_bytes(good if name == "pb" else b"")
        os.symlink(SEED / "variables", folder / "variables")
        result = check([str(folder)])
        assert not result.clean, names
        assert in_process("inspect", folder, "--strict").status != 0


def test_the_table_is_loaded_for_a_graph_only() -> None:
    code = (
        "import sys; from ckpttool.formats import open_checkpoint\n"
        f"open_checkpoint({str(TORCH_SAMPLE)!r})\n"
        "assert 'ckpttool.formats.tf_operations' not in sys.modules\n"
        f"open_checkpoint({str(SEED)!r})\n"
        "assert 'ckpttool.formats.tf_operations' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
