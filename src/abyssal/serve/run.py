"""`abyssal serve`: the engine process, the HTTP server, and an orderly end for both."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import uvicorn

from abyssal.checkpoint.source import resolve_model
from abyssal.config import EngineConfig, ServerConfig
from abyssal.engine.link import require_nixl
from abyssal.errors import ConfigError
from abyssal.model_config import load_model_config
from abyssal.serve.app import create_app
from abyssal.serve.chat import load_chat_format
from abyssal.serve.context import Client
from abyssal.serve.disaggregated_client import DisaggregatedClient
from abyssal.serve.engine_client import EngineClient
from abyssal.serve.grammar import GrammarCompiler
from abyssal.tokenizer import Tokenizer

log = logging.getLogger("abyssal")

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # to end
GRACE_SECONDS = 10.0  # open requests may finish in this time
CLOSE_SECONDS = 5  # after it, they have this long to read that the server ends


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve until SIGINT, SIGTERM, or SIGHUP as the terminal closes. A second signal does not wait for open requests.

    Raises:
        ConfigError: the address cannot be listened on, or options do not go together.
        CheckpointError: there is no such model.
        AbyssalError: the engine cannot start.
    """
    listener = _listen(server_config)  # before the model is loaded: a port that is taken should not cost minutes
    with listener, suppress(asyncio.CancelledError):
        _check(engine_config, server_config)
        load_model_config(resolve_model(engine_config.model))  # before processes are started; Ctrl-C ends a download
        asyncio.run(_serve(listener, engine_config, server_config))


def _check(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """What can be refused before anything is read."""
    if server_config.ray and importlib.util.find_spec("ray") is None:
        raise ConfigError("ray=True needs Ray, which is not installed: pip install -e '.[ray]' in the clone of abyssal")
    if server_config.prefill_engines:
        if engine_config.dp * engine_config.tp > 1:
            raise ConfigError("prefill_engines and decode_engines have one rank each; leave out dp and tp, or prefill_engines")
        if server_config.ray or server_config.transfer_backend == "nixl":
            require_nixl()


async def _serve(listener: socket.socket, engine_config: EngineConfig, server_config: ServerConfig) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = end_signals(server_config)
    for sig in signals:
        loop.add_signal_handler(sig, task.cancel)  # while loading
    client = await start_client(engine_config, server_config)
    grammars = GrammarCompiler(client.info)
    try:
        folder = Path(client.info.model_folder)
        tokenizer = Tokenizer.load(folder, client.info.model_vocab_size)
        chat = load_chat_format(folder, client.info.family)
        if tokenizer is not None:
            grammars.start()
        app = create_app(client, tokenizer, server_config, chat, grammars)
        settings = uvicorn.Config(
            app,
            root_path=server_config.root_path or "",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(GRACE_SECONDS) + CLOSE_SECONDS,
        )
        server = _Server(settings, client)
        for sig in signals:
            loop.add_signal_handler(sig, server.stop)
        print(_greeting(listener, client, server_config), flush=True)
        await server.serve(sockets=[listener])
    finally:
        grammars.close()
        await client.close()


def end_signals(config: ServerConfig) -> tuple[signal.Signals, ...]:
    """SIGHUP is one of them, unless it is ignored, as under nohup, or restarts replicas."""
    restarts = config.ray and config.prefill_engines == 0
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return SIGNALS if restarts or ignored else (*SIGNALS, signal.SIGHUP)


class RunningClient(Client, Protocol):
    """Engines that were started here and are ended here."""

    async def close(self) -> None: ...


async def start_client(engine_config: EngineConfig, server_config: ServerConfig) -> RunningClient:
    """Start the engines that the configuration asks for.

    Raises:
        AbyssalError: they cannot start.
    """
    if server_config.prefill_engines == 0:
        if server_config.ray:
            return await _start_cluster(engine_config, server_config.replicas)
        return await EngineClient.start(engine_config)
    engines = server_config.prefill_engines, server_config.decode_engines
    if not server_config.ray:
        return await DisaggregatedClient.start(engine_config, *engines, server_config.transfer_backend)
    from abyssal.serve.ray_engine import start_apart

    return await start_apart(engine_config, *engines)


async def _start_cluster(config: EngineConfig, replicas: int) -> RunningClient:
    """SIGHUP then restarts the replicas one after another."""
    from abyssal.serve.cluster import ClusterClient

    client = await ClusterClient.start(config, replicas)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, client.restart_soon)
    return client


class _Server(uvicorn.Server):
    """Signals are handled above; at the end of the grace time the engine closes, so that streams end with an error event."""

    def __init__(self, config: uvicorn.Config, client: RunningClient) -> None:
        super().__init__(config)
        self._client = client
        self._closing: asyncio.Task[None] | None = None

    def stop(self) -> None:
        if self.server_state.tasks:
            log.info("ending: open requests %s", "end now" if self.should_exit else f"have {GRACE_SECONDS:g} s to finish")
        else:
            log.info("ending")
        self.force_exit = self.should_exit
        self.should_exit = True
        self._closing = self._closing or asyncio.create_task(self._close_later())

    async def _close_later(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._client.close()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _listen(config: ServerConfig) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error}; choose another --host or --port"
        ) from error


def _greeting(listener: socket.socket, client: RunningClient, config: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    model = client.info.model_name
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Define harbor."}]})
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $ABYSSAL_API_KEY"'
    return (
        f"{model} at {url}, up to {client.info.max_model_len} tokens; Ctrl-C ends it. Try:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )
