"""Train any model with its own framework and its checkpoint's optimizer, always from the same state."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ckpttool.core.errors import UnsupportedError, UsageError, WorkerError, suggest_choice
from ckpttool.networks import model_child
from ckpttool.networks.messages import Message
from ckpttool.networks.model_child import find_named_object, last_error_line
from ckpttool.networks.tracing import paired

# The syntax of this file is Python 3.7's, because environments with old frameworks have old interpreters.
#
# Settings have one name in all frameworks (libraries/optimizers_read.py): learning_rate, beta_1, rho, ...

CORRECTED, UNCORRECTED = "corrected", "uncorrected"
STEP = "step"


class TrainingJob:
    """What one training run uses: inputs, targets, loss, and settings that replace the checkpoint's."""

    def __init__(self, message: Message, inputs: list[Any], targets: list[Any]) -> None:
        self.names: list[str] = message["names"]
        self.exact: bool = message["exact"]
        self.outputs: list[str] = message["outputs"]
        self.changes: dict[str, Any] = dict(message.get("changes") or {})
        self.epsilon: str | None = message.get("epsilon")
        self.steps: list[int] = message.get("steps") or []
        self.loss: Callable[..., Any] | None = find_loss(message.get("loss"))
        dtype = "float64" if self.exact else "float32"
        self.inputs, self.targets = inputs, [each.astype(dtype) for each in targets]


def find_loss(name: str | None) -> Callable[..., Any] | None:
    """Return the user's loss, called with outputs and targets; None for the quadratic one."""
    if name is None:
        return None
    found = find_named_object(name, "--loss")
    if not callable(found):
        raise UsageError("--loss requires a function", found=name)
    try:
        taken = [
            each
            for each in inspect.signature(found).parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
        ]
    except (TypeError, ValueError):
        return found  # type: ignore[no-any-return]
    return found if len(taken) != 1 else lambda outputs, _: found(outputs)


def _array(value: Any) -> Any:
    if hasattr(value, "detach"):
        return np.array(value.detach().cpu().double().numpy())
    return np.array(value.numpy() if hasattr(value, "numpy") else value).astype(np.float64)


class ModelTrainer:
    """A model and an optimizer with the checkpoint's state; one subclass per framework."""

    placement = CORRECTED

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.stored = False
        self.notes: list[str] = []
        self.assumed: list[str] = []

    def restore(self, file: str, spec: Message | None, wanted: str | None = None) -> bool:
        """Create the optimizer that the file contains and load its state; return False if there is none.

        `wanted` names one of several.
        """
        raise NotImplementedError

    def create(self, cls: str, settings: Message) -> None:
        """Create an optimizer without state."""
        raise NotImplementedError

    def describe(self) -> Message:
        """Return the optimizer's class, number of updates, and settings: its own and those of each tensor."""
        raise NotImplementedError

    def trained(self, *, exact: bool) -> list[tuple[str, Any]]:
        """Return the trained tensors by name."""
        raise NotImplementedError

    def slots(self) -> dict[str, list[Any]]:
        """Return the stored arrays of each canonical kind, one per trained tensor or None."""
        raise NotImplementedError

    @contextlib.contextmanager
    def running(self, job: TrainingJob) -> Iterator[Callable[[], tuple[float, list[Any]]]]:
        """Yield the function that makes one update; restore the weights at the end.

        It returns the loss and its gradients before the update, None for a tensor that it does not depend on.
        """
        raise NotImplementedError

    def train(self, job: TrainingJob) -> tuple[list[float], list[Any], list[tuple[int, list[Any]]]]:
        """Return the losses, the first gradients, and the change of each tensor after the wanted steps."""
        losses: list[float] = []
        first: list[Any] = []
        found = []
        with self.running(job) as step:
            start = [_array(each) for _, each in self.trained(exact=job.exact)]
            for number in range(1, max(job.steps) + 1):
                loss, gradients = step()
                losses.append(loss)
                if number == 1:
                    first = [
                        np.zeros_like(value) if each is None else _array(each)
                        for value, each in paired(start, gradients)
                    ]
                if number in job.steps:
                    now = [_array(each) for _, each in self.trained(exact=job.exact)]
                    found.append((number, [now[place] - start[place] for place in range(len(now))]))
        return losses, first, found

    def _call(self, job: TrainingJob, given: list[Any]) -> Any:
        model = self.runner.exact if job.exact else self.runner.model
        return self.runner.styles(job.names, given)[self.runner.style](model)

    def _given(self, job: TrainingJob) -> list[Any]:
        return [self.runner.tensor(each, exact=job.exact) for each in job.inputs]

    def _loss(self, job: TrainingJob, made: Any, targets: list[Any], mean: Callable[[Any], Any]) -> Any:
        if job.loss is not None:
            return job.loss(made, targets[0] if len(targets) == 1 else targets)
        held = dict(self.runner.named(made))
        terms = [mean(0.5 * (held[name] - targets[n]) ** 2) for n, name in enumerate(job.outputs)]
        return sum(terms[1:], terms[0])


