"""Execute the lines that a conversion prints beside models of PyTorch: `python loading_torch.py CASES.json`.

Runs in a separate process, in which ckpttool cannot be imported. Each model has the layers that the written
file names, and other values than it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Absent:
    """A finder that refuses the package under test."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "ckpttool":
            raise ImportError(name)


def network(torch: Any, state: Mapping[str, Any]) -> Any:
    """Return a module of linear layers with the names and sizes of a state_dict."""
    root = torch.nn.Module()
    for name in dict.fromkeys(key.rpartition(".")[0] for key in state):
        out, into = state[f"{name}.weight"].shape
        *above, last = name.split(".")
        owner = root
        for step in above:
            if not hasattr(owner, step):
                owner.add_module(step, torch.nn.Module())
            owner = getattr(owner, step)
        owner.add_module(last, torch.nn.Linear(into, out))
    return root


def load(kind: str, lines: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors that the lines load, as lists, by network and name."""
    import torch
    import torch.distributed.checkpoint

    states = {
        net: {name: torch.zeros(shape) for name, shape in state.items()} for net, state in shapes.items()
    }
    if kind == "arrays":
        import numpy
        import safetensors.numpy

        scope: dict[str, Any] = {"numpy": numpy, "safetensors": safetensors}
        exec(lines, scope)
        return {name: scope["tensors"][name].tolist() for name in scope["tensors"]}
    if kind == "dcp":
        scope = {"torch": torch, "state": states}
        exec(lines, scope)
        return {
            f"{net}.{name}": value.tolist() for net, state in states.items() for name, value in state.items()
        }
    if kind == "code":
        # A module beside the checkpoint, which the printed lines import.
        sys.path.insert(0, ".")
        scope = {"observations": [[0.1, -0.2, 0.3], [1.0, 0.0, -4.0]]}
        exec(lines, scope)
        return {"actions": scope["actions"].tolist()}
    networks = {net: network(torch, state) for net, state in states.items()}
    optimizers = {
        f"{net}_optimizer": torch.optim.Adam(networks[net].parameters()) for net in ("actor", "critic")
    }
    exec(lines, {"torch": torch, **networks, **optimizers})
    values = {
        f"{net}.{name}": value.tolist()
        for net, model in networks.items()
        for name, value in model.state_dict().items()
    }
    steps = {
        name: [int(state["step"]) for state in optimizer.state.values()]
        for name, optimizer in optimizers.items()
    }
    return {**values, **steps}


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    cases = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(json.dumps({name: load(*case) for name, case in cases.items()}))
