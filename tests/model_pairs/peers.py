"""Runs other converters on the pairs of models, with the same inputs and the same referee.

Each peer is used in its documented way, and every conversion is timed beside ckpttool's in one process. The
peers are not dependencies: run this in an environment that has tf2onnx, onnx2torch, onnx2tf, tf_keras and
transformers<4.50 besides ckpttool's own `all` extras.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests import warm
from tests.conftest import ROOT
from tests.model_pairs import harness, twins
from tests.model_pairs.programs import PROGRAMS, program

RESULTS = Path(__file__).with_name("peers.tsv")
LIBRARIES = (
    *("tensorflow-cpu", "torch", "keras", "tf_keras", "tf2onnx", "onnx2torch", "onnx2tf", "onnx"),
    *("transformers", "nobuco"),
)
# Errors by which a converter declines a model; any other exception is a crash.
REFUSALS = (NotImplementedError, ValueError, RuntimeError)
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.model_pairs import {module}
{module}.{call}
"""
_AT_ONCE = 10  # programs in one process, which has ten minutes


class Tool(NamedTuple):
    """One way to convert: title, the file it reads, what a user receives, and how it checks that itself."""

    title: str
    source: str
    result: str
    proof: str = "none"


_OWN_PROOF = "`verify`: outputs and layers, in float32 and float64"
TOOLS = {
    "torch": {
        "ckpttool": Tool(
            "ckpttool `--like`", "`.keras`", "a state_dict for the user's own module", _OWN_PROOF
        ),
        "ckpttool_graph": Tool(
            "ckpttool `--like`", "SavedModel", "a state_dict for the user's own module", _OWN_PROOF
        ),
        "keras_torch": Tool("Keras 3, torch backend", "`.keras`", "a Keras model on torch tensors"),
        "keras_torch_weights": Tool(
            "Keras 3, torch backend", "`.weights.h5` and the Keras code", "a Keras model on torch tensors"
        ),
        "onnx2torch": Tool("tf2onnx and onnx2torch", "SavedModel", "a torch.fx graph module"),
        "script": Tool("one-off script", "`.keras`", "the user's own module"),
    },
    "keras": {
        "ckpttool": Tool(
            "ckpttool `--like`", "state_dict `.pt`", "weights for the user's own model", _OWN_PROOF
        ),
        "ckpttool_graph": Tool(
            "ckpttool `--like`", "TorchScript", "weights for the user's own model", _OWN_PROOF
        ),
        "onnx2tf": Tool(
            *("torch.onnx and onnx2tf", "the live module", "a tf_keras (Keras 2) model"),
            "optional (`-cotof`): layers and outputs against ONNX",
        ),
        "nobuco": Tool(
            *("nobuco", "the live module", "a tf_keras (Keras 2) model"),
            "each operation against PyTorch's, within 1e-4, on the traced input",
        ),
        "script": Tool("one-off script", "state_dict as `.npz`", "the user's own model"),
    },
}
_OURS = {"torch": {"ckpttool": "keras", "ckpttool_graph": "saved_model"}}
_OURS["keras"] = {"ckpttool": "pt", "ckpttool_graph": "script"}


@dataclass(frozen=True)
class Outcome:
    """One conversion by one tool: its state, the time it took with the comparison, and why."""

    program: str
    target: str
    tool: str
    state: str
    seconds: float
    sentence: str = ""


# --- Processes with PyTorch -----------------------------------------------------------------------------


def export_torch(names: Sequence[str], folder: str) -> None:
    """Write the ONNX file of each torch module; print the time."""
    import torch

    from tests.model_pairs import torch_side

    for name in names:
        net, target = torch_side.build(name), str(Path(folder, name, "torch.onnx"))
        inputs = tuple(map(torch.from_numpy, torch_side.inputs(net.program)))
        titles = [f"in{number}" for number in range(len(inputs))]

        def export(net: Any = net, tensors: Any = inputs, target: str = target, titles: Any = titles) -> None:
            torch.onnx.export(net, tensors, target, input_names=titles, dynamo=False, opset_version=17)

        report(timed(name, "keras", "export", export))


