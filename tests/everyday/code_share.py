"""Run the code that `convert --code` writes for many files, without this package, and compare its outputs.

usage: python -m tests.everyday.code_share [corpus] [everyday] [agents] [--targets NAMES] [--match PATTERN]
       [--folder FOLDER] [--record]

`corpus` are real checkpoints, `everyday` the files of the matrix, `agents` those of tests/agent_truth; with
--folder the files are those that an earlier run made there. Each file whose computation is known is converted
with its code, with the facts that the message names (bounds of -1 and 1, a ReLU) where that needs some. A
process in which ckpttool cannot be imported runs the code. Its outputs are compared with

- the actions of the RL library, or the outputs of the framework, that were recorded with the file;
- ONNX Runtime, TorchScript and Keras, which run the source itself;
- else the restored agent or the source's graph in NumPy.

PyTorch must load every tensor of the model, and Keras must refuse a file with one variable less. Where exit
status 1 names what is not applied, the hint is followed if it states an activation. Other outputs may differ
from the recorded ones only where the code states what it assumes or the exit status names what is missing,
and must then be those of the restored agent.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ckpttool
from ckpttool.core import CkpttoolError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.restore import recognize_playable_agent
from ckpttool.formats import open_checkpoint
from ckpttool.graphs import evaluate, read_graph
from tests.everyday.corpus_share import CORPUS, sources
from tests.everyday.verdicts import OUTPUTS

RESULTS = Path(__file__).with_name("code.tsv")
SUFFIXES = {"torch": ".pt", "keras": ".weights.h5", "tf": ""}
ROWS, STEPS = 16, 3
# What no file of a lone policy contains; a wrong guess changes both sides alike.
GUESSES: tuple[dict[str, Any], ...] = (
    {},
    {"action_low": -1.0, "action_high": 1.0},
    {"activations": "relu"},
    {"activations": "relu", "head": "tanh", "action_low": -1.0, "action_high": 1.0},
)
WRITTEN, RAN, STRICT, EQUAL = range(1, 5)
"""How far a file came; 0 is refused."""
STATES = ("written", "run", "strict", "equal")
NAMED = "exit status 1 names it: "
"""What makes outputs differ and cannot be applied, such as a layer of an own class."""
STATED = "the first lines of the code state what is assumed: "
"""What no file contains and the code therefore assumes, such as no residual sums between weights alone."""


class Source(NamedTuple):
    """A file, the facts to try, and what its own program computes of these inputs: actions and outputs."""

    name: str
    path: str
    facts: tuple[dict[str, Any], ...] = GUESSES
    inputs: list[np.ndarray] | None = None
    actions: np.ndarray | None = None
    outputs: np.ndarray | None = None
    original: str = ""


class Verdict(NamedTuple):
    """What became of the code of one file for one target: how far it came, and why not further."""

    set: str
    target: str
    name: str
    state: int
    words: str = ""


class Truth(NamedTuple):
    """The inputs of each step with the outputs, and how far float32 may be from these.

    The tolerance is relative to the largest output: a few times what NumPy's float32 is from its float64.
    """

    inputs: list[list[np.ndarray]]
    outputs: list[np.ndarray]
    tolerance: float = OUTPUTS


class Job(NamedTuple):
    """A written file with its code, what it must compute, and why the exit status is 1 if it is.

    `played` is what the restored agent computes, as the code with what it assumes and without what is named.
    """

    verdict: Verdict
    code: str
    target: str
    truth: Truth
    original: str = ""
    named: str = ""
    played: np.ndarray | None = None


# --- The files -------------------------------------------------------------------------------------------


def corpus_files(_: Path) -> Iterator[Source]:
    """Yield the checkpoints of the shared corpus."""
    for part in ("tf", "torch", "exported"):
        for path in sources(str(CORPUS / part)):
            yield Source(os.path.relpath(path, CORPUS), path, original=path)


def everyday_files(folder: Path) -> Iterator[Source]:
    """Yield the files of the matrix, with the outputs that their framework computed."""
    from tests.everyday.cases import CASES, INPUTS
    from tests.everyday.matrix import make

    if not folder.is_dir():
        make(CASES, folder)
    for case in CASES:
        shape, classes = INPUTS[case.net]
        draw = np.random.default_rng(1)
        inputs = draw.integers(0, classes, (5, *shape)) if classes else draw.standard_normal((5, *shape))
        inputs = inputs if classes else inputs.astype(np.float32)
        if case.net == "cnn" and case.side != "torch":
            inputs = np.moveaxis(inputs, 1, -1)
        outputs = np.load(folder / case.name / "reference.npz")["outputs"]
        facts, actions = GUESSES, None
        if case.policy:
            known = dict(zip(case.facts[::2], case.facts[1::2], strict=True))
            names = {"--activation": "activations", "--head": "head"}
            facts_given = {names[option]: value for option, value in known.items()}
            ends = {"action_low": -2.0, "action_high": 2.0}
            facts = (ends, {**ends, **facts_given}, {})
            actions = np.clip((1 if case.net == "gaussian" else 2) * outputs, -2, 2)
        yield Source(case.name, str(folder / case.name / case.path), facts, [inputs], actions, outputs)


def generated_agents(folder: Path) -> Iterator[Source]:
    """Yield the generated agents of the installed libraries, with the libraries' own actions."""
    from tests.agent_truth.agents import generators
    from tests.agent_truth.matrix import make

    if not folder.is_dir():
        folder.mkdir()
        make(folder, generators())
    for file in sorted(folder.glob("*.json")):
        case = json.loads(file.read_text())
        if file.name == "absent.json" or case["env"] is not None:
            continue
        if not any(Path(f"{case['file']}{end}").exists() for end in ("", ".index")):
            raise FileNotFoundError(case["file"])
        known = dict(case["known"])
        facts = {"action_low": case["low"], "action_high": case["high"]}
        more = {"head": known.get("head"), "activations": known.get("activation")}
        if isinstance(more["activations"], str):
            more["activations"] = more["activations"].split(",")
        # What no file states is given where it is known.
        tries = ({**facts, **more}, facts, {}) if known else ({}, facts)
        observations = np.load(file.with_name("obs.npy"))
        yield Source(file.stem, case["file"], tries, [observations], np.load(file.with_suffix(".npy")))


