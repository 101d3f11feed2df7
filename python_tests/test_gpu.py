"""The Checkpointer on a real GPU; what an emulated one cannot show is PyTorch's part in it.

``python -m python_tests.emulated_gpu python_tests/test_gpu.py`` runs those tests on the emulated
device that need no stream or graph of PyTorch's.
"""

import os

import pytest
import torch

import cpr_ext
from cpr_ext._native import native

pytestmark = pytest.mark.gpu
is_emulated = os.environ.get("CPR_EXT_GPU") == "emulated"
of_pytorch = pytest.mark.skipif(
    is_emulated, reason="PyTorch has no streams and no graphs on the emulated device"
)


@pytest.fixture(autouse=True)
def device():
    if not is_emulated:
        yield
        return
    from python_tests.emulated_gpu import OnHost

    with OnHost():
        yield


def build(device, num_rows=20_000, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.EmbeddingBag(num_rows, 16, mode="sum", sparse=True).to(device)
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(model, optimizer, checkpointer, steps, seed=1):
    """Trains; after each step, the table and its state as they are then."""
    random = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(steps):
        indices = torch.randint(model.num_embeddings, (512, 4), generator=random)
        optimizer.zero_grad()
        model(indices.to(model.weight.device)).pow(2).sum().backward()
        optimizer.step()
        checkpointer.step()
        seen.append(state_of(model, optimizer))
    return seen


def state_of(model, optimizer):
    state = optimizer.state[model.weight]["sum"]
    return model.weight.detach().cpu().clone(), state.detach().cpu().clone()


def restore(directory, device, **options):
    model, optimizer = build(device, seed=99)
    with cpr_ext.Checkpointer(model, optimizer, directory, **options) as checkpointer:
        report = checkpointer.recover()
    return report, state_of(model, optimizer)


PRIORITIES = [
    cpr_ext.MostFrequentlyUsed(0.2),
    cpr_ext.SubSampledUsed(0.2),
    cpr_ext.LargestChange(0.2),
    cpr_ext.AllRows(),
]


@pytest.mark.parametrize("priority", [None, *PRIORITIES], ids=lambda each: type(each).__name__)
def test_every_row_saved_is_as_it_was_at_one_step(tmp_path, priority):
    model, optimizer = build("cuda")
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        tmp_path / "s",
        schedule=cpr_ext.EverySteps(5),
        staging=cpr_ext.StagingOptions(slot_bytes=8 << 20 if priority else 128 << 10),
        **({"priority": priority} if priority else {}),
    ) as checkpointer:
        seen = train(model, optimizer, checkpointer, 40)
        checkpointer.wait()
        assert checkpointer.metrics.failures == []
    _, (weight, state) = restore(tmp_path / "s", "cpu")
    found = torch.zeros(len(weight), dtype=torch.bool)
    for old_weight, old_state in seen:
        found |= (weight == old_weight).all(1) & (state == old_state).all(1)
    assert found.all(), "a row is of no step, or its weight and its state are of different ones"


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_snapshot_restores_bit_for_bit_wherever_it_was_taken(tmp_path, first, second):
    model, optimizer = build(first)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "s") as checkpointer:
        train(model, optimizer, checkpointer, 5)
        checkpointer.save("base")
        expected = state_of(model, optimizer)
        checkpointer.wait()
    report, (weight, state) = restore(tmp_path / "s", second)
    assert report.step == 5
    assert torch.equal(weight, expected[0])
    assert torch.equal(state, expected[1])


def test_lost_shards_come_back_on_the_gpu_and_others_stay(tmp_path):
    model, optimizer = build("cuda")
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "s", num_shards=8) as checkpointer:
        train(model, optimizer, checkpointer, 5)
        checkpointer.save("base")
        checkpointer.wait()
        before = state_of(model, optimizer)
        with torch.no_grad():
            model.weight[2500:5000] = 7.0
        assert checkpointer.recover(shards=[1]).rows_restored == 2500
        after = state_of(model, optimizer)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@of_pytorch