def judge_torch(names: Sequence[str], folder: str, own: bool = False) -> None:
    """Convert Keras models to PyTorch with every tool; print a line of JSON for each outcome."""
    import keras
    import onnx2torch
    import torch

    from tests.model_pairs import keras_side, torch_side

    assert keras.backend.backend() == "torch"

    def outputs(net: Any, name: str) -> list[np.ndarray]:
        tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in keras_side.inputs(program(name))]
        with torch.no_grad():
            results = net(tensors if len(tensors) > 1 else tensors[0]) if _is_keras(net) else net(*tensors)
        results = results if isinstance(results, list | tuple) else [results]
        return [tensor.detach().numpy() for tensor in results]

    def whole(name: str) -> Any:
        keras.utils.clear_session()
        return outputs(keras.models.load_model(Path(folder, name, "functional.keras")), name)

    def weights(name: str) -> Any:
        keras.utils.clear_session()
        net = keras_side.functional(name)
        net.load_weights(Path(folder, name, "functional_.weights.h5"))
        return outputs(net, name)

    def onnx(name: str) -> Any:
        return outputs(onnx2torch.convert(str(Path(folder, name, "keras.onnx"))).eval(), name)

    def script(name: str) -> Any:
        keras.utils.clear_session()
        model = keras.models.load_model(Path(folder, name, "functional.keras"))
        net = torch_side.build(name, 5)
        keys = [key for key in net.state_dict() if not key.endswith("num_batches_tracked")]
        state = {
            key: torch.from_numpy(np.ascontiguousarray(_torch_axes(value)))
            for key, value in zip(keys, model.get_weights(), strict=True)
        }
        net.load_state_dict(state, strict=False)
        return torch_side.outputs(net)

    tools = {"keras_torch": whole, "keras_torch_weights": weights, "onnx2torch": onnx, "script": script}
    _judge("torch", names, folder, {} if own else tools)


def _is_keras(net: Any) -> bool:
    return any(base.__module__.startswith("keras.") for base in type(net).__mro__)


def _torch_axes(value: np.ndarray) -> np.ndarray:
    """Return a kernel with the axes of PyTorch, as the usual script permutes them."""
    if value.ndim < 2:
        return value
    return value.transpose(value.ndim - 1, value.ndim - 2, *range(value.ndim - 2))


# --- Processes with TensorFlow --------------------------------------------------------------------------


def export_keras(names: Sequence[str], folder: str) -> None:
    """Write the ONNX file of each SavedModel; print the time."""
    from tf2onnx import convert as tf2onnx

    for name in names:
        at = Path(folder, name)
        arguments = ["--saved-model", str(at / "saved_model"), "--output", str(at / "keras.onnx")]

        def export(arguments: Sequence[str] = arguments) -> None:
            sys.argv = ["tf2onnx.convert", *arguments, "--opset", "17"]
            tf2onnx.main()

        report(timed(name, "torch", "export", export))


def judge_keras(names: Sequence[str], folder: str, own: bool = False) -> None:
    """Convert torch modules to Keras with every tool; print a line of JSON for each outcome."""
    import onnx2tf
    import tensorflow as tf

    from tests.model_pairs import keras_side

    # onnx2tf downloads images with which it checks itself, unless they are in the working directory.
    images = np.random.default_rng(0).random((20, 128, 128, 3), dtype=np.float32)
    np.save("calibration_image_sample_data_20x128x128x3_float32.npy", images)

    def onnx(name: str) -> Any:
        at, definition = Path(folder, name), program(name)
        model = onnx2tf.convert(
            input_onnx_file_path=str(at / "torch.onnx"),
            output_folder_path=str(at / "onnx2tf"),
            non_verbose=True,
            # As its documentation says for inputs that are not images with channels first.
            keep_shape_absolutely_input_names=[
                f"in{number}" for number, input_ in enumerate(definition.inputs) if input_.kind != "image"
            ],
        )
        last = keras_side.inputs(definition)
        axes = [{"image": 1, "frames": 2}.get(input_.kind) for input_ in definition.inputs]
        first = [x if axis is None else np.moveaxis(x, -1, axis) for x, axis in zip(last, axes, strict=True)]
        choices = list(zip(first, last, strict=True))
        arrays = []
        for value in model.inputs:
            number = int(value.name.partition(":")[0].removeprefix("in"))
            fitting = [x for x in choices[number] if x.shape[1:] == tuple(value.shape[1:])]
            arrays.append(tf.constant(fitting[-1], value.dtype))
        outputs = model(arrays if len(arrays) > 1 else arrays[0])
        return [np.asarray(x) for x in (outputs if isinstance(outputs, list | tuple) else [outputs])]

    def script(name: str) -> Any:
        net = keras_side.build(name, "functional", 5)
        with np.load(Path(folder, name, "torch.npz")) as file:
            values = [_keras_axes(file[key]) for key in file.files if not key.endswith("num_batches_tracked")]
        net.set_weights(values)
        return keras_side.outputs(net, program(name))

    _judge("keras", names, folder, {} if own else {"onnx2tf": onnx, "script": script})


