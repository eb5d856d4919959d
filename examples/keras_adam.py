"""PyTorch's Adam with Keras's epsilon, for exact continuation of a TensorFlow run.

With t updates made, Keras divides by sqrt(v) + epsilon and then corrects the bias; PyTorch corrects v first
and adds eps to the root of that. They are the same number if eps = epsilon / sqrt(1 - beta_2^t), for this t
alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class KerasAdam(torch.optim.Adam):
    """Adam whose `eps` is Keras's epsilon; its state_dict is that of Adam, with that number in it."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update with the `eps` of every group converted to Keras's form."""
        stored = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            steps = (float(self.state[p]["step"]) for p in group["params"] if "step" in self.state.get(p, {}))
            group["eps"] /= (1 - group["betas"][1] ** (next(steps, 0.0) + 1)) ** 0.5
        try:
            return super().step(closure)
        finally:
            for group, eps in zip(self.param_groups, stored, strict=True):
                group["eps"] = eps
