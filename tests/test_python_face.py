"""The face in Python: handles by every name, slices that read little, frameworks' tensors, what is shown."""

from __future__ import annotations

import dataclasses
import doctest
import html
import html.parser
import importlib
import inspect
import io
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.pretty import pretty_repr

import ckpttool
from ckpttool.cli import keywords
from ckpttool.commands.inspect import inspect_path
from ckpttool.conversion.options import MOVED
from ckpttool.core import (
    Alias,
    Branch,
    Checksum,
    ChecksumError,
    File,
    Handle,
    Inline,
    Leaf,
    NameNotFoundError,
    Span,
    StridedView,
    TargetExistsError,
    TransformedSource,
    Tree,
    UnsupportedError,
    UsageError,
    ValueLeaf,
    attr,
    crc32,
    dtypes,
    key,
)
from tests import refusals, tensorflow_child
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE
from tests.golden_texts import Golden

KERNEL = "policy/actor/l1/kernel"
READ = [row.name for row in dtypes.TABLE if row.itemsize and row.name not in ("complex32", *dtypes.PACKED)]


@pytest.fixture(scope="module")
def sample() -> ckpttool.Checkpoint:
    return ckpttool.open(str(TF_SAMPLE))


@pytest.mark.parametrize("name", ["ckpttool", "ckpttool.core.checkpoint"])
def test_the_examples_of_the_docstrings_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 1
    assert not results.failed


class Palette:
    """A class instead of the name of one."""


# Plain words that follow an option in a sentence of the package; those that are values.
OPTION_WORDS = {
    word
    for file in (ROOT / "ckpttool").rglob("*.py")
    if file.parent.name != "cli"
    for text in re.findall(r'"([^"\n]*)"', file.read_text(encoding="utf-8"))
    for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]* ([a-z]+)\b(?![:/.])", text)
}
VALUES = {
    *("affine", "auto", "clip", "cpu", "device", "gymnasium", "identity", "keras", "none", "npz", "numpy"),
    *("onnx", "path", "safetensors", "tanh", "tf", "torch"),
}


# The public functions; some need a library besides NumPy.
FUNCTIONS = [name for name in ckpttool.__all__ if inspect.isfunction(getattr(ckpttool, name))]
NEEDED = {
    "evaluate": "gymnasium",
    "export": "onnx",
    "fill": "torch",
    "load_into": "torch",
    "plot": "matplotlib",
    "sweep": "gymnasium",
    "verify": "torch",
    "video": "imageio",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_public_function_has_an_example_that_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    monkeypatch.chdir(ROOT)
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(ckpttool, name), name, globs={})
    assert example.examples
    assert not doctest.DocTestRunner().run(example).failed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_describe_their_parameters(name: str) -> None:
    """Those of at most four parameters may do so in sentences."""
    function = getattr(ckpttool, name)
    parameters = list(inspect.signature(function).parameters)
    listed = re.findall(
        r"^    (\w+)(?: \(.*\))?:(?: |$)", inspect.getdoc(function).partition("\nArgs:\n")[2], re.MULTILINE
    )
    more = listed[len(parameters) :] if parameters[-1] == "further" else []  # which `further` may be
    assert [*parameters, *more] == listed or (not listed and len(parameters) <= 4)


def refused(name: str, *arguments: Any, **keywords: Any) -> ckpttool.CkpttoolError:
    with pytest.raises(ckpttool.CkpttoolError) as caught:
        getattr(ckpttool, name)(*arguments, **keywords)
    return caught.value


