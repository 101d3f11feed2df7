"""What a GPU and the pipeline's threads did and when, read from a trace of torch.profiler, drawn.

A trace is Chrome's JSON; times are turned into seconds. What of it is ours is told by names: our
kernels lie in the namespace ``cpr_ext``, the pipeline's work has the category ``cpr_ext``.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL, COPY, FILL, HOST = "kernel", "gpu_memcpy", "gpu_memset", "cpr_ext"
TRAINING = "training"
#: What our kernels do, by their names.
_STAGES = {
    "lookups": "count",
    "prepare_samples": "count",
    "measure": "choose",
    "count_bins": "choose",
    "tally": "choose",
    "place": "choose",
    "write": "choose",
    "copy_rows": "gather",
}
_OUR_KERNEL = re.compile(r"\bcpr_ext::.*?(\w+?)_kernel\b")
_COLORS = {
    TRAINING: "#c4c4c4",
    "count": "#2a9d8f",
    "choose": "#e9a03b",
    "upload": "#e9d8a6",
    "gather": "#1f77b4",
    "clear": "#8e6bbf",
    "copy": "#c4c4c4",
    "copy out": "#6baed6",
    "check": "#8e6bbf",
    "write": "#d1495b",
}


@dataclass(frozen=True)
class Event:
    """One thing done, in seconds from the beginning of the trace's clock."""

    category: str
    name: str
    begin: float
    end: float
    stream: int | None


