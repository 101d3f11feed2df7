"""Write docs/benchmarks.md and its charts from the results in bench/results/, print the targets.

python bench/page.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import charts
from peers import allowed_memory_bytes
from results import Results, Row, standing
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
    sections = (targets, training, tracking, pauses, peers, scaling, gpu, operations)
    lines = [HEAD, *(line for section in sections for line in section(results)), TAIL]
    PAGE.write_text("\n".join(lines))
    print_table(findings(results))
    print(f"\nwrote {PAGE.relative_to(ROOT)}")


def table(head: str, align: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; ``head`` has its columns, ``align`` an ``l`` or ``r`` for each."""
    yield f"| {head} |"
    yield f"|{'|'.join({'l': '---', 'r': '---:'}[letter] for letter in align)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def milliseconds(seconds: float, digits: int) -> str:
    return f"{1e3 * seconds:.{digits}f} ms"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


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
    lines = [vars(line).values() for line in findings(results)]
    yield from table("stage | measure | target | measured | ", "lllll", map(tuple, lines))
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
    yield from table(
        "way | samples/s | without | ratio | of each round | longest pause | memory",
        "lrrrlrr",
        (
            (
                row["what"],
                f"{row['samples_per_second']:,}",
                f"{row['samples_per_second_without']:,}",
                f"{row['ratio_to_none']:.3f}",
                ", ".join(f"{ratio:.3f}" for ratio in row["ratios"]),
                milliseconds(row["longest_pause_seconds"], 1),
                megabytes(row["peak_memory_over_training_bytes"]),
            )
            for row in rows
        ),
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
        "blocks that have no hooks,\nand with the simplest counting there can be: a hook that "
        "keeps the indices, and one loop in C without checks.\n"
    )
    yield from table(
        "batch | with | without | ratio | middle half of the pairs | simplest counting | pairs",
        "rrrrrrr",
        (
            (
                str(row["batch_size"]),
                milliseconds(row["step_seconds_with"], 2),
                milliseconds(row["step_seconds_without"], 2),
                f"{row['ratio']:.4f}",
                f"{row['ratio_iqr']:.4f} wide",
                f"{row['simple_ratio']:.4f}",
                str(row["pairs"]),
            )
            for row in found["rows"]
        ),
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
    yield from table(
        "consistency | longest pause | of each snapshot, ms | gather of as many rows | "
        "`dcp.async_save` blocks | snapshot",
        "lrlrrr",
        (
            (
                row["consistency"],
                milliseconds(row["pause_seconds"], 2),
                ", ".join(f"{1e3 * pause:.1f}" for pause in row["pause_seconds_of_each_round"]),
                milliseconds(row["gather_seconds"], 1),
                milliseconds(row["async_save_seconds"], 0),
                megabytes(row["snapshot_bytes"]),
            )
            for row in found["rows"]
        ),
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
    yield from table(
        "saver | held | longest pause | durable after | memory | on disk",
        "lrrrrr",
        (
            (
                row["name"],
                f"{row['held_seconds']:.3f} s",
                milliseconds(row["longest_pause_seconds"], 1),
                f"{row['durable_seconds']:.2f} s",
                megabytes(row["peak_memory_bytes"]),
                megabytes(row["bytes_on_disk"]),
            )
            for row in rows
        ),
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


def gpu(results: Results) -> Iterator[str]:
    """The targets of a GPU, whose results are of another machine."""
    yield "## On a GPU\n"
    if (found := results.file("gpu")) is None:
        yield "Not yet measured: `make bench-gpu` does it where a GPU is ([how](gpu.md)).\n"
        return
    yield (
        "Each stage beside its peer and the machine's limit, in the same rounds; how each is timed "
        "is told by\n`python bench/gpu_targets.py`. Ratio: how many times faster ours is; beside "
        "it what it is to be at least.\n"
    )
    yield from table(
        "stage | against | ratio | target | ours | the other | ",
        "llrrrrl",
        (
            (
                row["stage"],
                row["against"],
                f"{row['ratio']:.2f}x",
                "" if row["promised"] is None else f"{row['promised']:.2f}x",
                milliseconds(row["ours_seconds"], 3),
                milliseconds(row["other_seconds"], 3),
                row["verdict"].lower(),
            )
            for row in found["rows"]
            if "error" not in row
        ),
    )
    for row in found["rows"]:
        if "error" in row:
            yield f"\n{row['stage']} failed: {row['error']}"
    device = found["gpu"]
    yield f"\n{device['gpu']} ({device['nvidia_smi']}), CUDA {device['torch_cuda']} in PyTorch."
    yield f"{machine_line(found['machine'])}\n"
    if (IMAGES / "gpu_timeline.png").exists():
        yield "![A snapshot: training's stream, copies, checker, writer](images/gpu_timeline.png)\n"


def operations(results: Results) -> Iterator[str]:
    """Each operation beside its peers and bounds."""
    found = results.rows("operations")
    if not found:
        return
    yield "## Operations\n"
    for group in sorted({row["group"] for row in found}):
        yield f"### {group[0].upper()}{group[1:]}\n"
        rows = [row for row in found if row["group"] == group]
        yield from table(
            " | median | spread (IQR) | rounds | ",
            "lrrrl",
            (
                (
                    row["name"],
                    milliseconds(row["median_seconds"], 3),
                    milliseconds(row["iqr_seconds"], 3),
                    str(row["rounds"]),
                    standing(row),
                )
                for row in sorted(rows, key=lambda row: row["median_seconds"])
            ),
        )
        yield ""
    yield from (f"{line}\n" for line in sorted({machine_line(row["machine"]) for row in found}))


if __name__ == "__main__":
    main()
