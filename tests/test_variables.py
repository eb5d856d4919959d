"""Variables known by name: whose slot each is, what roles names tell, how often an Adam has updated."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import FormatError, Inline, Leaf, Tree, display
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import VariableInfo, count_adam_steps, open_checkpoint, tree_by_name
from tests import saver_graphs, v1_writer
from tests.conftest import in_process
from tests.golden_texts import Golden
from tests.tensorflow_child import run

without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
GRAPHS = (
    *("adam", "rmsprop", "centered", "others", "several", "scoped", "inside", "ambiguous", "averages"),
    *("partitioned", "cut_parts", "estimator"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("graphs")
    return folder, run(saver_graphs.__file__, "build", folder)


def tree(**shapes: tuple[int, ...]) -> Tree:
    return named(shapes)


def named(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> Tree:
    return tree_by_name({name: VariableInfo(dtype, dims, Inline(b"")) for name, dims in shapes.items()})


def leaves(tree: Tree) -> dict[str, Leaf]:
    return {leaf.key: leaf for _, leaf in tree.tensors()}


def slots(tree: Tree) -> dict[str, list[str]]:
    return {
        leaf.key: [display(leaf.of), leaf.slot]
        for _, leaf in tree.tensors()
        if leaf.role == "slot" and leaf.of is not None and leaf.slot is not None
    }


# TensorFlow as the referee.


@pytest.mark.tensorflow
@without_tensorflow
@pytest.mark.parametrize("name", GRAPHS)
def test_slots_as_the_optimizers_know_them(written: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, facts = written
    assert slots(open_checkpoint(str(folder / name)).tree) == facts[name]
    assert facts[name]


@pytest.mark.tensorflow
@without_tensorflow
def test_roles_of_what_is_no_slot(written: tuple[Path, dict[str, Any]]) -> None:
    roles = {}
    for name in ("adam", "scoped", "averages", "estimator"):
        listed = leaves(open_checkpoint(str(written[0] / name)).tree)
        roles[name] = {key: leaf.role for key, leaf in listed.items() if leaf.role != "slot"}
    assert roles["adam"] == {
        "Adam": "parameter",
        "unrelated/Adam": "parameter",
        "beta1_power": "other",
        "beta2_power": "other",
        "global_step": "counter",
        "pi/dense/bias": "parameter",
        "pi/dense/kernel": "parameter",
        "pi/log_std": "parameter",
    }
    assert roles["scoped"]["another/train_op/beta2_power"] == "other"
    assert roles["averages"]["bn/moving_mean"] == "buffer"
    helpers = {key: role for key, role in roles["averages"].items() if "biased" in key or "local_step" in key}
    assert len(helpers) == 2
    assert set(helpers.values()) == {"other"}
    assert roles["estimator"] == {
        "dnn/layer_0/bias": "parameter",
        "dnn/layer_0/kernel": "parameter",
        "training/Adam/beta_1": "other",
        "training/Adam/beta_2": "other",
        "training/Adam/decay": "other",
        "training/Adam/iter": "counter",
        "training/Adam/learning_rate": "other",
    }


@pytest.mark.tensorflow
@without_tensorflow
def test_updates_as_tensorflow_counts_them(written: tuple[Path, dict[str, Any]]) -> None:
    rows = written[1]["powers"]
    assert len(rows) == 4 * len(saver_graphs.COUNTS)
    for row in rows:
        powers = [float.fromhex(value) for value in row["powers"]]
        assert count_adam_steps(*powers, *row["betas"]) == row["count"], row
        if row["betas"] != [0.9, 0.999]:
            assert count_adam_steps(*powers) is None
    flushed = {float.fromhex(row["powers"][0]) for row in rows if row["count"] > 2000}
    assert any(power < np.finfo(np.float32).tiny for power in flushed)


@pytest.mark.corpus
def test_corpus(corpus: Path) -> None:
    folder = corpus / "tf" / "tf1_name_v2"
    listed = leaves(open_checkpoint(str(folder / "t2t_transformer")).tree)
    kinds = [leaf.slot for leaf in listed.values() if leaf.role == "slot"]
    # Two slots for each parameter; what is left are averages of losses.
    assert kinds.count("m") == kinds.count("v") == len(kinds) // 2
    trained = {leaf.of for leaf in listed.values() if leaf.of is not None}
    assert len(trained) == len(kinds) // 2
    powers = [float(listed[f"training/beta{n}_power"].array()) for n in (1, 2)]
    assert count_adam_steps(*powers, 0.9, 0.98) == listed["global_step"].array() == 1
    listed = leaves(open_checkpoint(str(folder / "tfx_estimator" / "model.ckpt-1000")).tree)
    of = listed["training/Ftrl/linear/linear_model/company_xf/weights/linear"].of
    assert of is not None
    assert display(of) == "linear/linear_model/company_xf/weights"
    assert {leaf.role for key, leaf in listed.items() if key.startswith("training")} == {
        *("slot", "other", "counter")
    }


@pytest.mark.tensorflow
@without_tensorflow
def test_slots_without_all_of_their_slices_are_listed_only(
    written: tuple[Path, dict[str, Any]], golden: Golden
) -> None:
    listed = leaves(open_checkpoint(str(written[0] / "cut_parts")).tree)
    assert len(listed["scope/w"].read()) == 160
    with pytest.raises(FormatError) as caught:
        listed["scope/w/art_0/Adam"].read()
    golden.replace(str(written[0]), "TMP")
    golden(caught.value)


# Names of other programs.


@pytest.mark.parametrize(
    ("shapes", "right"),
    [
        ({"w": (2,), "w/adam_m": (2,), "w/adam_v": (2,)}, {"w/adam_m": "m", "w/adam_v": "v"}),
        ({"w:0": (2,), "w/Adam:0": (2,), "w/Adam_1:0": (2,)}, {"w/Adam:0": "m", "w/Adam_1:0": "v"}),
        ({"w": (2,), "w/Adam": (3,)}, {}),
        ({"w": (2,), "w/Adam": ()}, {"w/Adam": "m"}),
        ({"w": (2,), "w/step": ()}, {}),
        ({"w": (2,), "x/w/mystery": (2,)}, {}),
        ({"a/w": (2,), "x/a/w/mystery": (2,)}, {"x/a/w/mystery": "mystery"}),
        ({"w": (2,), "w/Adam_1": (2,)}, {"w/Adam_1": "v"}),
        ({"w": (2,), "w/opt": (2,), "w/opt_1": (2,)}, {"w/opt": "opt", "w/opt_1": "opt_1"}),
        ({"w": (2,), "w/o": (2,), "w/o_1": (2,), "s/beta1_power": ()}, {"w/o": "m", "w/o_1": "v"}),
        ({"/w": (2,), "/w/Adam": (2,), "a//b": (1,), "a//b/Adam": (1,)}, {"/w/Adam": "m", "a//b/Adam": "m"}),
        ({"w": (2,), "w/Adam": (2,), "w/Adam/ExponentialMovingAverage": (2,)}, None),
    ],
)
def test_names(shapes: dict[str, tuple[int, ...]], right: dict[str, str] | None) -> None:
    listed = leaves(named(shapes))
    if right is None:
        right = {"w/Adam": "m", "w/Adam/ExponentialMovingAverage": "average"}
    assert {key: leaf.slot for key, leaf in listed.items() if leaf.role == "slot"} == right
    assert all(leaf.of is not None for leaf in listed.values() if leaf.role == "slot")


def test_paths_and_names_as_stored() -> None:
    tree = named({"b:0": (1,), "a//c": (1,), "x": (1,), "x:0": (1,), "b/Adam:0": (1,)})
    assert [[step.value for step in path] for path in tree] == [
        ["b:0"],
        ["a", "", "c"],
        ["x"],
        ["x:0"],
        ["b", "Adam:0"],
    ]
    assert [leaf.name for _, leaf in tree.tensors()] == ["b", "a//c", "x", "x:0", "b/Adam"]
    assert len(set(tree.names.values())) == 5
    assert leaves(tree)["b/Adam:0"].of in tree


def test_a_slot_in_the_network_s_own_scope_leaves_scalars_alone() -> None:
    listed = leaves(named({"pi/w": (2,), "pi/pi/w/Adam": (2,), "pi/log_std": (), "pi/learning_rate": ()}))
    assert listed["pi/pi/w/Adam"].role == "slot"
    assert listed["pi/log_std"].role == "parameter"
    assert listed["pi/learning_rate"].role == "other"


def test_hostile_names_take_no_time() -> None:
    deep = "a/" * 200_000 + "Adam"
    tree = named({deep: (2,), "a": (2,), "a/Adam": (2,), "/" * 100_000: (2,), "Adam" + "_1" * 9999: (2,)})
    assert slots(tree)["a/Adam"] == ["a", "m"]


def test_a_variable_above_its_slots_is_shown(tmp_path: Path) -> None:
    values = {"pi/w": b"\0\0\0?" * 2, "pi/w/Adam": b"\0\0\0?", "pi/w/Adam_1": b"\0\0\0?" * 2}
    values["pi/w/Adam"] *= 2
    (tmp_path / "m.ckpt").write_bytes(v1_writer.vectors(values))
    shown = in_process("inspect", tmp_path / "m.ckpt", "--all")
    if shown.status:
        shown = in_process("inspect", tmp_path / "m.ckpt")
    assert shown.status == 0, shown.err
    assert "2 parameters" in shown.out
    document = in_process("digest", tmp_path / "m.ckpt", "--json").json()
    assert [row["path"] for row in document["tensors"]] == list(values)
    assert len({row["sha256"] for row in document["tensors"]}) == 1
    assert digest_checkpoint(open_checkpoint(str(tmp_path / "m.ckpt"))).sha256 == document["sha256"]


# Adam's count.


def power(beta: float, updates: int, kind: type[np.floating]) -> float:
    product = kind(beta)
    for _ in range(updates):
        product = kind(product * kind(beta))
    return float(product)


@pytest.mark.parametrize("count", [0, 1, 826, 827, 828, 2000, 30_000, 87_000])
def test_counts(count: int) -> None:
    first, second = power(0.9, count, np.float32), power(0.999, count, np.float32)
    assert count_adam_steps(first, second) == count
    if count > 827:
        assert count_adam_steps(0.0, second) == count
    else:
        assert count_adam_steps(0.0, second) is None
        assert count_adam_steps(first * 0.5, second) is None


@pytest.mark.parametrize(
    "powers",
    [(0.0, 0.0), (-1.0, 0.5), (0.9, 2.0), (float("nan"),) * 2, (float("inf"), 0.9), (0.5, 0.5), (1.0, 1.0)],
)
def test_numbers_that_no_count_gives(powers: tuple[float, float]) -> None:
    assert count_adam_steps(*powers) is None


@pytest.mark.parametrize("betas", [(0.0, 0.0), (1.0, 1.0), (0.9, 2.0), (0.9, 1 - 1e-12), (-0.5, -0.5)])
def test_betas_that_count_nothing(betas: tuple[float, float]) -> None:
    assert count_adam_steps(0.5, 0.25, *betas) is None
