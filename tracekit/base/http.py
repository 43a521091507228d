"""Requests over HTTP that end where they were sent.

In: a request. Out: its answer. A redirect is refused: it turns a POST into a GET, such as of a login page, and hands
the password of one server to another.
"""

from __future__ import annotations

import urllib.request


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


#: Raises HTTPError for a redirect, as for other answers that are none.
OPENER = urllib.request.build_opener(_NoRedirects)
