"""The code beside a converted file: of the networks of its agent, else of the graph of its source."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpttool.conversion import loading_code
from ckpttool.conversion.graph_texts import LANGUAGES
from ckpttool.conversion.options import STANDARD_OUTPUT, ConversionRequest
from ckpttool.conversion.targets import find_target_name
from ckpttool.core import sidecar, urls
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.core.sidecar import Sidecar
from ckpttool.evaluation.restore import Agent, VerifiedSidecar, build_agent, recognize_playable_agent
from ckpttool.graphs.graph import read_graph
from ckpttool.libraries.recognize import SAVER_FORMATS, recognize_checkpoint
from ckpttool.libraries.single_networks import read_action_graph
from ckpttool.mapping.rules import KEEP, Move
from ckpttool.version import __version__

if TYPE_CHECKING:
    from ckpttool.conversion.format_conversion import TargetWriter
    from ckpttool.conversion.policy_graph import AgentGraphs


def require_code_file(request: ConversionRequest, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError or FileExistsError where `code` cannot be written, before anything else is."""
    if find_target_name(request.kind) not in LANGUAGES:
        raise UnsupportedError(
            "--code does not apply to this target: its library or runtime has its own code",
            expected=", ".join(LANGUAGES),
            hint="leave out --code, or use --to torch",
        )
    code = str(request.options.code)
    if code != STANDARD_OUTPUT and not request.options.dry_run:
        require_new(code, checkpoint.files, force=request.options.force)


def write_code_file(
    code: str, target: str, request: ConversionRequest, checkpoint: Checkpoint
) -> tuple[str, ...]:
    """Write the code of the written networks; return the lines that use it."""
    file = str(request.options.code)
    write_file(file, code.encode(), force=request.options.force, sources=checkpoint.files)
    name, _ = os.path.splitext(os.path.basename(file))
    name = name if loading_code.is_word(name) else "CODE"
    states = ", *states" * ("\nSTATES = " in code)
    act = (f"actions{states} = {name}.act(model, observations)",) * ("\ndef act(" in code)
    return (f"import {name}", f"model = {name}.load({loading_code.python_literal(target)})", *act)


def format_code(
    writer: TargetWriter, record: Sidecar, digests: tuple[str | None, str], checkpoint: Checkpoint
) -> str:
    """Return the code of the networks in a written file: those of its source's graph or agent.

    `record` is the file's sidecar, `digests` are those of source and file, `checkpoint` is the file under its
    temporary name. Raise UnsupportedError without either, and for what cannot be written exactly: the error
    names the source, whose networks these are.
    """
    try:
        return _network_code(writer, record, digests, checkpoint)
    except CkpttoolError as error:
        error.file = urls.display_url(writer.checkpoint.path)
        if error.hint is None or os.path.basename(checkpoint.path) in error.hint:
            error.hint = "leave out --code"
        raise


def _network_code(
    writer: TargetWriter, record: Sidecar, digests: tuple[str | None, str], checkpoint: Checkpoint
) -> str:
    from ckpttool.conversion.graph_code import GraphPlan, write_graph_code
    from ckpttool.conversion.policy_graph import read_agent_graphs

    source, network = urls.display_url(writer.checkpoint.path), writer.request.options.network
    if network is not None and writer.plan.binding is not None:
        raise UsageError("--network does not choose the code of an agent, which has all its networks")
    about = (
        f"Written by ckpttool {__version__} from {source}" + _digest(digests[0]),
        f"for {os.path.basename(writer.target)}{_digest(digests[1])}.",
        *sidecar.describe_decisions(writer.ledger),
    )
    plan = GraphPlan(writer.plan.ready.tree, writer.plan.moves, checkpoint.tree, writer.places)
    target = find_target_name(writer.request.kind)
    refusal: CkpttoolError = UnsupportedError(
        "--code needs an agent, a policy or a file that records its computation",
        found=network,
        hint="leave out --code, or fill your own model with --like MODULE:FACTORY",
    )
    refused = False
    readers: tuple[Callable[[TargetWriter], AgentGraphs | None], ...] = _READERS
    if writer.request.options.fold_normalizer:
        # Its weights are not those of the source.
        moves = [Move(path, path, KEEP) for path, _ in checkpoint.tree.tensors()]
        plan = GraphPlan(checkpoint.tree, moves, checkpoint.tree, {})
        readers = (lambda _: read_agent_graphs(_written_agent(checkpoint, record)),)
    for read in readers:
        try:
            if (computation := read(writer)) is not None:
                methods, calls, skipped = computation
                notes = (f"not computed here: {reason}" for reason in skipped)
                return write_graph_code(methods, plan, target, (*about, *notes), calls)
        except (UnsupportedError, UsageError) as error:
            # The first graph's refusal stays, unless an option gives what the second lacks.
            other = refused and not isinstance(error, UsageError)
            refusal, refused = refusal if other else error, True
    raise refusal


