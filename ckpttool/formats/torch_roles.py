"""The role of a tensor in a torch checkpoint, from its name and its neighbours."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.tree import Path, Role

# Buffer names of torch modules (torch/nn/modules/batchnorm.py).
_BUFFERS: dict[object, Role] = {
    "running_mean": "buffer",
    "running_var": "buffer",
    "num_batches_tracked": "counter",
}


class TorchTensorRole(NamedTuple):
    """The role of a tensor; the fields are those of Leaf."""

    role: Role
    slot: str | None = None


def role_by_module_name(path: Path) -> Role | None:
    """Return the role of a standard buffer or counter name in torch modules; None for other names."""
    last = path[-1].value if path else None
    return _BUFFERS.get(last.rpartition(".")[2]) if isinstance(last, str) else None


def find_optimizers(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the paths of optimizer state_dicts (torch/optim/optimizer.py): `state` and `param_groups`.

    Also handle those that torch.distributed.checkpoint.state_dict flattened into names like
    `state.l1.weight.exp_avg`.
    """
    groups: dict[Path, set[str]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            first = str(step.value).partition(".")[0]
            if step.kind == "key" and first in ("state", "param_groups"):
                groups.setdefault(path[:depth], set()).add(first)
    return frozenset(top for top, names in groups.items() if len(names) == 2)


def tensor_role(path: Path, known: Collection[Path]) -> TorchTensorRole:
    """Return the role of the tensor at the path; `known` are the optimizer paths."""
    for depth in range(len(path)):
        if path[:depth] in known:
            return _optimizer_role(path[depth:])
    return TorchTensorRole(role_by_module_name(path) or "parameter")


def _optimizer_role(path: Path) -> TorchTensorRole:
    if str(path[0].value).partition(".")[0] != "state":
        return TorchTensorRole("other")
    last = str(path[-1].value)
    name = last.rpartition(".")[2] if len(path) == 1 else last
    return TorchTensorRole("counter") if name == "step" else TorchTensorRole("slot", name)
