"""The description of a machine."""

from __future__ import annotations

import pytest
import torch

from tilewright import machine


def test_what_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "PACKAGES", ("typer", "no-such-package"))
    packages = machine.describe().packages
    assert packages["typer"]
    assert packages["no-such-package"] is None


def test_a_gpu_that_pytorch_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch):
    answers = {"name": ["NVIDIA H200"], "driver_version": ["580.10"]}
    monkeypatch.setattr(machine, "_ask_driver", answers.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    told = machine.describe()
    assert told.driver == "580.10"
    assert told.gpu_note is not None and "NVIDIA H200" in told.gpu_note
    assert "without CUDA" in told.gpu_note
