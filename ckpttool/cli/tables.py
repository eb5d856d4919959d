"""Tables and reports for people: each turns one record into text of at most 80 columns where it can."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckpttool import ledger
from ckpttool.cli import output
from ckpttool.cli.columns import beside, ended, styled, wrapped
from ckpttool.cli.columns import columns as width
from ckpttool.errors import some
from ckpttool.shown import clean, count

if TYPE_CHECKING:
    from ckpttool.ledger import Entry
    from ckpttool.mapping.report import Report
    from ckpttool.ops.convert import Conversion
    from ckpttool.ops.digest import Comparison, Digest
    from ckpttool.ops.listing import Row
    from ckpttool.ops.parity import Parity
    from ckpttool.ops.schemas import Listed
    from ckpttool.ops.train_step import TrainStep
    from ckpttool.ops.verify import Verification

_SHOWN = 12


def drawn(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """Draw a table; a column is its title and "left", "right" or "path" (which folds where it must)."""
    # Lines without a table, such as a conversion's, do not wait for it.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, kind in columns:
        table.add_column(
            title, justify="right" if kind == "right" else "left", no_wrap=kind != "path", overflow="fold"
        )
    for row in rows:
        table.add_row(*(clean(cell).replace("[", r"\[") for cell in row))
    colours: Literal["auto"] | None = "auto" if styled() else None
    console = Console(file=io.StringIO(), width=width(), force_terminal=styled(), color_system=colours)
    console.print(table)
    text = output.styled_by_rich(console.file.getvalue())  # type: ignore[attr-defined]  # the StringIO given above
    return "\n".join(map(ended, text.splitlines()))


def listed(label: str, names: Sequence[str]) -> list[str]:
    """Return a line for each name, at most a dozen."""
    shown = [f"{label}: {clean(name)}" for name in names[:_SHOWN]]
    return shown + ([f"{label}: and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])


# A default that an optimizer got (layouts/optimizers/known.py).
_DEFAULT = re.compile(
    r"(?P<lead>.*: )?(?P<optimizer>\S+) (?P<setting>\S+ = \S+) "
    r"\(default of (?P<whose>[^;()]+); the checkpoint does not hold it\)"
)


def with_joined_defaults(said: Sequence[str]) -> list[str]:
    """Return sentences with the defaults of optimizers in one for all that got the same."""
    found = {text: match for text in said if (match := _DEFAULT.fullmatch(text))}
    settings: dict[tuple[str, str], dict[str, list[str]]] = {}
    for match in found.values():
        own = settings.setdefault((match["lead"] or "", match["optimizer"]), {})
        own.setdefault(match["whose"], []).append(match["setting"])
    groups: dict[tuple[str, str], list[str]] = {}
    for (lead, optimizer), own in settings.items():
        shown = "; ".join(f"{', '.join(each)} (default of {whose})" for whose, each in own.items())
        groups.setdefault((lead, shown), []).append(optimizer)
    joined = {
        (lead, optimizer): f"{lead}{' and '.join(optimizers)}: {shown}; the checkpoint does not hold them"
        for (lead, shown), optimizers in groups.items()
        for optimizer in optimizers
    }
    return list(
        dict.fromkeys(
            joined[found[text]["lead"] or "", found[text]["optimizer"]] if text in found else text
            for text in said
        )
    )


def sentences(assumed: Sequence[str], notes: Sequence[str], entries: Iterable[Entry] = ()) -> list[str]:
    """Return the ledger, what was assumed and what there is to know, one line each in a pipe."""
    said = [*map(clean, ledger.lines(entries)), *listed("assumed", with_joined_defaults(assumed))]
    said += [f"note: {clean(note)}" for note in with_joined_defaults(notes)]
    return [wrapped(line) for line in said]


def digest(found: Digest, compared: Comparison | None, *, quiet: bool) -> str:
    """Return one line per tensor, as sha256sum prints them, then the whole and the comparison."""
    lines = [f"{tensor.sha256}  {clean(tensor.path)}" for tensor in found.tensors]
    lines += ["", f"{found.sha256}  {clean(found.path)}"]
    lines += [] if quiet else [f"checksums: {found.checksums}"]
    if compared is not None:
        lines += listed("differs", compared.different)
        lines += listed("only here", compared.only_here)
        lines += listed("only in the saved digest", compared.only_saved)
        said = "equal to the saved digest" if compared.equal else "not equal to the saved digest"
        lines += [] if quiet else [said]
    return "\n".join(lines)


def conversion(done: Conversion, *, quiet: bool, whole: bool) -> str:
    """Return what was mapped (every line on a dry run), what was not, and what was assumed."""
    report = done.report
    lines: list[str] = []
    if whole:
        # Two lines an entry: two paths and a rule side by side do not fit a terminal.
        for m in report.mapped:
            shapes = _shapes(m.shape_in, m.shape_out)
            said = f"  {m.rule}  {shapes}".rstrip()
            lines += [beside(clean(m.source), 0), f"    -> {beside(clean(m.target), len(said) + 7)}{said}"]
        lines += [] if quiet else [""]
    lines += listed("unmapped", report.unused) + listed("missing", report.missing)
    if not quiet:
        lines += [
            *sentences(_assumptions(done), report.notes, done.ledger),
            _counted(report),
            *_compared(done.parity),
        ]
    elif not done.within:
        lines += _compared(done.parity)
    if done.written:
        lines += [f"wrote {clean(done.target)}", f"sha256 {done.digest}"]
        lines += [] if quiet else [f"load: {clean(line)}" for line in done.load]
    elif not done.within:
        lines.append("nothing was written: the model does not compute what the checkpoint does")
    elif not report.complete:
        # A model that is not filled as a whole computes something else.
        rest = "; the missing tensors keep your model's own numbers" if done.model and report.missing else ""
        lines.append(f"nothing was written: --allow-missing writes what is mapped{rest}")
    elif not quiet:
        lines.append("nothing was written: this was a dry run")
    return "\n".join(lines)


def _assumptions(done: Conversion) -> tuple[str, ...]:
    """Return what the mapping assumes, then what is assumed of the agent."""
    return tuple(dict.fromkeys((*done.report.assumed, *ledger.assumptions(done.ledger))))


def _counted(report: Report) -> str:
    """Return how many entries were mapped, and how many by which rule."""
    rules = sorted({m.rule for m in report.mapped})
    # A chain of rules has commas of its own.
    between = "; " if any("," in rule for rule in rules) else ", "
    counted = between.join(f"{sum(m.rule == rule for m in report.mapped)} {rule}" for rule in rules)
    mapped = count(len(report.mapped), "entry mapped", "entries mapped")
    return wrapped(f"{mapped}{': ' if counted else ''}{counted}")


def _compared(networks: Sequence[Parity]) -> list[str]:
    """Return a line for all networks that were as exact as A's, and one for each of the others."""
    exact = [n for n in networks if n.within and not n.error_a]
    alike = f"{count(len(exact), 'network read back computes', 'networks read back compute')} what was read"
    return [alike] * bool(exact) + [
        f"{clean(n.name)}: {count(n.n, 'output')} at most {n.error_b:.2e} from float64 "
        f"(NumPy's {n.error_a:.2e})"
        for n in networks
        if n not in exact
    ]


