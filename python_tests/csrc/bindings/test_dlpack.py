"""Index tensors and gradients read by DLPack's exchange API, and by attributes: the same."""

import gc
import sys

import numpy as np
import pytest
import torch

from cpr_ext import _C
from cpr_ext.errors import UsageError
from python_tests.csrc.backends import find

ROWS = 40
HAS_API = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.fixture(params=[True, False], ids=["dlpack", "attributes"])
def dlpack(request):
    assert _C.use_dlpack(request.param) == (request.param and HAS_API)
    yield request.param
    _C.use_dlpack(True)


class Sub(torch.Tensor):
    pass


def counted(indices):
    counter = _C.AccessCounter(name="t", num_rows=ROWS)
    _C.count_lookups([counter], [indices])
    return counter.counts().tolist()


def expected(indices):
    values = np.asarray(indices.detach().as_subclass(torch.Tensor)).reshape(-1)
    return np.bincount(values, minlength=ROWS).tolist()


BASE = torch.arange(24) % 11
READABLE = {
    "int64": BASE,
    "int32": BASE.int(),
    "slice": BASE[5:9],
    "int32 slice": BASE.int()[3:],
    "matrix": BASE.view(4, 6),
    "dimensions of one": BASE.view(1, 24, 1).transpose(0, 2),
    "scalar": torch.tensor(7),
    "empty": BASE[:0],
    "empty matrix with strides": BASE.view(4, 6)[:, :0].t(),
    "row of a transposed matrix": BASE.view(4, 6)[2],
    "subclass": BASE.as_subclass(Sub),
    "int32 subclass": BASE.int().as_subclass(Sub),
    "frozen parameter": torch.nn.Parameter(BASE.clone(), requires_grad=False),
    "inference": torch.inference_mode()(lambda: BASE.clone())(),
}


def test_indices_are_read_alike(dlpack):
    for name, indices in READABLE.items():
        assert counted(indices) == expected(indices), name


UNREADABLE = {
    "strided": (BASE[::2], "not contiguous"),
    "transposed": (BASE.view(4, 6).t(), "not contiguous"),
    "expanded": (torch.tensor([1]).expand(3), "not contiguous"),
    "float": (torch.zeros(3), "torch.float32"),
    "float that requires a gradient": (torch.zeros(3, requires_grad=True), "torch.float32"),
    "parameter": (torch.nn.Parameter(torch.zeros(3)), "torch.float32"),
    "bool": (BASE > 3, "torch.bool"),
    "uint8": (BASE.byte(), "torch.uint8"),
    "int16": (BASE.short(), "torch.int16"),
    "complex": (torch.zeros(3, dtype=torch.cfloat).conj(), "torch.complex64"),
    "meta": (torch.zeros(3, dtype=torch.int64, device="meta"), "device 'meta'"),
    "sparse": (BASE.to_sparse(), "sparse"),
    "number": (3, "are a int"),
    "list": ([1, 2], "are a list"),
}


def test_other_indices_are_refused_in_the_same_words(dlpack):
    for indices, fault in UNREADABLE.values():
        with pytest.raises(UsageError, match=f"'t'.*{fault}"):
            counted(indices)


def test_tensors_without_memory_of_their_own_are_refused(dlpack):
    with pytest.raises((UsageError, RuntimeError)):
        torch.vmap(lambda ids: counted(ids) and ids)(BASE.view(4, 6))


def gradient_of(row_ids, *, num_values=2):
    parameter = torch.nn.Parameter(torch.zeros(ROWS, num_values))
    values = torch.ones(row_ids.numel(), num_values)
    parameter.grad = torch.sparse_coo_tensor(row_ids.view(1, -1), values, parameter.shape)
    return parameter


@pytest.mark.parametrize("row_ids", [BASE, BASE[:0], BASE[4:5], BASE.flip(0)])
def test_gradients_are_read_alike(dlpack, row_ids):
    parameter = gradient_of(row_ids)
    tracker = _C.AccessCounter(name="t", num_rows=ROWS)
    counter = _C.RowCounter([parameter], [[tracker]])
    assert counter.count_gradients([0]) == (row_ids.numel(), [0], [])
    assert tracker.counts().tolist() == expected(row_ids)


@pytest.mark.emulated
def test_gradients_on_a_device_are_counted_there_and_those_elsewhere_are_left(dlpack):
    emulated = find("emulated").native
    on_device = emulated.DeviceAccessCounter(name="t", num_rows=ROWS, device=0)
    on_host = emulated.AccessCounter(name="u", num_rows=ROWS)
    weights = [gradient_of(BASE), gradient_of(BASE), torch.nn.Parameter(torch.zeros(ROWS, 2))]
    weights[2].grad = torch.zeros(ROWS, 2)
    emulated.use_dlpack(dlpack)
    counter = emulated.RowCounter(weights, [[on_device], [on_host], [on_device]])
    assert counter.count_gradients([0, 2]) == (0, [0, 2], [0, 2])  # none may be kept
    kept: list[torch.Tensor] = []
    assert counter.count_gradients([0, 1, 2], kept) == (2 * BASE.numel(), [0, 1, 2], [2])
    assert [tensor.data_ptr() for tensor in kept] == [weights[0].grad._indices().data_ptr()]
    assert on_device.counts().tolist() == on_host.counts().tolist() == expected(BASE)


def test_reading_keeps_nothing_alive_and_leaks_nothing(dlpack):
    tracker = _C.AccessCounter(name="t", num_rows=ROWS)
    parameter = gradient_of(BASE)
    counter = _C.RowCounter([parameter], [[tracker]])
    gradient, kinds = parameter.grad, [BASE, BASE.int(), BASE.as_subclass(Sub)]
    refused = [BASE[::2], BASE.to_sparse()]
    watched = [gradient, parameter, *kinds, *refused, torch.Tensor]

    def use(times):
        for _ in range(times):
            counter.count_gradients([0])
            for indices in kinds:
                _C.count_lookups([tracker], [indices])
        for _ in range(times // 5):
            for indices in refused:
                with pytest.raises(UsageError):
                    tracker.observe(indices)

    use(10)
    gc.collect()
    counts = [sys.getrefcount(each) for each in watched]
    tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    use(1000)
    gc.collect()
    # A leak is one of each call; a few objects of other tests may come or go.
    assert sum(isinstance(each, torch.Tensor) for each in gc.get_objects()) < tensors + 100
    for each, count in zip(watched, counts, strict=True):
        assert sys.getrefcount(each) < count + 100