SETS = {"corpus": corpus_files, "everyday": everyday_files, "agents": generated_agents}
NAMES = {"corpus": "public checkpoints", "everyday": "everyday files", "agents": "agents of RL libraries"}


# --- Writing ---------------------------------------------------------------------------------------------


def computes(path: str) -> bool:
    """Return whether the computation of a file is known: a policy, or a graph."""
    try:
        checkpoint = open_checkpoint(path)
    except CkpttoolError:
        return False
    for read in (read_graph, recognize_playable_agent):
        try:
            result = read(checkpoint)
        except CkpttoolError:
            continue
        if result is not None and (read is read_graph or result.policy is not None):
            return True
    return False


def write(source: Source, kind: str, target: str, folder: Path) -> tuple[Job | None, Verdict]:
    """Convert a file with its code; return what to run, None where it is refused."""
    code, path = folder / f"{target}.py", f"{folder / 'out'}{SUFFIXES[target]}"
    first = Verdict(kind, target, source.name, 0)
    for guess in source.facts:
        facts = AgentFacts(**guess) if guess else None
        try:
            done = ckpttool.convert(
                source.path, path, to=target, code=str(code), facts=facts, force=True, sync=False
            )
        except CkpttoolError as error:
            last = " ".join(str(error.message).split()) + (f" ({error.found})" if error.found else "")
            continue
        if not done.written:
            return None, first._replace(words=f"unmapped entries: {', '.join(done.report.unused[:2])}")
        try:
            text = code.read_text()
            known = truth(source, facts, acts="\ndef act(" in text)
        except CkpttoolError as error:
            return None, first._replace(state=WRITTEN, words=f"nothing to compare with: {error.message}")
        verdict = first._replace(state=WRITTEN)
        named = ", ".join(dict.fromkeys(f"{entry.use}: {entry.what}" for entry in done.open_entries))
        stated_ones = (entry.value for entry in done.open_entries if entry.what == "activation")
        activation = next((one for one in stated_ones if " = " in one), "")
        if activation and "activations" not in guess:
            # The printed hint, with the name that the file beside the checkpoint states.
            followed = {**guess, "activations": [activation.rpartition(" = ")[2]]}
            return write(source._replace(facts=(followed,)), kind, target, folder)
        stated = (named or "\n# assumed: " in text) and source.actions is not None
        played = restored_actions(source, facts) if stated else None
        return Job(verdict, str(code), done.target, known, source.original, named, played), verdict
    return None, first._replace(words=last)


