"""The targets of the snapshot engine, as data, and how each is read out of the results.

    python bench/targets.py        prints the table, measured values beside the targets

Ratios hold on other machines, absolute times do not. What is measured at several sizes meets its
target only if the worst of them does. Where one does not, the limit is told: what the simplest code
for the stage reaches by the same measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peers import allowed_memory_bytes
from results import Results, Row
from training_overhead import RAW

Values = Mapping[str, float]
Read = Callable[[Results], Values]


def number(value: float) -> str:
    """About three digits, near 1 three decimals."""
    return f"{value:.3f}" if value < 2 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        sign: ``>=`` or ``<=``.
        unit: behind every value: "x", " ms".
        read: the measured values, by what they were measured on.
        limit: by the same names, what the simplest code reaches; None: it was not measured.
        beside: what others reach by the same measure.
    """

    stage: str
    measure: str
    sign: str
    bound: float
    unit: str
    read: Read
    limit: Read | None = None
    beside: Read | None = None

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.sign == ">=" else value <= self.bound

    def show(self, value: float) -> str:
        return f"{number(value)}{self.unit}"


@dataclass(frozen=True)
class Finding:
    """A line of the table as a reader sees it."""

    stage: str
    measure: str
    target: str
    measured: str
    verdict: str


# --- how values are read ---


def ratio(stage: str, other: str, label: Callable[[Row], str], **facts: Any) -> Read:
    """How many times faster ours is than ``other``, in pairs."""

    def read(results: Results) -> Values:
        rows = results.operations(stage, "ours", **facts)
        return {label(row): row["ratios"][other] for row in rows if other in row["ratios"]}

    return read


def between(stage: str, fast: str, slow: str, label: Callable[[Row], str]) -> Read:
    """How many times faster one contender, no one of ours, is than another."""

    def read(results: Results) -> Values:
        others = [*results.operations(stage, "peer"), *results.operations(stage, "bound")]
        seconds = {(row["group"], row["name"]): row["median_seconds"] for row in others}
        return {
            label(row): seconds[row["group"], slow] / row["median_seconds"]
            for row in others
            if row["name"] == fast and (row["group"], slow) in seconds
        }

    return read


def value(
    file: str, key: str, /, label: Callable[[Row], str] = lambda row: "", **facts: Any
) -> Read:
    """One number of each row of a file."""
    return lambda results: {label(row): row[key] for row in results.rows(file, **facts)}


def only(values: Iterable[float]) -> Values:
    """A value that needs no name, if it was measured."""
    return dict(zip(("",), values, strict=False))


def by_scores(row: Row) -> str:
    return f"{row['num_rows'] / 1e6:g} M {row['scores'].replace('_', ' ')}"


def by_rows(row: Row) -> str:
    return f"{row['row_bytes']} B {row['order']}"


def by_batch(row: Row) -> str:
    return f"batch {row['batch_size']}"


def growth(results: Results) -> Values:
    """Time per row with the most rows over that with the fewest, by kind of counts."""
    per_row: dict[str, dict[int, float]] = {}
    for row in results.operations("top", "ours", threads=2):
        of_kind = per_row.setdefault(row["scores"].replace("_", " "), {})
        of_kind[row["num_rows"]] = row["median_seconds"] / row["num_rows"]
    return {
        kind: times[max(times)] / times[min(times)]
        for kind, times in per_row.items()
        if len(times) > 1
    }


def one_shard(results: Results) -> Values:
    one = results.operations("recover", "ours", name="recover_one_shard_of_eight")
    all_ = results.operations("recover", "ours", name="recover_cpr_ext")
    pairs = zip(one, all_, strict=True)
    return only(row["median_seconds"] / whole["median_seconds"] for row, whole in pairs)


def pause_milliseconds(results: Results) -> Values:
    return only(1e3 * row["pause_seconds"] for row in results.rows("pause"))


def memory_share(results: Results) -> Values:
    rows = results.rows("peers", name="cpr_ext")
    return only(row["peak_memory_bytes"] / allowed_memory_bytes(row["num_rows"]) for row in rows)


def raw_speed(results: Results) -> Values:
    """Training beside a thread that only writes as many bytes, for every way of ours."""
    raw = results.rows("training_overhead", mode=RAW)
    return {mode: row["ratio_to_none"] for row in raw for mode in ("row",)}


def training_speed(*modes: str) -> Read:
    """Samples per second over training without saving, of these ways to save."""

    def read(results: Results) -> Values:
        rows = [row for mode in modes for row in results.rows("training_overhead", mode=mode)]
        return {row["mode"]: row["ratio_to_none"] for row in rows}

    return read


LOOP = "prefetching loop"
WRITES, DISK_WRITES = "raw direct writes of as many bytes", "raw direct writes of one block"
READS, DISK_READS = "raw direct reads into as many bytes", "raw direct reads into one block"
COUNTING = {"tracker": "AccessCounter", "threads": 2}
COUNTS = {"threads": 2, "is_counts": True}
STREAMING = "streaming loop"  # its stores go past the caches
MOVES = (("gather", "index_select(out=)", LOOP), ("scatter", "index_copy_", STREAMING))
SAVERS = ("torch.save", "safetensors", "torch.distributed.checkpoint.save")


