"""`load_into`, `diff`, `diagnose` with live models: what is filled, by which rule, all of it or nothing."""

from __future__ import annotations

import ast
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.commands.convert import convert
from ckpttool.conversion import filling
from ckpttool.core import MappingError, NotFoundError, UnsupportedError, UsageError
from ckpttool.networks import ModelSpec
from tests import like_torch, load_into_keras, tensorflow_child, warm
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.like_small import Gated
from tests.model_pairs import programs
from tests.shared_runners import InThisProcess

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch

TF, PT = str(TF_SAMPLE), str(TORCH_SAMPLE)


def net(*sizes: int) -> Any:
    """A chain of dense layers under the samples' names."""
    pairs = pairwise(sizes)
    return nn.ModuleDict({f"l{n}": nn.Linear(i, o) for n, (i, o) in enumerate(pairs, 1)})


def row(*sizes: int) -> Any:
    """The same as a Sequential, whose names say nothing."""
    layers: list[Any] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


ACTOR = (3, 64, 64, 1)


def state(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: Any, before: dict[str, Any]) -> bool:
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_torch_model_is_filled_from_tensorflow_by_rule() -> None:
    model = net(*ACTOR)
    weight = model["l1"].weight
    done = ckpttool.load_into(model, TF, part="policy/actor")
    assert done.loaded
    assert done.complete
    assert done.filled == 6
    assert len(repr(done)) < 500
    assert done._repr_html_().startswith("<table")
    assert [(m.source, m.target, m.kind, m.by) for m in done.matched] == [
        (f"l{n}", f"l{n}", "dense", "name") for n in (1, 2, 3)
    ]
    rules = {move.target: (move.source, move.rule) for move in done.report.mapped}
    assert rules["l1/weight"] == ("policy/actor/l1/kernel", "transpose")
    assert rules["l1/bias"] == ("policy/actor/l1/bias", "keep")
    # In place: optimizers that hold the parameter go on with it.
    assert model["l1"].weight is weight
    stored = ckpttool.open(TF)["policy/actor"]
    for n in (1, 2, 3):
        assert np.array_equal(model[f"l{n}"].weight.detach().numpy().T, stored[f"l{n}/kernel"].numpy())
        assert np.array_equal(model[f"l{n}"].bias.detach().numpy(), stored[f"l{n}/bias"].numpy())
    assert weight.grad_fn is None
    assert weight.requires_grad


def test_types_and_memory_of_the_model_stay() -> None:
    model = row(*ACTOR).to(torch.bfloat16)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    done = ckpttool.load_into(model, Path(PT), part="actor")
    assert [m.by for m in done.matched] == ["only fit"] * 3
    assert done.cast == ("0/weight", "0/bias", "2/weight", "2/bias", "4/weight", "4/bias")
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    expected = ckpttool.open(PT)["actor/l1/weight"].torch().to(torch.bfloat16)
    assert torch.equal(model[0].weight, expected)


def test_a_network_of_an_agent_is_found_by_its_canonical_name(golden: Golden) -> None:
    own_net = net(*ACTOR)
    done = ckpttool.load_into(own_net, TF, part="actor")
    golden(done.report.notes[0])
    assert done.report.mapped[0].source.startswith("policy/actor/")
    critic = net(4, 64, 64, 1)
    assert ckpttool.load_into(critic, PT, layout="auto", part="critic/q2").complete
    expected = ckpttool.open(PT).module("critic")
    assert any(
        np.array_equal(critic["l1"].weight.detach().numpy(), h.numpy()) for h in expected.tensors().values()
    )
    with pytest.raises(UsageError) as caught:
        ckpttool.load_into(own_net, PT, layout="auto", part="critics")
    golden(caught.value)
    with pytest.raises(UsageError) as caught:
        ckpttool.load_into(own_net, PT, layout="cleanrl")
    golden(caught.value)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(
            row(*ACTOR),
            {},
            id="an agent",
        ),
        pytest.param(net(5, 64, 64, 1), {"part": "actor"}, id="another shape"),
        pytest.param(
            net(*ACTOR, 1),
            {"part": "actor"},
            id="one layer more",
        ),
        pytest.param(row(64, 64, 64, 64), {"part": "critic"}, id="two networks"),
        pytest.param(row(64, 64), {"part": "critic"}, id="one layer"),
    ],
)
def test_nothing_changes_unless_all_is_filled(model: Any, options: Any, golden: Golden) -> None:
    before = state(model)
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, TF if "part" not in options else PT, **options)
    golden(caught.value)
    assert unchanged(model, before)


