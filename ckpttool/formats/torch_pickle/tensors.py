"""What torch's pickles call to rebuild tensors, by name: the one table of builders.

Sources: torch/_utils.py and torch/_tensor.py (see views.py and parts.py), torch/jit/_pickle.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.formats.torch_pickle import parts, views
from ckpttool.formats.torch_pickle.sources import array_source
from ckpttool.formats.torch_pickle.views import RANK, Size, Storage, Tensor
from ckpttool.wire import pickle_numpy
from ckpttool.wire.pickle_reader import CONTAINERS, Builder, Global, Object

__all__ = ["BUILDERS", "RANK", "REBUILD", "Size", "Storage", "Tensor", "array_source"]


def _first(args: tuple[Any, ...]) -> object:
    return args[0] if args else NotImplemented


def _graph_module(args: tuple[Any, ...]) -> object:
    """Return the traced module as an object: its attributes are the first argument, source code follows."""
    if not args or not isinstance(args[0], dict):
        return NotImplemented
    return Object(_GRAPH, args[1:], 0, state=args[0])


_GRAPH = Global("torch.fx.graph_module", "GraphModule")

# What plain pickles of torch's objects call, too.
REBUILD: Mapping[str, Builder] = {
    **views.REBUILD,
    **parts.REBUILD,
    # torch/fx/graph_module.py, GraphModule.__reduce__
    "torch.fx.graph_module.reduce_graph_module": _graph_module,
}

BUILDERS: Mapping[str, Builder] = {
    **CONTAINERS,
    **pickle_numpy.BUILDERS,
    **REBUILD,
    # TorchScript tags its lists and dicts with their types.
    "torch.jit._pickle.build_intlist": _first,
    "torch.jit._pickle.build_doublelist": _first,
    "torch.jit._pickle.build_boollist": _first,
    "torch.jit._pickle.build_tensorlist": _first,
    "torch.jit._pickle.restore_type_tag": _first,
}
