"""Hints work when they are followed: a table of situations, each a file, a command, and what its hint adds.

A step is text that the command prints. It is followed as it stands: options are added to the command, a whole
command takes its place. The last command must end with 0, and what it wrote is compared where numbers result.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import ckpttool
from ckpttool.cli import keywords
from ckpttool.cli.app import COMMANDS
from ckpttool.cli.tables import merge_default_sentences
from ckpttool.verification.inputs import InputResolver
from tests import golden_texts, hint_walks, refusals
from tests.conftest import ROOT, TORCH_SAMPLE, Ran, in_process

torch = pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")
nn = torch.nn
pytestmark = pytest.mark.torch

Make = Callable[[Path], object]
Check = Callable[[Path], object]
NIGHTLY = os.environ.get("CKPTTOOL_HINTS") == "1"


@dataclass(frozen=True)
class Situation:
    """A command on files, what of its output is followed, in turn, and how the result is judged.

    `words` replace the placeholders of a step (HEADS, LOW, ...).
    """

    name: str
    make: Make
    command: str
    steps: tuple[str, ...]
    check: Check = lambda folder: None
    words: Mapping[str, str] = field(default_factory=dict)


# --- Files ----------------------------------------------------------------------------------------------


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def tensors(*rows: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: torch.from_numpy(normal(*shape)) for name, shape in rows}


def saved(**rows: tuple[int, ...]) -> Make:
    """Write a state_dict with tensors of these names (two underscores are a dot) and shapes."""
    return lambda folder: torch.save(
        tensors(*((name.replace("__", "."), shape) for name, shape in rows.items())), folder / "in.pt"
    )


def arrays(**rows: tuple[int, ...]) -> Make:
    return lambda folder: np.savez(
        folder / "in.npz", **{name.replace("__", "."): normal(*shape) for name, shape in rows.items()}
    )


OWN = arrays(l1__weight=(5, 32), l1__bias=(32,), l2__weight=(32, 3), l2__bias=(3,))
SHORT = arrays(l1__W=(5, 32), l1__b=(32,), l2__W=(32, 3), l2__b=(3,))
COUNTED = arrays(W1=(4, 4), b1=(4,), W2=(4, 4), b2=(4,))
SQUARE = arrays(l1__weight=(32, 32), l1__bias=(32,), l2__weight=(32, 3), l2__bias=(3,))
WORDS = saved(fc1_weight=(32, 8), fc1_bias=(32,), fc2_weight=(4, 32), fc2_bias=(4,))
POLICY = saved(
    fc1__weight=(32, 3), fc1__bias=(32,), fc2__weight=(32, 32), fc2__bias=(32,), mu__weight=(1, 32)
)


WIDE = saved(fc1__weight=(32, 7), fc1__bias=(32,), fc2__weight=(32, 32), fc2__bias=(32,), mu__weight=(2, 32))


def gan(folder: Path) -> None:
    def net(*sizes: int) -> dict[str, Any]:
        return nn.Sequential(nn.Linear(*sizes[:2]), nn.ReLU(), nn.Linear(*sizes[1:])).state_dict()

    kept = {"generator": net(16, 32, 64), "discriminator": net(64, 32, 1), "fixed_noise": torch.ones(4, 16)}
    torch.save({**kept, "epoch": 3}, folder / "in.pt")


def trained(optimizer: type[Any], **options: Any) -> Make:
    def make(folder: Path) -> None:
        net = nn.Linear(4, 3)
        own = optimizer(net.parameters(), **options)
        net(torch.ones(2, 4)).sum().backward()
        own.step()
        torch.save({"model": net.state_dict(), "optimizer": own.state_dict()}, folder / "in.pt")
        torch.save(net.state_dict(), folder / "net.pt")
        torch.save(own.state_dict(), folder / "net_optimizer.pt")

    return make


def whole(make: Callable[[], Any]) -> Make:
    return lambda folder: torch.save(make().state_dict(), folder / "in.pt")


def convolved() -> Any:
    # Of 4 x 5 places: only a square is assumed to be an image of few channels.
    return nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "fc": nn.Linear(80, 10)})


def attention() -> Any:
    return nn.ModuleDict({"attn": nn.MultiheadAttention(16, 4), "fc": nn.Linear(16, 3)})


def weight_normed() -> Any:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 2))


class OwnLinear(nn.Module):  # type: ignore[misc]
    """A class of a program's own, with the tensors of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4))


def numbered(folder: Path) -> None:
    """Write layers with names of their own, as Keras writes a subclassed model's."""
    with h5py.File(folder / "in.weights.h5", "w") as file:
        file["fc/vars/0"] = normal(5, 7)
        file["dw/vars/0"] = normal(3, 3, 3, 1)
        file["dw/vars/1"] = normal(3)
        for number, shape in enumerate(((7, 4), (4,))):
            file[f"out/vars/{number}"] = normal(*shape)


def own_class(folder: Path) -> None:
    torch.save(nn.ModuleDict({"a": OwnLinear(), "fc": nn.Linear(4, 3)}), folder / "in.pt")