def test_what_fits_is_filled_where_that_is_wanted() -> None:
    model = net(5, 64, 64, 1)
    before = state(model)
    dry = ckpttool.load_into(model, PT, part="actor", dry_run=True)
    assert unchanged(model, before)
    assert (dry.loaded, dry.complete, dry.filled) == (False, False, 4)
    done = ckpttool.load_into(model, PT, part="actor", strict=False)
    assert done.loaded
    assert done.report.missing == ("l1/weight", "l1/bias")
    assert done.report.unused == ("actor/l1/weight", "actor/l1/bias")
    (misfit,) = done.different
    assert (misfit.source, misfit.expected, misfit.found) == (
        "l1",
        "dense kernel [5, 64]",
        "dense kernel [3, 64]",
    )
    assert torch.equal(model["l1"].weight, before["l1.weight"])
    assert not torch.equal(model["l2"].weight, before["l2.weight"])
    document = done.document()
    assert document["different"][0]["target"] == "l1"
    assert document["matched"][0]["confidence"] == "high"
    assert not document["verification"]["verified"]
    assert document["verification"]["reason"].startswith("a part of the checkpoint was used")
    assert {**document, "loaded": False, "verification": None} == dry.document()


def test_names_that_say_nothing_are_paired_by_the_caller(tmp_path: Path, golden: Golden) -> None:
    torch.save({"first.weight": torch.ones(2, 2), "second.weight": torch.zeros(2, 2)}, tmp_path / "x.pt")
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("mean", "spread")})
    before = state(model)
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, str(tmp_path / "x.pt"))
    golden(caught.value)
    assert "match={'first': 'TARGET'" in str(caught.value.hint)
    assert unchanged(model, before)
    done = ckpttool.load_into(model, str(tmp_path / "x.pt"), match={"first": "spread", "second": "mean"})
    assert [m.by for m in done.matched] == ["given", "given"]
    assert model["spread"].weight.sum() == 4
    with pytest.raises(UsageError):
        ckpttool.load_into(model, str(tmp_path / "x.pt"), match={"third": "mean"})


