"""A bucket whose server takes the part of Google's, for one test at a time."""

import contextlib
import datetime
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.servers import Handler, serving

REFUSALS = {
    "busy": (503, b"busy"),
    "forbidden": (403, b'{"error": {"message": "me may not", "errors": [{"reason": "forbidden"}]}}'),
    "rate limit": (403, b'{"error": {"message": "slow down", "errors": [{"reason": "rateLimitExceeded"}]}}'),
}


class Bucket(Handler):
    """Objects with generations.

    requests: method and path of each. faults: what happens to the next ones: "lost" (done, unanswered), "busy", or to
    reads "forbidden" or "rate limit".
    """

    objects: dict[str, tuple[int, bytes, Any]]
    faults: list[str]
    requests: list[str]
    counter = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        name = urllib.parse.unquote(url.path.partition("/o/")[2])
        if (fault := self._fault()) in REFUSALS:
            return self._answer(*REFUSALS[fault])
        if not name:
            found = [each for each in self.objects if each.startswith(query.get("prefix", ""))]
            folded = [each for each in found if "/" in each and query.get("delimiter")]
            prefixes = sorted({f"{each.partition('/')[0]}/" for each in folded})
            updated = datetime.datetime.now(datetime.UTC).isoformat()
            items = [
                {"name": each, "generation": str(self.objects[each][0]), "updated": updated}
                for each in found
                if each not in folded
            ]
            return self._answer(200, json.dumps({"items": items, "prefixes": prefixes}).encode())
        if name not in self.objects:
            return self._answer(404, b"No such object")
        generation, data, metadata = self.objects[name]
        if query.get("alt") == "media":
            return self._answer(200, data, generation)
        return self._answer(200, json.dumps({"generation": generation, "metadata": metadata}).encode())

    def do_POST(self) -> None:
        fault = self._fault()
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        body = self.rfile.read(int(self.headers["content-length"]))
        if fault == "busy":
            return self._answer(503, b"busy")
        if (
            query.get("uploadType") != "multipart"
        ):  # a bucket, or an object of any generation, as the gcp provider does
            Bucket.counter += 1
            self.objects |= {query["name"]: (Bucket.counter, body, {})} if "name" in query else {}
            return self._answer(200, b"{}")
        boundary = self.headers["content-type"].partition("boundary=")[2].encode()
        about, data = (
            part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in body.split(b"--" + boundary)[1:3]
        )
        described = json.loads(about)
        with self.lock:
            now = self.objects.get(described["name"], (0, b"", None))[0]
            if int(query["ifGenerationMatch"]) != now:
                return self._answer(412, b"conditionNotMet")
            Bucket.counter += 1
            self.objects[described["name"]] = (Bucket.counter, data, described["metadata"])
            generation = Bucket.counter
        if fault == "lost":
            self.connection.close()
            return None
        return self._answer(200, json.dumps({"generation": str(generation)}).encode())

    def do_DELETE(self) -> None:
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path.partition("/o/")[2])
        self._answer(404 if self.objects.pop(name, None) is None else 204, b"")

    def _fault(self) -> str:
        with self.lock:
            self.requests.append(f"{self.command} {self.path}")
            return self.faults.pop(0) if self.faults else ""

    def _answer(self, status: int, body: bytes, generation: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if generation is not None:
            self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve an empty one; its URL, for STORAGE_EMULATOR_HOST."""
    Bucket.objects, Bucket.faults, Bucket.requests = {}, [], []
    with serving(Bucket) as address:
        yield f"http://{address}"
