"""Pairs of models that compute the same, and what `verify` finds of them: `python -m tests.right_pairs`.

Most are written twice by hand; others are filled from Keras by `load_into`. `--peers` adds the models of
Transformers, Keras applications, torchvision and timm, where these are installed. One process of each
framework runs all models.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import verifying
from ckpttool.commands.verify import verify
from ckpttool.networks import ModelSpec
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE
from tests.pair_models import SHAPES
from tests.shared_runners import shared_runners

HAND_WRITTEN = (*(name for name in SHAPES if name != "attention"),)
TWINS = (
    *("mlp_seq_square", "mlp_torch_ctor_reversed", "unet_like_mlp", "dueling", "own_xw_torch", "rms_own"),
    *("film_gamma_beta", "layernorm_noaffine", "batchnorm_mlp", "prelu_mlp", "siamese_shared", "tied_lm"),
    *(
        "swiglu_llama",
        "resnet_timm_vs_kapp",
        "mobilenet_v2_block",
        "efficientnet_se",
        "aspp_parallel_dilated",
    ),
    *("groupnorm_conv", "flatten_concat", "dcgan_gen", "vgg_named", "lstm_bidirectional"),
    *("seq2seq_gru_unnamed", "dreamer_rssm_like", "depthwise_mult2", "tcn", "unet"),
)
APPLICATIONS = {
    "VGG16": (32, 32, 3),
    "VGG19": (32, 32, 3),
    "DenseNet121": (32, 32, 3),
}
TRANSFORMERS = ("Bert", "DistilBert", "GPT2", "ViT")


@dataclass(frozen=True)
class RightPair:
    """What `verify` finds of one pair.

    `difference` is the largest one of the outputs, relative to their size; `error_a` and `error_b` are those
    from the float64 run.
    """

    name: str
    kind: str
    a: str
    b: str
    within: bool
    outputs: int
    layers: int
    difference: float
    error_a: float
    error_b: float
    float64: bool
    seconds: float
    note: str = ""


# Factories of the models' processes.


def keras_twin(name: str) -> Any:
    """Return the Keras model of a pair of twins, with random numbers."""
    return _twins(name, "Keras")


def torch_twin(name: str) -> Any:
    """Return the PyTorch model of a pair of twins, with random numbers."""
    return _twins(name, "Torch")


def _twins(name: str, side: str) -> Any:
    from tests.model_pairs import twins

    twins.load_families()
    return getattr(twins, side)().build(twins.PAIRS[name], 1)


def keras_application(name: str) -> Any:
    """Return a model of keras.applications without its head."""
    import keras

    cls = getattr(keras.applications, name)
    return cls(weights=None, include_top=False, input_shape=APPLICATIONS[name])


def torch_application(name: str) -> Any:
    """Return the same of torchvision."""
    from torch import nn

    from tests.model_pairs.twins_published import define_operators

    define_operators()
    import torchvision

    model = getattr(torchvision.models, name.lower())(weights=None)
    if name == "DenseNet121":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1.001e-5
        return nn.Sequential(model.features, nn.ReLU())
    return model.features


def write_twins(folder: str, names: Sequence[str]) -> None:
    """Write both sides of pairs: Keras's random numbers, loaded into the PyTorch model."""
    import torch

    from ckpttool.conversion.filling import load_into
    from tests.model_pairs import twins

    twins.load_families()
    for name in names:
        at = Path(folder, name)
        model, pair = keras_twin(name), twins.PAIRS[name]
        model.save_weights(f"{at}.weights.h5")
        model.save(f"{at}.keras")
        other = torch_twin(name)
        load_into(other, f"{at}.keras", shapes=twins.shapes(pair, "torch"))
        torch.save(other.state_dict(), f"{at}.pt")
        np.savez(f"{at}.npz", **{f"in{n}": x for n, x in enumerate(twins.random_inputs(pair, "keras", 5))})


def write_applications(folder: str, names: Sequence[str]) -> None:
    """Write both sides of applications."""
    import torch

    from ckpttool.conversion.filling import load_into

    draw = np.random.default_rng(0)
    for name in names:
        at = Path(folder, name)
        model = keras_application(name)
        for weight in model.weights:
            if len(weight.shape) < 2:
                weight.assign(draw.uniform(0.5, 1.5, weight.shape).astype(np.float32))
        model.save(f"{at}.keras")
        shape = APPLICATIONS[name]
        other = torch_application(name)
        load_into(other, f"{at}.keras", shapes=[(shape[2], *shape[:2])])
        torch.save(other.state_dict(), f"{at}.pt")


def write_transformers(folder: str, names: Sequence[str]) -> None:
    """Write both sides of models of Transformers, converted by its own loader."""
    import torch
    import transformers

    from tests.model_pairs import hugging_face

    for name in names:
        at = Path(folder, name)
        torch.manual_seed(0)
        model = hugging_face.torch_model(name)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value) * 0.1)
        torch.save(model.state_dict(), f"{at}.pt")
        model.save_pretrained(at)
        other = getattr(transformers, f"TF{name}Model").from_pretrained(at, from_pt=True)
        other.save_weights(f"{at}.h5")
        np.savez(f"{at}.npz", **hugging_face.inputs(name))


def _spec(factory: str, name: str) -> ModelSpec:
    return ModelSpec(f"tests.right_pairs:{factory}", {"name": name})