def restored_actions(source: Source, facts: AgentFacts | None) -> np.ndarray | None:
    """Return the actions of the restored agent, None if it is refused."""
    try:
        with ckpttool.load_agent(source.path, facts=facts) as agent:
            return np.asarray(agent.predict(*(source.inputs or ()))[0])
    except CkpttoolError:
        return None


def truth(source: Source, facts: AgentFacts | None, *, acts: bool) -> Truth:
    """Return inputs, and the outputs that the code must compute for them."""
    recorded = source.actions if acts else source.outputs
    if recorded is not None and source.inputs is not None:
        return Truth([source.inputs], [recorded], 2 * OUTPUTS)
    if not acts:
        return model_truth(source)
    inputs, actions = [], {}
    for dtype in ("float64", "float32"):
        with ckpttool.load_agent(source.path, facts=facts, dtype=dtype) as agent:
            drawn = [observations(agent.observation_space, step) for step in range(STEPS)]
            state, actions[dtype] = None, []
            for observation in drawn:
                action, state = agent.predict(observation, state)
                actions[dtype].append(np.asarray(action))
            inputs = [[*sample.values()] if isinstance(sample, dict) else [sample] for sample in drawn]
    apart = max(map(difference, actions["float32"], actions["float64"]))
    return Truth(inputs, actions["float64"], max(OUTPUTS, 4 * apart))


def observations(space: Any, seed: int) -> Any:
    """Return rows of a space: numbers of its type within its bounds, normal numbers without bounds."""
    if hasattr(space, "spaces"):
        return {name: observations(space, seed) for name, space in space.spaces.items()}
    draw = np.random.default_rng(seed)
    if not hasattr(space, "low"):
        space.seed(seed)
        return np.stack([np.asarray(space.sample()) for _ in range(ROWS)])
    shape = (ROWS, *space.shape)
    if space.dtype.kind in "iu" or len(space.shape) == 3:
        return draw.integers(0, 256, shape).astype(space.dtype)
    return np.clip(draw.standard_normal(shape), space.low, space.high).astype(space.dtype)


def model_truth(source: Source) -> Truth:
    """Return random inputs of a model, and its outputs: those of ONNX Runtime, else of its graph."""
    graph = read_graph(open_checkpoint(source.path))
    assert graph is not None
    # The files that state no shape are memories of one row: their kernel has the width.
    layers = [graph.constants.get(node.inputs[1]) for node in graph.nodes if node.op == "LSTM"]
    width = next((layer.shape[-1] for layer in layers if layer and layer.shape), 3)
    for rows in (1,) if layers else (2, 1):
        draw, inputs = np.random.default_rng(0), {}
        for value in graph.inputs:
            shape = [size if isinstance(size, int) else rows for size in value.shape or (rows, width)]
            kind = np.dtype(value.dtype or "float32")
            numbers = draw.standard_normal(shape) if kind.kind == "f" else draw.integers(0, 2, shape)
            inputs[value.name] = np.asarray(numbers, kind)
        try:
            outputs = next(iter(evaluate(graph, inputs).values()))
        except CkpttoolError:
            # Its state has one row.
            if rows == 1:
                raise
            continue
        break
    if source.path.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(source.path, providers=["CPUExecutionProvider"])
        (outputs, *_) = session.run(None, inputs)
    return Truth([[*inputs.values()]], [outputs])


# --- Running ---------------------------------------------------------------------------------------------

