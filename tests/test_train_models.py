"""`verify --train-step` of two models: a right optimizer state passes, and each planted fault is named."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.verify import verify
from ckpttool.core import CkpttoolError, UnsupportedError, UsageError
from ckpttool.networks import ModelSpec
from ckpttool.networks.messages import Requests
from ckpttool.verification import training, two_models
from ckpttool.verification.sides import ModelSide
from ckpttool.verification.training import TensorMatcher, find_reordering
from tests import schemas, tensorflow_child, warm
from tests.conftest import ROOT
from tests.shared_runners import InThisProcess
from tests.trained_models import CASES, FORMS, OptimizerCase, factory

TRAINED = 5


# Two PyTorch models with one set of weights: B's layers have other names, and are registered in reverse.


def first_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def second_model() -> Any:
    from torch import nn

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.middle, self.first = nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(6, 8)

        def forward(self, x: Any) -> Any:
            return self.head(self.middle(self.first(x).tanh()).tanh())

    return Second()


def frozen_model() -> Any:
    model = second_model()
    model.head.bias.requires_grad = False
    return model


def cut_model() -> Any:
    """Return a model that computes the same, but cuts the gradient of its first layer."""
    model = second_model()

    def forward(x: Any) -> Any:
        return model.head(model.middle(model.first(x).detach().tanh()).tanh())

    model.forward = forward
    return model


def sum_of_outputs(outputs: Any) -> Any:
    return (outputs**3).mean()


def distance(outputs: Any, targets: Any) -> Any:
    return (outputs - targets).abs().mean()


_NAMES = {"first": "0", "middle": "2", "head": "4"}
State = dict[str, Any]


@dataclass(frozen=True)
class TrainingFault:
    """A change of B's optimizer, its model, and words of the cause."""

    words: str
    change: Callable[[State], None] | None = None
    model: str = "second_model"
    confirmed: bool = True


def _group(**settings: Any) -> Callable[[State], None]:
    return lambda state: state["param_groups"][0].update(settings)


