"""Write docs/benchmarks.md and its charts from the results in bench/results/, print the targets.

python bench/page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import charts
from peers import allowed_memory_bytes
from results import Results, Row
from targets import findings, print_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
HEAD = (
    "# Benchmarks\n\n"
    "Written by `python bench/page.py` from [bench/results/](../bench/results/); `make bench` "
    "measures anew. Everything is measured in\nrounds that run each contender once; a ratio is the "
    "median of the rounds' ratios. Ratios hold on machines like this one, absolute\ntimes nowhere "
    "else. `python bench/compare.py` tells what got slower than results of before.\n"
)
TAIL = (
    "What is left after a kill or a flipped bit: [reliability.md](reliability.md). How exact the "
    "planner is: [paper_map.md](paper_map.md).\n"
)


def main() -> None:
    results = Results()
    sections = (targets, training, tracking, pauses, peers, scaling, operations)
    lines = [HEAD, *(line for section in sections for line in section(results)), TAIL]
    PAGE.write_text("\n".join(lines))
    print_table(findings(results))
    print(f"\nwrote {PAGE.relative_to(ROOT)}")


def machine_line(machine: Row) -> str:
    changed = ", with uncommitted changes" if machine["uncommitted_changes"] else ""
    return (
        f"{machine['date'][:10]}, commit {machine['commit']}{changed}, {machine['cores']} cores "
        f"({machine['cpu']}), torch {machine['torch']}, load average at the end "
        f"{machine['load_average_1min']:.1f}."
    )


def targets(results: Results) -> Iterator[str]:
    """Measured values beside the targets."""
    yield "## Targets\n"
    yield "| stage | measure | target | measured | |"
    yield "|---|---|---|---|---|"
    for line in findings(results):
        yield (
            f"| {line.stage} | {line.measure} | {line.target} | {line.measured} | {line.verdict} |"
        )
    yield (
        "\nOf values at several sizes the worst comes first, and it is the worst that has to meet "
        "the target. *Limit*: what the simplest code\nfor the stage reaches by the same measure, "
        "in the same rounds: a prefetching loop without checks, one pass over the scores, raw "
        "direct\nwrites, a thread that only writes.\n"
    )
    charts.ratios(results, IMAGES / "targets.png")
    yield "![Ratios to peers and bounds, with their targets](images/targets.png)\n"


def training(results: Results) -> Iterator[str]:
    """What saving costs training."""
    if (found := results.file("training_overhead")) is None:
        return
    settings, rows = found["settings"], found["rows"]
    yield "## What saving costs training\n"
    yield (
        f"DLRM with the table sizes of Criteo Kaggle (33.8 M rows, 2.3 GB with the optimizer's "
        f"state), batch {settings['batch_size']}. Stretches of {settings['every']:g} s\nthat begin "
        "with a save and end when it is durable take turns with stretches without saving; `ratio` "
        "is the speed of one over that of its\ntwo neighbours, the median and all of them. The "
        "longest pause is that of `step()` with the optimizer's hooks, or of the peer's call;\n"
        "memory, the rise over training's. What a peer leaves to the page cache is written after "
        "its stretch, and not held against it.\n"
    )
    yield "| way | samples/s | without | ratio | of each round | longest pause | memory |"
    yield "|---|---:|---:|---:|---|---:|---:|"
    for row in rows:
        rounds = ", ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        yield (
            f"| {row['what']} | {row['samples_per_second']:,} | "
            f"{row['samples_per_second_without']:,} | {row['ratio_to_none']:.3f} | {rounds} | "
            f"{1e3 * row['longest_pause_seconds']:.1f} ms | "
            f"{row['peak_memory_over_training_bytes'] / 1e6:.0f} MB |"
        )
    yield f"\n{machine_line(found['machine'])}\n"
    charts.training(rows, IMAGES / "training_overhead.png")
    yield "![Speed and longest pause of each way to save](images/training_overhead.png)\n"


def tracking(results: Results) -> Iterator[str]:
    """What counting costs a step."""
    if (found := results.file("tracking_overhead")) is None:
        return
    yield "## What counting costs a step\n"
    yield (
        "The same model; blocks of steps under a `Checkpointer` that saves nothing take turns with "
        "blocks that have no hooks.\n"
    )
    yield "| batch | with | without | ratio | middle half of the pairs | pairs |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for row in found["rows"]:
        yield (
            f"| {row['batch_size']} | {1e3 * row['step_seconds_with']:.2f} ms | "
            f"{1e3 * row['step_seconds_without']:.2f} ms | {row['ratio']:.4f} | "
            f"{row['ratio_iqr']:.4f} wide | {row['pairs']} |"
        )
    yield f"\n{machine_line(found['machine'])}\n"


def pauses(results: Results) -> Iterator[str]:
    """How long a step is held."""
    if (found := results.file("pause")) is None:
        return
    yield "## How long a snapshot holds training\n"
    yield (
        "The same model, default options, a partial snapshot of 12.5 % of every table; medians of "
        "the longest pause of each snapshot.\n"
    )
    yield (
        "| consistency | longest pause | of each snapshot | gather of as many rows | "
        "`dcp.async_save` blocks | snapshot |"
    )
    yield "|---|---:|---|---:|---:|---:|"
    for row in found["rows"]:
        each = ", ".join(f"{1e3 * pause:.1f}" for pause in row["pause_seconds_of_each_round"])
        yield (
            f"| {row['consistency']} | {1e3 * row['pause_seconds']:.2f} ms | {each} ms | "
            f"{1e3 * row['gather_seconds']:.1f} ms | {1e3 * row['async_save_seconds']:.0f} ms | "
            f"{row['snapshot_bytes'] / 1e6:.0f} MB |"
        )
    yield f"\n{machine_line(found['machine'])}\n"


def peers(results: Results) -> Iterator[str]:
    """One save of everything, by each saver."""
    if (found := results.file("peers")) is None:
        return
    rows = found["rows"]
    allowed = allowed_memory_bytes(rows[0]["num_rows"]) / 1e6
    yield "## Saving everything once\n"
    yield (
        f"A first (base) snapshot of the same model, {rows[0]['model_bytes'] / 1e9:.1f} GB, by "
        "each saver as its documentation recommends, behind training where it can. *Held*: the "
        "time\nthat training stood still in all. Durable: synced, by the benchmark where the "
        "library does not. Memory: the rise of resident memory over training's; ours\nmay take "
        f"the slots, 5 bytes per row and 64 MB: {allowed:.0f} MB.\n"
    )
    yield "| saver | held | longest pause | durable after | memory | on disk |"
    yield "|---|---:|---:|---:|---:|---:|"
    for row in rows:
        yield (
            f"| {row['name']} | {row['held_seconds']:.3f} s | "
            f"{1e3 * row['longest_pause_seconds']:.1f} ms | {row['durable_seconds']:.2f} s | "
            f"{row['peak_memory_bytes'] / 1e6:.0f} MB | {row['bytes_on_disk'] / 1e6:.0f} MB |"
        )
    yield f"\n{machine_line(found['machine'])}\n"
    charts.peers(rows, IMAGES / "peers.png")
    yield "![Time held, time until durable and memory of each saver](images/peers.png)\n"


def scaling(results: Results) -> Iterator[str]:
    """How costs grow."""
    if (found := results.file("scaling")) is None:
        return
    yield "## How costs grow\n"
    yield (
        "One table, around 4 M rows of 64 bytes of which an eighth is saved; one size at a time is "
        "changed. Counting is of 53,248 lookups.\n"
    )
    charts.scaling(found["rows"], IMAGES / "scaling.png")
    yield "![Cost of each stage against rows, bytes of a row and fraction](images/scaling.png)\n"
    yield f"{machine_line(found['machine'])}\n"


def operations(results: Results) -> Iterator[str]:
    """Each operation beside its peers and bounds."""
    found: list[dict[str, Any]] = results.rows("operations")
    if not found:
        return
    yield "## Operations\n"
    for group in sorted({row["group"] for row in found}):
        yield f"### {group[0].upper()}{group[1:]}\n"
        yield "| | median | spread (IQR) | rounds | |"
        yield "|---|---:|---:|---:|---|"
        rows = [row for row in found if row["group"] == group]
        for row in sorted(rows, key=lambda row: row["median_seconds"]):
            ratio = row.get("ratio_to_fastest_peer")
            text = row["role"] if ratio is None else f"{ratio:.2f}x the fastest peer"
            yield (
                f"| {row['name']} | {1e3 * row['median_seconds']:.3f} ms | "
                f"{1e3 * row['iqr_seconds']:.3f} ms | {row['rounds']} | {text} |"
            )
        yield ""
    yield from (f"{line}\n" for line in sorted({machine_line(row["machine"]) for row in found}))


if __name__ == "__main__":
    main()
