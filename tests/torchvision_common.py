"""A stand-in for torchvision, of which this project uses the jpegs that a GPU decodes."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch


def substitute_torchvision(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put a module in place of torchvision, whose jpegs simplejpeg decodes; the sizes of its calls."""
    simplejpeg, asked = pytest.importorskip("simplejpeg"), list[int]()

    def decode_jpeg(blobs: list[torch.Tensor], mode: str, device: torch.device) -> list[torch.Tensor]:
        asked.append(len(blobs))
        images = (simplejpeg.decode_jpeg(blob.numpy().tobytes(), mode) for blob in blobs)
        try:
            return [torch.from_numpy(image).permute(2, 0, 1).to(device) for image in images]
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    package, io = types.ModuleType("torchvision"), types.ModuleType("torchvision.io")
    vars(package).update(io=io, __spec__=importlib.machinery.ModuleSpec("torchvision", None))
    vars(io).update(decode_jpeg=decode_jpeg, ImageReadMode=types.SimpleNamespace(RGB="RGB", GRAY="GRAY"))
    for module in (package, io):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked
