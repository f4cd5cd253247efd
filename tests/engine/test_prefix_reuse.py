"""Answers do not depend on what the prefix cache held: the handed cases A01, A05, A08, A09 and A11."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from abyssal.config import EngineConfig
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest, SamplingParams
from tests.checkpoint.build import random_v4_checkpoint
from tests.support.small_model import every_kind
from tests.support.v41_model import write_v41

BLOCK = 256
NAMES = itertools.count()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0


@pytest.fixture(scope="module", params=["v4", pytest.param("v41", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("every_kind")
    if request.param == "v4":
        random_v4_checkpoint(path, every_kind(), seed=5, quantised=False)
    else:
        write_v41(path, seed=5)
    return path


def engine(folder: Path, prefix: bool) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder), device="cpu", kv_cache_bytes=96 << 20, max_num_batched_tokens=512, max_model_len=16384,
            enable_prefix_caching=prefix,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def cached(folder: Path) -> Engine:
    return engine(folder, prefix=True)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    return engine(folder, prefix=False)


@pytest.fixture
def fresh(cached: Engine) -> Iterator[str]:
    """A salt of this test's own: it sees no other's blocks."""
    yield f"salt {next(NAMES)}"
    stats = cached.stats()
    assert stats.pages_free == stats.pages_total and not stats.num_running, "drained"


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 160) for _ in range(count)]


def ask(eng: Engine, prompts: list[list[int]], salt: str | None = None, count: int = 8) -> list[Answer]:
    """Greedy answers of `count` tokens to all prompts, computed together."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    answers = {str(next(NAMES)): Answer() for _ in prompts}
    for name, prompt in zip(answers, prompts, strict=True):
        eng.add(EngineRequest(name, prompt, params, salt))
    while eng.has_unfinished():
        for update in eng.step():
            assert update.error is None, update.error
            answer = answers[update.request_id]
            answer.tokens += update.token_ids
            answer.logprobs += [entry.logprob for entry in update.logprobs or []]
            answer.cached = update.num_cached_tokens
    return list(answers.values())


def assert_same(one: Answer, other: Answer) -> None:
    assert len(one.logprobs) == len(one.tokens) > 0
    assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a01_a_repeated_prompt_answers_as_it_did_the_first_time(cached: Engine, plain: Engine, fresh: str) -> None:
    """A01, with 3,000 tokens for the 7,700: cold, repeated, and again after other requests have used the pool."""
    prompt = tokens(3000, seed=1)
    (right,) = ask(plain, [prompt], count=24)
    for turn in range(4):
        (answer,) = ask(cached, [prompt], fresh, count=24)
        assert_same(answer, right)
        assert answer.cached == (0 if turn == 0 else 2999 // BLOCK * BLOCK)
    ask(cached, [tokens(500, seed=s) for s in range(2, 10)], fresh)
    assert_same(ask(cached, [prompt], fresh, count=24)[0], right)


CUTS = [*range(4, 8), *range(126, 131), *range(252, 261), 508, 509, *range(1020, 1025)]


@pytest.mark.parametrize(
    "cut", [pytest.param(c, marks=[] if c in (5, 127, 255, 256, 260, 509, 1023, 1024) else pytest.mark.long) for c in CUTS]
)
def test_a05_an_answer_does_not_depend_on_how_much_was_cached(cut: int, cached: Engine, plain: Engine, fresh: str) -> None:
    prompt = tokens(1025, seed=20)
    (right,) = ask(plain, [prompt], count=32)
    ask(cached, [[*prompt[:cut], prompt[cut] % 157 + 3]], fresh, count=2)
    (answer,) = ask(cached, [prompt], fresh, count=32)
    assert_same(answer, right)
    assert answer.cached == cut // BLOCK * BLOCK


def test_a08_requests_with_a_common_prefix_leave_each_other_alone(cached: Engine, plain: Engine, fresh: str) -> None:
    common = tokens(1002, seed=30)
    first, second, third = ([*common, *tokens(20, seed=s)] for s in (31, 32, 33))
    rights = [ask(plain, [prompt], count=24)[0] for prompt in (first, second, third)]
    ask(cached, [common], fresh, count=1)
    together = ask(cached, [first, second], fresh, count=24)
    for answer, right in zip([*together, *ask(cached, [third], fresh, count=24)], rights, strict=True):
        assert_same(answer, right)
        assert answer.cached == 768


@pytest.mark.parametrize("length", [n * g + d for g in (4, 128, 256) for n in (1, 4) for d in (-1, 0, 1)])
def test_a09_a_hit_leaves_at_least_one_token(length: int, cached: Engine, plain: Engine, fresh: str) -> None:
    prompt = tokens(length, seed=40 + length)
    (right,) = ask(plain, [prompt])
    for turn in range(2):
        (answer,) = ask(cached, [prompt], fresh)
        assert_same(answer, right)
        assert answer.cached == (0 if turn == 0 else (length - 1) // BLOCK * BLOCK) < length


@pytest.mark.parametrize("keep_reasoning", [pytest.param(True, marks=pytest.mark.long), False])
def test_a11_cached_length_grows_with_a_conversation(keep_reasoning: bool, cached: Engine, plain: Engine, fresh: str) -> None:
    """A11: 12 turns whose answers begin with 16 tokens of reasoning, sent back with the history or not."""
    history, earlier, grown = tokens(300, seed=60), [], []
    for turn in range(12):
        (answer,) = ask(cached, [history], fresh, count=24)
        # of an earlier request everything but its last token was computed
        common = max((shared(history, known) for known in earlier), default=0)
        assert answer.cached == min(common, len(history) - 1) // BLOCK * BLOCK, turn
        if turn in (5, 11):
            assert_same(answer, ask(plain, [history], count=24)[0])
        grown.append(answer.cached)
        earlier.append(history + answer.tokens[:-1])
        history = history + answer.tokens[0 if keep_reasoning else 16 :] + tokens(160, seed=61 + turn)
    assert grown == sorted(grown) and grown[-1] >= len(earlier[-2]) - 24 - 2 * BLOCK


def shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("reused", [0, 512])
@pytest.mark.parametrize("by_copy", [False, True])
def test_what_a_preempted_prompt_computed_itself_is_not_counted(
    cached: Engine, fresh: str, reused: int, by_copy: bool, monkeypatch
) -> None:
    """`cached_tokens` is what was reused when the request first ran; its own blocks, found again, are no saving."""
    monkeypatch.setattr(cached.scheduler.swap, "pays", lambda _: by_copy)
    prompt = tokens(3000, seed=11)
    if reused:
        ask(cached, [prompt[: reused + 1]], fresh)
    before = cached.stats().cached_tokens
    cached.add(EngineRequest("again", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), fresh))
    cached.step()
    (seq,) = cached.scheduler.running
    assert reused < seq.num_computed < len(prompt)
    cached.scheduler.preempt(seq)
    found = [update.num_cached_tokens for _ in range(20) if cached.has_unfinished() for update in cached.step()]
    assert not cached.has_unfinished() and set(found) == {reused} and cached.stats().cached_tokens - before == reused
