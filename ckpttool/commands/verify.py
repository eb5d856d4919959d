"""Verify that two checkpoints of one agent give the same outputs, each in its own framework.

With `steps`, both also continue training on the same batches. With `whole`, everything in both is compared
as well, also for models without an agent.
"""

# ruff: noqa: ARG001, D417  # `takes_options` passes the keywords in `options`, and describes them

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ckpttool.conversion.optimizer_options import add_stated_settings, read_optimizer_options
from ckpttool.conversion.option_keywords import takes_options
from ckpttool.conversion.options import NO_OPTIMIZER_OPTIONS
from ckpttool.conversion.receipt import converted_part
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import dataclass
from ckpttool.core.digests import digest_checkpoint
from ckpttool.core.errors import MappingError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntries
from ckpttool.core.text import describe_record, format_count, render_record
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import (
    available_backend,
    missing_networks,
    pair_networks,
    require_facts,
    shared_networks,
)
from ckpttool.evaluation.playing import with_recorded_choices
from ckpttool.evaluation.restore import (
    Agent,
    VerifiedSidecar,
    build_agent,
    read_any_sidecar,
    recognize_playable_agent,
)
from ckpttool.formats.detect import open_checkpoint
from ckpttool.libraries.schema import OPTIMIZERS, RUN
from ckpttool.networks.network import Network
from ckpttool.networks.worker import TIMEOUT_S, Worker
from ckpttool.verification.options import FurtherVerificationKeywords, VerificationOptions
from ckpttool.verification.output_comparison import (
    Parity,
    failed_parity,
    make_observations,
    measure_parity,
    run_network,
)
from ckpttool.verification.sides import ModelSide, are_models, model_sides, restore_side, side_entries
from ckpttool.verification.tolerances import OWN_ERROR
from ckpttool.verification.training import TrainingOptions
from ckpttool.verification.two_models import ModelComparison, ModelComparisonOptions, compare_models
from ckpttool.verification.update_comparison import TrainStepComparison, compare_training

if TYPE_CHECKING:
    from ckpttool.conversion.contents_comparison import ContentComparison, Discrepancy
    from ckpttool.conversion.reconversion import ComparisonSide
    from ckpttool.networks.worker import ModelSpec


@dataclass(frozen=True, slots=True)
class Verification:
    """All networks that both checkpoints have; `backends` ran A and B.

    `training` and `contents` exist if requested. `not_compared` names contents that this verification
    does not cover.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    first: str
    second: str
    backends: tuple[str, str]
    networks: tuple[Parity, ...]
    tolerance: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    training: TrainStepComparison | None = None
    contents: ContentComparison | None = None
    not_compared: tuple[str, ...] = ()
    ledger: LedgerEntries = ()
    models: ModelComparison | None = None

    @property
    def within(self) -> bool:
        """Whether every network is within the tolerance, every update within its bound, and all equal."""
        forward = all(network.within for network in self.networks)
        trained = (self.training, None if self.models is None else self.models.training)
        return (
            forward and all(result is None or result.within for result in trained) and not self.discrepancies
        )

    @property
    def discrepancies(self) -> tuple[Discrepancy, ...]:
        """The differences other than the networks' outputs."""
        return () if self.contents is None else self.contents.discrepancies

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "a": self.first,
            "b": self.second,
            "backends": list(self.backends),
            "networks": [network.document() for network in self.networks],
            "tolerance": self.tolerance,
            "within": self.within,
            **({"training": self.training.document()} if self.training is not None else {}),
            **({"contents": self.contents.document()} if self.contents is not None else {}),
            **({"models": self.models.document()} if self.models is not None else {}),
            "not_compared": list(self.not_compared),
            "assumed": list(self.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.notes),
        }


@takes_options(VerificationOptions)
def verify(
    first: str,
    second: str,
    options: VerificationOptions | None = None,
    *,
    tolerance: float | None = None,
    steps: int | None = None,
    whole: bool = False,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    like_a: ModelSpec | str | None = None,
    like_b: ModelSpec | str | None = None,
    input_shapes: Sequence[str] = (),
    inputs: str | None = None,
    transpose_inputs: bool | None = None,
    run_code: bool = False,
    loss_a: str | None = None,
    loss_b: str | None = None,
    python: str | None = None,
    progress: Progress = ignore_progress,
    **further: Unpack[FurtherVerificationKeywords],
) -> Verification:
    """Compare every network of two agents, or two models, on the same fixed inputs.

    Two checkpoints of recognised agents are compared network by network on observations (and actions).
    Otherwise each side is a model that runs by itself (.keras, Keras .h5, ONNX, SavedModel, TorchScript)
    or one that `like_a` or `like_b` builds. Raise UsageError when the two have no network in common (unless
    `whole`), or a side cannot run.

    Args:
        first: the reference, A: a file, prefix or folder.
        second: the checkpoint to verify, B.
        options: what to compare, and how; keywords replace its fields.
        progress: called with the finished and the total amount of work.
        further: other fields of VerificationOptions, e.g. `python_a`.

    >>> import ckpttool
    >>> agent = "sample_ckpts/td3_pendulum_torch/ckpt-15000.pt"
    >>> compared = ckpttool.verify(agent, agent, whole=True)
    >>> compared.within, compared.networks[0].name, compared.contents.discrepancies
    (True, 'actor', ())
    """
    options = options or VerificationOptions()
    if any(options.of_training) and options.steps is None:
        raise UsageError("--loss, --optimizer-a and --optimizer-b require --train-step")
    if options.of_models and options.whole:
        raise UsageError("--all compares agents, not models that your code builds")
    sides = model_sides(first, second, options)
    if options.of_models or (
        not options.whole and are_models(sides, train=options.steps is not None, stated=bool(options.facts))
    ):
        return _verify_models(sides, options, progress)
    if options.whole:
        return _verify_contents(first, second, options, progress)
    a = restore_side(sides, 0, options.layout, options)
    b = restore_side(sides, 1, None, options)
    result = _compare_networks(a, b, (first, second), options, progress)
    trained = options.steps is not None
    left = [list(_untested_parts(agent, trained=trained)) for agent in (a, b)]
    lines = [f"{word}: {', '.join(parts)}" for word, parts in zip("AB", left, strict=True) if parts]
    return replace(
        result,
        not_compared=(*result.not_compared, *([", ".join(left[0])] if left[0] == left[1] != [] else lines)),
    )


