"""Where the environment says that object storage is, and one line about storage that cannot be reached."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from tests.handmade import run
from tracekit.base import paths
from tracekit.base.paths import located

ROOT = Path(__file__).parents[1]
KEY = "a2V5"  # "key" in base 64


@pytest.fixture(autouse=True)
def storage() -> Iterator[None]:
    """Every test has its own environment."""
    paths._filesystem.cache_clear()
    yield
    paths._filesystem.cache_clear()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("", {}),
        (
            "https://mine.blob.core.usgovcloudapi.net/",
            {
                "blob_storage_authority": ".blob.core.usgovcloudapi.net",
                "dfs_storage_authority": ".dfs.core.usgovcloudapi.net",
            },
        ),
        (
            "http://127.0.0.1:10000/mine",
            {
                "blob_storage_authority": "127.0.0.1:10000",
                "dfs_storage_authority": "127.0.0.1:10000",
                "blob_storage_scheme": "http",
                "dfs_storage_scheme": "http",
            },
        ),
    ],
    ids=["public cloud", "another cloud", "emulator"],
)
def test_azure_is_what_its_own_tools_are_told(
    endpoint: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", endpoint)
    system, place = located("az://container/a/b")
    assert place == "container/a/b"
    assert system.equals(fs.AzureFileSystem(account_name="mine", account_key=KEY, **expected))
    assert not system.equals(fs.AzureFileSystem(account_name="other", account_key=KEY, **expected))


@pytest.mark.parametrize("host", ["127.0.0.1:9023", "http://127.0.0.1:9023", "http://127.0.0.1:9023/"])
def test_an_emulator_of_google_is_asked_without_keys(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    (system, place), limit = located("gs://bucket/a"), paths._RETRYING
    plain = {"anonymous": True, "scheme": "http", "retry_time_limit": limit}
    assert place == "bucket/a"
    assert system.equals(fs.GcsFileSystem(endpoint_override="127.0.0.1:9023", **plain))
    assert not system.equals(fs.GcsFileSystem(endpoint_override="127.0.0.1:9024", **plain))


@pytest.mark.parametrize("command", [("store", "list"), ("whatif",)])
def test_without_an_account_azure_is_one_clear_error(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    ran = run(*command, "--store", "az://container/live")
    said = "cannot be read: AZURE_STORAGE_ACCOUNT is not set; check the address and AZURE_STORAGE_*"
    assert (ran.code, ran.message) == (2, f"tracekit: az://container/live: {said}"), ran.err


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AZURE_STORAGE_KEY", "no base 64!", "AZURE_STORAGE_KEY is not in base 64"),
        ("AZURE_STORAGE_KEY", "YQ==YQ==", "AZURE_STORAGE_KEY is not in base 64"),
        ("AZURE_STORAGE_SERVICE_ENDPOINT", "http://127.0.0.1:10000/mine", "AZURE_STORAGE_KEY is not set"),
    ],
)
def test_what_would_end_the_process_is_one_clear_error(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY", raising=False)
    monkeypatch.delenv("AZURE_STORAGE_SAS_TOKEN", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
    monkeypatch.setenv(variable, value)
    ran = run("fleet", "run", "az://container/jobs", "--out", "study")
    assert (ran.code, f"cannot be listed: {said}; check the address" in ran.message) == (2, True), ran.err


def test_keys_of_google_that_are_not_there_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    ran = run("store", "list", "--store", "gs://bucket/live")
    assert (ran.code, "/nowhere/key.json" in ran.message) == (2, True), ran.err


def test_a_trace_in_object_storage_says_who_reads_it_without_asking_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_answer", lambda *_: pytest.fail("storage was asked"))
    ran = run("whatif", "gs://bucket/job.parquet")
    assert ran.code == 2
    assert ran.message.startswith("tracekit: gs://bucket/job.parquet: in object storage: `tracekit fleet run` reads"), (
        ran.err
    )


#: Asks storage in a process of its own: requests without an answer go on in threads, which read the environment in C
#: while later tests change it. Whoever asked again, patiently, would hear "no answer for 0 s".
ASKS = """
import json, os, sys
from datetime import timedelta
from tests.handmade import run
from tracekit.base import paths

paths._FIRST_ATTEMPTS, paths._FIRST_RETRYING, paths._FIRST_ANSWER_S = 1, timedelta(seconds=1), float(sys.argv[2])
paths._ANSWERS_S = 0.0
for words in (("store", "list", "--store"), ("fleet", "run", "--out", "study")):
    ran = run(*words, sys.argv[1])
    print(json.dumps([ran.code, ran.message]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(("listens", "said"), [(True, "no answer for 0 s"), (False, "Could not connect to server")])
def test_storage_that_never_answers_or_refuses_is_one_clear_error(
    scheme: str, listens: bool, said: str, tmp_path: Path
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        endpoints = dict.fromkeys(("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_SERVICE_ENDPOINT"), url)
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY")
        ran = subprocess.run(
            [sys.executable, "-c", ASKS, f"{scheme}://bucket/live", "0.1" if listens else "600"],
            cwd=tmp_path,
            env={**os.environ, **endpoints, **dict.fromkeys(names, KEY), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [code for code, _ in answers] == [2, 2], ran.stderr
    for _, message in answers:
        assert f"{said}; check the address and" in message
