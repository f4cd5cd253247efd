"""Two engines under everything that callers and machines do to them, at random: each answer is the one that its request gets alone.

Requests of all kinds come, go, come again under their old names and move between the engines; names are given twice, other work runs
between steps; steps fail, are interrupted, or run out of memory and pages. After every step each page has exactly the holders that it says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, Grammar, RequestUpdate, SamplingParams, TokenLogprobs
from abyssal.engine.runner import Runner
from abyssal.errors import RequestError
from abyssal.kv.handover import HandOver
from abyssal.kv.pool import NO_PAGE
from abyssal.ops._reference import ReferenceOps
from tests.engine.test_ahead import read
from tests.engine.test_engine import MIB, assert_drained, engine, prompt
from tests.support.families import FAMILIES, write_small
from tests.support.stepping import decoding

LENGTHS = (1, 1, 2, 5, 16, 63, 64, 65, 96, 97, 127, 128, 129, 255, 256, 257, 300, 385, 511, 512, 513, 600)
COMMON = [prompt(600, 1000 + i) for i in range(2)]
COUNT, ANSWERS = 50, 16


class Thirds:
    """A mask: the tokens, divided by three, leave 0, 1, 2, 0, 1, .."""

    def __init__(self) -> None:
        self.count = 0

    def apply(self, logits: Tensor) -> None:
        logits[torch.arange(len(logits)) % 3 != self.count % 3] = -torch.inf

    def append(self, token_id: int) -> None:
        assert token_id % 3 == self.count % 3
        self.count += 1


class Masks:
    def mask(self, _: Grammar) -> Thirds:
        return Thirds()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs | None]] = field(default_factory=list)
    end: tuple[str, int | None] | None = None

    def add(self, update: RequestUpdate) -> None:
        assert update.error is None and self.end is None
        self.tokens += update.token_ids
        self.logprobs += update.logprobs or []
        self.prompt_logprobs += [] if update.prompt_logprobs is None else [update.prompt_logprobs]
        self.end = None if update.finish_reason is None else (update.finish_reason, update.stop_token_id)

    def check(self, whole: Answer) -> None:
        """This is `whole`, or its beginning."""
        assert self.tokens == whole.tokens[: len(self.tokens)]
        assert self.end is None or (self.end, len(self.tokens)) == (whole.end, len(whole.tokens))
        assert len(self.logprobs) == len(whole.logprobs[: len(self.tokens)])
        _check_scores(self.logprobs, whole.logprobs[: len(self.tokens)])
        if self.tokens:
            assert len(self.prompt_logprobs) == len(whole.prompt_logprobs)
            for mine, other in zip(self.prompt_logprobs, whole.prompt_logprobs, strict=True):
                _check_scores(mine, other)


def _check_scores(mine: list[Any], whole: list[Any]) -> None:
    """Rounding differs with what is computed together, so near-ties may change places; V4.1's records are rounded to grids."""
    assert [score and score.token_id for score in mine] == [score and score.token_id for score in whole]
    values = [[(score.logprob, *score.top_logprobs) for score in scores if score] for scores in (mine, whole)]
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=0.02)


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams, str | None, Grammar | None]]:
    made = []
    for number in range(COUNT):
        length = rng.choice(LENGTHS)
        ids = prompt(length, number)
        if rng.random() < 0.5:
            ids = (rng.choice(COMMON)[: rng.choice([length, max(0, length - 1), 256])] + ids)[:length]
        options: dict[str, Any] = {"max_tokens": rng.choice([1, 1, 2, 3, 9, 20, 40]), "ignore_eos": rng.random() < 0.7}
        options |= {"temperature": 0} if rng.random() < 0.5 else {"temperature": rng.choice([0.5, 1.3]), "seed": number}
        for chance, more in (
            (0.3, {"top_p": 0.9, "top_k": 20}), (0.2, {"logprobs": 2}), (0.15, {"prompt_logprobs": 1}), (0.1, {"frequency_penalty": 1.5}),
            (0.1, {"repetition_penalty": 1.3}), (0.1, {"logit_bias": {number: 100, 7: -100}}), (0.3, {"stop_token_ids": [*range(9, 30)]}),
            (0.2, {"min_tokens": rng.randint(1, options["max_tokens"])}),
        ):  # fmt: skip
            options |= more if rng.random() < chance else {}
        fits = not options["ignore_eos"] and "min_tokens" not in options
        grammar = Grammar("thirds", b"") if fits and rng.random() < 0.4 else None
        made.append((ids, SamplingParams(**options), rng.choice([None, None, "salt"]), grammar))
    return made


