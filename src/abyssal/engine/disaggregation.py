"""Prefill and decode in engines of their own: long prompts then never delay the tokens of other requests.

The prefill engine computes a prompt and its first token. Meanwhile the decode engine takes pages for it, and says so; from then on
every step of the prefill is announced, and sends the entries that it completes: layer by layer, each as soon as the step is through it.
The step that ends the prompt also sends the last tokens of windows and states. Both sides know from the announcement and the planner which
layers send how much. The decode engine writes the parts into its pages and goes on with the second token. Whoever runs the two carries
the notes between them (`serve/disaggregated_client.py`); the caches go from engine to engine, by a `Link`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine, Scheduled
from abyssal.engine.link import Link
from abyssal.engine.request import EngineRequest, RequestUpdate
from abyssal.engine.sampler import SampledToken
from abyssal.engine.sequence import Sequence
from abyssal.errors import EngineDeadError
from abyssal.kv.batch import Chunk, Drawn
from abyssal.kv.handover import Part, PartReader, complete, write_part
from abyssal.kv.planner import layer_bytes
from abyssal.model.model import AfterLayer

POLL_MS = 1  # how often an engine that has nothing else to do looks for parts that have arrived


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """To the prefill engine: there are pages for the prompt."""

    request_id: str
    known: int  # first tokens of the prompt whose whole-context entries need not be sent


class RequestPart(msgspec.Struct, frozen=True):
    """A part of one request. One that comes again, since its step failed, replaces the one before."""

    request_id: str
    start: int  # tokens, as in `Part`
    end: int
    last: bool

    @property
    def part(self) -> Part:
        return Part(self.start, self.end, self.last)


class Sending(msgspec.Struct, frozen=True, tag=True):
    """To the decode engine: a step begins, of which it will get these parts. Messages come layer by layer, in a layer part by part."""

    sender: int  # rank
    receiver: int  # rank
    parts: list[RequestPart]


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """To the decode engine: the prompt is computed, and its last part is under way."""

    request_id: str
    receiver: int  # rank
    folded: int  # as in `SequenceCache`
    output_ids: list[int]  # tokens already generated and reported


Note = Reserved | Sending | Prefilled
Moving = TypeVar("Moving")  # what an engine keeps of a request that is on its way


class LinkedEngine(Engine, Generic[Moving]):
    """An engine that hands requests over, or takes them up."""

    def __init__(self, config: EngineConfig, link: Link, post: Callable[[Note], None]) -> None:
        """`post` sends a note on its way at once, in the middle of a step too."""
        super().__init__(config)
        self.link, self.post = link, post
        self._moving: dict[str, Moving] = {}  # by request id

    def has_unfinished(self) -> bool:
        return super().has_unfinished() or bool(self._moving)

    def close(self) -> None:
        super().close()
        self.link.close()

    def _is_in_use(self, request_id: str) -> bool:
        return super()._is_in_use(request_id) or request_id in self._moving


@dataclass(slots=True)
class _Outgoing:
    seq: Sequence
    receiver: int  # rank
    sent: int | None = None  # tokens that the decode engine has; None: it has no pages yet
    is_sent: bool = False  # all of it
    is_computed: bool = False  # the prompt is; the sequence holds its pages until they are sent


@dataclass(slots=True)
class _Departure:
    """A part that leaves in this step."""

    outgoing: _Outgoing
    what: RequestPart
    reader: PartReader
    num_sent: int = 0  # layers


class PrefillEngine(LinkedEngine[_Outgoing]):
    """Computes prompts and their first token for decode engines."""

    def __init__(self, config: EngineConfig, link: Link, post: Callable[[Note], None]) -> None:
        super().__init__(replace(config, enable_cuda_graphs=False), link, post)  # a graph has no place between two layers
        self._is_stuck = False  # the latest step computed nothing and gave no pages back

    def add_for(self, receiver: int, request: EngineRequest) -> None:
        """As `add`; after its first token `request` goes on in the engine of rank `receiver`.

        Raises:
            RequestError: it can never be served as asked.
        """
        self.add(request)
        if (seq := self._sequences[request.request_id]).max_new_tokens > 1:
            self._moving[request.request_id] = _Outgoing(seq, receiver)

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
        return None if self._is_stuck and self._keeps_pages else super().poll_ms()

    @property
    def _keeps_pages(self) -> bool:
        return any(outgoing.is_computed for outgoing in self._moving.values())

    def step(self) -> list[RequestUpdate]:
        steps = self._steps
        updates = super().step()
        computed = [outgoing for outgoing in self._moving.values() if outgoing.is_computed and outgoing.sent is not None]
        with self._sending([(outgoing.seq, outgoing.seq.num_computed) for outgoing in computed]) as send:
            for layer in range(self.runner.model_config.num_layers):
                send(layer)
        for outgoing in computed:
            seq = outgoing.seq
            output = seq.token_ids[len(seq.request.prompt_ids) :]
            self.post(Prefilled(seq.request.request_id, outgoing.receiver, seq.cache.folded, output))
            self.abort(seq.request.request_id)
        self._is_stuck = self._steps == steps and not computed
        return updates

    def _can_fly(self, scheduled: Scheduled) -> bool:
        """A token ends the computation here."""
        return super()._can_fly(scheduled) and not any(seq.draws(count) for seq, count in scheduled)

    def _forward(self, scheduled: Scheduled, chunks: list[Chunk], rows: list[int], drawn: Drawn | None = None) -> Tensor:
        with self._sending([(seq, seq.num_computed + count) for seq, count in scheduled]) as send:
            return self.runner(chunks, rows, send, drawn)

    @contextmanager
    def _sending(self, reached: list[tuple[Sequence, int]]) -> Iterator[AfterLayer]:
        """Send what decode engines lack of sequences that will have reached so many tokens: call what this gives after each layer.

        Where the block fails, the rest of what was announced is sent as it is, since its receiver waits for it; it will come again.
        """
        parts = [part for seq, end in reached if (part := self._depart(seq, end)) is not None]
        for receiver in sorted({part.outgoing.receiver for part in parts}):
            mine = [part.what for part in parts if part.outgoing.receiver == receiver]
            self.post(Sending(self.link.rank, receiver, mine))

        def send(layer: int, read: bool = True) -> None:
            for part in parts:
                if part.num_sent > layer:
                    continue
                message = part.reader.read(layer) if read else part.reader.messages[layer]
                part.num_sent += 1
                if len(message):
                    self.link.send(message, part.outgoing.receiver)

        try:
            yield send
        except BaseException:
            for layer in range(self.runner.model_config.num_layers):
                send(layer, read=False)
            raise
        for part in parts:
            part.outgoing.sent, part.outgoing.is_sent = part.what.end, part.what.last

    def _take(self, seq: Sequence, token: SampledToken) -> RequestUpdate:
        update = super()._take(seq, token)
        outgoing = self._moving.get(update.request_id)
        if outgoing is not None and update.finish_reason is None:
            del self._sequences[update.request_id]
            self.scheduler.running.remove(seq)
            outgoing.is_computed = True
        return update

    def _end(self, seq: Sequence) -> None:
        super()._end(seq)
        self._moving.pop(seq.request.request_id, None)

    def _refuse_head(self) -> list[RequestUpdate]:
        return [] if self._keeps_pages else super()._refuse_head()

    def _depart(self, seq: Sequence, end: int) -> _Departure | None:
        """What the decode engine lacks of the first `end` tokens of `seq`; None: it lacks nothing, or has no pages."""
        outgoing = self._moving.get(seq.request.request_id)
        if outgoing is None or outgoing.sent is None or outgoing.is_sent:
            return None
        last = end == len(seq.request.prompt_ids)
        if end < outgoing.sent or not any(sizes := layer_bytes(self.runner.plan, outgoing.sent, end, last)):
            return None
        what = RequestPart(seq.request.request_id, outgoing.sent, end, last)
        return _Departure(outgoing, what, PartReader(self.cache, seq.cache, what.part, sizes))


@dataclass(slots=True)
class _Arrival:
    """A part under way."""

    part: Part
    sender: int  # rank
    messages: tuple[Tensor, ...]  # by layer
    futures: list[Future[None]] = field(default_factory=list)  # of the messages that are not empty, in the order of layers


@dataclass(slots=True)
class _Incoming:
    seq: Sequence
    is_reserved: bool = False
    arrivals: deque[_Arrival] = field(default_factory=deque)
    prefilled: Prefilled | None = None  # no further part follows


class DecodeEngine(LinkedEngine[_Incoming]):
    """Goes on with requests whose prompts prefill engines compute."""

    def __init__(self, config: EngineConfig, link: Link, post: Callable[[Note], None]) -> None:
        super().__init__(config, link, post)
        self._is_stuck = False  # the latest step found nothing that it could compute

    def expect(self, request: EngineRequest) -> None:
        """Take up `request` as soon as a prefill engine has computed its prompt and there is room.

        Raises:
            RequestError: it can never be served as asked.
        """
        self._moving[request.request_id] = _Incoming(self._new_sequence(request, []))

    def take_note(self, note: Sending | Prefilled) -> None:
        """Begin to receive parts. Those of a request that was dropped are under way all the same, and are received for nobody."""
        if isinstance(note, Prefilled):
            if (incoming := self._moving.get(note.request_id)) is not None:
                incoming.prefilled = note
            return
        arrivals = [_Arrival(each.part, note.sender, self._room_for(each)) for each in note.parts]
        for layer in range(self.runner.model_config.num_layers):
            for arrival in arrivals:
                if len(message := arrival.messages[layer]):
                    arrival.futures.append(self.link.receive(message, note.sender))
        for each, arrival in zip(note.parts, arrivals, strict=True):
            if (incoming := self._moving.get(each.request_id)) is not None:
                incoming.arrivals.append(arrival)

    def _room_for(self, what: RequestPart) -> tuple[Tensor, ...]:
        sizes = layer_bytes(self.runner.plan, what.start, what.end, what.last)
        return torch.empty(sum(sizes), dtype=torch.uint8, device=self.runner.device).split(sizes)

    def abort(self, request_id: str) -> None:
        if (incoming := self._moving.pop(request_id, None)) is not None:
            self.cache.free(incoming.seq.cache)
        super().abort(request_id)

    def poll_ms(self) -> int | None:
        """Pages that are reserved are given back only when their prompt has arrived; until then a sequence may have to wait for some."""
        if self._is_stuck:
            if any(incoming.arrivals or incoming.prefilled for incoming in self._moving.values()):
                return POLL_MS
            if self._has_reserved:
                return None
        return 0 if self.has_unfinished() else None

    @property
    def _has_reserved(self) -> bool:
        return any(incoming.is_reserved for incoming in self._moving.values())

    def step(self) -> list[RequestUpdate]:
        for incoming in self._moving.values():
            if not incoming.is_reserved and not self._reserve(incoming):
                break  # in order of arrival: a long prompt would never find room if short ones overtook it
        for incoming in list(self._moving.values()):
            self._store(incoming)
            has_slot = len(self.scheduler.running) < self.config.max_num_seqs
            if incoming.prefilled is not None and not incoming.arrivals and has_slot:
                self._join(incoming, incoming.prefilled)
        self._is_stuck = False
        return super().step()

    def _refuse_head(self) -> list[RequestUpdate]:
        self._is_stuck = self._has_reserved
        return [] if self._is_stuck else super()._refuse_head()

    def _reserve(self, incoming: _Incoming) -> bool:
        seq, prompt = incoming.seq, incoming.seq.request.prompt_ids
        if self.scheduler.waiting or not self.scheduler.has_room(seq):
            return False
        known = self.cache.allocate_restored(seq.cache, prompt, len(prompt))
        if known is None:
            return False
        incoming.is_reserved = True
        self.post(Reserved(seq.request.request_id, known))
        return True

    def _store(self, incoming: _Incoming) -> None:
        while incoming.arrivals and incoming.arrivals[0].futures[-1].done():
            arrival = incoming.arrivals.popleft()
            try:
                arrival.futures[-1].result()
            except RuntimeError as error:
                raise EngineDeadError(f"the link to engine {arrival.sender} broke: {error}") from error
            write_part(self.cache, incoming.seq.cache, arrival.part, arrival.messages)

    def _join(self, incoming: _Incoming, prefilled: Prefilled) -> None:
        """The sequence runs here from now on."""
        seq = incoming.seq
        del self._moving[prefilled.request_id]
        for token in prefilled.output_ids:
            seq.token_ids.append(token)
            seq.sampler.append(token)
        seq.num_computed = len(seq.request.prompt_ids)
        complete(self.cache, seq.cache, seq.token_ids, seq.num_computed, prefilled.folded)
        self._sequences[prefilled.request_id] = seq
        self.scheduler.running.append(seq)
