"""Who may call what, and that nothing a client sends is run, fetched or taken for a file."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import pickle
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

import abyssal
from abyssal import LLM, SamplingParams
from abyssal.checkpoint.source import resolve_model
from abyssal.serve.app import ROUTES
from abyssal.serve.auth import Access
from abyssal.serve.chat import load_chat_format
from tests.serve.scripted import MODEL, ScriptedClient, app_of, post, says

KEY = "a-key-for-tests"
Headers = Sequence[tuple[str, str]]

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/responses": {"model": MODEL, "input": "Hi"},
    "/tokenize": {"model": MODEL, "prompt": "Hi"},
    "/detokenize": {"model": MODEL, "tokens": [5]},
}


def app(api_key: str | None = KEY, **config: Any) -> FastAPI:
    return app_of(ScriptedClient(says("Hello.")), api_key=api_key, **config)


def concrete(path: str) -> str:
    return path.replace("{model:path}", MODEL)


def ask(app: FastAPI, method: str, path: str, headers: Headers = (), body: Any = None, root_path: str = "") -> httpx.Response:
    """One request whose path reaches the application as uvicorn would hand it over; clients tidy paths up before they send."""
    data = b"" if body is None else json.dumps(body).encode()
    raw, _, query = path.encode().partition(b"?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "root_path": root_path,
        "path": unquote(raw.decode()), "raw_path": raw, "query_string": query, "client": ("127.0.0.1", 1), "server": ("test", 80),
        "headers": [(name.lower().encode(), value.encode()) for name, value in [*headers, ("Content-Type", "application/json")]],
    }  # fmt: skip
    incoming, sent = iter([{"type": "http.request", "body": data}]), []

    async def receive() -> Any:
        return next(incoming, None) or await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=b"".join(m.get("body", b"") for m in sent[1:]))


def bearer(key: str) -> Headers:
    return [("Authorization", f"Bearer {key}")]


def spellings(path: str) -> list[str]:
    letter = path.rindex(path.rstrip("/")[-1])
    encoded = path[:letter] + f"%{ord(path[letter]):02x}" + path[letter + 1 :]
    return [
        path, path + "/", "/" + path, path.replace("/", "//"), path.upper(), encoded, path + "?key=1", path + "%2f", path + "%00",
        path + ";x", "/./" + path[1:], "/x/.." + path, "/health/.." + path, "/health" + path, path + "/health", "/%2e%2e" + path,
        "/health%2f.." + path,
    ]  # fmt: skip


# N05, N15: the key


@pytest.mark.parametrize("route", [r for r in ROUTES if r.access is Access.KEY], ids=lambda r: f"{r.method} {r.path}")
def test_n05_without_the_key_every_spelling_of_every_route_is_closed(route: Any) -> None:
    closed = app()
    for path in spellings(concrete(route.path)):
        for method in METHODS:
            response = ask(closed, method, path)
            assert response.status_code == 401, f"{method} {path} answered {response.status_code}"
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert response.json()["error"]["type"] == "authentication_error"


def test_n05_unknown_paths_are_closed_too() -> None:
    """No route of the framework's own, and no way to learn which paths exist."""
    for path in ("/", "/docs", "/redoc", "/openapi.json", "/v1", "/nothing", "*", "/healthz", "/Health", "/health/", "//health"):
        for method in METHODS:
            assert ask(app(), method, path).status_code == 401, f"{method} {path}"


def test_n05_health_is_the_one_open_route() -> None:
    assert [route.path for route in ROUTES if route.access is Access.PUBLIC] == ["/health"]
    for path in ("/health", "/%68ealth", "/health?x=1"):
        assert ask(app(), "GET", path).json() == {"status": "ok"}
    for method in set(METHODS) - {"GET"}:
        assert ask(app(), method, "/health").status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        [], bearer(""), bearer(KEY[:-1]), bearer(KEY + "x"), bearer(KEY.upper()), bearer(f'"{KEY}"'), [("Authorization", KEY)],
        [("Authorization", f"Basic {KEY}")], [("Authorization", f"Bearer{KEY}")], [("X-API-Key", KEY + "x")], [("Cookie", f"key={KEY}")],
        [("Authorization", "Bearer"), ("Key", KEY)],
    ],
)  # fmt: skip
def test_n05_only_the_key_itself_opens(headers: Headers) -> None:
    response = ask(app(), "GET", f"/v1/models?api_key={KEY}", headers)
    assert response.status_code == 401 and KEY not in response.text


def test_n05_two_keys_are_no_key() -> None:
    """A proxy and this server could each believe another one."""
    for pair in ((KEY, "wrong"), ("wrong", KEY), (KEY, KEY)):
        assert ask(app(), "GET", "/v1/models", [*bearer(pair[0]), *bearer(pair[1])]).status_code == 401
        assert ask(app(), "GET", "/v1/models", [*bearer(pair[0]), ("X-API-Key", pair[1])]).status_code == 401