PROGRAM = """
import importlib.util, json, os, shutil, sys, traceback
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ckpttool", "tests"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Absent())
import numpy as np

def run(job):
    arrays = np.load(job["arrays"])
    steps = [[arrays[name] for name in names] for names in job["steps"]]
    spec = importlib.util.spec_from_file_location("written", job["code"])
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    with watched() as loaded:
        model = code.load(job["target"])
    states, kept = [], {}
    for step, inputs in enumerate(steps):
        if hasattr(code, "act"):
            result = code.act(model, *inputs, *states)
            result, states = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        else:
            result = call(model, inputs)
        kept[f"arr_{step}"] = np.asarray(result)
    own = original(job["original"], steps) if not hasattr(code, "act") else None
    kept |= {} if own is None else {"own": np.asarray(own)}
    # NumPy reads no bfloat16 from a file.
    for name, each in kept.items():
        kept[name] = each.astype("float32") if each.dtype.kind == "V" else each
    np.savez(job["results"], **kept)
    return strict(code, model, job["target"], loaded)

"""
SIDES = {
    "torch": """
import contextlib, torch
@contextlib.contextmanager
def watched():
    before, loaded = torch.nn.Module.load_state_dict, set()
    def load(self, state, *rest, **more):
        own = self.state_dict(keep_vars=True)
        loaded.update(id(own[name]) for name in state if name in own)
        return before(self, state, *rest, **more)
    torch.nn.Module.load_state_dict = load
    try:
        yield loaded
    finally:
        torch.nn.Module.load_state_dict = before

def strict(code, model, target, loaded):
    left = [name for name, each in model.state_dict(keep_vars=True).items() if id(each) not in loaded]
    return f"not loaded: {left[:3]}" if left else ""

def call(model, inputs):
    with torch.no_grad():
        result = model(*map(torch.from_numpy, inputs))
    result = result[0] if isinstance(result, tuple) else result
    return result.float() if result.dtype == torch.bfloat16 else result

def original(path, steps):
    if not path.endswith((".pt", ".pth")):
        return None
    try:
        return call(torch.jit.load(path).eval(), steps[0])
    except RuntimeError:
        return None
""",
    "keras": """
import contextlib, h5py, keras, tensorflow as tf
watched = lambda: contextlib.nullcontext()

def strict(code, model, target, loaded):
    if not target.endswith(".h5"):
        return ""
    names = []
    with h5py.File(target) as file:
        file.visititems(lambda name, each: names.append(name) if hasattr(each, "shape") else None)
    names = [name for name in names if "optimizer" not in name]
    less = target.replace(".weights.h5", "_less.weights.h5")
    shutil.copyfile(target, less)
    with h5py.File(less, "a") as file:
        del file[names[0]]
    try:
        code.load(less)
    except Exception:
        return ""
    return f"loads without {names[0]}"

def call(model, inputs):
    result = model(*inputs)
    return result[0] if isinstance(result, (tuple, list)) else result

def original(path, steps):
    if not path.endswith((".keras", ".h5")):
        return None
    try:
        return call(keras.models.load_model(path, compile=False), steps[0])
    except Exception:
        return None
""",
}
SIDES["tf"] = SIDES["keras"]
LOOP = """
for line in open(sys.argv[1]):
    job = json.loads(line)
    try:
        answer = {"strict": run(job)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print("ANSWER" + json.dumps(answer), flush=True)
"""


def run(target: str, jobs: Sequence[Job], folder: Path) -> Iterator[Verdict]:
    """Run the codes of one target in one process without this package; yield what became of each."""
    lines = []
    for number, job in enumerate(jobs):
        names = [[f"s{step}_{n}" for n in range(len(input_))] for step, input_ in enumerate(job.truth.inputs)]
        arrays = {
            name: array
            for row, step in zip(names, job.truth.inputs, strict=True)
            for name, array in zip(row, step, strict=True)
        }
        files = {name: f"{folder}/{target}_{number}_{name}.npz" for name in ("arrays", "results")}
        np.savez(files["arrays"], **arrays)
        more = {"code": job.code, "target": job.target, "steps": names, "original": job.original}
        lines.append({**files, **more})
    listed = folder / f"{target}.jobs"
    listed.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    program = folder / f"{target}_program.py"
    program.write_text(PROGRAM + SIDES[target] + LOOP)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-P", str(program), str(listed)],
        cwd=folder,
        env={**kept, **quiet},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    answers = [json.loads(line[6:]) for line in ran.stdout.splitlines() if line.startswith("ANSWER")]
    if len(answers) != len(jobs):
        raise RuntimeError(f"{target}: {len(answers)} answers for {len(jobs)} files\n{ran.stderr[-3000:]}")
    for job, line, answer in zip(jobs, lines, answers, strict=True):
        yield judge(job, str(line["results"]), answer)


def judge(job: Job, results: str, answer: dict[str, str]) -> Verdict:
    """Return what became of a code that ran."""
    if "error" in answer:
        return job.verdict._replace(words=answer["error"])
    if answer["strict"]:
        return job.verdict._replace(state=RAN, words=answer["strict"])
    with np.load(results) as file:
        outputs = [file[f"arr_{step}"] for step in range(len(job.truth.inputs))]
        own = [file[name] for name in file.files if name == "own"]
    pairs = [*zip(outputs, job.truth.outputs, strict=True), *zip(outputs, own, strict=False)]
    apart = max(difference(output, expected) for output, expected in pairs)
    how = "the source itself; " * len(own)
    if not apart <= job.truth.tolerance:
        words = f"outputs differ by {apart:.1e} of the largest"
        if job.played is not None and difference(outputs[0], job.played) <= 2 * OUTPUTS:
            words = f"{NAMED}{job.named}" if job.named else f"{STATED}{words}"
        return job.verdict._replace(state=STRICT, words=words)
    return job.verdict._replace(state=EQUAL, words=f"{how}{apart:.0e}")


