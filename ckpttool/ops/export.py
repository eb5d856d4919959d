"""`convert --to onnx`: one network of an agent as a model that runs alone, compared before it is written."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO

import numpy as np

from ckpttool import ledger, sidecar, urls
from ckpttool.agents.backends import numpy as reference
from ckpttool.agents.network import Network
from ckpttool.errors import FormatError, MissingExtraError, UnsupportedError, UsageError
from ckpttool.layouts.canonical import Part
from ckpttool.ledger import Entries
from ckpttool.mapping.report import Report
from ckpttool.ops import export_contents as contents
from ckpttool.ops import receipt
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.export_facts import told
from ckpttool.ops.parity import Parity, measured, observations, run
from ckpttool.ops.proof import Proof
from ckpttool.ops.restore import Agent, restore
from ckpttool.ops.wiring import network_of, require_facts
from ckpttool.sidecar import Sidecar
from ckpttool.source import File
from ckpttool.writing import Output, require_new, write_atomically

# NumPy is A here, not the framework that trained the agent. Of two right computations in float32 one was 2.5
# times as far from float64 as the other (a critic of FetchReach, in onnxruntime's product and in NumPy's).
OWN_ERROR = 4.0


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did; `parity` and `sha256` (the file's) are None where it did not come so far.

    In `parity` A is NumPy in float32 and B the model, run by whatever runs models here.
    """

    source: str
    report: Report
    parity: Parity | None = None
    sha256: str | None = None
    ledger: Entries = ()


def export(
    source: str,
    target: str,
    title: str = "actor",
    env: str | None = None,
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    dry_run: bool = False,
    force: bool = False,
    sync: bool = True,
) -> Exported:
    """Write the network `title` of the agent at `source` as an ONNX model, with its receipt beside it.

    `env` is the Gymnasium id whose action space counts if the agent's files tell no bounds; `facts` are what
    no file holds. Nothing is written on `dry_run`, or if the model's outputs are not the network's by the
    bound of `verify`. Raise UsageError when the checkpoint has no such network, or tells neither bounds nor
    environment.
    """
    if not dry_run:
        _require_library()
    agent = restore(source, layout, facts, title)
    title = agent.title(title)
    part = _part(agent, title)
    known = str((agent.known.env or {}).get("id") or "")
    bounded = agent.known.action_low is not None
    where = ("--env", env or known or "ID") if env or known or not bounded else ()
    require_facts(agent, "convert", source, target, *where)
    if not dry_run:
        for file in (target, sidecar.beside(target)):
            require_new(file, agent.checkpoint.files, force=force)
    wiring, sidecar_facts, assumed = told(agent, part, env)
    report = contents.report(agent, part, sidecar_facts, ledger.assumptions(assumed))
    entries = ledger.settled(ledger.merged(agent.ledger, assumed))
    if dry_run:
        return Exported(urls.spelled(agent.checkpoint.path), report, ledger=entries)
    network = network_of(agent, part, wiring)
    own = (agent.sidecar.target_sha256 or None) if agent.sidecar is not None else None
    made = replace(
        sidecar_facts,
        source=receipt.origin(agent.checkpoint, agent.binding, own, network=title),
        rules=receipt.rules(report),
        assumed=report.assumed,
        obs_dim=network.input_shapes["obs"][0],  # a critic may see more than the policy
    )
    model = _encoded(network, part, made)
    parity, engine = _compared(agent, title, network, model)
    report = replace(report, notes=(*report.notes, f"the model was run by {engine}"))
    if not parity.within:
        return Exported(urls.spelled(agent.checkpoint.path), report, parity, ledger=entries)
    made = replace(made, target_sha256=hashlib.sha256(model).hexdigest(), parity=Proof((parity,)).entry())
    _write(target, model, made, agent.checkpoint.files, force=force, sync=sync)
    return Exported(urls.spelled(agent.checkpoint.path), report, parity, made.target_sha256, entries)


def _require_library() -> None:
    if importlib.util.find_spec("onnx") is None:
        raise MissingExtraError(
            "writing an ONNX model needs onnx, which is not installed", hint="pip install 'ckpttool[onnx]'"
        )


def _encoded(network: Network, part: Part, made: Sidecar) -> bytes:
    from ckpttool.agents import onnx_model

    output = "action" if part.acts else "value"
    return onnx_model.encode(network, contents.places(network, part), output, contents.metadata(made))


def _compared(agent: Agent, title: str, network: Network, model: bytes) -> tuple[Parity, str]:
    """Return how the model's outputs compare with the network's, and what ran the model."""
    from ckpttool.agents import onnx_run

    given = observations(network)
    ours = run(reference.build(network), given)
    if not np.isfinite(ours).all():
        raise UnsupportedError(
            f"{title} gives NaN or infinities, which cannot be compared", file=agent.checkpoint.path
        )
    found = onnx_run.run(model, given if isinstance(given, Mapping) else {network.inputs[0][0]: given})
    return measured(title, network, given, (ours, found), own=OWN_ERROR), onnx_run.engine()


def _part(agent: Agent, title: str) -> Part:
    part = agent.runnable(title)
    if part is None:
        known = ", ".join(each.title for each in agent.binding.parts)
        raise UsageError(
            f"the checkpoint has no network called {title}",
            file=agent.checkpoint.path,
            hint=f"it has {known}" if known else "it has none at all",
        )
    return part


def _write(
    target: str, model: bytes, made: Sidecar, sources: tuple[File, ...], *, force: bool, sync: bool
) -> None:
    def check(written: str) -> None:
        with open(written, "rb") as stream:
            if stream.read() != model:
                raise FormatError("what was written is not what was read back", file=target)

    outputs = (
        Output(target, lambda stream: _put(stream, model), check, nbytes=len(model)),
        Output(sidecar.beside(target), lambda stream: _put(stream, made.encode()), follows=True),
    )
    write_atomically(outputs, force=force, sync=sync, sources=sources)


def _put(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