def _in_child(call: str) -> None:
    program = f"from tests import right_pairs; right_pairs.{call}"
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def _measured(name: str, kind: str, files: Sequence[str], **options: Any) -> RightPair:
    start = time.perf_counter()
    try:
        verification = verify(*files, **options)
    except Exception as error:  # noqa: BLE001  # a refusal or crash is a result
        note = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return RightPair(name, kind, *_suffixes(files), False, 0, 0, 0.0, 0.0, 0.0, False, 0.0, note)
    elapsed_s = time.perf_counter() - start
    models, note = verification.models, ""
    if models is not None and models.first is not None:
        note = f"{models.first.b} ({models.first.where}): {models.first.cause}"
    return RightPair(
        name,
        kind,
        *_suffixes(files),
        verification.within,
        len(verification.networks),
        0 if models is None else len(models.layers),
        max(network.max_rel for network in verification.networks),
        max(network.error_a for network in verification.networks),
        max(network.error_b for network in verification.networks),
        models is not None and models.exact,
        round(elapsed_s, 2),
        note,
    )


def _suffixes(files: Sequence[str]) -> tuple[str, str]:
    return tuple("".join(Path(file).suffixes[-2:]) or "TensorFlow" for file in files)  # type: ignore[return-value]


def _hand_written(folder: Path) -> Iterator[RightPair]:
    from tests import planted_faults

    sides = planted_faults.Sides(folder)
    files = {}
    for name in HAND_WRITTEN:
        torch_file = sides.torch(f"hand_{name}", name, {})
        files[name] = sides.keras(f"hand_{name}", name, {}), torch_file
    sides.write()
    for name, pair in files.items():
        like_a = planted_faults.spec("keras", name) if name in planted_faults.OWN else None
        yield _measured(name, "by hand", pair, like_a=like_a, like_b=planted_faults.spec("torch", name))


def _agents(folder: Path) -> Iterator[RightPair]:
    from ckpttool import convert

    for name, source, target in (
        ("TD3 to PyTorch", TF_SAMPLE, folder / "agent.pt"),
        ("TD3 to TensorFlow", TORCH_SAMPLE, folder / "agent"),
    ):
        convert(str(source), str(target), to="torch" if name.endswith("Torch") else "tf")
        yield _measured(name, "agent", (str(source), str(target)))


def _all_twins(folder: Path, names: Sequence[str]) -> Iterator[RightPair]:
    _in_child(f"write_twins({str(folder)!r}, {list(names)!r})")
    for name in names:
        at = folder / name
        yield _measured(
            name,
            "twins",
            (f"{at}.weights.h5", f"{at}.pt"),
            like_a=_spec("keras_twin", name),
            like_b=_spec("torch_twin", name),
            inputs=f"{at}.npz",
        )


def _applications(folder: Path) -> Iterator[RightPair]:
    for name in APPLICATIONS:
        try:
            _in_child(f"write_applications({str(folder)!r}, {[name]!r})")
        except RuntimeError as error:
            note = str(error).strip().splitlines()[-1][:300]
            yield RightPair(name, "application", ".keras", ".pt", False, 0, 0, 0, 0, 0, False, 0, note)
            continue
        files = f"{folder / name}.keras", f"{folder / name}.pt"
        yield _measured(name, "application", files, like_b=_spec("torch_application", name))


def _transformers(folder: Path) -> Iterator[RightPair]:
    _in_child(f"write_transformers({str(folder)!r}, {list(TRANSFORMERS)!r})")
    factories = "tests.model_pairs.hugging_face"
    for name in TRANSFORMERS:
        at = folder / name
        yield _measured(
            name,
            "transformers",
            (f"{at}.pt", f"{at}.h5"),
            like_a=ModelSpec(f"{factories}:torch_model", {"name": name}),
            like_b=ModelSpec(f"{factories}:keras_model", {"name": name}),
            inputs=f"{at}.npz",
            transpose_inputs=False,
        )


def _framework(factory: str) -> str:
    keras = (":keras_", "pair_keras:")
    return "tensorflow" if any(word in factory for word in keras) else "torch"


def pairs(folder: Path, kinds: Sequence[str], patterns: Sequence[str]) -> Iterator[RightPair]:
    """Compare the pairs of these kinds whose names match."""
    chosen = [name for name in TWINS if not patterns or any(re.search(p, name) for p in patterns)]
    with shared_runners(_framework):
        if "hand" in kinds:
            yield from _hand_written(folder)
        if "agents" in kinds:
            yield from _agents(folder)
        if "twins" in kinds:
            yield from _all_twins(folder, chosen)
        if "applications" in kinds:
            yield from _applications(folder)
        if "transformers" in kinds:
            yield from _transformers(folder)


def recorded() -> list[dict[str, Any]]:
    """Return the recorded rows."""
    return list(verifying.figures().get("pairs", ()))


def record(rows: Sequence[dict[str, Any]]) -> None:
    """Keep the rows; pairs that were not compared keep theirs."""
    every = {(row["kind"], row["name"]): row for row in (*recorded(), *rows)}
    verifying.record("pairs", [*every.values()])


def main() -> None:
    """Print a row for each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--kinds", default="hand,agents,twins")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--record", action="store_true", help="keep the rows")
    options = parser.parse_args()
    path = (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in pairs(Path(folder), options.kinds.split(","), options.patterns):
            rows.append(asdict(row))
            if not options.json:
                errors = f"{row.difference:.1e} {row.error_a:.1e} {row.error_b:.1e}"
                head = f"{'-+'[row.within]} {row.name:26} {row.kind:8} {row.a:11} {row.b:11}"
                print(  # noqa: T201
                    f"{head} {row.layers:4} {errors} {row.float64!s:5} {row.seconds:6.2f} s {row.note}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=1))  # noqa: T201
    if options.record:
        record(rows)


if __name__ == "__main__":
    importlib.import_module("tests.right_pairs").main()
