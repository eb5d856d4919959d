"""Run simulators whose batches are tensors on the policy's device."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from ckpttool.core.errors import (
    CkpttoolError,
    EnvironmentMismatchError,
    UnsupportedError,
    UsageError,
    did_you_mean,
)
from ckpttool.core.installation import require_package
from ckpttool.evaluation.gymnasium_engine import OBS, Agreement, EnvSpec, VectorEnv
from ckpttool.networks.model_child import last_error_line

if TYPE_CHECKING:
    import torch


DEVICE_ENGINE = "device"
HINT = "use --backend torch"

Tensors = tuple["torch.Tensor", ...]


class TensorProgram(Protocol):
    """Task as pure functions of tensors on any device; a state is several tensors [rows, ...].

    `observe` and `step` read no value on the host: a GPU replays them as one graph. Actions are within the
    bounds of `spec`. The rollout starts rows from seeds and truncates episodes at `spec.max_episode_steps`.
    The rollout runs a policy of the PyTorch backend on the same device, without a transfer between policy and
    task.
    """

    spec: EnvSpec

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings of the task's library, each once."""
        ...

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with the task's library; None if that is not installed."""
        ...

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the start states of these seeds' episodes, in host memory."""
        ...

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return the policy's observations: [rows, obs_dim] in the type of the task's observations."""
        ...

    def step(
        self, state: Tensors, actions: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, torch.Tensor | None]:
        """Return the next state, and rewards and terminations (bool; None if there are none) [rows]."""
        ...

    def close(self) -> None:
        """Release the resources of the task's library."""
        ...


class Simulator(Protocol):
    """Batch of environments with internal state, whose rows restart automatically."""

    spec: EnvSpec
    device: torch.device
    capturable: bool
    """whether `step` may be captured in a CUDA graph: it reads no value on the host and keeps its memory"""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings of the simulator, each once."""
        ...

    def reset(self, seed: int) -> torch.Tensor:
        """Start an episode in every row; return the observations [rows, obs_dim]."""
        ...

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return observations, rewards, terminated and truncated.

        For a row that ended, the observation is the first one of its next episode.
        """
        ...

    def close(self) -> None:
        """Release the simulator's resources."""
        ...


class DeviceVector(VectorEnv):
    """Task with a number of rows, played as a whole (see rollout.rollouts)."""

    engine = DEVICE_ENGINE

    def __init__(self, task: TensorProgram | Simulator, num_envs: int) -> None:
        super().__init__(num_envs)
        self.task, self.spec = task, task.spec
        self.obs = self.spec.zeros(num_envs)
        self._compared: set[torch.device] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings of the task's library, each once."""
        return self.task.notes

    def require_agreement(self, device: torch.device) -> None:
        """Compare a program's steps on the device once; raise UnsupportedError beyond its tolerance."""
        if device not in self._compared and (compare := getattr(self.task, "compare", None)) is not None:
            self.agreement = compare(device)
            if self.agreement is not None:
                self.agreement.require(self.spec.id, self.engine)
            self._compared.add(device)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> NoReturn:  # noqa: ARG002
        """Raise UnsupportedError: the episodes are on the device."""
        raise UnsupportedError(f"the {DEVICE_ENGINE} engine cannot be stepped from outside", hint=HINT)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> NoReturn:
        """Raise UnsupportedError: the episodes are on the device."""
        self.reset(rows, actions)

    def close(self) -> None:
        """Release the resources of the task's library."""
        self.task.close()


Result = TypeVar("Result")

_FACTORY_HINT = "use module:function for a factory, module:Env-v0 for a Gymnasium environment"
_CHECKED_ROWS = 3


