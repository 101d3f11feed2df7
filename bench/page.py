"""Write docs/benchmarks.md from the results in bench/results/, print the targets.

python bench/page.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import figures
from peers import allowed_memory_bytes
from results import Results, Row
from targets import findings, print_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = (
    "This page has the targets of cpr_ext and their measurements. `python bench/page.py` writes it "
    "from [bench/results/](../bench/results/); `make bench` measures again.",
    "All measurements run in rounds; each round runs each contender once. A ratio is the median of "
    "the rounds' ratios. Ratios apply to machines like this one, absolute times to this one only. "
    "`python bench/regress.py COMMIT` lists what is slower than at another commit.",
    "`python bench/run.py bench_staging.py` prints the rounds of some stages. `--tiny` takes "
    "seconds, and `--folder` names the disk to measure.",
)
TAIL = (
    "For a kill or a flipped bit, see [reliability.md](reliability.md); for the accuracy of the "
    "planner, [paper_map.md](paper_map.md)."
)


def paragraph(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def main() -> None:
    results = Results()
    sections = (
        targets,
        training,
        tracking,
        pauses,
        peers,
        gpu,
    )
    lines = [
        "# Benchmarks\n",
        *map(paragraph, HEAD),
        *(line for section in sections for line in section(results)),
        *commits(),
        paragraph(TAIL),
    ]
    PAGE.write_text("\n".join(lines))
    print_table(findings(results))
    print(f"\nwrote {PAGE.relative_to(ROOT)}")


def commits() -> Iterator[str]:
    """The commit of each result."""
    yield "## Code of the figures\n"
    yield paragraph(
        "Every result of [bench/results/](../bench/results/) has the commit it was measured at, "
        "and a digest of each folder of the code then. *Older* means that a folder that it "
        "measures has changed since, or that no digest was noted. `python bench/figures.py` "
        "writes the table; `make lint` fails if it is wrong. Digests do not cover the benchmarks "
        "themselves."
    )
    yield f"{figures.BEGIN}\n{figures.marks()}\n{figures.END}\n"


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
    return paragraph(
        f"{machine['date'][:10]}, commit {machine['commit']}{changed}, {machine['cores']} cores "
        f"({machine['cpu']}), torch {machine['torch']}, load average at the end "
        f"{machine['load_average_1min']:.1f}."
    )


def targets(results: Results) -> Iterator[str]:
    """Measured values beside the targets."""
    yield "## Targets\n"
    lines = [vars(line).values() for line in findings(results)]
    yield from table("stage | measure | target | measured | ", "lllll", map(tuple, lines))
    yield ""
    yield paragraph(
        "Of values at several sizes the worst comes first, and the worst must meet the target. "
        "*Limit* is the result of the simplest code for the stage by the same measure, in the same "
        "rounds. That is a prefetching loop without checks, one pass over the scores, raw direct "
        "writes, or a thread that only writes."
    )


def training(results: Results) -> Iterator[str]:
    """What saving costs training."""
    if (found := results.file("training_overhead")) is None:
        return
    settings, rows = found["settings"], found["rows"]
    yield "## What saving costs training\n"
    yield paragraph(
        f"DLRM with the table sizes of Criteo Kaggle (33.8 M rows, 2.3 GB with the optimizer's "
        f"state), batch {settings['batch_size']}. Stretches of {settings['every']:g} s that begin "
        "with a save and end when it is durable alternate with stretches without saving. `ratio` "
        "is the speed of one over that of its two neighbors, the median and all of them. The "
        "longest pause is that of `step()` with the optimizer's hooks, or of the peer's call. "
        "Memory is the rise over training's. Data that a peer leaves in the page cache is written "
        "after its stretch, and not counted against it."
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
    yield f"\n{machine_line(found['machine'])}"


def tracking(results: Results) -> Iterator[str]:
    """What counting costs a step."""
    if (found := results.file("tracking_overhead")) is None:
        return
    yield "## What counting costs a step\n"
    yield paragraph(
        "The same model. Blocks of steps under a `Checkpointer` that saves nothing alternate with "
        "blocks that have no hooks, and with the simplest counting possible. That is a hook that "
        "keeps the indices, and one loop in C without checks."
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
    yield f"\n{machine_line(found['machine'])}"


def pauses(results: Results) -> Iterator[str]:
    """How long a snapshot blocks a step."""
    if (found := results.file("pause")) is None:
        return
    yield "## How long a snapshot blocks training\n"
    yield paragraph(
        "The same model, default options, a partial snapshot of 12.5 % of every table; medians of "
        "the longest pause of each snapshot. The first snapshot of a process has all rows."
    )
    yield from table(
        "longest pause | of each snapshot, ms | in the first snapshot | "
        "gather of as many rows | `dcp.async_save` blocks | snapshot",
        "rlrrrr",
        (
            (
                milliseconds(row["pause_seconds"], 2),
                ", ".join(f"{1e3 * pause:.1f}" for pause in row["pause_seconds_of_each_round"]),
                milliseconds(row["pause_of_base_seconds"], 0),
                milliseconds(row["gather_seconds"], 1),
                milliseconds(row["async_save_seconds"], 0),
                megabytes(row["snapshot_bytes"]),
            )
            for row in found["rows"]
        ),
    )
    yield f"\n{machine_line(found['machine'])}"


def peers(results: Results) -> Iterator[str]:
    """One save of everything, by each saver."""
    if (found := results.file("peers")) is None:
        return
    rows = found["rows"]
    allowed = allowed_memory_bytes(rows[0]["num_rows"]) / 1e6
    yield "## Saving everything once\n"
    yield paragraph(
        f"A first (base) snapshot of the same model, {rows[0]['model_bytes'] / 1e9:.1f} GB, by "
        "each saver as its documentation recommends, in the background where it can. *Blocked* is "
        "the total time that training stopped. *Durable* means synced, by the benchmark where the "
        "library does not. Memory is the rise of resident memory over training's. cpr_ext may use "
        f"the slots, 7 bytes per row and 64 MB: {allowed:.0f} MB."
    )
    yield from table(
        "saver | blocked | longest pause | durable after | memory | on disk",
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
    yield f"\n{machine_line(found['machine'])}"


def gpu(results: Results) -> Iterator[str]:
    """The targets of a GPU, whose results are of another machine."""
    yield "## On a GPU\n"
    if (found := results.file("gpu")) is None:
        yield "Not yet measured: run `make bench-gpu` on a machine with a GPU ([how](gpu.md)).\n"
        return
    yield paragraph(
        "Each stage with its peer and the machine's limit, in the same rounds; `python "
        "bench/gpu_targets.py` describes how each is timed. *Ratio* is how many times faster ours "
        "is; *target* is the least that it should be."
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
    yield machine_line(found["machine"])


if __name__ == "__main__":
    main()