@pytest.mark.parametrize("route", ROUTES, ids=lambda r: f"{r.method} {r.path}")
def test_n05_with_the_key_every_route_answers(route: Any) -> None:
    for header in (("Authorization", f"Bearer {KEY}"), ("Authorization", f"bearer {KEY}"), ("X-API-Key", KEY)):
        response = ask(app(), route.method, concrete(route.path), [header], BODIES.get(route.path))
        assert response.status_code == 200, response.text


def test_n05_a_key_that_is_not_ascii() -> None:
    key = "schlüssel-钥匙"
    assert ask(app(key), "GET", "/v1/models", bearer(key)).status_code == 200
    assert ask(app(key), "GET", "/v1/models", bearer("schl?ssel-??")).status_code == 401


def test_n05_behind_a_proxy_that_removes_a_prefix() -> None:
    """With `root_path`, the server sees the full path; the health route under it is open, and only it."""
    paths = ("/llm/health", "/llm/v1/models", "/llm/llm/health", "/llm/health/v1/models")
    assert [ask(app(), "GET", path, root_path="/llm").status_code for path in paths] == [200, 401, 401, 401]


def test_n05_websockets_are_closed() -> None:
    """They pass no check of the key, so there are none, key or not."""
    for key in (KEY, None):
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": "/health", "headers": [], "query_string": b"", "subprotocols": []}
        asyncio.run(app(key)(scope, receive, send))
        assert [message["type"] for message in sent] == ["websocket.close"]


def undeclared(app: FastAPI) -> list[str]:
    """Routes of an application that `ROUTES` does not declare; anything but a plain route is one."""
    declared = {(route.method, route.path) for route in ROUTES}
    found = []
    for route in app.routes:
        methods = route.methods if isinstance(route, APIRoute) else {"any"}
        found += [f"{m} {route.path}" for m in methods if (m, getattr(route, "path", None)) not in declared]  # type: ignore[attr-defined]
    return found


def test_n15_every_route_has_a_declared_level() -> None:
    assert all(isinstance(route.access, Access) for route in ROUTES)
    assert undeclared(app()) == []
    assert {(r.method, r.path) for r in ROUTES} == {(m, r.path) for r in app().routes for m in r.methods}  # type: ignore[attr-defined]


def test_n15_a_route_that_somebody_adds_is_noticed_and_closed() -> None:
    grown = app()

    async def shutdown(request: Request) -> Response:
        raise AssertionError("it ran")

    grown.add_api_route("/shutdown", shutdown, methods=["POST"], response_model=None)
    grown.mount("/files", FastAPI())
    assert {"POST /shutdown", "any /files"} <= set(undeclared(grown))
    assert ask(grown, "POST", "/shutdown").status_code == ask(grown, "GET", "/files/docs").status_code == 401


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache", "/reset_prefix_cache", "/load_lora_adapter", "/unload_lora_adapter", "/update_weights", "/start_profile",
        "/sleep", "/wake_up", "/dump", "/reset", "/shutdown", "/collective_rpc", "/v1/files", "/v1/batches", "/debug",
    ],
)  # fmt: skip
def test_n15_there_is_no_administration(path: str) -> None:
    for method in ("GET", "POST"):
        assert ask(app(None), method, path).status_code == 404
        assert ask(app(), method, path).status_code == 401


# N01, N03, N09: what a request can make this process do

_seen: list[str] = []
_watching = False
OPENS = ("open", "os.listdir", "os.scandir", "shutil.copyfile")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request")
RUNS = (
    "pickle.find_class",
    "exec",
    "compile",
    "import",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "marshal.loads",
)


def _audit(name: str, args: tuple[Any, ...]) -> None:
    if _watching and name in OPENS + CONNECTS + RUNS:
        _seen.append(f"{name} {args[:1]!r}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What the interpreter itself reports of files, connections and code while the block runs."""
    global _watching
    if not hasattr(sys, "_abyssal_audit"):
        sys.addaudithook(_audit)  # for ever: there is no way to take one back
        sys._abyssal_audit = True  # type: ignore[attr-defined]
    _seen.clear()
    _watching = True
    try:
        yield _seen
    finally:
        _watching = False


def warm(server: FastAPI) -> None:
    """Whatever is imported or opened once, on first use, is behind us."""
    for path, body in BODIES.items():
        assert post(server, path, body).status_code == 200
        assert post(server, path, {**body, "model": "other"}).status_code == 404
        assert post(server, path, b"{", headers={"content-type": "text/plain"}).status_code == 415


def test_the_watch_sees() -> None:
    with watched() as seen:
        pickle.loads(pickle.dumps(Path("x")))
        open("/dev/null").close()
    assert any("find_class" in entry for entry in seen) and any("/dev/null" in entry for entry in seen)


URLS = (
    "http://127.0.0.1:1/x.png", "http://localhost/x", "http://169.254.169.254/latest/meta-data", "http://10.0.0.1/", "http://[::1]/",
    "http://2130706433/", "http://0x7f.1/", "file:///etc/hostname", "ftp://127.0.0.1/x", "gopher://127.0.0.1/", "//127.0.0.1/x",
    "data:image/png;base64,AAAA", "https://example.com/x.png", "/etc/hostname",
)  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_n01_addresses_in_a_request_are_refused_and_never_visited(url: str) -> None:
    server = app(None)
    warm(server)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url}, {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}, {"type": "file", "file": {"file_id": url}},
        {"type": "text", "text": "x", "image_url": url},
    ]  # fmt: skip
    bodies = [{**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]} for part in parts]
    bodies += [{**CHAT, name: url} for name in ("image", "images", "documents", "tools", "url", "web_search_options")]
    with watched() as seen:
        answers = [
            post(server, "/v1/chat/completions", {**body, "stream": stream}) for body in bodies for stream in (False, True)
        ]
    assert [answer.status_code for answer in answers] == [400] * len(answers)
    assert not any(entry.startswith(CONNECTS + OPENS) for entry in seen), seen


