"""`verify --all` names each way of getting a conversion wrong, by the part that is wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.commands import verify
from ckpttool.commands.convert import convert
from ckpttool.commands.diff import diff
from ckpttool.commands.digest import digest
from ckpttool.conversion.contents_comparison import RECEIPT, compare_contents
from ckpttool.conversion.options import ConversionOptions
from ckpttool.conversion.reconversion import ComparisonSide
from ckpttool.conversion.write import save
from ckpttool.core import (
    Checkpoint,
    Container,
    Leaf,
    MappingError,
    Tree,
    UnsupportedError,
    UsageError,
    ValueLeaf,
    index,
    key,
    sidecar,
)
from ckpttool.core import Path as TreePath
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.restore import (
    VerifiedSidecar,
    build_agent,
    read_any_sidecar,
    recognize_playable_agent,
)
from ckpttool.formats import open_checkpoint
from ckpttool.verification import output_comparison
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.mutants import Leaves
from tests.trees import leaf, torch_tree


@pytest.fixture(autouse=True)
def _numpy_only(monkeypatch: pytest.MonkeyPatch, shared_workers: None) -> None:
    """Run few observations, by numpy: what is tested here is the comparison."""
    monkeypatch.setattr(verify, "available_backend", lambda _: "numpy")
    draw = output_comparison.make_observations
    monkeypatch.setattr(verify, "make_observations", lambda network: draw(network, 30))


class Made(NamedTuple):
    """A source, its conversion and the word that wrote it."""

    source: str
    target: Path
    to: str


TARGETS = {
    "torch": "x.pt",
    "tf": "ckpt-1",
    "keras": "x.weights.h5",
    "tf1": "ckpt-1",
    "safetensors": "x.safetensors",
}


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """Return the conversion of one of the sources to a target, made once."""
    home = tmp_path_factory.mktemp("conversions")
    known: dict[tuple[str, str], Made] = {}

    def output(source: str, to: str) -> Made:
        if (source, to) not in known:
            folder = home / f"{source}-{to}"
            folder.mkdir()
            path, options = SOURCES[source](home)
            target = folder / TARGETS[to]
            assert convert(path, str(target), to=to, **options).written
            known[source, to] = Made(path, target, to)
        return known[source, to]

    return output


def general(home: Path) -> tuple[str, dict[str, Any]]:
    draw = np.random.default_rng(7)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    path = home / "model.pt"
    if not path.exists():
        entries = {
            "conv.weight": normal(4, 3, 3, 3),
            "conv.bias": normal(4),
            "bn.weight": normal(4),
            "bn.bias": normal(4),
            "bn.running_mean": normal(4),
            "bn.running_var": np.abs(normal(4)),
            "fc1.weight": normal(8, 8),
            "fc1.bias": normal(8),
            "fc2.weight": normal(8, 8),
            "fc2.bias": normal(8),
            "norm.weight": normal(8),
            "norm.bias": normal(8),
            "lstm.weight_ih_l0": normal(16, 8),
            "lstm.weight_hh_l0": normal(16, 4),
            "lstm.bias_ih_l0": normal(16),
            "lstm.bias_hh_l0": normal(16),
            "emb.weight": normal(10, 6),
        }
        save(torch_tree(entries), str(path))
    vectors = [f"{name}=no" for name in ("fc1", "fc2", "norm", "lstm/*")]
    return str(path), {"kinds": ["emb=embedding"], "flatten": vectors}


def averaged(home: Path) -> tuple[str, dict[str, Any]]:
    draw = np.random.default_rng(8)
    path = home / "averaged.pt"
    if not path.exists():
        entries = {
            f"{top}/{name}": draw.standard_normal(shape).astype(np.float32)
            for top in ("model", "ema")
            for name, shape in (
                ("l1.weight", (4, 4)),
                ("l1.bias", (4,)),
                ("l2.weight", (4, 4)),
                ("l2.bias", (4,)),
            )
        }
        save(torch_tree(entries), str(path))
    return str(path), {"weights": "raw"}


def sac(home: Path) -> tuple[str, dict[str, Any]]:
    sb3_files = pytest.importorskip("tests.sb3_files")
    return sb3_files.sac_agent(home / "sac.zip"), {}


SOURCES: dict[str, Callable[[Path], tuple[str, dict[str, Any]]]] = {
    "td3 of torch": lambda _: (str(TORCH_SAMPLE), {}),
    "td3 of tensorflow": lambda _: (str(TF_SAMPLE), {}),
    "sac of stable baselines": sac,
    "model": general,
    "averaged": averaged,
}

# Names of the same things in the files that are written.
TORCH = {
    "weight": "actor/l2/weight",
    "bias": "actor/l1/bias",
    "critic": "critic/q1/",
    "other critic": "critic/q2/",
    "target critic": "critic_target/q1/",
    "actor": "actor/",
    "target": "actor_target/",
    "m": "actor_optimizer/state/2/exp_avg",
    "v": "actor_optimizer/state/2/exp_avg_sq",
    "q1 m": "critic_optimizer/state/2/exp_avg",
    "q2 m": "critic_optimizer/state/8/exp_avg",
    "lr": "actor_optimizer/param_groups/0/lr",
    "updates": "total_it",
}
TF = {
    **{name: f"policy/{path}".replace("weight", "kernel") for name, path in TORCH.items()},
    "m": "policy/actor_optimizer/_momentums/2",
    "v": "policy/actor_optimizer/_velocities/2",
    "q1 m": "policy/critic_optimizer/_momentums/2",
    "q2 m": "policy/critic_optimizer/_momentums/8",
    "lr": "policy/actor_optimizer/_learning_rate",
    "step": "policy/actor_optimizer/_iterations",
}
KERAS = {
    **{name: path.removeprefix("policy/") for name, path in TF.items()},
    "m": "actor_optimizer/slots/m/actor/l2/kernel",
    "v": "actor_optimizer/slots/v/actor/l2/kernel",
    "q1 m": "critic_optimizer/slots/m/critic/q1/l2/kernel",
    "q2 m": "critic_optimizer/slots/m/critic/q2/l2/kernel",
    "lr": "actor_optimizer/learning_rate",
    "step": "actor_optimizer/iterations",
}
NAMES = {"torch": TORCH, "tf": TF, "keras": KERAS, "safetensors": TORCH}


class Tensors:
    """The leaves of a file by their names, to be changed."""

    def __init__(self, leaves: Leaves, names: dict[str, TreePath], known: dict[str, str]) -> None:
        self.leaves, self.names, self.known = leaves, names, known

    def path(self, name: str) -> TreePath:
        return self.names[self.known.get(name, name)]

    def change(self, name: str, of: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace an array, or a plain number, by what `of` makes of it."""
        path = self.path(name)
        entry = self.leaves[path]
        if isinstance(entry, ValueLeaf):
            value = of(np.asarray(entry.value)).item()
            self.leaves[path] = replace(entry, value=type(entry.value)(value))  # type: ignore[call-arg,arg-type]
        else:
            array = of(entry.array().copy())
            data = leaf(array, entry.key)
            self.leaves[path] = replace(entry, source=data.source, dtype=data.dtype, shape=data.shape)

    def array(self, name: str) -> np.ndarray:
        result = self.leaves[self.path(name)]
        assert isinstance(result, Leaf)
        return np.asarray(result.array())

    def swap(self, one: str, other: str) -> None:
        a, b = self.array(one), self.array(other)
        self.change(one, lambda _: b)
        self.change(other, lambda _: a)

    def below(self, prefix: str) -> Iterator[str]:
        prefix = self.known.get(prefix, prefix)
        return (name.removeprefix(prefix) for name in list(self.names) if name.startswith(prefix))

    def swap_all(self, one: str, other: str) -> None:
        for rest in self.below(one):
            self.swap(self.known.get(one, one) + rest, self.known.get(other, other) + rest)

    def copy_all(self, source: str, target: str) -> None:
        for rest in self.below(source):
            array = self.array(self.known.get(source, source) + rest)
            self.change(self.known.get(target, target) + rest, lambda _, tensors=array: tensors)

    def remove(self, name: str) -> None:
        del self.leaves[self.path(name)]