def test_buffers_and_tied_weights_are_filled_once(tmp_path: Path) -> None:
    def output() -> Any:
        model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
        model[2].weight = model[0].weight
        return model

    saved, model = output(), output()
    with torch.no_grad():
        saved[1].running_mean += 3
        saved[1].num_batches_tracked += 7
    torch.save(saved.state_dict(), tmp_path / "x.pt")
    done = ckpttool.load_into(model, str(tmp_path / "x.pt"))
    assert done.complete
    assert unchanged(model, state(saved))
    assert model[2].weight is model[0].weight


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    model = net(*ACTOR)
    torch.save(net(*ACTOR).state_dict(), tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    last = ckpttool.open(str(tmp_path / "x.pt"))["l3/weight"].numpy().tobytes()
    data[data.index(last)] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    before = state(model)
    with pytest.raises(ckpttool.errors.ChecksumError):
        ckpttool.load_into(model, str(tmp_path / "x.pt"))
    assert unchanged(model, before)
    with pytest.raises(NotFoundError):
        ckpttool.load_into(model, str(tmp_path / "none.pt"))


def test_a_tensor_that_cannot_change_gives_the_others_back(tmp_path: Path, golden: Golden) -> None:
    torch.save(net(3, 64, 64, 2).state_dict(), tmp_path / "x.pt")
    model = net(3, 64, 64, 2)
    # Two elements with one place in memory.
    del model["l3"].bias
    model["l3"].register_buffer("bias", torch.zeros(1).expand(2))
    before = state(model)
    with pytest.raises(UnsupportedError) as caught:
        ckpttool.load_into(model, str(tmp_path / "x.pt"))
    assert caught.value.path == "l3/bias"
    assert unchanged(model, before)
    with torch.inference_mode():
        model["l3"].bias = torch.zeros(2)
    with pytest.raises(UnsupportedError) as caught:
        ckpttool.load_into(model, str(tmp_path / "x.pt"))
    golden(caught.value)
    assert unchanged(model, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_model_on_a_gpu_stays_there() -> None:
    model = net(*ACTOR).cuda()
    assert ckpttool.load_into(model, PT, part="actor").complete
    expected = ckpttool.open(PT)["actor/l1/weight"].torch("cuda")
    assert torch.equal(model["l1"].weight, expected)


def test_a_model_without_memory_is_refused(golden: Golden) -> None:
    with torch.device("meta"):
        model = net(*ACTOR)
    with pytest.raises(UnsupportedError) as caught:
        ckpttool.load_into(model, PT, part="actor")
    golden(caught.value)
    assert "to_empty" in str(caught.value.hint)


def test_a_lazy_model_is_built_as_the_checkpoint_needs_it() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(1))
    assert ckpttool.load_into(model, TF, part="actor").filled == 6
    assert model[0].weight.shape == (64, 3)


def test_numbers_of_another_sort_are_no_weights(tmp_path: Path, golden: Golden) -> None:
    model = nn.Linear(2, 2)
    torch.save({"weight": torch.ones(2, 2, dtype=torch.int64), "bias": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, str(tmp_path / "x.pt"))
    golden(caught.value)


def test_what_is_no_model_is_refused(golden: Golden) -> None:
    for wrong in (object(), nn.Linear, {"weight": torch.ones(1)}):
        with pytest.raises(UsageError) as caught:
            ckpttool.load_into(wrong, PT)
        golden(caught.value)
    with pytest.raises(UsageError) as caught:
        ckpttool.load_into(nn.ReLU(), PT)
    golden(caught.value)


# diff and doctor.


def test_a_checkpoint_is_compared_with_a_live_model(tmp_path: Path, golden: Golden) -> None:
    model = row(*ACTOR)
    ckpttool.load_into(model, TF, part="actor")
    same = ckpttool.diff(TF, model, part="actor")
    assert (same.by, same.identical, same.equal) == ("model", True, 6)
    assert (same.right, same.formats) == ("a live Sequential", ("tensor_bundle", "live"))
    with torch.no_grad():
        model[2].weight[5, 7] += 0.5
    diff = ckpttool.diff(model, TF, part="actor")
    (changed,) = diff.changed
    assert (changed.path, diff.left) == ("2/weight", "a live Sequential")
    assert changed.values is not None
    assert changed.values.at == (5, 7)
    assert changed.values.max_abs == pytest.approx(0.5, abs=1e-6)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    by_path = ckpttool.diff(str(tmp_path / "x.pt"), model)
    assert (by_path.by, by_path.identical) == ("path", True)
    assert ckpttool.diff(model, model).identical
    # The same names, and more of them in the file.
    whole = ckpttool.diff(PT, nn.ModuleDict({"actor": net(*ACTOR)}), glob="actor/**")
    assert (whole.by, len(whole.changed), whole.only_left) == ("path", 6, ())
    # What the model has no place for is not hidden.
    left = ckpttool.diff(ckpttool.open(PT), row(3, 64, 64), part="actor", by="model")
    golden("\n".join(left.only_left))


def test_a_comparison_that_makes_no_sense_is_refused() -> None:
    model = row(*ACTOR)
    for sides, options in (
        ((PT, TF), {"by": "model"}),
        ((PT, TF), {"part": "actor"}),
        ((PT, model), {"by": "agent"}),
        ((model, model), {"by": "model"}),
        ((PT, 3), {}),
    ):
        with pytest.raises(UsageError):
            ckpttool.diff(*sides, **options)


@pytest.mark.parametrize(
    ("other", "part"), [(PT, "actor"), (PT, None), (None, None)], ids=["part", "file", "model"]
)
def test_a_pattern_that_nothing_of_a_live_model_matches_is_an_error(
    other: str | None, part: str | None, golden: Golden
) -> None:
    model = nn.ModuleDict({"actor": net(*ACTOR)})
    with pytest.raises(UsageError) as caught:
        ckpttool.diff(other or model, model["actor"] if part else model, part=part, glob="acter/**")
    golden(caught.value)


def of_model(path: str, model: Any, part: str | None = None) -> list[str]:
    diagnosis = ckpttool.doctor(path, model=model, part=part)
    assert all(finding.topic == "model" for finding in diagnosis.findings[-1:])
    return [finding.sentence for finding in diagnosis.findings if finding.topic == "model"]


def test_variables_that_no_restore_fills_are_found(tmp_path: Path, golden: Golden) -> None:
    assert ckpttool.doctor(TF, model=row(*ACTOR), part="actor").findings == ()
    sentences = of_model(TF, net(5, 64, 64, 1), "policy/actor")
    golden("\n".join(sentences))
    torch.save(row(*ACTOR).state_dict(), tmp_path / "x.pt")
    model = net(*ACTOR)
    model["l1"].heads = [nn.Linear(1, 1)]
    sentences = of_model(str(tmp_path / "x.pt"), model)
    golden("\n".join((sentences[0], sentences[-1])))
    with pytest.raises(UsageError) as caught:
        ckpttool.doctor(TF, part="actor")
    golden(caught.value)


def test_doctor_asks_a_model_of_the_users_own(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(filling, "ModelProcess", InThisProcess)
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = ROOT / "tests"
    ran = in_process("doctor", PT, "--like", "like_small:Pair", "--part", "actor", "--json", cwd=here)
    assert ran.status == 1, ran.err
    (finding,) = [row for row in ran.json()["findings"] if row["topic"] == "model"]
    golden(finding["sentence"])
    assert ckpttool.doctor(PT, model=ModelSpec("torch:nn.Linear", [64, 1]), part="actor/l3").findings == ()
    alone = in_process("doctor", PT, "--python", "python3", cwd=here)
    assert alone.status == 2
    golden(alone)


class ChannelsLast(nn.Module):
    """Flattens an image with channels last; a write into a part of a tensor cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(120, 5)

    def forward(self, x: Any) -> Any:
        out = torch.zeros(len(x), 7)
        out[:, :5].copy_(self.head(self.conv(x).permute(0, 2, 3, 1).flatten(1)))
        return out


class ThroughNumPy(nn.Module):
    """Flattens an image with channels first, as an array of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(120, 5)

    def forward(self, x: Any) -> Any:
        return self.head(torch.from_numpy(self.conv(x).flatten(1).numpy()))


@pytest.mark.parametrize("cls", [ChannelsLast, ThroughNumPy])
def test_an_order_that_no_call_shows_is_not_guessed(cls: type, tmp_path: Path) -> None:
    shapes = {"conv/kernel": (3, 3, 3, 4), "conv/bias": (4,), "head/kernel": (120, 5), "head/bias": (5,)}
    np.savez(tmp_path / "flat.npz", **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    model = cls()
    before = state(model)
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, str(tmp_path / "flat.npz"), shapes=[(3, 8, 7)])
    assert "flatten={'head'" in (caught.value.hint or "")
    assert unchanged(model, before)
    assert ckpttool.load_into(model, str(tmp_path / "flat.npz"), flatten={"head": "no"}).complete


# TensorFlow and Keras, in a process of their own.


@pytest.mark.tensorflow
def test_models_of_tensorflow_and_keras_are_filled_from_pytorch(tmp_path: Path, golden: Golden) -> None:
    tensorflow_child.require("tensorflow", "keras")
    plain, x = nn.Linear(3, 4), torch.linspace(-1, 1, 9).reshape(3, 3)
    trace(plain, tmp_path / "linear.pt", x)
    outcomes = tensorflow_child.run(load_into_keras.__file__, "filled", tmp_path)
    assert outcomes["statistics"] == {"identity": [True, True], "adapted": [False, False]}
    # A normalization of the source is left out only if the outputs are the same without it.
    assert ckpttool.load_into(plain, tmp_path / "identity.keras", verify=False).complete
    assert np.allclose(plain(x).detach().numpy(), np.load(tmp_path / "identity.npy"), atol=1e-6)
    with pytest.raises(MappingError):
        ckpttool.load_into(nn.Linear(3, 4), tmp_path / "adapted.keras", verify=False)
    assert outcomes["keras"] == [6, True, ["only fit"], True]
    assert outcomes["chain"] == outcomes["unbuilt"] == [6, True, ["name"], True]
    assert outcomes["agent"] == [6, True]
    golden(outcomes["more"])
    assert outcomes["products"] == {"turned": [True, 0], "plain": [True, 0], "silent": [True, 1]}
    assert outcomes["root"] == [["first", "first"], ["scale", "scale"]]
    assert outcomes["half"] == [2, "float16"]
    golden(outcomes["unlike"])
    assert outcomes["diff"] == [True, "path"]
    pictures = like_torch.ConvNet()
    file = str(tmp_path / "conv.weights.h5")
    done = ckpttool.load_into(pictures, file, shapes=[(8, 10, 3)])
    rule = next(row.rule for row in done.report.mapped if row.target == "hidden/weight")
    assert "reshape [48, 5, 16]" in rule
    batch = torch.linspace(-1, 1, 3 * 8 * 10 * 3).reshape(3, 8, 10, 3)
    with torch.no_grad():
        answer = pictures.eval()(batch).numpy()
    assert np.abs(answer - np.array(outcomes["pictures"])).max() < 1e-5
    # What takes the image in another order is not filled by guess.
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(like_torch.ConvNet(), file)
    golden(caught.value)
    assert outcomes["doctor"][0] == []
    golden(outcomes["doctor"][1][0])


# One model in Keras's files.

MODELS = (
    *("mlp", "mlp_bn", "mlp_ln", "cnn2d_bn", "dueling", "recommender", "encoder", "conv_lstm", "resnet"),
    "rows_lstm",
)
_SAVING = """
import ast
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.model_pairs import keras_side
for name in {names!r}:
    net = keras_side.build(name)
    net.save(Path({folder!r}, name + ".keras"))
    net.save_weights(Path({folder!r}, name + ".weights.h5"))
"""


@pytest.mark.torch
@pytest.mark.tensorflow
def test_files_of_one_keras_model_are_treated_alike(tmp_path: Path) -> None:
    tensorflow_child.require("keras", "tensorflow")
    pytest.importorskip("torch")
    from tests.model_pairs import torch_side

    program = _SAVING.format(root=str(ROOT), names=MODELS, folder=str(tmp_path))
    status, output = warm.run("tensorflow", program, tmp_path)
    assert status == 0, output[-2000:]
    for name in MODELS:
        filled, written = [], []
        for file in (tmp_path / f"{name}.keras", tmp_path / f"{name}.weights.h5"):
            net = torch_side.build(name, seed=5)
            shapes = torch_side.shapes(programs.program(name))
            done = ckpttool.load_into(net, file, shapes=shapes, verify=False)
            values = {key: value.numpy() for key, value in net.state_dict().items()}
            filled.append((values, [(item.target, item.by) for item in done.matched]))
            target = file.with_suffix(".pt")
            receipt = convert(str(file), str(target), to="torch", layout="none")
            if receipt.written:
                leaves = ckpttool.open(target).tree.tensors()
                written.append({leaf.key: leaf.array() for _, leaf in leaves})
            else:
                # A file of weights does not record what is flattened.
                assert (name, file.suffix) == ("cnn2d_bn", ".h5")
        for one, other in [[values for values, _ in filled], *([written] if len(written) == 2 else [])]:
            assert one.keys() == other.keys(), name
            for key in one:
                np.testing.assert_array_equal(one[key], other[key], err_msg=f"{name}: {key}")
        assert filled[0][1] == filled[1][1], name


# Hints.


@pytest.mark.torch
def test_the_hint_of_layers_that_do_not_fit_works(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    source, model = torch.nn.Module(), torch.nn.Module()
    source.bn1, source.bn2 = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(8)
    model.bn_1, model.bn_2 = torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(4)
    saved = tmp_path / "norms.pt"
    torch.save(source.state_dict(), saved)
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, saved)
    assert "match=" in str(caught.value.hint)
    ckpttool.load_into(model, saved, match={"bn1": "bn_2", "bn2": "bn_1"})


def test_weight_norm_is_folded_on_request(tmp_path: Path) -> None:
    source = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    torch.save(source.state_dict(), tmp_path / "normed.pt")
    plain = row(3, 4, 2)
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(plain, tmp_path / "normed.pt")
    assert caught.value.hint is not None
    assert "fold_weight_norm=True" in caught.value.hint
    pairs = {"0": "0", "1": "2"}
    done = ckpttool.load_into(plain, tmp_path / "normed.pt", fold_weight_norm=True, match=pairs)
    assert done.complete
    batch = torch.linspace(-1, 1, 9).reshape(3, 3)
    assert torch.allclose(plain[0](batch), source[0](batch), atol=1e-6)
    # A weight-normed target is filled before it is normed: the option does not apply to it.
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(source, TF, part="policy/actor")
    assert "fold_weight_norm" not in (caught.value.hint or "")


def test_the_error_of_unused_tensors_names_a_pattern_that_leaves_them_out(tmp_path: Path) -> None:
    state = dict(row(3, 4, 2).state_dict())
    torch.save({**state, "lora_A": torch.ones(3), "weight_scale": torch.ones(5)}, tmp_path / "more.pt")
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(row(3, 4, 2), tmp_path / "more.pt")
    stated = (caught.value.hint or "").partition("allow_unused=")[2].partition(" to")[0]
    done = ckpttool.load_into(row(3, 4, 2), tmp_path / "more.pt", allow_unused=ast.literal_eval(stated))
    assert {entry.path for entry in done.left_out} == {"lora_A", "weight_scale"}


def test_a_grouped_convolution_before_a_depthwise_one_is_no_pixel_shuffle(tmp_path: Path) -> None:
    net = nn.ModuleDict(
        {
            "g": nn.Conv2d(4, 8, 3, groups=2),
            "dw": nn.Conv2d(8, 16, 3, groups=8),
            "pw": nn.Conv2d(16, 4, 1),
        }
    )
    shapes = {"g/kernel": (3, 3, 2, 8), "dw/depthwise_kernel": (3, 3, 8, 2), "pw/kernel": (1, 1, 16, 4)}
    arrays = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    arrays |= {f"{name}/bias": np.ones(size, np.float32) for name, size in (("g", 8), ("dw", 16), ("pw", 4))}
    np.savez(tmp_path / "g.npz", **arrays)
    assert ckpttool.load_into(net, tmp_path / "g.npz", from_="tf").complete
    kernel = arrays["dw/depthwise_kernel"].transpose(2, 3, 0, 1).reshape(16, 1, 3, 3)
    assert np.array_equal(net["dw"].weight.detach().numpy(), kernel)
    # Without the depthwise convolution, nothing takes the eight channels: a pixel shuffle may.
    del arrays["dw/depthwise_kernel"], arrays["dw/bias"]
    np.savez(tmp_path / "g.npz", **arrays)
    del net["dw"]
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(net, tmp_path / "g.npz", from_="tf")
    assert "unflatten={'g': 'no'}" in (caught.value.hint or "")


def trace(model: Any, file: Path, x: Any = None) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(model.eval(), torch.ones(2, 6) if x is None else x).save(file)
    return file


@pytest.mark.parametrize("accept_order", [False, True])
def test_outputs_decide_which_layer_of_the_same_shape_is_which(accept_order: bool, tmp_path: Path) -> None:
    # The order of creation and the names say the opposite of what the calls do.
    source, model = Gated(("n_u", "q", "p", "n_v")), Gated(("n_j", "r", "s", "n_i"))
    file = trace(source, tmp_path / "gated.pt")
    done = ckpttool.load_into(model, file, shapes=[(6,)], verify=False, accept_order=accept_order)
    x = torch.randn(5, 6)
    assert torch.equal(model(x), source(x))
    by = {(match.source, match.target): match.by for match in done.matched}
    assert by.keys() == {("n_u", "n_j"), ("q", "r"), ("p", "s"), ("n_v", "n_i")}
    assert "outputs" in by.values()


def test_the_shape_that_lets_outputs_decide_is_asked_for(tmp_path: Path) -> None:
    source, model = Gated(("n_u", "q", "p", "n_v")), Gated(("n_j", "r", "s", "n_i"))
    file = trace(source, tmp_path / "gated.pt")
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, file, verify=False)
    assert "shapes=" in (caught.value.hint or "")
    ckpttool.load_into(model, file, verify=False, shapes=[(6,)])
    x = torch.randn(5, 6)
    assert torch.equal(model(x), source(x))


class Scaled(nn.Module):
    """A gated state, multiplied by what an action gives; either of the inputs may be the first."""

    def __init__(self, names: tuple[str, ...], *, action_first: bool) -> None:
        super().__init__()
        self.gated, self.scale, self.action_first = Gated(names), nn.Linear(4, 6), action_first

    def forward(self, *inputs: Any) -> Any:
        state, action = reversed(inputs) if self.action_first else inputs
        return self.gated(state) * self.scale(action)


@pytest.mark.parametrize("action_first", [False, True])
def test_outputs_decide_whichever_input_is_the_first(action_first: bool, tmp_path: Path) -> None:
    source = Scaled(("n_u", "q", "p", "n_v"), action_first=False)
    model = Scaled(("n_j", "r", "s", "n_i"), action_first=action_first)
    inputs = torch.randn(5, 6), torch.randn(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(source, inputs, tmp_path / "m.onnx", input_names=["s", "a"], dynamo=False)
    shapes = [(4,), (6,)] if action_first else [(6,), (4,)]
    ckpttool.load_into(model, tmp_path / "m.onnx", shapes=shapes, verify=False)
    assert torch.equal(model(*(reversed(inputs) if action_first else inputs)), source(*inputs))


@pytest.mark.parametrize(
    "settings", [{"alike": True}, {"halves": True}], ids=["both choices compute it", "no choice does"]
)
def test_what_outputs_do_not_decide_stays_refused(settings: dict[str, bool], tmp_path: Path) -> None:
    source = Gated(("n_u", "q", "p", "n_v"), alike="alike" in settings)
    model = Gated(("n_j", "r", "s", "n_i"), **settings)
    before = state(model)
    with pytest.raises(MappingError) as caught:
        ckpttool.load_into(model, trace(source, tmp_path / "gated.pt"), shapes=[(6,)], verify=False)
    assert "match=" in str(caught.value.hint)
    assert unchanged(model, before)


class Limited(nn.Module):
    """A layer whose outputs have a lower limit, which is a buffer or stands in the code."""

    def __init__(self, limit: float, *, stored: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        if stored:
            self.register_buffer("limit", torch.tensor(limit))
        else:
            self.limit = torch.tensor(limit)

    def forward(self, x: Any) -> Any:
        return torch.maximum(self.layer(x), self.limit)


@pytest.mark.parametrize("stored", ["source", "model"])
@pytest.mark.parametrize(("limit", "needed"), [(-1e4, False), (0.1, True)])
def test_outputs_decide_whether_a_buffer_is_needed(
    stored: str, limit: float, needed: bool, tmp_path: Path
) -> None:
    source = Limited(limit if stored == "source" else -1e4, stored=stored == "source")
    model = Limited(limit if stored == "model" else -1e4, stored=stored == "model")
    file, before = trace(source, tmp_path / "limited.pt"), state(model)
    if needed:
        with pytest.raises(MappingError):
            ckpttool.load_into(model, file, shapes=[(6,)], verify=False)
        assert unchanged(model, before)
        return
    done = ckpttool.load_into(model, file, shapes=[(6,)], verify=False)
    assert done.complete
    assert not done.report.unused
    assert any("limit" in item for item in done.report.assumed)
    x = torch.randn(5, 6)
    assert torch.equal(model(x), source(x))


def test_equal_values_need_no_decision_between_them(tmp_path: Path) -> None:
    source = Gated(("n_u", "q", "p", "n_v"))
    source.n_v.load_state_dict(source.n_u.state_dict())
    model = Gated(("n_j", "r", "s", "n_i"))
    ckpttool.load_into(model, trace(source, tmp_path / "gated.pt"), shapes=[(6,)], verify=False)
    x = torch.randn(5, 6)
    assert torch.equal(model(x), source(x))


def test_a_live_model_keeps_its_values_in_a_dry_run_that_outputs_decide(tmp_path: Path) -> None:
    source, model = Gated(("n_u", "q", "p", "n_v")), Gated(("n_j", "r", "s", "n_i"))
    before, mode = state(model), model.train().training
    file = trace(source, tmp_path / "gated.pt")
    done = ckpttool.load_into(model, file, shapes=[(6,)], dry_run=True, verify=False)
    assert not done.ambiguous
    assert unchanged(model, before)
    assert model.training is mode


class NoisyLayers(nn.Module):
    """Layers of a class of its own, whose parameters have PyTorch's order of axes; the first is square."""

    def __init__(self, *widths: int, convolution: bool = False) -> None:
        super().__init__()
        kernel = {"conv": nn.Parameter(torch.zeros(4, 1, 3, 3))} if convolution else {}
        self.own = nn.ParameterDict(kernel)
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            for kind in ("mu", "sigma"):
                self.register_parameter(
                    f"layer{number}_{kind}_matrix", nn.Parameter(torch.zeros(outputs, inputs))
                )
                self.register_parameter(f"layer{number}_{kind}_vector", nn.Parameter(torch.zeros(outputs)))


def tensorflow_arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Return random numbers by the model's names, kernels with TensorFlow's order of axes."""
    draw, arrays = np.random.default_rng(4), {}
    for name, value in model.state_dict().items():
        axes = (*range(2, value.ndim), 1, 0) if value.ndim > 1 else (0,)
        shape = tuple(value.shape[axis] for axis in axes)
        arrays[name.replace(".", "/")] = draw.standard_normal(shape).astype(np.float32)
    return arrays


def test_matrices_of_own_layers_are_turned(tmp_path: Path) -> None:
    model = NoisyLayers(5, 5, 3)
    arrays = tensorflow_arrays(model)
    np.savez(tmp_path / "own.npz", **arrays)
    done = ckpttool.load_into(model, str(tmp_path / "own.npz"), verify=False, from_="tf")
    for name, value in model.state_dict().items():
        assert np.array_equal(value.numpy(), arrays[name].T), name
        # Each is named, as no class shows what a tensor of an own layer is.
        assert value.ndim == 1 or any(name in sentence for sentence in done.report.assumed)


def test_a_matrix_of_an_own_layer_that_may_take_an_image_is_not_turned(tmp_path: Path) -> None:
    # Of 16 rows behind 4 channels: the order of the image is unknown.
    model = NoisyLayers(16, 3, convolution=True)
    np.savez(tmp_path / "own.npz", **tensorflow_arrays(model))
    before = state(model)
    with pytest.raises(MappingError):
        ckpttool.load_into(model, str(tmp_path / "own.npz"), verify=False, from_="tf")
    assert unchanged(model, before)
    beside = NoisyLayers(7, 3, convolution=True)
    arrays = tensorflow_arrays(beside)
    np.savez(tmp_path / "own.npz", **arrays)
    ckpttool.load_into(beside, str(tmp_path / "own.npz"), verify=False, from_="tf")
    assert np.array_equal(beside.own["conv"].detach().numpy(), arrays["own/conv"].transpose(3, 2, 0, 1))


def test_a_square_matrix_of_a_layer_is_not_copied_into_an_own_one(tmp_path: Path) -> None:
    model = NoisyLayers(5, 5)
    kernels = {f"{name}_w": np.ones((5, 5), np.float32) for name in ("mu", "sigma")}
    np.savez(tmp_path / "own.npz", **kernels, mu_b=np.ones(5, "f"), sigma_b=np.zeros(5, "f"))
    before = state(model)
    with pytest.raises(MappingError):
        ckpttool.load_into(model, str(tmp_path / "own.npz"), verify=False, from_="tf")
    assert unchanged(model, before)
