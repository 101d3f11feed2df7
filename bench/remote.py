"""A copy in object storage, beside the simplest code for the same bytes.

    python bench/remote.py [--only PART] [--folder F] [--tiny]

The server is `object_server.py`, a process of its own on this machine. Both sides of a ratio use
it in the same rounds. Parts: `upload`, `recovery`, `recovery_by_network` (from a server that sends
1 Gbit/s). Keeps bench/results/remote.json; with `--only` it replaces the rows of that part.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from bench_storage import Tables
from object_server import object_server
from paired import Comparison, Contender, measure
from results import Results, keep, parser_of
from training import in_own_process

import cpr_ext
from cpr_ext.wings.remote import RemoteOptions, fetch_store, open_objects
from cpr_ext.wings.remote.objects import PART_BYTES
from cpr_ext.wings.remote.range_reading import PARALLEL, RANGE_BYTES
from cpr_ext.wings.remote.remote_state import objects_of
from cpr_ext.wings.remote.remote_writer import RemoteWriter

HERE = Path(__file__).resolve().parent
PARTS = ("upload", "recovery", "recovery_by_network")
NETWORK_BYTES_PER_SECOND = 125e6  # 1 Gbit/s
NUM_SHARDS = 4
TOTAL_BYTES = {True: 1 << 20, False: 256 << 20}
ROUNDS = 7


class Stored:
    """A store with one base snapshot, and the addresses of one server."""

    def __init__(self, folder: Path, service: dict[str, Any], total_bytes: int) -> None:
        self.tables = Tables(total_bytes, folder / "store", num_shards=NUM_SHARDS)
        self.tables.save()
        self.folder = folder
        self._service = service
        self._numbers = itertools.count()
        self._last: RemoteOptions | None = None
        store = self.tables.checkpointer.store
        self.manifest = store.manifest
        self.paths = {key: store.path_of(r) for key, r in objects_of(self.manifest).items()}
        self.num_bytes = sum(path.stat().st_size for path in self.paths.values())

    def options(self) -> RemoteOptions:
        """Return an address where nothing is; what the last one held is removed."""
        if self._last is not None:
            client = self.client(self._last)
            for page in obstore.list(client):
                obstore.delete(client, [entry["path"] for entry in page])
        self._last = RemoteOptions(f"s3://bucket/job{next(self._numbers)}", **self._service)
        return self._last

    def client(self, options: RemoteOptions) -> Any:
        """Return obstore's own store at an address."""
        return obstore.store.from_url(options.address, **self._service)

    def copied(self, options: RemoteOptions) -> None:
        """Copy the store to an address."""
        writer = RemoteWriter(open_objects(options), self.tables.store, "bench")
        writer.open(self.manifest)
        writer.copy(self.manifest)


def upload(stored: Stored) -> list[Comparison]:
    """One committed state, and the same files sent by obstore alone, one after the other."""
    opened: list[RemoteWriter] = []
    clients: list[Any] = []

    def open_writer() -> None:
        writer = RemoteWriter(open_objects(stored.options()), stored.tables.store, "bench")
        writer.open(stored.manifest)
        opened.append(writer)

    def put(chunk_size: int) -> None:
        client = clients.pop()
        for key, path in stored.paths.items():
            obstore.put(client, key, path, chunk_size=chunk_size, use_multipart=True)

    def put_at_once() -> None:
        async def put_all() -> None:
            client = clients.pop()
            await asyncio.gather(
                *(
                    obstore.put_async(client, key, path, chunk_size=PART_BYTES, use_multipart=True)
                    for key, path in stored.paths.items()
                )
            )

        asyncio.run(put_all())

    def open_client() -> None:
        clients.append(stored.client(stored.options()))

    return [
        Comparison(
            "upload",
            [
                Contender(
                    "RemoteWriter.copy()", lambda: opened.pop().copy(stored.manifest), "ours",
                    open_writer,
                ),
                Contender("obstore.put(), 16 MiB parts", lambda: put(PART_BYTES), "bound",
                          open_client),
                Contender("obstore.put(), 5 MiB parts", lambda: put(5 << 20), "bound",
                          open_client),
                Contender("obstore.put_async(), all at once", put_at_once, "bound", open_client),
            ],
            rounds=ROUNDS,
            facts={"bytes": stored.num_bytes, "objects": len(stored.paths)},
        )
    ]  # fmt: skip


