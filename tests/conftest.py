"""What all tests share: when GPU tests run, and how hypothesis does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# A deadline measures the machine; the first call of an operator alone can take a second.
settings.register_profile("tilewright", deadline=None)
settings.load_profile("tilewright")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