def _keras_axes(value: np.ndarray) -> np.ndarray:
    return value if value.ndim < 2 else value.transpose(*range(2, value.ndim), 1, 0)


# --- The referee ----------------------------------------------------------------------------------------


def _judge(target: str, names: Sequence[str], folder: str, tools: dict[str, Callable[[str], Any]]) -> None:
    file = "functional_outputs.npz" if target == "torch" else "torch_outputs.npz"
    for name in names:
        for tool, source in _OURS[target].items():
            at = Path(folder, name, harness.SOURCES["keras" if target == "torch" else "torch"][source])
            start = time.process_time()
            with contextlib.redirect_stdout(io.StringIO()):
                cell = harness.attempt(target, name, source, "like", at)
            elapsed_s = time.process_time() - start
            report(Outcome(name, target, tool, cell.state, elapsed_s, cell.sentence))
        with np.load(Path(folder, name, file)) as archive:
            outputs = [archive[key] for key in archive.files]
        for tool, convert in tools.items():

            def run(convert: Any = convert, name: str = name, outputs: Any = outputs) -> None:
                cell = convert(name)
                if len(cell) != len(outputs):
                    raise harness.WrongError(f"{len(cell)} outputs instead of {len(outputs)}")
                for value, expected in zip(cell, outputs, strict=True):
                    _compare(value, expected)

            report(timed(name, target, tool, run))


def _compare(values: np.ndarray, expected: np.ndarray) -> None:
    """Raise WrongError unless the values are equal with channels in either position."""
    views = [values, np.moveaxis(values, -1, 1), np.moveaxis(values, 1, -1)] if values.ndim > 2 else [values]
    errors = []
    for view in views:
        try:
            harness.compare(view, expected)
        except harness.WrongError as error:
            errors.append(error)
        else:
            return
    raise next((error for error in errors if "differ" in str(error)), errors[0])


def timed(name: str, target: str, tool: str, run: Callable[[], None]) -> Outcome:
    """Run a conversion that raises WrongError for other outputs; return what became of it."""
    state, sentence, start = "right", "", time.process_time()
    # The converters print much, and end the process on an error.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            run()
        except harness.WrongError as error:
            state, sentence = "WRONG", str(error)
        except REFUSALS as error:
            state, sentence = "refused", f"{type(error).__name__}: {error}"
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a crash is a result
            state, sentence = "crash", f"{type(error).__name__}: {error}"
    return Outcome(name, target, tool, state, time.process_time() - start, " ".join(sentence.split())[:200])


def report(outcome: Outcome) -> None:
    """Print an outcome as a line of JSON."""
    print("\n" + json.dumps(asdict(outcome)), flush=True)  # noqa: T201  # the parent reads it


# --- The whole ------------------------------------------------------------------------------------------