def audit(eng: Engine) -> None:
    """Every page has the holders that it says, and every block of the prefix index its users."""
    cache, live = eng.cache, eng._sequences.values()
    counts = {bucket: np.zeros((2, pool.num_pages + 1), int) for bucket, pool in cache.pools.items()}  # sequences, index
    for seq in live:
        for name, table in seq.cache.tables.items():
            np.add.at(counts[cache.specs[name].bucket][0], table.pages[table.pages != NO_PAGE], 1)
    users = Counter(block for seq in live for block in seq.cache.blocks)
    for block in () if cache.prefix is None else cache.prefix._blocks.values():
        assert block.num_users == users[block]
        for name, pages in (*block.pages.items(), *(block.windows or {}).items()):
            np.add.at(counts[cache.specs[name].bucket][1], pages.ravel(), 1)
    for bucket, pool in cache.pools.items():
        holders, kept = counts[bucket].sum(0), counts[bucket][1]
        assert (pool._holders == holders).all() and (pool._kept == kept).all()
        assert sorted(pool._free) == [page for page in np.flatnonzero(holders == 0) if page != NO_PAGE]
        assert pool.num_idle == ((holders == kept) & (holders > 0)).sum() and not pool.data[NO_PAGE].any()
    assert eng.swap.used_bytes == sum(seq.saved.payload_bytes for seq in live if seq.saved is not None)
    assert Counter(live) == Counter([*eng.scheduler.running, *eng.scheduler.waiting])
    assert len(eng.scheduler.running) <= eng.config.max_num_seqs


