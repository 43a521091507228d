"""An S3 server, and folders that are put there."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Application = Callable[..., object]


@contextmanager
def serving_s3(*, throttling: bool) -> Iterator[dict[str, str]]:
    """An S3 server; the environment in which it is S3. `throttling`: it answers every third request with SlowDown."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    whole = DomainDispatcherApplication(create_backend_app)
    numbers = itertools.count()

    def throttled(environment: dict[str, object], start: Application) -> object:
        if throttling and next(numbers) % 3 == 2:
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        return whole(environment, start)

    server = make_server("127.0.0.1", 0, throttled, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.shutdown()


def upload(folder: Path, place: str) -> None:
    """Put every file below a folder into bucket/prefix; the bucket is made."""
    from pyarrow import fs

    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    system = fs.S3FileSystem(
        endpoint_override=endpoint, scheme="http", allow_bucket_creation=True, region="us-east-1",
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=8),
    )  # fmt: skip
    system.create_dir(place.partition("/")[0])
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with system.open_output_stream(f"{place}/{path.relative_to(folder)}") as file:
            file.write(path.read_bytes())
