"""A short hash of a model, so that a result can be matched with the model that produced it."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from rectgrad.models.image_model import ImageModel


def fingerprint(model: ImageModel) -> str:
    """A string that changes with the weights, buffers, class names or preprocessing."""
    found = hashlib.sha256()
    preprocessing = (model.size, model.mean, model.std, model.crop_fraction, model.interpolation)
    found.update(repr((preprocessing, model.names())).encode())
    return _with_weights(found, model.module)


def weights_digest(module: nn.Module) -> str:
    """A string that changes with the weights or buffers."""
    return _with_weights(hashlib.sha256(repr(module).encode()), module)


def _with_weights(found: hashlib._Hash, module: nn.Module) -> str:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]