# What a public function refuses, and its hint as this function takes it.
HINTS = {
    "a target that exists": ("convert", (str(TORCH_SAMPLE), "FILE"), {}, "force=True"),
    "a field of a record": ("report", (str(TORCH_SAMPLE),), {"out": "FILE"}, "force=True"),
    "a suffix": ("convert", (str(TORCH_SAMPLE), "x.foo"), {}, "to="),
    "a format": ("convert", (str(TORCH_SAMPLE), "x.npz"), {"to": "pytorhc"}, "to='torch'"),
    "a suffix of an export": ("export", (str(TORCH_SAMPLE), "x.pt"), {}, "name the target"),
    "a name of code": ("fill", (str(TORCH_SAMPLE), "x.pt", "a.py"), {}, "like='a:NAME'"),
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("inspekt", "summary"),
        ("evaluat", "evaluate"),
        ("load", "load_agent"),
        ("inspect", "summary"),
        ("xyz", ""),
    ],
)
def test_a_wrong_name_of_a_function_has_a_hint(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(ckpttool, name)
    assert any(f"ckpttool.{meant}" in note for note in getattr(caught.value, "__notes__", ())) is bool(meant)


@pytest.mark.parametrize(
    ("name", "keywords", "hint"),
    [
        ("evaluate", {"episode": 2}, "protocol=ckpttool.Protocol(episodes=2)"),
        ("load_agent", {"activations": "tanh"}, "facts=ckpttool.AgentFacts(activations='tanh')"),
    ],
)
def test_a_wrong_keyword_has_the_record_of_the_one_like_it(
    name: str, keywords: dict[str, Any], hint: str
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(ckpttool, name)(str(TORCH_SAMPLE), **keywords)
    assert any(hint in note for note in caught.value.__notes__)


def test_the_hint_of_load_agent_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    shutil.copy(TORCH_SAMPLE, "agent.pt")
    error = refused("load_agent", "agent.pt")
    (call,) = refusals.calls_of(str(error.hint))
    assert call.startswith("ckpttool.load_agent(")
    assert eval(call, {"ckpttool": ckpttool}).act([1.0, 0.0, 0.0]).shape == (1,)
    assert "env='Pendulum-v1'" in str(refused("load_agent", "agent.pt", device="cpu").hint)


@pytest.mark.parametrize(("name", "arguments", "keywords", "hint"), HINTS.values(), ids=HINTS)
def test_hints_name_keywords(
    name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    (tmp_path / "x.npz").write_bytes(b"here")

    def local(value: object) -> object:
        return str(tmp_path / "x.npz") if value == "FILE" else value

    error = refused(name, *map(local, arguments), **{word: local(value) for word, value in keywords.items()})
    assert hint in str(error.hint)
    assert "--" not in f"{error} {error.hint}"
    assert error.__notes__ == [f"hint: {error.hint}"]


@pytest.mark.parametrize(
    ("function", "keyword", "expected"),
    [
        ("evaluate", {"episodes": 2}, "protocol=ckpttool.Protocol(episodes=2)"),
        ("load_agent", {"activation": "tanh"}, "facts=ckpttool.AgentFacts(activations='tanh')"),
        ("convert", {"episodes": 2}, None),
        ("convert", {"nothing": 2}, None),
    ],
)
def test_an_unknown_keyword_names_the_record_that_has_it(
    function: str, keyword: dict[str, Any], expected: str | None
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(ckpttool, function)("agent.pt", **keyword)
    notes = getattr(caught.value, "__notes__", [])
    assert [expected in note for note in notes] == [True] if expected else not notes


def test_an_unknown_name_is_compared_with_the_public_ones() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = ckpttool.evaluat
    assert caught.value.name == "evaluat"
    assert caught.value.obj is ckpttool
    for command, function in ckpttool.FUNCTIONS.items():
        with pytest.raises(AttributeError) as caught:
            getattr(ckpttool, command)
        assert f"ckpttool.{function}" in caught.value.__notes__[0]
        assert callable(getattr(ckpttool, function))


def test_a_hint_is_a_call_unless_the_refused_one_has_more(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    agent = str(tmp_path / "ddpg-Pendulum-v1.pt")
    ckpttool.convert(str(TORCH_SAMPLE), agent)
    os.remove(f"{agent}.ckpttool.json")
    facts = ckpttool.AgentFacts(activations="relu", head="tanh", action_low=-2, action_high=2)
    assert str(refused("evaluate", agent).hint) == f"ckpttool.evaluate({agent!r}, env='Pendulum-v1')"
    assert str(refused("evaluate", agent, facts=facts).hint) == "add env='Pendulum-v1'"


def test_words_behind_options_are_values_or_prose() -> None:
    """A new sentence about an option shows here whether its next word is taken for a value."""
    assert {word for word in OPTION_WORDS if keywords._OPTION.fullmatch(f"--x {word}")} == VALUES


# Without quotes, a list of names or text for people follows an option in the package's sentences.
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("convert", "--like writes only models", "like= writes only models"),
        ("convert", "--no-verify.", "verify=False."),
        ("convert", "--map FILE, or --from torch", "rules='FILE', or from_='torch'"),
        ("convert", "--optimizer none", "optimizer=['none']"),
        ("convert", "--kind 'a=dense' --kind 'b=dense'", "kinds=['a=dense', 'b=dense']"),
        ("load_into", "use --kind 'a=dense' --kind b=dense", "use kinds={'a': 'dense', 'b': 'dense'}"),
        ("load_into", "--fold-weight-norm --depth 2", "fold_weight_norm=True --depth 2"),
        ("verify", "ckpttool convert a b --like M:F", "ckpttool.fill('a', 'b', like='M:F')"),
        ("convert", "--like-args '{}'", "like=ckpttool.networks.ModelSpec('MODULE:FACTORY', {})"),
        ("convert", "--depth 2", "--depth 2"),
        ("verify", "--input-shape 3,32,32", "input_shapes=['3,32,32']"),
        ("verify", "--steps 3", "steps=3"),
        ("evaluate", "needs --head: none", "needs head=: none"),
        (
            "evaluate",
            "--bounds LOW HIGH",
            "facts=ckpttool.AgentFacts(action_low=LOW, action_high=HIGH)",
        ),
        ("evaluate", "--wrapper none", "protocol=ckpttool.Protocol(wrappers=['none'])"),
        ("diff", "ckpttool verify 'a b' c --like-b M:F", "ckpttool.verify('a b', 'c', like_b='M:F')"),
        (
            "diff",
            "x: ckpttool inspect a, or ckpttool eval a",
            "x: ckpttool.summary('a'), or ckpttool.evaluate('a')",
        ),
        ("diff", "run ckpttool limits", "run ckpttool limits"),
        ("diff", "ckpttool inspect a --depth 2", "ckpttool inspect a --depth 2"),
        ("diff", "ckpttool report a --out b --force", "ckpttool.report('a', out='b', force=True)"),
        ("diff", "ckpttool report --force a", "ckpttool report --force a"),
        ("diff", "ckpttool doctor a", "ckpttool.doctor('a')"),
        (
            "evaluate",
            "add --activation NAME (relu) and --head NAME (tanh), as",
            "add activations='NAME' (relu) and head='NAME' (tanh), as; in facts=ckpttool.AgentFacts(...)",
        ),
        (
            "diff",
            "ckpttool eval a --head tanh --env ID --activation relu --seed 3",
            "ckpttool.evaluate('a', env='ID', facts=ckpttool.AgentFacts(head='tanh', activations='relu'), "
            "protocol=ckpttool.Protocol(seed=3))",
        ),
    ],
)
def test_options_become_keywords(name: str, text: str, expected: str) -> None:
    error = ckpttool.CkpttoolError("", hint=text)
    keywords.use_keywords(error, getattr(ckpttool, name))
    assert error.hint == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_can_be_pickled(name: str) -> None:
    assert pickle.loads(pickle.dumps(getattr(ckpttool, name))) is getattr(ckpttool, name)


def test_every_function_takes_pathlib_paths(tmp_path: Path) -> None:
    target = tmp_path / "copy.npz"
    assert ckpttool.convert(TORCH_SAMPLE, target).written
    assert ckpttool.save(ckpttool.open(target).tree, tmp_path / "same.npz").path == str(tmp_path / "same.npz")
    assert len(ckpttool.check([TORCH_SAMPLE, target]).checkpoints) == 2
    assert ckpttool.report(target, out=tmp_path / "page.html").file == str(tmp_path / "page.html")
    assert not ckpttool.diff(target, tmp_path / "same.npz").changed


# Values of a wrong type that people pass.
WRONG: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "save a dict": ("save", ({"a": np.ones(3)}, "x.npz"), {}),
    "save a checkpoint": ("save", (ckpttool.open(str(TORCH_SAMPLE)), "x.npz"), {}),
    "film a number": ("video", (3,), {}),
    **{
        f"{name} {kind}": (name, (value, "x.npz")[: 2 if name in ("convert", "export", "verify") else 1], {})
        for name in (
            "check",
            "convert",
            "digest",
            "evaluate",
            "export",
            "report",
            "summary",
            "sweep",
            "verify",
        )
        for kind, value in (
            ("a checkpoint", ckpttool.open(str(TORCH_SAMPLE))),
            ("a number", 3),
            ("nothing", None),
            ("a list", [Path("a.pt"), 3]),
        )
    },
    "check a checkpoint by name": ("check", (), {"paths": ckpttool.open(str(TORCH_SAMPLE))}),
    "plot a path": ("plot", (str(TORCH_SAMPLE), "x.svg"), {}),
    **{
        name: (name.split()[0], (str(TORCH_SAMPLE), *more), keywords)
        for value, kind in ((object(), "an object"), (Palette, "a class"))
        for name, more, keywords in (
            (f"convert like {kind}", ("x.pt",), {"like": value}),
            (f"fill {kind}", ("x.pt", value), {}),
            (f"fill from {kind}", ("x.pt", "a:b"), {"like_source": value}),
            (f"verify {kind}", (str(TORCH_SAMPLE),), {"like_a": value, "like_b": "a:b"}),
        )
    },
}


@pytest.mark.filterwarnings("ignore:'like':DeprecationWarning")
@pytest.mark.parametrize(("name", "arguments", "keywords"), WRONG.values(), ids=WRONG)
def test_a_value_of_a_wrong_type_is_a_usage_error(
    name: str,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(refused(name, *arguments, **keywords), UsageError)
    assert not [*tmp_path.iterdir()]


def test_a_path_is_played_and_filmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("gymnasium", "imageio"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    film = ckpttool.video(TORCH_SAMPLE, width=64)
    assert film.file == f"{TORCH_SAMPLE.name}.gif"
    assert (tmp_path / film.file).stat().st_size > 1000
    assert isinstance(refused("video", TORCH_SAMPLE), TargetExistsError)


def test_looking_loads_no_numpy_no_framework_and_no_rich() -> None:
    program = (
        f"import sys, ckpttool; c = ckpttool.open({str(TF_SAMPLE)!r}); print(c[{KERNEL!r}][1:, 2]);"
        "repr(c), c._repr_html_(), c['policy/actor'], len(c), list(c), c.glob('**/kernel'), 'x' in c;"
        "print({'numpy', 'torch', 'tensorflow', 'rich', 'ml_dtypes'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert ran.stdout.splitlines() == [f"<Handle {KERNEL} float32[2] parameter>", "set()"]


# Names.


def test_a_handle_tells_what_the_listing_does(sample: ckpttool.Checkpoint) -> None:
    handle = sample[KERNEL]
    assert (handle.shape, handle.dtype, handle.role, handle.nbytes) == ((3, 64), "float32", "parameter", 768)
    assert (handle.ndim, handle.size, handle.trainable) == (2, 192, handle.leaf.trainable)
    assert handle.key == "policy/actor/l1/_kernel/.ATTRIBUTES/VARIABLE_VALUE"
    assert handle.aliases == ("policy/actor_optimizer/_trainable_variables/0",)
    assert np.array_equal(handle.numpy(), handle.leaf.array())
    assert sample["policy/total_it"].item() == 14000


@pytest.mark.parametrize(
    "name",
    [
        KERNEL,
        "policy.actor.l1.kernel",
        "policy/actor/l1/_kernel/.ATTRIBUTES/VARIABLE_VALUE",
        "policy/actor_optimizer/_trainable_variables/0",
        ".policy.actor.l1._kernel",
    ],
)
def test_every_name_of_a_tensor_finds_it(sample: ckpttool.Checkpoint, name: str) -> None:
    assert sample[name].name == KERNEL
    assert name in sample


def test_a_module_is_a_mapping(sample: ckpttool.Checkpoint) -> None:
    actor = sample["policy/actor"]
    assert isinstance(actor, Branch)
    assert sorted(actor) == sorted(f"l{n}/{name}" for n in (1, 2, 3) for name in ("kernel", "bias"))
    assert len(actor) == 6
    assert dict(actor.items()).keys() == actor.keys() == actor.tensors().keys()
    assert "l1" in actor
    assert "l1/kernel" in actor
    assert "l1.kernel" in actor
    assert "l9" not in actor
    assert 7 not in actor
    assert actor["l1"]["kernel"].name == KERNEL
    assert actor["l1/kernel"].name == actor["policy/actor/l1/_kernel/.ATTRIBUTES/VARIABLE_VALUE"].name
    assert actor.modules() == ("l1", "l2", "l3")
    assert not actor.plain()
    assert sample.module("policy/actor/").name == sample["policy"]["actor"].name == "policy/actor"
    # Weights that the optimizer lists once more are in its module too.
    assert sample["policy/actor_optimizer/_trainable_variables"].tensors()["0"].name == KERNEL


def test_the_whole_checkpoint_is_a_mapping(sample: ckpttool.Checkpoint) -> None:
    assert len(sample) == len(list(sample)) == len(sample.tree) == len(sample.keys())
    assert list(sample) == list(sample.tree.names.values())
    assert {name: handle.key for name, handle in sample.items()}[KERNEL] == sample.tensor(KERNEL).key
    assert all(isinstance(value, Handle) for value in sample.values())
    assert "policy/actor" in sample._ipython_key_completions_()


def test_a_pattern_gives_the_entries_that_match(sample: ckpttool.Checkpoint) -> None:
    assert list(sample.glob("actor/*/bias")) == [f"policy/actor/l{n}/bias" for n in (1, 2, 3)]
    assert list(sample["policy/critic"].glob("q1/**")) == [
        name for name in sample["policy/critic"] if name.startswith("q1/")
    ]
    assert sample.glob("nothing") == {}


def test_plain_values_are_values() -> None:
    checkpoint = ckpttool.open(str(TORCH_SAMPLE))
    assert checkpoint["total_it"] == 14000
    assert checkpoint["actor_optimizer/param_groups/0/lr"] == pytest.approx(1e-3)
    assert isinstance(checkpoint["actor.l1.weight"], Handle)
    assert checkpoint.root.plain()["total_it"] == 14000


def test_a_wrong_name_is_one_sentence_and_a_key_error(sample: ckpttool.Checkpoint, golden: Golden) -> None:
    with pytest.raises(KeyError) as caught:
        sample["policy/actor/l1/kernal"]
    assert isinstance(caught.value, NameNotFoundError)
    assert isinstance(caught.value, ckpttool.CkpttoolError)
    golden(str(caught.value))
    for name in ("actor/l1/kernel", "actor/l1/kernal", "policy/acto", "nothing like it"):
        with pytest.raises(NameNotFoundError) as caught:
            sample[name]
        golden(str(caught.value))
    with pytest.raises(NameNotFoundError) as caught:
        sample.tensor("policy/actor")
    golden(str(caught.value))
    with pytest.raises(NameNotFoundError) as caught:
        sample.module(KERNEL)
    golden(str(caught.value))
    with pytest.raises(TypeError) as caught:
        sample[3]  # type: ignore[index]
    golden(str(caught.value))
    with pytest.raises(NameNotFoundError) as caught:
        sample["policy/actor"]["l1/kernl"]
    golden(str(caught.value))


def named(*names: Any) -> Tree:
    leaves = {
        path: Leaf("float32", (), Inline(bytes(4)), ".".join(str(s.value) for s in path)) for path in names
    }
    return Tree(leaves)


def test_a_name_that_several_have_is_refused(golden: Golden) -> None:
    tree = named((attr("a"), key("b")), (key("a.b"),), (attr("c"),))
    root = Branch(tree)
    with pytest.raises(NameNotFoundError) as caught:
        root["a/b"]
    golden(str(caught.value))
    assert root["['a.b']"].leaf is tree[key("a.b"),]
    assert root["c"].name == "c"


def test_a_tensor_and_a_module_may_share_a_name() -> None:
    root = Branch(named((key("a"),), (key("a"), key("b"))))
    assert isinstance(root["a"], Handle)
    assert isinstance(root["a/"], Branch)
    assert list(root.module("a")) == ["b"]


def test_what_a_module_has_under_a_second_path_alone_is_in_it() -> None:
    first, second = (attr("x"), attr("w")), (attr("y"), attr("w"))
    tree = Tree(dict(named(first)), {first: (Alias(second),)})
    root = Branch(tree)
    assert list(root) == ["x/w"]
    assert root["y"]["w"].name == "x/w"
    assert list(root["y"]) == ["w"]


# Slices.


def sources(data: np.ndarray, file: Path) -> dict[str, Any]:
    """Return what lies in files in several ways, each with the same values."""
    raw = data.tobytes()
    file.write_bytes(b"before" + raw + b"after")
    span = Span(File.stamp(str(file)), 6, len(raw))
    turned = np.ascontiguousarray(data.T).tobytes()
    strides = tuple(int(np.prod(data.shape[:axis])) for axis in range(data.ndim))
    return {
        "inline": Inline(raw),
        "span": span,
        "checked": span._replace(checksum=Checksum("crc32", crc32(raw, 0))),
        "strided": StridedView(Inline(turned), data.itemsize, data.shape, strides, 0),
        "transformed": TransformedSource(Inline(raw), data.dtype.name, data.shape, Same()),
    }


class Same:
    """An operation that changes nothing."""

    def output(self, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        return array


def indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    def one(extent: int) -> st.SearchStrategy[Any]:
        whole = st.slices(extent)
        return st.one_of(whole, st.integers(-extent, extent - 1)) if extent else whole

    full = st.tuples(*map(one, shape))
    cut = st.integers(0, len(shape))
    return st.tuples(full, cut, cut).map(lambda f: (*f[0][: f[1]], ..., *f[0][max(f[1], f[2]) :]))


@given(st.data())
def test_a_slice_is_what_numpy_slices(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = data.draw(st.sampled_from(["float32", "int8", "complex64", "uint16"]))
    count = int(np.prod(shape))
    array = np.arange(count * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype).reshape(shape)
    folder = tmp_path_factory.getbasetemp()
    index = data.draw(indices(shape))
    again = None
    for name, source in sources(array, folder / "sliced.bin").items():
        part = Handle("x", Leaf(dtype, shape, source, "x"))[index]
        expected = array[index]
        assert part.shape == expected.shape, name
        assert part.numpy().tobytes() == np.ascontiguousarray(expected).tobytes(), name
        again = again or data.draw(indices(expected.shape))
        assert part[again].numpy().tobytes() == np.ascontiguousarray(expected[again]).tobytes(), name


def test_strings_are_sliced() -> None:
    words = [b"", b"a", b"bc", b"\xff" * 300, b"e", b"f"]
    data = b"".join(len(word).to_bytes(8, "little") + word for word in words)
    handle = Handle("x", Leaf("string", (2, 3), Inline(data), "x"))
    whole = np.array(words, object).reshape(2, 3)
    assert handle.numpy().tolist() == whole.tolist()
    assert handle[:, ::-2].numpy().tolist() == whole[:, ::-2].tolist()
    assert handle[1, 0].item() == b"\xff" * 300
    assert handle.nbytes == 0


def test_an_index_that_is_none_is_refused_as_numpy_does(golden: Golden) -> None:
    handle = Handle("x", Leaf("float32", (3, 4), Inline(bytes(48)), "x"))
    for wrong in (3, -4, (0, 4), (0, 0, 0)):
        with pytest.raises(IndexError):
            handle[wrong]
    with pytest.raises(IndexError, match="one"):
        handle[..., ...]
    for wrong in (None, [0, 1], np.array([0]), "a", 1.0, True):
        with pytest.raises(TypeError, match="numpy"):
            handle[wrong]
    assert [row.shape for row in handle] == [(4,)] * 3
    with pytest.raises(TypeError) as caught:
        iter(handle[0, 0])
    golden(str(caught.value))
    assert np.asarray(handle[np.int64(2)]).shape == (4,)


def test_a_slice_reads_what_it_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(1000 * 100, dtype=np.float32).reshape(1000, 100)
    handles = sources(array, tmp_path / "x")
    read: list[int] = []
    before = File.read
    monkeypatch.setattr(File, "read", lambda self, at, n: read.append(n) or before(self, at, n))
    plain = Handle("x", Leaf("float32", array.shape, handles["span"], "x"))
    assert np.array_equal(plain[10:20].numpy(), array[10:20])
    assert read == [10 * 400]
    assert np.array_equal(plain[10:20, 5].numpy(), array[10:20, 5])
    assert read[1] == 9 * 400 + 4
    # What one checksum covers is read, and checked, once; the first slice comes from that.
    checked = Handle("x", Leaf("float32", array.shape, handles["checked"], "x"))
    read.clear()
    for row in (10, 20, 30):
        assert np.array_equal(checked[row].numpy(), array[row])
    assert read == [array.nbytes, 400, 400]


def test_damage_outside_of_a_slice_is_seen_by_its_checksum(tmp_path: Path) -> None:
    array = np.arange(64, dtype=np.float32)
    source = sources(array, tmp_path / "x")["checked"]
    wrong = source._replace(checksum=Checksum("crc32", source.checksum.value ^ 1))
    with pytest.raises(ChecksumError):
        Handle("x", Leaf("float32", (64,), wrong, "x"))[1:3].numpy()


# Arrays and tensors.


def test_an_array_is_the_callers_own(sample: ckpttool.Checkpoint) -> None:
    first = sample[KERNEL].numpy()
    first[:] = 7
    assert not np.array_equal(sample[KERNEL].numpy(), first)
    assert sample[KERNEL][:0].numpy().shape == (0, 64)


def test_numpy_takes_handles(sample: ckpttool.Checkpoint) -> None:
    handle = sample[KERNEL]
    whole = handle.numpy()
    assert np.array_equal(np.asarray(handle), whole)
    assert np.asarray(handle, dtype=np.float64).dtype == np.float64
    assert np.array(handle, copy=True).flags.writeable
    assert np.array_equal(np.add(handle, 1.0), whole + 1)
    with pytest.raises(ValueError, match="copy"):
        np.array(handle, copy=False)


def of_type(name: str) -> Handle:
    generator = np.random.default_rng(3)
    data = generator.integers(0, 2 if name == "bool" else 4, 6 * dtypes.BY_NAME[name].itemsize, np.uint8)
    return Handle("x", Leaf(name, (2, 3), Inline(data.tobytes()), "x"))


@pytest.mark.parametrize("name", READ)
def test_every_type_with_numbers_is_an_array(name: str) -> None:
    array = of_type(name).numpy()
    assert array.shape == (2, 3)
    assert array.tobytes() == of_type(name).leaf.read()
    assert array.dtype == (
        getattr(ml_dtypes, name) if dtypes.BY_NAME[name].extension else dtypes.plain_name(name)
    )


@pytest.mark.torch
@pytest.mark.parametrize("name", [row.name for row in dtypes.TABLE if row.itemsize])
def test_every_type_of_torch_is_a_tensor(name: str) -> None:
    torch = pytest.importorskip("torch")
    handle = of_type(name)
    kind = getattr(torch, dtypes.BY_NAME[dtypes.plain_name(name)].torch or "", None)
    if kind is None or name in dtypes.PACKED:
        with pytest.raises(UnsupportedError, match=name):
            handle.torch()
        return
    tensor = handle.torch()
    assert tensor.dtype == kind
    assert bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) == handle.leaf.read()
    if name.startswith("float"):
        tensor.zero_()
        assert handle.torch().reshape(-1).view(torch.uint8).sum() > 0
    if name != "complex32":  # torch warns of an empty one
        assert handle[:, :0].torch().shape == (2, 0)
    assert handle[1, 2].torch("cpu").shape == ()


@pytest.mark.torch
def test_torch_has_no_strings() -> None:
    pytest.importorskip("torch")
    with pytest.raises(UnsupportedError, match="string"):
        Handle("x", Leaf("string", (), Inline(bytes(8)), "x")).torch()


def in_tensorflow(folder: Path) -> dict[str, Any]:
    del folder
    words = b"\x01" + bytes(7) + b"a" + bytes(8)
    outcomes: dict[str, Any] = {
        "string": Handle("x", Leaf("string", (2,), Inline(words), "x")).tf().numpy() == [b"a", b""]
    }
    outcomes["string"] = bool(all(outcomes["string"]))
    for row in dtypes.TABLE:
        if row.itemsize:
            try:
                tensor = of_type(row.name).tf()
                same = tensor.numpy().tobytes() == of_type(row.name).leaf.read()
                outcomes[row.name] = [tensor.dtype.name, same]
            except UnsupportedError as error:
                outcomes[row.name] = str(error)
    return outcomes


@pytest.mark.tensorflow
def test_every_type_of_tensorflow_is_a_tensor(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow")
    outcomes = tensorflow_child.run(__file__, "in_tensorflow", tmp_path)
    assert outcomes.pop("string")
    for name, outcome in outcomes.items():
        if dtypes.BY_NAME[name].tensorflow is None or name in ("complex32", *dtypes.PACKED):
            assert outcome.endswith(f" {name}")
        elif isinstance(outcome, list):
            assert outcome == [dtypes.plain_name(name), True]
        else:
            # Older versions lack the youngest types.
            assert dtypes.BY_NAME[name].extension


@pytest.mark.parametrize(("method", "missing"), [("torch", "torch"), ("tf", "tensorflow")])
def test_a_framework_that_is_not_there_is_named(
    method: str, missing: str, monkeypatch: pytest.MonkeyPatch, sample: ckpttool.Checkpoint, golden: Golden
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ckpttool.errors.MissingExtraError) as caught:
        getattr(sample[KERNEL], method)()
    golden(caught.value)
    assert missing in str(caught.value.hint)


# What is shown.

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e[bold]x[/bold] <b>&\"'"


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert {name for name, _ in attrs} <= {"style", "open"}
        self.tags.add(tag)
        self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1


def tags(text: str) -> set[str]:
    parser = Tags()
    parser.feed(text)
    assert parser.depth == 0
    return parser.tags


def hostile() -> ckpttool.Checkpoint:
    leaves: dict[Any, Any] = {
        (key(HOSTILE), key(str(n))): Leaf("float32", (n,), Inline(bytes(4 * n)), HOSTILE) for n in range(3)
    }
    leaves[key("a value"),] = ValueLeaf(HOSTILE)
    leaves[key("/".join("deep" * 500)),] = ValueLeaf(None)
    return ckpttool.Checkpoint(HOSTILE, "pytorch", Tree(leaves), ())


def on_a_terminal(shown: Any, width: int) -> str:
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    with console.capture() as caught:
        console.print(shown)
    return caught.get()


def test_a_difference_is_a_table_of_text() -> None:
    checkpoint = hostile()
    same = ckpttool.diff(checkpoint, checkpoint)._repr_html_()
    other = ckpttool.Checkpoint("<b>other</b>", "pytorch", Tree({}), ())
    shown = ckpttool.diff(checkpoint, other, by="path")._repr_html_()
    for table in (same, shown):
        assert tags(table) <= {"table", "caption", "tr", "th", "td"}
        assert table.isprintable()
    assert shown.count("<tr>") > same.count("<tr>")
    assert "&lt;b&gt;other" in shown


def test_the_result_of_every_command_is_a_table_in_a_notebook(tmp_path: Path) -> None:
    path, target = str(TORCH_SAMPLE), str(tmp_path / "<b>a</b>.pt")
    records = (
        *(ckpttool.summary(path), ckpttool.stats(path), ckpttool.digest(path), ckpttool.doctor(path)),
        *(ckpttool.check([path]), ckpttool.convert(path, target, to="torch", dry_run=True)),
    )
    for record in records:
        shown = cast(Any, record)._repr_html_()
        assert tags(shown) <= {"table", "caption", "tr", "th", "td"}
        assert shown.isprintable()
        assert len(shown) < 30_000
        assert all(f"<th>{name}</th>" in shown for name, value in record.document().items() if value)
    assert "&lt;b&gt;a" in shown


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what each public function returns for a sample, except those that need a framework."""
    pytest.importorskip("gymnasium")
    folder, path, run = tmp_path_factory.mktemp("results"), str(TORCH_SAMPLE), str(TORCH_SAMPLE.parent)
    once = ckpttool.Protocol(episodes=1)
    played = ckpttool.evaluate(path, "Pendulum-v1", once)
    sweep = ckpttool.sweep([path, str(TORCH_SAMPLE.with_name("ckpt-2500.pt"))], "Pendulum-v1", once)
    return {
        **{name: getattr(ckpttool, name)(path) for name in ("open", "summary", "stats", "digest", "doctor")},
        "check": ckpttool.check(path),
        "folder": inspect_path(run),
        "diff": ckpttool.diff(path, str(TF_SAMPLE)),
        "convert": ckpttool.convert(path, str(folder / "a.npz"), dry_run=True),
        "evaluate": played,
        "sweep": sweep,
        "agent": ckpttool.load_agent(path),
        "report": ckpttool.report(path, out=str(folder / "one.html")),
        "run": ckpttool.report(run, out=str(folder / "run.html")),
        "plot": ckpttool.plot(sweep, str(folder / "curve.svg")),
        "video": ckpttool.video(played, str(folder / "play.gif"), width=64),
        "sidecar": ckpttool.Sidecar("0" * 64),
    }


def walk_records(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the objects of this package that a person reaches by attributes and the first items."""
    if isinstance(value, list | tuple | Mapping):
        items = value.values() if isinstance(value, Mapping) else value
        for item in itertools.islice(items, 2):
            yield from walk_records(item, depth)
    elif type(value).__module__.startswith("ckpttool") and depth < 6:
        yield value
        for name in dir(value):
            if name[0] != "_":
                with suppress(Exception):  # e.g. a property that needs a checkpoint on disk
                    yield from walk_records(getattr(value, name), depth + 1)


def test_no_representation_is_longer_than_a_few_lines(results: dict[str, Any]) -> None:
    longest: dict[str, int] = {}
    for record in itertools.chain(*map(walk_records, results.values())):
        name = type(record).__qualname__
        longest[name] = max(longest.get(name, 0), len(repr(record)))
    assert len(longest) > 60
    assert {name: length for name, length in longest.items() if length > 500} == {}


def test_a_notebook_shows_every_result(results: dict[str, Any]) -> None:
    for name, record in results.items():
        if name != "sidecar":
            assert record._repr_html_().startswith("<"), name
    page = results["report"]
    for name, start in {"report": "<iframe", "run": "<iframe", "plot": "<img", "video": "<img"}.items():
        assert results[name]._repr_html_().startswith(f"{start} "), name
    inside = re.search('srcdoc="([^"]*)"', page._repr_html_())
    assert inside is not None
    assert html.unescape(inside[1]) == Path(page.file).read_text(encoding="utf-8")
    assert 'sandbox="allow-scripts"' in page._repr_html_()
    # No column of empty cells, or of lists that a table cannot show.
    assert columns(results["summary"])["tensors"][:3] == ["path", "key", "dtype"]
    assert "keys" not in columns(results["summary"])["tensors"]
    # The path of the whole is empty, and its column is the first.
    assert columns(results["stats"])["modules"][:2] == ["path", "tensors"]
    changed = columns(results["diff"])["changed"]
    assert {"path", "left", "right", "max_abs", "max_rel", "cosine", "at"} <= {*changed}
    Path(page.file).unlink()
    assert tags(page._repr_html_()) == {"table", "caption", "tr", "th", "td"}


def columns(record: Any) -> dict[str, list[str]]:
    """Return the titles of the columns of the tables in a record's table."""
    parts = re.split(r"<tr><th>(\w+)</th><td[^>]*><table>", record._repr_html_())[1:]
    heads = (re.findall("<th[^>]*>(.*?)</th>", table.partition("</tr>")[0]) for table in parts[1::2])
    return dict(zip(parts[::2], heads, strict=True))


def test_text_is_aligned_to_the_left_and_numbers_are_not(results: dict[str, Any]) -> None:
    """JupyterLab aligns every cell to the right."""
    cells = re.findall(r"<t[dh]([^>]*)>([^<>]*)</t[dh]>", results["stats"]._repr_html_())
    aligned = {text: "left" in attributes for attributes, text in cells}
    assert aligned["float32"]
    assert aligned["actor/l1/weight"]
    assert not aligned["4481"]


def test_representations_of_a_large_file_are_one_line(tmp_path: Path) -> None:
    names = [f"block{n // 50}.{'long_name_' * 8}{n % 50}.weight" for n in range(3000)]
    path = tmp_path / "large.npz"
    np.savez(path, **{name: np.float32(number) for number, name in enumerate(names)})
    records = [
        getattr(ckpttool, name)(str(path)) for name in ("open", "summary", "stats", "digest", "doctor")
    ]
    records += [ckpttool.check(str(path)), ckpttool.diff(str(path), str(path))]
    records.append(ckpttool.convert(str(path), str(tmp_path / "large.safetensors")))
    for record in itertools.chain(*map(walk_records, records)):
        assert len(repr(record)) <= 500, type(record)
        assert "\n" not in repr(record), type(record)
        if hasattr(record, "_repr_html_"):
            assert len(record._repr_html_()) < 60_000, type(record)


@pytest.mark.parametrize("name", ["report", "plot", "video"])
def test_a_function_replaces_a_file_only_with_force(
    results: dict[str, Any], name: str, tmp_path: Path
) -> None:
    file = tmp_path / {"report": "a.html", "plot": "a.svg", "video": "a.gif"}[name]
    file.write_bytes(b"mine")

    def write(**keywords: Any) -> Any:
        if name == "report":
            return ckpttool.report(str(TORCH_SAMPLE), out=str(file), **keywords)
        return getattr(ckpttool, name)(results["evaluate"], str(file), **keywords)

    with pytest.raises(ckpttool.errors.TargetExistsError):
        write()
    assert file.read_bytes() == b"mine"
    assert write(force=True).file == str(file)
    assert len(file.read_bytes()) > 1000


def test_only_what_was_played_is_filmed(results: dict[str, Any], tmp_path: Path) -> None:
    scored = dataclasses.replace(results["evaluate"], options=None)
    with pytest.raises(ckpttool.errors.UsageError):
        ckpttool.video(scored, str(tmp_path / "a.gif"))


def test_hostile_names_are_text_everywhere() -> None:
    checkpoint = hostile()
    branch = next(
        entry for name in checkpoint.root.modules() if isinstance(entry := checkpoint[f"{name}/"], Branch)
    )
    handle = next(iter(branch.tensors().values()))
    assert tags(checkpoint._repr_html_()) <= {"details", "summary", "b", "div", "code", "span"}
    assert tags(handle._repr_html_()) == {"table", "caption", "tr", "th", "td"}
    for shown in (checkpoint, branch, handle):
        assert repr(shown).isprintable()
        assert shown._repr_html_().isprintable()
        for width in (40, 200):
            text = on_a_terminal(shown, width)
            assert "\x1b[31m" not in text
            assert "\u202e" not in text
            assert width < 200 or "[bold]" in text
    with pytest.raises(NameNotFoundError) as caught:
        checkpoint[HOSTILE + "x"]
    assert str(caught.value).replace(HOSTILE, "").isprintable()


def test_a_terminal_shows_the_modules_folded(sample: ckpttool.Checkpoint) -> None:
    for width in (40, 80, 200):
        lines = on_a_terminal(sample, width).splitlines()
        assert max(map(len, lines)) <= width
        assert 20 < len(lines) <= 60
    assert lines[0] == repr(sample)[1:-1]
    assert "    actor/  6 tensors, 17.9 kB" in lines
    assert "        kernel  float32[3, 64]" in lines
    assert on_a_terminal(sample["policy/actor/l1"], 80).splitlines()[1:] == [
        "  kernel  float32[3, 64]",
        "  bias  float32[64]",
    ]
    assert pretty_repr(sample[KERNEL]).startswith(f"Handle(\n    '{KERNEL}',\n    dtype='float32',")


def test_ten_thousand_tensors_are_shown_in_some_dozens_of_rows() -> None:
    names = [(attr(f"block{n // 20}"), attr(f"layer{n % 20}")) for n in range(10_000)]
    checkpoint = ckpttool.Checkpoint("big", "pytorch", named(*names), ())
    shown = checkpoint._repr_html_()
    assert shown.count("<div") < 60
    assert "and 452 more" in shown
    assert "20 tensors, 80 B" in shown
    assert len(on_a_terminal(checkpoint, 80).splitlines()) < 60
    assert checkpoint["block499/layer19"].numpy() == 0


@pytest.mark.corpus
@pytest.mark.parametrize("folder", ["tf", "torch"])
def test_real_files_are_sliced_and_found_by_native_names(folder: str, corpus: Path) -> None:
    kinds: set[str] = set()
    generator = np.random.default_rng(5)
    for truth in sorted((corpus / folder).rglob("*.truth.json")):
        path = str(truth).removesuffix(".truth.json")
        if (kind := truth.parent.name + Path(path).suffix) in kinds or not os.path.lexists(path):
            continue
        kinds.add(kind)
        if len(kinds) > 12:
            break
        checkpoint = ckpttool.open(path)
        for at, leaf in list(checkpoint.tree.tensors())[:3]:
            handle = checkpoint[checkpoint.tree.names[at]]
            assert handle.leaf is leaf
            assert leaf.key in checkpoint
            if leaf.shape and leaf.dtype in READ:
                start, stop = sorted(generator.integers(0, leaf.shape[0] + 1, 2))
                part = (slice(start, stop), ...)
                assert handle[part].numpy().tobytes() == leaf.array()[part].tobytes(), (path, handle)
    assert len(kinds) > 5


@pytest.mark.parametrize(
    ("function", "record"),
    [
        (ckpttool.convert, ckpttool.FormatOptions),
        (ckpttool.export, ckpttool.ExportOptions),
        (ckpttool.load_into, ckpttool.FillOptions),
        (ckpttool.report, ckpttool.ReportOptions),
        (ckpttool.verify, ckpttool.VerificationOptions),
        (ckpttool.fill, ckpttool.ModelFileOptions),
    ],
)
def test_a_function_declares_the_fields_of_its_options(
    function: Callable[..., Any], record: type[Any]
) -> None:
    """`help`, editors and type checkers see the names, types and defaults that the record has."""
    described = inspect.getdoc(function) or ""
    assert all(f"\n    {item.name}" in described for item in dataclasses.fields(record))
    parameters = dict(inspect.signature(function).parameters)
    further = str(parameters.pop("further").annotation) if "further" in parameters else ""
    keywords = getattr(sys.modules[record.__module__], further[len("Unpack[") : -1]) if further else None
    others = inspect.get_annotations(keywords) if keywords is not None else {}
    types = {name: annotation.__forward_arg__ for name, annotation in others.items()}
    fields = {field.name: field for field in dataclasses.fields(record)}
    for name in parameters.keys() & fields.keys() - {"like"}:
        assert parameters[name].default == fields[name].default
        types[name] = parameters[name].annotation
    assert types == {name: field.type for name, field in fields.items() if name != "like"}


@pytest.mark.parametrize("name", [*MOVED])
def test_a_keyword_of_another_function_names_it(name: str, tmp_path: Path) -> None:
    value = "tests.models:Nothing" if name == "like" else ("a",)
    with pytest.warns(DeprecationWarning, match=f"{name}.*ckpttool.{MOVED[name]}") as caught:  # noqa: SIM117
        with pytest.raises(ckpttool.CkpttoolError):
            ckpttool.convert(str(tmp_path / "missing"), str(tmp_path / "out.pt"), **{name: value})
    assert caught[0].filename == __file__


def test_options_of_another_function_are_refused() -> None:
    with pytest.raises(TypeError, match="FormatOptions"):
        ckpttool.convert("a.pt", "b.pt", ckpttool.ExportOptions())  # type: ignore[arg-type]


def test_a_live_model_is_not_filled_by_its_code(tmp_path: Path) -> None:
    with pytest.raises(ckpttool.errors.UsageError) as caught:
        ckpttool.fill(str(TORCH_SAMPLE), str(tmp_path / "out.pt"), object())  # type: ignore[arg-type]
    assert "load_into" in str(caught.value.hint)
