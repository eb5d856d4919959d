"""Train any model with its own framework and its checkpoint's optimizer, always from the same state.

The syntax is Python 3.7's: interpreters of other environments run this code. Settings and state have one name
in all frameworks (core/optimizers.py): learning_rate, beta_1, rho, ...
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import sys
import zipfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core import optimizers
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UnsupportedError, UsageError, WorkerError, suggest_choice
from ckpttool.core.optimizers import ADAM, BUFFER, HOW, KERAS_LISTS, SCHEDULED, VELOCITY
from ckpttool.networks import model_child
from ckpttool.networks.messages import Message
from ckpttool.networks.model_child import find_named_object, last_error_line
from ckpttool.networks.tracing import paired

if TYPE_CHECKING:  # typing.TypedDict is younger than Python 3.7
    from typing import TypedDict

    PreparedOptimizer = TypedDict(  # noqa: UP013
        "PreparedOptimizer",
        {
            "found": bool,
            "optimizer": Message | None,
            "tensors": list[str],
            "notes": list[str],
            "assumed": list[str],
        },
    )

STEP = "step"
# State of one parameter that is a number, in PyTorch.
_NUMBERS = (STEP, "mu_product")
_DECAY, _DECOUPLED = "weight_decay", "decoupled_weight_decay"
# Settings that change no update of weights that have been trained.
_UNREAD = (*HOW, _DECOUPLED, "initial_accumulator_value")


@dataclass
class TrainingJob:
    """What one training run uses: inputs, targets, loss, and settings that replace the checkpoint's.

    `corrected` is where Adam's epsilon is added (see core.optimizers.epsilon_factor), None where the
    framework adds it.
    """

    names: list[str]
    inputs: list[Any]
    outputs: list[str]
    targets: list[Any]
    loss: Callable[..., Any] | None
    steps: list[int]
    changes: Message
    corrected: bool | None
    exact: bool

    def __post_init__(self) -> None:
        self.dtype = "float64" if self.exact else "float32"
        self.targets = [target.astype(self.dtype) for target in self.targets]


def find_loss(name: str | None) -> Callable[..., Any] | None:
    """Return the user's loss, called with outputs and targets; None for the quadratic one."""
    if name is None:
        return None
    loss = find_named_object(name, "--loss")
    if not callable(loss):
        raise UsageError("--loss requires a function", found=name)
    try:
        positional = [
            parameter
            for parameter in inspect.signature(loss).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        ]
    except (TypeError, ValueError):
        return loss  # type: ignore[no-any-return]
    return loss if len(positional) != 1 else lambda outputs, _: loss(outputs)


def _array(value: Any) -> Any:
    return np.array(_stored_array(value), dtype=np.float64)


def _stored_array(value: Any) -> Any:
    if hasattr(value, "detach"):
        return value.detach().cpu().double().numpy().copy()
    return np.array(value.numpy() if hasattr(value, "numpy") else value)