def targets() -> Iterator[Target]:
    """The lines of the table, in its order."""

    def skew(row: Row) -> str:
        return str(row["skew"])

    yield Target(
        "count",
        "26 tables x 2048 lookups into 4 M rows, over `index_add_`",
        ">=",
        1.0,
        "x",
        ratio("count", "index_add", skew, **COUNTING),
        between("count", f"{LOOP}, unchecked", "index_add", skew),
    )
    yield Target(
        "count in training",
        "step with tracking over step without, DLRM `kaggle`",
        "<=",
        1.01,
        "x",
        value("tracking_overhead", "ratio", by_batch),
        value("tracking_overhead", "simple_ratio", by_batch),
    )
    for peer, bound in (("argpartition", 3.0), ("topk", 15.0)):
        yield Target(
            "select",
            f"top 12.5 % of counts, over `{peer}`",
            ">=",
            bound,
            "x",
            ratio("top", peer, by_scores, **COUNTS),
            between("top", "reading the scores once", peer, by_scores),
        )
    yield Target("select", "time per row, 40 M over 4 M rows", "<=", 1.25, "x", growth)
    for stage, peer, loop in MOVES:
        yield Target(
            stage,
            f"over `{peer}`",
            ">=",
            2.0,
            "x",
            ratio(stage, peer, by_rows),
            between(stage, STREAMING, peer, by_rows),
        )
        yield Target(stage, f"over a {loop}", ">=", 0.8, "x", ratio(stage, loop, by_rows))
        for slot_loop in (LOOP, STREAMING) if stage == "gather" else ():
            yield Target(
                "gather",
                f"slot by slot, each checksummed, over a {slot_loop}",
                ">=",
                0.8,
                "x",
                ratio("pack", slot_loop, by_rows),
            )
    yield Target(
        "write",
        "base snapshot of 2 GB, over raw direct writes of as many bytes",
        ">=",
        0.9,
        "x",
        ratio("save", WRITES, lambda row: ""),
    )
    yield Target(
        "write",
        "the same, over raw direct writes of one block",
        ">=",
        0.9,
        "x",
        ratio("save", DISK_WRITES, lambda row: ""),
        between("save", WRITES, DISK_WRITES, lambda row: ""),
    )
    for peer in SAVERS:
        yield Target(
            "write",
            f"the same, over {peer}",
            ">=",
            2.0,
            "x",
            ratio("save", peer, lambda row: ""),
            between("save", DISK_WRITES, peer, lambda row: ""),
        )
    row = "longest pause of `step()`, 2 GB, 12.5 % of the rows"
    yield Target("pause", row, "<=", 5.0, " ms", pause_milliseconds)
    yield Target(
        "pause",
        "the same, over what `dcp.async_save` blocks",
        "<=",
        0.05,
        "x",
        value("pause", "pause_over_async_save"),
    )
    yield Target(
        "training speed",
        "samples/s, a partial snapshot every 10 s, over none",
        ">=",
        0.97,
        "x",
        training_speed("row"),
        raw_speed,
        training_speed("dcp.async_save", "torch.save"),
    )
    yield Target(
        "read",
        "recover 2 GB, verified, over raw direct reads into as many bytes",
        ">=",
        0.9,
        "x",
        ratio("recover", READS, lambda row: "", name="recover_cpr_ext"),
    )
    yield Target(
        "read",
        "the same, over raw direct reads into one block",
        ">=",
        0.9,
        "x",
        ratio("recover", DISK_READS, lambda row: "", name="recover_cpr_ext"),
        between("recover", READS, DISK_READS, lambda row: ""),
    )
    yield Target("read", "one shard of eight, over all", "<=", 1 / 6, "x", one_shard)
    yield Target(
        "memory",
        "peak of a 2 GB base snapshot over slots + 7 B per row + 64 MB",
        "<=",
        1.0,
        "x",
        memory_share,
    )


# --- what a reader sees ---


def findings(results: Results) -> list[Finding]:
    return [finding(target, results) for target in targets()]


def finding(target: Target, results: Results) -> Finding:
    values = target.read(results)
    bound = {"<=": "at most", ">=": "at least"}[target.sign]
    measured = told(target, values) or "not measured"
    if values and target.beside is not None:
        measured += f"; for comparison {told(target, target.beside(results))}"
    return Finding(
        target.stage,
        target.measure,
        f"{bound} {target.bound:.3g}{target.unit}",
        measured,
        verdict(target, values, results),
    )


def told(target: Target, values: Values) -> str:
    """The values, the worst first; of many only the worst and the best."""
    found = sorted(values.items(), key=lambda item: item[1], reverse=target.sign == "<=")
    shown = [f"{target.show(each)} {label}".strip() for label, each in found]
    return f"{shown[0]} to {shown[-1]}" if len(shown) > 3 else ", ".join(shown)


def verdict(target: Target, values: Values, results: Results) -> str:
    if not values:
        return "-"
    missed = [label for label, each in values.items() if not target.holds(each)]
    if not missed:
        return "met"
    if len(missed) == len(values):
        text = "missed"
    else:
        which = ", ".join(missed) if len(missed) < 3 else f"{len(missed)} of {len(values)}"
        text = f"missed: {which}"
    limits = target.limit(results) if target.limit is not None else {}
    limit = told(target, {label: limits[label] for label in missed if label in limits})
    return f"{text}; limit {limit}" if limit else text


def print_table(found: list[Finding]) -> None:
    stage = None
    for line in found:
        if line.stage != stage:
            stage = line.stage
            print(f"\n{stage}")
        print(f"  {line.measure:<64}{line.target:<18}{line.measured}\n{'':<66}{line.verdict}")


if __name__ == "__main__":
    print_table(findings(Results()))
