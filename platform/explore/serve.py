"""Serves the page, to this machine alone unless told otherwise."""

from __future__ import annotations

import socket
import threading
import webbrowser
from typing import Any
from urllib.parse import urlsplit

from depthlaw.platform.explore.source import Source

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ExploreError(ValueError):
    """A page that cannot be served. One line for a person."""


def serve(source: Source, host: str, port: int, browser: bool, note: Any) -> None:
    """Until Ctrl-C. port 0 takes any that is free. note: called with the page's address."""
    try:
        import uvicorn

        from depthlaw.platform.explore.app import application
    except ImportError as error:
        raise ExploreError(f"the page needs {error.name}: pip install 'depthlaw[explore]'") from error
    app = application(source)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ExploreError(
            f"cannot listen on {host} port {port} ({error}): choose another --port, or 0 for any"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}/"
    note(address)
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    config = uvicorn.Config(
        OwnPages(app, host in LOOPBACK), log_level="warning", timeout_graceful_shutdown=1, lifespan="on"
    )
    uvicorn.Server(config).run(sockets=[listening])


class OwnPages:
    """Refuses what pages of other sites ask of this server: a browser sends their Origin, and to a server that is for
    this machine alone a Host that is not this machine's where a name was bent to point here."""

    def __init__(self, app: Any, local: bool) -> None:
        self.app, self.local = app, local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] in ("http", "websocket"):
            headers = dict(scope["headers"])
            host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
            foreign = origin and urlsplit(origin).netloc != host
            bent = self.local and urlsplit(f"//{host}").hostname not in LOOPBACK
            if foreign or bent:
                await PlainTextResponse("not for pages of other sites", 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)
