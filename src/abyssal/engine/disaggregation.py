"""Prefill and decode in engines of their own: long prompts then never delay the tokens of other requests.

The prefill engine computes a prompt and its first token. Meanwhile the decode engine takes pages for it, and says so; from then on
every step of the prefill sends the entries that it completed, and the step that ends the prompt the rest: the last tokens of windows and
states. The decode engine writes the parts into its pages and goes on with the second token. Whoever runs the two carries the notes
between them (`serve/disaggregated_client.py`); the caches go from engine to engine, by a `Link`.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine, Scheduled
from abyssal.engine.link import Link
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.engine.sampler import SampledToken
from abyssal.engine.sequence import Sequence
from abyssal.errors import EngineDeadError
from abyssal.kv.handover import Part, complete, read_part, write_part
from abyssal.kv.planner import part_bytes

POLL_MS = 1  # how often an engine that has nothing else to do looks for parts that have arrived


@dataclass(frozen=True, slots=True)
class Reserved:
    """To the prefill engine: there are pages for the prompt."""

    request_id: str
    known: int  # first tokens of the prompt whose whole-context entries need not be sent


@dataclass(frozen=True, slots=True)
class PartSent:
    """To the decode engine: a part is under way."""

    request_id: str
    sender: int  # rank
    receiver: int  # rank
    start: int  # tokens, as in `Part`
    end: int
    folded: int | None  # as in `SequenceCache`; None: further parts follow
    output_ids: list[int]  # with the last part: tokens already generated and reported

    @property
    def part(self) -> Part:
        return Part(self.start, self.end, self.folded is not None)


Note = Reserved | PartSent
Moving = TypeVar("Moving")  # what an engine keeps of a request that is on its way


class LinkedEngine(Engine, Generic[Moving]):
    """An engine that hands requests over, or takes them up.

    Attributes:
        outbox: notes that nobody has taken yet.
    """

    def __init__(self, config: EngineConfig, link: Link) -> None:
        super().__init__(config)
        self.link = link
        self.outbox: list[Note] = []
        self._moving: dict[str, Moving] = {}  # by request id

    def has_unfinished(self) -> bool:
        return super().has_unfinished() or bool(self._moving)

    def _is_in_use(self, request_id: str) -> bool:
        return super()._is_in_use(request_id) or request_id in self._moving


@dataclass(slots=True)
class _Outgoing:
    seq: Sequence
    receiver: int  # rank
    sent: int | None = None  # tokens that the decode engine has; None: it has no pages yet
    is_computed: bool = False  # the prompt is; the sequence holds its pages until they are sent


class PrefillEngine(LinkedEngine[_Outgoing]):
    """Computes prompts and their first token for decode engines."""

    def add_for(self, receiver: int, request: EngineRequest) -> None:
        """As `add`; after its first token `request` goes on in the engine of rank `receiver`.

        Raises:
            RequestError: it can never be served as asked.
        """
        self.add(request)
        self._moving[request.request_id] = _Outgoing(self._sequences[request.request_id], receiver)

    def take_note(self, note: Reserved) -> None:
        """The decode engine has pages; one of a request that has ended is ignored."""
        if (outgoing := self._moving.get(note.request_id)) is not None:
            outgoing.sent = note.known

    def abort(self, request_id: str) -> None:
        outgoing = self._moving.pop(request_id, None)
        if outgoing is not None and outgoing.is_computed:
            self.cache.free(outgoing.seq.cache)
        super().abort(request_id)

    def poll_ms(self) -> int | None:
        """While computed sequences keep their pages, waiting requests may find none."""
        waits = not self.scheduler.running and any(outgoing.is_computed for outgoing in self._moving.values())
        return None if waits else super().poll_ms()

    def step(self) -> list[RequestUpdate]:
        updates = super().step()
        for request_id in [name for name, outgoing in self._moving.items() if self._send(outgoing)]:
            self.abort(request_id)
        return updates

    def _can_fly(self, scheduled: Scheduled) -> bool:
        """Never: a step launched ahead would change the state that is handed over."""
        return False

    def _commit(self, seq: Sequence, count: int, token: SampledToken | None) -> RequestUpdate | None:
        update = super()._commit(seq, count, token)
        if update is None or (outgoing := self._moving.get(update.request_id)) is None:
            return update
        if update.finish_reason is None:
            del self._sequences[update.request_id]
            self.scheduler.running.remove(seq)
            outgoing.is_computed = True
        return update

    def _end(self, seq: Sequence) -> None:
        super()._end(seq)
        self._moving.pop(seq.request.request_id, None)

    def _refuse_head(self) -> list[RequestUpdate]:
        kept = any(outgoing.is_computed for outgoing in self._moving.values())
        return [] if kept else super()._refuse_head()

    def _send(self, outgoing: _Outgoing) -> bool:
        """Send what is complete and not yet sent; whether that was all."""
        seq, is_last = outgoing.seq, outgoing.is_computed
        if outgoing.sent is None or (seq.num_computed <= outgoing.sent and not is_last):
            return False
        part = Part(outgoing.sent, seq.num_computed, is_last)
        if part_bytes(self.runner.plan, part.start, part.end, is_last):
            self.link.send(read_part(self.cache, seq.cache, part), outgoing.receiver)
            output = seq.token_ids[len(seq.request.prompt_ids) :] if is_last else []
            folded = seq.cache.folded if is_last else None
            ends = self.link.rank, outgoing.receiver
            self.outbox.append(PartSent(seq.request.request_id, *ends, part.start, part.end, folded, output))
            outgoing.sent = part.end
        return is_last


@dataclass(slots=True)
class _Incoming:
    seq: Sequence
    is_reserved: bool = False
    parts: deque[tuple[PartSent, Future[Tensor]]] = field(default_factory=deque)  # under way
    last: PartSent | None = None  # all parts are there


class DecodeEngine(LinkedEngine[_Incoming]):
    """Goes on with requests whose prompts prefill engines compute."""

    def expect(self, request: EngineRequest) -> None:
        """Take up `request` as soon as a prefill engine has computed its prompt and there is room.

        Raises:
            RequestError: it can never be served as asked.
        """
        self._moving[request.request_id] = _Incoming(self._new_sequence(request, []))

    def take_note(self, note: PartSent) -> None:
        """Begin to receive a part. One of a request that was dropped is under way all the same, and is received for nobody."""
        size = part_bytes(self.runner.plan, note.start, note.end, note.part.last)
        future = self.link.receive(size, note.sender)
        if (incoming := self._moving.get(note.request_id)) is not None:
            incoming.parts.append((note, future))

    def abort(self, request_id: str) -> None:
        if (incoming := self._moving.pop(request_id, None)) is not None:
            self.cache.free(incoming.seq.cache)
        super().abort(request_id)

    def poll_ms(self) -> int | None:
        arriving = any(incoming.parts or incoming.last for incoming in self._moving.values())
        return POLL_MS if arriving and not self._sequences else super().poll_ms()

    def step(self) -> list[RequestUpdate]:
        for incoming in self._moving.values():
            if not incoming.is_reserved and not self._reserve(incoming):
                break  # in order of arrival: a long prompt would never find room if short ones overtook it
        for incoming in list(self._moving.values()):
            self._store(incoming)
            if incoming.last is not None and len(self.scheduler.running) < self.config.max_num_seqs:
                self._join(incoming, incoming.last)
        return super().step()

    def _reserve(self, incoming: _Incoming) -> bool:
        seq, prompt = incoming.seq, incoming.seq.request.prompt_ids
        if self.scheduler.waiting or not self.scheduler.has_room(seq):
            return False
        known = self.cache.allocate_restored(seq.cache, prompt, len(prompt))
        if known is None:
            return False
        incoming.is_reserved = True
        self.outbox.append(Reserved(seq.request.request_id, known))
        return True

    def _store(self, incoming: _Incoming) -> None:
        while incoming.parts and incoming.parts[0][1].done():
            note, future = incoming.parts.popleft()
            try:
                raw = future.result()
            except RuntimeError as error:
                raise EngineDeadError(f"the link to engine {note.sender} broke: {error}") from error
            write_part(self.cache, incoming.seq.cache, note.part, raw)
            if note.part.last:
                incoming.last = note

    def _join(self, incoming: _Incoming, last: PartSent) -> None:
        """The sequence runs here from now on."""
        seq = incoming.seq
        del self._moving[last.request_id]
        for token in last.output_ids:
            seq.token_ids.append(token)
            seq.sampler.append(token)
        assert last.folded is not None
        complete(self.cache, seq.cache, seq.token_ids, last.end, last.folded)
        seq.num_computed = last.end
        self._sequences[last.request_id] = seq
        self.scheduler.running.append(seq)
