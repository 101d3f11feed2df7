"""Fingerprints of values: enough to say whether, and in which row, two of them differ.

Bits are compared, so NaN equals itself and 0.0 differs from -0.0.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_BLOCK_BYTES = 4 << 20
_TEXT = 200  # the longest text that is kept as it is
_LONG = 32  # a list of more plain values is one value

GENERATOR = "random number generator"

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Print:
    """What is kept of one value.

    Attributes:
        form: dtype, shape and strides of a tensor, or the type's name.
        text: of a plain value; of a longer one a digest.
        rows: of a tensor, a hash of each row, that is, of each index of its first dimension.
        owner: of a variable, the kind and the path of the object that has it.
    """

    form: str
    text: str = ""
    rows: Hashes | None = None
    owner: str = ""

    def difference(self, other: Print) -> str | None:
        """Say how ``other`` differs from this value, which it should equal; None: it does not."""
        if self.form != other.form:
            return f"it is {other.form}, and was {self.form}"
        if self.form == GENERATOR:
            return None if self.text == other.text else f"a {GENERATOR} in another state"
        if self.rows is None or other.rows is None:
            if self.text == other.text:
                return None
            return f"it is {other.text}, and was {self.text}" if self.text else "it differs"
        differing = np.flatnonzero(self.rows != other.rows)
        if not len(differing):
            return None
        if len(self.rows) == 1:
            return "its value differs"
        return f"{len(differing)} of {len(self.rows)} rows differ, the first is row {differing[0]}"


def print_of(value: Any) -> Print | None:
    """Return the fingerprint of a tensor, array, generator or plain value; None: of another."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        try:
            return _of_tensor(torch.from_numpy(np.ascontiguousarray(value)))
        except TypeError:  # an array of another type
            return _of_text(type(value).__name__, repr(value))
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return _of_text(type(value).__name__, repr(value))
    if isinstance(value, torch.Generator):
        return _of_text(GENERATOR, repr(value.get_state().tolist()), digest=True)
    if isinstance(value, np.random.Generator):
        return _of_text(GENERATOR, repr(value.bit_generator.state), digest=True)
    if isinstance(value, np.random.RandomState):
        return _of_text(GENERATOR, repr(_plain_state(value)), digest=True)
    if isinstance(value, random.Random):
        return _of_text(GENERATOR, repr(value.getstate()), digest=True)
    return None


def _plain_state(generator: np.random.RandomState) -> list[Any]:
    state: Any = generator.get_state(legacy=True)
    return [state[1].tolist(), *state[2:]]


def leaves(path: str, value: Any) -> Iterator[tuple[str, Print]]:
    """Yield the values of a tree of dicts, lists and tuples; others are passed over."""
    found = print_of(value)
    if found is not None:
        yield path, found
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        if len(value) > _LONG and all(isinstance(v, bool | int | float | str) for v in value):
            yield path, _of_text(type(value).__name__, repr(value), digest=True)
            return
        for index, item in enumerate(value):
            yield from leaves(f"{path}[{index}]", item)


def _of_text(form: str, text: str, *, digest: bool = False) -> Print:
    if digest or len(text) > _TEXT:
        text = f"a value of digest {hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    return Print(form, text)


def _of_tensor(tensor: torch.Tensor) -> Print | None:
    try:
        plain = tensor.detach()
        form = f"{plain.dtype} {tuple(plain.shape)}".replace("torch.", "")
        if plain.layout is torch.strided and not plain.is_contiguous():
            form += f" with strides {plain.stride()}"
        if plain.layout is not torch.strided:
            form, plain = f"sparse {form}", plain.to_dense()
        return Print(form, "", _row_hashes(plain.cpu().resolve_conj().resolve_neg()))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None  # a tensor that other processes hold parts of, or without data


def _row_hashes(tensor: torch.Tensor) -> Hashes:
    """Return a hash of each row's bytes; two rows that differ in four bytes never have the same."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    num_rows = tensor.shape[0]
    if tensor.numel() == 0:
        return np.zeros(num_rows, np.uint64)
    rows = tensor.contiguous().reshape(num_rows, -1).view(torch.uint8).numpy()
    width = rows.shape[1]
    words = rows.view(np.uint32) if width % 4 == 0 else rows
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * 2 + 1
    block = max(1, _BLOCK_BYTES // width)
    return np.concatenate(
        [
            (words[first : first + block].astype(np.uint64) * weights).sum(1, np.uint64)
            for first in range(0, num_rows, block)
        ]
    )


def write_prints(path: Path, prints: Mapping[str, Print]) -> None:
    """Write fingerprints to a file; it is there as a whole, or not at all."""
    names = list(prints)
    arrays = {
        str(i): p.rows for i, name in enumerate(names) if (p := prints[name]).rows is not None
    }
    index = [[n, (p := prints[n]).form, p.text, p.owner] for n in names]
    partial = path.with_suffix(".partial.npz")
    text = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez(partial, index=text, **arrays)  # type: ignore[arg-type]
    partial.rename(path)


def read_prints(path: Path) -> dict[str, Print]:
    """Return what :func:`write_prints` wrote."""
    with np.load(path, allow_pickle=False) as file:
        index = json.loads(file["index"].tobytes())
        return {
            name: Print(form, text, file.get(str(number)), owner)
            for number, (name, form, text, owner) in enumerate(index)
        }