class ModelTrainer:
    """A model and an optimizer with the checkpoint's state; one subclass per framework."""

    corrected = True

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.stored = False
        self.notes: list[str] = []
        self.assumed: list[str] = []

    def trained(self, *, exact: bool) -> list[tuple[str, Any]]:
        """Return the trained tensors by name."""
        raise NotImplementedError

    def tensors(self, *, exact: bool) -> list[Any]:
        """Return the trained tensors."""
        return [tensor for _, tensor in self.trained(exact=exact)]

    def train(self, job: TrainingJob) -> tuple[list[float], list[Any], list[tuple[int, list[Any]]]]:
        """Return the losses, the first gradients, and the change of each tensor after the wanted steps.

        The weights are restored at the end.
        """
        tensors = self.tensors(exact=job.exact)
        kept, start = [self._copied(tensor) for tensor in tensors], [_array(tensor) for tensor in tensors]
        losses: list[float] = []
        first: list[Any] = []
        changes = []
        try:
            step = self._stepper(job, tensors)
            for number in range(1, max(job.steps) + 1):
                loss, gradients = step(number)
                losses.append(float(_array(loss)))
                if number == 1:
                    first = [
                        np.zeros_like(value) if gradient is None else _array(gradient)
                        for value, gradient in paired(start, gradients)
                    ]
                if number in job.steps:
                    changes.append((number, [_array(now) - before for now, before in paired(tensors, start)]))
        finally:
            self._put_back(tensors, kept)
        return losses, first, changes

    def _stepper(self, job: TrainingJob, tensors: list[Any]) -> Callable[[int], tuple[Any, list[Any]]]:
        """Return the function that makes one update, by its number.

        It returns the loss and its gradients before the update, None for a tensor that it does not depend on.
        """
        raise NotImplementedError

    def _epsilon_factor(self, job: TrainingJob, beta_2: float, step: int) -> float:
        if job.corrected in (None, self.corrected):
            return 1.0
        return optimizers.epsilon_factor(beta_2, step, corrected=self.corrected)

    def _copied(self, tensor: Any) -> Any:
        return _stored_array(tensor)

    def _put_back(self, tensors: list[Any], kept: list[Any]) -> None:
        raise NotImplementedError

    def _losses(self, job: TrainingJob, constant: Callable[[Any], Any], mean: Any) -> Callable[[], Any]:
        """Return the function that computes the loss of the model's present weights."""
        model = self.runner.exact if job.exact else self.runner.model
        inputs = [self.runner.tensor(input_, exact=job.exact) for input_ in job.inputs]
        call = self.runner.styles(job.names, inputs)[self.runner.style]
        targets = [constant(target) for target in job.targets]

        def loss() -> Any:
            outputs = call(model)
            if job.loss is not None:
                return job.loss(outputs, targets[0] if len(targets) == 1 else targets)
            named = dict(self.runner.named(outputs))
            terms = [mean(0.5 * (named[name] - targets[n]) ** 2) for n, name in enumerate(job.outputs)]
            return sum(terms[1:], terms[0])

        return loss


def _number(value: Any) -> Any:
    """Return a setting without tensors: PyTorch accepts some as tensors of one number."""
    if isinstance(value, (list, tuple)):
        return type(value)(_number(item) for item in value)
    return value.item() if hasattr(value, "detach") and value.ndim == 0 else value


def _settings(row: optimizers.OptimizerFamily, group: Message) -> Message:
    """Return the settings of a group of parameters that change updates."""
    settings = {}
    for stored, name in row.torch_settings.items():
        top, _, position = stored.partition("/")
        if top in group and name not in _UNREAD:
            settings[name] = group[top][int(position)] if position else group[top]
    return settings


def change_torch_optimizer(row: optimizers.OptimizerFamily, optimizer: Any, changes: Message) -> None:
    """Give the settings of all groups new values, as far as the class has them; STEP is the update count."""
    names = {name: stored for stored, name in row.torch_settings.items()}
    for group in optimizer.param_groups:
        for name, value in changes.items():
            top, _, position = names.get(name, name).partition("/")
            if position:
                items = list(group[top])
                items[int(position)] = value
                group[top] = tuple(items)
            elif top in group:
                group[top] = value
    for state in optimizer.state.values():
        if STEP in changes and STEP in state:
            state[STEP] = sys.modules["torch"].tensor(float(changes[STEP]))


def find_torch_optimizers(value: Any, name: str = "", depth: int = 3) -> list[tuple[str, Any]]:
    """Return the state_dicts of optimizers in a loaded file, with their names."""
    if not hasattr(value, "items") or not depth:
        return []
    if {"state", "param_groups"} <= set(value):
        return [(name, value)]
    states: list[tuple[str, Any]] = []
    for key, child in value.items():
        states += find_torch_optimizers(child, name + "." + str(key) if name else str(key), depth - 1)
    return states


def choose_optimizer(file: str, names: list[str], name: str | None) -> str | None:
    """Return the name of the wanted optimizer, or of the only one; None if there is none.

    Raise UsageError if the file does not contain the wanted one, or contains several.
    """
    if name is not None and name not in names:
        raise UsageError(
            f"the file has no optimizer {name!r}",
            file=file,
            found=", ".join(names) or "none",
            hint=suggest_choice(name, names) if names else "leave --optimizer-a and --optimizer-b out",
        )
    if name is None and len(names) > 1:
        raise UsageError(
            f"the file has {len(names)} optimizers, and a training step of a model uses one",
            file=file,
            found=", ".join(names),
            hint=f"choose one with --optimizer-a or --optimizer-b, e.g. {names[0]}",
        )
    return name if name is not None else next(iter(names), None)


