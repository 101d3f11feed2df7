"""A real Prometheus scrapes a job in training; it evaluates the alerts and the dashboard."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from cpr_ext.saving.metrics import ParityMetrics

pytest.importorskip("opentelemetry.exporter.prometheus")
PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs the program `prometheus`")
from opentelemetry.exporter.prometheus import PrometheusMetricReader  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from prometheus_client import start_http_server  # noqa: E402

from cpr_ext.wings.callbacks.opentelemetry import export_metrics  # noqa: E402
from python_tests.wings.callbacks.test_opentelemetry import checkpointer, train  # noqa: E402

MONITORING = Path(__file__).resolve().parents[3] / "docs/monitoring"
#: It ends with the server, however that is killed.
LIMIT_SECONDS = 120


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """A Prometheus on the loopback that scrapes one address twice a second."""

    def __init__(self, folder, target):
        self._port = free_port()
        scrape = {"job_name": "training", "static_configs": [{"targets": [target]}]}
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "scrape_configs": [scrape],
            "rule_files": [str(MONITORING / "alerts.yml")],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            *(PROMETHEUS, "--config.file", folder / "prometheus.yml"),
            *("--storage.tsdb.path", folder / "data"),
            *("--web.listen-address", f"127.0.0.1:{self._port}"),
        ]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(list(map(str, command)), stderr=self._log)
        self.wait_for(self._is_ready)

    def _is_ready(self):
        """Until then it refuses each query (503), in words rather than in JSON."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=10) as answer:
            return answer.status == 200

    def ask(self, path, **query):
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, query):
        """What a query gives now."""
        return [float(each["value"][1]) for each in self.ask("query", query=query)["result"]]

    def wait_for(self, condition):
        end = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except urllib.error.URLError:
                assert self._process.poll() is None, "Prometheus has ended"
            time.sleep(0.1)
        raise AssertionError("not so within the limit")

    def end(self):
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture
def ckpt(tmp_path):
    model, optimizer, ckpt = checkpointer(tmp_path / "store", has_copy=True)
    ckpt.recover()
    ckpt.train_a_step = lambda: train(model, optimizer, ckpt, steps=1)
    yield ckpt
    ckpt.close()


@pytest.fixture
def server(ckpt, tmp_path):
    provider = MeterProvider([PrometheusMetricReader()])
    port = free_port()
    endpoint, thread = start_http_server(port, addr="127.0.0.1")
    ckpt.metrics.parity = ParityMetrics()
    export_metrics(ckpt, {"model": "ctr", "rank": 0}, meter=provider.get_meter("cpr_ext"))
    server = Server(tmp_path, f"127.0.0.1:{port}")
    yield server
    server.end()
    endpoint.shutdown()
    endpoint.server_close()
    thread.join()
    provider.shutdown()


def test_a_running_job_is_scraped_shown_and_watched(ckpt, server):
    def is_scraped():
        ckpt.train_a_step()
        return server.values("cpr_snapshots_total > 2") and server.values("cpr_step > 20")

    server.wait_for(is_scraped)
    assert server.values("cpr_snapshot_step") <= [ckpt.step_count]
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    for query in (target["expr"] for panel in dashboard["panels"] for target in panel["targets"]):
        server.wait_for(lambda query=query: server.values(query))  # rates need two scrapes
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    for query in (rule["expr"] for rule in rules):
        names = re.findall(r"cpr_\w+(?:\{[^}]*\})?", query)
        assert names
        assert all(server.values(name) for name in names), query
        server.values(query)

    def states():
        groups = server.ask("rules")["groups"]
        return {
            rule["name"]: (rule["health"], rule["state"]) for g in groups for rule in g["rules"]
        }

    ckpt.metrics.portion_of_lost_samples = 0.5
    server.wait_for(lambda: states().get("CprLostSamples") == ("ok", "firing"))
    server.wait_for(lambda: {health for health, _ in states().values()} == {"ok"})
    quiet = ("CprRowsDamaged", "CprSnapshotsFail", "CprReadBackFailed", "CprSnapshotIsLate")
    assert {states()[name][1] for name in quiet} == {"inactive"}