@dataclass(frozen=True)
class Span:
    """What a lane shows: ``what`` is one of the colours."""

    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Lanes by name, from top to bottom, each in the order of time, from 0 on."""

    lanes: dict[str, list[Span]]

    @property
    def snapshot(self) -> tuple[float, float]:
        """From the first row chosen or gathered until the last byte is written; (0, 0): none."""
        ours = [
            span
            for lane in self.lanes.values()
            for span in lane
            if span.what in ("choose", "gather", "copy out", "write")
        ]
        if not ours:
            return 0.0, 0.0
        return min(span.begin for span in ours), max(span.end for span in ours)


def read_trace(trace: Path) -> dict[str, Any]:
    """A trace as JSON; compressed if its name ends with .gz, as torch.profiler writes it then."""
    with _opener(trace)(trace, "rt") as file:
        content: dict[str, Any] = json.load(file)
    return content


def write_trace(trace: Path, content: dict[str, Any]) -> None:
    """As :func:`read_trace` reads it."""
    with _opener(trace)(trace, "wt") as file:
        json.dump(content, file)


def _opener(trace: Path) -> Any:
    return gzip.open if trace.suffix == ".gz" else open


def read_events(trace: Path) -> list[Event]:
    """The events with a duration, in the order of their beginnings."""
    found = [
        Event(
            str(event.get("cat", "")),
            str(event.get("name", "")),
            1e-6 * float(event["ts"]),
            1e-6 * (float(event["ts"]) + float(event["dur"])),
            _stream(event.get("args")),
        )
        for event in read_trace(trace)["traceEvents"]
        if event.get("ph") == "X" and "dur" in event
    ]
    return sorted(found, key=lambda event: event.begin)


def _stream(arguments: Any) -> int | None:
    stream = arguments.get("stream") if isinstance(arguments, dict) else None
    return int(stream) if isinstance(stream, int | str) and str(stream).isdigit() else None


def kernel_seconds_of(events: Iterable[Event]) -> float:
    """Time of all kernels.

    Raises:
        RuntimeError: there is none: the profiler does not see this device.
    """
    times = [event.end - event.begin for event in events if event.category == KERNEL]
    if not times:
        raise RuntimeError("the profiler saw no kernel; does it have CUPTI here?")
    return sum(times)


def timeline_of(events: Sequence[Event]) -> Timeline:
    """Lanes of the training stream, the stream of copies, and the pipeline's threads.

    Training's stream is the one with most kernels that are not ours; the stream of copies, the one
    with most copies to the host of those that are left.

    Raises:
        RuntimeError: no stream has a kernel.
    """
    foreign = Counter(
        e.stream for e in events if e.category == KERNEL and not _OUR_KERNEL.search(e.name)
    )
    if not foreign:
        raise RuntimeError("the trace has no kernels of training; was the profiler on?")
    training = foreign.most_common(1)[0][0]
    outward = Counter(e.stream for e in events if _is_copy_out(e) and e.stream != training)
    copies = outward.most_common(1)[0][0] if outward else None
    lanes: dict[str, list[Span]] = {"training's stream": [], "stream of copies": []}
    for event in events:
        if event.category in (KERNEL, COPY, FILL):
            if event.stream == training:
                lanes["training's stream"].append(_span(_stage_of(event), event))
            elif event.stream == copies:
                lanes["stream of copies"].append(
                    _span("copy out" if _is_copy_out(event) else "copy", event)
                )
        elif event.category == HOST:
            lane = {"check": "checker", "write": "writer"}[event.name]
            lanes.setdefault(lane, []).append(_span(event.name, event))
    return _from_zero(lanes)


def _is_copy_out(event: Event) -> bool:
    return event.category == COPY and "DtoH" in event.name


def _stage_of(event: Event) -> str:
    if event.category == COPY and "HtoD" in event.name:
        return "upload"  # of row ids, where training's batches lie on the device already
    ours = _OUR_KERNEL.search(event.name)
    if event.category != KERNEL or ours is None:
        return TRAINING
    return _STAGES.get(ours.group(1), "clear")


def _span(what: str, event: Event) -> Span:
    return Span(what, event.begin, event.end)


def _from_zero(lanes: dict[str, list[Span]]) -> Timeline:
    zero = min(span.begin for lane in lanes.values() for span in lane)
    return Timeline(
        {
            name: [Span(span.what, span.begin - zero, span.end - zero) for span in lane]
            for name, lane in lanes.items()
        }
    )


def longest_gap(spans: Iterable[Span], begin: float, end: float) -> float:
    """The longest time between two spans in which none runs, of gaps that touch [begin, end]."""
    longest, covered = 0.0, None
    for span in sorted(spans, key=lambda span: span.begin):
        if covered is not None and covered < span.begin and begin < span.begin and covered < end:
            longest = max(longest, span.begin - covered)
        covered = span.end if covered is None else max(covered, span.end)
    return longest


def seconds_by_stage(spans: Iterable[Span]) -> dict[str, float]:
    """Time of the spans of each kind."""
    times: dict[str, float] = {}
    for span in spans:
        times[span.what] = times.get(span.what, 0.0) + span.end - span.begin
    return times


def merged(spans: Iterable[Span], gap: float) -> list[Span]:
    """Neighbours of one kind with at most ``gap`` between them as one: a picture has few pixels."""
    whole: list[Span] = []
    for span in spans:
        last = whole[-1] if whole else None
        if last is not None and last.what == span.what and span.begin - last.end <= gap:
            whole[-1] = Span(last.what, last.begin, max(last.end, span.end))
        else:
            whole.append(span)
    return whole


def draw(timeline: Timeline, path: Path) -> None:
    """A lane each, coloured by what is done: the whole snapshot, and one gather from near by.

    What is ours is drawn at least a pixel wide.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    begin, end = timeline.snapshot
    margin = 0.1 * (end - begin) or 1.0
    windows = [(begin - margin, end + margin), *_near_a_gather(timeline)]
    height = 0.7 + (0.6 + 0.4 * len(timeline.lanes)) * len(windows)
    figure, grid = plt.subplots(
        len(windows), squeeze=False, figsize=(10, height), layout="constrained"
    )
    shown: set[str] = set()
    for axes, window in zip(grid[:, 0], windows, strict=True):
        shown |= _draw_window(axes, timeline, *window)
    kinds = [kind for kind in _COLORS if kind in shown and kind not in ("copy", "check")]
    labels = {"upload": "from the host", "clear": "clear counts, check"}
    handles = [Patch(color=_COLORS[kind], label=labels.get(kind, kind)) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(kinds), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _near_a_gather(timeline: Timeline) -> list[tuple[float, float]]:
    """Around the one in the middle and the copy behind it; nothing if there is none."""
    gathers = [span for span in timeline.lanes["training's stream"] if span.what == "gather"]
    if not gathers:
        return []
    begin = gathers[len(gathers) // 2].begin
    copies = [s.end for s in timeline.lanes["stream of copies"] if s.begin >= begin]
    length = (copies[0] - begin) if copies else gathers[len(gathers) // 2].end - begin
    return [(begin - length, begin + 2 * length)]


def _draw_window(axes: Any, timeline: Timeline, begin: float, end: float) -> set[str]:
    """The lanes between two times; returns which kinds are there."""
    shown = set()
    pixel = (end - begin) / 900
    for place, lane in enumerate(timeline.lanes.values()):
        inside = [span for span in lane if begin < span.end and span.begin < end]
        # Grey first: what is ours must not be hidden by it.
        for span in sorted(merged(inside, pixel / 4), key=lambda span: span.what != TRAINING):
            least = 0.0 if span.what == TRAINING else pixel
            width = max(span.end - span.begin, least)
            axes.broken_barh(
                [(1e3 * span.begin, 1e3 * width)],
                (place - 0.4, 0.8),
                color=_COLORS[span.what],
                lw=0,
            )
            shown.add(span.what)
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.invert_yaxis()
    axes.set_xlim(1e3 * begin, 1e3 * end)
    axes.set_xlabel("time, ms")
    axes.spines[["top", "right"]].set_visible(False)
    return shown
