"""Restores generated agents, compares their actions with the libraries' own, and keeps the verdicts."""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import CkpttoolError
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.playing import take_means
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.libraries import PolicyEncoder
from ckpttool.networks import numpy_backend, policy_network

RESULTS = Path(__file__).with_name("results.tsv")
TOLERANCE = 2e-5
"""Of an action, relative to the largest; rounding through three layers."""

RIGHT, ASSUMED = "right", "right, assumed"
NAMED, WRONG_ASSUMED = "wrong, exit status 1 names it", "wrong, the assumption is printed"
REFUSED, SILENT, WRONG_HINT = "refused", "SILENT WRONG", "WRONG HINT"
FAULTS = (SILENT, WRONG_HINT)
"""What no agent may end in."""


class Verdict(NamedTuple):
    """What became of one agent: a state, and what was named or wrong, in a few words."""

    agent: str
    library: str
    state: str
    words: str = ""

    @property
    def line(self) -> str:
        """The line of the results."""
        return "\t".join(self)


def make(folder: Path, libraries: Iterable[str], names: Iterable[str] = ()) -> list[str]:
    """Write the libraries' agents, each in a process of its own; return the libraries that are absent.

    With `names` only those agents are written.
    """
    absent: list[str] = []
    for library in libraries:
        command = [sys.executable, "-m", "tests.agent_truth.agents", str(folder), library, *names]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        absent += json.loads((folder / "absent.json").read_text())
    return absent


def judged(folder: Path, names: Sequence[str] | None = None) -> list[Verdict]:
    """Return a verdict for every agent in the folder, or for those of these names."""
    files = sorted(folder.glob("*.json"))
    return [
        judge(file) for file in files if file.name != "absent.json" and (names is None or file.stem in names)
    ]


def judge(file: Path) -> Verdict:
    """Return what became of the agent that a document describes."""
    case = json.loads(file.read_text())
    # Pairs, so that the document is no file of settings beside the agent.
    case["known"] = dict(case["known"])
    name, library = file.stem, str(case["library"])
    try:
        difference, assumed, named = _played(case, file, {})
    except CkpttoolError as error:
        return _followed(case, file, error)
    if difference <= TOLERANCE:
        return Verdict(name, library, ASSUMED if assumed else RIGHT, "; ".join(assumed))
    words = f"differs by {difference:.2g}: {'; '.join(named or assumed)}"
    return Verdict(name, library, _wrong(case, file, assumed, named), words)


def _wrong(case: dict[str, Any], file: Path, assumed: tuple[str, ...], named: tuple[str, ...]) -> str:
    """Return the state of an agent that is played wrongly.

    Exit status 1 with the reason is no fault, nor is an assumption that the trainer's knowledge corrects, if
    it is that very fact that was assumed.
    """
    words = {"activation": "activations", "head": "action map"}
    record = all(any(words.get(fact, fact) in line for line in (*assumed, *named)) for fact in case["known"])
    if case.get("open") and _names(case, (*assumed, *named)):
        return NAMED if named else WRONG_ASSUMED
    if case["known"] and record:
        try:
            difference, _, _ = _played(case, file, case["known"])
        except CkpttoolError:
            return WRONG_HINT
        if difference > TOLERANCE:
            return WRONG_HINT
    elif not named:
        return SILENT
    return NAMED if named else WRONG_ASSUMED


def _names(case: dict[str, Any], lines: Iterable[str]) -> bool:
    """Return whether a line names what the file leaves open and no option states."""
    return any(case["open"] in line for line in lines)


def _followed(case: dict[str, Any], file: Path, error: CkpttoolError) -> Verdict:
    """Return the verdict of a refusal: whether the hint, followed with what the trainer knows, is right."""
    name, library = file.stem, str(case["library"])
    words = f"{error.message}; hint: {error.hint}"
    missing = [option for option in case["known"] if f"--{option}" not in str(error.hint)]
    if not case["known"] or missing:
        return Verdict(name, library, REFUSED, words)
    try:
        difference, assumed, named = _played(case, file, case["known"])
    except CkpttoolError as again:
        if case.get("open") and _names(case, [again.message]):
            return Verdict(name, library, REFUSED, f"{words}; then: {again.message}")
        return Verdict(name, library, WRONG_HINT, f"{words}; then: {again.message}")
    state = REFUSED if difference <= TOLERANCE else WRONG_HINT
    if state == WRONG_HINT and case.get("open") and _names(case, (*assumed, *named)):
        state = WRONG_ASSUMED
    return Verdict(name, library, state, f"{words}; followed: differs by {difference:.2g}")


