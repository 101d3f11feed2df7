"""What docs/precision.md and docs/paper_map.md say of measurements, made from the kept results."""

from __future__ import annotations

import json

from precision_accuracy import PRECISIONS
from precision_seeds import RESULTS
from results import Row

DATA = {"synthetic": "synthetic", "movietweetings": "MovieTweetings"}
PAGE_TOOL = "bench/precision_page.py"


def with_part(text: str, name: str, part: str) -> str:
    """Return a page with another text between the marks of a part: lines, or in a line."""
    first, last = (f"<!-- {at} of {name}: {PAGE_TOOL} -->" for at in ("begin", "end"))
    before, _, rest = text.partition(first)
    _, found, after = rest.partition(last)
    assert found, f"{name} has no place in the page"
    gap = "\n" if rest.startswith("\n") else ""
    return f"{before}{first}{gap}{part}{gap}{last}{after}"


def accuracy_table() -> str:
    """Return what rounding costs at equal saves, and what it gains at equal bytes."""
    lines = [
        "| data | float32 saves every | precision | same saves, 10⁻³ | same bytes, saves every "
        "| same bytes, 10⁻³ |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, label in DATA.items():
        summary = kept("accuracy", name)["summary"]
        steps = kept("accuracy", name)["runs"][0]["steps"]
        for row in summary:
            if row["same"] != "saves" or row["precision"] == "float32":
                continue
            same = {"share": row["share"], "precision": row["precision"], "same": "bytes"}
            other = next(each for each in summary if same.items() <= each.items())
            lines.append(
                f"| {label} | {100 * row['share']:g} % | {row['precision']} "
                f"| {signed(row['auc_above_float32'], 3)} "
                f"| {100 * other['every_steps'] / steps:.1f} % "
                f"| {signed(other['auc_above_float32'], 2)} |"
            )
    return "\n".join(lines)


def restores_table() -> str:
    """Return what many restores cost, by data."""
    losses = {
        (name, row["precision"], row["restores"]): signed(row["auc_loss"], 2)
        for name in DATA
        for row in kept("restores", name)["summary"]
    }
    arms = list(dict.fromkeys((precision, restores) for _, precision, restores in losses))
    seeds = {name: len(kept("restores", name)["runs"]) for name in DATA}
    head = [f"{label}, {seeds[name]} seeds" for name, label in DATA.items()]
    lines = [f"| precision | restores of each row | {' | '.join(head)} |", "|---|---:|---:|---:|"]
    for precision, restores in arms:
        found = [losses[name, precision, restores] for name in DATA]
        lines.append(f"| {precision} | {restores} | {' | '.join(found)} |")
    return "\n".join(lines)


def time_table() -> str:
    """Return what rounding while gathering costs, and how fast it is beside FBGEMM."""
    rows = json.loads((RESULTS / "row_precision.json").read_text())["rows"]

    def ratio(group: str, precision: str, dim: int) -> float | None:
        for row in rows:
            if row["group"] == f"{group} {precision}, dim {dim}" and "ratios" in row:
                return float(next(iter(row["ratios"].values())))
        return None

    dims = sorted({row["dim"] for row in rows})
    heads = ("gather", "FBGEMM's time over ours")
    others = [f"dim {dim}" for dim in dims[1:]]
    titles = [title for head in heads for title in (f"{head}, dim {dims[0]}", *others)]
    lines = [f"| | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
    for precision in PRECISIONS[1:]:
        cells = [f"{1 / value:.2f}x" for dim in dims
                 if (value := ratio("gather as", precision, dim)) is not None]  # fmt: skip
        for dim in dims:
            value = ratio("round packed rows to", precision, dim)
            cells.append("-" if value is None else f"{value:.2f}")
        lines.append(f"| {precision} | {' | '.join(cells)} |")
    return "\n".join(lines)


def restores_claim() -> str:
    """Return what 20 restores in int4 cost, in a sentence."""
    found = []
    for name, label in DATA.items():
        results = kept("restores", name)
        for row in results["summary"]:
            if (row["precision"], row["restores"]) == ("int4", 20):
                seeds = len(results["runs"])
                found.append(f"{row['auc_loss_percent']:.3f} % ({label}, {seeds} seeds)")
    return f"20 restores of every row in int4 lose {' and '.join(found)} of the AUC"


PARTS = {
    "precision.md": {"accuracy": accuracy_table, "restores": restores_table, "time": time_table},
    "paper_map.md": {"restores": restores_claim},
}


def signed(estimate_: Row, digits: int) -> str:
    """Return a mean and its interval, in thousandths; a true minus, no negative zero."""
    mean, low, high = (
        f"{round(1e3 * estimate_[name], digits) + 0.0:.{digits}f}".replace("-", "\N{MINUS SIGN}")
        for name in ("mean", "low", "high")
    )
    return f"{mean} [{low}, {high}]"


def kept(what: str, data: str) -> Row:
    """Return a result file."""
    found: Row = json.loads((RESULTS / f"precision_{what}_{data}.json").read_text())
    return found