def _shapes(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    return str(list(before)) if before == after else f"{list(before)} -> {list(after)}"


# Discrepancies that a person reads; --json has all.
_DISCREPANCIES = 20


def parity(found: Verification, *, quiet: bool) -> str:
    """Return a row per network, then the verdict; `quiet` leaves out this and what was assumed and noted."""
    rows = [
        (
            n.name,
            str(n.n),
            f"{n.max_abs:.2e}",
            f"{n.max_rel:.2e}",
            f"{n.error_a:.2e}",
            f"{n.error_b:.2e}",
            "yes" if n.within else "NO",
        )
        for n in found.networks
    ]
    columns = (
        ("network", "left"),
        ("n", "right"),
        ("max |A-B|", "right"),
        ("relative", "right"),
        ("A-f64", "right"),
        ("B-f64", "right"),
        ("within", "left"),
    )
    ran = [f" ({backend})" if found.networks else "" for backend in found.backends]
    lines = [
        f"A {clean(found.first)}{ran[0]}",
        f"B {clean(found.second)}{ran[1]}",
        *([drawn(columns, rows)] if rows else []),
        *([] if found.training is None else _training(found.training)),
        *_contents(found),
    ]
    if not quiet:
        lines += [*sentences(found.assumed, found.notes, found.ledger), f"tolerance: {found.tolerance}"]
        lines += [wrapped(f"not compared: {clean(each)}") for each in found.not_compared]
        lines.append(_verified(found))
    return "\n".join(lines)


def _contents(found: Verification) -> list[str]:
    """Return two lines for each discrepancy: what it is in, and what A and B have."""
    lines = []
    for each in found.discrepancies[:_DISCREPANCIES]:
        what = f"{each.what} ({clean(each.part)})"
        lines.append(f"{beside(clean(each.path), len(what) + 2)}: {what}")
        lines.append(f"    {clean(each.a or 'nothing')} -> {clean(each.b or 'nothing')}")
        lines += [f"    looks like {clean(each.resembles)}"] if each.resembles else []
    if len(found.discrepancies) > _DISCREPANCIES:
        lines.append(f"and {len(found.discrepancies) - _DISCREPANCIES:,} more (--json lists all)")
    return lines


def _verified(found: Verification) -> str:
    networks = count(len(found.networks), "network")
    wrong = [each.name for each in found.networks if not each.within]
    parts = list(dict.fromkeys(each.part for each in found.discrepancies))
    if not found.within:
        differ = [*wrong, *(part for part in parts if part not in wrong)]
        moved = ["updates"] if found.training is not None and not found.training.within else []
        return wrapped(f"FAIL: NOT the same agent: {clean(some([*differ, *moved], 8))}")
    if ledger.decides(found.ledger):
        return f"FAIL: {networks} match, and something that decides was not used"
    if found.contents is None:
        return f"PASS: {networks} match" + ("; --all compares the rest" if found.not_compared else "")
    held = f"{count(found.contents.equal, 'entry', 'entries')} equal"
    facts = f", {count(len(found.contents.facts), 'fact')} agree" if found.contents.facts else ""
    return f"PASS: {f'{networks} match, ' if found.networks else ''}{held}{facts}"


def _training(found: TrainStep) -> list[str]:
    """Return a row per network and moment: how far apart the two sides' updates are, for both float types."""
    from ckpttool.ops.train_step import BOUNDS, OWN_ERROR

    keys = dict.fromkeys((each.name, each.step) for each in found.moved)
    by_type = {(each.name, each.step, each.dtype): each for each in found.moved}
    columns = [("network", "left"), ("step", "right"), *((f"{d} |dA-dB|/|dA|", "right") for d in BOUNDS)]
    rows = []
    for name, step in keys:
        each = [by_type[name, step, dtype] for dtype in BOUNDS]
        within = "yes" if all(moved.within for moved in each) else "NO"
        rows.append((name, str(step), *(f"{moved.relative:.2e}" for moved in each), within))
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in BOUNDS.items())
    title = f"{count(found.steps, 'update')} of {found.algorithm}"
    said = f"updates: at most {bounds} apart, or {OWN_ERROR:g}x A's own error where that is more"
    return [title, drawn([*columns, ("within", "left")], rows), said]


