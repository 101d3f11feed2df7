"""The dtypes that a store can hold, by the names that safetensors gives them."""

from __future__ import annotations

import torch

# safetensors' name of each torch dtype that can be stored.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def list_dtypes() -> str:
    """Return the dtypes that can be stored, for a message."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