class Havoc:
    """What happens to two engines; `asked` has the requests under way, each with the engine that has it."""

    def __init__(self, rng: random.Random, engines: list[Engine], kinds: list[Any], expected: list[Answer]) -> None:
        self.rng, self.engines, self.kinds, self.expected = rng, engines, kinds, expected
        self.asked: dict[str, tuple[int, Answer, Engine]] = {}
        self.left, self.answered = ANSWERS, 0
        self.fails: tuple[BaseException, bool] | None = None  # in the next step: what, and whether it has computed before
        self.seen: Counter[str] = Counter()

    def ask(self, name: str) -> None:
        kind, eng = self.rng.randrange(len(self.kinds)), self.rng.choice(self.engines)
        eng.add(EngineRequest(name, *self.kinds[kind]))
        self.asked[name] = kind, Answer(), eng

    def come(self) -> None:
        if self.left and len(self.asked) < 12:
            self.left -= 1
            self.ask(f"r{self.left}")

    def go(self) -> None:
        name = self.rng.choice(list(self.asked))
        kind, answer, eng = self.asked.pop(name)
        eng.abort(name)
        answer.check(self.expected[kind])
        if self.rng.random() < 0.6:
            self.ask(name)

    def come_twice(self) -> None:
        name, (_, _, eng) = self.rng.choice(list(self.asked.items()))
        with pytest.raises(RequestError, match="in use"):
            eng.add(EngineRequest(name, *self.kinds[0]))

    def move(self) -> None:
        name = self.rng.choice(list(self.asked))
        kind, answer, eng = self.asked[name]
        other = next(e for e in self.engines if e is not eng)
        try:
            handed = eng.export_sequence(name)
        except RequestError:
            return  # nothing of it is computed, or it has ended just now
        for update in eng._landed:
            if update.request_id == name:
                answer.add(update)
        eng.abort(name)
        del self.asked[name]
        try:
            other.import_sequence(EngineRequest(name, *self.kinds[kind]), HandOver.from_bytes(handed.to_bytes()))
        except RequestError:
            return  # no room, or a prompt whose scores are not complete
        self.asked[name] = kind, answer, other
        self.seen["moved"] += 1

    def score(self) -> None:
        ids = self.rng.choice(self.kinds)[0][:90]
        eng = self.rng.choice(self.engines)
        try:
            eng.score(ids, [len(ids)], [len(ids) - 1], eng.cache.prefix is not None)
        except RequestError as error:
            assert "no room" in str(error)

    def preempt(self) -> None:
        eng = self.rng.choice(self.engines)
        eng._land_between_steps()
        if eng.scheduler.running:
            eng.scheduler.preempt(self.rng.choice(eng.scheduler.running))

    def fail(self) -> None:
        error: BaseException = self.rng.choice([torch.OutOfMemoryError("planted"), ValueError("planted"), KeyboardInterrupt()])
        self.fails = error, self.rng.random() < 0.5

    def step(self, eng: Engine) -> None:
        try:
            updates = eng.step()
        except KeyboardInterrupt:
            self.seen["interrupted"] += 1
            return
        finally:
            self.fails = None
        for update in updates:
            kind, answer, owner = self.asked[update.request_id]
            assert owner is eng
            if update.error is not None:
                assert "planted" in update.error or "not even one token" in update.error
                del self.asked[update.request_id]
                continue
            answer.add(update)
            answer.check(self.expected[kind])
            if answer.end is not None:
                del self.asked[update.request_id]
                self.answered += 1
        audit(eng)

    def run(self) -> None:
        deeds: dict[Callable[[], None], float] = {
            self.come: self.rng.choice([0.15, 0.6]), self.go: self.rng.choice([0.0, 0.03]), self.come_twice: 0.01, self.move: 0.04,
            self.score: 0.02, self.preempt: self.rng.choice([0.02, 0.08]), self.fail: self.rng.choice([0.0, 0.0, 0.03]),
        }  # fmt: skip
        for _ in range(5000):
            for deed, chance in deeds.items():
                if self.rng.random() < chance and (self.asked or deed in (self.come, self.score)):
                    deed()
            for eng in self.engines:
                if eng.has_unfinished():
                    self.step(eng)
            if not self.left and not self.asked:
                return
        raise AssertionError("no progress")


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_happens_answers_are_those_of_each_alone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceOps, "prepare_table", lambda ops, table: table)
    monkeypatch.setattr(ReferenceOps, "table_rows", read)
    folder = write_small(family, tmp_path, seed=3)
    kinds = random_requests(random.Random(1))

    def build(**options: Any) -> Engine:
        eng = engine(folder, **options)
        eng.__dict__["_grammar_masks"] = Masks()
        return eng

    alone, expected = build(enable_prefix_caching=False), [Answer() for _ in kinds]
    for kind, answer in zip(kinds, expected, strict=True):
        alone.add(EngineRequest("a", *kind))
        while alone.has_unfinished():
            for update in alone.step():
                answer.add(update)
    havoc = Havoc(random.Random(), [], kinds, expected)
    run = Runner.__call__

    def call(self: Runner, *args: Any, **more: Any) -> Tensor:
        planted, havoc.fails = havoc.fails, None
        if planted is not None and not planted[1]:
            raise planted[0]
        logits = run(self, *args, **more)
        if planted is not None:
            raise planted[0]
        return logits

    monkeypatch.setattr(Runner, "__call__", call)
    seen: Counter[str] = Counter()
    for seed in range(5):
        rng = random.Random(seed)
        options = {
            "kv_cache_bytes": int(rng.choice([1.8, 2.2, 3]) * MIB), "max_model_len": 700, "swap_bytes": rng.choice([0, 64 * MIB, 64 * MIB]),
            "enable_prefix_caching": rng.random() < 0.7, "max_num_seqs": rng.randrange(2, 10),
            "max_num_batched_tokens": rng.choice([16, 48, 64, 96, 127, 128, 129, 256, 257]),
        }  # fmt: skip
        engines = [decoding(build(**options)) if rng.random() < 0.8 else build(**options) for _ in range(2)]
        for eng in engines:
            eng.swap._tokens_per_second = rng.choice([1.0, 1.0, 1e9])  # a copy pays, or computing again does
            monkeypatch.setattr(eng.swap, "measure_step", lambda *_: None)
            if rng.random() < 0.5:
                monkeypatch.setattr(eng.scheduler, "has_room", lambda _: True)
        havoc = Havoc(rng, engines, kinds, expected)
        havoc.run()
        seen += havoc.seen
        for eng in engines:
            assert_drained(eng)
            seen["preempted"] += eng.scheduler.num_preemptions
            seen["swapped"] += eng.swap.num_saved
        seen["answered"] += havoc.answered
    assert all(seen[what] for what in ("moved", "interrupted", "preempted", "swapped")) and seen["answered"] > 50, seen
