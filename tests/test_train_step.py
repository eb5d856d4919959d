"""`verify --train-step`: an optimizer that arrived goes on alike, one that lost something does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands import verify
from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.core import Leaf, UnsupportedError, UsageError, ValueLeaf, key, sidecar
from ckpttool.core import Path as TreePath
from ckpttool.evaluation.restore import restore_agent
from ckpttool.networks import (
    Activation,
    Affine,
    Clip,
    Concat,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Learner,
    Network,
    Node,
    Policy,
    TrainedWeights,
    Worker,
    numpy_backend,
    train_learner,
    trained_arrays,
)
from ckpttool.networks.policy_training import DDPG, TD3, OptimizerSetup, TrainingBatch
from ckpttool.verification import update_comparison
from ckpttool.verification.policy_training import make_batches
from ckpttool.verification.update_comparison import compare_train_steps
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.mutants import Change, Leaves, changed
from tests.trees import leaf

FRAMEWORKS = ("torch", "tensorflow")
HIDDEN = 16
OBS, ACT = 5, 2

# --- Learners made for the purpose ------------------------------------------------------------------


def chain(inputs: tuple[tuple[str, int], ...], layers: list[Layer]) -> Network:
    nodes = [Node(Concat(), (0, 1))] if len(inputs) > 1 else []
    for layer in layers:
        nodes.append(Node(layer, (len(inputs) + len(nodes) - 1,)))
    return Network(inputs, tuple(nodes), len(inputs) + len(nodes) - 1)


def dense(generator: np.random.Generator, n_in: int, n_out: int, scale: float = 1.0) -> Dense:
    kernel = scale * generator.normal(size=(n_in, n_out)) / np.sqrt(n_in)
    return Dense(kernel.astype(np.float32), (scale * generator.normal(size=n_out) / 10).astype(np.float32))


def actor(generator: np.random.Generator) -> Network:
    layers = [
        Affine(np.full(OBS, 0.7, np.float32), np.full(OBS, 0.1, np.float32)),
        Clip(np.full(OBS, -2, np.float32), np.full(OBS, 2, np.float32)),
        dense(generator, OBS, HIDDEN),
        Activation("silu"),
        dense(generator, HIDDEN, ACT),
        Activation("tanh"),
        Affine(np.full(ACT, 2, np.float32), np.zeros(ACT, np.float32)),
    ]
    return chain((("obs", OBS),), layers)


def critic(generator: np.random.Generator, scale: float) -> Network:
    layers = [
        dense(generator, OBS + ACT, HIDDEN),
        LayerNorm(np.full(HIDDEN, 1.1, np.float32), np.full(HIDDEN, 0.1, np.float32), 1e-5),
        Activation("relu"),
        dense(generator, HIDDEN, 1, scale),
    ]
    return chain((("obs", OBS), ("action", ACT)), layers)


def adam(
    titles: tuple[str, ...], networks: dict[str, Network], *, step: int, size: float, **facts: Any
) -> OptimizerSetup:
    """Moments as gradients of that size leave them; zeros before the first update."""
    generator = np.random.default_rng(step)
    arrays = [array for title in titles for array in trained_arrays(networks[title])]
    shapes = [array.shape for array in arrays]
    # As gradients of that size leave them: their mean changes sign, their mean square hardly varies.
    first = tuple(size * bool(step) * generator.normal(size=shape) for shape in shapes)
    second = tuple(size**2 * bool(step) * generator.uniform(0.5, 1.5, size=shape) for shape in shapes)
    slots = {"m": first, "v": second}
    if facts.get("amsgrad"):
        slots["vhat"] = tuple(2 * moment for moment in second)
    settings = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
    settings["weight_decay"] = facts.get("decoupled", 0.0)
    l2 = tuple(facts.get("kernel", 0.0) * (array.ndim == 2) for array in arrays)
    return OptimizerSetup("Adam", titles, settings, step, slots, l2, facts.get("corrected", True))


def learner(
    *, critics: int = 2, step: int = 0, size: float = 1.0, corrected: bool = True, **facts: Any
) -> Learner:
    """An agent whose critics' values, and with them all gradients, have the given size."""
    generator = np.random.default_rng(1)
    online = {"actor": actor(generator)}
    online |= {f"critic/q{n}": critic(generator, size) for n in range(1, critics + 1)}
    slow = {
        title: title.replace("actor", "actor_target").replace("critic", "critic_target") for title in online
    }
    titles = tuple(title for title in online if title != "actor")
    state: dict[str, Any] = {"step": step, "size": size, "corrected": corrected}
    return Learner(
        TD3 if critics > 1 else DDPG,
        online | {slow[title]: network for title, network in online.items()},
        {},
        titles,
        slow,
        {
            "actor_optimizer": adam(("actor",), online, **state),
            "critic_optimizer": adam(titles, online, **state, **facts),
        },
        np.full(ACT, -2.0),
        np.full(ACT, 2.0),
        updates=step,
    )


