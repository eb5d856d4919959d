"""Models of Transformers that exist in both frameworks, converted by its own loaders and by ckpttool.

Tiny configurations with random weights; needs transformers<4.50, whose loaders `from_tf` and `from_pt` work.
"""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.model_pairs import harness
from tests.model_pairs.peers import Outcome, report, timed

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT = {"vocab_size": 50, "max_position_embeddings": 20}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Bert": {**_SMALL, **_TEXT},
    "DistilBert": {**_TEXT, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    "GPT2": {
        "vocab_size": 50,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 20,
        "use_cache": False,  # a cache has another structure in each framework
    },
    "ViT": {**_SMALL, "image_size": 8, "patch_size": 4, "num_channels": 3},
    "T5": {
        "vocab_size": 50,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "use_cache": False,
    },
}
_FILES = {"torch": "pt/model.safetensors", "keras": "tf/tf_model.h5"}
_MOST_HINTS = 8


def inputs(name: str) -> dict[str, np.ndarray]:
    """Return random inputs by name, as both frameworks take them."""
    draw = np.random.default_rng(1)
    if name == "ViT":
        return {"pixel_values": draw.standard_normal((3, 3, 8, 8)).astype(np.float32)}
    words = {"input_ids": draw.integers(0, 50, (3, 7))}
    return {**words, "decoder_input_ids": draw.integers(0, 50, (3, 5))} if name == "T5" else words


def torch_model(name: str) -> Any:
    """Return the PyTorch model with random weights."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**CONFIGURATIONS[name])
    return getattr(transformers, f"{name}Model")(config).eval()


def keras_model(name: str) -> Any:
    """Return the TensorFlow model with its variables made."""
    import tensorflow as tf
    import transformers

    config = getattr(transformers, f"{name}Config")(**CONFIGURATIONS[name])
    model = getattr(transformers, f"TF{name}Model")(config)
    model({key: tf.constant(value) for key, value in inputs(name).items()})
    return model


def _torch_outputs(model: Any, name: str) -> np.ndarray:
    import torch

    with torch.no_grad():
        output = model.eval()(**{key: torch.from_numpy(value) for key, value in inputs(name).items()})
    return output.last_hidden_state.numpy()


def _keras_outputs(model: Any, name: str) -> np.ndarray:
    import tensorflow as tf

    output = model({key: tf.constant(value) for key, value in inputs(name).items()})
    return output.last_hidden_state.numpy()


def make_torch(folder: str) -> None:
    """Write the PyTorch models and their outputs."""
    import torch

    for name in CONFIGURATIONS:
        torch.manual_seed(0)
        model = torch_model(name)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value) * 0.1)
        model.save_pretrained(Path(folder, name, "pt"))
        np.save(Path(folder, name, "torch.npy"), _torch_outputs(model, name))


def make_keras(folder: str) -> None:
    """Write the TensorFlow models and their outputs."""
    draw = np.random.default_rng(0)
    for name in CONFIGURATIONS:
        model = keras_model(name)
        for value in model.variables:
            value.assign_add(draw.standard_normal(value.shape).astype(np.float32) * 0.1)
        model.save_pretrained(Path(folder, name, "tf"), safe_serialization=False)
        np.save(Path(folder, name, "keras.npy"), _keras_outputs(model, name))


def judge(target: str, folder: str) -> None:
    """Convert every model to a framework, by Transformers and by ckpttool; print the outcomes."""
    import transformers

    from ckpttool.commands import convert  # noqa: F401  # so that no conversion's time has the import

    for name in CONFIGURATIONS:
        # An import, too.
        getattr(transformers, f"{'' if target == 'torch' else 'TF'}{name}Model")
    for name in CONFIGURATIONS:
        at = Path(folder, name)
        expected = np.load(at / ("keras.npy" if target == "torch" else "torch.npy"))
        outputs = _torch_outputs if target == "torch" else _keras_outputs
        prefix = "" if target == "torch" else "TF"

        def loaded(at: Path = at, name: str = name, expected: Any = expected, outputs: Any = outputs) -> None:
            cls = getattr(transformers, f"{prefix}{name}Model")  # noqa: B023  # called at once
            if target == "torch":
                model = cls.from_pretrained(at / "tf", from_tf=True)
            else:
                model = cls.from_pretrained(at / "pt", from_pt=True)
            harness.compare(outputs(model, name), expected)

        report(timed(name, target, "transformers", loaded))
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            state, sentence = _converted(target, name, at, expected)
        elapsed_s = time.process_time() - start
        text = " ".join(sentence.replace(str(at), "").split())[:200]
        report(Outcome(name, target, "ckpttool", state, elapsed_s, text))


def _converted(target: str, name: str, at: Path, expected: np.ndarray) -> tuple[str, str]:
    """Convert with `--like`, following hints; return the state and why."""
    from ckpttool import fill
    from ckpttool.core import CkpttoolError

    origin: str | None = None
    kinds: list[str] = []
    hint, followed = "", ""
    for _ in range(_MOST_HINTS):
        file = at / ("like.pt" if target == "torch" else "like.weights.h5")
        source = at / _FILES["keras" if target == "torch" else "torch"]
        try:
            like = _like(target, name)
            done = fill(str(source), str(file), like, to=target, kinds=kinds, from_=origin, force=True)
            if not done.report.complete:
                return "refused", "; ".join(done.report.notes)
            model = _loaded(target, name, file)
            harness.compare((_torch_outputs if target == "torch" else _keras_outputs)(model, name), expected)
        except harness.WrongError as error:
            return ("WRONG ASSUMED" if done.report.assumed else "WRONG"), str(error)
        except CkpttoolError as error:
            hint = f"{error} [{error.hint or ''}]"
            kind = re.search(r"--kind '([^']+)'", hint)
            if "--from torch" in hint and origin is None:
                origin = "torch" if target == "keras" else "tf"
                followed += f" --from {origin}"
            elif kind and kind[1] not in kinds:
                kinds.append(kind[1])
                followed += f" --kind {kind[1]}"
            else:
                return "refused", hint
        except Exception as error:  # noqa: BLE001  # a crash is a result
            return "crash", f"{type(error).__name__}: {error}"
        else:
            return ("assumed" if done.report.assumed else "right"), followed.strip()
    return "refused", f"hints without an end: {hint}"


def _like(target: str, name: str) -> Any:
    from ckpttool.conversion import filling
    from ckpttool.networks import ModelSpec
    from tests.shared_runners import InThisProcess

    filling.ModelProcess = InThisProcess  # type: ignore[assignment,misc]
    return ModelSpec(f"tests.model_pairs.hugging_face:{target}_model", {"name": name}, ())


def _loaded(target: str, name: str, file: Path) -> Any:
    if target == "torch":
        import torch

        model = torch_model(name)
        model.load_state_dict(torch.load(file, weights_only=True), strict=True)
        return model
    model = keras_model(name)
    model.load_weights(str(file))
    return model


def run(folder: Path, child: Callable[..., list[Outcome]]) -> Iterator[Outcome]:
    """Make the models and convert them in both directions; `child` runs a call in a framework's process."""
    for name in CONFIGURATIONS:
        (folder / name).mkdir(exist_ok=True)
    for framework in ("keras", "torch"):
        child(framework, f"make_{framework}({str(folder)!r})", folder, module="hugging_face")
    for target in ("torch", "keras"):
        yield from child(target, f"judge({target!r}, {str(folder)!r})", folder, module="hugging_face")
