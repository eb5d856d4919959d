"""What `inspect` prints: a tree, a list of a folder's checkpoints, or what was drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from ckpttool import places, urls
from ckpttool.cli.columns import beside, wrapped
from ckpttool.cli.tree import View, render
from ckpttool.errors import UsageError, choice
from ckpttool.ops import training_step
from ckpttool.ops.modules import Sort
from ckpttool.ops.summary import Summary, summary
from ckpttool.shown import clean, count, size
from ckpttool.wire import asked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.ops.folder import Folder
    from ckpttool.ops.rows import Listed

_SHOWN = 20


def view(
    *,
    keys: bool,
    aliases: bool,
    depth: int | None,
    sort: str,
    names: bool = False,
    whole: bool = False,
    quiet: bool = False,
) -> View:
    """Return how the tree is to be shown; raise UsageError for an unknown order."""
    if sort not in get_args(Sort):
        raise UsageError(f"there is no order {sort!r}", hint=choice(sort, get_args(Sort)))
    return View(keys, aliases, depth, sort, quiet, names, whole)  # type: ignore[arg-type]  # just checked


def look(path: str, glob: str | None, layout: str | None) -> Summary | Folder:
    """Return what is at the path; folders are looked into only where there is one."""
    with places.visit():
        if not places.isdir(places.named(path)):
            return summary(path, glob, layout)
        from ckpttool.ops import folder

        return folder.look(path, glob, layout)


def draw(found: Summary | Folder, target: str, depth: int | None, *, force: bool) -> dict[str, Any]:
    """Draw the modules into a new file; return the JSON object that says what was drawn."""
    from ckpttool.cli import drawing

    if not isinstance(found, Summary):
        raise UsageError("there is no one checkpoint to draw", file=found.path, hint=found.hint)
    return drawing.write(found, target, depth, force=force)


def is_plain(found: Summary | Folder) -> bool:
    """Say whether loading the checkpoint asks for plain data only; raise UsageError where there is none."""
    if not isinstance(found, Summary):
        raise UsageError("there is no one checkpoint to judge", file=found.path, hint=found.hint)
    checkpoint = found.checkpoint
    return asked.verdict(checkpoint.asks) == asked.PLAIN and not checkpoint.unjudged


def text(found: Summary | Folder, view: View, drawn: dict[str, Any] | None) -> str:
    """Return what is printed."""
    if not isinstance(found, Summary):
        head = f"{clean(urls.spelled(found.path))}: {count(len(found.checkpoints), 'checkpoint')}"
        notes = [wrapped(f"note: {clean(note)}") for note in (*found.notes, found.hint)]
        table = _table(found.checkpoints, len(found.checkpoints))
        return "\n".join(table if view.quiet else [head, *table, *notes])
    if drawn is not None:
        lines = [f"{count(drawn['modules'], 'module')}, {count(drawn['edges'], 'edge')}"]
        lines += [wrapped(f"note: {clean(note)}") for note in drawn["notes"]]
        return "\n".join([*([] if view.quiet else lines), f"wrote {clean(drawn['file'])}"])
    tree = render(found, view)
    if view.quiet or len(found.checkpoints) < 2:
        return tree
    return "\n".join([*_table(found.checkpoints, _SHOWN), "", tree])


def _table(listed: Sequence[Listed], most: int) -> list[str]:
    """Return a line for each of the last `most` checkpoints; the path comes last."""
    left_out = len(listed) - most
    lines = [f"and {left_out} earlier ones (--json lists all)"] if left_out > 0 else []
    shown = listed[max(0, left_out) :]
    # The number after the last dash of a name; training_step finds one in other names, too.
    counts = [{**training_step.columns(each.counts), "in_name": each.step} for each in shown]
    titles = {n: t for n, t in training_step.TITLES.items() if any(own[n] is not None for own in counts)}
    widths = {n: max(len(t), *(len(_count(own[n])) for own in counts)) for n, t in titles.items()}
    head = "".join(f"{title:>{widths[name]}}  " for name, title in titles.items())
    lines.append(f"{head}{'size':>7}  {'time (UTC)':<16}  checkpoint")
    for each, own in zip(shown, counts, strict=True):
        said = "  latest" * each.latest + "  incomplete" * (not each.complete)
        start = "".join(f"{_count(own[name]):>{widths[name]}}  " for name in titles)
        start += f"{size(each.nbytes):>7}  {each.when:%Y-%m-%d %H:%M}  "
        where = clean(urls.spelled(each.path))
        lines.append(f"{start}{beside(where, len(start) + len(said))}{said}")
    return lines


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