class InProcess(Worker):
    """A worker that needs no process: numpy's. What is tested with it is the comparison, not a framework."""

    def __init__(self, *_: object, **__: object) -> None:
        self.NAME = "numpy"

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def build(self, network: Network, device: str = "cpu") -> Policy:  # type: ignore[override]
        return numpy_backend.build(network, device)

    def train(self, learner: Learner, batches: Sequence[TrainingBatch]) -> TrainedWeights:
        return train_learner(numpy_backend.learn(learner), learner, batches)


LEARNERS: dict[str, Callable[[], Learner]] = {
    "TD3 with TensorFlow's epsilon, fresh, tiny gradients": lambda: learner(size=1e-7, corrected=False),
    "TD3 with TensorFlow's epsilon and AMSGrad, after 40 tiny updates": lambda: learner(
        step=40, size=1e-7, corrected=False, amsgrad=True
    ),
    "DDPG with L2, well trained": lambda: learner(critics=1, step=9_000, size=1e-2, kernel=1e-2),
    "DDPG with AdamW, after 40 tiny updates": lambda: learner(critics=1, step=40, size=1e-7, decoupled=1e-2),
}


@pytest.fixture(scope="module")
def engines(workers: Callable[[str], Worker]) -> list[Worker]:
    """TensorFlow and PyTorch, each in a process that all cases share."""
    for framework in FRAMEWORKS:
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    return [workers("tensorflow"), workers("torch")]


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, 3) for name in LEARNERS] + [pytest.param(name, 100, marks=pytest.mark.slow) for name in LEARNERS],
)
def test_the_frameworks_make_the_same_updates(engines: list[Worker], name: str, steps: int) -> None:
    agent = LEARNERS[name]()
    comparison = compare_train_steps((agent, agent), make_batches(agent, steps), engines)
    assert comparison.within
    assert comparison.algorithm == name.partition(" ")[0]
    assert len({m.name for m in comparison.moved}) == 2 * (1 + len(agent.critics))
    for moved in comparison.moved:
        assert moved.step in (1, 2, steps)
        # A target moves by a 200th of what its network does, which float32 rounds to a few units.
        if moved.dtype == "float64" or "target" not in moved.name:
            # AdamW's small updates of float32 differ by what each side's rounding adds.
            assert moved.relative <= max(update_comparison.BOUNDS[moved.dtype], 2 * moved.error_a), moved


def test_one_constant_epsilon_is_not_the_other() -> None:
    first = learner(step=40, size=1e-7, corrected=False)
    second = learner(step=40, size=1e-7, corrected=True)
    comparison = compare_train_steps((first, second), make_batches(first, 1), [InProcess(), InProcess()])
    assert {m.name: m.within for m in comparison.moved} == {"critic/q1": False, "critic/q2": False}
    assert all(m.relative > 0.1 for m in comparison.moved)


def test_gradients_are_those_of_differences() -> None:
    """The reference itself, against finite differences of its own forward pass."""
    from ckpttool.networks import backpropagate, forward_values
    from ckpttool.networks.numpy_backend import SLOPES

    generator = np.random.default_rng(5)
    layers: list[Layer] = [dense(generator, OBS + ACT, 7)]
    for name in SLOPES:
        layers += [Activation(name), dense(generator, 7, 7)]  # type: ignore[arg-type]
    norm = LayerNorm(generator.normal(size=7).astype("f4"), generator.normal(size=7).astype("f4"), 1e-3)
    layers += [
        norm,
        Affine(np.full(7, 2, "f4"), np.ones(7, "f4")),
        Clip(np.full(7, -9, "f4"), np.full(7, 9, "f4")),
    ]
    net = chain((("obs", OBS), ("action", ACT)), [*layers, Flatten()]).cast("float64")
    inputs = [generator.normal(size=(4, OBS)), generator.normal(size=(4, ACT))]
    toward = generator.normal(size=(4, 7))

    def value() -> float:
        return float((forward_values(net, inputs)[net.output] * toward).sum())

    of_inputs, of_weights = backpropagate(net, forward_values(net, inputs), toward)
    for array, gradient in [
        *zip(inputs, of_inputs, strict=True),
        *zip(trained_arrays(net), of_weights, strict=True),
    ]:
        for at in [0, array.size // 2, array.size - 1]:
            kept, step = array.flat[at], 1e-6
            array.flat[at] = kept + step
            up = value()
            array.flat[at] = kept - step
            slope = (up - value()) / (2 * step)
            array.flat[at] = kept
            assert gradient.flat[at] == pytest.approx(slope, rel=1e-5, abs=1e-7)


# --- Checkpoints that lost something ----------------------------------------------------------------


@pytest.fixture
def numpy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "Worker", InProcess)


