"""Metrics by OpenTelemetry: what a reader collects is what the Checkpointer counts."""

import gc
import json
import re
from pathlib import Path

import pytest
import torch
import yaml

import cpr_ext
from cpr_ext import StoreOptions
from cpr_ext.errors import UsageError
from cpr_ext.saving.metrics import ParityMetrics

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import REGISTRY, generate_latest

from cpr_ext.wings.callbacks.opentelemetry import INSTRUMENTS, export_metrics
from cpr_ext.wings.remote import RemoteOptions

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/monitoring.md"


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    yield from meter_of(reader)


def meter_of(reader):
    provider = MeterProvider([reader])
    yield provider.get_meter("test")
    provider.shutdown()


def checkpointer(directory, *, has_copy=False):
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    ckpt = cpr_ext.Checkpointer(
        *(model, optimizer, directory),
        schedule=cpr_ext.EverySteps(2, when_busy="wait"),
        store=StoreOptions(remote=RemoteOptions(f"file://{directory}.copy") if has_copy else None),
    )
    return model, optimizer, ckpt


def train(model, optimizer, ckpt, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([[step, step + 1]])).sum().backward()
        optimizer.step()
        ckpt.step(num_samples=1)
    ckpt.wait()


@pytest.fixture
def run(tmp_path):
    run = checkpointer(tmp_path / "store")
    run[2].recover()
    train(*run)
    yield run
    run[2].close()


def collected(reader):
    """Value by name and attributes."""
    data = reader.get_metrics_data()
    return {
        (metric.name, *sorted(point.attributes.items())): point.value
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_every_number_has_an_instrument_and_what_is_not_known_is_absent(run, meter, reader):
    ckpt = run[2]
    values = vars(ckpt.metrics).items()
    numbers = [name for name, value in values if isinstance(value, int | float)]
    numbers = [name for name in numbers if not name.startswith("remote_")]  # it has no copy
    export_metrics(ckpt, {"rank": 3}, meter=meter)
    for index, name in enumerate(numbers):
        setattr(ckpt.metrics, name, 1000 + index)
    values, rank = collected(reader), ("rank", 3)
    assert {1000 + index for index in range(len(numbers))} <= set(values.values())
    assert values["cpr.step", rank] == ckpt.step_count
    for name, found in (
        ("base_snapshots", values["cpr.snapshots", ("kind", "base"), rank]),
        ("snapshot_time", values["cpr.snapshot.time", rank]),
        ("bytes_written", values["cpr.written", rank]),
    ):
        assert found == 1000 + numbers.index(name)
    ckpt.metrics.deaths[2, "OOMKilled"] += 1
    why = ("error.type", "OOMKilled")
    assert collected(reader)["cpr.deaths", why, rank, ("worker", "2")] == 1
    ckpt.metrics.row_updates_lost = None
    names = {name for name, *_ in collected(reader)}
    assert "cpr.row_updates.lost" not in names
    assert not [name for name in names if "remote" in name or "parity" in name]


def test_of_a_deleted_checkpointer_nothing_is_reported(tmp_path, meter, reader):
    model, optimizer, ckpt = checkpointer(tmp_path / "store")
    export_metrics(ckpt, meter=meter)
    assert collected(reader)
    ckpt.close()
    del model, optimizer, ckpt
    gc.collect()
    assert collected(reader) == {}


def test_a_later_checkpointer_takes_the_place_of_one_with_its_attributes(
    run, tmp_path, meter, reader, caplog
):
    other = checkpointer(tmp_path / "other")
    export_metrics(run[2], {"rank": 0}, meter=meter)
    export_metrics(other[2], {"rank": 1}, meter=meter)
    export_metrics(other[2], {"rank": 0}, meter=meter)
    values = collected(reader)
    assert values["cpr.step", ("rank", 0)] == values["cpr.step", ("rank", 1)] == 0
    assert caplog.records == []  # an instrument that exists twice is warned of
    other[2].close()


def test_wrong_attributes_and_something_else_than_a_checkpointer_are_refused(run, meter):
    for what, attributes, text in (
        (run[2], {"rank": [1]}, r"'rank': \[1\]"),
        (run[2], {1: "a"}, "1: 'a'"),
        (run[0], None, "needed: a Checkpointer"),
    ):
        with pytest.raises(UsageError, match=text):
            export_metrics(what, attributes, meter=meter)


@pytest.fixture
def exposed():
    """A meter whose metrics Prometheus shows."""
    yield from meter_of(PrometheusMetricReader())


def test_the_page_the_alerts_and_the_dashboard_name_what_there_is(tmp_path, exposed):
    _, _, ckpt = checkpointer(tmp_path / "store", has_copy=True)
    ckpt.metrics.parity, ckpt.metrics.common_step = ParityMetrics(), 1
    ckpt.metrics.deaths[1, "SIGKILL"] += 1
    export_metrics(ckpt, {"rank": 0}, meter=exposed)
    shown = generate_latest(REGISTRY).decode()
    names = set(re.findall(r"^# TYPE (cpr_\w+) \w+$", shown, re.MULTILINE))
    ckpt.close()
    assert len(names) == len(INSTRUMENTS)
    by_stem = {re.sub(r"(_seconds|_bytes)?(_total)?$", "", name): name for name in names}
    rows = [
        f"| `{each.name}` | `{each.unit}` | {each.kind} | "
        f"`{by_stem[each.name.replace('.', '_')]}` | {each.description} |"
        for each in INSTRUMENTS
    ]
    assert "\n".join(rows) in PAGE.read_text()
    alerts = yaml.safe_load((ROOT / "docs/monitoring/alerts.yml").read_text())
    rules = alerts["groups"][0]["rules"]
    dashboard = json.loads((ROOT / "docs/monitoring/dashboard.json").read_text())
    queries = [rule["expr"] for rule in rules]
    queries += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"cpr_\w+", query)}
    assert used <= names
    for rule in rules:
        assert f"| {rule['alert']} |" in PAGE.read_text()
