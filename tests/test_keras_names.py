"""The names in keras_names.json: beside the installed libraries, ordinary models, and files that act."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.check import check
from ckpttool.commands.doctor import diagnose
from ckpttool.core import UsageError, code_references
from ckpttool.formats import keras_config, open_checkpoint
from ckpttool.verification import proof, two_models
from ckpttool.verification.sides import ModelSide, find_model_kind
from tests import tensorflow_child
from tests.conftest import ROOT, in_process, zipped
from tests.hostile.crafted_keras import weights
from tests.test_gate import ACTING_CONFIGS, SEEDS, calls, metadata, nested

MODELS = str(ROOT / "tests" / "keras_ordinary.py")
# Modules of TensorFlow and tf_keras whose functions compute on tensors: those of input and output, control
# flow, resources, scripts and datasets are absent.
NUMERIC = {
    *("array_ops", "array_ops_stack", "bincount_ops", "bitwise_ops", "candidate_sampling_ops", "check_ops"),
    *("clip_ops", "confusion_matrix", "ctc_ops", "dct_ops", "embedding_ops", "fft_ops", "histogram_ops"),
    *(
        "image_ops_impl",
        "linalg_impl",
        "linalg_ops",
        "manip_ops",
        "math_ops",
        "mel_ops",
        "mfcc_ops",
        "nn_impl",
    ),
    *("nn_impl_distribute", "nn_ops", "parsing_ops", "ragged_array_ops", "ragged_concat_ops", "audio_ops"),
    *("ragged_factory_ops", "ragged_getitem", "ragged_math_ops", "ragged_string_ops", "random_crop_ops"),
    *(
        "random_ops",
        "reconstruction_ops",
        "segment_id_ops",
        "sets_impl",
        "shape_ops",
        "sort_ops",
        "sparse_ops",
    ),
    *("special_math_ops", "spectral_ops", "stateless_random_ops", "string_ops", "tensor_getitem_override"),
    *(
        "window_ops",
        "data_flow_ops",
        "image_ops",
        "random_index_shuffle_ops",
        "constant_op",
        "tensor_conversion",
    ),
    *("activations", "backend", "losses", "accuracy_metrics"),
}


def is_plain(config: Any) -> bool:
    return keras_config.audit_json(json.dumps(config), "x") == keras_config.ConfigAudit()


# --- The installed libraries ---------------------------------------------------------------------------

# Modules of Keras 3 whose classes a configuration names.
HOMES = (
    *(
        "keras.constraints",
        "keras.distillation",
        "keras.dtype_policies",
        "keras.initializers",
        "keras.layers",
    ),
    *("keras.losses", "keras.metrics", "keras.optimizers", "keras.optimizers.schedules", "keras.random"),
    *("keras.regularizers", "keras.quantizers"),
)
# What calls functions, loads files or holds data sets: each is found.
ACT = keras_config.ACTING | {"AWQConfig", "GPTQConfig"}
TAKE_FUNCTIONS = {
    "Map",
    "Scan",
    "Cond",
    "Switch",
    "WhileLoop",
    "ForiLoop",
    "AssociativeScan",
    "VectorizedMap",
    "JVP",
}
TAKING = {
    *(
        "associative_scan",
        "cond",
        "custom_gradient",
        "fori_loop",
        "jvp",
        "map",
        "scan",
        "switch",
        "vectorize",
    ),
    *("vectorized_map", "while_loop"),
}
HELPERS = {"get", "serialize", "deserialize", "keras_export"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """The registries of the installed libraries, and the files of ordinary models, by one child process."""
    tensorflow_child.require("keras", "tensorflow", "tf_keras")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("registries", "build")}
    facts = tensorflow_child.run_each(MODELS, folders)
    return facts["registries"], facts["build"]


@pytest.fixture(scope="module")
def registries(both: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
    return both[0]


@pytest.mark.tensorflow
def test_every_class_of_keras_3_is_known(registries: dict[str, Any]) -> None:
    unknown = set()
    count = 0
    for exported, name in registries["classes"].items():
        home, _, public = exported.rpartition(".")
        if home in HOMES:
            count += 1
            for item in {name, public}:
                plain = is_plain({"class_name": item, "module": home, "config": {}})
                unknown |= {exported} if plain == (item in ACT) else set()
    assert count > 250
    assert unknown == set()


@pytest.mark.tensorflow
def test_every_operation_and_function_of_keras_3_is_known(registries: dict[str, Any]) -> None:
    def act(module: str, names: Any) -> set[str]:
        return {
            name
            for name in names
            if not is_plain({"class_name": name, "module": f"keras.src.{module}", "config": {}})
        }

    assert len(registries["operations"]) > 300
    assert act("ops.numpy", registries["operations"]) == {*TAKE_FUNCTIONS, "Function"}
    for home, known in {"ops": TAKING, "ops.image": set(), "activations": HELPERS, "losses": HELPERS}.items():
        names = {
            function.rpartition(".")[2]
            for function in registries["functions"]
            if function.rpartition(".")[0] == f"keras.{home}"
        }
        config = {
            name: {
                "class_name": "function",
                "module": f"keras.{home}",
                "config": name,
                "registered_name": name,
            }
            for name in names
        }
        assert names
        assert {name for name in names if not is_plain(config[name])} == known & names, home


@pytest.mark.tensorflow
def test_every_object_that_tf_keras_finds_by_its_name_is_known(registries: dict[str, Any]) -> None:
    names = keras_config._read_names()
    acting = {"TFOpLambda", "SlicingOpLambda", "ClassMethod", "InstanceMethod", "InstanceProperty"}
    acting |= {"TensorFlowOpLayer", *keras_config.ACTING}
    for home, result in registries["tf_keras"].items():
        assert len(result) > 5
        for name in result:
            config = {"class_name": name, "config": {}}
            verdict = code_references.worst_verdict(keras_config.audit_document(config, "x"))
            if name in acting:
                assert verdict == code_references.CODE, name
            elif name in names.classes:
                assert verdict == code_references.PLAIN, name
            else:
                # Functions and bases, which tf_keras would call in place of a class.
                base = name in ("PyMetric", "_RNNCellWrapper") or (name.isupper() and name in names.functions)
                assert verdict == (code_references.CLASSES if base else code_references.CODE), (home, name)


@pytest.mark.tensorflow
def test_symbols_of_tensorflow_compute(registries: dict[str, Any]) -> None:
    """A symbol that may be called is defined in a module of numeric functions, whatever its name."""
    symbols = registries["symbols"]
    assert len(symbols) > 7000
    allowed = {name: module for name, module in symbols.items() if is_plain(calls(name))}
    assert 700 < len(allowed) < 1200
    for name, module in allowed.items():
        assert module.rpartition(".")[2].removeprefix("gen_") in NUMERIC, (name, module)
    words = re.compile("file|load|save|(^|[._])print|py_func|function|dataset|write|read|gfile|path")
    assert [name for name in allowed if words.search(name.lower())] == []
    missing = keras_config._read_names().tensorflow - set(symbols)
    assert missing == set()


# --- Ordinary models -----------------------------------------------------------------------------------


def texts(file: Path) -> dict[str, str | bytes]:
    """Return the configurations in a model's file; those of HDF5 were written beside it."""
    if file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            return {name: archive.read(name) for name in ("config.json", "metadata.json")}
    return dict(json.loads(file.with_suffix(".json").read_text()))


