"""Conversions into a model of the user's own, with the mapper's fixes switched off one by one.

`main` writes outcomes.json: by case, what `convert --like` and `load_into` make of a source that runs. Both
models run in this process: starting processes would take most of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.commands.convert import fill
from ckpttool.conversion import filling
from ckpttool.core import CkpttoolError, Leaf, Tree
from ckpttool.mapping import fill_model, kind_notes, layer_kinds, rules
from ckpttool.mapping.feature_orders import FeatureReordering
from ckpttool.verification import two_models
from tests import pair_models, replayed_faults
from tests.shared_runners import InThisProcess

# What a mapper without one of its fixes does.

Switch = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without_square_transpositions() -> contextlib.AbstractContextManager[None]:
    right = rules.Permute.apply

    def apply(self: rules.Permute, array: np.ndarray) -> np.ndarray:
        square = self.axes == (1, 0) and array.shape[0] == array.shape[1]
        return array.copy() if square else right(self, array)

    return patched(rules.Permute, "apply", apply)


@contextlib.contextmanager
def without_flattened_images() -> Iterator[None]:
    with (
        patched(fill_model, "plan_reordering", lambda *_: FeatureReordering()),
        patched(fill_model, "find_unknown_orders", lambda *_: {}),
    ):
        yield


def without_gate_orders() -> contextlib.AbstractContextManager[None]:
    return patched(layer_kinds._CellForm, "_reordered", lambda *_: rules.KEEP)


def without_statistics() -> contextlib.AbstractContextManager[None]:
    right = fill_model.fill

    def fill(source: Any, skeleton: Any, options: Any) -> Any:
        result = right(source, skeleton, options)
        leaves = {
            path: skeleton.tree[path]
            if isinstance(leaf, Leaf) and ("running_" in leaf.key or "moving_" in (leaf.name or leaf.key))
            else leaf
            for path, leaf in result.tree.items()
        }
        tree = Tree(leaves, result.tree.aliases, result.tree.containers)
        return fill_model.replace(result, tree=tree)

    return patched(fill_model, "fill", fill)


def without_settings() -> contextlib.AbstractContextManager[None]:
    return patched(kind_notes, "recorded_differences", lambda *_: ())


NOTHING: Switch = contextlib.nullcontext
# By case: the source's model, the factory (of the same model if empty), options, the switch.
CASES: dict[str, tuple[str, str, dict[str, Any], Switch]] = {
    **{f"right {name}": (name, "", {}, NOTHING) for name in ("mlp", "cnn")},
    "square kernel": ("mlp", "", {}, without_square_transpositions),
    "flattened image": ("cnn", "", {}, without_flattened_images),
    "gate order": ("gru", "", {}, without_gate_orders),
    "statistics": ("cnn", "", {}, without_statistics),
    "epsilon": ("cnn", "plain_cnn", {}, without_settings),
    "activation": ("mlp", "silu_mlp", {}, NOTHING),
    "stated orientation": ("mlp", "", {"kinds": ["second=dense_out_in"]}, NOTHING),
}


# Cases in which `load_into` fills a model, too: each takes half a second.
LOADED = ("right mlp", "square kernel", "flattened image")


def plain_cnn() -> Any:
    """The model `cnn` with the epsilon that PyTorch has by default."""
    model = pair_models.cnn()
    model[1].eps = 1e-5
    return model


def silu_mlp() -> Any:
    """The model `mlp` with another activation."""
    from torch import nn

    model = pair_models.mlp()
    model[1] = nn.SiLU()
    return model


def double_mlp() -> Any:
    """The model `mlp` in float64."""
    return pair_models.mlp().double()


def half_mlp() -> Any:
    """The model `mlp` in float16."""
    return pair_models.mlp().half()


def half_silu_mlp() -> Any:
    """The model `silu_mlp` in float16."""
    return silu_mlp().half()


def placed_mlp() -> Any:
    """The model `mlp` with a buffer that no output depends on."""
    import torch

    model = pair_models.mlp()
    model.register_buffer("position_ids", torch.arange(4))
    return model


def _scaled(factor: float) -> Any:
    from torch import nn

    class Scaled(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * factor

    return Scaled(*pair_models.mlp())


def endless_mlp() -> Any:
    """The model `mlp` whose outputs are no numbers."""
    return _scaled(float("nan"))


def constant_mlp() -> Any:
    """The model `mlp` whose outputs do not depend on its inputs."""
    return _scaled(0.0)


def counting_mlp() -> Any:
    """The model `mlp` whose calls change and replace buffers, and draw random numbers."""
    import random

    import torch
    from torch import nn

    class Counting(nn.Sequential):
        def __init__(self, *layers: Any) -> None:
            super().__init__(*layers)
            self.register_buffer("calls", torch.zeros(1), persistent=False)
            self.register_buffer("last", torch.zeros(1), persistent=False)

        def forward(self, x: Any) -> Any:
            self.calls += torch.rand(1) + random.random() + np.random.rand()
            self.last = x.sum()
            return super().forward(x)

    return Counting(*pair_models.mlp())


def rectified() -> Any:
    """Two layers of the ONNX source."""
    from torch import nn

    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))


def bounded() -> Any:
    """The same two layers with another activation."""
    from torch import nn

    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2, bias=False))


def write_sources(names: Iterable[str]) -> None:
    """Write the Keras models."""
    from tests import pair_keras  # imports Keras

    for name in names:
        model = getattr(pair_keras, name)()
        state = {key: value.numpy() for key, value in pair_models.torch_state(name).items()}
        pair_keras.fill(model, name, state)
        model.save(f"{name}.keras")


def converted(source: str, target: str, factory: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what `convert --like` makes of a source."""
    like = factory if ":" in factory else f"model_proofs:{factory}"
    done = fill(source, target, like, **options)
    assert done.proof is not None, done.report
    proof = done.proof.document()
    with contextlib.suppress(FileNotFoundError):
        proof["receipt"] = json.loads(Path(f"{target}.ckpttool.json").read_bytes())
    return {"written": done.written, "within": done.within, "files": sorted(os.listdir()), **proof}


