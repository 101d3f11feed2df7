"""What bad services, bad settings and other users of a bucket get."""

import datetime
import socket
import traceback
from dataclasses import replace
from unittest.mock import patch

import pytest

import cpr_ext
from cpr_ext.wings.remote import (
    FencedError,
    RemoteError,
    RemoteOptions,
    fetch_store,
    open_objects,
    range_reading,
    remote_copy,
)
from cpr_ext.wings.remote.objects import brief
from cpr_ext.wings.remote.remote_state import newest_state
from cpr_ext.wings.remote.remote_writer import RemoteWriter
from python_tests.helpers import Trained, assert_same, flip
from python_tests.wings.remote.faulty_objects import MemoryObjects
from python_tests.wings.remote.servers import SECRET, empty_bucket, s3_service
from python_tests.wings.remote.test_remote_copy import (
    OPTIONS,
    SMALL,
    begin,
    close_and_lose,
    train_and_save,
)

ONCE = {"max_retries": 0, "retry_timeout": datetime.timedelta(seconds=5)}


class FaultyService:
    """A WSGI application in front of another: so many requests for reading meet a fault.

    ``fault``: "throttled" (503), or "cut" (the answer ends half way).
    """

    def __init__(self, application):
        self._application = application
        self.meet("", times=0)

    def meet(self, fault, times):
        self.fault, self.times, self.met = fault, times, 0

    def __call__(self, environ, start_response):
        if self.times == 0 or environ["REQUEST_METHOD"] != "GET":
            return self._application(environ, start_response)
        self.times -= 1
        self.met += 1
        if self.fault == "throttled":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return self._half(environ, b"".join(self._application(environ, start_response)))

    def _half(self, environ, body):
        yield body[: len(body) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("the network ended")


@pytest.fixture(scope="module")
def server():
    in_front = []

    def make(application):
        in_front.append(FaultyService(application))
        return in_front[0]

    with s3_service(make) as options:
        yield in_front[0], options


@pytest.fixture
def options(server):
    with patch.object(remote_copy, "FIRST_PAUSE_SECONDS", 0.01):
        plain = empty_bucket(server[1])
        yield RemoteOptions(plain.address, **server[1], retry_config=ONCE)


@pytest.mark.parametrize("fault", ["throttled", "cut"])
def test_ranges_are_tried_again(server, options, tmp_path, fault):
    trained = begin(tmp_path / "a", remote=options)
    train_and_save(trained)
    trained.checkpointer.close()
    read, calls = range_reading._read, []

    def reading(*arguments):
        if not calls:
            server[0].meet(fault, times=2)
        calls.append(arguments)
        return read(*arguments)

    with patch.object(range_reading, "_read", reading):
        fetch_store(open_objects(options), tmp_path / "copy")
    assert server[0].met == 2
    reader = Trained(tmp_path / "copy", SMALL, seed=3, **OPTIONS)
    assert not reader.checkpointer.recover().damaged_segments
    reader.die()


def test_a_bucket_that_does_not_exist_or_is_refused_is_named_without_secrets(options, tmp_path):
    def refused():
        raise RuntimeError("the role is gone")

    for remote, words in (
        (replace(options, address="s3://nowhere/job"), "NoSuchBucket"),
        (replace(options, config={}, credential_provider=refused), "the role is gone"),
    ):
        with pytest.raises(RemoteError, match=words) as raised:
            begin(tmp_path / "a", remote=remote)
        assert SECRET not in str(raised.value)
    begin(tmp_path / "a", remote=options).checkpointer.close()


def test_secrets_are_in_no_file_no_object_and_no_log(options, tmp_path, caplog):
    trained = begin(tmp_path / "a", remote=options)
    train_and_save(trained)
    trained.checkpointer.close()
    objects = open_objects(options)
    held = [objects.read(key) for key in ["HEAD", *objects.list("objects/")]]
    held += [path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(held) > 8
    assert not any(SECRET.encode() in data for data in held)
    assert SECRET not in caplog.text


def test_errors_hide_signatures_and_keep_reasons():
    text = (
        "Generic MicrosoftAzure error: Error performing GET "
        f"https://a.blob.core.windows.net/c?restype=container&sig={SECRET} in 4ms - Server returned"
        " non-2xx status code: 403 Forbidden: \n<?xml version='1.0'?>\n<Error><Code>NoAuth</Code>"
        f"<Message>Not you</Message><Sig>{SECRET}</Sig></Error>\n\nDebug source:\n{SECRET}"
    )
    line = brief(ValueError(text))
    assert SECRET not in line
    assert "\n" not in line
    assert line.endswith("(NoAuth; Not you)")
    assert "403 Forbidden" in line
    assert brief(RemoteError(line)) == f"RemoteError: {line}"
    said = "Error performing GET http://127.0.0.1:9000/b in 2us - HTTP error: builder error"
    assert "client_options={'allow_http': True}" in brief(ValueError(said))


@pytest.mark.parametrize("password", [SECRET, f"a/{SECRET}", f"a?{SECRET}", f"a@{SECRET}"])
def test_errors_hide_the_password_of_a_configured_endpoint(password):
    options = RemoteOptions(
        "s3://bucket/job",
        config={
            "aws_endpoint": f"http://user:{password}@127.0.0.1:1",
            "aws_access_key_id": "a",
            "aws_secret_access_key": "b",
            "aws_region": "c",
        },
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    with pytest.raises(cpr_ext.CprError) as refusal:
        open_objects(options).read("HEAD")
    text = "".join(traceback.format_exception(refusal.value))
    assert SECRET not in text
    assert "user" not in str(refusal.value)


def test_a_bug_in_obstore_is_an_error_of_one_request():
    class PanicException(BaseException):
        pass

    pytest.importorskip("obstore")
    objects = open_objects(RemoteOptions("memory:///"))
    for raised, expected in ((PanicException, RemoteError), (KeyboardInterrupt,) * 2):
        with patch.object(objects._api, "delete", side_effect=raised), pytest.raises(expected):
            objects.delete("a")


class LaggingObjects(MemoryObjects):
    """Lists an object only some requests after it was made."""

    def __init__(self, lag):
        super().__init__()
        self.lag = lag
        self._made = {}
        self._now = 0

    def replace(self, key, data, tag):
        self._made.setdefault(key, self._now)
        return super().replace(key, data, tag)

    def write(self, key, chunks):
        self._made[key] = self._now
        super().write(key, chunks)

    def list(self, prefix):
        self._now += 1
        return [key for key in super().list(prefix) if self._made[key] + self.lag < self._now]


@pytest.mark.parametrize("lag", [1, 5, 10**6])
def test_a_listing_that_lags_costs_no_state_and_no_writer_is_overwritten(tmp_path, lag):
    objects = LaggingObjects(lag)
    with patch("cpr_ext.wings.remote.opening.open_objects", lambda options: objects):
        trained = begin(tmp_path / "a")
        for _ in range(3):
            train_and_save(trained)
            assert trained.checkpointer.store.origin.wait(30)
        late = RemoteWriter(objects, tmp_path / "a")
        with pytest.raises(FencedError):
            late.copy(newest_state(objects).manifest)
        rows = close_and_lose(trained)
        other = begin(tmp_path / "b", seed=9)
        assert other.report.step == 6
        assert_same(other.rows(), rows)
        other.checkpointer.close()


def test_damage_that_is_refused_is_healed_first(objects, tmp_path):
    trained = begin(tmp_path / "a")
    train_and_save(trained)
    assert trained.checkpointer.store.origin.wait(30)
    trained.checkpointer.recover()
    rows = trained.rows()
    record = trained.store.manifest.rows[0]
    for shards in (None, [1]):
        flip(trained.store.path_of(record), record.file_bytes - 1)
        report = trained.checkpointer.recover(shards=shards, on_damage="raise")
        assert not report.damaged_segments
        assert_same(trained.rows(), rows)
    for key, data in objects.held.items():
        objects.held[key] = data if "base" not in key else data[:-1] + bytes([data[-1] ^ 1])
    flip(trained.store.path_of(record), record.file_bytes - 1)
    with pytest.raises(cpr_ext.DamageError, match="nothing was changed"):
        trained.checkpointer.recover(on_damage="raise")
    trained.checkpointer.close()
