"""Compression of answers.

In: an answer to a request. Out: the same, as gzip if the browser accepts it. Component bundles are compressed once, at
the highest level; dynamic answers quickly.
"""

from __future__ import annotations

import gzip
from functools import lru_cache

import flask

_TEXT = frozenset(
    {"application/json", "application/javascript", "text/javascript", "text/css", "text/csv", "text/html"}
)
#: Smaller answers are not compressed: they fit into one packet.
SMALLEST = 1000
#: Number of compressed files cached; compression levels of files and of other answers.
FILES_KEPT, THOROUGHLY, QUICKLY = 64, 9, 5


def compress(response: flask.Response) -> flask.Response:
    """Compress the answer if the browser accepts gzip and it is large enough."""
    if response.status_code != 200 or response.mimetype not in _TEXT or "Content-Encoding" in response.headers:
        return response
    response.vary.add("Accept-Encoding")
    if flask.request.method == "HEAD" or not flask.request.accept_encodings["gzip"]:
        return response
    is_file, response.direct_passthrough = response.direct_passthrough, False
    data = response.get_data()
    if len(data) < SMALLEST:
        return response
    response.set_data(_file(data) if is_file or "max-age" in response.headers.get("Cache-Control", "") else _page(data))
    response.headers["Content-Encoding"] = "gzip"
    if etag := response.get_etag()[0]:
        response.set_etag(f"{etag}-gzip", weak=True)
    return response


@lru_cache(maxsize=FILES_KEPT)
def _file(data: bytes) -> bytes:
    return gzip.compress(data, THOROUGHLY, mtime=0)


def _page(data: bytes) -> bytes:
    return gzip.compress(data, QUICKLY, mtime=0)
