"""Servers of object storage, and folders that are put there."""

from __future__ import annotations

import itertools
import os
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.handmade import POLL_S
from tracekit.base.paths import located

Application = Callable[..., object]

#: Azurite is an npm package; if this variable names its program `azurite-blob`, what holds of clouds is tested with it.
AZURITE = os.environ.get("TRACEKIT_AZURITE")
CLOUDS = ("s3", "gs", *(["az"] if AZURITE else []))


@contextmanager
def serving(cloud: str, refused: Callable[[int], bool] | None = None) -> Iterator[dict[str, str]]:
    """A server of a cloud, by the scheme of its addresses; the environment in which it is that cloud.

    `refused`: whether S3 answers the request of that number, from 0 on, with SlowDown.
    """
    if cloud == "az":
        with _azurite() as environment:
            yield environment
        return
    server, environment = _s3(refused) if cloud == "s3" else _google()
    threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
    try:
        yield environment
    finally:
        server.shutdown()
        server.server_close()


def _s3(refused: Callable[[int], bool] | None) -> tuple[socketserver.BaseServer, dict[str, str]]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    whole = DomainDispatcherApplication(create_backend_app)
    numbers = itertools.count()

    def throttled(environment: dict[str, object], start: Application) -> object:
        if refused is not None and refused(next(numbers)):
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        return whole(environment, start)

    server = make_server("127.0.0.1", 0, throttled, threaded=True)
    return server, {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _google() -> tuple[socketserver.BaseServer, dict[str, str]]:
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(RequestHandler, Storage(use_memory_fs=True)))
    return server, {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_port}",
        "GOOGLE_CLOUD_PROJECT": "project",  # to make buckets in
    }


@contextmanager
def _azurite() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        words = [AZURITE, "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--blobPort", "0"]
        server = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            listens = next(line for line in server.stdout if "successfully listens" in line)
            yield {
                "AZURE_STORAGE_ACCOUNT": "devstoreaccount1",  # Azurite's own, with its published key
                "AZURE_STORAGE_KEY": (
                    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
                ),
                "AZURE_STORAGE_SERVICE_ENDPOINT": f"{listens.split()[-1]}/devstoreaccount1",
            }
        finally:
            server.terminate()
            server.communicate()


def upload(folder: Path, url: str) -> None:
    """Put every file below a folder below an address; the bucket is made."""
    from pyarrow import fs

    system, place = located(url)
    making = system
    if url.startswith("s3://"):
        making = fs.S3FileSystem(
            endpoint_override=os.environ["AWS_ENDPOINT_URL"], allow_bucket_creation=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=8),
        )  # fmt: skip
    making.create_dir(place.partition("/")[0])
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        put(f"{url}/{path.relative_to(folder)}", path.read_bytes())


def put(url: str, content: bytes) -> None:
    """Write an object."""
    system, place = located(url)
    with system.open_output_stream(place) as file:
        file.write(content)
