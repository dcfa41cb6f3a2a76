"""Runs the HTTP side with uvicorn: listens at once, loads the model meanwhile, and stops without losing answers."""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from openwafer.errors import UserError
from openwafer.serve.api.app import make_app
from openwafer.serve.api.frontdoor import not_http
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.api.service import Service

log = logging.getLogger("openwafer.serve")

Load = Callable[[], ServedModel]
_BACKLOG = 4096


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with what it lacks: limits on the size and time of headers, a way to hang up, and our own
    answer to what is not HTTP.
    """

    header_timeout_s = 30.0
    max_header_bytes = 64 << 10  # after the piece with their beginning
    _num_header_bytes: int | None = None  # None: a body, or nothing
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._hang_up)

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            # The first bytes of the next request on this connection.
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._hang_up)
        if self._num_header_bytes is not None:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if (self._num_header_bytes or 0) > self.max_header_bytes:
            self._hang_up()

    def on_message_begin(self) -> None:
        self._num_header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_header_bytes = None
        self._stop_timer()
        self.scope["openwafer.transport"] = self.transport  # pyright: ignore[reportGeneralTypeIssues]
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self.transport.write(not_http())
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _hang_up(self) -> None:
        self._stop_timer()
        self.transport.abort()


class ApiServer(uvicorn.Server):
    """One server for one model. `run()` returns after a signal; `load` is called in a thread of its own."""

    def __init__(self, service: Service, load: Load) -> None:
        self.service = service
        self._load = load
        self._error: BaseException | None = None
        config = service.config
        self.socket = _listen(_host(service), config.port)
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=_Protocol,
                ws="none",
                loop="uvloop",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=60,
                # For those whom the engine has told that it is over (see `shutdown`) to hear it.
                timeout_graceful_shutdown=5,
            )
        )

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        host, port = self.address
        host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        _allow_many_files()
        super().run(sockets=[self.socket])
        if self._error is not None:
            raise self._error

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.start()
        await super().startup(sockets)
        threading.Thread(target=self._load_model, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _load_model(self, loop: asyncio.AbstractEventLoop) -> None:
        began = time.monotonic()
        try:
            served = self._load()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the main thread has to raise it
            self._error = error
            self.service.state, self.service.failure = "failed", str(error)
            self.should_exit = True
            return
        fields = {"model": served.name, "seconds": round(time.monotonic() - began, 2)}
        log.info("ready", extra={"fields": fields})
        with contextlib.suppress(RuntimeError):  # stopped before it was ready
            loop.call_soon_threadsafe(self.service.set_model, served)

    async def on_tick(self, counter: int) -> bool:
        """An engine that has stopped by itself ends the server: whoever runs it can start it anew."""
        served = self.service.served
        if served is not None and self._error is None and (failure := served.engine.stats().failure) is not None:
            self._error = UserError(failure)
            self.service.state, self.service.failure = "failed", failure
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service.state != "failed":
            self.service.state = "stopping"
            log.info("stopping", extra={"fields": {"requests_to_finish": self._num_unfinished()}})
        await self._finish_requests(self.service.config.shutdown_timeout_s)
        # Whoever is still waiting gets an error that says why, and is hung up on if the engine does not say it.
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        await closing
        await self.service.stop()

    async def _close_engine(self) -> None:
        if self.service.served is not None:
            await asyncio.to_thread(self.service.served.engine.close)

    async def _finish_requests(self, timeout_s: float) -> None:
        """Wait for the requests that are running now. Others are still let in, to be told that we are stopping:
        a refused connection would look like a crash.
        """
        deadline = time.monotonic() + timeout_s
        running = set(self.server_state.tasks)
        while running and not self.force_exit and (left_s := deadline - time.monotonic()) > 0:
            _, running = await asyncio.wait(running, timeout=min(left_s, 0.1))
            await super().on_tick(0)  # the date in headers

    def _num_unfinished(self) -> int:
        if self.service.served is None:
            return 0
        stats = self.service.served.engine.stats()
        return stats.num_running + stats.num_waiting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            # Asked to stop and stopped: that is success, not a death by signal.
            self._captured_signals.clear()


def _host(service: Service) -> str:
    """Without keys only this machine may ask."""
    host = service.config.host
    if host is None:
        host = "0.0.0.0" if service.needs_key else "127.0.0.1"
    if _is_loopback(host):
        return host
    if not service.needs_key:
        raise UserError(
            f"anybody who reaches {host} could use this server, for there are no API keys: make one with "
            "`openwafer keys create --name NAME`, set $OPENWAFER_API_KEY, or listen on 127.0.0.1"
        )
    service.is_public = True
    return host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # from now on whoever connects waits and is not refused
    except OSError as error:
        listener.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}; try another --port") from None
    return listener


def _allow_many_files() -> None:
    """Every waiting client is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
