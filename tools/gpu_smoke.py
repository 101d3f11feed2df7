"""The first thing to run on a GPU: each layer of the CUDA side once, from the bottom.

    python tools/gpu_smoke.py [--emulated] [--under COMMAND] [--expect TEXT] [LAYER ...]

Each layer is a process, so that one that breaks its CUDA context spares the others; several run at
once. A layer's line says how it went. --under runs each by a command, such as compute-sanitizer;
--expect is what each must then print. --emulated: on the strict emulated device, those layers that
need no stream and no graph of PyTorch's. Exit status 1 if a layer failed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
LIMIT_SECONDS = 100
AT_ONCE = 6
ROWS = 100_003
LAYERS: dict[str, Callable[[Any], None]] = {}
OF_PYTORCH: set[str] = set()  # layers that need its streams or graphs


def layer(function: Callable[[Any], None]) -> Callable[[Any], None]:
    LAYERS[function.__name__] = function
    return function


def of_pytorch(function: Callable[[Any], None]) -> Callable[[Any], None]:
    OF_PYTORCH.add(function.__name__)
    return layer(function)


def top_rows(scores: np.ndarray, k: int) -> np.ndarray:
    """The k rows with the highest scores, without those of zero; ascending."""
    order = np.argsort(-scores.astype(np.int64), kind="stable")[:k]
    return np.sort(order[scores[order] > 0])


@layer
def versions(gpu: Any) -> None:
    print(sys.version.split()[0], "torch", torch.__version__, "numpy", np.__version__, end=" ")
    assert gpu.native.num_devices() >= 1
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(0), torch.version.cuda, gpu.native.use_dlpack(True))


@layer
def count(gpu: Any) -> None:
    indices = np.random.default_rng(0).zipf(1.2, 300_000) % ROWS
    for dtype in (np.int32, np.int64):
        counter = gpu.access_counter("t", ROWS)
        counter.observe(indices.astype(dtype))
        assert (counter.counts() == np.bincount(indices, minlength=ROWS)).all()


@layer
def bad_index(gpu: Any) -> None:
    counter = gpu.access_counter("t", 100)
    counter.observe(np.array([5, 100]))
    assert counter.num_dirty() == 1
    said = ""
    try:
        counter.report_faults()
    except IndexError as error:
        said = str(error)
    assert "index 100 at position 1" in said, said


@layer
def select(gpu: Any) -> None:
    random = np.random.default_rng(0)
    for scores in (random.poisson(0.5, ROWS), random.integers(2040, 2060, 50_001)):
        counter = gpu.access_counter("t", len(scores))
        counter.observe(np.repeat(np.arange(len(scores)), scores % 60))
        counts = counter.counts()
        for share in (0.125, 0.125, 0.02, 1):  # guessed wrongly, rightly, wrongly, wrongly
            k = int(share * len(counts))
            assert np.array_equal(counter.select(0, len(counts), k), top_rows(counts, k)), share
    for scores in (random.integers(0, 2**32, 50_000), np.full(40_000, 7)):
        held = gpu.put(scores.astype(np.uint32))
        for k in (1, 5000, 50_000):
            assert np.array_equal(
                gpu.native.device_top_rows(held, k, device=0), top_rows(scores, k)
            ), k


@layer
def gather(gpu: Any) -> None:
    random = np.random.default_rng(0)
    stager = gpu.native.DeviceStager(device=0, slot_bytes=1 << 20, num_slots=3)
    for row_bytes in (1, 4, 60, 64, 100, 512, 4096, 16 << 10):
        rows = random.integers(0, 256, (4000, row_bytes), np.uint8)
        ids = np.sort(random.permutation(4000)[:1700])
        table, out = gpu.put(rows), np.zeros((1700, row_bytes), np.uint8)
        gpu.native.gather_rows(table, ids, out, stager=stager)
        assert (out == rows[ids]).all(), row_bytes
        gpu.native.scatter_rows(255 - out, ids, table, stager=stager)
        rows[ids] = 255 - rows[ids]
        assert (gpu.get(table) == rows).all(), row_bytes


@layer
def round_rows(gpu: Any) -> None:
    from cpr_ext.state.precision import PRECISIONS, stored_row_bytes
    from python_tests.rounding import encode_rows

    rows = np.random.default_rng(0).standard_normal((3000, 64)).astype(np.float32)
    rows[7, 3], rows[9], rows[11, 5] = np.inf, 1e-42, 1e38
    stager = gpu.native.DeviceStager(device=0, slot_bytes=1 << 20, num_slots=2)
    for precision in PRECISIONS[1:]:
        stored = np.zeros((3000, stored_row_bytes(64, precision)), np.uint8)
        options = {"precision": precision, "stager": stager}
        gpu.native.gather_rows(gpu.put(rows), np.arange(3000), stored, **options)
        assert (stored == encode_rows(rows, precision)).all(), precision


@layer
def measure(gpu: Any) -> None:
    from cpr_ext import _C

    random = np.random.default_rng(0)
    before = random.standard_normal((9000, 33)).astype(np.float32)
    now = before + random.standard_normal(before.shape).astype(np.float32) / 1000
    meters = _C.ChangeMeter(name="t", weight=before), gpu.change_meter("t", before)
    for meter in meters:
        meter.observe(np.arange(0, 9000, 2))
    for k in (1, 100, 3000):
        assert np.array_equal(*(meter.select(0, 9000, k, weight=now) for meter in meters)), k


@layer
def sample(gpu: Any) -> None:
    for capacity in (100, 5000):
        sampler = gpu.row_sampler("t", 5000, capacity=capacity, period=1)
        for seed in range(5):
            sampler.observe(np.random.default_rng(seed).permutation(5000))
        assert (sampler.num_sampled, sampler.num_dirty()) == (capacity, 5000)


@layer
def take_chosen(gpu: Any) -> None:
    counter = gpu.access_counter("t", 1000)
    counter.observe(np.arange(300))
    chosen = counter.begin_select(0, 1000, 200)
    ids = chosen.read()
    table = gpu.put(np.arange(4000, dtype=np.float32).reshape(1000, 4))
    out = gpu.put(np.zeros((200, 4), np.float32))
    gpu.native.gather_chosen(tables=[table], chosen=chosen, outs=[out])
    gpu.native.StreamMark(device=0).wait()
    assert (gpu.get(out)[:, 0] == 4 * ids).all()
    taken = counter.take_chosen(ids, chosen=chosen, first=0)
    assert counter.num_dirty() == 100
    counter.put_back(taken)
    assert counter.num_dirty() == 300
    del chosen, taken
    gpu.native.trim_memory(0)
    gpu.native.trim_memory_if_short(0)


@of_pytorch
def two_runtimes(gpu: Any) -> None:
    """torch's CUDA runtime and ours share contexts; an error of one is none of the other's."""
    from cpr_ext.errors import CudaError

    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    counter = gpu.access_counter("t", 10)
    assert torch.zeros(1, device="cuda").get_device() == torch.cuda.current_device() == last
    said = ""
    try:  # more than any device has; a stager would take all that other layers need
        gpu.dirty_rows("t", 1 << 50)
    except CudaError as error:
        said = str(error)
    assert "out of memory" in said, said
    torch.ones(3, device="cuda").sum().item()
    with suppress(RuntimeError):
        torch.empty(1 << 50, device="cuda")
    counter.tracker.observe(torch.tensor([1], device="cuda:0"))
    assert counter.counts()[1] == 1


@of_pytorch
def checkpointer(gpu: Any) -> None:
    import cpr_ext

    def build() -> tuple[Any, Any]:
        model = torch.nn.EmbeddingBag(50_000, 16, mode="sum", sparse=True).cuda()
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1)

    model, optimizer = build()
    directory = Path(tempfile.mkdtemp()) / "s"
    torch.cuda.synchronize()
    schedule = cpr_ext.EverySteps(5)
    with cpr_ext.Checkpointer(model, optimizer, directory, schedule=schedule) as saving:
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randint(50_000, (512, 4)).cuda()).pow(2).sum().backward()
            optimizer.step()
            saving.step()
        saving.save("partial")
        saving.save("base")
        saving.wait()
        assert not saving.metrics.failures, saving.metrics.failures
        expected = model.weight.detach().cpu().clone()
    model, optimizer = build()
    with cpr_ext.Checkpointer(model, optimizer, directory) as saving:
        saving.recover()
    assert torch.equal(model.weight.detach().cpu(), expected)


def run_layer(name: str, emulated: bool) -> None:
    """In this process."""
    from python_tests.csrc import backends

    if not emulated:
        return LAYERS[name](backends.find("cuda"))
    from cpr_ext import _emulated
    from python_tests.strict_device import StrictBackend, strict

    with strict():
        LAYERS[name](StrictBackend("cuda", _emulated, 0))


def start_layer(name: str, options: argparse.Namespace) -> bool:
    """In a process of its own; prints its line. Returns whether it went well."""
    begin = time.monotonic()
    command = [*shlex.split(options.under), sys.executable, __file__, "--here", name]
    command += ["--emulated"] * options.emulated
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        said, is_good = done.stdout + done.stderr, done.returncode == 0
        is_good = is_good and options.expect in said
    except subprocess.TimeoutExpired as error:
        said, is_good = f"killed after {LIMIT_SECONDS} s: {error.stdout!r}", False
    lines = said.strip().splitlines()
    shown = " | ".join(lines[-1 if is_good else -6 :])[:900]
    state = "ok" if is_good else "FAILED"
    print(f"{state:<8}{name:<28}{time.monotonic() - begin:6.1f} s  {shown}", flush=True)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("layers", nargs="*", help=", ".join(LAYERS))
    parser.add_argument("--emulated", action="store_true", help="without a GPU")
    parser.add_argument("--under", default="", help="a command that runs each layer")
    parser.add_argument("--expect", default="", help="what each must print")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    if unknown := [name for name in options.layers if name not in LAYERS]:
        parser.error(f"no layer is called {', '.join(unknown)}; there are {', '.join(LAYERS)}")
    names = options.layers or [
        name for name in LAYERS if not (options.emulated and name in OF_PYTORCH)
    ]
    if options.here:
        for name in names:
            run_layer(name, options.emulated)
        return 0
    with ThreadPoolExecutor(1 if options.emulated else AT_ONCE) as pool:
        went_well = list(pool.map(lambda name: start_layer(name, options), names))
    failed = [name for name, good in zip(names, went_well, strict=True) if not good]
    print("failed:", ", ".join(failed) or "none", f"of {len(names)} layers")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