def _played(
    case: dict[str, Any], file: Path, known: dict[str, str]
) -> tuple[float, tuple[str, ...], tuple[str, ...]]:
    """Return the relative difference from the library, what was assumed, and what exit status 1 names."""
    names = known["activation"].split(",") if "activation" in known else None
    facts = AgentFacts(activations=names, head=known.get("head")) if known else NO_FACTS
    if case["env"] is not None:
        wrappers = (known["wrapper"],) if "wrapper" in known else None
        results = evaluate(case["file"], protocol=Protocol(1, wrappers=wrappers), facts=facts)
        entries, truth = results.ledger, case["return"]
        difference = abs(float(results.rollout.returns[0]) - truth) / max(1.0, abs(truth))
        # Rounding is amplified in 200 steps of a pendulum.
        difference = 0.0 if difference <= 1e-3 else difference
    else:
        obs, truth = np.load(file.with_name("obs.npy")), np.load(file.with_suffix(".npy"))
        agent = take_means(restore_agent(case["file"], facts=facts), len(_row(case["low"])))
        part = agent.playable("actor")
        if part is None:
            raise CkpttoolError("no policy")
        wiring, assumptions = derive_network_settings(
            agent, ActionBounds(_row(case["low"]), _row(case["high"]), "the environment")
        )
        network = policy_network(agent.tree, part, wiring, agent.front(part.title))
        played, _ = numpy_backend.build(network, "cpu").step(_observed(obs, agent.front(part.title)), ())
        difference = float(np.abs(played - truth).max() / max(1.0, np.abs(truth).max()))
        entries = (*agent.ledger, *assumptions)
    assumed = tuple(dict.fromkeys(entry.sentence for entry in entries if entry.use == "assumed"))
    return difference, assumed, tuple(entry.sentence for entry in entries if entry.open)


def _row(bound: float | list[float]) -> list[float]:
    """Return a bound of every action, of a document that may hold one number for all."""
    return bound if isinstance(bound, list) else [bound] * 2


def _observed(obs: np.ndarray, front: PolicyEncoder | None) -> np.ndarray | dict[str, np.ndarray]:
    """Return observations as the policy takes them: parts of a Dict by name, as its streams are."""
    if front is None:
        return obs
    ends = np.cumsum([stream.size for stream in front.streams])[:-1]
    return {s.name: part for s, part in zip(front.streams, np.split(obs, ends, axis=1), strict=True)}


def recorded() -> dict[str, Verdict]:
    """Return the verdicts that are recorded, by agent."""
    lines = RESULTS.read_text().splitlines()[1:] if RESULTS.exists() else []
    return {line.split("\t")[0]: Verdict(*line.split("\t")) for line in lines}


def record(verdicts: Sequence[Verdict]) -> None:
    """Put the verdicts among those that are recorded."""
    rows = {**recorded(), **{verdict.agent: verdict for verdict in verdicts}}
    lines = [row.line for row in sorted(rows.values(), key=lambda v: (v.library, v.agent))]
    RESULTS.write_text("\n".join(["agent\tlibrary\tstate\twords", *lines]) + "\n")


def say(line: str) -> None:
    """Write a line to stdout."""
    sys.stdout.write(f"{line}\n")


def main() -> None:
    """Run the agents of all libraries that are installed."""
    from tests.agent_truth.agents import generators

    parser = argparse.ArgumentParser(prog="python -m tests.agent_truth")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="agents whose name matches")
    parser.add_argument("--libraries", default=",".join(generators()), metavar="NAME,...")
    parser.add_argument(
        "--folder", metavar="FOLDER", help="judge agents that are there already (tf_libraries)"
    )
    parser.add_argument("--record", action="store_true", help="write the results into results.tsv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        absent = [] if options.folder else make(Path(folder), options.libraries.split(","))
        verdicts = [row for row in judged(Path(folder)) if fnmatch.fnmatchcase(row.agent, options.only)]
    for verdict in verdicts:
        say(f"{verdict.agent:32} {verdict.state:32} {verdict.words[:100]}")
    say(", ".join(f"{count} {state}" for state, count in Counter(row.state for row in verdicts).items()))
    if absent:
        say(f"not installed: {', '.join(absent)}")
    if options.record:
        record(verdicts)
    sys.exit(any(verdict.state in FAULTS for verdict in verdicts))
