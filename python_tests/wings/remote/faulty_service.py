"""A server of S3 that meets faults: moto's application, in front of which they happen."""

import contextlib
import socket
import threading

import pytest

from python_tests.wings.remote.servers import SECRET


class FaultyService:
    """A WSGI application.

    ``fault``: "" or one of "throttled" (503) and "cut" (the answer ends half way); for requests of
    ``method``, ``times``.
    """

    def __init__(self, application):
        self._application = application
        self.fault = ""
        self.method = ""
        self.times = 0
        self.met = 0

    def meet(self, fault, method="", times=1):
        self.fault, self.method, self.times, self.met = fault, method, times, 0

    def __call__(self, environ, start_response):
        is_met = self.times > 0 and self.method in ("", environ["REQUEST_METHOD"])
        if not is_met or not self.fault:
            return self._application(environ, start_response)
        self.times -= 1
        self.met += 1
        if self.fault == "throttled":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        return self._half(environ, b"".join(self._application(environ, start_response)))

    def _half(self, environ, body):
        yield body[: len(body) // 2]
        self._hang_up(environ)

    @staticmethod
    def _hang_up(environ):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionError("the network ended")


@contextlib.contextmanager
def faulty_s3_service():
    """Yield the service and options without an address."""
    pytest.importorskip("obstore")
    server_module = pytest.importorskip("moto.server")
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        def log(self, *arguments):
            pass

    service = FaultyService(
        server_module.DomainDispatcherApplication(server_module.create_backend_app)
    )
    server = make_server("127.0.0.1", 0, service, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield (
            service,
            {
                "config": {
                    "aws_endpoint": f"http://127.0.0.1:{server.server_port}",
                    "aws_region": "us-east-1",
                    "aws_access_key_id": "someone",
                    "aws_secret_access_key": SECRET,
                },
                "client_options": {"allow_http": True},
            },
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