def array(leaves: Leaves, path: TreePath) -> np.ndarray:
    result = leaves[path]
    assert isinstance(result, Leaf)
    return result.array()


def lost_moment(leaves: Leaves, names: dict[str, TreePath]) -> None:
    path = names["critic_optimizer/state/2/exp_avg"]
    leaves[path] = leaf(np.zeros_like(array(leaves, path)), "zeros")


def lost_state(leaves: Leaves, names: dict[str, TreePath]) -> None:
    for name, path in names.items():
        if name.startswith("actor_optimizer/state/"):
            leaves.pop(path)


def lost_count(leaves: Leaves, names: dict[str, TreePath]) -> None:
    for name, path in names.items():
        if name.startswith("critic_optimizer/state/") and name.endswith("/step"):
            leaves[path] = leaf(np.array(0, np.float32), "step")


def swapped_moments(leaves: Leaves, names: dict[str, TreePath]) -> None:
    for number in range(6):
        one, other = (names[f"actor_optimizer/state/{number}/{slot}"] for slot in ("exp_avg", "exp_avg_sq"))
        leaves[one], leaves[other] = (
            leaf(np.abs(array(leaves, other)), "m"),
            leaf(np.abs(array(leaves, one)), "v"),
        )


def transposed_moment(leaves: Leaves, names: dict[str, TreePath]) -> None:
    path = names["actor_optimizer/state/2/exp_avg"]
    leaves[path] = leaf(np.ascontiguousarray(array(leaves, path).T), "turned")


def other_setting(name: str, value: float) -> Change:
    def change(leaves: Leaves, names: dict[str, TreePath]) -> None:
        leaves[names[f"critic_optimizer/param_groups/0/{name}"]] = ValueLeaf(value)

    return change


# Slots of torch's optimizers that Adam's moments are renamed to, and settings of their groups.
OTHER_OPTIMIZERS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "rmsprop": ({"exp_avg_sq": "square_avg"}, {"alpha": 0.99, "momentum": 0, "centered": False}),
    "adagrad": ({"exp_avg_sq": "sum"}, {"lr_decay": 0, "initial_accumulator_value": 0}),
    "adamax": ({"exp_avg_sq": "exp_inf", "exp_avg": "exp_avg"}, {}),
    "adadelta": ({"exp_avg_sq": "square_avg", "exp_avg": "acc_delta"}, {"rho": 0.9}),
}


def as_other(kind: str) -> Change:
    """Return the change of Adam to another optimizer, with Adam's moments, squared for sums of squares."""
    slots, settings = OTHER_OPTIMIZERS[kind]

    def change(leaves: Leaves, names: dict[str, TreePath]) -> None:
        moved: Leaves = {}
        for name, path in names.items():
            own = name.rpartition("/")[2]
            if name.endswith("/param_groups/0/lr"):
                for setting, value in settings.items():
                    moved[*path[:-1], key(setting)] = ValueLeaf(value)
            if own in slots:
                squared = leaf(np.square(array(leaves, path)), own) if slots[own] == "acc_delta" else None
                moved[*path[:-1], key(slots[own])] = squared or leaves[path]
            if own in ("exp_avg", "exp_avg_sq", "amsgrad", "fused", "decoupled_weight_decay") or (
                "/betas/" in name and kind != "adamax"
            ):
                leaves.pop(path)
        leaves |= moved

    return change


CRITICS = {"critic/q1", "critic/q2"}
TARGETS = {"critic_target/q1", "critic_target/q2"}
MUTANTS: dict[str, tuple[Change, set[str]]] = {
    "one moment lost": (lost_moment, {"critic/q1"}),
    "the actor's state lost": (lost_state, {"actor"}),
    "the count of updates lost": (lost_count, CRITICS),
    "m and v exchanged": (swapped_moments, {"actor"}),
    "a moment transposed": (transposed_moment, {"actor"}),
    "another learning rate": (other_setting("lr", 1.01e-3), CRITICS),
    "another beta_2": (other_setting("betas/1", 0.99), CRITICS),
    "an epsilon that matters": (other_setting("eps", 1e-3), CRITICS),
    "the weight decay lost": (other_setting("weight_decay", 0), CRITICS),
}