def two_policies(folder: Path) -> None:
    POLICY(folder)
    policy = torch.load(folder / "in.pt", weights_only=True)
    torch.save(
        {"left": policy, "right": {name: 2 * value for name, value in policy.items()}}, folder / "in.pt"
    )


def other_statistics(folder: Path) -> None:
    POLICY(folder)
    policy = torch.load(folder / "in.pt", weights_only=True)
    kept = {"mean": torch.zeros(5), "var": torch.ones(5)}
    torch.save({"actor": policy, "running_mean_std": kept}, folder / "in.pt")


def statistics_beside(folder: Path) -> None:
    POLICY(folder)
    np.savez(folder / "obs_rms.npz", mean=np.ones(3), var=np.full(3, 2.0), count=10.0)


def sample(folder: Path) -> None:
    (folder / "in.pt").write_bytes(TORCH_SAMPLE.read_bytes())


def discrete(folder: Path) -> None:
    """Write a PPO agent of discrete actions under the names that layout td3_tf has."""
    sizes = {"actor": (4, 64, 2), "critic": (4, 64, 1)}
    layers = {
        name: nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)) for name, (a, b, c) in sizes.items()
    }
    torch.save(nn.ModuleDict(layers).state_dict(), folder / "ppo.pt")
    ckpttool.convert(folder / "ppo.pt", folder / "in.weights.h5")


def exists(folder: Path) -> None:
    WORDS(folder)
    (folder / "out.npz").write_bytes(b"")


def rows_of_hdf5(folder: Path) -> None:
    with h5py.File(folder / "in.h5", "w") as file:
        for number, shape in enumerate(((5, 32), (32,), (32, 3), (3,))):
            file[str(number)] = normal(*shape)


# --- Judgement ------------------------------------------------------------------------------------------


def written(folder: Path) -> list[np.ndarray]:
    """Return the arrays of the file that was written, as its own library reads it."""
    arrays: list[np.ndarray] = []
    if (folder / "out.pt").exists():
        return [value.numpy() for value in torch.load(folder / "out.pt", weights_only=True).values()]
    with h5py.File(folder / "out.weights.h5") as file:
        file.visititems(lambda _, path: arrays.append(path[()]) if isinstance(path, h5py.Dataset) else None)
    return arrays


def holds(*expected: np.ndarray) -> Check:
    """Return a test that the written file has exactly these arrays, whatever they are called."""

    def check(folder: Path) -> None:
        arrays = written(folder)
        assert len(arrays) == len(expected), [array.shape for array in arrays]
        for array in expected:
            assert any(array.shape == one.shape and np.array_equal(array, one) for one in arrays), array.shape

    return check


LAYERS = (normal(32), normal(3))
DENSE = holds(normal(5, 32), normal(32, 3), *LAYERS)
LINEAR = holds(normal(5, 32).T, normal(32, 3).T, *LAYERS)
JOINED = holds(normal(32, 8).T, normal(4, 32).T, normal(32), normal(4))

