"""A real server process that speaks S3, a bucket in it, and a way there that can be shut."""

import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress

import pytest

from depthlaw.platform import store_lease, store_s3
from depthlaw.platform.store import Store
from depthlaw.platform.store_s3 import S3Files


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Gate:
    """A way to the server that can be shut, and that can lose an answer on its way back."""

    def __init__(self, server):
        self.server, self.port, self.lose = server, free_port(), 0
        self.open()

    def open(self):
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.ways = []
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def shut(self):
        for one in (self.listener, *self.ways):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.server))
            self.ways += [near, far]
            for source, target, back in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(source, target, back), daemon=True).start()

    def _carry(self, source, target, back):
        with suppress(OSError):
            while data := source.recv(65536):
                if back and self.lose:
                    self.lose -= 1
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server_process():
    pytest.importorskip("moto", reason="the extra `dev` has the server")
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield port, process
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def server(server_process):
    return server_process[0]


@pytest.fixture(scope="session")
def secret():
    return "sentinel-93a1"


@pytest.fixture
def environment(server, secret, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}", "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def address(environment):
    S3Files("s3://bucket", 10)._call("create_bucket")
    return f"s3://bucket/runs of/{uuid.uuid4().hex}"


@pytest.fixture
def bucket(address):
    return Store.create(address)


@pytest.fixture
def gate(server, monkeypatch, address):
    gate = Gate(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    yield gate
    gate.shut()


@pytest.fixture
def quick(monkeypatch):
    """A lease's times a fortieth of theirs, and all in proportion."""
    for name, value in (("BEAT_S", 0.1), ("TTL_S", 1.5), ("POLL_S", 0.05)):
        monkeypatch.setattr(store_lease, name, value)
    monkeypatch.setattr(store_s3, "LONGEST_PAUSE_S", 0.25)