def filled(source: str, factory: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what `load_into` makes of a source, and whether the model is as it was."""
    import torch

    net = globals()[factory]().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    arguments = {name: dict(item.split("=") for item in value) for name, value in options.items()}
    outcome: dict[str, Any] = {}
    try:
        done = filling.load_into(net, source, **arguments)
    except CkpttoolError as error:
        outcome = {"kind": error.kind, "path": error.path, "found": error.found}
    else:
        assert done.proof is not None
        outcome = {"verified": done.proof.verified, "reason": done.proof.reason}
    same = {name: bool((value == before[name]).all()) for name, value in net.state_dict().items()}
    return {
        **outcome,
        "unchanged": all(same.values()),
        "training": all(module.training for module in net.modules()),
        "random": bool((torch.get_rng_state() == generator).all()),
    }


def main(folder: str) -> None:
    """Convert every case in both ways; write the outcomes."""
    _run_here(folder)
    write_sources({name for name, *_ in CASES.values()})
    outcomes: dict[str, Any] = {}
    for number, (title, (name, factory, options, switch)) in enumerate(CASES.items()):
        with switch():
            outcomes[title] = converted(f"{name}.keras", f"out{number}.pt", factory or name, options)
            if title in LOADED:
                outcomes[title]["load_into"] = filled(f"{name}.keras", factory or name, options)
    Path("outcomes.json").write_text(json.dumps(outcomes))


def replay(folder: str) -> None:
    """Convert the models of replayed_faults.py, then each fault; write the outcomes."""
    _run_here(folder)
    cases = replayed_faults.FAULTS
    names = dict.fromkeys(case.model for case in cases.values())
    outcomes: dict[str, Any] = {}
    for number, name in enumerate(names):
        replayed_faults.write_keras(name)
        like = f"replayed_faults:{name}"
        outcomes[f"right {name}"] = converted(f"{name}-replayed.keras", f"right{number}.pt", like, {})
    for number, (name, case) in enumerate(cases.items()):
        with case.switch():
            outcomes[name] = converted(f"{case.model}-replayed.keras", f"wrong{number}.pt", case.like, {})
    Path("outcomes.json").write_text(json.dumps(outcomes))


def _run_here(folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(Path(__file__).parent))
    filling.ModelProcess = InThisProcess  # type: ignore[assignment,misc]
    two_models.ModelProcess = InThisProcess  # type: ignore[assignment,misc]


mlp, cnn, gru = pair_models.mlp, pair_models.cnn, pair_models.gru
