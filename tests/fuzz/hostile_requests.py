"""A process that asks a dashboard what nobody asks: long texts in every parameter of every page, file and callback.

In: a store. Out: a line for each answer that is none: not a page, a refusal or a sentence. Run with a limit to its CPU
time, it ends early if any of them costs more than its length.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import urlencode

from flask.testing import FlaskClient

from tests.dashboards.ui.test_callbacks import RIGHT, callbacks, request
from tests.properties import LONG
from tracekit.base.errors import SelectionError
from tracekit.dashboards.browser.data.queries import Stored
from tracekit.dashboards.browser.data.replays import Pending, Rejected, Status, read_query
from tracekit.dashboards.browser.ui.context import EXTENSION, Service
from tracekit.dashboards.browser.web.app import make_app

JOB = "slow-worker"
MOST_WAIT_S = 600
CALLBACK = "/_dash-update-component"
#: What texts are made of: words of selections, and what engines of regular expressions go back and forth over.
FEW = ("9", "1,2 ", "a ")
MORE = (
    " ",
    "peers:all;",
    "0-1 ",
    "(",
    "=",
    "not ",
    "all + ",
    " * ",
    "a and ",
    "%41",
    "T",
    "[",
    ";",
    "slowest=3% or ",
    "worker=1,2 or ",
)
UNITS, LENGTHS = ((*FEW, *MORE), (1_900, 7_000, 100_000)) if LONG else (FEW, (7_000,))
PAGES = {
    "/": "q sort at days verdict view",
    "/job": "job window since until",
    "/workers": "step worker host dp_rank stage",
    "/pipeline": "step",
    "/whatif": "select action factor kept",
    "/timeline": "step worker stage from group find pin open range op at",
    "/compare": "with split",
    "/hosts": "q",
}
FILES = {
    "/timeline/check": "step worker stage from find pin open range op",
    "/timeline/spans": "find open stage first columns",
    "/timeline/sums": "find range",
    "/timeline/slowest.csv": "find",
    "/search": "q job",
    "/download/by_step.csv": "job window",
}
#: Selections that take for ever where patterns are searched by going back and forth, or numbers are written out.
SELECTIONS = (
    "kind=~" + ".*" * 90 + "X",
    "kind=~" + "a?" * 60 + "a{60}X",
    "kind=~a{1000}{1000}",
    "kind=~.{0,30}{0,30}{0,3}X",
    "host=~.*.*.*.*.*.*.*.*.*!",
    " or ".join(["stage=0-1000000"] * 60),
    " or ".join(f"slowest={share}%" for share in range(1, 60)),
    " + ".join(["all"] * 150),
    " + ".join(["fix=repair-link"] * 60),
)


def long(unit: str, length: int) -> str:
    """A text of that length, and something at its end that fits nothing before it."""
    return (unit * (length // len(unit) + 1))[:length] + "!x"


def statuses(client: FlaskClient, store: Path) -> Iterator[tuple[object, int]]:
    """Every request, and the status of its answer."""
    found = callbacks(store)
    page = next(name for name in found if "_pages_content" in name)
    for length in LENGTHS:
        for path, names in PAGES.items():
            for name in names.split():
                for unit in UNITS:
                    search = "?" + urlencode({"job": JOB, name: long(unit, length)})
                    address = {"_pages_location.pathname": path, "_pages_location.search": search}
                    asked = request(page, found[page], address)
                    yield (path, name, unit, length), client.post(CALLBACK, json=asked).status_code
        for path, names in FILES.items():
            for name in names.split():
                for unit in UNITS:
                    texts = {"job": JOB, name: long(unit, length)}
                    yield (path, name, unit, length), client.get(path, query_string=texts).status_code
        for callback, one in found.items():
            for each in [*one["inputs"], *one["state"]]:
                key = f"{each['id']}.{each['property']}"
                right = RIGHT.get(key, "")
                for unit in UNITS:
                    text = long(unit, length)
                    values = [{**right, name: text} for name in right] if isinstance(right, dict) else [text]
                    for value in values:
                        answer = client.post(CALLBACK, json=request(callback, one, {key: value}))
                        yield (callback, key, unit, length), answer.status_code


def main(store: Path) -> None:
    """Ask everything; while questions are replayed, ask whether the server lives."""
    logging.disable(logging.CRITICAL)
    app = make_app(store)
    client = app.server.test_client()
    client.get("/")
    for asked, status in statuses(client, store):
        if status not in {200, 204, 400, 404, 414}:
            print(asked, status)
    service: Service = app.server.extensions[EXTENSION]
    for job in (JOB, "gpu_slow_input"):
        stored = service.results.stored(job)
        for selection in SELECTIONS:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(answered, service, stored, selection)
                while wait([asked], 0.001).not_done:
                    if client.get("/healthz").status_code != 200:
                        print("/healthz", selection)
                if isinstance(asked.result(), Pending):
                    print(selection, asked.result())


def answered(service: Service, stored: Stored, selection: str) -> Status:
    """The answer to a question, or why there is none."""
    try:
        return service.replays.ask(stored, read_query(selection), wait_s=MOST_WAIT_S)
    except SelectionError as error:
        return Rejected(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