def is_factory(env_id: str) -> bool:
    """Return whether the id has the form `module:factory`; `module:Env-v0` is a Gymnasium id."""
    module, colon, name = env_id.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def load_simulator(
    env_id: str, num_envs: int, device: str = "cpu", kwargs: Mapping[str, Any] | None = None
) -> DeviceVector:
    """Call the factory and return its task with that many rows.

    `device` is "cpu", "cuda", "cuda:N" or "auto". Raise UsageError if the module, the factory or an attribute
    of its result is missing or wrong, MissingExtraError without PyTorch. The factory is called with the
    number of rows and a torch.device. Its result has the attributes `obs_dim`, `action_low` and
    `action_high`, and either `starts`, `observe` and `step` (a tensor program, see TensorProgram) or `reset`
    and `step` (see Simulator). Optional are `max_episode_steps`, `versions`, `notes`, `capturable` and
    `close`.
    """
    require_package("torch", f"the {DEVICE_ENGINE} engine needs torch", "torch")
    from ckpttool.networks.torch_backend import device_of

    target_device = device_of(device)
    factory = _load_factory(env_id)
    task = _call_user_code(env_id, "", factory, num_envs, target_device, **(kwargs or {}))
    try:
        spec = _read_spec(task, env_id)
        if callable(getattr(task, "starts", None)):
            return DeviceVector(UserProgram(task, spec), num_envs)
        return DeviceVector(UserSimulator(task, spec, num_envs, target_device), num_envs)
    except CkpttoolError:
        _close_quietly(task)
        raise
    except Exception as error:
        # An attribute may be a property, which runs code.
        _close_quietly(task)
        raise _user_code_error(env_id, "an attribute", error) from error


