"""Messages between the API process and the engine process: msgpack over one socket pair."""

from __future__ import annotations

import msgspec

from abyssal.engine.engine import EngineInfo, EngineStats
from abyssal.engine.request import EngineRequest, RequestUpdate


class Add(msgspec.Struct, tag=True):
    """Queue a request."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    """Drop a request, if it still runs."""

    request_id: str


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


class Dead(msgspec.Struct, tag=True):
    """The engine could not be loaded, or cannot go on."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Add | Abort | Stop).decode
decode_event = msgspec.msgpack.Decoder(Ready | Progress | Dead).decode
