"""Plays the public agents of the corpus over 100 episodes and writes what they score into results/claims.md.

    python -m benchmarks.claims --corpus ../shared/corpus           # plays what claims.json lacks
    python -m benchmarks.claims --corpus ../shared/corpus --again   # plays everything
    python -m benchmarks.claims --page                              # writes the table of results/claims.md

`CLAIMS.tsv` of the corpus holds the figures of DLR-RM/rl-baselines3-zoo's benchmark.md. MuJoCo's tasks of
version 3 are played as version 4, which has the same observations and rewards; the simulator is another.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import CkpttoolError
from ckpttool.evaluation.protocol import Protocol

RESULTS = Path(__file__).with_name("claims.json")
PAGE = Path(__file__).parent / "results" / "claims.md"
EPISODES = 100
AGREES = 3.0
_MARKS = ("<!-- table of benchmarks.claims -->\n", "<!-- end of the table -->\n")


class Claim(NamedTuple):
    """A public agent, what its authors state, and how it is played here."""

    name: str
    path: str
    env: str
    mean: float | None
    std: float | None
    episodes: int | None


def claims(corpus: Path) -> list[Claim]:
    """Return the agents of DLR-RM/rl-trained-agents that the corpus holds."""
    with (corpus / "CLAIMS.tsv").open() as stream:
        rows = csv.DictReader((line for line in stream if not line.startswith("#")), delimiter="\t")
        stated = {(row["algo"], row["env"]): row for row in rows}
    claims = []
    for file in sorted((corpus / "torch" / "sb3_zoo").glob("*/*/*.zip")):
        algo, env = file.parent.parent.name, file.stem
        row = stated.get((algo, env), {})
        numbers = [float(row[name]) if name in row else None for name in ("mean", "std")]
        episodes = int(row["episodes"]) if row else None
        claims.append(Claim(f"{algo.upper()} {env}", str(file), _played_in(env), *numbers, episodes))
    return claims


def _played_in(env: str) -> str:
    name, _, version = env.rpartition("-v")
    if version == "3":
        return f"{name}-v4"
    return f"{name}-v3" if name.startswith("LunarLander") else env


def play(claim: Claim) -> dict[str, Any]:
    """Return the agent's score, or why it is not played."""
    try:
        results = evaluate(claim.path, claim.env, Protocol(EPISODES, num_envs=16))
    except CkpttoolError as error:
        return {"refused": f"{error.message} ({error.found})" if error.found else error.message}
    result = results.statistics
    return {
        "mean": result.mean,
        "std": result.std,
        "ci95": result.ci95,
        "length": float(results.rollout.lengths.mean()),
        "engine": results.rollout.engine,
        "versions": results.versions,
        "ledger": [entry.sentence for entry in results.ledger if entry.use != "assumed"],
        "assumed": list(results.assumed),
    }


def standard_errors(claim: Claim, result: dict[str, Any]) -> float | None:
    """Return the difference of the means in standard errors of both sides (Welch)."""
    if claim.mean is None or claim.std is None or claim.episodes is None:
        return None
    error = math.sqrt(result["std"] ** 2 / EPISODES + claim.std**2 / claim.episodes)
    return (result["mean"] - claim.mean) / error if error else 0.0


def table(played: dict[str, dict[str, Any]], simulators: dict[str, dict[str, Any]]) -> str:
    """Return the page's table from the results; `simulators` are returns in the authors' own simulator."""
    lines = [
        "| agent | played in | stated: mean ± deviation (episodes) | here: mean ± deviation, 95 % interval |"
        " standard errors | in the authors' simulator |",
        "|---|---|---|---|---|---|",
    ]
    refused = []
    for name, results in played.items():
        claim = Claim(**results["claim"])
        stated = (
            "none" if claim.mean is None else f"{claim.mean:,.1f} ± {claim.std:,.1f} ({claim.episodes:,})"
        )
        if "refused" in results:
            refused.append(name)
            continue
        low, high = results["ci95"]
        off = standard_errors(claim, results)
        here = f"{results['mean']:,.1f} ± {results['std']:,.1f}, {low:,.1f} to {high:,.1f}"
        old = simulators.get(name)
        authors_mean = f"{old['mean']:,.1f} ± {old['std']:,.1f} ({len(old['returns'])})" if old else ""
        lines.append(f"| {name} | {claim.env} | {stated} | {here} | {_signed(off)} | {authors_mean} |")
    left = f"\nNot played: {', '.join(refused)}.\n"
    return "\n".join(lines) + "\n" + (left if refused else "")


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f}"


def write_page() -> None:
    """Put the table of the recorded results between the marks of results/claims.md."""
    document = json.loads(RESULTS.read_text())
    page = PAGE.read_text()
    before, rest = page.split(_MARKS[0])
    _, after = rest.split(_MARKS[1])
    table_text = table(document["played"], document["simulators"])
    PAGE.write_text(f"{before}{_MARKS[0]}\n{table_text}\n{_MARKS[1]}{after}")


def main() -> None:
    """Play what is not played yet, write the results, and then the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("--corpus", default=os.environ.get("CKPTTOOL_CORPUS", "../shared/corpus"))
    parser.add_argument("--again", action="store_true", help="play what has a result as well")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--simulator", metavar="FILE", help="JSON lines that claims_mujoco_py.py wrote")
    options = parser.parse_args()
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"played": {}, "simulators": {}}
    if options.simulator:
        for line in Path(options.simulator).read_text().splitlines():
            record = json.loads(line)
            document["simulators"][record.pop("agent")] = record
    for claim in [] if options.page else claims(Path(options.corpus)):
        if options.again or claim.name not in document["played"]:
            result = play(claim)
            document["played"][claim.name] = {
                "claim": claim._replace(path=_short(claim.path))._asdict(),
                **result,
            }
            print(claim.name, result.get("mean", result.get("refused")), file=sys.stderr)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    write_page()


def _short(path: str) -> str:
    """Return the path below the corpus."""
    return path.partition("corpus/")[2] or path


if __name__ == "__main__":
    main()
