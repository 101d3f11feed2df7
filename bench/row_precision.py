"""Bytes of partial snapshots in each precision, and what rounding costs next to a plain gather.

    python bench/row_precision.py [--tiny]

Bytes: the segment of a partial snapshot of 12.5 % of the rows, over that of a base in float32. Rows
have a row-wise Adagrad state of 4 bytes. The limit by arithmetic has neither header nor padding.
Times: on one thread, of rows in ascending order
spread over a table. FBGEMM's operators round the same rows, packed. Keeps
bench/results/row_precision.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from paired import Comparison, Contender, measure
from results import keep, parser_of
from torch import nn

import cpr_ext
from cpr_ext._native import native
from cpr_ext.state.precision import PRECISIONS, stored_row_bytes
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad

SHARE = 8  # one of so many rows is saved
STATE_BYTES, ID_BYTES = 4, 8
DIMS = (16, 64)


def saved_bytes(dim: int, precision: str, num_rows: int, folder: Path) -> tuple[int, int]:
    """Bytes of the segments of a float32 base and of a partial snapshot."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(num_rows, dim, sparse=True))
    optimizer = RowWiseAdagrad(model.parameters(), lr=0.1)
    chosen = torch.randperm(num_rows)[: num_rows // SHARE]
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        folder,
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(10**9),
        store=cpr_ext.StoreOptions(precision=cpr_ext.Precision(partial=precision)),
    ) as checkpointer:
        for kind, rows in (("base", chosen[:1]), ("partial", chosen)):
            optimizer.zero_grad()
            model(rows).square().sum().backward()
            optimizer.step()
            checkpointer.step()
            checkpointer.save(kind)
            checkpointer.wait()
        checkpointer.close(save=False)
        base, partial = checkpointer.store.manifest.rows[-2:]
        assert (base.kind, partial.kind) == ("base", "partial")
        return base.file_bytes, partial.file_bytes


def byte_rows(folder: Path, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """One row for each dim and precision."""
    for dim in DIMS:
        num_rows = 80_000 if tiny else 1 << 27 >> (dim.bit_length() + 2)
        for precision in PRECISIONS:
            base, partial = saved_bytes(dim, precision, num_rows, folder / f"{dim}-{precision}")
            row_bytes = stored_row_bytes(dim, precision) + STATE_BYTES + ID_BYTES
            limit = SHARE * (4 * dim + STATE_BYTES) / row_bytes
            yield {
                "group": "bytes",
                "dim": dim,
                "precision": precision,
                "num_rows": num_rows,
                "base_bytes": base,
                "partial_bytes": partial,
                "ratio": round(base / partial, 2),
                "limit_by_arithmetic": round(limit, 2),
            }


def comparisons(*, tiny: bool) -> Iterator[Comparison]:
    """Rounding while gathering, next to a plain gather; and of packed rows, next to FBGEMM."""
    num_chosen = 5_000 if tiny else 400_000
    for dim in DIMS:
        table = torch.randn(SHARE * num_chosen, dim)
        row_ids = torch.randperm(len(table))[:num_chosen].sort().values
        plain = torch.zeros(num_chosen, dim)
        for precision in PRECISIONS[1:]:
            stored = torch.zeros(num_chosen, stored_row_bytes(dim, precision), dtype=torch.uint8)
            yield Comparison(
                f"gather as {precision}, dim {dim}",
                [
                    Contender("round_rows", _rounding(table, row_ids, precision, stored)),
                    Contender(
                        "plain gather",
                        lambda row_ids=row_ids, plain=plain, table=table: native.gather_rows(
                            table, row_ids, plain
                        ),
                        "bound",
                    ),
                ],
                20,
                {"dim": dim, "precision": precision, "num_rows": num_chosen},
            )
            if (operator := fbgemm_operator(precision)) is None:
                continue
            packed = table[row_ids]
            yield Comparison(
                f"round packed rows to {precision}, dim {dim}",
                [
                    Contender("round_rows", _rounding(packed, None, precision, stored)),
                    Contender("FBGEMM", lambda op=operator, rows=packed: op(rows), "peer"),
                ],
                20,
                {"dim": dim, "precision": precision, "num_rows": num_chosen},
            )


def _rounding(
    table: torch.Tensor, row_ids: torch.Tensor | None, precision: str, stored: torch.Tensor
):
    return lambda: native.round_rows(table, row_ids, precision, stored)


def fbgemm_operator(precision: str):
    """FBGEMM's operator that rounds rows; None: it has none, or is not installed."""
    try:
        import fbgemm_gpu  # noqa: F401
    except ImportError:
        return None
    return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized if precision == "int8" else None


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = list(byte_rows(Path(folder), tiny=arguments.tiny))
    for row in rows:
        print(
            f"dim {row['dim']} {row['precision']:>8}: 1/{row['ratio']} of the base, "
            f"1/{row['limit_by_arithmetic']} by arithmetic"
        )
    for comparison in comparisons(tiny=arguments.tiny):
        for row in measure(comparison, tiny=arguments.tiny):
            rows.append(row)
            if row["role"] == "ours":
                print(f"{row['group']}: {row['ratios']} (above 1 is faster)")
    if not arguments.tiny:
        keep("row_precision", rows)


if __name__ == "__main__":
    main()