def epsilon_factor(placement: str, wanted: str, beta_2: float, step: int) -> float:
    """Return the factor of Adam's epsilon for the root in the other convention at that update, from 1."""
    if placement == wanted:
        return 1.0
    root = float(np.sqrt(1 - beta_2**step))
    return 1 / root if placement == CORRECTED else root


# PyTorch.

_TORCH_SETTINGS = {"lr": "learning_rate", "eps": "epsilon", "alpha": "rho"}
_TORCH_PLAIN = (
    *("weight_decay", "momentum", "dampening", "nesterov", "centered", "amsgrad", "lr_decay", "rho"),
    *("maximize", "momentum_decay"),
)
_TORCH_SLOTS = {
    "exp_avg": "m",
    "exp_avg_sq": "v",
    "max_exp_avg_sq": "vhat",
    "square_avg": "rms",
    "grad_avg": "mg",
    "momentum_buffer": "buffer",
    "sum": "squares",
    "exp_inf": "u",
    "acc_delta": "deltas",
}
# State of one parameter that is a number.
_TORCH_COUNTS = (STEP, "mu_product")
_TORCH_NAMES = {ours: theirs for theirs, ours in _TORCH_SETTINGS.items()}
_BETAS = ("beta_1", "beta_2")
# State of each class of torch.optim that `torch_optimizer_class` names, besides the number of updates.
_TORCH_STATE = {
    "Adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "RMSprop": {"square_avg", "grad_avg", "momentum_buffer"},
    "Adagrad": {"sum"},
    "Adadelta": {"square_avg", "acc_delta"},
    "SGD": {"momentum_buffer"},
}
# Keys of groups that are no settings of a class, e.g. those of torch/optim/lr_scheduler.py.
_GROUP_KEYS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


def torch_optimizer_class(group: Message, stored: set[str] | None = None) -> str | None:
    """Return the class of torch.optim whose settings a group of parameters has, None if unknown.

    `stored` names the state of its parameters, which must be that of the class. Source: the `defaults` of
    each class in torch/optim/*.py.
    """
    found = _class_by_settings(group)
    if found == "Adamax" and stored and "exp_avg_sq" in stored:
        found = "RAdam"  # PyTorch before 2.1 has the same settings for both
    if found is None or (stored or set()) - _TORCH_STATE[found] - {STEP}:
        return None
    return found


def _class_by_settings(group: Message) -> str | None:
    if "momentum_decay" in group:
        return "NAdam"
    if "betas" in group and "eps" not in group:
        return None
    if "betas" in group and "amsgrad" in group:
        return "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    if "betas" in group:
        return "RAdam" if "decoupled_weight_decay" in group else "Adamax"
    rows = [("centered", "RMSprop"), ("lr_decay", "Adagrad"), ("rho", "Adadelta"), ("nesterov", "SGD")]
    return next((name for setting, name in rows if setting in group), None)


def _number(value: Any) -> Any:
    """Return a setting without tensors: PyTorch accepts some as tensors of one number."""
    if isinstance(value, (list, tuple)):
        return type(value)(_number(each) for each in value)
    return value.item() if hasattr(value, "detach") and value.ndim == 0 else value


def _torch_settings(group: Message) -> Message:
    """Return the settings of a group of parameters."""
    settings = {ours: group[theirs] for theirs, ours in _TORCH_SETTINGS.items() if theirs in group}
    settings.update({name: group[name] for name in _TORCH_PLAIN if name in group})
    settings.update(dict(paired(_BETAS, group.get("betas", ()))))
    return settings


def find_torch_optimizers(held: Any, name: str = "", depth: int = 3) -> list[tuple[str, Any]]:
    """Return the state_dicts of optimizers in a loaded file, with their names."""
    if not hasattr(held, "items") or not depth:
        return []
    if {"state", "param_groups"} <= set(held):
        return [(name, held)]
    found: list[tuple[str, Any]] = []
    for key, each in held.items():
        found += find_torch_optimizers(each, name + "." + str(key) if name else str(key), depth - 1)
    return found


