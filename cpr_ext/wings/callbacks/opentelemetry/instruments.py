"""Instruments that read a Checkpointer's metrics whenever a reader of OpenTelemetry collects."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry import metrics as otel
from opentelemetry.metrics import CallbackOptions, Observation

from cpr_ext import Checkpointer
from cpr_ext.errors import UsageError

#: Readings by attributes of their own; None: not known now.
Readings = Mapping[tuple[tuple[str, str], ...], int | float | None]
Attributes = Mapping[str, str | bool | int | float]


@dataclass(frozen=True)
class Instrument:
    """One metric.

    Attributes:
        name: with dots, as OpenTelemetry's; Prometheus has underscores, the unit and ``_total``.
        unit: UCUM: ``s`` seconds, ``By`` bytes, ``1`` a ratio, ``{step}`` what is counted.
        kind: ``counter`` or ``gauge``; a counter only grows while a process lives.
        description: what it is.
        read: returns its values.
    """

    name: str
    unit: str
    kind: str
    description: str
    read: Callable[[Checkpointer], Readings]


def _snapshots(checkpointer: Checkpointer) -> Readings:
    now, kinds = checkpointer.metrics, ("base", "partial", "failed")
    return {(("kind", kind),): getattr(now, f"{kind}_snapshots") for kind in kinds}


def _deaths(checkpointer: Checkpointer) -> Readings:
    deaths = checkpointer.metrics.deaths.items()
    return {(("error.type", kind), ("worker", str(rank))): times for (rank, kind), times in deaths}


def _of(path: str) -> Callable[[Checkpointer], Readings]:
    """Return what reads a field of the metrics, or of ``parity``, ``remote`` or the ``job``."""
    holder, _, field = path.rpartition(".")

    def read(checkpointer: Checkpointer) -> Readings:
        held: Any = checkpointer if holder == "job" else checkpointer.metrics
        if holder == "parity":
            held = held.parity
        if holder == "remote":
            held = checkpointer.remote_status()
        if held is None:
            return {}
        value = getattr(held, field)
        return {(): int(value) if isinstance(value, bool) else value}

    return read


def _instrument(line: str) -> Instrument:
    name, unit, kind, path, description = (cell.strip() for cell in line.split("|"))
    assert kind == "counter" or kind == "gauge"
    read = {"snapshots": _snapshots, "deaths": _deaths}.get(path) or _of(path)
    return Instrument(name, unit, kind, description, read)


_TABLE = """
cpr.step | {step} | gauge | job.step_count | Training steps done, those before a restart included.
cpr.snapshots | {snapshot} | counter | snapshots | Snapshots, by kind: base, partial, failed.
cpr.snapshot.step | {step} | gauge | snapshot_step | Step of the newest durable snapshot.
cpr.snapshot.time | s | gauge | snapshot_time | When the newest snapshot became durable, in \
seconds since the epoch; 0: none has.
cpr.complete.step | {step} | gauge | complete_step | Step of the newest full-recovery point.
cpr.common.step | {step} | gauge | common_step | Step of the newest full-recovery point that \
all workers have; absent: not known, or recovery is not full.
cpr.written | By | counter | bytes_written | Bytes of committed segments.
cpr.stall.time | s | counter | stall_seconds | Time for which saving blocked training.
cpr.stall.longest | s | gauge | max_stall_seconds | The longest such time in one step.
cpr.pls | 1 | gauge | portion_of_lost_samples | Portion of lost samples.
cpr.samples.lost | {sample} | gauge | samples_lost | Samples whose effect failures removed.
cpr.row_updates | {row} | counter | row_updates | Updates of rows by training.
cpr.row_updates.lost | {row} | gauge | row_updates_lost | Those that recoveries reverted; absent: \
not known.
cpr.rows.damaged | {row} | counter | rows_damaged | Rows that damage of the store made older.
cpr.rows.changed_unseen | {row} | counter | rows_changed_unseen | Rows found to have changed \
outside of what PyTorch shows.
cpr.checks | {check} | counter | checks | Comparisons of unchanged rows, without a difference.
cpr.read_backs.failed | {snapshot} | counter | read_backs_failed | Snapshots read back as damaged.
cpr.remote.lag | s | gauge | remote.lag_seconds | Age of the oldest state that is not in the copy; \
absent: there is no copy.
cpr.remote.lag.size | By | gauge | remote.lag_bytes | What is to be sent of the newest state.
cpr.parity.protected | 1 | gauge | parity.protected | 1: peers could rebuild this worker's rows \
now; absent: it has no parity.
cpr.parity.lag | {step} | gauge | parity.lag_steps | Steps that the peers do not have yet.
cpr.parity.rebuilds | {rebuild} | counter | parity.rebuilds | Rebuilds of rows or parity.
cpr.deaths | {death} | counter | deaths | Workers whose place another process took, by worker and \
error.type: a signal, the class of an error, OOMKilled, timeout, left, or _OTHER: without a word.
"""
#: Every metric; docs/monitoring.md lists them.
INSTRUMENTS: tuple[Instrument, ...] = tuple(
    _instrument(line) for line in _TABLE.strip().splitlines()
)


@dataclass(frozen=True)
class _Source:
    checkpointer: weakref.ref[Checkpointer]
    attributes: Mapping[str, Any]


#: What each meter reports; its instruments are made once.
_sources: weakref.WeakKeyDictionary[otel.Meter, list[_Source]] = weakref.WeakKeyDictionary()


def export_metrics(
    checkpointer: Checkpointer,
    attributes: Attributes | None = None,
    *,
    meter: otel.Meter | None = None,
) -> None:
    """Report the metrics of a Checkpointer as instruments of OpenTelemetry.

    Readings are read when a reader collects, on its thread; training takes no part in it. Of a
    Checkpointer that was deleted nothing is reported.

    Args:
        checkpointer: whose metrics.
        attributes: of every value, such as ``{"model": "ctr", "rank": 0}``. Of two Checkpointers
            with the same ones the later takes the place of the earlier.
        meter: that makes the instruments; None: the global provider's meter "cpr_ext".

    Raises:
        UsageError: this is no Checkpointer, or an attribute has another type.
    """
    if not isinstance(checkpointer, Checkpointer):
        raise UsageError(f"checkpointer is {checkpointer!r:.100}; needed: a Checkpointer")
    own = dict(attributes or {})
    for key, value in own.items():
        if not isinstance(key, str) or not isinstance(value, str | bool | int | float):
            raise UsageError(
                f"attributes has {key!r:.100}: {value!r:.100}; needed: text, numbers or flags by "
                'name, such as {"model": "ctr", "rank": 0}'
            )
    meter = otel.get_meter("cpr_ext") if meter is None else meter
    is_new = meter not in _sources
    sources = _sources.setdefault(meter, [])
    sources[:] = [each for each in sources if each.attributes != own]
    sources.append(_Source(weakref.ref(checkpointer), own))
    if is_new:
        for each in INSTRUMENTS:
            create = (
                meter.create_observable_counter
                if each.kind == "counter"
                else meter.create_observable_gauge
            )
            create(each.name, [_callback(sources, each)], each.unit, each.description)


def _callback(
    sources: list[_Source], instrument: Instrument
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(options: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(value, {**source.attributes, **dict(more)})
            for source in list(sources)
            if (checkpointer := source.checkpointer()) is not None
            for more, value in instrument.read(checkpointer).items()
            if value is not None
        ]

    return observe