def findings(files: list[str]) -> dict[str, Any]:
    findings = {}
    for file in files:
        for name, text in texts(Path(file)).items():
            audit = keras_config.audit_json(text, name)
            if audit != keras_config.ConfigAudit():
                findings[f"{Path(file).name} {name}"] = audit
    return findings


@pytest.mark.tensorflow
def test_ordinary_models_are_plain(both: tuple[dict[str, Any], list[str]]) -> None:
    files = {Path(file).name: file for file in both[1]}
    assert len(files) > 60
    assert findings(both[1]) == {}
    some = [files[name] for name in ("keras nested.keras", "tf_keras chosen.h5", "tf_keras chosen.keras")]
    assert check(some).clean
    for file in some:
        assert two_models.find_code(open_checkpoint(file), "keras") is None


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_model_of_every_layer_is_plain(tmp_path: Path) -> None:
    tensorflow_child.require("keras", "tensorflow", "tf_keras")
    files = tensorflow_child.run(MODELS, "build_all", tmp_path)
    assert len(files) > 400
    assert findings(files) == {}
    result = check([str(tmp_path)])
    assert result.failed == ()
    assert {item.topic for row in result.checkpoints for item in row.findings} <= {"model"}  # without weights


# --- Files that act ------------------------------------------------------------------------------------


def archive(config: Any) -> bytes:
    return zipped(
        {
            "metadata.json": b'{"keras_version": "3.10.0"}',
            "config.json": json.dumps(config).encode(),
            "model.weights.h5": weights(),
        }
    )


def hdf5(file: Path, config: Any, attribute: str = "model_config") -> None:
    h5py = pytest.importorskip("h5py")
    import numpy as np

    with h5py.File(file, "w") as archive:
        archive.attrs["keras_version"] = "2.15.0"
        archive.attrs["backend"] = "tensorflow"
        archive.attrs["model_config"] = json.dumps(model())
        archive.attrs[attribute] = json.dumps(config)
        group = archive.create_group("model_weights")
        group.attrs["layer_names"] = np.array([b"in", b"d", b"w"])
        for name in ("in", "w"):
            group.create_group(name).attrs["weight_names"] = np.array([], "S1")
        layer = group.create_group("d")
        layer.attrs["weight_names"] = np.array([b"d/kernel:0", b"d/bias:0"])
        layer["d/kernel:0"], layer["d/bias:0"] = np.ones((2, 1), "f4"), np.ones(1, "f4")


def saved_model(folder: Path, config: Any) -> None:
    shutil.copytree(SEEDS / "saved_model", folder)
    (folder / "keras_metadata.pb").write_bytes(metadata(config))