H5, PT = "convert in.pt out.weights.h5", "out.pt"
OPTIONS = "--env Pendulum-v1 --episodes 1"
FACTS = "--activation relu --head tanh"
MISSING = ("--activation NAME", "--head NAME")
# What the screen of a command adds to assumptions.
OVERRIDE = "--activation NAME, --head NAME"
VALUES = {"--activation NAME": "--activation relu", "--head NAME": "--head tanh"}
SITUATIONS = [
    Situation(
        "discrete actions under continuous names",
        discrete,
        "eval in.weights.h5 --env CartPole-v1",
        ("--layout none", "--activation NAME"),
        words={"--activation NAME": "--activation tanh"},
    ),
    Situation("x@W to Keras", OWN, "convert in.npz out.weights.h5", ("--from tf",), DENSE),
    Situation("x@W is PyTorch's", OWN, "convert in.npz out.weights.h5", ("--from torch",), DENSE),
    Situation("x@W to PyTorch", OWN, "convert in.npz out.pt", ("--from tf",), LINEAR),
    Situation("W and b", SHORT, "convert in.npz out.pt", ("--from tf",), LINEAR),
    Situation(
        "W and b of PyTorch",
        SHORT,
        "convert in.npz out.weights.h5",
        ("--from torch", "--kind 'l1=dense' --kind 'l2=dense'"),
        DENSE,
    ),
    Situation(
        "numbered arrays",
        COUNTED,
        "convert in.npz out.pt",
        ("--from tf",),
        holds(normal(4, 4).T, normal(4, 4).T, normal(4), normal(4)),
    ),
    Situation(
        "a square among x@W",
        SQUARE,
        "convert in.npz out.weights.h5 --layout none",
        ("--from torch", "--kind 'l1=dense_in_out'"),
        holds(normal(32, 32), normal(32), normal(32, 3), normal(3)),
    ),
    Situation("a layer in one word", WORDS, H5, ("--kind 'fc1=dense' --kind 'fc2=dense'",), JOINED),
    Situation(
        "a layer in one word beside others",
        saved(fc1_weight=(32, 8), fc1_bias=(32,), fc2__weight=(4, 32), fc2__bias=(4,)),
        H5,
        ("--kind 'fc1=dense'",),
        JOINED,
    ),
    Situation(
        "an embedding",
        saved(table__weight=(6, 6), fc__weight=(3, 6), fc__bias=(3,)),
        H5,
        ("--kind 'table=embedding'",),
        holds(normal(6, 6), normal(3, 6).T, normal(3)),
    ),
    Situation(
        "a matrix without a bias",
        saved(table__weight=(6, 6), fc__weight=(3, 6), fc__bias=(3,)),
        H5,
        ("--kind 'table=dense'",),
        holds(normal(6, 6).T, normal(3, 6).T, normal(3)),
    ),
    Situation("a flattened image", whole(convolved), H5, ("--flatten 'fc=20,4'",)),
    Situation("no flattened image", whole(convolved), H5, ("--flatten 'fc=no'",)),
    Situation("an attention", whole(attention), H5, ("--kind 'attn=attention:HEADS'",), words={"HEADS": "4"}),
    Situation("weight norm", whole(weight_normed), H5, ("--fold-weight-norm",)),
    Situation(
        "depthwise",
        whole(lambda: nn.ModuleDict({"d": nn.Conv2d(6, 6, 3, groups=6), "fc": nn.Linear(6, 2)})),
        H5,
        ("--kind 'd=depthwise'",),
    ),
    Situation(
        "layers whose variables are numbered",
        numbered,
        "convert in.weights.h5 out.pt",
        ("--kind 'fc=dense'", "--kind 'dw=depthwise'"),
    ),
    Situation("a class of one's own", own_class, H5, ("--kind 'a=dense'",)),
    Situation("noise of a GAN", gan, H5, ("--allow-missing",)),
    Situation("one network of two", gan, H5, ("--part generator",)),
    Situation(
        "an optimizer's file",
        trained(torch.optim.Adam),
        "convert net_optimizer.pt out.weights.h5",
        ("ckpttool convert net.pt out.weights.h5",),
    ),
    Situation("a target's word", WORDS, "convert in.pt out.npz --to nzp", ("--to npz",)),
    Situation(
        "a target's word and its suffix",
        WORDS,
        "convert in.pt out.npz --to keres --kind fc1=dense --kind fc2=dense",
        ("--to keras and the target out.h5",),
        words={"--to keras and the target": "ckpttool convert in.pt --kind fc1=dense --kind fc2=dense"},
    ),
    Situation(
        "tensors of no layer",
        saved(scale=(3,), shift=(3,)),
        H5,
        ("--to npz and the target out.weights.npz",),
        words={"--to npz and the target": "ckpttool convert in.pt"},
    ),
    Situation("a target that exists", exists, "convert in.pt out.npz", ("--force",)),
    Situation(
        "bounds for Stable-Baselines3",
        sample,
        "convert in.pt out.d3 --to d3rlpy",
        ("--bounds LOW HIGH",),
        words={"LOW": "-2", "HIGH": "2"},
    ),
    Situation(
        "bounds for ONNX",
        sample,
        "convert in.pt out.onnx",
        ("ckpttool convert in.pt out.onnx --to onnx --env Pendulum-v1", OVERRIDE),
        # The file is there, with the defaults.
        words={OVERRIDE: f"{FACTS} --force"},
    ),
    Situation(
        "bounds for ONNX of no known task",
        WIDE,
        f"convert in.pt out.onnx {FACTS}",
        ("--bounds LOW HIGH",),
        words={"LOW": "-2", "HIGH": "2"},
    ),
    Situation("a part", sample, "convert in.pt out.pt --part actr", ("--part actor",)),
    Situation(
        "the environment",
        sample,
        "eval in.pt --episodes 1",
        ("ckpttool eval in.pt --episodes 1 --env Pendulum-v1", OVERRIDE),
        words={OVERRIDE: FACTS},
    ),
    Situation("a lone policy", POLICY, f"eval in.pt {OPTIONS}", MISSING, words=VALUES),
    Situation("two networks", two_policies, f"eval in.pt {OPTIONS} {FACTS}", ("--network left",)),
    Situation(
        "statistics beside", statistics_beside, f"eval in.pt {OPTIONS} {FACTS}", ("--obs-norm obs_rms.npz",)
    ),
    Situation(
        "statistics of another size",
        other_statistics,
        f"eval in.pt {OPTIONS} {FACTS}",
        ("ckpttool convert in.pt OUT.pt --to torch --part actor",),
        words={"OUT": "out"},
    ),
    Situation(
        "an agent's facts for ONNX", POLICY, "convert in.pt out.onnx --env Pendulum-v1", MISSING, words=VALUES
    ),
    Situation("another network", two_policies, f"eval in.pt {OPTIONS} {FACTS}", ("--network right",)),
    Situation("a doctor's finding", POLICY, "doctor in.pt --env Pendulum-v1", MISSING, words=VALUES),
    Situation("a pattern", sample, "stats in.pt --glob actr/**", ("--glob 'actor/**'",)),
]


