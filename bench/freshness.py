"""From a training step to a serving process that has its rows: seconds and bytes.

    python bench/freshness.py [--states 12] [--every-steps 200] [--tiny]

`cpr train` runs in a process of its own. This process publishes what each snapshot changed, and
applies it to tables as a serving process does: through a directory, and through an S3 server on
this machine. After each it does the same with all rows. Keeps bench/results/freshness.json.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from object_server import object_server
from results import keep, parser_of
from torch import nn

from cpr_ext.errors import StoreError
from cpr_ext.storage.remote import RemoteOptions
from cpr_ext.tools.publishing import Subscriber, publish, read_publication

Place = Path | RemoteOptions
PAUSE_SECONDS = 0.02  # between looks for a snapshot


class Way:
    """Publishes to one place, and serves from it."""

    def __init__(self, name: str, store: Path, place: Place, *, whole: bool) -> None:
        self.name = name
        self._store = store
        self._place = place
        self._whole = whole
        self._subscriber: Subscriber | None = None
        self.rows: list[dict[str, Any]] = []

    def follow(self) -> None:
        """Publish and poll once; note how long after the snapshot its rows were visible."""
        started = time.perf_counter()
        report = publish(self._store, self._place, whole=self._whole)
        published = time.perf_counter() - started
        if self._subscriber is None or self._whole:
            self._subscriber = Subscriber(self._place, self._tables())
        if report.file_bytes and (applied := self._subscriber.poll()):
            self.rows.append(
                {
                    "publish_seconds": published,
                    "poll_seconds": time.perf_counter() - started - published,
                    "visible_after_seconds": applied.saved_age_seconds,
                    "rows": applied.rows,
                    "bytes": applied.file_bytes,
                }
            )

    def _tables(self) -> dict[str, nn.EmbeddingBag]:
        index = read_publication(self._place)
        assert index is not None
        return {
            name: nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, dtype=table.dtype)
            for name, table in index.tables.items()
        }

    def summary(self) -> dict[str, Any]:
        """Return the medians, the first state left out: it has all rows in any case."""
        found = {"way": self.name, "states": len(self.rows) - 1}
        for name in self.rows[0]:
            found[name] = round(statistics.median(row[name] for row in self.rows[1:]), 4)
        return found


def wait_for_snapshot(store: Path) -> None:
    """Wait until training commits one more snapshot."""
    manifest = store / "dense" / "MANIFEST.json"
    before = manifest.stat().st_mtime_ns
    while manifest.stat().st_mtime_ns == before:
        time.sleep(PAUSE_SECONDS)


def measure(options: Any, folder: Path, service: dict[str, Any]) -> list[dict[str, Any]]:
    store = folder / "store"
    arguments = ["--epochs", "1000000", "--every-steps", str(options.every_steps), "--quiet"]
    command = [sys.executable, "-m", "cpr_ext.cli", "train", *arguments, "--store", str(store)]
    numbers = itertools.count()

    def remote() -> RemoteOptions:
        return RemoteOptions(f"s3://bucket/rows{next(numbers)}", **service)

    ways = [
        Way("changed rows, directory", store, folder / "rows", whole=False),
        Way("changed rows, S3", store, remote(), whole=False),
        Way("all rows, directory", store, folder / "whole", whole=True),
        Way("all rows, S3", store, remote(), whole=True),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as training:
        try:
            while not (store / "dense" / "MANIFEST.json").exists():
                assert training.poll() is None, "training has ended"
                time.sleep(PAUSE_SECONDS)
            for way in ways:
                while len(way.rows) <= options.states:
                    assert training.poll() is None, "training has ended"
                    wait_for_snapshot(store)
                    with suppress(StoreError):  # no snapshot was committed as a whole yet
                        way.follow()
        finally:
            training.terminate()
    return [way.summary() for way in ways]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--states", type=int, default=12, help="states to follow, each way")
    parser.add_argument("--every-steps", type=int, default=200)
    options = parser.parse_args()
    if options.tiny:
        options.states = 1
    with (
        tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as folder,
        object_server() as service,
    ):
        rows = measure(options, Path(folder), service)
    for row in rows:
        print(row)
    if not options.tiny:
        keep("freshness", rows, every_steps=options.every_steps)


if __name__ == "__main__":
    main()