def run(names: Sequence[str], folder: Path, own: bool = False) -> Iterator[Outcome]:
    """Convert these programs with every tool, or with ckpttool alone, in both directions."""
    for part in [list(names[start : start + _AT_ONCE]) for start in range(0, len(names), _AT_ONCE)]:
        for framework, sources in (
            ("keras", ["keras", "weights", "saved_model"]),
            ("torch", ["pt", "script", "npz"]),
        ):
            call = f"make({framework!r}, {part!r}, {str(folder)!r}, {sources!r})"
            _child(framework, call, folder, module="harness")
        exported = {
            (outcome.target, outcome.program): outcome
            for framework in (() if own else ("keras", "torch"))
            for outcome in _child(framework, f"export_{framework}({part!r}, {str(folder)!r})", folder)
        }
        for framework in ("torch", "keras"):
            for outcome in _child(framework, f"judge_{framework}({part!r}, {str(folder)!r}, {own})", folder):
                yield joined(outcome, exported) if outcome.tool in ("onnx2torch", "onnx2tf") else outcome


def joined(outcome: Outcome, exported: dict[tuple[str, str], Outcome]) -> Outcome:
    """Return the outcome of both steps: a failed export counts, and times add up."""
    first = exported[outcome.target, outcome.program]
    values = asdict(outcome) | {"seconds": first.seconds + outcome.seconds}
    if first.state != "right":
        values |= {"state": first.state, "sentence": f"to ONNX: {first.sentence}", "seconds": first.seconds}
    return Outcome(**values)


def _child(framework: str, call: str, folder: Path, module: str = "peers") -> list[Outcome]:
    env = dict(os.environ)
    if framework == "torch":
        env["KERAS_BACKEND"] = "torch"
    name = "torch" if framework == "torch" else "tensorflow"
    status, output = warm.run(name, _PROGRAM.format(root=str(ROOT), module=module, call=call), folder, env)
    if status:
        raise RuntimeError(f"{call[:100]} ended with {status}:\n{output[-4000:]}")
    return read_outcomes(output)


def read_outcomes(output: str) -> list[Outcome]:
    """Return the outcomes that a process reported among other lines."""
    return [Outcome(**json.loads(line)) for line in output.splitlines() if line.startswith('{"program"')]


def record(outcomes: Iterable[Outcome]) -> None:
    """Write the versions and the outcomes; programs that were not run keep their lines."""
    every = {(outcome.program, outcome.target, outcome.tool): outcome for outcome in (*recorded(), *outcomes)}
    lines = sorted(
        "\t".join((e.program, e.target, e.tool, e.state, f"{e.seconds:.4f}", e.sentence))
        for e in every.values()
    )
    head = f"# {', '.join(versions())}"
    RESULTS.write_text("\n".join((head, *lines)) + "\n", encoding="utf-8")


def versions() -> list[str]:
    """Return the versions of the libraries here."""
    return [f"{name} {metadata.version(name)}" for name in LIBRARIES]


def recorded() -> list[Outcome]:
    """Return the recorded outcomes."""
    outcomes = []
    for line in RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else ():
        if not line.startswith("#"):
            name, target, tool, state, seconds, sentence = line.split("\t")
            outcomes.append(Outcome(name, target, tool, state, float(seconds), sentence))
    return outcomes


_PAGE = """## Other converters

The same pairs and tolerance; {torch} models to PyTorch and {keras} to Keras. *Time* is the median
ratio of CPU times to ckpttool's first row; loads differed, so ratios are rough.

- Keras 3 with the torch backend gives a Keras model on torch tensors, and no way back.
- onnx2torch gives a `torch.fx` graph, onnx2tf a Keras 2 model. Names and classes are lost.
- The one-off script reverses kernels and copies weights in order.
- nobuco needs Keras 2, here tf_keras, and was given a converter of `torch.relu`. It ran on 20 models (below).

Versions: {versions}.

"""
_TRANSFORMERS = """### Transformers

Tiny models of Transformers 4.49 (5 has no TensorFlow models): `from_pretrained(..., from_tf=True)` and
`from_pt=True` beside `convert --like`, CPU time in ms. Its loaders name weights without a counterpart; they
compare no outputs.

| model | to TensorFlow: Transformers, ckpttool | to PyTorch: Transformers, ckpttool |
|---|---|---|
"""
_SAME = """
### The same 20 models

{names}.

*Checks* is what a converter proves by itself; *s* is the median CPU time of a conversion without it. Refused
includes crashes.

"""
_TWINS_PAGE = """
### Models written twice by hand

Those of the {count} architectures (above) on which all tools of a direction were run, each once. The others
receive the source only, and return a separate object; ckpttool fills the user's model. Keras 3 was given
no code of custom classes, without which it reads no `.keras` file of them: most of its crashes.

"""
_TWINS_HEAD = """| to | tool | reads | right | assumed, corrected | refused, crash | wrong | of |
|---|---|---|---:|---:|---:|---:|---:|
"""
# What precedes the names of these models in the record.
TWINS = "twins/"
SAME = (
    *("mlp", "mlp_bn", "mlp_ln", "mlp_square", "cnn1d_plain", "cnn2d_bn", "cnn2d_last", "cnn3d_plain"),
    *("dueling", "siamese", "resnet", "gated", "two_inputs", "flat_heads", "decoder_bn", "decoder_square"),
    *("dcgan", "vae", "frames_lstm", "rows_lstm"),
)