Change = Callable[[Tensors], object]
TD3: dict[str, tuple[Change, set[str]]] = {
    "a square kernel transposed": (lambda t: t.change("weight", lambda a: a.T), {"actor"}),
    "a bias zeroed": (lambda t: t.change("bias", lambda a: 0 * a), {"actor"}),
    "a value off by one unit in the last place": (
        lambda t: t.change(
            "weight",
            lambda a: np.where(np.arange(a.size).reshape(a.shape) == 5, np.nextafter(a, 9), a).astype("f4"),
        ),
        {"actor"},
    ),
    "weights rounded to half": (
        lambda t: t.change("weight", lambda a: a.astype("f2").astype("f4")),
        {"actor"},
    ),
    "weights stored as half": (lambda t: t.change("weight", lambda a: a.astype("f2")), {"actor"}),
    "twin critics swapped": (lambda t: t.swap_all("critic", "other critic"), {"critic/q1", "critic/q2"}),
    "one critic twice": (lambda t: t.copy_all("critic", "other critic"), {"critic/q2"}),
    "target for online network": (lambda t: t.copy_all("target", "actor"), {"actor"}),
    "online network for target": (lambda t: t.copy_all("critic", "target critic"), {"critic_target/q1"}),
    "actor and its target swapped": (lambda t: t.swap_all("actor", "target"), {"actor", "actor_target"}),
    "moments transposed": (lambda t: t.change("m", lambda a: a.T), {"actor_optimizer"}),
    "moments swapped": (lambda t: t.swap("m", "v"), {"actor_optimizer"}),
    "moments of the other critic": (lambda t: t.swap("q1 m", "q2 m"), {"critic_optimizer"}),
    "moments zeroed": (lambda t: t.change("v", lambda a: 0 * a), {"actor_optimizer"}),
    "learning rate changed": (lambda t: t.change("lr", lambda a: a * 2), {"actor_optimizer"}),
    "updates changed": (lambda t: t.change("updates", lambda a: a + 1), {"counters"}),
}
STEPS = {"count of steps changed": (lambda t: t.change("step", lambda a: a + 1), {"actor_optimizer"})}
SETTINGS: dict[str, tuple[Change, set[str]]] = {
    f"{name} changed": (
        lambda t, name=name, value=value: t.change(
            f"critic_optimizer/param_groups/0/{name}", lambda _: np.asarray(value)
        ),
        {"critic_optimizer"},
    )
    for name, value in (
        ("betas/0", 0.5),
        ("betas/1", 0.5),
        ("eps", 1e-3),
        ("weight_decay", 1),
        ("amsgrad", 1),
    )
}
SETTINGS["a setting removed"] = (
    lambda t: t.remove("critic_optimizer/param_groups/0/betas/1"),
    {"critic_optimizer"},
)
SAC: dict[str, tuple[Change, set[str]]] = {
    "log_std shifted": (lambda t: t.change("actor/log_std/bias", lambda a: a + 1), {"actor"}),
    "heads swapped": (lambda t: t.swap_all("actor/mu/", "actor/log_std/"), {"actor"}),
    "temperature changed": (lambda t: t.change("log_alpha", lambda a: a + 1), {"temperature"}),
    "temperature's rate changed": (
        lambda t: t.change("temperature_optimizer/param_groups/0/lr", lambda a: a * 2),
        {"temperature_optimizer"},
    ),
    "environment steps changed": (lambda t: t.change("num_timesteps", lambda a: a + 1), {"counters"}),
}
MODEL: dict[str, tuple[Change, set[str]]] = {
    "variance of a batch norm": (lambda t: t.change("bn/moving_variance", lambda a: a + 1), {"bn"}),
    "mean and variance swapped": (lambda t: t.swap("bn/moving_mean", "bn/moving_variance"), {"bn"}),
    "gamma and beta swapped": (lambda t: t.swap("norm/gamma", "norm/beta"), {"norm"}),
    "layers of one shape swapped": (lambda t: t.swap_all("fc1/", "fc2/"), {"fc1", "fc2"}),
    "a bias lost": (lambda t: t.remove("fc2/bias"), {"fc2"}),
    "a kernel's axes reversed": (lambda t: t.change("conv/kernel", lambda a: a[::-1]), {"conv"}),
    "rows of an embedding shifted": (
        lambda t: t.change("emb/embeddings", lambda a: np.roll(a, 1, 0)),
        {"emb"},
    ),
    "another order of gates": (
        lambda t: t.change("lstm/cell/recurrent_kernel", lambda a: np.roll(a, 4, 1)),
        {"lstm/cell"},
    ),
}
CASES = [
    pytest.param(
        source, to, change, parts, receipt, id=f"{source} to {to}: {name}{', receipt kept' * receipt}"
    )
    for source, to, table in (
        ("td3 of tensorflow", "torch", {**TD3, **SETTINGS}),
        ("td3 of torch", "tf", {**TD3, **STEPS}),
        ("td3 of torch", "keras", {name: TD3[name] for name in list(TD3)[::3]}),
        ("td3 of torch", "safetensors", {name: TD3[name] for name in list(TD3)[:10:3]}),
        ("sac of stable baselines", "torch", SAC),
        ("model", "tf", MODEL),
    )
    for number, (name, (change, parts)) in enumerate(table.items())
    # The options that the conversion of the model needs are in its receipt alone.
    for receipt in ((True,) if source == "model" else (False, True) if number % 8 == 0 else (False,))
]


