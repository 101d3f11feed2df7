"""Sizes, backends and the disk of the microbenchmarks; their workloads are those of bench/."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cpr_ext._native import native

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiny", action="store_true", help="sizes at which all runs in seconds")
    parser.addoption("--folder", type=Path, help="where files are written: the disk to measure")


@pytest.fixture
def is_tiny(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--tiny"))


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder on the disk that is measured."""
    chosen = request.config.getoption("--folder")
    return tmp_path if chosen is None else Path(chosen) / tmp_path.name


@pytest.fixture
def measure(benchmark: Any) -> Callable[..., None]:
    """Time a call of one stage, with what it moves in ``extra_info``."""

    def run(
        stage: str,
        call: Callable[[], object],
        *,
        rows: int,
        num_bytes: int,
        setup: Callable[[], object] | None = None,
    ) -> None:
        benchmark.group = stage
        benchmark.extra_info.update(stage=stage, rows=rows, bytes=num_bytes)
        if setup is None:
            benchmark(call)
        else:  # one call a round, since each needs its own beginning
            benchmark.pedantic(call, setup=lambda: (setup(), None)[1], rounds=5)
        if benchmark.stats is not None:  # with --benchmark-disable there are none
            benchmark.extra_info["GB/s"] = num_bytes / benchmark.stats.stats.median / 1e9

    return run


@pytest.fixture(params=["cpu", "emulated", "cuda"])
def backend(request: pytest.FixtureRequest) -> tuple[str, ModuleType, int | None]:
    """Where trackers are: a name, the compiled module, and a device's number or None."""
    if request.param == "cpu":
        return "cpu", native, None
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU: no CUDA device or driver")
        return "cuda", native, 0
    try:
        return "emulated", importlib.import_module("cpr_ext._emulated"), 0
    except ImportError:
        pytest.skip("cpr_ext._emulated is not built: CPR_EXT_EMULATED=1 make build")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where tables are."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: no CUDA device or driver")
    return str(request.param)
