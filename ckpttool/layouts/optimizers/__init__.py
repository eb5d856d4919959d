"""Optimizers: how TensorFlow, Keras and PyTorch store them, and the way of each to the canonical one."""

from ckpttool.layouts.optimizers.keras_read import from_keras
from ckpttool.layouts.optimizers.keras_write import ToKeras
from ckpttool.layouts.optimizers.torch_read import from_torch
from ckpttool.layouts.optimizers.torch_write import ToTorch

__all__ = ["ToKeras", "ToTorch", "from_keras", "from_torch"]