def _verify_models(
    sides: tuple[ModelSide, ModelSide], options: VerificationOptions, progress: Progress
) -> Verification:
    """Compare two models by their own frameworks, which start once every file is there."""
    for path in (*(side.path for side in sides), *(() if options.inputs is None else (options.inputs,))):
        open_checkpoint(path)
    chosen = ModelComparisonOptions(
        tuple(options.input_shapes),
        options.inputs,
        options.transpose_inputs,
        options.run_code,
        options.tolerance,
        options.facts,
        None if options.steps is None else TrainingOptions(options.steps, *options.of_training),
    )
    comparison = compare_models(sides[0], sides[1], chosen, progress)
    return Verification(
        urls.display_url(sides[0].path),
        urls.display_url(sides[1].path),
        comparison.engines,
        comparison.outputs,
        _describe_tolerance(options.tolerance),
        (*comparison.assumed, *(() if comparison.training is None else comparison.training.assumed)),
        (*comparison.notes, *(() if comparison.training is None else comparison.training.notes)),
        not_compared=comparison.not_compared,
        models=comparison,
    )


def _compare_networks(
    a: Agent, b: Agent, paths: tuple[str, str], options: VerificationOptions, progress: Progress
) -> Verification:
    """Compare the outputs of two agents' networks."""
    a, b = with_recorded_choices(a), with_recorded_choices(b)
    for one, other in ((a, b), (b, a)):
        require_facts(one, other=other)
    titles = shared_networks(a, b)
    if not titles:
        raise UsageError("the two checkpoints have no network in common", file=paths[1])
    assumed: list[str] = []
    compared, notes = pair_networks(a, b, titles, assumed)
    networks, training = [], None
    backends = (available_backend(a), available_backend(b))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_start_worker(name, options)) for name in backends]
        for number, (title, (left, right)) in enumerate(compared.items()):
            progress(number, len(compared))
            networks.append(_measure_network(title, left, right, workers, options.tolerance))
        if options.steps is not None:
            training, remarks = compare_training(
                _with_stated_settings(a, b), b, options.steps, workers, assumed
            )
            notes += remarks
    notes = [*notes, *(note for title, pair in compared.items() for note in _size_notes(title, *pair))]
    # If B lacks something of A, they differ, unless B is the conversion of a part; extra entries in B do not
    # count against it.
    part = converted_part(a, b) if missing_networks(a, b) else None
    outside = (
        [f"{title} (B was converted from {part} only)" for title in missing_networks(a, b)] if part else []
    )
    networks += [failed_parity(title) for title in missing_networks(a, b)] if part is None else []
    return Verification(
        urls.display_url(a.checkpoint.path),
        urls.display_url(b.checkpoint.path),
        backends,
        tuple(networks),
        _describe_tolerance(options.tolerance),
        tuple(dict.fromkeys(assumed)),
        tuple(dict.fromkeys((*_difference_notes(a, b), *notes, *a.notes, *b.notes))),
        training,
        ledger=sidecar.merge_entries(side_entries("A", a, b), side_entries("B", b, a)),
        not_compared=(*(title for title in titles if title not in compared), *outside),
    )


def _describe_tolerance(tolerance: float | None) -> str:
    if tolerance is None:
        return f"B's error vs. float64 at most {OWN_ERROR:g}x A's, or within rounding of the largest sum"
    return f"B's error vs. float64 at most {tolerance:g} of the output's scale"


def _untested_parts(agent: Agent, *, trained: bool) -> Iterator[str]:
    """Yield the parts that affect no network's output; `trained` optimizers are compared."""
    tops = {str(move.target[0].value) for move in agent.binding.moves.moves} - {*RUN}
    yield from (name for name in OPTIMIZERS if name in tops and not trained)
    yield from sorted(tops - {*OPTIMIZERS})
    bound = {move.source for move in agent.binding.moves.moves} | agent.binding.consumed
    rest = sum(path not in bound for path in agent.checkpoint.tree)
    if rest:
        yield format_count(rest, "other entry", "other entries")