TEXT_FIELDS = {
    ("/v1/completions", "prompt"), ("/tokenize", "prompt"), ("/v1/completions", "user"), ("/v1/chat/completions", "user"),
    ("/v1/responses", "user"), ("/v1/responses", "input"),
}  # fmt: skip


class Harmless:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_n03_a_pickle_stays_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(Harmless(marker))
    pickle.loads(data)
    assert marker.exists(), "the pickle would work"
    marker.unlink()
    server = app(None)
    warm(server)
    text = base64.b64encode(data).decode()
    with watched() as seen:
        for path, body in BODIES.items():
            for kind in ("application/octet-stream", "application/x-pickle", "application/python-pickle"):
                assert post(server, path, data, headers={"content-type": kind}).status_code == 415
            assert post(server, path, data).status_code == 400
            for name in {
                "weights",
                "state",
                "serialized_named_tensors",
                "method",
                "tokens",
                "prompt",
                "messages",
                "user",
                *body,
            } - {"model"}:
                answer = post(server, path, {**body, name: text})
                assert answer.status_code == (200 if (path, name) in TEXT_FIELDS else 400), f"{path} {name}: {answer.text}"
    assert not marker.exists() and not any(entry.startswith(RUNS) for entry in seen), seen


LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
RUNNERS = {"eval", "exec", "compile", "__import__"}


def dangers(source: str) -> list[str]:
    """Uses of anything that runs what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in LOADERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LOADERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in RUNNERS or name in (
                "torch.load",
                "np.load",
                "numpy.load",
                "torch.jit.load",
                "torch.hub.load",
                "os.system",
            ):
                found.append(name)
            found += [f"{name}({k.arg})" for k in node.keywords if k.arg in ("trust_remote_code", "allow_pickle", "shell")]
            found += [name] * name.endswith(("recv_pyobj", "send_pyobj"))
    return found


def test_n03_no_loader_that_runs_what_it_reads() -> None:
    folder = Path(abyssal.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 40
    assert {path.name: found for path in files if (found := dangers(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "x = torch.load(p)",
        "socket.recv_pyobj()",
        "f(trust_remote_code=True)",
        "eval(x)",
    ],
)
def test_n03_the_search_finds(line: str) -> None:
    assert dangers(line)


PATHS = (
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "%2fetc%2fpasswd", "....//etc/passwd",
    "..\\..\\etc\\passwd", "~/.ssh/id_rsa", "file:///etc/passwd", "tiny", ".", "..", "%00", "tiny-v4/../../config.json",
    base64.urlsafe_b64encode(b"../../etc/passwd").decode(),
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_n09_a_name_is_never_a_path(path: str) -> None:
    server = app(None)
    warm(server)
    with watched() as seen:
        for url in (f"/v1/models/{path}", f"/v1/models//{path}", f"/{path}", f"/v1/{path}"):
            assert ask(server, "GET", url).status_code == 404, url
        for route, body in BODIES.items():
            assert post(server, route, {**body, "model": path}).status_code == 404
            for name in ("lora", "adapter", "chat_template", "file_id", "guided_grammar", "path"):
                assert post(server, route, {**body, name: path}).status_code == 400, name
    assert not any(entry.startswith(OPENS + CONNECTS) for entry in seen), seen


# N07: a checkpoint's own code


def test_n07_code_beside_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """Every file that can name code names some, and the model loads and answers without it."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(resolve_model("tiny"), folder)
    for name in ("evil", "modeling_evil", "__init__", "conftest", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    named = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": named}))
    classes = {"auto_map": {**named, "AutoProcessor": "evil.Evil"}, "tokenizer_class": "Evil", "processor_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(classes))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps(classes))
    with LLM(str(folder), device="cpu", kv_cache_bytes=128 << 20, num_threads=1) as llm:
        assert len(llm.generate([[0, 5]], SamplingParams(max_tokens=1, temperature=0))[0].outputs[0].token_ids) == 1
    load_chat_format(folder, "v4")
    assert not marker.exists()
    assert not {"evil", "modeling_evil"} & sys.modules.keys()
