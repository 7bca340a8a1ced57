"""Cross-origin access: which origins' pages may call the server from a browser."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from .access import is_for_admins

_METHODS = ("GET", "POST")
_EXPOSED = ("X-Request-Id", "Request-Id", "Retry-After")


class CrossOrigin:
    """ASGI middleware in front of the API key check, because a browser's preflight request carries no key.

    Admin paths are never open to other origins.

    Args:
        origins: Allowed origins, such as "https://chat.example"; "*" allows all. If empty, none is allowed.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._closed = app
        self._open: ASGIApp = app
        if origins:
            self._open = CORSMiddleware(
                app,
                allow_origins=list(origins),
                allow_methods=_METHODS,
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        is_closed = scope["type"] != "http" or is_for_admins(scope["path"])
        await (self._closed if is_closed else self._open)(scope, receive, send)