class UserTask:
    """What a user's factory returned."""

    def __init__(self, task: Any, spec: EnvSpec, *methods: str) -> None:
        self._task, self.spec = task, spec
        missing = [name for name in methods if not callable(getattr(task, name, None))]
        if missing:
            raise UsageError(
                f"{spec.id} returns an object without {' and '.join(missing)}",
                expected="starts, observe and step (a tensor program), or reset and step (a simulator)",
                found=type(task).__name__,
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes of the task."""
        stated = getattr(self._task, "notes", ())
        return tuple(map(str, stated)) if isinstance(stated, tuple | list) else ()

    def close(self) -> None:
        """Close the task, if it has a `close`."""
        _close_quietly(self._task)

    def _call(self, method: str, *arguments: Any) -> Any:
        return _call_user_code(self.spec.id, method, getattr(self._task, method), *arguments)


class UserProgram(UserTask):
    """User's tensor program; its shapes and types are checked once per device before playing."""

    def __init__(self, program: Any, spec: EnvSpec) -> None:
        super().__init__(program, spec, "starts", "observe", "step")

    def compare(self, device: torch.device) -> None:
        """Play one step of a few rows; raise EnvironmentMismatchError if a result does not match."""
        import torch

        seeds = np.arange(_CHECKED_ROWS)
        state = tuple(
            torch.from_numpy(np.ascontiguousarray(start)).to(device) for start in self.starts(seeds)
        )
        low, high = self.spec.action_low, self.spec.action_high
        middle = np.clip(np.zeros_like(low), low, high)
        actions = torch.from_numpy(np.tile(middle, (_CHECKED_ROWS, 1))).to(device)
        fits = _ResultChecker(self.spec, _CHECKED_ROWS, device)
        fits.observations(self.observe(state))
        result = self.step(state, actions)
        if not isinstance(result, tuple) or len(result) != 3:
            raise fits.error("step", "(state, rewards, terminated)", _describe_value(result))
        after, rewards, terminated = result
        if not isinstance(after, tuple) or list(map(_describe_value, after)) != list(
            map(_describe_value, state)
        ):
            description = (
                ", ".join(map(_describe_value, after)) if isinstance(after, tuple) else _describe_value(after)
            )
            raise fits.error("the next state", f"({', '.join(map(_describe_value, state))})", description)
        fits.rewards(rewards)
        if terminated is not None:
            fits.flags("terminated", terminated)
        elif self.spec.max_episode_steps is None:
            raise UsageError(
                f"episodes of {self.spec.id} never end",
                expected="terminated from step, or the attribute max_episode_steps",
                found="neither",
            )

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the start states of these seeds' episodes."""
        states = self._call("starts", seeds)
        several = states if isinstance(states, tuple | list) else (states,)
        arrays = tuple(
            state.detach().cpu().numpy() if hasattr(state, "detach") else np.asarray(state)
            for state in several
        )
        if not arrays or any(a.dtype.kind not in "fiub" or a.shape[:1] != (len(seeds),) for a in arrays):
            raise EnvironmentMismatchError(
                f"starts of {self.spec.id} returns invalid states",
                expected=f"arrays of numbers [{len(seeds)}, ...], one row per seed",
                found=", ".join(f"{a.dtype.name} {list(a.shape)}" for a in arrays) or "no array",
            )
        return arrays

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return the policy's observations [rows, obs_dim]."""
        observations: torch.Tensor = self._call("observe", state)
        return observations

    def step(
        self, state: Tensors, actions: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, torch.Tensor | None]:
        """Return the next state, the rewards and which rows terminated."""
        outcome: tuple[Tensors, torch.Tensor, torch.Tensor | None] = self._call("step", state, actions)
        return outcome


class UserSimulator(UserTask):
    """User's simulator; shapes, types and device of its results are checked at every step."""

    def __init__(self, simulator: Any, spec: EnvSpec, num_envs: int, device: torch.device) -> None:
        super().__init__(simulator, spec, "reset", "step")
        self.device = device
        self.capturable = getattr(simulator, "capturable", False) is True
        self._fits = _ResultChecker(spec, num_envs, device)

    def reset(self, seed: int) -> torch.Tensor:
        """Start an episode in every row; return the observations [rows, obs_dim]."""
        return self._fits.observations(self._call("reset", seed))

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return observations, rewards, terminated and truncated."""
        outcome = self._call("step", actions)
        if not isinstance(outcome, tuple | list) or len(outcome) != 4:
            raise self._fits.error(
                "step", "(observations, rewards, terminated, truncated)", _describe_value(outcome)
            )
        obs, rewards, terminated, truncated = outcome
        return (
            self._fits.observations(obs),
            self._fits.rewards(rewards),
            self._fits.flags("terminated", terminated),
            self._fits.flags("truncated", truncated),
        )


class _ResultChecker:
    """Check the results of a task without reading values from the device."""

    def __init__(self, spec: EnvSpec, rows: int, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._rows, self._observed = (rows,), (rows, spec.obs_dim)

    def observations(self, values: Any) -> torch.Tensor:
        return self._tensor("observations", values, self._observed, "a float type")

    def rewards(self, values: Any) -> torch.Tensor:
        return self._tensor("rewards", values, self._rows, "a float type")

    def flags(self, name: str, values: Any) -> torch.Tensor:
        return self._tensor(name, values, self._rows, "bool")

    def _tensor(self, name: str, value: Any, shape: tuple[int, ...], kind: str) -> torch.Tensor:
        import torch

        right = (
            isinstance(value, torch.Tensor)
            and value.shape == shape
            and value.device == self._device
            and (value.dtype == torch.bool if kind == "bool" else value.dtype.is_floating_point)
        )
        if not right:
            raise self.error(
                name, f"a tensor {list(shape)} of {kind} on {self._device}", _describe_value(value)
            )
        tensor: torch.Tensor = value
        return tensor

    def error(self, name: str, expected: str, found: str) -> EnvironmentMismatchError:
        return EnvironmentMismatchError(
            f"{self._spec.id} returns an invalid value for {name}", expected=expected, found=found
        )


def _load_factory(env_id: str) -> Callable[..., Any]:
    where, _, name = env_id.partition(":")
    try:
        factory: Any = importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if where == missing or where.startswith(f"{missing}."):
            raise UsageError(
                f"no module named {missing}",
                hint="modules are searched in the current folder and PYTHONPATH",
            ) from error
        raise UsageError(f"{where} imports {missing}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"importing {where} raises {last_error_line(error)}") from error
    for part in name.split("."):
        if not hasattr(factory, part):
            close = difflib.get_close_matches(part, dir(factory), 1)
            raise UsageError(
                f"{where} has no attribute {name}",
                hint=did_you_mean(close[0]) if close else _FACTORY_HINT,
            )
        factory = getattr(factory, part)
    if not callable(factory):
        raise UsageError(
            f"{env_id} is not a factory", expected="a function or a class", found=type(factory).__name__
        )
    return factory  # type: ignore[no-any-return]  # callable


def _call_user_code(env_id: str, method: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call the factory or a method of its result; turn any exception into a one-line error."""
    try:
        return function(*args, **named)
    except (Exception, SystemExit) as error:
        raise _user_code_error(env_id, method, error) from error


def _user_code_error(env_id: str, method: str, error: BaseException) -> UsageError:
    return UsageError(f"{method + ' of ' if method else ''}{env_id} raises {last_error_line(error)}")


def _read_spec(task: Any, env_id: str) -> EnvSpec:
    """Return the task's sizes and bounds; raise UsageError if an attribute is missing or wrong."""
    missing = [name for name in ("obs_dim", "action_low", "action_high") if not hasattr(task, name)]
    if missing:
        raise UsageError(
            f"{env_id} returns an object without {' and '.join(missing)}",
            expected="obs_dim, action_low and action_high",
            found=type(task).__name__,
        )
    limit = getattr(task, "max_episode_steps", None)
    for name, value in (
        ("obs_dim", task.obs_dim),
        *([] if limit is None else [("max_episode_steps", limit)]),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise UsageError(f"invalid {name} of {env_id}", expected="a positive integer", found=repr(value))
    low, high = _read_bound(task, env_id, "action_low"), _read_bound(task, env_id, "action_high")
    if low.shape != high.shape or not (low <= high).all():
        raise UsageError(
            f"the action bounds of {env_id} are inconsistent",
            expected="action_low at most action_high, one number per action",
            found=f"{low.tolist()} and {high.tolist()}",
        )
    stated = getattr(task, "versions", None)
    versions = stated if isinstance(stated, Mapping) else {}
    return EnvSpec(
        env_id,
        ((OBS, (int(task.obs_dim),), "float32"),),
        low,
        high,
        None if limit is None else int(limit),
        {**{str(name): str(value) for name, value in versions.items()}, **_module_version(env_id)},
    )


def _read_bound(task: Any, env_id: str, name: str) -> np.ndarray:
    value = getattr(task, name)
    try:
        bound = value.detach().cpu().numpy() if hasattr(value, "detach") else value
        array = np.atleast_1d(np.asarray(bound, np.float32))
    except (TypeError, ValueError, RuntimeError):
        array = np.array([math.nan], np.float32)
    if array.ndim != 1 or not array.size or np.isnan(array).any():
        raise UsageError(
            f"{name} of {env_id} is not a list of numbers",
            expected="one number per action",
            found=repr(value)[:80],
        )
    return array


def _module_version(env_id: str) -> dict[str, str]:
    """Return the digest of the module's file, because results of changed code are not comparable."""
    where = env_id.partition(":")[0]
    file = getattr(sys.modules.get(where), "__file__", None)
    try:
        with open(file or "", "rb") as stream:
            return {where: f"sha256:{hashlib.sha256(stream.read()).hexdigest()[:16]}"}
    except OSError:
        return {}


def _close_quietly(task: Any) -> None:
    # A simulator that fails to close must not lose the played episodes.
    with contextlib.suppress(Exception):
        if callable(close := getattr(task, "close", None)):
            close()


def _describe_value(value: Any) -> str:
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
