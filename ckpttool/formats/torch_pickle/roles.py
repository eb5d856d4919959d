"""What a tensor of a torch checkpoint is for, told by its name and by what stands around it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ckpttool.leaf import Path, Role

# What torch's modules call their buffers (torch/nn/modules/batchnorm.py).
_BUFFERS: dict[object, Role] = {
    "running_mean": "buffer",
    "running_var": "buffer",
    "num_batches_tracked": "counter",
}


class Use(NamedTuple):
    """What a tensor is for; the fields are those of Leaf."""

    role: Role
    slot: str | None = None


def by_name(path: Path) -> Role | None:
    """Return the role of what torch's own modules call a buffer or count in; None for any other name."""
    last = path[-1].value if path else None
    return _BUFFERS.get(last.rpartition(".")[2]) if isinstance(last, str) else None


def optimizers(paths: Iterable[Path]) -> frozenset[Path]:
    """Return where optimizers' state_dicts stand (torch/optim/optimizer.py): `state` and `param_groups`.

    torch.distributed.checkpoint.state_dict can flatten one into names like `state.l1.weight.exp_avg`; these
    stand for it as well.
    """
    found: dict[Path, set[str]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            first = str(step.value).partition(".")[0]
            if step.kind == "key" and first in ("state", "param_groups"):
                found.setdefault(path[:depth], set()).add(first)
    return frozenset(top for top, names in found.items() if len(names) == 2)


def use(path: Path, known: Collection[Path]) -> Use:
    """Return what the tensor at the path is for, `known` being where optimizers stand."""
    for depth in range(len(path)):
        if path[:depth] in known:
            return _of_optimizer(path[depth:])
    return Use(by_name(path) or "parameter")


def _of_optimizer(path: Path) -> Use:
    if str(path[0].value).partition(".")[0] != "state":
        return Use("other")
    last = str(path[-1].value)
    name = last.rpartition(".")[2] if len(path) == 1 else last
    return Use("counter") if name == "step" else Use("slot", name)
