"""As much of S3 as a copy of a store needs, in memory: a server that is faster than its clients.

    python bench/object_server.py [--nice 19]      prints its address

It signs nothing and checks no signature. Tests use moto's server instead, which is complete.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Buffer = bytearray | memoryview
_PIECE_BYTES = 256 << 10
_LAST_MODIFIED = "Mon, 01 Jan 2024 00:00:00 GMT"


class _Held:
    """The objects and unfinished uploads of the server."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, list[Buffer]] = {}  # parts, so that none is copied
        self.uploads: dict[str, dict[int, Buffer]] = {}


class _Link:
    """What all connections share: a network of so many bytes per second; 0: no limit."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_on(self, count: int) -> None:
        if not self._rate:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(wait, 0.0))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    held: _Held
    link: _Link

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        url = urlsplit(self.path)
        self._query = parse_qs(url.query, keep_blank_values=True)
        self._key = unquote(url.path).lstrip("/").partition("/")[2]
        return True

    def _body(self) -> Buffer:
        data = bytearray(int(self.headers.get("Content-Length", 0)))
        view, at = memoryview(data), 0
        while at < len(data):
            count = self.rfile.readinto(view[at:])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("the body ended early")
            at += count
        return data

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        data = self._body()
        with self.held.lock:
            if "partNumber" in self._query:
                upload = self.held.uploads[self._query["uploadId"][0]]
                upload[int(self._query["partNumber"][0])] = data
            elif self.headers.get("If-None-Match") == "*" and self._key in self.held.objects:
                self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            else:
                self.held.objects[self._key] = [data]
        self._answer(200, ETag='"1"')

    def do_POST(self) -> None:
        body = bytes(self._body())
        with self.held.lock:
            if "uploads" in self._query:
                number = f"u{len(self.held.uploads)}"
                self.held.uploads[number] = {}
                answer = f"<UploadId>{number}</UploadId>"
                tag = "InitiateMultipartUploadResult"
            elif "delete" in self._query:
                keys = [key.decode() for key in re.findall(rb"<Key>([^<]*)</Key>", body)]
                for key in keys:  # of the whole bucket, as in the URL
                    self.held.objects.pop(key, None)
                answer = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                tag = "DeleteResult"
            else:
                parts = self.held.uploads[self._query["uploadId"][0]]
                self.held.objects[self._key] = [parts[n] for n in sorted(parts)]
                parts.clear()
                answer, tag = "<ETag>1</ETag>", "CompleteMultipartUploadResult"
        self._answer(200, f"<{tag}>{answer}</{tag}>".encode())

    def do_GET(self) -> None:
        if "list-type" in self._query:
            self._list(self._query.get("prefix", [""])[0])
            return
        with self.held.lock:
            parts = self.held.objects.get(self._key)
        if parts is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = sum(map(len, parts))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", _LAST_MODIFIED)
        self.end_headers()
        at = 0
        for part in parts:
            first, last = max(begin - at, 0), min(end - at, len(part))
            if first < last:
                self._send(memoryview(part)[first:last])
            at += len(part)

    def _send(self, data: memoryview) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            self.link.pass_on(len(piece))
            self.wfile.write(piece)

    def _list(self, prefix: str) -> None:
        with self.held.lock:
            held = [(k, sum(map(len, p))) for k, p in sorted(self.held.objects.items())]
        entries = "".join(
            f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>1</ETag>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in held
            if key.startswith(prefix)
        )
        tag = "ListBucketResult"
        self._answer(200, f"<{tag}><IsTruncated>false</IsTruncated>{entries}</{tag}>".encode())

    def do_DELETE(self) -> None:
        with self.held.lock:
            self.held.objects.pop(self._key, None)
        self._answer(204)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def object_server(nice: int = 0, bytes_per_second: float = 0.0) -> Iterator[dict[str, Any]]:
    """Run the server in a process of its own; yields options for ``RemoteOptions``."""
    command = [sys.executable, __file__, "--nice", str(nice)]
    command += ["--bytes-per-second", str(bytes_per_second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield {
                "config": {
                    "aws_endpoint": process.stdout.readline().strip(),
                    "aws_region": "us-east-1",
                    "aws_access_key_id": "someone",
                    "aws_secret_access_key": "nothing",
                },
                "client_options": {"allow_http": True},
            }
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--bytes-per-second", type=float, default=0.0, help="of all reads")
    options = parser.parse_args()
    os.nice(options.nice)
    _Handler.held = _Held()
    _Handler.link = _Link(options.bytes_per_second)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
