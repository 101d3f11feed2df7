"""The picture of a segment's bytes in docs/snapshot_format.md is that of a segment written now."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

import cpr_ext

PAGE = Path(__file__).parents[2] / "docs/snapshot_format.md"
_DTYPES = {"I64": "<i8", "F32": "<f4"}


def test_the_picture_of_a_segment_is_that_of_one_written_now(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(8, 2, sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0)
    checkpointer = cpr_ext.Checkpointer(
        model, optimizer, tmp_path, num_shards=1, priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(10**9), store=cpr_ext.StoreOptions(None),
    )  # fmt: skip
    checkpointer.recover()
    for kind in ("base", "partial"):
        optimizer.zero_grad()
        model(torch.tensor([2, 5, 7])).sum().backward()
        optimizer.step()
        checkpointer.step(3)
        checkpointer.save(kind)
        checkpointer.wait()
    checkpointer.close()
    drawn = picture(max(tmp_path.glob("segments/*-partial.safetensors")).read_bytes())
    assert drawn in PAGE.read_text(), f"put this into {PAGE.name}:\n{drawn}"


def picture(data):
    """Return a line for each run of bytes."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    text = data[8 : 8 + size].rstrip(b" ")
    metadata = header.pop("__metadata__")
    fields = sorted(json.loads(metadata["cpr_ext"]))
    lines = [
        _line(0, 8, f"{data[:8].hex(' ')}", f"u64 {size}"),
        _line(8, len(text), '{"__metadata__":{...},...', "JSON text"),
        _line("", "", "", f"  __metadata__: {', '.join(sorted(metadata))}"),
        _line("", "", "", f"    cpr_ext: {', '.join(fields)}"),
        _line(8 + len(text), size - len(text), "20 20 20 ...", "spaces"),
    ]
    for name, array in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
        begin, end = (8 + size + offset for offset in array["data_offsets"])
        shown = data[begin : begin + 8].hex(" ") + (" ..." if end - begin > 8 else "")
        values = ""
        if array["dtype"] in _DTYPES:
            found = np.frombuffer(data[begin:end], _DTYPES[array["dtype"]])
            values = f" {array['dtype']}: " + " ".join(f"{value:.6g}" for value in found)
        lines.append(_line(begin, end - begin, shown, f"{name}{values}"))
    lines.append(_line(len(data), "", "", "end of the file"))
    return "\n".join(lines)


def _line(begin, size, shown, text):
    return f"{begin:>6} {size:>6}  {shown:<28} {text}".rstrip()
