"""Metrics by OpenTelemetry, and so for Prometheus, Datadog and others.

>>> from cpr_ext.wings.callbacks.opentelemetry import export_metrics
>>> export_metrics(ckpt, {"model": "ctr", "rank": 0})
"""

from cpr_ext.wings.callbacks.opentelemetry.instruments import (
    INSTRUMENTS,
    Instrument,
    export_metrics,
)

__all__ = ["INSTRUMENTS", "Instrument", "export_metrics"]
