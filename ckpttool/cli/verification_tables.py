"""Tables of a verification: networks, layers, updates, discrepancies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.columns import fit_path
from ckpttool.cli.styles import format_fix, wrap_sentence
from ckpttool.cli.tables import render_remarks, render_table
from ckpttool.core import sidecar
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.text import clean, format_count

if TYPE_CHECKING:
    from ckpttool.commands.verify import Verification
    from ckpttool.verification.output_comparison import Parity
    from ckpttool.verification.training import ModelTraining
    from ckpttool.verification.two_models import ModelComparison
    from ckpttool.verification.update_comparison import TrainStepComparison


# Maximum number of discrepancies printed; --json lists all.
_DISCREPANCIES = 20


def render_verification(verification: Verification, *, quiet: bool) -> str:
    """Return a row per network, then the verdict; `quiet` omits the verdict, assumptions and notes."""
    what = "network" if verification.models is None else "output"
    rows = [
        (
            n.name,
            str(n.n),
            # Without inputs, nothing was measured.
            *(f"{x:.2e}" if n.n else "-" for x in (n.max_abs, n.max_rel, n.error_a, n.error_b)),
            "yes" if n.within else "NO",
        )
        for n in verification.networks
    ]
    columns = (
        (what, "left"),
        ("n", "right"),
        ("max |A-B|", "right"),
        ("relative", "right"),
        ("A-f64", "right"),
        ("B-f64", "right"),
        ("within", "left"),
    )
    ran = [f" ({backend})" if verification.networks else "" for backend in verification.backends]
    lines = [
        f"A {clean(verification.first)}{ran[0]}",
        f"B {clean(verification.second)}{ran[1]}",
        *([render_table(columns, rows)] if rows else []),
        *([] if verification.training is None else _training_table(verification.training)),
        *([] if verification.models is None else _model_lines(verification.models, verification.networks)),
        *_discrepancy_lines(verification),
    ]
    if not quiet:
        lines += render_remarks(verification.assumed, verification.notes, verification.ledger)
        lines.append(wrap_sentence(f"tolerance: {clean(verification.tolerance)}"))
        lines += [wrap_sentence(f"not compared: {clean(reason)}") for reason in verification.not_compared]
        lines.append(_verification_verdict(verification))
    return "\n".join(lines)


def _discrepancy_lines(verification: Verification) -> list[str]:
    """Return two lines per discrepancy: where it is, and the values in A and B."""
    lines = []
    for discrepancy in verification.discrepancies[:_DISCREPANCIES]:
        what = f"{discrepancy.what} ({clean(discrepancy.part)})"
        lines.append(f"{fit_path(clean(discrepancy.path), len(what) + 2)}: {what}")
        lines.append(f"    {clean(discrepancy.a or 'nothing')} -> {clean(discrepancy.b or 'nothing')}")
        lines += [f"    looks like {clean(discrepancy.resembles)}"] if discrepancy.resembles else []
    if len(verification.discrepancies) > _DISCREPANCIES:
        lines.append(f"and {len(verification.discrepancies) - _DISCREPANCIES:,} more (--json lists all)")
    return lines


_LAYER_COLUMNS = (
    ("layer of A", "path"),
    ("layer of B", "path"),
    ("inputs", "right"),
    ("outputs", "right"),
    ("within", "left"),
)
_LAYERS_BEFORE, _LAYERS_AFTER = 8, 6


def _model_lines(models: ModelComparison, outputs: Sequence[Parity]) -> list[str]:
    """Return the layers of a model whose outputs differ, and its updates."""
    layers = [] if all(output.within for output in outputs) else layer_lines(models)
    return [*layers, *_model_training_lines(models.training)]


def layer_lines(models: ModelComparison) -> list[str]:
    """Return the table of layers around the first difference, and its cause."""
    if not models.layers:
        return []
    at = next((n for n, layer in enumerate(models.layers) if not layer.within), len(models.layers))
    shown = models.layers[max(0, at - _LAYERS_BEFORE) : at + _LAYERS_AFTER]
    rows = [
        (layer.a, layer.b, f"{layer.inputs:.1e}", f"{layer.outputs:.1e}", "yes" if layer.within else "NO")
        for layer in shown
    ]
    lines = [render_table(_LAYER_COLUMNS, rows)]
    if len(shown) < len(models.layers):
        lines.append(
            f"{len(shown)} of {format_count(len(models.layers), 'pair')} of layers (--json lists all)"
        )
    first = models.first
    if first is None:
        return lines
    pair = f"{first.a} / {first.b}" if first.a != first.b else first.a
    before = "in" if first.where == "layer" else "before"
    lines.append(wrap_sentence(f"first difference: {before} {clean(pair)}"))
    cause = first.cause or "unknown: no tested setting, tensor, axis or order of the layer explains it"
    lines.append(wrap_sentence(f"cause: {clean(cause)}"))
    if first.fix is not None:
        lines.append(format_fix(first.fix))
    return lines


_UPDATES_SHOWN = 8


def _model_training_lines(steps: ModelTraining | None) -> list[str]:
    """Return the table of the updates that differ most, the cause, and what no file contains."""
    if steps is None:
        return []
    from ckpttool.verification.tolerances import BOUNDS
    from ckpttool.verification.training import describe_state

    dtypes = [bound for bound in BOUNDS if any(row.dtype == bound for row in steps.updates)]
    keys = dict.fromkeys((row.a, row.b, row.step) for row in steps.updates)
    by_type = {(row.a, row.b, row.step, row.dtype): row for row in steps.updates}
    columns = [("tensor of A", "path"), ("tensor of B", "path"), ("step", "right")]
    columns += [(dtype, "right") for dtype in dtypes]
    rows = []
    for a, b, step in [*keys][:_UPDATES_SHOWN]:
        deviations = [by_type[a, b, step, dtype] for dtype in dtypes]
        verdict = "yes" if all(row.within for row in deviations) else "NO"
        verdict = "rounding" if any(row.rounding for row in deviations) else verdict
        rows.append((a, b, str(step), *(f"{row.relative:.2e}" for row in deviations), verdict))
    a, b = (describe_state(optimizer) for optimizer in steps.optimizers)
    title = f"{format_count(steps.steps, 'update')} on the {steps.loss} loss; A: {a}; B: {b}"
    lines = [wrap_sentence(clean(title)), render_table([*columns, ("within", "left")], rows)]
    if len(keys) > len(rows):
        lines.append(f"{len(rows)} of {len(keys)} updates (--json lists all)")
    worst = steps.worst
    if worst is not None:
        text = f"largest difference: {clean(worst.a)}, {worst.relative:.1e} of A's update, step {worst.step}"
        lines.append(wrap_sentence(text))
    if steps.cause is not None:
        word = "cause" if steps.cause.confirmed else "suspected cause"
        lines.append(wrap_sentence(f"{word}: {clean(steps.cause.text)}"))
        lines += [format_fix(steps.cause.fix)] if steps.cause.fix else []
    if steps.epsilon is not None and steps.epsilon.worst.within:
        text = f"{steps.epsilon.text}; updates differ by {steps.epsilon.worst.relative:.1e} at most"
        lines.append(wrap_sentence(clean(text)))
    bounds = " and ".join(f"{BOUNDS[dtype]:g} in {dtype}" for dtype in dtypes)
    lines.append(f"tolerance of updates: relative difference of {bounds}, or twice A's own rounding error")
    return [*lines, *(wrap_sentence(f"missing: {entry}") for entry in steps.missing)]


def _model_verdict(verification: Verification, models: ModelComparison) -> str:
    wrong = [network.name for network in verification.networks if not network.within]
    training = models.training
    if not wrong and training is not None and not training.within:
        return "FAIL: the outputs match, the updates differ"
    if not wrong:
        pairs = f", {format_count(len(models.layers), 'pair')} of layers compared" if models.layers else ""
        outputs = format_count(len(verification.networks), "output matches", "outputs match")
        updates = "" if training is None else ", all updates agree"
        return f"PASS: {outputs}{pairs}{updates}"
    return wrap_sentence(f"FAIL: the models differ: {clean(abbreviate_list(wrong, 8))}")


def _verification_verdict(result: Verification) -> str:
    if result.models is not None:
        return _model_verdict(result, result.models)
    networks = format_count(len(result.networks), "network")
    wrong = [network.name for network in result.networks if not network.within]
    parts = list(dict.fromkeys(discrepancy.part for discrepancy in result.discrepancies))
    if not result.within:
        differ = [*wrong, *(part for part in parts if part not in wrong)]
        moved = ["updates"] if result.training is not None and not result.training.within else []
        return wrap_sentence(f"FAIL: the agents differ: {clean(abbreviate_list([*differ, *moved], 8))}")
    if sidecar.has_open_entries(result.ledger):
        return f"FAIL: {networks} match, but a fact that affects the actions was not used"
    if result.contents is None:
        return f"PASS: {networks} match" + ("; --all compares the rest" if result.not_compared else "")
    equal = f"{format_count(result.contents.equal, 'entry', 'entries')} equal"
    facts = f", {format_count(len(result.contents.facts), 'fact')} agree" if result.contents.facts else ""
    return f"PASS: {f'{networks} match, ' if result.networks else ''}{equal}{facts}"


def _training_table(training: TrainStepComparison) -> list[str]:
    """Return a row per network and moment: the difference of both sides' updates in each float type."""
    from ckpttool.verification.tolerances import BOUNDS, OWN_ERROR

    keys = dict.fromkeys((update.name, update.step) for update in training.moved)
    by_type = {(update.name, update.step, str(update.dtype)): update for update in training.moved}
    columns = [("network", "left"), ("step", "right"), *((f"{d} |dA-dB|/|dA|", "right") for d in BOUNDS)]
    rows = []
    for name, step in keys:
        updates = [by_type[name, step, dtype] for dtype in BOUNDS]
        within = "yes" if all(moved.within for moved in updates) else "NO"
        rows.append((name, str(step), *(f"{moved.relative:.2e}" for moved in updates), within))
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in BOUNDS.items())
    sentence = (
        f"tolerance of updates: relative difference of {bounds}, or {OWN_ERROR:g}x A's own error "
        "if that is larger"
    )
    different = [
        wrap_sentence(f"optimizers differ: {clean(difference)}") for difference in training.differences
    ]
    title = f"{format_count(training.steps, 'update')} of {training.algorithm}"
    return [title, render_table([*columns, ("within", "left")], rows), sentence, *different]
