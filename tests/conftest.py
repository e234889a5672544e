"""What all tests share: when GPU tests run, how hypothesis does, and the paths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.paths import Path
from tests.problems import usual_dtype
from tests.shards import Shard

# A deadline measures the machine; the first call of an operator alone can take a second. Examples
# are derandomized so that a check of a change does not fail for what it did not touch; to search
# for new ones: pytest tests/property --hypothesis-profile=search
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("ci")

# Threads that wait for each other make a product of small matrices take 5 ms on a busy machine and
# 5 us on an idle one. Tests of what threads could change ask for `all_threads`.
_THREADS = torch.get_num_threads()
torch.set_num_threads(1)

_ON_GPU = [
    pytest.param(Path(name, "cuda"), marks=pytest.mark.gpu, id=f"{name}-cuda")
    for name in ("default", "portable", "fa3")
]
_TILED = [pytest.param(Path(name), id=name) for name in ("oracle", "default", "portable")]


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "run every N-th of the selected tests, from the I-th on"
    parser.addoption("--shard", type=Shard.parse, metavar="I/N", help=what)


@pytest.hookimpl(trylast=True)  # -k and -m select first, so that shards are of equal size
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shard := config.getoption("--shard"):
        items[:], others = shard.split(items)
        config.hook.pytest_deselected(items=others)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(params=[*_TILED, pytest.param(Path("cpu_fused"), id="cpu_fused"), *_ON_GPU])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Every way to compute attention, for calls that each of them can take."""
    yield from _with_its_dtype(request.param)


@pytest.fixture(params=[*_TILED, *_ON_GPU])
def tiled_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """As `path`, for what PyTorch's fused kernel cannot take: softcap, left bounds, scale <= 0."""
    yield from _with_its_dtype(request.param)


def _with_its_dtype(path: Path) -> Iterator[Path]:
    token = usual_dtype.set(path.usual_dtype)
    yield path
    usual_dtype.reset(token)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def all_threads() -> Iterator[None]:
    torch.set_num_threads(_THREADS)
    yield
    torch.set_num_threads(1)
