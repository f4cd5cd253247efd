"""Who may call what: every route declares its access, and without a key only the public ones answer."""

from __future__ import annotations

import enum
import hmac

from abyssal.serve.errors import HttpError, error_response
from abyssal.serve.streams import App, Receive, Scope, Send


class Access(enum.Enum):
    PUBLIC = "public"  # for load balancers: tells nothing and changes nothing
    KEY = "key"  # wants the API key, if there is one


class RequireKey:
    """Middleware that asks for the key before routing: only a path that equals a public one, letter for letter, goes without.

    Whatever else a path may be (doubled or trailing slashes, other case, encoded letters, no route at all), it is closed.
    """

    def __init__(self, app: App, api_key: str | None, public: frozenset[str]) -> None:
        self._app, self._public = app, public
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key is not None and not self._is_open(scope, self._key):
            message = "a valid API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            error = HttpError(401, message, "authentication_error", code="invalid_api_key")
            return await error_response(error, scope["path"], {"www-authenticate": "Bearer"})(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope, key: bytes) -> bool:
        if scope["path"].removeprefix(scope.get("root_path", "")) in self._public:
            return True
        given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
        if len(given) != 1:
            return False
        name, value = given[0]
        if name == b"x-api-key":
            return hmac.compare_digest(value.strip(), key)
        scheme, _, token = value.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key)