def _state(name: str, make: Callable[[Any], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        for slots in state["state"].values():
            slots[name] = make(slots[name])

    return change


def _swapped(state: State) -> None:
    both = state["state"]
    both[2]["exp_avg"] = both[2]["exp_avg"].T.contiguous()


FAULTS = {
    "learning rate": TrainingFault("learning_rate", _group(lr=0.02)),
    "beta": TrainingFault("beta_2", _group(betas=(0.9, 0.99))),
    "epsilon": TrainingFault("epsilon", _group(eps=1e-3)),
    "decay": TrainingFault("weight_decay", _group(weight_decay=0.1)),
    "count": TrainingFault("number of updates", _state("step", lambda step: step * 0)),
    "first moment": TrainingFault("m, a moment", _state("exp_avg", lambda m: m * 2)),
    "second moment": TrainingFault("v, a moment", _state("exp_avg_sq", lambda v: v * 2)),
    "transposed moment": TrainingFault("m, a moment", _swapped),
    "frozen": TrainingFault("only A trains 4.bias", model="frozen_model"),
    "gradient": TrainingFault("gradients differ", model="cut_model"),
}


# Optimizers of both sides, and what is planted in B's; equal updates hide some of these faults.


def _grouped(parameters: list[Any]) -> Any:
    import torch

    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def _loss_factory(name: str, **settings: Any) -> Callable[[list[Any]], Any]:
    def make(parameters: list[Any]) -> Any:
        import torch

        return getattr(torch.optim, name)(parameters, **{"lr": 0.01, **settings})

    return make


def _without(state: State) -> None:
    state["state"] = {}


def _of_one(name: str, make: Callable[[Any], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["state"][2][name] = make(state["state"][2][name])

    return change


def _exchanged(*names: str) -> Callable[[State], None]:
    """Exchange the state of two tensors of equal shape, or two kinds of state of each tensor."""

    def change(state: State) -> None:
        one, other = state["state"][1], state["state"][3]
        for name in names:
            one[name], other[name] = other[name], one[name]

    return change


def _moments_exchanged(state: State) -> None:
    for slots in state["state"].values():
        slots["exp_avg"], slots["exp_avg_sq"] = slots["exp_avg_sq"], slots["exp_avg"].abs()


def _apart(name: str, **settings: Any) -> Callable[[list[Any]], Any]:
    def make(parameters: list[Any]) -> Any:
        import torch

        groups = [{"params": parameters[:2]}, {"params": parameters[2:], **settings}]
        return getattr(torch.optim, name)(groups, lr=0.01)

    return make


def _with_tensors(parameters: list[Any]) -> Any:
    import torch

    betas = (torch.tensor(0.5), torch.tensor(0.75))
    return torch.optim.Adam(parameters, lr=torch.tensor(0.5), betas=betas, foreach=False)


def _second_group(**settings: Any) -> Callable[[State], None]:
    return lambda state: state["param_groups"][1].update(settings)


@dataclass(frozen=True)
class StateFault:
    """A change of B's optimizer, and words of the cause: none if the pair is right, the error's otherwise."""

    make: Callable[[list[Any]], Any]
    change: Callable[[State], None] | None = None
    words: str = ""
    error: str = ""
    scale: float = 1.0
    """the factor of the outputs in training: small gradients before, large ones in the comparison"""
    model: str = "first_model"
    other: str = ""
    confirmed: bool = True


_AMSGRAD, _MOMENTUM = _loss_factory("Adam", amsgrad=True), _loss_factory("SGD", momentum=0.9, nesterov=True)
_GONE = "max_exp_avg_sq"
STATE_FAULTS = {
    "right groups": StateFault(_grouped),
    "right amsgrad": StateFault(_AMSGRAD),
    "right nesterov": StateFault(_MOMENTUM),
    "right centered": StateFault(_loss_factory("RMSprop", centered=True, momentum=0.5)),
    "right adagrad": StateFault(_loss_factory("Adagrad")),
    "rate of a group": StateFault(
        _grouped, _second_group(lr=2e-3), "learning_rate of 2.weight", confirmed=False
    ),
    "mask of the decay": StateFault(
        _grouped, _second_group(weight_decay=0.1), "weight_decay of 2.weight", confirmed=False
    ),
    "right tensors as settings": StateFault(_with_tensors),
    "right flags": StateFault(_loss_factory("Adam"), _group(fused=True, capturable=True)),
    "right groups of betas": StateFault(_apart("Adam", betas=(0.5, 0.9))),
    "betas of a group": StateFault(
        _apart("Adam", betas=(0.5, 0.9)),
        _second_group(betas=(0.9, 0.9)),
        "beta_1 of 2.weight",
        confirmed=False,
    ),
    "sign of a group": StateFault(
        _apart("SGD", maximize=True), _second_group(maximize=False), "maximize of 2.weight", confirmed=False
    ),
    "amsgrad of a group": StateFault(
        _apart("Adam", amsgrad=True), _second_group(amsgrad=False), "amsgrad of 2.weight", scale=1e-3
    ),
    "fewer updates of a tensor": StateFault(
        _loss_factory("Adam"),
        _of_one("step", lambda step: step - 2),
        "updates of 2.weight is 3 in A and 1 in B",
    ),
    "more updates of a tensor": StateFault(
        _loss_factory("Adam"),
        _of_one("step", lambda step: step + 2),
        "updates of 2.weight is 3 in A and 5 in B",
    ),
    "product of momenta": StateFault(
        _loss_factory("NAdam"), _state("mu_product", lambda mu: mu * 2), "mu_product of 0.weight"
    ),
    "state of equal shape": StateFault(
        _loss_factory("Adam"), _exchanged("exp_avg", "exp_avg_sq"), "differs for 0.bias"
    ),
    "exchanged moments": StateFault(_loss_factory("Adam"), _moments_exchanged, "m, a moment"),
    "largest moment": StateFault(_AMSGRAD, _state(_GONE, lambda v: v * 0), "vhat, a moment", scale=1e-3),
    "amsgrad": StateFault(_AMSGRAD, _group(amsgrad=False), "amsgrad is True", scale=1e-3),
    "buffer": StateFault(_MOMENTUM, _state("momentum_buffer", lambda slots: slots * 0), "buffer"),
    "no buffer": StateFault(_MOMENTUM, _without, "only A contains buffer"),
    "nesterov": StateFault(_MOMENTUM, _group(nesterov=False), "nesterov is True"),
    "maximize": StateFault(_loss_factory("Adam"), _group(maximize=True), "maximize is False"),
    "state at rate 0": StateFault(
        _loss_factory("Adam", lr=0.0), _state("exp_avg", lambda m: m * 2), "m, a moment"
    ),
    "rate 0": StateFault(_loss_factory("Adam", lr=0.0), error="no weight of A or B moves"),
    "no gradient": StateFault(
        _loss_factory("Adam"), error="gradients of all weights are 0", model="dead_model"
    ),
    "gradient of B only": StateFault(
        _loss_factory("SGD"), words="gradients differ", model="cut", other="first_model"
    ),
    "other class": StateFault(
        _loss_factory("Adam"), lambda state: state["param_groups"][0].pop("eps"), error="class"
    ),
}


def dead_model() -> Any:
    """Return a model whose outputs do not depend on its weights."""
    model = first_model()

    def forward(x: Any) -> Any:
        return x[:, :3] + 0 * type(model).forward(model, x)

    model.forward = forward
    return model


def cut() -> Any:
    """Return a model that computes the same, but cuts the gradient of its first layer."""
    model = first_model()

    def forward(x: Any) -> Any:
        return model[1:](model[0](x).detach())

    model.forward = forward
    return model


def _compare_states(folder: Path, fault: StateFault) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    model = globals()[fault.model]()
    optimizer = fault.make([*model.parameters()])
    for _ in range(3):
        optimizer.zero_grad()
        ((fault.scale * model(torch.randn(16, 6))) ** 2).mean().backward()
        optimizer.step()
    contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(contents, folder / "a.pt")
    written = torch.load(folder / "a.pt", weights_only=True)
    if fault.change is not None:
        fault.change(written["optimizer"])
    torch.save(written, folder / "b.pt")
    like = [ModelSpec(f"test_train_models:{name}") for name in (fault.model, fault.other or fault.model)]
    files = [str(folder / name) for name in ("a.pt", "b.pt")]
    try:
        done = verify(*files, like_a=like[0], like_b=like[1], input_shapes=("6",), steps=1)
    except CkpttoolError as error:
        return {"error": str(error)}
    return json.loads(json.dumps(done.document()))


def in_torch(folder: Path) -> dict[str, Any]:
    """Compare the right pair, and each fault, in this process."""
    import torch

    two_models.ModelProcess = InThisProcess  # type: ignore[misc, assignment]
    sys.path.insert(0, str(ROOT / "tests"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = first_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(16, 6)) ** 2).mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "a.pt")
    weights = model.state_dict()
    torch.save(weights, folder / "weights.pt")
    outcomes = {"right": _compare(folder, "second_model", None, steps=100)}
    for name, loss in (("sum", "sum_of_outputs"), ("distance", "distance")):
        outcomes[name] = _compare(folder, "second_model", None, steps=2, loss=loss)
    outcomes["new"] = _compare(folder, "second_model", None, steps=2, source="weights.pt", state=False)
    outcomes["lost"] = _compare(folder, "second_model", None, steps=2, state=False)
    for name, fault in FAULTS.items():
        outcomes[name] = _compare(folder, fault.model, fault.change, steps=2)
    for name, chosen in CHOICES.items():
        outcomes[f"choice: {name}"] = _compare_chosen(folder, chosen)
    for name, planted in STATE_FAULTS.items():
        outcomes[f"state: {name}"] = _compare_states(folder, planted)
    return outcomes


# The optimizer of A, whose file has two; None chooses none.
CHOICES = {"right": "of_model", "other": "of_critic", "unknown": "of_modle", "none": None}


def _compare_chosen(folder: Path, chosen: str | None) -> dict[str, Any]:
    import torch

    model = first_model()
    optimizers = {}
    for name, rate in (("of_model", 0.01), ("of_critic", 0.5)):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        optimizers[name] = optimizer.state_dict()
    torch.save({"model": model.state_dict(), **optimizers}, folder / "several.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizers["of_model"]}, folder / "one.pt")
    like = ModelSpec("test_train_models:first_model")
    files = [str(folder / name) for name in ("several.pt", "one.pt")]
    try:
        done = verify(*files, like_a=like, like_b=like, input_shapes=("6",), steps=1, optimizer_a=chosen)
    except UsageError as error:
        return {"error": error.found, "hint": error.hint}
    return json.loads(json.dumps(done.document()))


def _compare(
    folder: Path,
    model: str,
    change: Callable[[State], None] | None,
    *,
    steps: int,
    source: str = "a.pt",
    state: bool = True,
    loss: str | None = None,
) -> dict[str, Any]:
    import torch

    contents = torch.load(folder / "a.pt", weights_only=True)
    second = second_model()
    renamed = {name: name.partition(".") for name in second.state_dict()}
    weights = {
        name: contents["model"][f"{_NAMES[layer]}.{tensor}"] for name, (layer, _, tensor) in renamed.items()
    }
    own = contents["optimizer"]
    # Parameters are numbered in the order of the model: B's is the reverse, layer by layer.
    order = [4, 5, 2, 3, 0, 1]
    own["state"] = {index: own["state"][number] for index, number in enumerate(order)}
    if change is not None:
        change(own)
    if model == "frozen_model":
        own["state"] = dict(enumerate(own["state"][n] for n in (0, 2, 3, 4, 5)))
        own["param_groups"][0]["params"] = list(range(5))
    written = {"model": weights, "optimizer": own} if state else weights
    torch.save(written, folder / "b.pt")
    stated = None if loss is None else f"test_train_models:{loss}"
    done = verify(
        str(folder / source),
        str(folder / "b.pt"),
        like_a=ModelSpec("test_train_models:first_model"),
        like_b=ModelSpec(f"test_train_models:{model}"),
        input_shapes=("6",),
        steps=steps,
        loss_a=stated,
        loss_b=stated,
    )
    return json.loads(json.dumps(done.document()))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the documents of all comparisons of two PyTorch models."""
    folder = tmp_path_factory.mktemp("trained")
    program = tensorflow_child.PROGRAM.format(
        file=os.path.abspath(__file__), folders={"in_torch": str(folder)}
    )
    status, output = warm.run("torch", program, folder)
    assert not status, output[-3000:]
    outcomes: dict[str, Any] = json.loads((folder / "in_torch.json").read_text())
    return outcomes


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("name", ["right", "sum", "distance", "new"])
def test_equal_optimizers_make_equal_updates(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    training = outcome["models"]["training"]
    assert outcome["within"]
    assert training["within"]
    assert training["only_a"] == training["only_b"] == []
    last = 100 if name == "right" else 2
    assert {(row["dtype"], row["step"]) for row in training["updates"]} == {
        (dtype, step) for dtype in training["bounds"] for step in (1, last)
    }
    assert all(row["relative"] <= training["bounds"][row["dtype"]] for row in training["updates"])
    assert [optimizer["stored"] for optimizer in training["optimizers"]] == [name != "new"] * 2
    assert training["loss"].rpartition(":")[2] in ("quadratic", "sum_of_outputs", "distance")
    assert len(training["missing"]) > 3
    schemas.require("verify", {**_versions(), **outcome})


def _versions() -> dict[str, Any]:
    from ckpttool.cli.console import render_document

    return {key: value for key, value in json.loads(render_document({})).items() if key in ("schema", "tool")}


@pytest.mark.torch
@pytest.mark.long
def test_lost_state_is_named(outcomes: dict[str, Any]) -> None:
    training = outcomes["lost"]["models"]["training"]
    assert not outcomes["lost"]["within"]
    assert [optimizer["stored"] for optimizer in training["optimizers"]] == [True, False]
    assert "B contains no optimizer" in training["cause"]


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(outcomes: dict[str, Any], name: str) -> None:
    outcome, fault = outcomes[name], FAULTS[name]
    training = outcome["models"]["training"]
    assert not outcome["within"]
    assert all(network["within"] for network in outcome["networks"])
    assert fault.words in training["cause"]
    assert training["confirmed"] == fault.confirmed


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("name", STATE_FAULTS)
def test_lost_state_and_settings_are_named_even_if_updates_agree(outcomes: dict[str, Any], name: str) -> None:
    outcome, fault = outcomes[f"state: {name}"], STATE_FAULTS[name]
    if fault.error:
        assert fault.error in outcome["error"]
        return
    training = outcome["models"]["training"]
    assert outcome["within"] == training["within"] == (not fault.words)
    assert fault.words in (training["cause"] or "")
    assert training["confirmed"] == (fault.confirmed and bool(fault.words))
    if fault.scale < 1:
        assert all(update["within"] for update in training["updates"])


# How tensors are paired.


def _reordered(seed: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    values = np.random.default_rng(seed).standard_normal
    kernel = values((3, 4, 2, 5))
    yield "convolution", kernel, kernel.transpose(3, 2, 0, 1)
    dense = values((24, 5))
    yield "flattened", dense, dense.reshape(3, 4, 2, 5).transpose(2, 0, 1, 3).reshape(24, 5).T
    heads = values((8, 2, 4))
    yield "heads", heads, heads.reshape(8, 8).T
    gates = values((6, 12))
    yield "gates", gates, gates.reshape(6, 3, 4)[:, [1, 0, 2]].reshape(6, 12).T
    yield "values", dense, np.random.default_rng(1).permutation(dense.reshape(-1)).reshape(10, 12)


@pytest.mark.torch
@pytest.mark.long
def test_one_of_several_optimizers_is_chosen(outcomes: dict[str, Any]) -> None:
    assert outcomes["choice: right"]["within"]
    assert not outcomes["choice: other"]["within"]
    for name in ("unknown", "none"):
        assert outcomes[f"choice: {name}"]["error"] == "of_model, of_critic"
        assert "of_model" in outcomes[f"choice: {name}"]["hint"]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_reordering_is_found_and_applies_to_other_numbers(seed: int) -> None:
    for name, x, y in _reordered(seed):
        at = find_reordering(x, y)
        assert at is not None, name
        assert np.array_equal(y.reshape(-1)[at], x), name
        # Any other numbers in B's order come into A's: each number stands for its place.
        places = {value: index for index, value in enumerate(x.reshape(-1))}
        numbers = np.array([places[value] for value in y.reshape(-1)]).reshape(y.shape)
        assert np.array_equal(numbers.reshape(-1)[at].reshape(-1), np.arange(x.size)), name
    assert find_reordering(np.ones((2, 3)), np.zeros((2, 3))) is None


def test_merged_and_added_tensors_are_paired() -> None:
    values = np.random.default_rng(3).standard_normal
    q, k, v = (values((4, 4)) for _ in range(3))
    one, two = values(6), values(6)
    a = {
        "attention.in_proj": np.concatenate([q, k, v]),
        "rnn.bias_ih": one,
        "rnn.bias_hh": two,
        "left": values(7),
    }
    b = {"query/kernel": q.T, "key/kernel": k.T, "value/kernel": v.T, "cell/bias": one + two}
    pairs = TensorMatcher(a, b).match()
    assert pairs.only_a == ("left",)
    assert pairs.only_b == ()
    assert {(pair.title, pair.b) for pair in pairs.pairs} == {
        ("attention.in_proj", "query/kernel"),
        ("attention.in_proj", "key/kernel"),
        ("attention.in_proj", "value/kernel"),
        ("rnn.bias_ih + rnn.bias_hh", "cell/bias"),
    }
    for pair in pairs.pairs:
        assert np.allclose(pair.of_a(a), pair.of_b(b))
    back = TensorMatcher(b, a).match()
    assert set(back.only_b) == {"left", "rnn.bias_ih", "rnn.bias_hh"}
    assert len(back.pairs) == 3


def test_a_part_that_cannot_be_ordered_has_no_counterpart() -> None:
    values = np.random.default_rng(3).standard_normal((4, 4))
    tied = np.random.default_rng(4).integers(0, 2, (4, 4)).astype(float)
    scrambled = np.random.default_rng(5).permutation(tied.reshape(-1)).reshape(4, 4)
    pairs = TensorMatcher({"both": np.concatenate([values, tied])}, {"q": values, "k": scrambled}).match()
    assert [(pair.a, pair.b) for pair in pairs.pairs] == [("both", "q")]
    assert (pairs.only_a, pairs.only_b) == ((), ("k",))


# Keras.


def in_keras(folder: Path) -> dict[str, Any]:
    """Compare a .keras file with itself, with a weights file, and with objects of TensorFlow."""
    import keras
    import tensorflow as tf

    from tests.trained_models import keras_model, keras_optimizer, keras_steps

    two_models.ModelProcess = InThisProcess  # type: ignore[misc, assignment]
    sys.path.insert(0, str(ROOT / "tests"))
    case = CASES["adam32"]
    keras.utils.set_random_seed(3)
    model = keras_model("float32")
    optimizer = keras_optimizer(case, model)
    keras_steps(model, optimizer, TRAINED)
    model.compile(optimizer)
    model.save(folder / "a.keras")
    warnings.simplefilter("ignore")
    model.save(folder / "a.h5")
    tf.train.Checkpoint(model, optimizer=optimizer).write(str(folder / "a-1"))
    optimizer.learning_rate.assign(0.5)
    model.compile(optimizer)
    model.save(folder / "b.keras")
    like = ModelSpec("trained_models:keras_model32")
    outcomes = {}
    for one, other, like_b in (("a.keras", "a-1", like), ("a.h5", "b.keras", None)):
        done = verify(str(folder / one), str(folder / other), like_b=like_b, steps=1)
        outcomes[other] = done.document()
    return json.loads(json.dumps(outcomes))


@pytest.mark.tensorflow
@pytest.mark.long
def test_every_file_of_keras_restores_its_optimizer(tmp_path: Path) -> None:
    outcomes = tensorflow_child.run(__file__, "in_keras", tmp_path)
    causes = {}
    for name, outcome in outcomes.items():
        training = outcome["models"]["training"]
        assert [state["stored"] for state in training["optimizers"]] == [True, True]
        assert [state["step"] for state in training["optimizers"]] == [TRAINED, TRAINED]
        assert training["confirmed"]
        causes[name] = training["cause"]
    # No file of TensorFlow contains betas and epsilon, and the case's differ from the defaults.
    assert "beta_1" in causes["a-1"]
    assert "learning_rate" in causes["b.keras"]


# Between the frameworks: every optimizer of the sweep, in both directions.

# AdamW with a mask: no file of Keras lists the exempt variables, so that the decays differ.
_DIFFERENT = {"torch-masked"}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("source", ["keras", "torch"])
def test_training_continues_alike(folder: Path, source: str, name: str) -> None:
    case = CASES[name]._replace(dtype="float32")
    target = "torch" if source == "keras" else "keras"
    first = folder / (f"torch-{name}.pt" if source == "torch" else f"keras-{name}.keras")
    second = folder / (f"to-torch-{name}.pt" if target == "torch" else f"to-keras-{name}.weights.h5")
    if target == "torch":
        _convert(str(first), str(second), case, target)
    like = {
        side: ModelSpec(f"trained_models:{item}_model32") for side, item in (("a", source), ("b", target))
    }
    done = verify(
        str(first),
        str(second),
        like_a=like["a"] if source == "torch" else None,
        like_b=like["b"],
        input_shapes=("2,6,5",) if source == "torch" else (),
        steps=100,
    )
    assert done.models is not None
    training = done.models.training
    assert training is not None
    assert all(update.within for update in training.updates) == (f"{source}-{name}" not in _DIFFERENT), (
        training.cause
    )
    if training.epsilon is not None and case.settings.get("epsilon", 1) < 1e-9:
        assert training.epsilon.worst.within
    if f"{source}-{name}" == "keras-default_epsilon":
        assert not done.within


def _convert(source: str, target: str, case: OptimizerCase, to: str) -> None:
    from tests.test_like import fill

    shapes: Any = {"torch": [(2, 6, 5)], "keras": [(6, 5, 2)]}[to]
    fill(source, target, "torch" if to == "torch" else "keras", factory(case, to), shapes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch) -> Path:
    """Return the folder of both frameworks' checkpoints in float32."""
    tensorflow_child.require("tensorflow", "torch")
    folder = tmp_path_factory.mktemp("pairs")
    _write_torch(folder)
    tensorflow_child.run_each(__file__, {"write_keras": folder, "convert_to_keras": folder})
    return folder


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    """Make the factories importable for the models' processes."""
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(str(ROOT / "tests"))
        yield patch


def write_keras(folder: Path) -> list[str]:
    """Train every case in Keras and save it with its optimizer."""
    import keras

    from tests.trained_models import keras_model, keras_optimizer, keras_steps

    for name, case in CASES.items():
        keras.utils.set_random_seed(3)
        model = keras_model("float32")
        optimizer = keras_optimizer(case, model)
        keras_steps(model, optimizer, TRAINED)
        model.compile(optimizer)
        model.save(folder / f"keras-{name}.keras")
    return list(FORMS)


def convert_to_keras(folder: Path) -> list[str]:
    """Convert what PyTorch trained."""
    sys.path.insert(0, str(ROOT / "tests"))
    for name, case in CASES.items():
        source, target = folder / f"torch-{name}.pt", folder / f"to-keras-{name}.weights.h5"
        _convert(str(source), str(target), case._replace(dtype="float32"), "keras")
    return list(CASES)


def _write_torch(folder: Path) -> None:
    program = tensorflow_child.PROGRAM.format(
        file=os.path.abspath(__file__), folders={"write_torch": str(folder)}
    )
    status, output = warm.run("torch", program, folder)
    assert not status, output[-3000:]


def write_torch(folder: Path) -> list[str]:
    """Train every case in PyTorch and save it with its optimizer."""
    import torch

    from tests.trained_models import torch_model, torch_optimizer, torch_steps

    for name, case in CASES.items():
        torch.manual_seed(5)
        model = torch_model("float32")
        optimizer = torch_optimizer(case, model)
        torch_steps(model, optimizer, TRAINED)
        contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(contents, folder / f"torch-{name}.pt")
    return list(CASES)


def test_a_loss_needs_training_steps_of_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), loss_a="m:f")


@pytest.mark.parametrize(
    "rate",
    [
        {"module": "keras.layers", "class_name": "TFSMLayer", "config": {"filepath": "x"}},
        {"module": "keras.layers", "class_name": "StringLookup", "config": {"vocabulary": "/etc/passwd"}},
        {"class_name": "__lambda__", "config": {"value": ["4wE=", None, None]}},
        {"class_name": "function", "module": "keras.utils", "config": "get_file"},
        {"module": "my.own", "class_name": "Schedule", "config": {}},
        {
            "module": "keras.optimizers.schedules",
            "class_name": "CosineDecay",
            "config": {"initial_learning_rate": 1},
        },
    ],
)
def test_an_optimizer_is_created_only_if_its_configuration_computes(rate: dict[str, Any]) -> None:
    config = {"module": "keras.optimizers", "class_name": "Adam", "config": {"learning_rate": rate}}
    calls = []

    class Process:
        side = ModelSide("A", "x.keras")

        def __init__(self) -> None:
            self.ask = Requests(self.request)

        def request(self, do: str, **_: Any) -> dict[str, Any]:
            calls.append(do)
            if do == "optimizer_config":
                return {"config": config}
            return {"tensors": [], "assumed": [], "notes": [], "optimizer": None, "found": False}

    model = training._TrainedModel(Process(), "torch", None)  # type: ignore[arg-type]  # which has no description
    if rate["class_name"] == "CosineDecay":
        model.restore()
        assert calls == ["optimizer_config", "optimizer"]
    else:
        with pytest.raises(UnsupportedError):
            model.restore()
        assert calls == ["optimizer_config"]