def difference(outputs: np.ndarray, expected: np.ndarray) -> float:
    """Return how far outputs are apart, relative to the largest, at least 1."""
    if outputs.size != expected.size:
        return float("inf")
    if not outputs.size:
        return 0.0
    apart = np.abs(outputs.reshape(expected.shape).astype(np.float64) - expected)
    return float(apart.max() / max(1.0, float(np.abs(expected).max())))


def measured(
    names: Sequence[str], targets: Sequence[str], folder: Path, match: str = "", output: Path | None = None
) -> Iterator[Verdict]:
    """Yield the verdicts of all files of these sets."""
    jobs: dict[str, list[Job]] = {target: [] for target in targets}
    for kind in names:
        for number, source in enumerate(SETS[kind]((output or folder) / kind)):
            if not re.search(match, source.name) or not computes(source.path):
                continue
            for target in targets:
                target_folder = folder / f"{kind}_{number}_{target}"
                target_folder.mkdir()
                job, verdict = write(source, kind, target, target_folder)
                if job is None:
                    yield verdict
                else:
                    jobs[target].append(job)
    for target, chosen in jobs.items():
        yield from run(target, chosen, folder) if chosen else ()


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the counts by set and target, and the files that are not equal by reason."""
    lines = ["set        target  files  written  run  strict  equal"]
    for kind, target in dict.fromkeys((verdict.set, verdict.target) for verdict in verdicts):
        states = [verdict.state for verdict in verdicts if (verdict.set, verdict.target) == (kind, target)]
        counts = [sum(state >= least for state in states) for least in (0, WRITTEN, RAN, STRICT, EQUAL)]
        lines.append("{:10} {:6} {:6} {:8} {:4} {:7} {:6}".format(kind, target, *counts))
    reasons = Counter(
        (verdict.target, re.sub(r"\d+", "N", verdict.words)) for verdict in verdicts if verdict.state < EQUAL
    )
    for (target, words), count in reasons.most_common():
        lines.append(f"\n{count} x {target} | {words}")
        lines += [
            f"    {row.set} {row.name}: {row.words}"
            for row in verdicts
            if row.state < EQUAL and (row.target, re.sub(r"\d+", "N", row.words)) == (target, words)
        ][:12]
    return "\n".join(lines)


def recorded() -> list[Verdict]:
    """Return the recorded verdicts, none where there is no record."""
    if not RESULTS.exists():
        return []
    rows = [line.split("\t") for line in RESULTS.read_text(encoding="utf-8").splitlines()[1:]]
    return [Verdict(kind, target, name, int(state), words) for kind, target, name, state, words in rows]


def record(verdicts: Sequence[Verdict], *, whole: bool) -> None:
    """Replace the recorded verdicts of these files, or of these sets and targets as a whole."""
    now = {verdict[: 2 if whole else 3] for verdict in verdicts}
    rows = [row for row in recorded() if row[: 2 if whole else 3] not in now]
    lines = ["\t".join(map(str, cells)) for cells in (Verdict._fields, *sorted([*rows, *verdicts]))]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Print the table of all files; exit 1 if a code does not run, load strictly or compute the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="*", default=[*SETS])
    parser.add_argument("--targets", default="torch,keras")
    parser.add_argument("--match", default="")
    parser.add_argument("--folder", type=Path, help="where the files of the sets are, or are kept")
    parser.add_argument("--record", action="store_true", help=f"keep the verdicts in {RESULTS.name}")
    options = parser.parse_args()
    built = options.folder and options.folder.resolve()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = [*measured(options.sets, options.targets.split(","), Path(folder), options.match, built)]
    if not verdicts:
        parser.error("no file has this name and a known computation")
    if options.record:
        record(verdicts, whole=not options.match)
    sys.stdout.write(f"{table(verdicts)}\n")
    silent = (verdict for verdict in verdicts if not verdict.words.startswith((NAMED, STATED)))
    return int(any(WRITTEN <= verdict.state < EQUAL for verdict in silent))


if __name__ == "__main__":
    sys.exit(main())