def rewritten(output: Made, folder: Path, change: Change) -> str:
    """Write the conversion again with a change; its sidecar stays out."""
    tree = open_checkpoint(str(output.target)).tree
    leaves = dict(tree.leaves)
    names = {name: path for path, name in tree.names.items()}
    change(Tensors(leaves, names, NAMES.get(output.to, {})))
    target = folder / output.target.name
    save(Tree(leaves, tree.aliases, tree.containers), str(target), output.to)
    return str(target)


def with_receipt(output: Made, target: str, **facts: Any) -> str:
    """Put the conversion's sidecar beside a file, with the right digest and with other facts."""
    known = sidecar.load_sidecar(str(output.target))
    assert known is not None
    changed = replace(known, target_sha256=digest(target).sha256, **facts)
    Path(sidecar.sidecar_path(target)).write_bytes(changed.encode())
    residue = Path(f"{output.target}.ckpttool.residue.pt")
    if residue.exists():
        shutil.copy(residue, f"{target}.ckpttool.residue.pt")
    return target


@pytest.fixture
def no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no outputs of networks: the entries alone must name a mutant, and outputs take time."""

    def none(*_: object) -> verify.Verification:
        raise UnsupportedError("not run in this test")

    monkeypatch.setattr(verify, "_compare_networks", none)


def parts_of(verification: verify.Verification) -> set[str]:
    return {discrepancy.part for discrepancy in verification.discrepancies}


@pytest.mark.parametrize("to", ["torch", "tf", "keras", "safetensors"])
def test_a_conversion_passes_with_and_without_its_receipt(
    conversions: Callable[[str, str], Made], tmp_path: Path, to: str
) -> None:
    conversion = conversions("td3 of tensorflow" if to == "torch" else "td3 of torch", to)
    for target in (str(conversion.target), rewritten(conversion, tmp_path, lambda _: None)):
        verification = verify.verify(conversion.source, target, whole=True)
        assert verification.within, verification.discrepancies
        assert len(verification.networks) == 6
        assert diff(conversion.source, target).identical


@pytest.mark.parametrize(
    ("source", "to"), [("sac of stable baselines", "torch"), ("model", "tf"), ("model", "keras")]
)
def test_a_conversion_of_other_kinds_passes(
    conversions: Callable[[str, str], Made], source: str, to: str
) -> None:
    conversion = conversions(source, to)
    verification = verify.verify(conversion.source, str(conversion.target), whole=True)
    assert verification.within, verification.discrepancies
    assert diff(conversion.source, str(conversion.target)).identical


@pytest.mark.usefixtures("no_outputs")
@pytest.mark.parametrize(("source", "to", "change", "parts", "receipt"), CASES)
def test_each_mutant_is_named(
    conversions: Callable[[str, str], Made],
    tmp_path: Path,
    source: str,
    to: str,
    change: Change,
    parts: set[str],
    receipt: bool,
) -> None:
    conversion = conversions(source, to)
    mutant = rewritten(conversion, tmp_path, change)
    if receipt:
        with_receipt(conversion, mutant)
    verification = verify.verify(conversion.source, mutant, whole=True)
    assert not verification.within
    # What changes a shape or a type breaks the record of the source as well.
    assert parts_of(verification) - {RECEIPT} == parts


@pytest.mark.parametrize(
    ("source", "to"), [("td3 of torch", "tf"), ("td3 of tensorflow", "torch"), ("model", "tf")]
)
def test_diff_finds_mutants_too(
    conversions: Callable[[str, str], Made], tmp_path: Path, source: str, to: str
) -> None:
    conversion = conversions(source, to)
    table = MODEL if source == "model" else TD3
    for number, name in enumerate(list(table)[::4]):
        (folder := tmp_path / str(number)).mkdir()
        mutant = with_receipt(conversion, rewritten(conversion, folder, table[name][0]))
        assert not diff(conversion.source, mutant).identical, name


def test_the_average_for_the_trained_weights(conversions: Callable[[str, str], Made], tmp_path: Path) -> None:
    plan = conversions("averaged", "tf")
    ema = open_checkpoint(plan.source)
    names = {name: ema.tree[path] for path, name in ema.tree.names.items()}

    def average(tensors: Tensors) -> None:
        for name in [name for name in tensors.names if name.endswith(("kernel", "bias"))]:
            source = names["/".join(("ema", *name.split("/")[-2:])).replace("kernel", "weight")]
            assert isinstance(source, Leaf)
            array = source.array()
            tensors.change(name, lambda _, tensors=array: tensors.T)

    assert verify.verify(plan.source, str(plan.target), whole=True).within
    result = verify.verify(plan.source, with_receipt(plan, rewritten(plan, tmp_path, average)), whole=True)
    assert {discrepancy.what for discrepancy in result.discrepancies} == {"values"}
    assert len(result.discrepancies) == 4


PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "activations": ({"activations": ["tanh", "tanh"]}, "facts", "activations"),
    "action map": ({"head": "clip"}, "facts", "head"),
    "bounds": ({"action_high": [3.0]}, "facts", "action_high"),
    "environment": ({"env": {"id": "Hopper-v5", "gymnasium": "1.0"}}, "facts", "env/id"),
    "statistics": (
        {"obs_norm": {"mean": [0.0] * 3, "var": [1.0] * 3, "epsilon": 1e-8, "clip": 10.0}},
        "facts",
        "obs_norm",
    ),
    "rules": ({"rules": [{"source": "a", "target": "b", "rule": "keep"}]}, "receipt", "rules/a -> b"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_edited_sidecar_with_the_right_digest_is_named(
    conversions: Callable[[str, str], Made], tmp_path: Path, name: str
) -> None:
    conversion = conversions("td3 of tensorflow", "torch")
    facts, part, path = PLANTED[name]
    target = with_receipt(conversion, rewritten(conversion, tmp_path, lambda _: None), **facts)
    verification = verify.verify(conversion.source, target, whole=True)
    assert not verification.within
    assert (part, path) in {(row.part, row.path) for row in verification.discrepancies}


def test_edited_settings_in_a_sidecar_are_named(
    conversions: Callable[[str, str], Made], tmp_path: Path
) -> None:
    conversion = conversions("td3 of torch", "tf")
    known = sidecar.load_sidecar(str(conversion.target))
    assert known is not None
    assert known.optimizers is not None
    wrong = {name: {**optimizer, "beta_1": 0.5} for name, optimizer in known.optimizers.items()}
    target = with_receipt(conversion, rewritten(conversion, tmp_path, lambda _: None), optimizers=wrong)
    verification = verify.verify(conversion.source, target, whole=True)
    assert {(discrepancy.part, discrepancy.what) for discrepancy in verification.discrepancies} == {
        ("actor_optimizer", "setting"),
        ("critic_optimizer", "setting"),
    }


def test_a_sidecar_of_other_weights_is_a_discrepancy(
    conversions: Callable[[str, str], Made], tmp_path: Path
) -> None:
    conversion = conversions("td3 of tensorflow", "torch")
    mutant = rewritten(conversion, tmp_path, TD3["updates changed"][0])
    shutil.copy(sidecar.sidecar_path(str(conversion.target)), sidecar.sidecar_path(mutant))
    assert parts_of(verify.verify(conversion.source, mutant, whole=True)) == {"counters", RECEIPT}


def test_what_a_wrong_tensor_resembles(conversions: Callable[[str, str], Made], tmp_path: Path) -> None:
    plan = conversions("td3 of tensorflow", "torch")
    texts = []
    for number, name in enumerate(
        ("a square kernel transposed", "one critic twice", "weights rounded to half")
    ):
        (folder := tmp_path / str(number)).mkdir()
        verification = verify.verify(plan.source, rewritten(plan, folder, TD3[name][0]), whole=True)
        texts.append({str(discrepancy.resembles) for discrepancy in verification.discrepancies})
    transposed, twice, rounded = texts
    assert transposed == {"A's transposed"}
    assert {f"A's critic/q1/{n}/kernel" for n in range(3)} <= twice
    (kind,) = rounded
    assert kind.split()[-1] == "float16"


def test_without_all_the_verdict_says_what_was_not_compared(
    conversions: Callable[[str, str], Made], tmp_path: Path
) -> None:
    plan = conversions("td3 of tensorflow", "torch")
    verification = verify.verify(plan.source, rewritten(plan, tmp_path, TD3["moments swapped"][0]))
    assert verification.within
    assert any("actor_optimizer" in note for note in verification.not_compared)


def test_the_command_exits_with_one_and_lists_discrepancies(
    conversions: Callable[[str, str], Made], tmp_path: Path
) -> None:
    conversion = conversions("td3 of tensorflow", "torch")
    mutant = rewritten(conversion, tmp_path, TD3["learning rate changed"][0])
    ran = in_process("verify", conversion.source, mutant, "--all", "--json")
    assert ran.status == 1
    (only,) = ran.json()["contents"]["discrepancies"]
    assert (only["part"], only["path"], only["what"]) == (
        "actor_optimizer",
        "actor_optimizer/learning_rate",
        "kind",
    )
    shown = in_process("verify", conversion.source, mutant, "--all")
    assert shown.status == 1
    assert all(len(line) <= 80 for line in shown.out.splitlines() if "learning_rate" in line)
    assert in_process("verify", conversion.source, conversion.target, "--all", "--quiet").status == 0


def test_two_unrelated_models_are_not_the_same(tmp_path: Path) -> None:
    for name, width in (("a.pt", 4), ("b.safetensors", 5)):
        save(torch_tree({"l.weight": np.ones((width, 3), np.float32)}), str(tmp_path / name))
    verification = verify.verify(str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors"), whole=True)
    assert not verification.within
    assert [(row.path, row.what) for row in verification.discrepancies] == [("l/weight", "shape")]
    assert json.dumps(verification.document())


def trained(home: Path) -> tuple[str, dict[str, Any]]:
    """Return a model that is no agent, with its Adam and a count of epochs."""
    draw = np.random.default_rng(9)
    path = home / "trained.pt"
    if not path.exists():
        shapes = {"enc.weight": (8, 4), "enc.bias": (8,), "dec.weight": (8, 8), "dec.bias": (8,)}
        entries: dict[str, Any] = {
            f"model/{name}": draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }
        leaves = dict(torch_tree({**entries, "epoch": 3}).items())
        leaves |= adam(draw, list(shapes.values()))
        save(Tree(leaves, {}, {(key("optimizer"), key("param_groups")): Container("list")}), str(path))
    return str(path), {}


def adam(draw: np.random.Generator, shapes: list[tuple[int, ...]]) -> dict[TreePath, Leaf | ValueLeaf]:
    """Return the leaves of an Adam over parameters of these shapes, as torch numbers them."""
    slots: dict[TreePath, Leaf | ValueLeaf] = {}
    for number, shape in enumerate(shapes):
        state = (key("optimizer"), key("state"), key(number))
        arrays = {
            "step": np.array(5, np.float32),
            "exp_avg": draw.standard_normal(shape).astype(np.float32),
            "exp_avg_sq": np.abs(draw.standard_normal(shape)).astype(np.float32),
        }
        slots |= {(*state, key(name)): leaf(array, name) for name, array in arrays.items()}
    group = (key("optimizer"), key("param_groups"), index(0))
    settings: dict[str, Any] = {"lr": 3e-4, "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
    slots |= {(*group, key(name)): ValueLeaf(value) for name, value in settings.items()}
    slots |= {(*group, key("betas"), index(at)): ValueLeaf(beta) for at, beta in enumerate((0.9, 0.999))}
    slots |= {(*group, key("params"), index(number)): ValueLeaf(number) for number in range(len(shapes))}
    return slots


SOURCES["trained"] = trained
OPTIMIZER: dict[str, Change] = {
    "a moment": lambda t: t.change("optimizer/_momentums/0", lambda a: a[::-1]),
    "moments of layers of one shape": lambda t: t.swap("optimizer/_velocities/1", "optimizer/_velocities/3"),
    "the rate": lambda t: t.change("optimizer/_learning_rate", lambda a: a * 2),
    "the count": lambda t: t.change("optimizer/_iterations", lambda a: a + 1),
}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_the_optimizer_of_a_model_is_compared(
    conversions: Callable[[str, str], Made], tmp_path: Path, name: str
) -> None:
    plan = conversions("trained", "tf")
    assert verify.verify(plan.source, str(plan.target), whole=True).within
    verification = verify.verify(plan.source, rewritten(plan, tmp_path, OPTIMIZER[name]), whole=True)
    assert parts_of(verification) == {"optimizer"}


def test_a_conversion_back_passes_both_ways(conversions: Callable[[str, str], Made], tmp_path: Path) -> None:
    plan = conversions("trained", "tf")
    back = str(tmp_path / "back.pt")
    convert(str(plan.target), back)
    for one, other in ((plan.source, back), (str(plan.target), back), (back, str(plan.target))):
        verification = verify.verify(one, other, whole=True)
        assert verification.within, verification.discrepancies
        assert diff(one, other).identical


def test_what_was_dropped_is_declared_by_the_receipt_alone(tmp_path: Path) -> None:
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "ckpt-1")
    weights = {"l.weight": np.ones((2, 3), np.float32), "odd": np.ones((2, 2, 2), np.float32)}
    save(torch_tree({**weights, "l.bias": np.ones(2, np.float32)}), source)
    assert convert(source, target, to="tf", allow_missing=True).written
    result = diff(source, target)
    assert result.identical
    assert [(row.path, row.what) for row in result.declared if row.side == "left"] == [("odd", "dropped")]
    known = sidecar.load_sidecar(target)
    assert known is not None
    # A receipt cannot drop what a rule converts.
    hidden = replace(known, residue=[*known.residue, {"path": "l/bias"}])
    tree = open_checkpoint(target).tree
    leaves = {path: item for path, item in tree.items() if tree.names[path] != "l/bias"}
    (tmp_path / "b").mkdir()
    mutant = str(tmp_path / "b" / "ckpt-1")
    save(Tree(leaves, tree.aliases, tree.containers), mutant, "tf")
    Path(sidecar.sidecar_path(mutant)).write_bytes(
        replace(hidden, target_sha256=digest(mutant).sha256).encode()
    )
    assert diff(source, mutant).only_left == ("l/bias",)
    Path(sidecar.sidecar_path(target)).unlink()
    assert diff(source, target).only_left == ("odd",)


def test_a_converted_part_is_compared_with_that_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"actor": (5, 16, 8, 2), "critic": (7, 16, 8, 1)}
    weights = {
        f"{network}.l{n}.{name}": rng.normal(size=shape).astype(np.float32)
        for network, widths in sizes.items()
        for n, (one, other) in enumerate(pairwise(widths), 1)
        for name, shape in (("weight", (other, one)), ("bias", (other,)))
    }
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    leaves = {
        (key(name.partition(".")[0]), key(name.partition(".")[2])): leaf(weight)
        for name, weight in weights.items()
    }
    save(Tree(leaves), source, "torch")
    assert convert(source, target, to="torch", part="actor").written
    facts = AgentFacts(activations="relu", head="tanh", action_low=-1, action_high=1)
    for whole in (False, True):
        verification = verify.verify(source, target, facts=facts, whole=whole)
        assert verification.within, verification.discrepancies
        assert any("critic" in note for note in verification.not_compared)
    Path(sidecar.sidecar_path(target)).unlink()
    assert not verify.verify(source, target, facts=facts).within


# --- Every entry of a conversion -----------------------------------------------------------------------


class Sized(NamedTuple):
    """A conversion of which every entry is changed in turn, and how it is made."""

    to: str
    options: dict[str, Any]
    source: str = "td3 of torch"


EVERY = {
    "fujimoto's files": Sized("fujimoto", {"allow_missing": True}),
    "cleanrl's file": Sized("cleanrl", {"allow_missing": True}),
    "spinning up's file": Sized("spinningup", {"allow_missing": True}),
    "a part for keras": Sized("keras", {"part": "actor"}),
    "no optimizers": Sized("safetensors", {"optimizer": ["none"]}),
    "a model of one's own, rounded": Sized(
        "torch", {"like": "like_small:Halves", "cast": True, "part": "model"}, "named"
    ),
    "a part of one's own model": Sized("torch", {"like": "like_small:Named", "part": "model"}, "named"),
}


def named(home: Path) -> str:
    draw = np.random.default_rng(9)
    entries = {
        "model/fc.weight": draw.standard_normal((4, 4)).astype("f4"),
        "model/fc.bias": draw.standard_normal(4).astype("f4"),
        "other/scale": np.ones(3, "f4"),
    }
    path = str(home / "named.pt")
    save(torch_tree(entries), path)
    return path


def small_changes(tree: Tree) -> Iterator[tuple[str, Leaves]]:
    """Go through the entries of a tree with what a change, and a removal, makes of them."""
    for path, result in tree.items():
        name = tree.names[path]
        if name in ("save_counter",) or (isinstance(result, ValueLeaf) and not result.value):
            continue  # the writer's own count, and switches that are off
        changed = dict(tree.leaves)
        if isinstance(result, Leaf):
            array = result.array().copy()
            array.reshape(-1)[array.size // 2] += 1
            data = leaf(array, result.key)
            changed[path] = replace(result, source=data.source)
        else:
            number = isinstance(result.value, int | float) and not isinstance(result.value, bool)
            changed[path] = replace(result, value=result.value + 1 if number else f"{result.value}x")  # type: ignore[operator]
        yield name, changed
        rest = {at: item for at, item in tree.leaves.items() if at != path}
        yield (
            name,
            {
                at: replace(item, of=None) if isinstance(item, Leaf) and item.of == path else item
                for at, item in rest.items()
            },
        )


# The suite changes a few entries of three of them.
QUICK = ("fujimoto's files", "no optimizers", "a part of one's own model")


@pytest.mark.parametrize(
    ("case", "most"),
    [*((case, 8) for case in QUICK), *(pytest.param(case, 40, marks=pytest.mark.slow) for case in EVERY)],
)
def test_no_changed_entry_of_a_conversion_is_silent(
    case: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = EVERY[case]
    source = named(tmp_path) if expected.source == "named" else str(TORCH_SAMPLE)
    if "like" in expected.options:
        pytest.importorskip("torch")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    options = ConversionOptions(to=expected.to, verify=False, **expected.options)
    done = convert(source, str(tmp_path / "b"), options)
    assert done.written
    result = diff(source, done.target)
    assert [*result.changed, *result.only_left, *result.only_right] == []
    a, b = open_checkpoint(source), open_checkpoint(done.target)
    first, receipt = party(a, read_any_sidecar(a)), read_any_sidecar(b)
    assert not compare_contents(first, party(b, receipt)).discrepancies
    silent = []
    every = list(small_changes(b.tree))
    for name, leaves in every[:: 1 + len(every) // most]:
        aliases = {path: others for path, others in b.tree.aliases.items() if path in leaves}
        other = replace(b, tree=Tree(leaves, aliases, b.tree.containers))
        with contextlib.suppress(
            MappingError
        ):  # copies of one number that differ are an error that names them
            if not compare_contents(first, party(other, receipt)).discrepancies:
                silent.append(name)
    assert not silent


def party(checkpoint: Checkpoint, receipt: VerifiedSidecar) -> ComparisonSide:
    """Return one side as `verify --all` has it, whatever the digest of its weights."""
    agent = None
    with contextlib.suppress(MappingError, UnsupportedError, UsageError):
        binding = recognize_playable_agent(checkpoint)
        agent = (
            None if binding is None else build_agent(checkpoint, binding, VerifiedSidecar(receipt.sidecar))
        )
    return ComparisonSide.restored(checkpoint, agent, receipt)