def choose_optimizer(file: str, names: list[str], wanted: str | None) -> str | None:
    """Return the name of the wanted optimizer, or of the only one; None if there is none.

    Raise UsageError if the file does not contain the wanted one, or contains several.
    """
    if wanted is not None and wanted not in names:
        raise UsageError(
            f"the file has no optimizer {wanted!r}",
            file=file,
            found=", ".join(names) or "none",
            hint=suggest_choice(wanted, names) if names else "leave --optimizer-a and --optimizer-b out",
        )
    if wanted is None and len(names) > 1:
        raise UsageError(
            f"the file has {len(names)} optimizers, and a training step of a model uses one",
            file=file,
            found=", ".join(names),
            hint=f"choose one with --optimizer-a or --optimizer-b, e.g. {names[0]}",
        )
    return wanted if wanted is not None else next(iter(names), None)


class TorchTrainer(ModelTrainer):
    """A torch.nn.Module or TorchScript program."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._torch: Any = sys.modules["torch"]
        self._class = ""
        self._groups: list[list[int]] = []
        self._state: Message | None = None
        self._settings: Message = {}

    def restore(self, file: str, spec: Message | None, wanted: str | None = None) -> bool:
        """Find the only optimizer in the file, or the wanted one, and load it by `load_state_dict`."""
        del spec
        if file.endswith((".safetensors", ".npz")) or self.runner.model is None:
            return False
        try:
            held = self._torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - a TorchScript file contains no optimizer
            return False
        found = find_torch_optimizers(held)
        name = choose_optimizer(file, [each for each, _ in found], wanted)
        if name is None:
            return False
        state = dict(found)[name]
        stored = {str(key) for each in state["state"].values() for key in each}
        cls = torch_optimizer_class(state["param_groups"][0], stored)
        if cls is None:
            raise UnsupportedError(
                "no class of torch.optim has this optimizer's settings and state",
                file=file,
                path=name,
                found=", ".join(sorted({*state["param_groups"][0], *stored} - _GROUP_KEYS)),
            )
        decays = any(group.get("weight_decay") for group in state["param_groups"])
        if cls == "Adam" and decays and "decoupled_weight_decay" not in state["param_groups"][0]:
            self.assumed.append(
                "the optimizer is Adam: its state_dict does not record whether its weight decay is "
                "decoupled, as in AdamW"
            )
        self._class, self._state = cls, state
        self._groups = self._match_groups(state, file)
        known = {*_GROUP_KEYS, *self._make(self._parameters(exact=False)).defaults}
        others = sorted({str(key) for group in state["param_groups"] for key in group} - known)
        if others:
            self.assumed.append(
                f"the optimizer is {cls}: it does not read the settings {', '.join(others)} of its groups"
            )
        self.stored = True
        return True

    def _match_groups(self, state: Message, file: str) -> list[list[int]]:
        """Return the numbers of the parameters of each group; raise UsageError if they are unknown."""
        named = [name for name, _ in self.trained(exact=False)]
        groups = state["param_groups"]
        if all(group.get("param_names") for group in groups):
            prefixed = {name: number for number, name in enumerate(named)}
            try:
                return [[prefixed[name] for name in group["param_names"]] for group in groups]
            except KeyError as error:
                raise UsageError(
                    "the optimizer trains a parameter that the model does not have",
                    file=file,
                    path=str(error),
                ) from None
        sizes = [len(group["params"]) for group in groups]
        if sum(sizes) != len(named):
            raise UsageError(
                "the optimizer does not train the parameters of the model",
                file=file,
                expected=f"{len(named)} parameters",
                found=str(sum(sizes)),
            )
        numbers = iter(range(len(named)))
        plain = [[next(numbers) for _ in range(size)] for size in sizes]
        masked = self._split_by_rank(sizes)
        for groups_found in (plain, masked):
            if groups_found is not None and self._fits(state, groups_found):
                if len(sizes) > 1:
                    self.assumed.append(
                        "the optimizer's {} groups contain the parameters {}".format(
                            len(sizes),
                            "in their order in the model"
                            if groups_found is plain
                            else "with several axes, then the others",
                        )
                    )
                return groups_found
        raise UsageError(
            "the optimizer's state has other shapes than the model's parameters",
            file=file,
            hint="create the optimizer with named parameters (model.named_parameters()) before saving",
        )

    def _split_by_rank(self, sizes: list[int]) -> list[list[int]] | None:
        """Return the usual two groups: matrices with weight decay, then vectors without."""
        ranks = [each.ndim for _, each in self.trained(exact=False)]
        split = [
            [n for n, rank in enumerate(ranks) if rank > 1],
            [n for n, rank in enumerate(ranks) if rank < 2],
        ]
        return split if [len(each) for each in split] == sizes else None

    def _fits(self, state: Message, groups: list[list[int]]) -> bool:
        shapes = [tuple(each.shape) for _, each in self.trained(exact=False)]
        for group, stored in paired(groups, state["param_groups"]):
            for number, key in paired(group, stored["params"]):
                for value in (state["state"].get(key) or {}).values():
                    if getattr(value, "ndim", 0) and tuple(value.shape) != shapes[number]:
                        return False
        return True

    def create(self, cls: str, settings: Message) -> None:
        """Create an optimizer of torch.optim without state."""
        self._class, self._state, self._settings = cls, None, dict(settings)
        self._groups = [list(range(len(self.trained(exact=False))))]

    def _parameters(self, *, exact: bool) -> list[Any]:
        return [each for _, each in self.trained(exact=exact)]

    def _make(self, parameters: list[Any]) -> Any:
        cls = getattr(self._torch.optim, self._class)
        groups = [{"params": [parameters[number] for number in group]} for group in self._groups]
        made = cls(groups, lr=0.01)
        if self._state is None:
            self._change(made, self._settings)
            return made
        try:
            # load_state_dict keeps the tensors, which the optimizer then changes.
            made.load_state_dict(copy.deepcopy(self._state))
        except Exception as error:
            raise UsageError(f"load_state_dict of {self._class} raises {last_error_line(error)}") from error
        for group in made.param_groups:
            group.update({name: _number(value) for name, value in group.items() if name != "params"})
            if "capturable" in group:
                group["capturable"] = False  # the same updates, which only accelerators can capture
        return made

    def _change(self, optimizer: Any, changes: Message) -> None:
        for group in optimizer.param_groups:
            for name, value in changes.items():
                theirs = _TORCH_NAMES.get(name, name)
                if name in _BETAS and "betas" in group:
                    betas = list(group["betas"])
                    betas[_BETAS.index(name)] = value
                    group["betas"] = tuple(betas)
                elif theirs in group:
                    group[theirs] = value
        if STEP in changes:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"] = self._torch.tensor(float(changes[STEP]))

    def describe(self) -> Message:
        """Return class, settings (those of the first group), step and the settings of each tensor."""
        made = self._make(self._parameters(exact=False))
        group = made.param_groups[0]
        trained = self.trained(exact=False)
        own = {
            trained[number][0]: _torch_settings(each)
            for numbers, each in paired(self._groups, made.param_groups)
            for number in numbers
        }
        steps = [int(each["step"]) for each in made.state.values() if "step" in each]
        counts = {
            name: {kind: float(made.state[each][kind]) for kind in _TORCH_COUNTS if kind in made.state[each]}
            for name, each in trained
            if each in made.state
        }
        decoupled = self._class == "AdamW" or bool(group.get("decoupled_weight_decay"))
        return {
            "family": "Adam" if self._class == "AdamW" else self._class,
            "title": self._class,
            "settings": _torch_settings(group),
            "own": own,
            "counts": counts,
            "decoupled": decoupled,
            "step": max(set(steps), key=steps.count) if steps else 0,
            "stored": self.stored,
            "placement": self.placement,
        }

    def trained(self, *, exact: bool) -> list[tuple[str, Any]]:
        """Return the parameters that require a gradient."""
        model = self.runner.exact if exact else self.runner.model
        return [(name, each) for name, each in model.named_parameters() if each.requires_grad]

    def slots(self) -> dict[str, list[Any]]:
        """Return the optimizer's state by canonical name."""
        parameters = self._parameters(exact=False)
        made = self._make(parameters)
        found: dict[str, list[Any]] = {}
        for number, parameter in enumerate(parameters):
            for theirs, value in made.state.get(parameter, {}).items():
                if theirs in _TORCH_SLOTS and hasattr(value, "detach"):
                    kinds = found.setdefault(_TORCH_SLOTS[theirs], [None] * len(parameters))
                    kinds[number] = _array(value)
        return found

    @contextlib.contextmanager
    def running(self, job: TrainingJob) -> Iterator[Callable[[], tuple[float, list[Any]]]]:
        """Train in place by autograd and torch.optim, then put the weights back."""
        parameters = self._parameters(exact=job.exact)
        kept = [each.detach().clone() for each in parameters]
        optimizer = self._make(parameters)
        self._change(optimizer, job.changes)
        given, targets = self._given(job), self._targets(job)
        epsilons = [group.get("eps") for group in optimizer.param_groups]
        count = [self._count(optimizer)]

        def step() -> tuple[float, list[Any]]:
            count[0] += 1
            if job.epsilon is not None:
                for group, epsilon in paired(optimizer.param_groups, epsilons):
                    group["eps"] = epsilon * epsilon_factor(
                        self.placement, job.epsilon, group["betas"][1], count[0]
                    )
            optimizer.zero_grad()
            loss = self._loss(job, self._call(job, given), targets, self._torch.mean)
            loss.backward()
            optimizer.step()  # which leaves the gradients as they are
            return float(loss.detach()), [each.grad for each in parameters]

        try:
            yield step
        finally:
            with self._torch.no_grad():
                for parameter, value in paired(parameters, kept):
                    parameter.grad = None
                    parameter.copy_(value)

    def _targets(self, job: TrainingJob) -> list[Any]:
        return [self._torch.from_numpy(np.ascontiguousarray(each)) for each in job.targets]

    def _count(self, optimizer: Any) -> int:
        return max((int(each["step"]) for each in optimizer.state.values() if "step" in each), default=0)