@pytest.fixture(scope="module")
def decayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The torch sample with an L2 penalty on its critics."""
    target = tmp_path_factory.mktemp("decayed") / "agent.pt"
    return Path(changed(TORCH_SAMPLE, target, other_setting("weight_decay", 1e-2)))


@pytest.mark.usefixtures("numpy_only")
class TestVerify:
    def test_a_copy_goes_on_alike(self, decayed: Path, tmp_path: Path) -> None:
        copy = changed(decayed, tmp_path / "copy.pt", lambda *_: None)
        verification = verify.verify(str(decayed), copy, steps=4)
        assert verification.within
        assert verification.training is not None
        assert verification.training.algorithm == "TD3"
        assert {m.step for m in verification.training.moved} == {1, 2, 4}
        assert all(m.relative == 0 and not any(m.tensors) for m in verification.training.moved)
        assert verification.training.differences == ()

    @pytest.mark.parametrize("name", MUTANTS)
    def test_a_mutant_is_caught(self, decayed: Path, tmp_path: Path, name: str) -> None:
        change, wrong = MUTANTS[name]
        result = verify.verify(str(decayed), changed(decayed, tmp_path / "mutant.pt", change), steps=2)
        assert all(network.within for network in result.networks)  # nothing that a forward pass could see
        assert not result.within
        assert result.training is not None
        caught = {(m.name, m.dtype) for m in result.training.moved if not m.within}
        assert caught >= {(title, dtype) for title in wrong for dtype in update_comparison.BOUNDS}
        assert all(any(title in difference for difference in result.training.differences) for title in wrong)

    @pytest.mark.parametrize(
        ("kind", "setting", "value"),
        [
            ("rmsprop", "alpha", 0.9),
            ("adagrad", "eps", 1e-3),
            ("adamax", "betas/1", 0.9),
            ("adadelta", "rho", 0.5),
        ],
    )
    def test_other_optimizers_than_adam_train(
        self, tmp_path: Path, kind: str, setting: str, value: float
    ) -> None:
        file = changed(TORCH_SAMPLE, tmp_path / f"{kind}.pt", as_other(kind))
        verification = verify.verify(file, changed(file, tmp_path / "copy.pt", lambda *_: None), steps=2)
        assert verification.within
        assert verification.training is not None
        assert verification.training.algorithm == "TD3"
        slower = changed(file, tmp_path / "slower.pt", other_setting(setting, value))
        verification = verify.verify(file, slower, steps=2)
        assert verification.training is not None
        wrong = {update.name for update in verification.training.moved if not update.within}
        assert wrong >= CRITICS
        name = {"alpha": "rho", "eps": "epsilon", "betas/1": "beta_2"}.get(setting, setting)
        assert any(f"{name} of critic" in difference for difference in verification.training.differences)

    def test_a_learning_rate_that_decays_is_refused(self, tmp_path: Path) -> None:
        file = changed(TORCH_SAMPLE, tmp_path / "adagrad.pt", as_other("adagrad"))
        file = changed(file, tmp_path / "decaying.pt", other_setting("lr_decay", 0.1))
        with pytest.raises(UnsupportedError) as caught:
            verify.verify(file, file, steps=2)
        assert caught.value.found == "Adagrad"

    def test_lost_state_is_named_even_if_updates_agree(self, tmp_path: Path) -> None:
        still = changed(TORCH_SAMPLE, tmp_path / "still.pt", other_setting("lr", 0.0))
        verification = verify.verify(still, changed(still, tmp_path / "mutant.pt", lost_moment), steps=2)
        assert verification.training is not None
        assert all(m.within for m in verification.training.moved)
        assert len(verification.training.differences) == 1
        assert "critic/q1" in verification.training.differences[0]
        assert not verification.within

    def test_the_count_that_delays_the_actor_counts(self, decayed: Path, tmp_path: Path) -> None:
        def lost(leaves: Leaves, names: dict[str, TreePath]) -> None:
            result = leaves[names["total_it"]]
            assert isinstance(result, ValueLeaf)
            assert isinstance(result.value, int)
            leaves[names["total_it"]] = ValueLeaf(result.value + 1)

        result = verify.verify(str(decayed), changed(decayed, tmp_path / "late.pt", lost), steps=1)
        assert result.training is not None
        assert {m.name for m in result.training.moved if m.relative == np.inf} >= {"actor", "actor_target"}

    def test_targets_that_are_absent_are_copies_on_both_sides(self, tmp_path: Path, golden: Golden) -> None:
        def online(leaves: Leaves, names: dict[str, TreePath]) -> None:
            for name, path in names.items():
                if "target" in name:
                    leaves.pop(path)

        one = changed(TORCH_SAMPLE, tmp_path / "one.pt", online)
        verification = verify.verify(one, one, steps=1)
        assert verification.within
        golden("\n".join(verification.notes))

    def test_a_policy_alone_does_not_train(self, tmp_path: Path, golden: Golden) -> None:
        def alone(leaves: Leaves, names: dict[str, TreePath]) -> None:
            for name, path in names.items():
                if not name.startswith(("actor/", "total_it")):
                    leaves.pop(path)

        one = changed(TORCH_SAMPLE, tmp_path / "one.pt", alone)
        with pytest.raises(UsageError) as caught:
            verify.verify(one, one, steps=1)
        golden(caught.value)


@pytest.mark.usefixtures("numpy_only")
def test_a_conversion_keeps_the_optimizer_there_and_back(tmp_path: Path) -> None:
    """Epsilon means what it meant where the agent was trained, however often it is converted."""
    convert(str(TF_SAMPLE), str(tmp_path / "agent.pt"))
    convert(str(tmp_path / "agent.pt"), str(tmp_path / "ckpt-1"), to="tf")
    for first, second in ((TF_SAMPLE, "agent.pt"), ("agent.pt", "ckpt-1"), (TF_SAMPLE, "ckpt-1")):
        verification = verify.verify(str(tmp_path / first), str(tmp_path / second), steps=2)
        assert verification.within, verification.document()
        notes = [note for note in verification.notes if "epsilon" in note]
        assert len(notes) == ("agent.pt" in (first, second))
    convert(str(TORCH_SAMPLE), str(tmp_path / "ckpt-2"), to="tf")
    receipt = sidecar.load_sidecar(str(tmp_path / "ckpt-2"))
    assert receipt is not None
    assert receipt.source is not None
    assert receipt.source["epsilon"] == "corrected"


def test_what_a_conversion_was_told_is_that_of_its_own_source_alone(tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "agent.pt"), l2=["critic/**/kernel=0.005"])
    target = restore_agent(str(tmp_path / "agent.pt"))
    for name, own in ((TF_SAMPLE.name, True), ("ckpt-12500", False)):
        source = restore_agent(str(TF_SAMPLE.with_name(name)))
        assert (verify._with_stated_settings(source, target) is not source) == own


def test_a_penalty_that_the_conversion_was_told_of_is_the_sources_too(
    numpy_only: None, tmp_path: Path
) -> None:
    target = tmp_path / "agent.pt"
    convert(str(TF_SAMPLE), str(target), l2=["critic/**/kernel=0.005"])
    assert verify.verify(str(TF_SAMPLE), str(target), steps=2).within

    def lost(leaves: Leaves, names: dict[str, TreePath]) -> None:
        for name, path in names.items():
            if name.endswith("/weight_decay"):
                leaves[path] = ValueLeaf(0)

    mutant = changed(target, tmp_path / "mutant.pt", lost)
    known = sidecar.load_sidecar(str(target))
    assert known is not None
    facts = replace(known, target_sha256=digest(mutant).sha256)
    Path(sidecar.sidecar_path(mutant)).write_bytes(facts.encode())
    verification = verify.verify(str(TF_SAMPLE), mutant, steps=1)
    assert all(network.within for network in verification.networks)
    assert verification.training is not None
    assert {moved.name for moved in verification.training.moved if not moved.within} >= CRITICS


@pytest.mark.torch
@pytest.mark.tensorflow
def test_the_command_trains_both_in_their_frameworks(shared_workers: None, tmp_path: Path) -> None:
    for framework in FRAMEWORKS:
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    ran = in_process("verify", TF_SAMPLE, tmp_path / "x.pt", "--train-step", "--steps", "3", "--json")
    assert ran.status == 0, ran.err
    training = ran.json()["training"]
    assert training["algorithm"] == "TD3"
    assert training["steps"] == 3
    assert len(training["updates"]) == 6 * 2 * 2
    assert all(update["within"] for update in training["updates"])
    assert all(
        0 < update["relative"] < 1e-10 for update in training["updates"] if update["dtype"] == "float64"
    )