def page() -> str:
    """Return the section of the page of the pairs of models that shows other converters."""
    outcomes = [outcome for outcome in recorded() if outcome.program in PROGRAMS]
    if not outcomes:
        return ""
    head = RESULTS.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    count = {t: len({outcome.program for outcome in outcomes if outcome.target == t}) for t in TOOLS}
    text = _PAGE.format(**count, versions=head)
    text += "| to | tool | reads | right | assumed | refused, crash | wrong | time |\n"
    text += f"|---|---|---|{'---:|' * 5}\n"
    for target, title in (("torch", "PyTorch"), ("keras", "Keras")):
        base = {e.program: e for e in outcomes if e.target == target and e.tool == "ckpttool"}
        for key, tool in TOOLS[target].items():
            mine = [outcome for outcome in outcomes if outcome.target == target and outcome.tool == key]
            if len({outcome.program for outcome in mine}) < count[target]:
                continue  # it ran on some models only
            counts = Counter(outcome.state for outcome in mine)
            done = [outcome for outcome in mine if outcome.state in harness.FINE]
            ratios = [outcome.seconds / max(1e-6, base[outcome.program].seconds) for outcome in done]
            assumed = counts["assumed"] + counts["corrected"]
            wrong = counts["WRONG"] + counts["WRONG ASSUMED"]
            text += f"| {title} | {tool.title} | {tool.source} | {counts['right']} | {assumed} "
            text += f"| {counts['refused'] + counts['crash']} | {wrong} "
            text += f"| {statistics.median(ratios) if ratios else 0:.1f} |\n"
    return f"{text}{_same_models(outcomes)}{_of_twins()}\n{_of_transformers()}"


def _same_models(outcomes: Sequence[Outcome]) -> str:
    """Return the table of all tools on the same models, with what each proves by itself."""
    text = _SAME.format(names=textwrap.fill(", ".join(f"`{name}`" for name in SAME), 110))
    text += "| to | tool | reads | right | assumed | refused | wrong | s | checks |\n"
    text += f"|---|---|---|{'---:|' * 5}---|\n"
    for target, title in (("torch", "PyTorch"), ("keras", "Keras")):
        for key, tool in TOOLS[target].items():
            mine = [e for e in outcomes if (e.target, e.tool) == (target, key) and e.program in SAME]
            counts = Counter(outcome.state for outcome in mine)
            assumed = counts["assumed"] + counts["corrected"]
            refused = counts["refused"] + counts["crash"]
            wrong = counts["WRONG"] + counts["WRONG ASSUMED"]
            median_s = statistics.median([outcome.seconds for outcome in mine]) if mine else 0
            text += f"| {title} | {tool.title} | {tool.source} | {counts['right']} | {assumed} | {refused} "
            text += f"| {wrong} | {median_s:.2f} | {tool.proof} |\n"
    return text


def _of_twins() -> str:
    """Return the table of all tools on the models written twice, "" without records."""
    outcomes = [record for record in recorded() if record.program.startswith(TWINS)]
    if not outcomes:
        return ""
    text = _TWINS_PAGE.format(count=len(twins.usual_names())) + _TWINS_HEAD
    text += _twin_rows(outcomes, twins.recorded(), twins.usual_names())
    unseen = twins.recorded(twins.UNSEEN_RESULTS)
    text += f"\n### Unseen architectures by other converters\n\n{_TWINS_HEAD}"
    return text + _twin_rows(outcomes, unseen, [cell.pair for cell in unseen])