def cpu_of_copying(stored: Stored) -> dict[str, Any]:
    """CPU seconds of this process per GB sent, signed and with ``aws_unsigned_payload``."""
    found: dict[str, Any] = {"group": "CPU of copying"}
    for name, is_unsigned in (("signed", "false"), ("unsigned", "true")):
        options = stored.options()
        config = {**options.config, "aws_unsigned_payload": is_unsigned}
        objects = open_objects(replace(options, config=config))
        writer = RemoteWriter(objects, stored.tables.store, "bench")
        writer.open(stored.manifest)
        before = time.process_time()
        writer.copy(stored.manifest)
        found[name] = round((time.process_time() - before) / stored.num_bytes * 1e9, 2)
    return found


def recovery(stored: Stored, group: str = "recovery") -> list[Comparison]:
    """The newest state, read into a directory and then into a model, beside plain range reads."""
    options = replace(stored.options(), wait_at_close_seconds=0.0)
    stored.copied(options)
    client, target = stored.client(options), stored.folder / "fetched"
    sizes = {key: path.stat().st_size for key, path in stored.paths.items()}

    def ranges() -> None:
        def read(key: str, begin: int, end: int) -> int:
            return len(obstore.get_range(client, key, start=begin, end=end))

        with ThreadPoolExecutor(PARALLEL) as pool:
            reads = [
                pool.submit(read, key, at, min(at + RANGE_BYTES, size))
                for key, size in sizes.items()
                for at in range(0, size, RANGE_BYTES)
            ]
            assert sum(each.result() for each in reads) == stored.num_bytes

    opened: list[cpr_ext.Checkpointer] = []
    stored.tables.checkpointer.close(save=False)

    def remove() -> None:
        while opened:
            opened.pop().close()
        shutil.rmtree(target, ignore_errors=True)

    def fetch() -> None:
        fetch_store(open_objects(options), target)

    def recover() -> None:
        opened.append(stored.tables.checkpointer_at(target, remote=options))
        report = opened[-1].recover()
        assert report.rows_restored > 0
        assert not report.damaged_segments

    facts = {"bytes": stored.num_bytes, "objects": len(sizes)}
    bound = Contender("obstore.get_range(), 8 at a time", ranges, "bound")
    return [
        Comparison(
            group,
            [
                Contender("a new Checkpointer and recover()", recover, "ours", remove),
                Contender("fetch_store()", fetch, "ours", remove),
                bound,
            ],
            rounds=ROUNDS,
            facts=facts,
            done=remove,
        )
    ]


def child(options: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(options.child_folder)
    limit = NETWORK_BYTES_PER_SECOND if options.child == "recovery_by_network" else 0.0
    with object_server(options.server_nice, limit) as service:
        factor = 2 if limit and not options.tiny else 1  # a network is slow
        stored = Stored(folder, service, factor * TOTAL_BYTES[options.tiny])
        make = {
            "upload": upload,
            "recovery": recovery,
            "recovery_by_network": partial(recovery, group="recovery, 1 Gbit/s"),
        }[options.child]
        rows = [row for each in make(stored) for row in measure(each, tiny=options.tiny)]
        if options.child == "upload":
            rows.append(cpu_of_copying(stored))
        stored.tables.close()
        return rows


def show(row: dict[str, Any]) -> str:
    name = f"{row['group']}: {row.get('name', '')}"
    if "median_seconds" in row:
        speed = row["bytes"] / row["median_seconds"] / 1e6
        ratios = ", ".join(f"{r:.2f} of {n}" for n, r in row.get("ratios", {}).items())
        return f"{name:<50} {row['median_seconds']:8.3f} s {speed:8.0f} MB/s  {ratios}"
    facts = {k: v for k, v in row.items() if k not in ("group", "name")}
    return f"{name:<50} {facts}"


def main() -> None:
    parser = parser_of(__doc__, has_children=True)
    parser.add_argument("--server-nice", type=int, default=0, help="niceness of the server")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    parts = [part for part in PARTS if options.only in ("", part)]
    arguments = ["--server-nice", str(options.server_nice)] + ["--tiny"] * options.tiny
    rows = []
    for part in parts:
        found = in_own_process(__file__, part, *arguments, folder=options.folder)
        rows += [{"part": part, **row} for row in found]
    for row in rows:
        print(show(row))
    if not options.tiny:
        kept = [row for row in Results().rows("remote") if row["part"] not in parts]
        keep("remote", kept + rows, server_nice=options.server_nice)


if __name__ == "__main__":
    main()
