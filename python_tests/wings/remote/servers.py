"""Services of object storage on this machine: real HTTP servers that behave like them."""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request

import pytest

from cpr_ext.wings.remote import RemoteOptions

SECRET = "hush"
AZURITE = "CPR_EXT_AZURITE"  # the command, if it is not on the PATH
# Of the emulator's only account; published with it.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def s3_service(in_front=lambda application: application):
    """moto's server in this process, behind a WSGI application; options without an address."""
    pytest.importorskip("obstore")
    moto = pytest.importorskip("moto.server")
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = in_front(moto.DomainDispatcherApplication(moto.create_backend_app))
    options = {"threaded": True, "request_handler": MotoRequestHandler}
    server = make_server("127.0.0.1", 0, application, **options)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {
            "config": {
                "aws_endpoint": f"http://127.0.0.1:{server.server_port}",
                "aws_region": "us-east-1",
                "aws_access_key_id": "someone",
                "aws_secret_access_key": SECRET,
            },
            "client_options": {"allow_http": True},
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def empty_bucket(service):
    """Options of an address in S3 where nothing is."""
    import boto3

    given = {name.removeprefix("aws_"): value for name, value in service["config"].items()}
    keys = {f"aws_{name}": given[name] for name in ("access_key_id", "secret_access_key")}
    where = {"endpoint_url": given["endpoint"], "region_name": given["region"]}
    client = boto3.client("s3", **where, **keys)
    client.create_bucket(Bucket="bucket")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
        for entry in page.get("Contents", []):
            client.delete_object(Bucket="bucket", Key=entry["Key"])
    return RemoteOptions("s3://bucket/job", **service)


class MotoObjects:
    """What moto's server of S3 in this process holds below ``s3://bucket/job``; read only."""

    def _keys(self):
        from moto.s3.models import s3_backends

        (buckets,) = [
            backend.buckets
            for account in list(s3_backends.values())
            for backend in account.values()
            if "bucket" in backend.buckets
        ]
        return buckets["bucket"].keys

    def read_tagged(self, key):
        return self.read(key), ""

    def read(self, key, begin=0, end=None):
        found = self._keys().get(f"job/{key}")
        if found is None:
            raise FileNotFoundError(key)
        return found.value[begin:end]

    def list(self, prefix):
        return [key[len("job/") :] for key in list(self._keys()) if key.startswith(f"job/{prefix}")]


@contextlib.contextmanager
def azure_service():
    """Azurite in a process of its own; yields options of an empty container."""
    pytest.importorskip("obstore")
    command = os.environ.get(AZURITE) or shutil.which("azurite-blob")
    if command is None:
        pytest.skip(f"no Azurite: npm install -g azurite, or name its azurite-blob in {AZURITE}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--inMemoryPersistence", "--blobPort", str(port), "--silent"]
    arguments += ["--skipApiVersionCheck", "--disableTelemetry"]
    server = subprocess.Popen(
        [command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        _wait_until_it_listens(server, port)
        _create_container(endpoint, "container")
        yield RemoteOptions(
            "az://container/job",
            config={
                "azure_storage_account_name": _ACCOUNT,
                "azure_storage_account_key": _KEY,
                "azure_storage_endpoint": endpoint,
            },
            client_options={"allow_http": True},
        )
    finally:
        server.terminate()
        server.wait()


def _wait_until_it_listens(server, port):
    for _ in range(600):
        assert server.poll() is None, "Azurite has ended"
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.1)
    raise AssertionError("Azurite does not listen")


def _create_container(endpoint, name):
    """As Azure's own tools do; obstore makes none."""
    date = email.utils.formatdate(usegmt=True)
    signed = (
        f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:2021-08-06\n"
        f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    )
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{endpoint}/{name}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