class TorchTrainer(ModelTrainer):
    """A torch.nn.Module or TorchScript program."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._torch: Any = sys.modules["torch"]
        self._row, self._class = ADAM, ""
        self._groups: list[list[int]] = []
        self._state: Message | None = None
        self._settings: Message = {}

    def restore(self, file: str, spec: Message | None, optimizer: str | None = None) -> bool:
        """Find the only optimizer in the file, or the wanted one, and load it by `load_state_dict`."""
        del spec
        if file.endswith((".safetensors", ".npz")) or self.runner.model is None:
            return False
        try:
            contents = self._torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - a TorchScript file contains no optimizer
            return False
        states = dict(find_torch_optimizers(contents))
        name = choose_optimizer(file, list(states), optimizer)
        if name is None:
            return False
        self._state, self.stored = states[name], True
        self._judge(file, name, states[name])
        self._groups = self._match_groups(states[name], file)
        return True

    def _judge(self, file: str, name: str, state: Message) -> None:
        """Find the class of a state_dict; raise UnsupportedError if torch.optim has none."""
        groups = state["param_groups"]
        keys = frozenset(str(key) for group in groups for key in group) - {
            "params",
            "param_names",
            *SCHEDULED,
        }
        kinds = frozenset(str(key) for slots in state["state"].values() for key in slots)
        row = optimizers.find_torch_class(keys, kinds)
        if row is None:
            raise UnsupportedError(
                "no class of torch.optim has this optimizer's settings and state",
                file=file,
                path=name,
                found=", ".join(sorted(keys | kinds)),
            )
        self._row = row
        self._class = "AdamW" if row is ADAM and groups[0].get(_DECOUPLED) else row.name
        doubt = optimizers.doubt_torch_class(row, keys, kinds)
        self.assumed += [f"the optimizer {doubt}"] if doubt else []
        decays = any(group.get(_DECAY) for group in groups)
        if self._class == "Adam" and decays and _DECOUPLED not in groups[0]:
            self.assumed.append(
                "the optimizer is Adam: its state_dict does not record whether its weight decay is "
                "decoupled, as in AdamW"
            )
        others = ", ".join(sorted(keys - {setting.partition("/")[0] for setting in row.torch}))
        if others:
            self.assumed.append(
                f"the optimizer is {self._class}: it does not read the settings {others} of its groups"
            )

    def _match_groups(self, state: Message, file: str) -> list[list[int]]:
        """Return the numbers of the parameters of each group; raise UsageError if they are unknown."""
        named = [name for name, _ in self.trained(exact=False)]
        groups = state["param_groups"]
        if all(group.get("param_names") for group in groups):
            numbers = {name: number for number, name in enumerate(named)}
            lost = [name for group in groups for name in group["param_names"] if name not in numbers]
            if lost:
                raise UsageError(
                    "the optimizer trains a parameter that the model does not have", file=file, path=lost[0]
                )
            return [[numbers[name] for name in group["param_names"]] for group in groups]
        sizes = [len(group["params"]) for group in groups]
        if sum(sizes) != len(named):
            raise UsageError(
                "the optimizer does not train the parameters of the model",
                file=file,
                expected=f"{len(named)} parameters",
                found=str(sum(sizes)),
            )
        # The order of the model, and the usual two groups: matrices with weight decay, then vectors without.
        ranks = [tensor.ndim for tensor in self.tensors(exact=False)]
        by_rank = sorted(range(len(named)), key=lambda number: ranks[number] < 2)
        matrices = sum(rank > 1 for rank in ranks)
        ways = [("in their order in the model", list(range(len(named))))]
        if sizes == [matrices, len(named) - matrices]:
            ways.append(("with several axes, then the others", by_rank))
        for words, order in ways:
            left = iter(order)
            matched = [[next(left) for _ in range(size)] for size in sizes]
            if self._fits(state, matched):
                if len(sizes) > 1:
                    self.assumed.append(f"the optimizer's {len(sizes)} groups contain the parameters {words}")
                return matched
        raise UsageError(
            "the optimizer's state has other shapes than the model's parameters",
            file=file,
            hint="create the optimizer with named parameters (model.named_parameters()) before saving",
        )

    def _fits(self, state: Message, groups: list[list[int]]) -> bool:
        shapes = [tuple(tensor.shape) for tensor in self.tensors(exact=False)]
        return all(
            not getattr(value, "ndim", 0) or tuple(value.shape) == shapes[number]
            for group, stored in paired(groups, state["param_groups"])
            for number, key in paired(group, stored["params"])
            for value in (state["state"].get(key) or {}).values()
        )

    def create(self, cls: str, settings: Message) -> None:
        """Create an optimizer of torch.optim without state."""
        row = optimizers.find_torch_row(cls)
        if row is None:
            raise UnsupportedError(f"PyTorch has no optimizer like {cls}")
        self._row, self._class = row, cls
        self._state, self._settings = None, settings
        self._groups = [list(range(len(self.trained(exact=False))))]

    def _make(self, parameters: list[Any]) -> Any:
        cls = getattr(self._torch.optim, self._class)
        groups = [{"params": [parameters[number] for number in group]} for group in self._groups]
        optimizer = cls(groups, lr=0.01)
        if self._state is None:
            change_torch_optimizer(self._row, optimizer, self._settings)
            return optimizer
        try:
            # load_state_dict keeps the tensors, which the optimizer then changes.
            optimizer.load_state_dict(copy.deepcopy(self._state))
        except Exception as error:
            raise UsageError(f"load_state_dict of {self._class} raises {last_error_line(error)}") from error
        for group in optimizer.param_groups:
            group.update({name: _number(value) for name, value in group.items() if name != "params"})
            if "capturable" in group:
                group["capturable"] = False  # the same updates, which only accelerators can capture
        return optimizer

    def describe(self) -> Message:
        """Return class, settings (those of the first group), and the settings and numbers of each tensor."""
        trained = self.trained(exact=False)
        optimizer = self._make([parameter for _, parameter in trained])
        settings = [_settings(self._row, group) for group in optimizer.param_groups]
        return {
            "title": self._class,
            "family": self._row.name,
            "settings": settings[0],
            "own": {
                trained[number][0]: own
                for numbers, own in paired(self._groups, settings)
                for number in numbers
            },
            "counts": {
                name: {
                    kind: float(optimizer.state[parameter][kind])
                    for kind in _NUMBERS
                    if kind in optimizer.state[parameter]
                }
                for name, parameter in trained
                if parameter in optimizer.state
            },
            "decoupled": self._class == "AdamW" or bool(optimizer.param_groups[0].get(_DECOUPLED)),
            "stored": self.stored,
            "corrected": self.corrected,
        }

    def trained(self, *, exact: bool) -> list[tuple[str, Any]]:
        """Return the parameters that require a gradient."""
        model = self.runner.exact if exact else self.runner.model
        return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]

    def slots(self) -> dict[str, list[Any]]:
        """Return the optimizer's state by canonical name."""
        parameters = self.tensors(exact=False)
        state = self._make(parameters).state
        rows = {
            slot: [state.get(parameter, {}).get(name) for parameter in parameters]
            for name, slot in self._row.torch_slots.items()
        }
        return {
            slot: [_array(tensor) if hasattr(tensor, "detach") else None for tensor in row]
            for slot, row in rows.items()
            if any(hasattr(tensor, "detach") for tensor in row)
        }

    def _stepper(self, job: TrainingJob, tensors: list[Any]) -> Callable[[int], tuple[Any, list[Any]]]:
        optimizer = self._make(tensors)
        change_torch_optimizer(self._row, optimizer, job.changes)
        epsilons = [group.get("eps") for group in optimizer.param_groups]
        loss_of = self._losses(
            job, lambda parameter: self._torch.from_numpy(np.ascontiguousarray(parameter)), self._torch.mean
        )

        done = max((int(slots[STEP]) for slots in optimizer.state.values() if STEP in slots), default=0)

        def step(number: int) -> tuple[Any, list[Any]]:
            for group, epsilon in paired(optimizer.param_groups, epsilons):
                if epsilon is not None:
                    beta_2 = group.get("betas", (0.0, 0.0))[1]
                    group["eps"] = epsilon * self._epsilon_factor(job, beta_2, done + number)
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()  # which leaves the gradients as they are
            return loss, [tensor.grad for tensor in tensors]

        return step

    def _copied(self, tensor: Any) -> Any:
        return tensor.detach().clone()

    def _put_back(self, tensors: list[Any], kept: list[Any]) -> None:
        with self._torch.no_grad():
            for parameter, value in paired(tensors, kept):
                parameter.grad = None
                parameter.copy_(value)