def _twin_rows(
    outcomes: Sequence[Outcome], recorded_cells: Sequence[twins.Cell], names: Sequence[str]
) -> str:
    """Return the rows of all tools on those of these pairs that all of them converted."""
    text = ""
    for target, title in (("torch", "PyTorch"), ("keras", "Keras")):
        rows = []
        ran: dict[str, set[str]] = {}
        for outcome in outcomes:
            if outcome.target == target and outcome.program.removeprefix(TWINS) in names:
                ran.setdefault(outcome.tool, set()).add(outcome.program.removeprefix(TWINS))
        common = set(names).intersection(*ran.values())
        for form in ("keras", "saved_model") if target == "torch" else ("pt", "script", "onnx"):
            cells = [cell for cell in recorded_cells if cell.pair in common and cell.source == form]
            rows.append(("ckpttool", twins.FORM_TITLES[form], [cell.state for cell in cells]))
        for key, tool in TOOLS[target].items():
            mine = [
                outcome.state
                for outcome in outcomes
                if (outcome.target, outcome.tool) == (target, key)
                and outcome.program.removeprefix(TWINS) in common
            ]
            rows += [(tool.title, tool.source, mine)] if mine else []
        for tool_title, source, states in rows:
            counts = Counter(states)
            refused = counts["refused"] + counts["crash"] + counts["unable"]
            wrong = counts["WRONG"] + counts["WRONG ASSUMED"]
            assumed = counts["assumed"] + counts["corrected"]
            text += f"| {title} | {tool_title} | {source} | {counts['right']} | {assumed} | {refused} "
            text += f"| {wrong} | {len(states)} |\n"
    return text


def _of_transformers() -> str:
    outcomes = {(outcome.program, outcome.target, outcome.tool): outcome for outcome in recorded()}
    rows: dict[str, dict[str, str]] = {}
    options = []
    for (name, target, tool), outcome in outcomes.items():
        if tool == "transformers":
            own = outcomes[name, target, "ckpttool"]
            cell = f"{outcome.state} {outcome.seconds * 1000:,.0f}, {own.state} {own.seconds * 1000:,.0f}"
            rows.setdefault(name, {})[target] = cell
            options += [f"\n{name} needs `{own.sentence}`.\n"] if own.sentence else []
    text = "".join(f"| {name} | {row['keras']} | {row['torch']} |\n" for name, row in rows.items())
    return f"{_TRANSFORMERS}{text}{''.join(options)}" if text else ""


def _transformers(folder: Path) -> Iterator[Outcome]:
    from tests.model_pairs import hugging_face

    yield from hugging_face.run(folder, _child)


def main() -> None:
    """Run the converters and print what they do."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_pairs.peers", description=__doc__)
    parser.add_argument("--only", default="*", help="patterns of programs' names, separated by commas")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--own", action="store_true", help="convert with ckpttool alone")
    parser.add_argument("--read", metavar="FILE", help="outcomes that nobuco_peer printed")
    parser.add_argument("--transformers", action="store_true", help="convert only the models of Transformers")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the files in this folder")
    options = parser.parse_args()
    patterns = options.only.split(",")
    names = [
        name
        for name in PROGRAMS
        if "__" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]
    folder = Path(options.keep or tempfile.mkdtemp(prefix="peers"))
    folder.mkdir(exist_ok=True)
    outcomes = []
    result = _transformers(folder) if options.transformers else run(names, folder, options.own)
    if options.read:
        result = iter(read_outcomes(Path(options.read).read_text(encoding="utf-8")))
    try:
        for row in result:
            outcomes.append(row)
            print(  # noqa: T201
                f"{row.program:20} {row.target:5} {row.tool:20} {row.state:8} {row.seconds:6.2f} s "
                f"{row.sentence[:120]}",
                flush=True,
            )
    finally:
        if options.record:
            record(outcomes)
    if not options.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
