"""Models written twice by hand, once for each framework, with names and construction orders of their own.

Unlike the programs, the two of a pair share no code: their layers are called, nested and constructed
differently, and most shapes are square, so that a transposed or exchanged weight loads without an error.
Every pair is saved in each form and filled into its twin, which must compute the source's outputs, on usual
inputs and on such small ones that the epsilon of a norm shows. `python -m tests.model_pairs.twins --record`
records the states.

Where ckpttool refuses, the options that its hint lists are tried, of which somebody who knows the model
chooses one: `followed` are the refusals of which one choice computes the source's outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("twins.tsv")
# Blocks with square matrices on purpose, and whole architectures with the shapes that they usually have.
SQUARE = ("twins_dense", "twins_images", "twins_attention")
USUAL = ("twins_agents", "twins_vision", "twins_language")
# Whole architectures, written before ckpttool first converted them; the record has their first states.
UNSEEN = ("twins_recent", "twins_control")
UNSEEN_RESULTS = Path(__file__).with_name("twins_unseen.tsv")
# Models of keras.applications and torchvision, and of Transformers.
PUBLISHED = ("twins_published",)
LIBRARIES = {"application_": "keras.applications and torchvision", "transformers_": "Transformers"}
PUBLISHED_APPLICATIONS = ("keras", "saved_model", "weights", "script", "onnx", "pt")
PUBLISHED_TRANSFORMERS = (
    *("h5", "keras_safetensors", "saved_model", "objects"),
    *("pt", "safetensors", "script", "onnx"),
)
KERAS = ("keras", "weights", "h5", "objects", "npz_keras", "saved_model", "keras_safetensors")
TORCH = ("pt", "safetensors", "whole", "script", "onnx")
# What each family is saved as. Half of the forms of the usual shapes record the computation.
FORMS = {
    SQUARE: tuple(form for form in (*KERAS, *TORCH) if form not in ("saved_model", "onnx")),
    USUAL: ("keras", "saved_model", "weights", "script", "onnx", "pt"),
    UNSEEN: ("keras", "saved_model", "weights", "script", "onnx", "pt"),
}
RECORDING = ("keras", "saved_model", "script", "onnx")
# Of the outputs' size. Inputs of a thousandth are divided by a norm's deviation, and rounding with them.
CLOSE, CLOSE_SMALL = 2e-5, 5e-5
STATES = ("right", "assumed", "corrected", "followed", "refused", "WRONG ASSUMED", "WRONG", "crash", "unable")
# What a file of weights does not tell, and what is taken without it is usual: that two vectors are a layer
# norm's and no affine map's or group norm's (these pairs do not compute the same), that a norm multiplies by
# its weight and not by 1 + it, that layers are created in the order in which they are called.
UNDECIDED = frozenset(
    ("affine_gamma_beta_no_norm", "prelu_noshared_vs_ln", "rms_gemma_plus1", "layernorm_mlp")
)
_MOST_TRIES = 30
_CANDIDATES = re.compile(
    r"could fill (?P<targets>.*?)(?:; choose|, and nothing) .*?match=\{(?P<sources>[^}]*)\}"
)
_UNUSED = re.compile(r"allow_unused=\[([^\]]+)\]")
_STATED = re.compile(r"\b(flatten|unflatten|kinds)=\{'([^']+)': '([^']+)'\}")
_OPTION = re.compile(r"--(flatten|unflatten|kind) '([^'=]+)=([^']+)'")
_EPSILON = re.compile(
    r"(?P<layers>[^;]+): using the model's epsilon .*?default in \w+ is (?P<default>[\d.e-]+)"
)

Spec = tuple[Any, ...]


@dataclass(frozen=True)
class Twins:
    """A pair: what makes both models, their inputs, and what the outputs' axes are.

    An input is ("v", *shape), ("ids", length, words), or an image ("img", H, W, C) or sequence ("seqc", T, C)
    whose channels PyTorch has first.
    """

    inputs: tuple[Spec, ...]
    out: str
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
    own_forms: tuple[str, ...] = ()  # otherwise those of the family
    sides: tuple[type[Keras], type[Torch]] | None = None
    keys: tuple[str, ...] = ()  # the inputs' names, where the models take them by name

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that are recorded of it."""
        if self.own_forms:
            return self.own_forms
        return next(forms for families, forms in FORMS.items() if self.family in families)

    @property
    def family(self) -> str:
        """The module that registers the pair."""
        return self.make.__module__.rpartition(".")[2]


