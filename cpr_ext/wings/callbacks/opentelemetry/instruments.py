"""Instruments that read a Checkpointer's metrics whenever a reader of OpenTelemetry collects."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        kind: a counter only grows while a process lives.
        description: what it is.
        read: returns its values.
    """

    name: str
    unit: str
    kind: Literal["counter", "gauge"]
    description: str
    read: Callable[[Checkpointer], Readings]


def _of(field: str) -> Callable[[Checkpointer], Readings]:
    return lambda checkpointer: {(): getattr(checkpointer.metrics, field)}


def _snapshots(checkpointer: Checkpointer) -> Readings:
    now = checkpointer.metrics
    return {
        (("kind", "base"),): now.base_snapshots,
        (("kind", "partial"),): now.partial_snapshots,
        (("kind", "failed"),): now.failed_snapshots,
    }


def _of_remote(field: str) -> Callable[[Checkpointer], Readings]:
    def read(checkpointer: Checkpointer) -> Readings:
        status = checkpointer.remote_status()
        return {} if status is None else {(): getattr(status, field)}

    return read


def _of_parity(field: str) -> Callable[[Checkpointer], Readings]:
    def read(checkpointer: Checkpointer) -> Readings:
        parity = checkpointer.metrics.parity
        return {} if parity is None else {(): int(getattr(parity, field))}

    return read


#: Every metric; docs/monitoring.md lists them.
INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(
        *("cpr.step", "{step}", "gauge", "Training steps done, those before a restart included."),
        lambda checkpointer: {(): checkpointer.step_count},
    ),
    Instrument(
        *("cpr.snapshots", "{snapshot}", "counter", "Snapshots, by kind: base, partial, failed."),
        _snapshots,
    ),
    Instrument(
        *("cpr.snapshot.step", "{step}", "gauge", "Step of the newest durable snapshot."),
        _of("snapshot_step"),
    ),
    Instrument(
        *("cpr.snapshot.time", "s", "gauge"),
        "When the newest snapshot became durable, in seconds since the epoch; 0: none has.",
        _of("snapshot_time"),
    ),
    Instrument(
        *("cpr.complete.step", "{step}", "gauge", "Step of the newest full-recovery point."),
        _of("complete_step"),
    ),
    Instrument(
        *("cpr.written", "By", "counter", "Bytes of committed segments."), _of("bytes_written")
    ),
    Instrument(
        *("cpr.stall.time", "s", "counter", "Time for which saving blocked training."),
        _of("stall_seconds"),
    ),
    Instrument(
        *("cpr.stall.longest", "s", "gauge", "The longest such time in one step."),
        _of("max_stall_seconds"),
    ),
    Instrument(
        *("cpr.pls", "1", "gauge", "Portion of lost samples."), _of("portion_of_lost_samples")
    ),
    Instrument(
        *("cpr.samples.lost", "{sample}", "gauge", "Samples whose effect failures removed."),
        _of("samples_lost"),
    ),
    Instrument(
        *("cpr.row_updates", "{row}", "counter", "Updates of rows by training."),
        _of("row_updates"),
    ),
    Instrument(
        *("cpr.row_updates.lost", "{row}", "gauge"),
        "Those that recoveries reverted; absent: not known.",
        _of("row_updates_lost"),
    ),
    Instrument(
        *("cpr.rows.damaged", "{row}", "counter", "Rows that damage of the store made older."),
        _of("rows_damaged"),
    ),
    Instrument(
        *("cpr.rows.changed_unseen", "{row}", "counter"),
        "Rows found to have changed outside of what PyTorch shows.",
        _of("rows_changed_unseen"),
    ),
    Instrument(
        *(
            "cpr.checks",
            "{check}",
            "counter",
            "Comparisons of unchanged rows, without a difference.",
        ),
        _of("checks"),
    ),
    Instrument(
        *("cpr.read_backs.failed", "{snapshot}", "counter", "Snapshots read back as damaged."),
        _of("read_backs_failed"),
    ),
    Instrument(
        *("cpr.remote.lag", "s", "gauge"),
        "Age of the oldest state that is not in the copy; absent: there is no copy.",
        _of_remote("lag_seconds"),
    ),
    Instrument(
        *("cpr.remote.lag.size", "By", "gauge", "What is to be sent of the newest state."),
        _of_remote("lag_bytes"),
    ),
    Instrument(
        *("cpr.parity.protected", "1", "gauge"),
        "1: peers could rebuild this worker's rows now; absent: it has no parity.",
        _of_parity("protected"),
    ),
    Instrument(
        *("cpr.parity.lag", "{step}", "gauge", "Steps that the peers do not have yet."),
        _of_parity("lag_steps"),
    ),
    Instrument(
        *("cpr.parity.rebuilds", "{rebuild}", "counter", "Rebuilds of rows or parity."),
        _of_parity("rebuilds"),
    ),
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