def _written_agent(checkpoint: Checkpoint, record: Sidecar) -> Agent:
    """Return the agent of a written file; raise UnsupportedError if no layout recognizes one."""
    binding = recognize_checkpoint(checkpoint) or recognize_playable_agent(checkpoint)
    if binding is None:
        raise UnsupportedError(
            "--code needs an agent or a policy, and no layout recognises one in the output"
        )
    return build_agent(checkpoint, binding, VerifiedSidecar(record))


def _digest(sha256: str | None) -> str:
    return "" if sha256 is None else f" (sha256 {sha256})"


def _model_graph(writer: TargetWriter) -> AgentGraphs | None:
    """Return what a source that is no agent computes, if its file states it."""
    from ckpttool.conversion.graph_code import Method
    from ckpttool.conversion.policy_graph import AgentGraphs

    if writer.plan.binding is not None or writer.request.options.network is not None:
        return None
    graph = read_graph(writer.checkpoint)
    return None if graph is None else AgentGraphs((Method(graph),), None, ())


def _action_graph(writer: TargetWriter) -> AgentGraphs | None:
    """Return what one output of the source computes, of a program or of the outputs that `network` names.

    A policy whose outputs are the actions has a function `act`.
    """
    from ckpttool.conversion.graph_code import Method, PolicyCalls
    from ckpttool.conversion.policy_graph import AgentGraphs, derive_code_settings

    checkpoint, network = writer.checkpoint, writer.request.options.network
    if writer.plan.binding is not None or (network is None and checkpoint.format not in SAVER_FORMATS):
        return None
    graph = read_action_graph(checkpoint, network or "actor")
    if graph is None:
        return None
    binding = recognize_playable_agent(checkpoint, network=network or "actor")
    try:
        agent = None if binding is None else build_agent(checkpoint, binding, writer.own)
        settings = None if agent is None else derive_code_settings(agent)[0]
    except (UnsupportedError, UsageError):
        settings = None
    # Other maps than those read from it are not in the graph: the model returns what it computes, and there
    # is no `act`.
    facts = None if binding is None or "head" not in binding.facts.origins else binding.facts
    read = None if facts is None else (facts.head, facts.action_low, facts.action_high)
    acts = (
        settings is not None
        and settings.choices is None
        and (
            settings.head in ("identity", "unit_tanh")
            or (settings.head, settings.action_low, settings.action_high) == read
        )
    )
    return AgentGraphs((Method(graph),), PolicyCalls("output", (None,)) if acts else None, ())


def _agent_graphs(writer: TargetWriter) -> AgentGraphs | None:
    """Return what the networks of the source compute, with the facts that are known."""
    from ckpttool.conversion.policy_graph import read_agent_graphs

    network = writer.request.options.network or "actor"
    binding = writer.plan.binding or recognize_playable_agent(writer.checkpoint, network=network)
    if binding is None:
        return None
    return read_agent_graphs(build_agent(writer.checkpoint, binding, writer.own))


# What states a computation, the first one first.
_READERS = (_action_graph, _model_graph, _agent_graphs)