# Settings that change gradients or weights beside the update rule; None if they are off.
_KERAS_EXTRAS = (
    *("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
    *("loss_scale_factor", "gradient_accumulation_steps"),
)
_FLOATS = ("beta_1", "beta_2", "epsilon", "rho", "momentum", "weight_decay")


def build_keras_optimizer(keras: Any, make: Callable[[], Any], variables: list[Any], dtype: str) -> Any:
    """Return a new optimizer of the variables whose settings are not rounded to float32 in a float64 run."""
    before = keras.backend.floatx()
    keras.backend.set_floatx(dtype)  # the type of the variable of the learning rate
    try:
        optimizer = make()
        optimizer.build(variables)
    finally:
        keras.backend.set_floatx(before)
    for name in _FLOATS:
        # Keras converts a Python number to float32 before casting (keras/src/backend/tensorflow/core.py).
        value = getattr(optimizer, name, None)
        if dtype == "float64" and isinstance(value, (int, float)) and not isinstance(value, bool):
            # Adadelta's rho multiplies a variable of Keras, which NumPy would convert.
            exact = keras.ops.convert_to_tensor if name == "rho" and hasattr(keras, "ops") else np.asarray
            setattr(optimizer, name, exact(value, "float64")[()])
    return optimizer


class KerasTrainer(ModelTrainer):
    """A Keras model or a tf.Module, trained by an optimizer of Keras."""

    corrected = False

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._tf: Any = sys.modules.get("tensorflow")
        self._keras = model_child.keras_library(runner.model, runner.framework)
        backend = getattr(getattr(self._keras, "backend", None), "backend", None)
        if self._tf is None or (callable(backend) and backend() != "tensorflow"):
            raise UnsupportedError("training steps of a Keras model require Keras's TensorFlow backend")
        self._optimizer: Any = None

    def trained(self, *, exact: bool) -> list[tuple[str, Any]]:
        """Return the trainable variables by the paths of their layers."""
        model = self.runner.exact if exact else self.runner.model
        variables = model_child.model_variables(model)
        known = {*map(id, variables)}
        names: dict[int, str] = {}
        for path, module in model_child.iter_modules(model):
            for name, variable in model_child.own_tensors(module, known):
                names.setdefault(id(variable), "/".join([*path, name]))
        if self.runner.framework == "keras":
            trained = list(model.trainable_variables)
        else:
            trained = [variable for variable in variables if getattr(variable, "trainable", True)]
        return [(names.get(id(value), str(getattr(value, "path", value.name))), value) for value in trained]

    def restore(self, file: str, spec: Message | None, name: str | None = None) -> bool:
        """Create the optimizer of the file's own configuration, or the one of `spec`, and load its state.

        The caller has audited the configuration (see `read_optimizer_config`): this creates what it names.
        """
        config = compiled_optimizer(file) if spec is None and os.path.isfile(file) else None
        if config is not None:
            spec = {"name": "optimizer", "class": config.get("class_name")}
            choose_optimizer(file, ["optimizer"], name)
        if spec is None:
            return False
        cls = getattr(self._keras.optimizers, str(spec["class"]), None)
        if cls is None:
            raise UnsupportedError(
                "the model's optimizer is not a class of Keras", file=file, found=str(spec["class"])
            )
        optimizer = cls(**spec["arguments"]) if config is None else cls.from_config(config["config"])
        optimizer.build(self.tensors(exact=False))
        try:
            self._load(file, spec["name"], optimizer)
        except Exception as error:
            raise UsageError(
                f"{spec['class']} cannot load its state from the file: {last_error_line(error)}", file=file
            ) from error
        self._optimizer, self.stored = optimizer, True
        return True

    def _load(self, file: str, name: str, optimizer: Any) -> None:
        if not os.path.isfile(file):
            model_child.restore_tensorflow(self.runner.model, file, None, **{name: optimizer})
            return
        values = legacy_optimizer_values(file)
        if values is None:
            self.runner.model.compile(optimizer=optimizer)
            self.runner.model.load_weights(file)
        else:
            _assign_state(optimizer, values)

    def create(self, cls: str, settings: Message) -> None:
        """Create an optimizer of Keras without state."""
        self._optimizer = getattr(self._keras.optimizers, cls)(**settings)
        self._optimizer.build(self.tensors(exact=False))

    def describe(self) -> Message:
        """Return class, settings, and the settings and number of updates of each tensor."""
        optimizer = self._optimizer
        names = {name for row in optimizers.FAMILIES for name in row.settings if name not in _UNREAD}
        settings = {name: getattr(optimizer, name) for name in sorted(names) if hasattr(optimizer, name)}
        settings = {
            name: value if isinstance(value, (bool, str, type(None))) else float(_array(value))
            for name, value in settings.items()
        }
        averaged = bool(getattr(optimizer, "use_ema", False))
        for name in _KERAS_EXTRAS:
            value = getattr(optimizer, name, None)
            settings[name] = value if value and (averaged or not name.startswith("ema_")) else None
        if not hasattr(getattr(optimizer, "_learning_rate", None), "assign"):
            self.notes.append("the learning rate follows the schedule that the file contains")
        settings[_DECAY] = float(_array(getattr(optimizer, _DECAY, None) or 0.0))
        uses = getattr(optimizer, "_use_weight_decay", lambda _: True)
        named = self.trained(exact=False)
        row, cls = self._row, type(optimizer).__name__
        return {
            "title": cls,
            "family": cls if row is None else row.name,
            "settings": settings,
            "own": {name: settings if uses(value) else {**settings, _DECAY: 0.0} for name, value in named},
            "counts": {name: {STEP: float(_array(optimizer.iterations))} for name, _ in named},
            "decoupled": True,
            "stored": self.stored,
            "corrected": self.corrected,
        }

    @property
    def _row(self) -> optimizers.OptimizerFamily | None:
        return optimizers.find_class(type(self._optimizer).__name__.lower())

    def slots(self) -> dict[str, list[Any]]:
        """Return the optimizer's state by canonical name."""
        row = self._row
        kinds = KERAS_LISTS if row is None else row.keras_lists
        lists = {kind: getattr(self._optimizer, name, None) for name, kind in kinds.items()}
        slots = {
            kind: [_array(array) for array in arrays]
            for kind, arrays in lists.items()
            if isinstance(arrays, (list, tuple)) and arrays
        }
        rate = float(_array(self._optimizer.learning_rate))
        if row is not None and rate and VELOCITY in slots:
            # Keras's momentum includes the learning rate, that of PyTorch does not.
            slots[BUFFER] = [array / (row.folded * rate) for array in slots.pop(VELOCITY)]
        return slots

    def _copy(self, job: TrainingJob, variables: list[Any]) -> Any:
        """Return the optimizer for the job's float type with its changes."""
        changes = dict(job.changes)
        config = self._optimizer.get_config()
        if "learning_rate" in changes:  # a schedule cannot be set
            config["learning_rate"] = float(changes["learning_rate"])
        cls = type(self._optimizer)
        optimizer_ = build_keras_optimizer(self._keras, lambda: cls.from_config(config), variables, job.dtype)
        _assign_state(optimizer_, [_stored_array(value) for value in _optimizer_variables(self._optimizer)])
        if STEP in changes:
            optimizer_.iterations.assign(changes.pop(STEP))
        if "learning_rate" in changes:
            optimizer_.learning_rate.assign(np.array(changes.pop("learning_rate"), job.dtype))
        for name, value in changes.items():
            setattr(optimizer_, name, np.float64(value) if isinstance(value, float) else value)
        return optimizer_

    def _stepper(self, job: TrainingJob, tensors: list[Any]) -> Callable[[int], tuple[Any, list[Any]]]:
        optimizer = self._copy(job, tensors)
        loss_of = self._losses(job, self._tf.constant, self._tf.reduce_mean)
        base = float(getattr(optimizer, "epsilon", None) or 0.0)
        epsilon = self._tf.Variable(base, dtype=tensors[0].dtype, trainable=False)
        replaced = job.corrected not in (None, self.corrected)
        if replaced:
            optimizer.epsilon = epsilon

        def update() -> Any:
            with self._tf.GradientTape() as tape:
                loss = loss_of()
            gradients = [
                None if gradient is None else self._tf.convert_to_tensor(gradient)
                for gradient in tape.gradient(loss, [_raw(tensor) for tensor in tensors])
            ]
            optimizer.apply_gradients([(g, v) for g, v in paired(gradients, tensors) if g is not None])
            return loss, gradients

        run = update
        if max(job.steps, default=1) >= 10:  # tracing takes longer than some eager steps
            graph = self._tf.function(update)
            with contextlib.suppress(Exception):  # a model with Python control flow runs eagerly
                graph.get_concrete_function()
                run = graph

        done = int(_array(optimizer.iterations))

        def step(number: int) -> tuple[Any, list[Any]]:
            if replaced:
                beta_2 = float(optimizer.beta_2)
                epsilon.assign(base * self._epsilon_factor(job, beta_2, done + number))
            return run()  # type: ignore[no-any-return]

        return step

    def _put_back(self, tensors: list[Any], kept: list[Any]) -> None:
        for variable, value in paired(tensors, kept):
            variable.assign(value)


def compiled_optimizer(file: str) -> Message | None:
    """Return the configuration of the optimizer that a whole model was compiled with, or None."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            config = json.loads(archive.read("config.json").decode())
        optimizer = (config.get("compile_config") or {}).get("optimizer")
    else:
        with _open_hdf5(file) as config:
            text = config.attrs.get("training_config")
        text = text.decode() if isinstance(text, bytes) else text
        optimizer = None if text is None else json.loads(text).get("optimizer_config")
    return optimizer if isinstance(optimizer, dict) and isinstance(optimizer.get("config"), dict) else None


def legacy_optimizer_values(file: str) -> list[Any] | None:
    """Return the optimizer's arrays in an HDF5 file of a whole model, None for other files."""
    if zipfile.is_zipfile(file):
        return None
    with _open_hdf5(file) as weights:
        group = weights.get("optimizer_weights")
        if group is None:
            return None
        names = [name.decode() if isinstance(name, bytes) else name for name in group.attrs["weight_names"]]
        return [np.array(group[name]) for name in names]


def _open_hdf5(file: str) -> Any:
    import h5py  # type: ignore[import-untyped]

    return h5py.File(file, "r")


def _optimizer_variables(optimizer: Any) -> list[Any]:
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _assign_state(optimizer: Any, values: list[Any]) -> None:
    """Set the optimizer's variables; raise ValueError if it has others.

    Keras before 3 does not store the learning rate beside the moments, nor is it a variable of a schedule.
    """
    variables = _optimizer_variables(optimizer)
    if len(variables) == len(values) + 1:
        variables = [variable for variable in variables if not str(variable.name).endswith("learning_rate")]
    if len(variables) != len(values):
        raise ValueError(f"the file has {len(values)} variables of the optimizer, not {len(variables)}")
    for variable, value in paired(variables, values):
        variable.assign(value)


def _raw(variable: Any) -> Any:
    """Return TensorFlow's variable inside one of Keras 3."""
    return variable.value if hasattr(variable, "_value") else variable


def _trainer(session: Any) -> TorchTrainer | KerasTrainer:
    if session.trainer is None:
        framework = session.runner.framework
        if framework == "torch":
            session.trainer = TorchTrainer(session.runner)
        elif framework in ("keras", "tensorflow") and not hasattr(session.runner, "_loaded"):
            session.trainer = KerasTrainer(session.runner)
        else:
            what = "a SavedModel's signature" if framework == "tensorflow" else f"{framework} models"
            raise UnsupportedError(
                f"{what} cannot be trained",
                hint="build the model by code (--like-a, --like-b) and load its weights",
            )
    trainer: TorchTrainer | KerasTrainer = session.trainer
    return trainer


def read_optimizer_config(session: Any, file: str) -> Message:
    """Return the configuration of a Keras model's optimizer in a file, which the caller judges."""
    known = isinstance(_trainer(session), KerasTrainer) and os.path.isfile(file)
    return {"config": compiled_optimizer(file) if known else None}


def prepare_optimizer(
    session: Any,
    file: str = "",
    spec: Message | None = None,
    chosen: str | None = None,
    create: Message | None = None,
) -> PreparedOptimizer:
    """Restore the file's optimizer, or create another one; describe it and the trained tensors.

    Args:
        session: the process's model.
        file: the checkpoint.
        spec: class and configuration of a Keras optimizer that its file does not describe itself.
        chosen: the optimizer's name in a file with several.
        create: class and settings of a new one instead.
    """
    trainer = _trainer(session)
    if create is not None:
        trainer.create(create["class"], create["settings"])
        restored = True
    else:
        restored = trainer.restore(file, spec, chosen)
    tensors = trainer.trained(exact=False)
    for index, (_, tensor) in enumerate(tensors):
        np.save(session.folder / f"trained-{index}.npy", _array(tensor), allow_pickle=False)
    return {
        "found": restored,
        "optimizer": trainer.describe() if restored else None,
        "tensors": [name for name, _ in tensors],
        "notes": trainer.notes,
        "assumed": trainer.assumed,
    }


def read_slots(session: Any) -> dict[str, dict[str, list[int]]]:
    """Write the optimizer's state; return the tensors that have it, by kind."""
    numbers: dict[str, list[int]] = {}
    for kind, arrays in _trainer(session).slots().items():
        numbers[kind] = [index for index, array in enumerate(arrays) if array is not None]
        for number in numbers[kind]:
            np.save(session.folder / f"slot-{kind}-{number}.npy", arrays[number], allow_pickle=False)
    return {"slots": numbers}


def train_model(
    session: Any,
    names: list[str],
    outputs: list[str],
    loss: str | None,
    steps: list[int],
    changes: Message,
    corrected: bool | None,
    *,
    exact: bool,
) -> dict[str, bool]:
    """Train from the state of the checkpoint; write first gradients, and changes after wanted steps.

    Args:
        session: the process's model and optimizer.
        names: the model's inputs, which the parent wrote.
        outputs: the outputs in the loss, whose targets the parent wrote.
        loss: the user's loss, None for the quadratic one.
        steps: the numbers of updates after which changes are written.
        changes: settings that replace the checkpoint's.
        corrected: where Adam's epsilon is added, None where the framework adds it.
        exact: compute in float64.
    """
    trainer = _trainer(session)
    targets = [
        np.load(session.folder / f"target-{index}.npy", allow_pickle=False) for index in range(len(outputs))
    ]
    inputs = session.inputs(len(names))
    job = TrainingJob(names, inputs, outputs, targets, find_loss(loss), steps, changes, corrected, exact)
    try:
        losses, first, updates = trainer.train(job)
    except (UsageError, UnsupportedError):
        raise
    except Exception as error:
        raise WorkerError(f"a training step raises {last_error_line(error)}") from error
    for stem, arrays in [("gradient", first), *((f"update-{number}", arrays) for number, arrays in updates)]:
        for index, array in enumerate(arrays):
            np.save(session.folder / f"{stem}-{index}.npy", array, allow_pickle=False)
    return {"finite": bool(np.isfinite(losses).all())}
