"""A Hub of model repositories on this machine that takes uploads from the real client and gives them back.

The routes are those of huggingface_hub's HTTP protocol without xet: create, preupload, LFS batch (whole files and
parts), commit, info, tree and resolve. Bytes whose SHA-256 is not the promised one are refused, as is a request for
the API without the right token and one for the storage with any.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_" + "Abc123" * 5
Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class Repository:
    """`files` are those of the last commit, `commits` the hashes of all."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class UploadHub:
    """What it holds, and how it behaves.

    `storage` has the large files by SHA-256, `parts` those that are not whole yet. Files of more than `part_bytes` go
    in parts. `stored` lists what was put into the storage in order. Where `stall_after` such requests were answered,
    the next one waits for `release`, with `stalled` set, and is not answered. `refuse_put` answers 403 to all of them,
    `refuse_create` to who makes a repository, with `refusal`. `role` is the token's, `card_errors` are found in any
    card. `texts` has every request but its authorization header.
    """

    token: str
    part_bytes: int = 1 << 62
    stall_after: int | None = None
    refuse_put: bool = False
    refuse_create: bool = False
    refusal: str = "You don't have the rights to create a model under this namespace"
    role: str = "write"
    card_errors: list[str] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)
    storage: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""


@contextmanager
def taking_uploads(hub: UploadHub) -> Iterator[UploadHub]:
    """Serve `hub` on a free port of the loopback interface; `hub.endpoint` is its address."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: UploadHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def do_PUT(self) -> None:
        self._respond()

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def _respond(self) -> None:
        self.close_connection = True
        body = self._body()
        authorization = self.headers.get("Authorization")
        others = [f"{key}: {value}" for key, value in self.headers.items() if key.lower() != "authorization"]
        self.served.texts.append("\n".join([self.path, *others]).encode() + body)
        address = urlsplit(self.path)
        if address.path.startswith("/storage/"):
            if authorization is not None:
                return self._send(_refused(400, "the token went to the storage"))
            return self._send(_store(self.served, address.path, parse_qs(address.query), self.command, body))
        if authorization != f"Bearer {self.served.token}":
            return self._send(_refused(401, "Invalid credentials"))
        return self._send(_api(self.served, self.command, address.path, body))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().strip(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, answer: Answer) -> None:
        status, body, headers = answer
        if status == 0:
            return
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _api(hub: UploadHub, method: str, path: str, body: bytes) -> Answer:
    if path == "/api/whoami-v2":
        auth = {"type": "access_token", "accessToken": {"role": hub.role}}
        return _json({"type": "user", "name": "someone", "orgs": [{"name": "team"}], "auth": auth})
    if path == "/api/validate-yaml":
        return _card_answer(hub.card_errors)
    if path == "/api/repos/create":
        return _create(hub, json.loads(body))
    if path.endswith(".git/info/lfs/objects/batch"):
        return _batch(hub, json.loads(body))
    name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
    repository = hub.repositories.get(name)
    if repository is None:
        return _refused(404, "Repository not found", "RepoNotFound")
    action, _, rest = path.partition(f"/{name}")[2].removeprefix("/").partition("/")
    if method == "POST" and action == "preupload":
        return _preupload(repository, json.loads(body))
    if method == "POST" and action == "commit":
        return _commit(hub, name, repository, body)
    if action == "tree":
        return _json([_entry(file, data) for file, data in repository.files.items()])
    if action == "resolve":
        return _resolve(repository, rest.partition("/")[2])
    siblings = [{"rfilename": file} for file in repository.files]
    return _json({"id": name, "sha": repository.commits[-1], "private": repository.private, "siblings": siblings})


def _card_answer(errors: Sequence[str]) -> Answer:
    body = {"errors": [{"message": error} for error in errors], "warnings": []}
    return (400 if errors else 200), json.dumps(body).encode(), {"Content-Type": "application/json"}


def _create(hub: UploadHub, request: Mapping[str, Any]) -> Answer:
    name = f"{request['organization']}/{request['name']}"
    if hub.refuse_create:
        return _refused(403, hub.refusal)
    place = {"url": f"{hub.endpoint}/{name}", "name": name}
    if name in hub.repositories:
        return 409, json.dumps(place | {"error": "You already created this model repo"}).encode(), {}
    hub.repositories[name] = Repository(private=request.get("visibility") == "private" or bool(request.get("private")))
    return _json(place)


def _preupload(repository: Repository, request: Mapping[str, Any]) -> Answer:
    files = []
    for file in request["files"]:
        mode, present = ("lfs" if _is_large(file["path"]) else "regular"), repository.files.get(file["path"])
        oid = None if present is None else _oid(file["path"], present)
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return _json({"files": files, "commitOid": repository.commits[-1]})


def _batch(hub: UploadHub, request: Mapping[str, Any]) -> Answer:
    objects = []
    for wanted in request["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        answer: dict[str, Any] = {"oid": oid, "size": size}
        place = f"{hub.endpoint}/storage/{oid}"
        if oid not in hub.storage:
            upload: dict[str, Any] = {"href": f"{place}?size={size}"}
            if size > hub.part_bytes:
                numbers = range(1, -(-size // hub.part_bytes) + 1)
                header = {"chunk_size": str(hub.part_bytes), **{str(n): f"{place}?part={n}" for n in numbers}}
                upload = {"href": f"{place}?complete={len(numbers)}", "header": header}
            answer["actions"] = {"upload": upload}
        objects.append(answer)
    return _json({"transfer": "multipart", "objects": objects})


def _store(hub: UploadHub, path: str, query: Mapping[str, list[str]], method: str, body: bytes) -> Answer:
    oid = path.removeprefix("/storage/")
    if method == "PUT":
        if hub.refuse_put:
            return _refused(403, "the storage is closed")
        if hub.stall_after is not None and len(hub.stored) >= hub.stall_after:
            hub.stalled.set()
            hub.release.wait()
            return 0, b"", {}
        hub.stored.append(oid)
        if "part" in query:
            hub.parts[oid, int(query["part"][0])] = body
            return 200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        data = body
    else:
        data = b"".join(hub.parts[oid, number] for number in range(1, int(query["complete"][0]) + 1))
        if [part["partNumber"] for part in json.loads(body)["parts"]] != list(range(1, int(query["complete"][0]) + 1)):
            return _refused(400, "parts are missing")
    if hashlib.sha256(data).hexdigest() != oid:
        return _refused(400, "the bytes are not those that were promised")
    hub.storage[oid] = data
    return _json({})


def _commit(hub: UploadHub, name: str, repository: Repository, body: bytes) -> Answer:
    files = dict(repository.files)
    for line in body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "header" and value.get("parentCommit") not in (None, repository.commits[-1]):
            return _refused(412, "A commit has happened since")
        if operation["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        if operation["key"] == "lfsFile":
            if value["oid"] not in hub.storage:
                return _refused(400, f"{value['path']} was never uploaded")
            files[value["path"]] = hub.storage[value["oid"]]
        if operation["key"] == "deletedFile":
            del files[value["path"]]
    repository.files = files
    repository.commits.append(hashlib.sha1(body + repository.commits[-1].encode()).hexdigest())
    commit = repository.commits[-1]
    return _json({"commitUrl": f"{hub.endpoint}/{name}/commit/{commit}", "commitOid": commit, "pullRequestUrl": None})


def _resolve(repository: Repository, file: str) -> Answer:
    if file not in repository.files:
        return _refused(404, "Entry not found", "EntryNotFound")
    data = repository.files[file]
    return 200, data, {"ETag": f'"{_oid(file, data)}"', "X-Repo-Commit": repository.commits[-1]}


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _is_large(file: str) -> bool:
    return file.endswith(".safetensors")


def _oid(file: str, data: bytes) -> str:
    """What the client compares with its own file: SHA-256 of a large one, git's hash of another."""
    if _is_large(file):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _json(content: object) -> Answer:
    return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}


def _refused(status: int, message: str, code: str = "") -> Answer:
    body = json.dumps({"error": message}).encode()
    return status, body, {"Content-Type": "application/json", "X-Error-Message": message, "X-Error-Code": code}
