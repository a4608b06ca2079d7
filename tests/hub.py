"""A stand-in for the Hub: an HTTP server that speaks the part of its API by which models are uploaded and downloaded.

In a test: ``with HubServer() as hub`` and `HubServer.environment`. As a program: ``python tests/hub.py`` prints its
address and serves until it is ended. The answers have the form that huggingface_hub's `hf_api.py`, `_commit_api.py`,
`lfs.py` and `file_download.py` read (version 2.4). Files are in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_LARGE = (".safetensors", ".bin", ".png", ".model")  # the Hub's .gitattributes send these to LFS


class Repo:
    """The branch main of one repository, and the branch's commits.

    >>> Repo().oid
    '0000000000000000000000000000000000000000'
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.files: dict[str, bytes] = {}
        self.large: set[str] = set()
        self.commits: list[str] = []

    @property
    def oid(self) -> str:
        """The last commit."""
        return hashlib.sha1("".join(self.commits).encode()).hexdigest() if self.commits else "0" * 40


class HubServer:
    """Serves on the loopback interface, with a port that the system chooses.

    Writing needs the token `TOKEN`, as on the Hub. Every request is in `requests`, as "METHOD path".
    """

    def __init__(self) -> None:
        """Take a port; `__enter__` or `serve` answers requests."""
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        """What was uploaded by LFS, by SHA-256."""
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a client uses it. It has no Xet storage."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

    def serve(self) -> None:
        """Answer requests until the program is ended."""
        self._server.serve_forever(poll_interval=0.05)

    def __enter__(self) -> HubServer:
        """Answer requests in a thread."""
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def create(self, body: Any, **_: str) -> dict[str, Any]:
        """Create a repository; one that exists is a conflict."""
        name = f"{body.get('organization') or 'someone'}/{body['name']}"
        if name in self.repos:
            raise _Answer(409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
        self.repos[name] = Repo()
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def metadata(self, body: Any, **_: str) -> dict[str, Any]:
        """Check the first lines of a card only: the Hub also validates each key."""
        if not body["content"].startswith("---\n"):
            raise _Answer(400, {"error": "no metadata", "errors": [{"message": "empty or missing yaml metadata"}]})
        return {"errors": [], "warnings": []}

    def preupload(self, body: Any, repo: str, **_: str) -> dict[str, Any]:
        """Say of each file whether it is uploaded by LFS."""
        self._repo(repo)
        modes = {one["path"]: one["path"].endswith(_LARGE) or one["size"] > 10 << 20 for one in body["files"]}
        named = {path: "lfs" if large else "regular" for path, large in modes.items()}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in named.items()]}

    def batch(self, body: Any, repo: str, **_: str) -> dict[str, Any]:
        """Say where each large file is put."""
        self._repo(repo)
        put = {one["oid"]: {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}} for one in body["objects"]}
        return {"transfer": "basic", "objects": [{**one, "actions": put[one["oid"]]} for one in body["objects"]]}

    def commit(self, body: bytes, repo: str, **_: str) -> dict[str, Any]:
        """Make a commit of the lines of a payload."""
        found, lines = self._repo(repo), [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
                found.large.discard(value["path"])
            elif line["key"] == "lfsFile":
                found.files[value["path"]] = self.objects[value["oid"]]
                found.large.add(value["path"])
            elif line["key"] != "header":
                raise _Answer(400, {"error": f"this stand-in knows no {line['key']}"})
        found.commits.append(lines[0]["value"]["summary"])
        return {"success": True, "commitOid": found.oid, "commitUrl": f"{self.url}/{repo}/commit/{found.oid}"}

    def info(self, body: object, repo: str, **_: str) -> dict[str, Any]:
        """Describe a repository."""
        found = self._repo(repo)
        siblings = [{"rfilename": name} for name in sorted(found.files)]
        return {"id": repo, "modelId": repo, "sha": found.oid, "private": False, "tags": [], "siblings": siblings}

    def tree(self, body: object, repo: str, **_: str) -> list[dict[str, Any]]:
        """List the files."""
        found = self._repo(repo)
        return [_entry(name, content, name in found.large) for name, content in sorted(found.files.items())]

    def file(self, repo: str, path: str, **_: str) -> tuple[bytes, dict[str, str]]:
        """Return a file, and what a client checks it with."""
        found = self._repo(repo)
        if path not in found.files:
            raise _Answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        content = found.files[path]
        tag = _entry(path, content, path in found.large)
        return content, {"X-Repo-Commit": found.oid, "ETag": f'"{tag.get("lfs", tag)["oid"]}"'}

    def put(self, body: bytes, oid: str) -> dict[str, Any]:
        """Store a large file under its hash."""
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Answer(400, {"error": "the content does not fit its hash"})
        self.objects[oid] = body
        return {}

    def _repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise _Answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return self.repos[name]


class _Answer(Exception):
    """An answer other than success."""

    def __init__(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        super().__init__(str(body))
        self.status, self.body, self.headers = status, body, headers or {}


def _entry(name: str, content: bytes, large: bool) -> dict[str, Any]:
    """Return a file as a listing has it; git's hash is that of a header and the content."""
    header = f"blob {len(content)}\0".encode()
    entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(header + content).hexdigest()}
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {**entry, "lfs": lfs} if large else entry


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers the requests to a server."""
    answers: list[tuple[str, str, Callable[..., Any]]] = [
        ("POST", "/api/repos/create", hub.create),
        ("POST", "/api/validate-yaml", hub.metadata),
        ("POST", rf"/api/models/{_REPO}/preupload/main", hub.preupload),
        ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", hub.batch),
        ("POST", rf"/api/models/{_REPO}/commit/main", hub.commit),
        ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", hub.put),
        ("GET", rf"/api/models/{_REPO}(/revision/\w+)?", hub.info),
        ("GET", rf"/api/models/{_REPO}/tree/\w+", hub.tree),
    ]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            """Find what answers, and send it."""
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            sent = self._body()
            try:
                if file := re.fullmatch(rf"/{_REPO}/resolve/\w+/(?P<path>.+)", path):
                    return self._send(200, *hub.file(**file.groupdict()))
                for method, pattern, answer in answers:
                    if method == self.command and (found := re.fullmatch(pattern, path)):
                        self._require_token(path)
                        body = json.loads(sent) if sent and answer not in (hub.put, hub.commit) else sent
                        return self._send(200, json.dumps(answer(body, **found.groupdict())).encode())
                raise _Answer(404, {"error": f"this stand-in does not answer {self.command} {path}"})
            except _Answer as other:
                return self._send(other.status, json.dumps(other.body).encode(), other.headers)

        do_GET = do_HEAD = do_POST = do_PUT = _answer

        def _body(self) -> bytes:
            """Read the body, of a given length or in chunks."""
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _require_token(self, path: str) -> None:
            writes = self.command == "POST" and not path.endswith("validate-yaml")  # a PUT goes to a signed address
            if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise _Answer(401, {"error": "Invalid username or password."})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    return Handler


if __name__ == "__main__":
    server = HubServer()
    print(server.url, flush=True)
    server.serve()