# --- Models of the user's own ---------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn

def dense(**layers):
    return nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in layers.items()})

class Made(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

def mlp(): return Made(l1=nn.Linear(5, 32), l2=nn.Linear(32, 3))
def square(): return Made(l1=nn.Linear(32, 32), l2=nn.Linear(32, 3))
def words(): return Made(fc1=nn.Linear(8, 32), fc2=nn.Linear(32, 4))
def heads(): return Made(mean=nn.Linear(4, 4), scale=nn.Linear(4, 4))
def half(): return Made(fc=nn.Linear(4, 3)).half()
def linear(): return nn.Linear(4, 3)
def towers(): return Made(left=nn.Linear(4, 4), right=nn.Linear(4, 4))
def separable():
    return Made(dw=nn.Conv2d(3, 6, 3, groups=3, bias=False), pw=nn.Conv2d(6, 8, 1))
"""


def twins(folder: Path) -> None:
    rows = [(f"{side}.{name}", shape) for side in ("left", "right") for name, shape in TOWER]
    values = tensors(*rows)
    torch.save({name: value * (1 + ("right" in name)) for name, value in values.items()}, folder / "in.pt")


TOWER = (("weight", (4, 4)), ("bias", (4,)))


def crossed(folder: Path) -> None:
    contents = torch.load(folder / "out.pt", weights_only=True)
    assert torch.equal(contents["scale.weight"] * 2, contents["mean.weight"])


def separable(folder: Path) -> None:
    with h5py.File(folder / "in.weights.h5", "w") as file:
        for number, shape in enumerate(((3, 3, 3, 2), (1, 1, 6, 8), (8,))):
            file[f"layers/separable_conv2d/vars/{number}"] = normal(*shape)
        file["layers/separable_conv2d"].attrs["name"] = "sep"


def in_two(folder: Path) -> None:
    contents = torch.load(folder / "out.pt", weights_only=True)
    kernel = normal(3, 3, 3, 2)
    expected = kernel.transpose(2, 3, 0, 1).reshape(6, 1, 3, 3)
    assert np.array_equal(contents["dw.weight"].numpy(), expected)
    assert np.array_equal(contents["pw.weight"].numpy(), normal(1, 1, 6, 8).transpose(3, 2, 0, 1))


LIKE = "convert in.{} out.pt --like models:{}"
FILLED = [
    Situation("x@W by --from tf", OWN, LIKE.format("npz", "mlp"), ("--from tf",), LINEAR),
    Situation("x@W by --from torch", OWN, LIKE.format("npz", "mlp"), ("--from torch",), LINEAR),
    Situation("W and b into a model", SHORT, LIKE.format("npz", "mlp"), ("--from tf",), LINEAR),
    Situation(
        "W and b of torch into a model",
        SHORT,
        LIKE.format("npz", "mlp"),
        ("--from torch", "--kind 'l1=dense' --kind 'l2=dense'"),
        LINEAR,
    ),
    Situation(
        "a square among x@W into a model",
        SQUARE,
        LIKE.format("npz", "square"),
        ("--from torch", "--kind 'l1=dense_in_out'"),
        holds(normal(32, 32).T, normal(32), normal(32, 3).T, normal(3)),
    ),
    Situation(
        "words into a model",
        WORDS,
        LIKE.format("pt", "words"),
        ("--kind 'fc1=dense' --kind 'fc2=dense'",),
        holds(normal(32, 8), normal(4, 32), normal(32), normal(4)),
    ),
    Situation(
        "twins by name",
        twins,
        LIKE.format("pt", "heads"),
        ("--match 'left=TARGET' --match 'right=TARGET'",),
        crossed,
        words={"left=TARGET": "left=scale", "right=TARGET": "right=mean"},
    ),
    Situation("half", saved(fc__weight=(3, 4), fc__bias=(3,)), LIKE.format("pt", "half"), ("--cast",)),
    Situation("an optimizer's state", trained(torch.optim.Adam), LIKE.format("pt", "linear"), ()),
    Situation(
        "another framework",
        twins,
        "convert in.pt out.weights.h5 --like models:towers",
        ("name the target out.weights.pt",),
        words={"name the target": "ckpttool convert in.pt --like models:towers"},
    ),
    Situation("a separable convolution", separable, LIKE.format("weights.h5", "separable"), (), in_two),
]


# --- Following ------------------------------------------------------------------------------------------


def printed(ran: Ran) -> str:
    return " ".join((ran.out + ran.err).split())


def follow(folder: Path, situation: Situation) -> Ran:
    """Run the command and what its hints add to it; return the last run."""
    situation.make(folder)
    (folder / "models.py").write_text(MODELS)
    words = shlex.split(situation.command)
    ran = in_process(*words, cwd=folder)
    for step in situation.steps:
        assert ran.status in (1, 2), f"nothing is refused before {step}"
        assert step in printed(ran), printed(ran)
        for name, value in situation.words.items():
            step = step.replace(name, value)
        more = shlex.split(step)
        if more[0] == "ckpttool":
            words = more[1:]
        else:
            # An option that is given again replaces what was wrong of it.
            positions = [at for at, word in enumerate(words) if word == more[0] and more[0] not in REPEATED]
            for at in reversed(positions):
                del words[at : at + 2]
            words += more
        ran = in_process(*words, cwd=folder)
    return ran


REPEATED = frozenset(("--kind", "--flatten", "--match", "--optimizer"))


# Each of these takes seconds.
_SLOW = pytest.mark.skipif(not NIGHTLY, reason="a minute: CKPTTOOL_HINTS=1 runs it")


@pytest.mark.parametrize(
    "situation",
    [
        *(pytest.param(item, id=item.name) for item in SITUATIONS),
        *(pytest.param(item, id=item.name, marks=_SLOW) for item in FILLED),
    ],
)
def test_a_hint_works_when_it_is_followed(situation: Situation, tmp_path: Path) -> None:
    ran = follow(tmp_path, situation)
    assert ran.status == 0, printed(ran)
    situation.check(tmp_path)


def split_keywords(text: str) -> list[str]:
    """Return the keywords in the text of a call's arguments; another text as it is."""
    try:
        call = cast(ast.Call, ast.parse(f"f({text})", mode="eval").body)
    except SyntaxError:
        return [text]
    return [ast.unparse(keyword) for keyword in call.keywords] or [text]


class PythonCall:
    """A command as a call of the public function, run in this process."""

    def __init__(self, command: str) -> None:
        self.text = keywords._translate_command(f"ckpttool {command}")
        call = cast(ast.Call, ast.parse(self.text, mode="eval").body)
        self.function = getattr(ckpttool, cast(ast.Attribute, call.func).attr)
        self.paths = [ast.unparse(argument) for argument in call.args]
        self.keywords = [ast.unparse(keyword) for keyword in call.keywords]

    def translate(self, text: str) -> str:
        return keywords._translate(text, keywords._keywords(self.function))

    def add(self, option: str) -> None:
        """Add options to the call, as its keywords; one that has a single value replaces it."""
        self.keywords = keywords._merge_keywords([*self.keywords, *split_keywords(self.translate(option))])

    def run(self) -> tuple[bool, str]:
        """Return whether the call succeeds, and the sentences of its error or its result."""
        words = ", ".join([*self.paths, *self.keywords])
        try:
            result = eval(f"ckpttool.{self.function.__name__}({words})", {"ckpttool": ckpttool})
        except ckpttool.CkpttoolError as error:
            return False, f"{error}\n{error.hint}"
        refused = not getattr(result, "written", True) or getattr(result, "findings", ())
        return not refused, refusals.sentences_of(result)


def follow_in_python(folder: Path, situation: Situation) -> None:
    """Run the command as a Python call, and add the keywords that its error or its result names."""
    situation.make(folder)
    (folder / "models.py").write_text(MODELS)
    call = PythonCall(situation.command)
    succeeded, shown = call.run()
    for step in situation.steps:
        if step == OVERRIDE:
            break
        assert not refusals.OPTION.search(shown), shown
        if step.startswith("ckpttool "):
            after = PythonCall(step.removeprefix("ckpttool "))
            named = [
                word for word in (*after.paths, *after.keywords) if word not in (*call.paths, *call.keywords)
            ]
        else:
            named = split_keywords(call.translate(step))
        for word in named:
            # The record that a field is in stands behind the fields.
            field = re.sub(r"^\w+=ckpttool\.[A-Z]\w+\((.*)\)$", r"\1", word)
            assert field in shown, (word, shown)
        for name, value in situation.words.items():
            step = step.replace(name, value)
        if step.startswith("ckpttool "):
            call = PythonCall(step.removeprefix("ckpttool "))
        else:
            call.add(step)
        succeeded, shown = call.run()
    assert succeeded, shown
    situation.check(folder)


@pytest.mark.filterwarnings("ignore:'like':DeprecationWarning")
@pytest.mark.parametrize(
    "situation",
    [pytest.param(item, id=item.name) for item in (*SITUATIONS, *(FILLED if NIGHTLY else ()))],
)
def test_a_hint_works_when_it_is_followed_in_python(
    situation: Situation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    follow_in_python(tmp_path, situation)


@pytest.mark.parametrize("situation", [pytest.param(item, id=item.name) for item in SITUATIONS])
def test_a_command_in_a_hint_is_not_refused_like_the_first(situation: Situation, tmp_path: Path) -> None:
    situation.make(tmp_path)
    ran = in_process(*shlex.split(situation.command), cwd=tmp_path)
    if ran.status == 2:
        refusals.follow(ran.err, tmp_path, in_process)


@pytest.mark.parametrize("file", sorted(golden_texts.FOLDER.glob("*.txt")), ids=lambda file: file.stem)
def test_no_hint_of_a_recorded_text_contains_a_guess(file: Path) -> None:
    for section, text in golden_texts.read(file).items():
        refusals.require_stated((section,), text)


def test_a_format_that_the_target_does_not_allow_is_found() -> None:
    def wrong(hint: str, target: str = "out.pt") -> list[str]:
        return refusals.contradicted_targets(hint, ("convert", "in.npz", target))

    assert wrong("use --to npz to copy all tensors unchanged, or --map FILE") == ["npz"]
    assert not wrong("use --to npz to copy all tensors unchanged", "out")
    assert not wrong("use --to torch or --to cleanrl")
    assert not wrong("use --to npz and the target out.npz")


def test_a_guess_in_a_hint_is_found() -> None:
    guesses = "ckpttool eval in.pt --env Pendulum-v1 --activation relu --head tanh"
    assert refusals.invented_values(guesses, "eval in.pt") == ["--activation relu", "--head tanh"]
    assert not refusals.invented_values(guesses, "eval in.pt --activation relu (the file states tanh)")
    assert not refusals.invented_values("add --head affine if it scales, --head unit_tanh if not", "")
    assert not refusals.invented_values("add --activation NAME (relu, tanh) and --bounds LOW HIGH", "")
    assert refusals.invented_values("use --flatten 'fc=5,5,4'", "") == ["--flatten fc=5,5,4"]


# --- What is refused at once, or needs no hint any more ---------------------------------------------------


class QNetwork(nn.Module):  # type: ignore[misc]
    """A network of values of discrete actions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 2)


@pytest.mark.parametrize("case", ["class", "file", "modules"])
def test_a_network_of_discrete_actions_needs_an_environment_of_them(case: str, tmp_path: Path) -> None:
    net, name = QNetwork(), "dqn.pt" if case == "file" else "in.pt"
    both = {"q_network": net.state_dict(), "target_network": net.state_dict()}
    torch.save({"class": net, "file": net.state_dict(), "modules": both}[case], tmp_path / name)
    words = ("eval", name, "--activation", "relu", "--episodes", "1", "--json", "--env")
    ran = in_process(*words, "CartPole-v1", cwd=tmp_path)
    assert ran.status == 0, printed(ran)
    assert any("argmax" in sentence for sentence in ran.json()["assumed"])
    ran = in_process(*words, "Pendulum-v1", cwd=tmp_path)
    assert (ran.status, ran.json()["error"]["kind"]) == (2, "environment")


class Skip(nn.Module):  # type: ignore[misc]
    """A sum of two layers' outputs, which a chain of the weights does not compute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.a(x))
        return self.c(h + torch.relu(self.b(h)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hint_names_files_as_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    torch.jit.script(Skip()).save(tmp_path / "skip.pt")
    for target in ("far/s.npz", "s.npz"):
        assert in_process("convert", "skip.pt", target, cwd=tmp_path).status == 0
    (hint,) = refusals.hints_of(in_process("verify", "skip.pt", "far/s.npz", cwd=tmp_path).err)
    assert hint == "ckpttool verify skip.pt far/s.npz --like-b MODULE:FACTORY"
    # No file records where the source is; one that lies beside its target is found.
    for target, source in (("far/s.npz", "SOURCE"), ("s.npz", "skip.pt")):
        ran = in_process("eval", target, "--env", "CartPole-v1", cwd=tmp_path)
        assert ran.status == 2
        assert f"ckpttool eval {source} --env ID" in printed(ran)
        assert "skip.pt" in printed(ran)


# Commands that need the policy's action map, each with a word for the file.
PLAYED = (
    ("eval", "{}", "--episodes", "1"),
    ("convert", "{}", "out.onnx"),
    ("convert", "{}", "out.pt", "--code", "out.py"),
    ("verify", "{}", "in.pt"),
    ("doctor", "{}"),
)


# `doctor` looks at a network without a layout as a policy only where an option states so.
@pytest.mark.parametrize(
    ("words", "recorded"), [*((words, False) for words in PLAYED), *((words, True) for words in PLAYED[:4])]
)
def test_a_discrete_environment_leaves_only_the_activations_open(
    words: tuple[str, ...], recorded: bool, tmp_path: Path
) -> None:
    torch.save(QNetwork().state_dict(), tmp_path / "in.pt")
    env, file = ("--env", "CartPole-v1"), "in.pt"
    if recorded:
        file = "copy.pt"
        assert in_process("convert", "in.pt", file, *env, cwd=tmp_path).status == 0
    words = tuple(word.format(file) for word in (*words, *(() if recorded else env)))
    ran = in_process(*words, "--json", cwd=tmp_path)
    document = ran.json()
    hints = [document["error"]["hint"]] if ran.status == 2 else [f["fix"] for f in document["findings"]]
    assert len(hints) == 1
    assert "--activation" in hints[0]
    assert "--head" not in hints[0]
    ran = in_process(*words, "--activation", "relu", cwd=tmp_path)
    assert ran.status == 0, printed(ran)
    assert "override with --head" not in printed(ran)


@pytest.mark.parametrize("words", PLAYED[1:3], ids=" ".join)
def test_an_export_of_an_environment_chooses_as_eval_does(words: tuple[str, ...], tmp_path: Path) -> None:
    torch.save(QNetwork().state_dict(), tmp_path / "in.pt")
    facts, seeds = ("--env", "CartPole-v1"), ("--episodes", "3", "--json")
    words = (*(word.format("in.pt") for word in words), *facts, "--activation", "relu")
    assert in_process(*words, cwd=tmp_path).status == 0
    expected = in_process("eval", "in.pt", *facts, "--activation", "relu", *seeds, cwd=tmp_path).json()
    # Nothing is left to state.
    assert in_process("eval", words[2], *seeds, cwd=tmp_path).json()["returns"] == expected["returns"]


@pytest.mark.parametrize("words", PLAYED[:3], ids=" ".join)
def test_a_map_of_continuous_actions_is_left_out_in_a_discrete_environment(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    torch.save(QNetwork().state_dict(), tmp_path / "in.pt")
    facts = ("--env", "CartPole-v1", "--activation", "relu")
    words = (*(word.format("in.pt") for word in words), *facts)
    error = in_process(*words, "--head", "tanh", "--json", cwd=tmp_path).json()["error"]
    assert error["kind"] == "environment"
    assert "leave out --head" in error["hint"]
    assert in_process(*words, cwd=tmp_path).status == 0


@pytest.mark.parametrize("make", [DOTTED := arrays(l1__kernel=(5, 32), l1__bias=(32,)), rows_of_hdf5])
@pytest.mark.parametrize("target", ["out.weights.h5", "out-1"])
def test_arrays_become_layers_of_objects(make: Make, target: str, tmp_path: Path) -> None:
    make(tmp_path)
    source = "in.npz" if make is DOTTED else "in.h5"
    to = "keras" if target.endswith("h5") else "tf"
    ran = in_process("convert", source, target, "--to", to, "--json", cwd=tmp_path)
    assert ran.status == 0, printed(ran)
    names = {Path(row["target"]).name for row in ran.json()["mapped"]}
    assert names == {"kernel", "bias"} or names == {"0", "1"}
    assert bool(ran.json()["assumed"]) is (make is rows_of_hdf5)


def test_defaults_of_optimizers_are_one_sentence() -> None:
    def text(name: str) -> list[str]:
        rest = "the checkpoint does not hold it)"
        facts = (("rho", 0.9, "Keras"), ("weight_decay", 0, "torch"))
        return [f"{name} {what} = {value} (default of {whose}; {rest}" for what, value, whose in facts]

    joined = merge_default_sentences(["first", *text("one"), *text("two"), "last"])
    assert [joined[0], joined[-1], len(joined)] == ["first", "last", 3]
    assert all(word in joined[1] for word in ("one", "two", "rho = 0.9", "weight_decay = 0"))
    assert merge_default_sentences(["first", "last"]) == ["first", "last"]


def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    POLICY(tmp_path)
    listed = os.listdir

    def refused(folder: str = ".") -> list[str]:
        if os.path.samefile(folder, tmp_path):
            raise PermissionError(13, "Permission denied", folder)
        return listed(folder)

    monkeypatch.setattr(os, "listdir", refused)
    ran = in_process("eval", "in.pt", *OPTIONS.split(), *FACTS.split(), "--json", cwd=tmp_path)
    entries = [entry for entry in ran.json()["ledger"] if entry["use"] == "cannot be known"]
    assert any(str(tmp_path) in str(entry) for entry in entries), ran.json()


# --- Refusals that are drawn -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@_SLOW
def test_hints_of_drawn_refusals_lead_on() -> None:
    paths = [*hint_walks.walks()]
    assert len(paths) == hint_walks.COUNT
    lost = [(path.end, path.steps) for path in paths if path.end in (hint_walks.FAILS, hint_walks.USELESS)]
    assert len(lost) <= hint_walks.COUNT // 10, lost


@pytest.mark.parametrize(
    ("hint", "end"),
    [
        ("add --env ID", hint_walks.FAILS),  # the same refusal again
        ("ckpttool inspect agent.pt", hint_walks.FAILS),
        ("add --unknown-option", hint_walks.USELESS),
        ("copy or download it again", hint_walks.LIST),
    ],
)
def test_a_hint_that_leads_nowhere_is_found(
    hint: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_walks, "_run", lambda *_: Ran(2, "", f"ckpttool: refused\nhint: {hint}\n"))
    path = hint_walks.walk("eval", ["eval", "agent.pt"], tmp_path)
    assert path is not None
    assert path.end == end


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_of_another_model_name_the_conversion(tmp_path: Path) -> None:
    hint_walks.write_files(tmp_path)
    words = ("verify", "policy.pt", "renamed.pt", "--like-a", "models:policy", "--like-b", "models:policy")
    ran = in_process(*words, "--input-shape", "3", cwd=tmp_path)
    (hint,) = refusals.hints_of(ran.err)
    (command,) = refusals.commands_of(hint)
    assert command[:2] == ["convert", "renamed.pt"]
    assert not (tmp_path / command[2]).exists()
    # It leads to the next option, which pairs layers of equal shapes.
    ran = in_process(*command, cwd=tmp_path)
    assert ran.status in (0, 1), printed(ran)
    # A prefix of TensorFlow is no file that PyTorch loads.
    words = ("verify", "ckpt-1", "policy.pt", "--like-a", "models:policy", "--like-b", "models:policy")
    ran = in_process(*words, "--input-shape", "3", cwd=tmp_path)
    (hint,) = refusals.hints_of(ran.err)
    assert [words[:2] for words in refusals.commands_of(hint)] == [["convert", "ckpt-1"]]


def test_a_name_in_a_hint_for_another_suffix_is_new(tmp_path: Path) -> None:
    OWN(tmp_path)
    (tmp_path / "out.h5").write_bytes(b"")
    ran = in_process("convert", "in.npz", "out.npz", "--to", "keras", "--from", "tf", cwd=tmp_path)
    (hint,) = refusals.hints_of(ran.err)
    named = hint.split()[-1]
    assert named.endswith(".h5")
    assert not (tmp_path / named).exists()


@pytest.mark.parametrize(
    ("a", "b", "shapes", "transpose", "option"),
    [
        ((3,), (4,), {}, None, None),  # no option makes these models comparable
        ((), (4,), {"": (3,)}, None, "--input-shape 4"),
        ((8, 8, 3), (3, 8, 8), {}, False, "leave out --no-transpose-inputs"),
        ((8, 8, 3), (8, 8, 3), {}, True, "leave out --transpose-inputs"),
    ],
)
def test_inputs_of_other_shapes_name_an_option_that_helps(
    a: tuple[int, ...],
    b: tuple[int, ...],
    shapes: dict[str, tuple[int, ...]],
    transpose: bool | None,
    option: str | None,
) -> None:
    def rows(shape: tuple[int, ...]) -> dict[str, Any]:
        inputs = [{"name": "x", "shape": list(shape), "dtype": "float32", "batch": None}] if shape else []
        return {"inputs": inputs, "channels": ""}

    resolver = InputResolver([rows(a), rows(b)], transpose)
    with pytest.raises(ckpttool.CkpttoolError) as caught:
        resolver.pairs(shapes)
    assert caught.value.hint == option or (option is not None and option in (caught.value.hint or ""))


# --- Templates ------------------------------------------------------------------------------------------

PARSERS = {command.name: command.parser() for command in COMMANDS}
# A word of a sentence that goes on behind a command: "ckpttool inspect FILE lists the paths".
SENTENCE = re.compile(r"[a-z]+[,.]?|[(:].*")


def templates(source: str) -> Iterator[str]:
    """Yield the texts of a program that are no docstrings; an inserted value is the word VALUE."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = list(ast.walk(tree))
    bodies = [node.body[0] for node in nodes if isinstance(node, documented) and node.body]
    skipped = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "VALUE" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def problem_of_command(text: str) -> str | None:
    """Return why the command at the start of a text would be refused whatever its values are."""
    name, *words = re.split(r"[;)\n]|, or ", text.replace("'", ""))[0].split()
    command, positional, value = PARSERS[name], 0, 0
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for word in words:
        option, equals, _ = word.rstrip(",;").partition("=")
        if value:
            value -= 1
        elif option in ("--help", "-h"):
            return None
        elif option.startswith("-") and option != "-":
            if option not in options:
                return f"{name} has no option {option}"
            value = 0 if equals or options[option].is_flag else options[option].nargs
        elif SENTENCE.fullmatch(word) or word in ("<", ">"):
            break
        else:
            positional += 1
            if word[-1] in ",;":
                break
    required = sum(param.param_type_name == "argument" and param.required for param in command.params)
    return None if positional >= required else f"{name} needs {required} arguments"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stats --glob 'actor/**'", "stats needs 1 arguments"),
        ("inspect lists the paths", "inspect needs 1 arguments"),
        ("convert VALUE", "convert needs 2 arguments"),
        ("digest VALUE --save saved.json", "digest has no option --save"),
        ("digest VALUE --check saved.json, or compare them", None),
        ("eval VALUE --bounds -1 1 --env ID", None),
    ],
)
def test_a_command_that_would_be_refused_is_found(text: str, problem: str | None) -> None:
    assert problem_of_command(text) == problem


def test_commands_in_messages_are_complete() -> None:
    """Commands that a message puts together from parts are followed above."""
    # The program completes "run ckpttool inspect to ..." by the path; the others describe a file.
    other = "(?<!`)(?<!written by )(?<!output of )(?!ckpttool inspect to )"
    command = re.compile(rf"{other}\bckpttool ((?:{'|'.join(PARSERS)})\b[^`]*)")
    refused = [
        f"{file.name}: {problem}: {match[0]}"
        for file in sorted((ROOT / "ckpttool").rglob("*.py"))
        for text in templates(file.read_text(encoding="utf-8"))
        for match in command.finditer(text)
        if (problem := problem_of_command(match[1]))
    ]
    assert "\n".join(refused) == ""
