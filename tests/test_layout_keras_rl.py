"""keras-rl's DDPG: two files under one name, or one of them, HDF5 or a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.commands.evaluate import evaluate
from ckpttool.core import NotFoundError, UnsupportedError
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import Probe, keras_h5, open_checkpoint
from ckpttool.formats.keras_h5 import KERAS_RL
from ckpttool.libraries import recognize_tree
from ckpttool.testing.formats import FormatContract
from tests import restored
from tests.conftest import CORPUS, in_process
from tests.golden_texts import Golden
from tests.restored import observations, q_values, recognised, same, without_a_way
from tests.tensorflow_agents import Arrays, layers, run, tensorflow_tree, written

h5py = pytest.importorskip("h5py")
REAL = CORPUS / "tf" / "keras_h5" / "yosider_kerasrl"

ACTOR, CRITIC = (3, 16, 16, 2), (5, 8, 8, 1)


def names(widths: tuple[int, ...], kind: str) -> list[str]:
    first = {"dense_{}": 1 if widths is ACTOR else 4, "layer_with_weights-{}": 0}[kind]
    return [kind.format(first + number) for number in range(len(widths) - 1)]


def hdf5(arrays: Arrays, path: Path) -> None:
    """Write the weights as Keras 2 does, `dense_1/dense_1/kernel:0`."""
    with h5py.File(path, "w") as file:
        by_layer: dict[str, list[str]] = {}
        for name in arrays:
            by_layer.setdefault(name.split("/")[0], []).append(f"{name}:0")
        file.attrs["layer_names"] = [layer.encode() for layer in by_layer]
        for layer, mine in by_layer.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = [name.encode() for name in mine]
            for name in mine:
                group[name] = arrays[name.removesuffix(":0")]


def agent(folder: Path, kind: str = "dense_{}") -> tuple[str, Arrays]:
    """Write both files, as HDF5 or as tf.keras does; return the name that `save_weights` was given."""
    variables: Arrays = {}
    for member, widths in (("actor", ACTOR), ("critic", CRITIC)):
        arrays = layers(names(widths, kind), widths)
        path = folder / f"ddpg_weights_{member}.h5f"
        if kind == "dense_{}":
            hdf5(arrays, path)
        else:
            written(tensorflow_tree(arrays), path)
        variables |= {f"{member}/{name}": array for name, array in arrays.items()}
    return str(folder / "ddpg_weights.h5f"), variables


class TestKerasRl(FormatContract):
    module = KERAS_RL

    def make(self, folder: Path) -> str:
        return agent(folder, "layer_with_weights-{}")[0]


@pytest.mark.parametrize("kind", ["dense_{}", "layer_with_weights-{}"])
def test_the_actors_output_is_the_action(kind: str, tmp_path: Path, golden: Golden) -> None:
    path, arrays = agent(tmp_path, kind)
    last = run(arrays, [f"actor/{name}" for name in names(ACTOR, kind)], observations())
    for location in (path, path.removesuffix(".h5f"), path.replace(".h5f", "_actor.h5f")):
        same(restored.actions(location), last)
        assert without_a_way(location) == []
        golden("\n".join(restored.unknown(restore_agent(location))))
    kinds = {part.title: [layer.kind for layer in part.layers] for part in recognised(path).parts}
    assert kinds == {"actor": ["dense"] * 3, "critic/q1": ["dense"] * 3}


def test_a_critic_is_not_run(tmp_path: Path, golden: Golden) -> None:
    path, _ = agent(tmp_path)
    for location in (path, path.replace(".h5f", "_critic.h5f")):
        with pytest.raises(UnsupportedError) as caught:
            q_values(location)
        golden(caught.value)


def test_one_file_alone_is_no_set(tmp_path: Path) -> None:
    path, _ = agent(tmp_path)
    Path(path.replace(".h5f", "_critic.h5f")).unlink()
    assert keras_h5.keras_rl_claims(Probe(path)) is None
    with pytest.raises(NotFoundError):
        open_checkpoint(path)


def test_a_file_of_that_name_wins(tmp_path: Path) -> None:
    path, _ = agent(tmp_path)
    hdf5(layers(["dense"], (3, 2)), Path(path))
    assert open_checkpoint(path).format == "keras_h5"


def test_a_folder_is_no_member(tmp_path: Path) -> None:
    path, _ = agent(tmp_path)
    critic = Path(path.replace(".h5f", "_critic.h5f"))
    critic.unlink()
    critic.mkdir()
    assert keras_h5.keras_rl_claims(Probe(path)) is None


def test_one_model_of_another_name_is_a_q_network(tmp_path: Path) -> None:
    """DQNAgent, SARSAAgent and CEMAgent save one model; it has several outputs."""
    for outputs, name, layout in (
        (2, "model.h5f", "keras_rl"),
        (1, "model.h5f", None),
        (2, "model.h5", None),
    ):
        widths = (*ACTOR[:-1], outputs)
        hdf5(layers([f"dense_{number}" for number in (1, 2, 3)], widths), tmp_path / name)
        binding = recognize_tree(open_checkpoint(str(tmp_path / name)).tree, name)
        assert (binding and binding.layout) == layout
        assert binding is None or [part.title for part in binding.parts if part.chooses] == ["critic/q1"]


def test_the_way_back_keeps_the_names_of_keras_1(tmp_path: Path) -> None:
    source = tmp_path / "ddpg_weights.h5f"
    for member, widths in (("actor", ACTOR), ("critic", CRITIC)):
        with h5py.File(tmp_path / f"ddpg_weights_{member}.h5f", "w") as file:
            by_layer: dict[str, list[str]] = {}
            for name, array in layers(names(widths, "dense_{}"), widths).items():
                layer, weight = name.split("/")
                one = f"{layer}_{'W' if weight == 'kernel' else 'b'}:0"
                by_layer.setdefault(layer, []).append(one)
                file.require_group(layer)[one] = array
            file.attrs["layer_names"] = [layer.encode() for layer in by_layer]
            for layer, mine in by_layer.items():
                file[layer].attrs["weight_names"] = [one.encode() for one in mine]
    convert(str(source), str(tmp_path / "agent.pt"), sync=False, verify=False)
    convert(str(tmp_path / "agent.pt"), str(tmp_path / "again.h5f"), to="keras_rl", sync=False, verify=False)
    assert digest(str(tmp_path / "again.h5f")).sha256 == digest(str(source)).sha256


@pytest.mark.corpus
def test_an_agent_of_a_public_run_plays() -> None:
    path = str(REAL / "ddpg_Pendulum-v0_weights.h5f")
    assert len(open_checkpoint(path).tree) == 16
    evaluation = evaluate(path, "Pendulum-v1", Protocol(episodes=10))
    # The example's agent: a random one has -1200, a good one -150.
    assert np.mean(evaluation.rollout.returns) > -300


def test_a_conversion_needs_no_facts_for_playing(tmp_path: Path) -> None:
    path, _ = agent(tmp_path)
    ran = in_process("convert", path, tmp_path / "out.pt", "--json")
    unknown = [entry for entry in ran.json()["ledger"] if entry["decides"]]
    assert {(entry["use"], entry["concerns"]) for entry in unknown} == {("cannot be known", "playing")}
    assert ran.status == 0
    quiet = in_process("convert", path, tmp_path / "quiet.pt", "--quiet")
    assert (quiet.status, quiet.err) == (0, "")
    # An export is played.
    exported = in_process("convert", path, tmp_path / "out.onnx", "--quiet")
    assert exported.status == 1
    assert exported.err.startswith("exit status 1: ")