def test_training_on_a_stream_of_its_own_is_followed(tmp_path):
    model, optimizer = build("cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        with cpr_ext.Checkpointer(model, optimizer, tmp_path / "s") as checkpointer:
            train(model, optimizer, checkpointer, 20)
            checkpointer.save("base")
            expected = state_of(model, optimizer)
            checkpointer.wait()
    _, (weight, _) = restore(tmp_path / "s", "cuda")
    assert torch.equal(weight, expected[0])


def count_by_a_graph(tracker, indices, replays):
    """Observe, then capture that in a graph and launch it."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        native.use_stream(0, side.cuda_stream)
        tracker.observe(indices)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            tracker.observe(indices)
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    native.use_stream(0, 0)


@of_pytorch
def test_counting_and_sampling_can_be_captured_in_a_graph():
    counter = native.DeviceAccessCounter(name="t", num_rows=1000, device=0)
    count_by_a_graph(counter, torch.arange(0, 1000, 2, device="cuda"), 3)
    assert counter.counts()[::2].tolist() == [4] * 500
    assert counter.counts()[1::2].sum() == 0
    sampler = native.DeviceRowSampler(name="t", num_rows=10, capacity=10, period=4, device=0)
    # 1 to 3: none is sampled; by the graph 4 to 9: row 0 at 4, row 1 at 8
    count_by_a_graph(sampler, torch.arange(3, device="cuda"), 2)
    assert sampler.num_sampled == 2
    assert sampler.select(0, 10, 2).tolist() == [0, 1]


def assert_recovers(other, directory, expected):
    """A fresh model gets these parameters from a store."""
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(other, optimizer, directory) as checkpointer:
        checkpointer.recover()
    for parameter, value in zip(other.parameters(), expected, strict=True):
        assert torch.equal(parameter.detach().cpu(), value)


def test_tables_on_the_cpu_and_on_the_gpu_share_a_checkpointer(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.here = torch.nn.Embedding(5000, 8, sparse=True)
            self.there = torch.nn.Embedding(5000, 8, sparse=True, device="cuda")

        def forward(self, indices):
            return self.here(indices).sum() + self.there(indices.cuda()).sum().cpu()

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "s") as checkpointer:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.arange(step, 100 + step)).backward()
            optimizer.step()
            checkpointer.step()
        checkpointer.save("base")
        expected = [p.detach().cpu().clone() for p in model.parameters()]
        checkpointer.wait()
    assert_recovers(Two(), tmp_path / "s", expected)


class Compiled(torch.nn.Module):
    """Of two tables a compiler puts one into its graphs: it knows no sparse gradients."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.bag = torch.nn.EmbeddingBag(20_000, 16, mode="sum", sparse=True)
        self.inner = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(5000, 16), "layer": torch.nn.Linear(16, 1)}
        )

    def forward(self, indices):
        return self.top(self.bag(indices), indices % 5000)

    def top(self, pooled, indices):
        return self.inner["layer"](pooled + self.inner["table"](indices).sum(1)).pow(2).mean()


@pytest.fixture
def recorded(monkeypatch):
    """A list that grows with each CUDA graph that torch.compile records."""
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    graphs, init = [], CUDAGraphNode.__init__

    def note(self, *args, **options):
        graphs.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(CUDAGraphNode, "__init__", note)
    return graphs


def test_rows_count_where_a_compiler_makes_cuda_graphs_of_the_model(tmp_path, recorded):
    """Graphs of forward and backward alone: the hooks of the optimizer's step run each time."""
    model = Compiled(0).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.top = torch.compile(model.top, mode="reduce-overhead")
    random = torch.Generator().manual_seed(1)
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        tmp_path / "s",
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(10**6),
    ) as checkpointer:
        assert len(checkpointer.tables) == 2
        for step in range(12):
            indices = torch.randint(20_000, (64, 4), generator=random).to("cuda")
            optimizer.zero_grad()
            model(indices).backward()
            optimizer.step()
            checkpointer.step()
            if step == 5:
                checkpointer.save("base")
                checkpointer.wait()
        saved = checkpointer.save("partial")
        checkpointer.wait()
        assert checkpointer.store.manifest.dense[-1].is_complete
        assert saved.file_bytes < 20_000 * 64, "all rows were saved, not those that changed"
        expected = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    if not is_emulated:
        assert len(recorded) >= 2, "the compiler made no CUDA graphs of forward and backward"
    assert_recovers(Compiled(9).to("cuda"), tmp_path / "s", expected)


@of_pytorch
def test_a_graph_of_the_whole_step_counts_its_rows_at_every_replay(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(2000, 16, mode="sum", sparse=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    indices = torch.arange(8, device="cuda").reshape(2, 4)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(side),
        cpr_ext.Checkpointer(
            model, optimizer, tmp_path / "s", priority=cpr_ext.AllRows()
        ) as checkpointer,
    ):

        def step():
            optimizer.zero_grad()
            model(indices).pow(2).sum().backward()
            optimizer.step()

        step()
        checkpointer.step()
        checkpointer.save("base")
        checkpointer.wait()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            step()
            with pytest.raises(cpr_ext.UsageError, match="while a CUDA graph is captured"):
                checkpointer.step()
        for first in (100, 200):
            indices.copy_(torch.arange(first, first + 8).reshape(2, 4))
            graph.replay()
            checkpointer.step()
        checkpointer.save("partial")
        checkpointer.wait()
        assert not checkpointer.store.manifest.dense[-1].is_complete
        expected = model.weight.detach().cpu().clone()
    other = torch.nn.EmbeddingBag(2000, 16, mode="sum", sparse=True)
    assert_recovers(other, tmp_path / "s", [expected])
