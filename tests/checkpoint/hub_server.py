"""A Hub of one model on this machine, so that the real client can be used in both directions: files and refusals."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPO = "org/name"


@dataclass
class Hub:
    """`revisions` maps branches and tags to commits of 40 hex digits, `files` commits to the files of a snapshot.

    `served` is filled with the names of the files whose bytes were sent.
    """

    revisions: Mapping[str, str]
    files: Mapping[str, Mapping[str, bytes]]
    gated: bool = False
    served: list[str] = field(default_factory=list)
    endpoint: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port of the loopback interface; `hub.endpoint` is its address."""

    class Handler(_Handler):
        served_hub = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served_hub: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        _, _, rest = path.partition(f"/{REPO}/")
        if not rest:
            return self._refuse(401, "RepoNotFound")
        action, _, rest = rest.partition("/")
        revision, _, name = rest.partition("/")
        commit = self.served_hub.revisions.get(revision, revision)
        if commit not in self.served_hub.files:
            return self._refuse(404, "RevisionNotFound")
        files = self.served_hub.files[commit]
        if action == "revision":
            return self._send(json.dumps({"id": REPO, "sha": commit, "siblings": []}).encode())
        if action == "tree":
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            return self._send(json.dumps(entries).encode())
        if self.served_hub.gated:
            return self._refuse(403, "GatedRepo")
        if self.command == "GET":
            self.served_hub.served.append(name)
        return self._send(files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": commit})

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def _send(self, body: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