# Keras on TensorFlow, and modules of TensorFlow.

_KERAS_SETTINGS = ("beta_1", "beta_2", "epsilon", "rho", "momentum", "nesterov", "centered", "amsgrad")
_KERAS_SLOTS = {
    "_momentums": "m",
    "_velocities": "v",
    "_velocity_hats": "vhat",
    "_average_gradients": "mg",
    "_accumulators": "squares",
    "_u": "u",
    "_m": "m",
    "_accumulated_grads": "rms",
    "_accumulated_delta_vars": "deltas",
}
# Settings of Keras that change gradients or weights beside the update rule; None if they are off.
_KERAS_EXTRAS = (
    *("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
    *("loss_scale_factor", "gradient_accumulation_steps"),
)
_PLAIN_NUMBERS = ("beta_1", "beta_2", "epsilon", "rho", "momentum", "weight_decay")


class KerasTrainer(ModelTrainer):
    """A Keras model or a tf.Module, trained by an optimizer of Keras."""

    placement = UNCORRECTED

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._tf: Any = sys.modules.get("tensorflow")
        if self._tf is None or self._backend() != "tensorflow":
            raise UnsupportedError("training steps of a Keras model require Keras's TensorFlow backend")
        self._optimizer: Any = None

    def _backend(self) -> str:
        keras = self._keras()
        name = getattr(getattr(keras, "backend", None), "backend", None)
        return str(name()) if callable(name) else "tensorflow"

    def _keras(self) -> Any:
        return model_child.keras_library(self.runner.model, self.runner.framework)

    def trained(self, *, exact: bool) -> list[tuple[str, Any]]:
        """Return the trainable variables by the paths of their layers."""
        model = self.runner.exact if exact else self.runner.model
        variables = model_child.model_variables(model)
        known = {*map(id, variables)}
        names: dict[int, str] = {}
        for path, module in model_child.iter_modules(model):
            for name, each in model_child.own_tensors(module, known):
                names.setdefault(id(each), "/".join([*path, name]))
        if self.runner.framework == "keras":
            wanted = list(model.trainable_variables)
        else:
            wanted = [each for each in variables if getattr(each, "trainable", True)]
        return [(names.get(id(each), str(getattr(each, "path", each.name))), each) for each in wanted]

    def _variables(self, *, exact: bool) -> list[Any]:
        return [each for _, each in self.trained(exact=exact)]

    def restore(self, file: str, spec: Message | None, wanted: str | None = None) -> bool:
        """Create the optimizer of the file's own configuration, or the one of `spec`, and load its state."""
        name = "optimizer"
        if spec is not None:
            name = spec["name"]
            made = getattr(self._keras().optimizers, spec["class"])(**spec["arguments"])
        else:
            config = compiled_optimizer(file) if os.path.isfile(file) else None
            if config is None:
                return False
            choose_optimizer(file, [name], wanted)
            made = self._configured(file, config)
        made.build(self._variables(exact=False))
        try:
            self._load(file, name, made)
        except Exception as error:
            raise UsageError(
                f"{type(made).__name__} cannot load its state from the file: {last_error_line(error)}",
                file=file,
            ) from error
        self._optimizer, self.stored = made, True
        return True

    def _configured(self, file: str, config: Message) -> Any:
        """Return the optimizer of a configuration; raise UnsupportedError for a class outside Keras.

        The caller has audited the configuration (see `read_optimizer_config`): this creates what it names.
        """
        cls = getattr(self._keras().optimizers, str(config.get("class_name")), None)
        if cls is None:
            raise UnsupportedError(
                "the model's optimizer is not a class of Keras",
                file=file,
                found=str(config.get("class_name")),
            )
        return cls.from_config(config["config"])

    def _load(self, file: str, name: str, optimizer: Any) -> None:
        if not os.path.isfile(file):
            self._restore_objects(file, name, optimizer)
            return
        values = legacy_optimizer_values(file)
        if values is None:
            self.runner.model.compile(optimizer=optimizer)
            self.runner.model.load_weights(file)
            return
        variables = _optimizer_variables(optimizer)
        # Keras before 3 did not store the learning rate beside the moments.
        variables = (
            [each for each in variables if not str(each.name).endswith("learning_rate")]
            if len(variables) == len(values) + 1
            else variables
        )
        if len(variables) != len(values):
            raise ValueError(f"the file has {len(values)} variables of the optimizer, not {len(variables)}")
        for variable, value in paired(variables, values):
            variable.assign(value)

    def _restore_objects(self, file: str, name: str, optimizer: Any) -> None:
        tensorflow, model = self._tf, self.runner.model
        tops = {found.split("/")[0] for found, _ in tensorflow.train.list_variables(file)}
        first: Exception | None = None
        for model_name in ("", *sorted(top for top in tops if not top.startswith("_") and top != name)):
            try:
                both = {model_name: model, name: optimizer} if model_name else {name: optimizer}
                made = tensorflow.train.Checkpoint(*([] if model_name else [model]), **both)
                made.read(file).assert_existing_objects_matched()
            except Exception as error:  # noqa: BLE001 - the next name may fit
                first = first or error
            else:
                return
        assert first is not None  # noqa: S101 - no name fits
        raise first

    def _copy_state(self, source: Any, target: Any) -> None:
        one, other = list(_optimizer_variables(source)), list(_optimizer_variables(target))
        if len(other) == len(one) + 1:  # a number that replaces a schedule
            other = [each for each in other if not str(each.name).endswith("learning_rate")]
        if len(one) != len(other):
            raise WorkerError("the optimizer has other variables than its copy")
        for value, variable in paired(one, other):
            variable.assign(np.array(value.numpy() if hasattr(value, "numpy") else value))

    def create(self, cls: str, settings: Message) -> None:
        """Create an optimizer of Keras without state."""
        made = getattr(self._keras().optimizers, cls)(**settings)
        made.build(self._variables(exact=False))
        self._optimizer = made

    def describe(self) -> Message:
        """Return class, settings, step and the settings of each tensor."""
        held = self._optimizer
        settings = {name: getattr(held, name) for name in _KERAS_SETTINGS if hasattr(held, name)}
        settings = {
            name: value if isinstance(value, (bool, str)) or value is None else float(_array(value))
            for name, value in settings.items()
        }
        settings["learning_rate"] = float(_array(held.learning_rate))
        averaged = bool(getattr(held, "use_ema", False))
        for name in _KERAS_EXTRAS:
            value = getattr(held, name, None)
            settings[name] = value if value and (averaged or not name.startswith("ema_")) else None
        if not _is_variable(getattr(held, "_learning_rate", None)):
            self.notes.append("the learning rate follows the schedule that the file contains")
        decay = getattr(held, "weight_decay", None)
        settings["weight_decay"] = float(_array(decay)) if decay else 0.0
        uses = getattr(held, "_use_weight_decay", lambda _: True)
        named = self.trained(exact=False)
        cls = type(held).__name__
        return {
            "family": "Adam" if cls == "AdamW" else cls,
            "title": cls,
            "settings": settings,
            "own": {
                name: settings if uses(each) else dict(settings, weight_decay=0.0) for name, each in named
            },
            "counts": {name: {STEP: float(_array(held.iterations))} for name, _ in named},
            "decoupled": True,
            "step": int(_array(held.iterations)),
            "stored": self.stored,
            "placement": self.placement,
        }

    def slots(self) -> dict[str, list[Any]]:
        """Return the optimizer's state by canonical name."""
        held = self._optimizer
        kinds = dict(_KERAS_SLOTS)
        cls = type(held).__name__
        if cls == "RMSprop":
            kinds.update({"_velocities": "rms", "_momentums": "velocity"})
        if cls == "SGD":
            kinds.update({"momentums": "velocity"})
        found = {}
        for attribute, kind in kinds.items():
            arrays = getattr(held, attribute, None)
            if isinstance(arrays, (list, tuple)) and arrays:
                found[kind] = [_array(each) for each in arrays]
        rate = float(_array(held.learning_rate)) * (-1 if cls == "SGD" else 1)
        if "velocity" in found and rate:
            # Keras's momentum includes the learning rate, that of PyTorch does not.
            found["buffer"] = [each / rate for each in found.pop("velocity")]
        return found

    def _copy(self, job: TrainingJob) -> Any:
        """Return the optimizer for the job's float type with its changes."""
        keras = self._keras()
        before = keras.backend.floatx()
        dtype = "float64" if job.exact else "float32"
        if job.exact:
            keras.backend.set_floatx(dtype)
        try:
            config = self._optimizer.get_config()
            if "learning_rate" in job.changes:  # a schedule cannot be set
                config["learning_rate"] = float(job.changes["learning_rate"])
            made = type(self._optimizer).from_config(config)
            made.build(self._variables(exact=job.exact))
        finally:
            keras.backend.set_floatx(before)
        self._copy_state(self._optimizer, made)
        for name in _PLAIN_NUMBERS:
            # Keras converts a Python number to float32 before casting (keras/src/backend/tensorflow/core.py).
            value = getattr(made, name, None)
            if job.exact and isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(made, name, np.float64(value))
        for name, value in job.changes.items():
            if name == STEP:
                made.iterations.assign(value)
            elif name == "learning_rate":
                made.learning_rate.assign(np.array(value, dtype))
            else:
                setattr(made, name, np.float64(value) if isinstance(value, float) else value)
        return made

    @contextlib.contextmanager
    def running(self, job: TrainingJob) -> Iterator[Callable[[], tuple[float, list[Any]]]]:
        """Train in place by a gradient tape and Keras's optimizer, then put the weights back."""
        variables = self._variables(exact=job.exact)
        kept = [_exact_array(each) for each in variables]
        optimizer = self._copy(job)
        given, targets = self._given(job), self._targets(job)
        epsilon = None
        if job.epsilon is not None:
            base, beta_2 = float(optimizer.epsilon), float(optimizer.beta_2)
            epsilon = self._tf.Variable(base, dtype=variables[0].dtype, trainable=False)
            optimizer.epsilon = epsilon
        count = [int(_array(optimizer.iterations))]

        def update() -> Any:
            with self._tf.GradientTape() as tape:
                loss = self._loss(job, self._call(job, given), targets, self._tf.reduce_mean)
            found = [
                None if each is None else self._tf.convert_to_tensor(each)
                for each in tape.gradient(loss, [_raw(each) for each in variables])
            ]
            optimizer.apply_gradients([(g, v) for g, v in paired(found, variables) if g is not None])
            return loss, found

        run = self._compiled(update, job)

        def step() -> tuple[float, list[Any]]:
            count[0] += 1
            if epsilon is not None and job.epsilon is not None:
                epsilon.assign(base * epsilon_factor(self.placement, job.epsilon, beta_2, count[0]))
            loss, found = run()
            return float(_array(loss)), found

        try:
            yield step
        finally:
            for variable, value in paired(variables, kept):
                variable.assign(value)

    def _compiled(self, update: Callable[[], Any], job: TrainingJob) -> Callable[[], Any]:
        """Return the update as a graph, or as it is if the model cannot be traced."""
        if max(job.steps, default=1) < 10:  # tracing takes longer than some eager steps
            return update
        try:
            graph = self._tf.function(update)
            graph.get_concrete_function()
        except Exception:  # noqa: BLE001 - a model with Python control flow runs eagerly
            return update
        return graph  # type: ignore[no-any-return]

    def _targets(self, job: TrainingJob) -> list[Any]:
        return [self._tf.constant(each) for each in job.targets]


def compiled_optimizer(file: str) -> Message | None:
    """Return the configuration of the optimizer that a whole model was compiled with, or None."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            held = json.loads(archive.read("config.json").decode())
        found = (held.get("compile_config") or {}).get("optimizer")
    else:
        with _open_hdf5(file) as held:
            text = held.attrs.get("training_config")
        text = text.decode() if isinstance(text, bytes) else text
        found = None if text is None else json.loads(text).get("optimizer_config")
    return found if isinstance(found, dict) and isinstance(found.get("config"), dict) else None


def legacy_optimizer_values(file: str) -> list[Any] | None:
    """Return the optimizer's arrays in an HDF5 file of a whole model, None for other files."""
    if zipfile.is_zipfile(file):
        return None
    with _open_hdf5(file) as held:
        group = held.get("optimizer_weights")
        if group is None:
            return None
        names = [each.decode() if isinstance(each, bytes) else each for each in group.attrs["weight_names"]]
        return [np.array(group[name]) for name in names]


def _open_hdf5(file: str) -> Any:
    import h5py  # type: ignore[import-untyped]

    return h5py.File(file, "r")


def _optimizer_variables(optimizer: Any) -> list[Any]:
    held = optimizer.variables
    return list(held() if callable(held) else held)


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign")


def _raw(variable: Any) -> Any:
    """Return TensorFlow's variable inside one of Keras 3."""
    return variable.value if hasattr(variable, "_value") else variable


def _exact_array(value: Any) -> Any:
    return np.array(value.numpy() if hasattr(value, "numpy") else value)


# Requests of the process that runs a model (networks/model_runner.py).


def _trainer(session: Any) -> ModelTrainer:
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
    found: ModelTrainer = session.trainer
    return found


def read_optimizer_config(session: Any, message: Message) -> Message:
    """Return the configuration of a Keras model's optimizer in a file, which the caller judges."""
    file = message["file"]
    known = isinstance(_trainer(session), KerasTrainer) and os.path.isfile(file)
    return {"config": compiled_optimizer(file) if known else None}


def prepare_optimizer(session: Any, message: Message) -> Message:
    """Restore the file's optimizer, or create the wanted one; describe it and the trained tensors."""
    trainer = _trainer(session)
    created = message.get("create")
    if created is not None:
        trainer.create(created["class"], created["settings"])
        found = True
    else:
        found = trainer.restore(message["file"], message.get("spec"), message.get("wanted"))
    tensors = trainer.trained(exact=False)
    for place, (_, tensor) in enumerate(tensors):
        np.save(session.folder / f"trained-{place}.npy", _array(tensor), allow_pickle=False)
    return {
        "found": found,
        "optimizer": trainer.describe() if found else None,
        "tensors": [name for name, _ in tensors],
        "notes": trainer.notes,
        "assumed": trainer.assumed,
    }


def read_slots(session: Any, message: Message) -> Message:
    """Write the optimizer's state; return the tensors that have it, by kind."""
    del message
    found: dict[str, list[int]] = {}
    for kind, arrays in _trainer(session).slots().items():
        found[kind] = [place for place, each in enumerate(arrays) if each is not None]
        for place in found[kind]:
            np.save(session.folder / f"slot-{kind}-{place}.npy", arrays[place], allow_pickle=False)
    return {"slots": found}


def _job(session: Any, message: Message) -> TrainingJob:
    targets = [
        np.load(session.folder / f"target-{place}.npy", allow_pickle=False)
        for place in range(len(message["outputs"]))
    ]
    return TrainingJob(message, session.given(len(message["names"])), targets)


def train_model(session: Any, message: Message) -> Message:
    """Train from the state of the checkpoint; write first gradients, and changes after wanted steps."""
    trainer = _trainer(session)
    try:
        losses, first, found = trainer.train(_job(session, message))
    except (UsageError, UnsupportedError):
        raise
    except Exception as error:
        raise WorkerError(f"a training step raises {last_error_line(error)}") from error
    for stem, arrays in [("gradient", first), *((f"update-{number}", each) for number, each in found)]:
        for place, array in enumerate(arrays):
            np.save(session.folder / f"{stem}-{place}.npy", array, allow_pickle=False)
    return {"losses": [losses[0], losses[-1]], "finite": bool(np.isfinite(losses).all())}


HANDLERS = {
    "optimizer": prepare_optimizer,
    "optimizer_config": read_optimizer_config,
    "slots": read_slots,
    "train": train_model,
}