@dataclass(frozen=True)
class Cell:
    """One filling: the pair, the form of the source, its state, and what was assumed or refused.

    `first` is the state of an unseen pair at its first filling.
    """

    pair: str
    source: str
    state: str
    sentence: str = ""
    first: str = ""

    @property
    def row(self) -> str:
        """The line of a record."""
        fields = (self.pair, self.source, self.state, self.sentence.replace("\t", " "), self.first)
        return "\t".join(fields if self.first else fields[:-1])


PAIRS: dict[str, Twins] = {}


def pair(name: str, *inputs: Spec, out: str = "v", expect: str = "right") -> Callable[[Any], Any]:
    """Register a function that returns what makes the Keras model and what makes the PyTorch model."""
    del expect

    def register(make: Any) -> Any:
        assert name not in PAIRS, name
        PAIRS[name] = Twins(inputs, out, make)
        return make

    return register


def load_families(*, published: bool = False) -> None:
    """Import the modules that register the pairs."""
    for name in (*SQUARE, *USUAL, *UNSEEN, *(PUBLISHED if published else ())):
        importlib.import_module(f"tests.model_pairs.{name}")


def shapes(twins: Twins, framework: str) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs without the batch, none of several that are given by name only."""
    if len(twins.keys) > 1:
        return []
    shapes: list[tuple[int, ...]] = []
    for kind, *shape in twins.inputs:
        if kind == "ids":
            shapes.append((shape[0],) if shape[0] else ())
        elif kind in ("img", "seqc") and framework == "torch":
            shapes.append((shape[-1], *shape[:-1]))
        else:
            shapes.append(tuple(shape))
    return shapes


def random_inputs(twins: Twins, framework: str, seed: int, scale: float = 1.0) -> list[np.ndarray]:
    """Return random inputs; those of one seed are the same for both frameworks."""
    draw = np.random.default_rng(seed)
    arrays = []
    for kind, *shape in twins.inputs:
        if kind == "ids":
            length, words = shape
            arrays.append(draw.integers(1, words, (3, length) if length else (3,)))
            continue
        value = (draw.standard_normal((3, *shape)) * scale).astype(np.float32)
        first = kind in ("img", "seqc") and framework == "torch"
        arrays.append(np.ascontiguousarray(np.moveaxis(value, -1, 1)) if first else value)
    return arrays


def weights(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Return random values for a weight of this name."""
    low = name.lower()
    if "variance" in low or "running_var" in low:
        return draw.uniform(0.5, 2, shape).astype(np.float32)
    if len(shape) < 2:
        return draw.normal(0.4, 0.5, shape).astype(np.float32)
    fan = max(1, int(np.prod(shape)) // max(shape))
    return draw.normal(0, fan**-0.5, shape).astype(np.float32)


def flat(value: Any) -> list[Any]:
    """Return the tensors of a nest."""
    return [tensor for one in value for tensor in flat(one)] if isinstance(value, list | tuple) else [value]


class Keras:
    """Keras's side of a pair."""

    def build(self, twins: Twins, seed: int) -> Any:
        """Return the model with random weights."""
        model = twins.make()[0]()
        self.outputs(model, twins, 1)
        draw = np.random.default_rng(seed)
        for variable in model.weights:
            path = getattr(variable, "path", variable.name)  # Keras 2 has names
            if "seed" not in path and "int" not in str(variable.dtype):
                variable.assign(weights(path, tuple(variable.shape), draw))
        return model

    def outputs(self, model: Any, twins: Twins, seed: int, scale: float = 1.0) -> list[np.ndarray]:
        """Return what the model makes of random inputs."""
        x = random_inputs(twins, "keras", seed, scale)
        x = [array.astype("int32") if array.dtype.kind == "i" else array for array in x]
        return [np.asarray(tensor) for tensor in flat(model(x if len(x) > 1 else x[0]))]

    def save(self, model: Any, form: str, folder: Path, twins: Twins) -> str:
        """Write the model in a form; return the file."""
        import tensorflow as tf

        del twins
        file = {"keras": "m.keras", "weights": "m.weights.h5", "h5": "m.h5", "npz_keras": "m.npz"}.get(form)
        path = str(folder / (file or "objects"))
        if form == "weights":
            model.save_weights(path)
        elif form == "saved_model":
            model.export(str(folder / form), verbose=False)
            return str(folder / form)
        elif form == "objects":
            return str(tf.train.Checkpoint(model=model).write(path))
        elif form == "npz_keras":
            np.savez(path, **{weight.path: np.asarray(weight) for weight in model.weights})
        else:
            model.save(path)
        return path


class Torch:
    """PyTorch's side of a pair."""

    def build(self, twins: Twins, seed: int) -> Any:
        """Return the model with random weights, in evaluation mode."""
        import torch

        model = twins.make()[1]()
        draw = np.random.default_rng(seed)
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                # A mask of zeros and ones is what the program computes, no state.
                if tensor.is_floating_point() and tensor.unique().tolist() != [0, 1]:
                    tensor.copy_(torch.from_numpy(weights(name, tuple(tensor.shape), draw)))
        return model.eval()

    def outputs(self, model: Any, twins: Twins, seed: int, scale: float = 1.0) -> list[np.ndarray]:
        """Return what the model makes of random inputs, images with their channels last."""
        import torch

        with torch.no_grad():
            tensors = flat(model.eval()(*map(torch.from_numpy, random_inputs(twins, "torch", seed, scale))))
        first = twins.out in ("img", "seqc")
        return [np.moveaxis(e.numpy(), 1, -1) if first and e.ndim > 2 else e.numpy() for e in tensors]

    def save(self, model: Any, form: str, folder: Path, twins: Twins) -> str:
        """Write the model in a form; return the file."""
        import torch
        from safetensors.torch import save_file

        path = str(folder / {"safetensors": "t.safetensors", "script": "s.pt"}.get(form, f"{form}.pt"))
        if form == "pt":
            torch.save(model.state_dict(), path)
        elif form == "safetensors":
            save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
        elif form == "whole":
            _name_classes(model)
            torch.save(model, path)
        elif form == "onnx":
            path = str(folder / "m.onnx")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Norms stay layers of their own.
                kept = torch.onnx.TrainingMode.PRESERVE
                x = tuple(map(torch.from_numpy, random_inputs(twins, "torch", 1)))
                torch.onnx.export(model, x, path, dynamo=False, training=kept)
        else:
            torch.jit.trace(model, tuple(map(torch.from_numpy, random_inputs(twins, "torch", 1)))).save(path)
        return path


def _name_classes(model: Any) -> None:
    """Let pickle find the classes that a function made."""
    for module in model.modules():
        cls = type(module)
        if "<locals>" in cls.__qualname__:
            cls.__qualname__ = cls.__name__
            setattr(sys.modules[cls.__module__], cls.__name__, cls)


def error(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return the largest difference, of the outputs' size."""
    largest = 0.0
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape
        largest = max(largest, float(np.abs(a - b).max() / (np.abs(a).max() + 1e-12)))
    return largest


def cells(names: Sequence[str], sources: Sequence[str] = (), tries: int = _MOST_TRIES) -> Iterator[Cell]:
    """Fill the twins from these forms, or their family's, in this process, which imports both frameworks."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            for source in sources or PAIRS[name].forms:
                try:
                    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        cell = _cell(name, source, Path(folder), tries)
                except Exception:  # noqa: BLE001  # a crash is a result
                    cell = Cell(name, source, "crash", traceback.format_exc()[-300:])
                sentence = " ".join(cell.sentence.replace(folder, "").split())[:300]
                yield Cell(name, source, cell.state, sentence)


def _cell(name: str, source: str, folder: Path, tries: int) -> Cell:

    twins = PAIRS[name]
    keras_side, torch_side = twins.sides or (Keras, Torch)
    source_side: Any = keras_side() if source in KERAS else torch_side()
    target_side: Any = torch_side() if source in KERAS else keras_side()
    model = source_side.build(twins, 1)
    try:
        file = source_side.save(model, source, folder, twins)
    except Exception as failure:  # noqa: BLE001  # the framework's own
        return Cell(name, source, "unable", str(failure))
    expected = [source_side.outputs(model, twins, 5, scale) for scale in (1.0, 1e-3)]
    return _Tries(name, source, twins, file, target_side, expected, tries).cell()


class _Tries:
    """One filling, and those that the hints of a refusal or the sentence of an assumption lead to."""

    def __init__(
        self, name: str, source: str, twins: Twins, file: str, side: Any, expected: list[Any], tries: int
    ) -> None:
        self.name, self.source, self.twins, self.file, self.side = name, source, twins, file, side
        self.pairs = expected
        self.left = tries

    def cell(self) -> Cell:
        """Return the state without options, or what options make of it."""
        cell = self._filled({})
        if cell.state == "refused" and self._leads(cell.sentence, {}):
            return Cell(self.name, self.source, "followed", cell.sentence)
        if cell.state == "WRONG ASSUMED" and self._corrects(cell.sentence):
            return Cell(self.name, self.source, "corrected", cell.sentence)
        return cell

    def _filled(self, options: dict[str, Any], epsilons: Sequence[tuple[str, float]] = ()) -> Cell:
        from ckpttool import CkpttoolError, load_into  # whose errors have Python's keywords

        self.left -= 1
        if isinstance(self.side, Keras):
            import keras

            keras.backend.clear_session()  # the names that a hint has are those of the next model
        twin = self.side.build(self.twins, 7)
        try:
            framework = "torch" if self.source in KERAS else "keras"
            done = load_into(twin, self.file, shapes=shapes(self.twins, framework), verify=False, **options)
        except CkpttoolError as refusal:
            return Cell(self.name, self.source, "refused", f"{refusal} [{refusal.hint or ''}]")
        for title, value in epsilons:
            _set_epsilon(twin, title, value)
        usual, small = (
            error(one, self.side.outputs(twin, self.twins, 5, scale))
            for one, scale in zip(self.pairs, (1.0, 1e-3), strict=True)
        )
        assumed = done.report.assumed
        if usual <= CLOSE and small <= CLOSE_SMALL:
            state = "assumed" if assumed else "right"
        else:
            state = "WRONG ASSUMED" if assumed else "WRONG"
        return Cell(self.name, self.source, state, "; ".join(assumed))

    def _leads(self, text: str, options: dict[str, Any]) -> bool:
        """Say whether one of the choices that a refusal lists leads to the source's outputs."""
        for choice in _choices(text):
            if self.left <= 0:
                return False
            joined = _joined(options, choice)
            if joined == options:
                continue
            result = self._filled(joined)
            if result.state in ("right", "assumed"):
                return True
            if result.state == "refused" and self._leads(result.sentence, joined):
                return True
            if result.state == "WRONG ASSUMED" and self._corrects(result.sentence, joined):
                return True
        return False

    def _corrects(self, text: str, options: dict[str, Any] | None = None) -> bool:
        """Say whether what an assumption names for a model that is otherwise makes the outputs right."""
        text, joined = _in_python(text), dict(options or {})
        for key, title, value in _STATED.findall(text):
            joined[key] = {**joined.get(key, {}), title: value}
        epsilons = [
            (title, float(match["default"]))
            for match in _EPSILON.finditer(text)
            for title in re.split(", | and ", match["layers"].strip())
            if not title.endswith(" more")
        ]
        names = [*joined.get("kinds", {})]
        # Some or all of the layers may be the other way round, or none; parts may be in each order.
        for some in ([], names, *([name] for name in names)) if names else ([],):
            kinds = {title: form for title, form in joined.get("kinds", {}).items() if title in some}
            for stated in _part_orders({**joined, "kinds": kinds} if names else joined):
                if self.left > 0 and self._filled(stated, epsilons).state in ("right", "assumed"):
                    return True
        return False


def _part_orders(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options with each order of the parts that one of them states, as stated first."""
    places = [
        (key, title, value.removeprefix("parts:").split(","))
        for key in ("flatten", "unflatten")
        for title, value in options.get(key, {}).items()
        if value.startswith("parts:")
    ]
    orders = (
        sorted(itertools.permutations(numbers), key=lambda order, first=numbers: [*order] != first)
        for _, _, numbers in places
    )
    for chosen in itertools.product(*orders):
        stated = {key: {**value} if isinstance(value, dict) else value for key, value in options.items()}
        for (key, title, _), order in zip(places, chosen, strict=True):
            stated[key][title] = f"parts:{','.join(order)}"
        yield stated


def _in_python(text: str) -> str:
    return _OPTION.sub(
        lambda m: f"{m[1].replace('kind', 'kinds').replace('kindss', 'kinds')}={{'{m[2]}': '{m[3]}'}}", text
    )


def _joined(options: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    """Return the options with those of a choice added."""
    joined = dict(options)
    for key, value in choice.items():
        if isinstance(value, dict):
            value = {**joined.get(key, {}), **value}
        joined[key] = [*joined.get(key, []), *value] if isinstance(value, list) else value
    return joined


def _choices(text: str) -> Iterator[dict[str, Any]]:
    """Go through the choices that a hint leaves: an assignment of candidates, or one of several options."""
    match = _CANDIDATES.search(text)
    if match is not None:
        sources = re.findall(r"'([^']+)': '?TARGET", match["sources"])
        targets = [name for name in re.split(", | and ", match["targets"]) if not name.endswith(" more")]
        if len(sources) <= len(targets):
            for chosen in itertools.permutations(targets, len(sources)):
                yield {"match": dict(zip(sources, chosen, strict=True))}
        else:
            for having in itertools.permutations(sources, len(targets)):
                yield {"match": dict(zip(having, targets, strict=True))}
        return
    for key, title, value in _STATED.findall(_in_python(text)):
        yield {key: {title: value}}
    if (unused := _UNUSED.search(text)) is not None:
        yield {"allow_unused": re.findall(r"'([^']+)'", unused[1])}
    if "strict=False if" in text:
        yield {"strict": False}
    if "fold_weight_norm=True" in text:
        yield {"fold_weight_norm": True}
    if (origin := re.search(r"--from (torch|tf)\b|from_='(torch|tf)'", text)) is not None:
        yield {"from_": origin[1] or origin[2]}


def _set_epsilon(model: Any, title: str, value: float) -> None:
    """Give a norm of the model an epsilon, by its name."""
    if hasattr(model, "get_submodule"):
        model.get_submodule(title.replace("/", ".")).eps = value
        return
    for layer in model._flatten_layers():  # all layers, in lists as well
        if layer.name == title.rpartition("/")[2] or getattr(model, title, None) is layer:
            layer.epsilon = value


def recorded(file: Path = RESULTS) -> list[Cell]:
    """Return the recorded states."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Cell(*line.split("\t")) for line in lines]


def usual_names() -> list[str]:
    """Return the recorded pairs with usual shapes, whose families need not be imported for it."""
    names = (cell.pair for cell in recorded() if cell.source in ("onnx", "saved_model"))
    return [name for name in dict.fromkeys(names) if not name.startswith(tuple(LIBRARIES))]


_PAGE = """## Models with different names

Models written twice by hand with other names and nesting, filled from each form by `load_into`
(`python -m tests.model_pairs.twins --record`).

### Square blocks

{pairs} blocks, mostly square. *Followed* are refusals that one listed choice makes right. *Refused*
are the others: the hint was not tried, leaves more than {tries} choices, or needs another model.

"""
_USUAL_PAGE = """
### Architectures

{pairs} whole networks with the shapes that they usually have, in six forms: agents, image models, language
models, recommenders. Hints of refusals were not tried. `.keras` files of custom classes record no
computation; beside the other recorded computations, outputs decide what names and shapes leave open.
*Corrected* are joined parts and halves in another order: right with the option in the line that names the
layer, such as `--flatten 'joint=parts:2,1'`.

"""
_UNSEEN_PAGE = """
### Unseen architectures

{pairs} more networks, written and not changed before ckpttool first converted them; members, names and
nesting differ. *At first* is the share that was right (also assumed) at the first conversion of a network.
*Followed* became right after its hints, and does not count as right. `retnet` was corrected afterwards: a
buffer that no file stores had random numbers. Refusals were mended with these networks in view. Of twelve
others, written last and converted once, 24 of 72 were right, of those that record a computation 18 of 36, and
one was wrong with a line.

"""
_PUBLISHED_PAGE = """
### Models of other libraries

{applications} models of keras.applications that torchvision has, too, with the same epsilon and odd images:
{names}.
ResNet50 has Keras's strides and biases, VGG16 no head; EfficientNetB0 has a `Normalization` in Keras only.
{transformers} small models of Transformers 4.49,
with the files that it writes. All have random numbers. {run} of {all} conversions were run, by
`python -m tests.model_pairs.twins --published --record`. *Followed* are refusals whose hint makes them
right, such as `--from torch` for GPT2.
"""
FORM_TITLES = {
    "keras": "`.keras`",
    "saved_model": "SavedModel",
    "weights": "`.weights.h5`",
    "script": "TorchScript",
    "onnx": "ONNX",
    "pt": "state_dict `.pt`",
}
_Rows = Sequence[tuple[str, Sequence[str]]]


def _table(cells: Sequence[Cell], columns: Sequence[str], rows: _Rows) -> str:
    """Return the numbers of cells by state, a row for some forms each."""
    text = f"| forms | {' | '.join(columns)} | wrong: with, silent | right share |\n"
    text += f"|---|{'---:|' * (len(columns) + 2)}\n"
    for title, forms in rows:
        states = [cell.state for cell in cells if cell.source in forms]
        marks = " | ".join(str(states.count(state)) for state in columns)
        able = [state for state in states if state != "unable"]
        share = sum(state in ("right", "assumed", "corrected") for state in able) / max(1, len(able))
        wrong = f"{states.count('WRONG ASSUMED')}, {states.count('WRONG')}"
        text += f"| {title} | {marks} | {wrong} | {share:.0%} |\n"
    return text


def _wrong_fillings(cells: Sequence[Cell]) -> str:
    wrong: dict[str, list[str]] = {}
    for cell in cells:
        if cell.state == "WRONG ASSUMED":
            wrong.setdefault(cell.pair, []).append(f"`{cell.source}`")
    return "; ".join(f"`{name}` ({', '.join(forms)})" for name, forms in wrong.items())


def page() -> str:
    """Return the sections with the recorded states by form, and the fillings that are wrong."""
    every, columns = recorded(), ("right", "assumed", "corrected", "followed", "refused")
    cells = [cell for cell in every if not cell.pair.startswith(tuple(LIBRARIES))]
    usual = usual_names()
    square = [cell for cell in cells if cell.pair not in usual]
    others = [cell for cell in cells if cell.pair in usual]
    text = _PAGE.format(pairs=len({cell.pair for cell in square}), tries=_MOST_TRIES)
    text += _table(square, columns, (("Keras", KERAS), ("PyTorch", TORCH), ("all", (*KERAS, *TORCH))))
    text += (
        "\nWrong with an assumption (square matrices, pairs of vectors without classes, orders of creation): "
    )
    text += f"{_wrong_fillings(square)}.\n"
    text += _USUAL_PAGE.format(pairs=len(usual))
    rows: list[tuple[str, Sequence[str]]] = [(title, (form,)) for form, title in FORM_TITLES.items()]
    rows += [("whose files all record it", RECORDING[1:]), ("and `.keras`", RECORDING), ("all", FORMS[USUAL])]
    text += _table(others, ("right", "assumed", "corrected", "refused"), rows)
    if wrong := _wrong_fillings(others):
        text += f"\nWrong with a sentence that names the layer: {wrong}.\n"
    text += _unseen(recorded(UNSEEN_RESULTS))
    return text + _published([cell for cell in every if cell not in cells])


def _unseen(cells: Sequence[Cell]) -> str:
    """Return the table of the unseen pairs, with their first states."""
    rows: list[tuple[str, Sequence[str]]] = [(title, (form,)) for form, title in FORM_TITLES.items()]
    rows += [("whose files all record it", RECORDING[1:]), ("all", FORMS[UNSEEN])]
    text = _UNSEEN_PAGE.format(pairs=len({cell.pair for cell in cells}))
    text += "| forms | at first | right | assumed | followed | refused "
    text += "| wrong: at first, with, silent | right share |\n"
    text += f"|---|{'---:|' * 7}\n"
    for title, forms in rows:
        some = [cell for cell in cells if cell.source in forms]
        states = Counter(cell.state for cell in some)
        first = Counter(cell.first for cell in some)
        wrong = first["WRONG"] + first["WRONG ASSUMED"], states["WRONG ASSUMED"], states["WRONG"]
        text += f"| {title} | {(first['right'] + first['assumed']) / len(some):.0%} | {states['right']} "
        text += f"| {states['assumed']} | {states['followed']} | {states['refused']} "
        text += f"| {', '.join(map(str, wrong))} "
        text += f"| {(states['right'] + states['assumed']) / len(some):.0%} |\n"
    return text


def _published(cells: Sequence[Cell]) -> str:
    """Return the section on the models of other libraries, "" without records."""
    if not cells:
        return ""
    by_library = {start: [cell for cell in cells if cell.pair.startswith(start)] for start in LIBRARIES}
    names = {start: dict.fromkeys(cell.pair for cell in cells) for start, cells in by_library.items()}
    text = _PUBLISHED_PAGE.format(
        names=", ".join(name.removeprefix("application_") for name in names["application_"]),
        applications=len(names["application_"]),
        transformers=len(names["transformers_"]),
        run=len(cells),
        all=len(names["application_"]) * len(PUBLISHED_APPLICATIONS)
        + len(names["transformers_"]) * len(PUBLISHED_TRANSFORMERS),
    )
    columns = ("right", "assumed", "corrected", "followed", "refused")
    for start, title in LIBRARIES.items():
        rows = ((f"{title} to PyTorch", KERAS), (f"{title} to Keras", TORCH), ("both", (*KERAS, *TORCH)))
        text += f"\n{_table(by_library[start], columns, rows)}"
    refused = [cell for cell in cells if cell.state == "refused"]
    if refused:
        text += f"\nRefused: {', '.join(f'`{cell.pair}` ({cell.source})' for cell in refused)}.\n"
    return text


def main() -> None:
    """Run pairs and print their states; all of them are recorded with --record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sources", default="", help="forms; without it those of the family")
    parser.add_argument("--usual", action="store_true", help="only pairs with usual shapes")
    parser.add_argument("--published", action="store_true", help="only models of other libraries")
    parser.add_argument(
        "--unseen", action="store_true", help="only unseen pairs, which have their own record"
    )
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--of", default="0/1", help="which part of the pairs, such as 1/3")
    parser.add_argument("--tries", type=int, default=_MOST_TRIES, help="choices of a hint that are tried")
    options = parser.parse_args()
    load_families(published=True)
    run_cells = []
    part, of = map(int, options.of.split("/"))
    published = [name for name, twins in PAIRS.items() if twins.own_forms]
    own = [name for name in PAIRS if name not in published]
    unseen = [name for name in own if PAIRS[name].family in UNSEEN]
    own = [name for name in own if name not in unseen]
    usual = [name for name in own if PAIRS[name].family in USUAL]
    chosen = ((options.usual, usual), (options.published, published), (options.unseen, unseen), (True, own))
    names = options.names or next(some for use, some in chosen if use)
    forms = tuple(filter(None, options.sources.split(",")))
    for cell in cells(names[part::of], forms, options.tries):
        run_cells.append(cell)
        print("\t".join((cell.pair, cell.source, cell.state, cell.sentence)), flush=True)  # noqa: T201
    if options.record:
        for file, families in ((UNSEEN_RESULTS, UNSEEN), (RESULTS, (*SQUARE, *USUAL, *PUBLISHED))):
            record(file, families, run_cells)


def record(file: Path, families: Sequence[str], new_cells: Sequence[Cell]) -> None:
    """Write the states of these families to a record, which keeps the others and all first states."""
    cells = {(cell.pair, cell.source): cell for cell in recorded(file)}
    for cell in new_cells:
        before = cells.get((cell.pair, cell.source))
        first = "" if families != UNSEEN else before.first if before is not None else cell.state
        cells[cell.pair, cell.source] = replace(cell, first=first)
    pairs = {name: twins for name, twins in PAIRS.items() if twins.family in families}
    kept = (cell for (name, form), cell in cells.items() if name in pairs and form in pairs[name].forms)
    file.write_text("".join(f"{cell.row}\n" for cell in kept), encoding="utf-8")


if __name__ == "__main__":
    # The registry is this module by its name, not by `__main__`.
    importlib.import_module("tests.model_pairs.twins").main()