def model(*more: Any) -> dict[str, Any]:
    """Return the configuration of a functional model of one layer, and of these."""
    first = {"batch_input_shape": [None, 2], "dtype": "float32", "name": "in"}
    layers = [
        {"class_name": "InputLayer", "config": first, "name": "in", "inbound_nodes": []},
        {
            "class_name": "Dense",
            "config": {"name": "d", "units": 1},
            "name": "d",
            "inbound_nodes": [[["in", 0, 0, {}]]],
        },
        *more,
    ]
    config = {"name": "m", "layers": layers, "input_layers": [["in", 0, 0]], "output_layers": [["d", 0, 0]]}
    return {"class_name": "Functional", "config": config}


@pytest.mark.parametrize("name", ACTING_CONFIGS)
def test_every_acting_configuration_is_found_and_refused(tmp_path: Path, name: str) -> None:
    saved_model(tmp_path / "m", ACTING_CONFIGS[name])
    (row,) = check([str(tmp_path)]).checkpoints
    assert [finding.topic for finding in row.findings] == ["loading"]
    assert "loading" in [finding.topic for finding in diagnose(str(tmp_path / "m")).findings]
    opened = open_checkpoint(str(tmp_path / "m"))
    assert code_references.worst_verdict(opened.code_references) == code_references.CODE
    assert two_models.find_code(opened, "keras") is not None


SOME = (
    *("Lambda", "vocabulary in bytes", "residual code", "method", "operation that writes", "class method"),
    *("symbol compat.v1.write_file", "symbol function", "symbol random.fixed_unigram_candidate_sampler"),
    *("function builtins.eval", "function my.own.square", "class of Keras that is unknown"),
)


@pytest.mark.parametrize("name", SOME)
def test_acting_models_are_found_and_refused_in_every_container(tmp_path: Path, name: str) -> None:
    config = model({**nested("TimeDistributed", ACTING_CONFIGS[name]), "name": "w", "inbound_nodes": []})
    (tmp_path / "a.keras").write_bytes(archive(config))
    hdf5(tmp_path / "b.h5", config)
    hdf5(tmp_path / "c.h5", {"loss": ACTING_CONFIGS[name]}, "training_config")
    saved_model(tmp_path / "d", config)
    result = check([str(tmp_path)])
    assert [[finding.topic for finding in row.findings] for row in result.checkpoints] == [["loading"]] * 4
    for file in ("a.keras", "b.h5", "c.h5"):
        path = str(tmp_path / file)
        opened = open_checkpoint(path)
        assert "loading" in [finding.topic for finding in diagnose(path).findings]
        assert proof.prevented(opened, proof.ProofRequest()) is not None
        assert find_model_kind(opened) == "keras"
        a, b = (ModelSide(word, path) for word in "AB")
        with pytest.raises(UsageError, match="loading would run code"):
            two_models.compare_models(a, b, two_models.ModelComparisonOptions())


@pytest.mark.parametrize("name", ["model.h5", "model.weights.h5"])
def test_weights_alone_are_no_model_to_run(name: str, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / name, "w") as file:
        file.attrs["layer_names"] = [b"dense"]
        group = file.create_group("dense")
        group.attrs["weight_names"] = [b"dense/kernel:0"]
        group["dense/kernel:0"] = np.ones((2, 3), np.float32)
    assert find_model_kind(open_checkpoint(str(tmp_path / name))) is None


def writes(target: Path) -> dict[str, Any]:
    """Return a layer that tf_keras calls while it opens the model: a constant input needs no model to run."""
    node = ["_CONSTANT_VALUE", -1, str(target), {"contents": "planted"}]
    return {**calls("compat.v1.write_file"), "name": "w", "inbound_nodes": [node]}


def open_unjudged(folder: Path) -> None:
    """Open the model as the child of `verify` does, whatever it contains."""
    from ckpttool.networks.model_runner import open_keras

    try:
        open_keras(str(folder / "x.h5"), "2.15.0", run_code=False)
    except UsageError:  # tf_keras fails after it has written the file
        return


LIKE = """from tf_keras import Sequential, layers

def net():
    return Sequential([layers.Input((2,)), layers.Dense(1)])
"""


@pytest.mark.tensorflow
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_a_model_that_writes_a_file_when_it_is_opened_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "planted"
    hdf5(tmp_path / "x.h5", model(writes(target)))
    tensorflow_child.run(__file__, "open_unjudged", tmp_path)
    assert target.read_text() == "planted"
    target.unlink()
    (tmp_path / "keras_like_net.py").write_text(LIKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    like = ("--like", "keras_like_net:net")
    ran = in_process("convert", tmp_path / "x.h5", tmp_path / "y.weights.h5", *like, cwd=tmp_path)
    assert "--run-code" in ran.out + ran.err
    ran = in_process(
        "verify", tmp_path / "x.h5", tmp_path / "x.h5", "--like-b", "keras_like_net:net", cwd=tmp_path
    )
    assert (ran.status, "--run-code" in ran.err) == (2, True)
    assert not target.exists()