def _verify_contents(
    first: str, second: str, options: VerificationOptions, progress: Progress
) -> Verification:
    """Compare the networks of two agents that both can run, and the complete contents."""
    from ckpttool.conversion.contents_comparison import compare_contents

    a, b = _open_side(first, options.layout, options.facts), _open_side(second, None, options.facts)
    verification = Verification(
        urls.display_url(a.checkpoint.path), urls.display_url(b.checkpoint.path), ("-", "-"), (), "", (), ()
    )
    reason = None
    if a.agent is None or b.agent is None:
        lone = [word for word, side in (("A", a), ("B", b)) if side.agent is None]
        reason = f"network outputs: no agent is recognised in {' and '.join(lone)}"
    else:
        try:
            verification = _compare_networks(a.agent, b.agent, (first, second), options, progress)
        except (MappingError, UnsupportedError, UsageError) as error:
            if options.steps is not None:
                raise
            reason = f"network outputs: {error.message}"
    if reason is not None:
        verification = replace(verification, tolerance="entries are equal", not_compared=(reason,))
    every = compare_contents(a, b, progress)
    return replace(
        verification,
        contents=every,
        notes=tuple(dict.fromkeys((*verification.notes, *every.notes))),
        not_compared=(*verification.not_compared, *every.not_compared),
    )


def _open_side(path: str, layout: str | None, facts: AgentFacts) -> ComparisonSide:
    """Open one side; a sidecar of other weights is a discrepancy and provides no agent facts."""
    from ckpttool.conversion.reconversion import ComparisonSide

    checkpoint = open_checkpoint(path)
    receipt = read_any_sidecar(checkpoint)
    try:
        binding = recognize_playable_agent(checkpoint, layout)
        own = VerifiedSidecar() if receipt.stale else VerifiedSidecar(receipt.sidecar)
        agent = None if binding is None else build_agent(checkpoint, binding, own, facts)
    except (MappingError, UnsupportedError, UsageError):
        if layout is not None:
            raise
        agent = None
    return ComparisonSide.restored(checkpoint, agent, receipt)


def _start_worker(backend: str, options: VerificationOptions) -> Worker:
    timeout = TIMEOUT_S + (options.steps or 0)
    python = sys.executable if options.python is None else options.python
    return Worker(backend, python=python, timeout=timeout, threads=1)


def _substitute_backend_note(agent: Agent) -> str:
    from ckpttool.core.installation import install_extra

    extra = plugins.find("backends", agent.framework).extra
    has_it = f" ({install_extra(extra)})" if extra else ""
    return (
        f"{agent.framework} is not installed{has_it}: {urls.display_url(agent.checkpoint.path)} "
        "was run with numpy"
    )


def _difference_notes(a: Agent, b: Agent) -> Iterator[str]:
    """Yield the differences other than their numbers."""
    for agent in (a, b):
        if available_backend(agent) != agent.framework:
            yield _substitute_backend_note(agent)
    if missing_networks(a, b):
        yield f"B lacks {', '.join(missing_networks(a, b))}"
    if missing_networks(b, a):
        yield f"only B has {', '.join(missing_networks(b, a))}"
    normalised = [agent.known.obs_norm is not None for agent in (a, b)]
    if normalised[0] != normalised[1]:
        yield f"only {'A' if normalised[0] else 'B'} records how observations are normalised"


def _size_notes(title: str, left: Network, right: Network) -> Iterator[str]:
    """Yield the sizes of two networks that cannot be compared because these differ."""
    if left.inputs == right.inputs and left.width == right.width:
        return
    a, b = (f"{', '.join(f'{name} {size}' for name, size in n.inputs)} -> {n.width}" for n in (left, right))
    yield f"{title} has other sizes: A {a}; B {b}"


def _measure_network(
    title: str, left: Network, right: Network, workers: list[Worker], tolerance: float | None
) -> Parity:
    if left.inputs != right.inputs or left.width != right.width:
        return failed_parity(title)
    observations = make_observations(left)
    outputs = [run_network(w.build(n), observations) for w, n in zip(workers, (left, right), strict=True)]
    return measure_parity(title, left, observations, (outputs[0], outputs[1]), tolerance)


def _with_stated_settings(source: Agent, target: Agent) -> Agent:
    """Return the source with the optimizer options of its conversion, which no file of it records."""
    receipt = target.sidecar
    before = {} if source.sidecar is None else source.sidecar.provenance
    if receipt is None or receipt.source is None or "l2" in before or "optimizer" in before:
        return source
    stated = read_optimizer_options(receipt)
    sha256 = receipt.source.get("sha256")
    if stated == NO_OPTIMIZER_OPTIONS or sha256 != digest_checkpoint(source.checkpoint).sha256:
        return source
    tree = source.checkpoint.tree
    return replace(source, sidecar=add_stated_settings(stated, source.sidecar, source.binding, tree))