def listing(kind: str, rows: Sequence[Row]) -> str:
    """Return a row per format, layout or backend."""
    if kind == "backends":
        first = (("backend", "left"), ("installed", "left"), ("what", "path"))
        return drawn(first, ((r.name, _installed(r), r.title) for r in rows))
    columns = [(kind[:-1], "left"), ("reads", "left"), ("writes", "left"), ("what", "path")]
    cells = [[r.name, _yes(r.reads), _yes(r.writes), r.title] for r in rows]
    if kind == "layouts":
        # A layout that follows its library's source alone says so.
        columns.insert(3, ("tried", "left"))
        for row, cell in zip(rows, cells, strict=True):
            cell.insert(3, _yes(bool(row.seen)))
    return drawn(columns, cells)


def schemas(rows: Sequence[Listed]) -> str:
    """Return a row per JSON Schema."""
    return drawn((("schema", "left"), ("of what", "path")), ((row.name, row.title) for row in rows))


def limits(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per limit; a value that the user chose is starred."""
    columns = (("limit", "left"), ("value", "right"), ("of what", "path"))
    changed = ("", " *")
    cells = ((r["name"], f"{r['value']:,}{changed[r['value'] != r['default']]}", r["meaning"]) for r in rows)
    return drawn(columns, cells)


def _yes(value: bool | None) -> str:
    return "yes" if value else "no"


def _installed(row: Row) -> str:
    return "yes" if row.available else f"no: pip install 'ckpttool[{row.extra}]'"
