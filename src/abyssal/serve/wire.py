"""Messages between a front and the engine processes: msgpack over one socket pair for each."""

from __future__ import annotations

import msgspec

from abyssal.config import EngineConfig
from abyssal.engine.disaggregation import Note
from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate


class Place(msgspec.Struct):
    """Where an engine stands among `prefill` engines, the first ranks, and `decode` engines that work for one server."""

    rank: int
    prefill: int
    decode: int
    store: str  # as for `engine.link.open_store`
    backend: str  # as for `engine.link.open_link`
    device: int  # its GPU, where there are any


class Start(msgspec.Struct):
    """First line of an engine process's standard input."""

    config: EngineConfig
    place: Place | None  # None: it hands nothing over
    server_key: str | None = None  # public CURVE key of the front's socket; None: the socket is of this machine


class Add(msgspec.Struct, tag=True):
    """Queue a request."""

    request: EngineRequest


class AddFor(msgspec.Struct, tag=True):
    """Queue a request that goes on in the decode engine of rank `receiver`."""

    request: EngineRequest
    receiver: int


class Expect(msgspec.Struct, tag=True):
    """Queue a request whose prompt a prefill engine computes."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    """Drop a request, if it still runs."""

    request_id: str


class Score(msgspec.Struct, tag=True):
    """Compute logits, as `Engine.score`."""

    token_ids: list[int]
    chunk_sizes: list[int]
    rows: list[int]
    reuse_prefix: bool


class Wake(msgspec.Struct, tag=True):
    """Another replica that shares this one's experts was given a request: its steps are this one's too."""


class Stop(msgspec.Struct, tag=True):
    """End the engine process."""


class Ready(msgspec.Struct, tag=True):
    """The engine is loaded."""

    info: EngineInfo
    stats: EngineStats


class Progress(msgspec.Struct, tag=True):
    """What happened since the last message."""

    updates: list[RequestUpdate]
    stats: EngineStats


class Scored(msgspec.Struct, tag=True):
    """The answer to `Score`."""

    logits: bytes  # fp32, row after row
    error: str | None = None
    param: str | None = None  # field of the request at fault


class Dead(msgspec.Struct, tag=True):
    """The engine could not be loaded, or cannot go on."""

    reason: str


Command = Add | AddFor | Expect | Note | Abort | Score | Wake | Stop
Event = Ready | Progress | Note | Scored | Dead

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
