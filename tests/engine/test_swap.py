"""Preempted sequences that are copied to the host: when that pays, and that nobody notices."""

import pytest

import abyssal.engine.swap
from abyssal.engine.engine import Engine
from abyssal.engine.request import EngineRequest
from abyssal.engine.swap import FIRST_BYTES_PER_SECOND, SMOOTHING, SwapSpace
from abyssal.kv.handover import export
from abyssal.kv.pool import KVCache
from tests.engine.test_engine import alone, assert_drained, drain, engine, folder, greedy, prompt

__all__ = ["folder"]


def run_preempted(eng: Engine, requests: dict, steps: tuple[int, ...], pays: bool, monkeypatch) -> dict[str, list[int]]:
    """Serve `requests`; at these steps the newest running sequence gives up its pages."""
    monkeypatch.setattr(SwapSpace, "pays", lambda self, seq: pays and seq.num_computed > 0)
    for name, (ids, params) in requests.items():
        eng.add(EngineRequest(name, ids, params))

    def preempt(step: int) -> None:
        if step in steps and eng.scheduler.running:
            eng.scheduler.preempt(eng.scheduler.running[-1])

    return drain(eng, preempt)


@pytest.mark.parametrize("pays", [True, False])
def test_tokens_are_those_of_an_undisturbed_run(folder, monkeypatch, pays):
    requests = {f"r{i}": (prompt(100 + 130 * i, i), greedy(30)) for i in range(4)}
    expected = alone(folder, requests)
    eng = engine(folder, enable_prefix_caching=False)
    got = run_preempted(eng, requests, (2, 5, 6, 9, 20, 33), pays, monkeypatch)
    assert got == expected
    stats = eng.stats()
    assert stats.num_preemptions >= 5 and stats.num_swapped == (stats.num_preemptions if pays else 0)
    known = sum(len(ids) for ids, _ in requests.values())
    assert (stats.prompt_tokens == known) == pays, "what is copied is not computed again"
    assert eng.swap.used_bytes == 0
    assert_drained(eng)


def test_a_copy_waits_until_there_is_room_and_goes_with_its_request(folder, monkeypatch):
    monkeypatch.setattr(SwapSpace, "pays", lambda self, seq: True)
    eng = engine(folder)
    for name in "ab":
        eng.add(EngineRequest(name, prompt(300, ord(name)), greedy(20)))
    for _ in range(8):
        eng.step()
    seq = eng.scheduler.running[-1]
    eng.scheduler.preempt(seq)
    assert seq.saved is not None and eng.swap.used_bytes == seq.saved.payload_bytes > 0 and not seq.cache.blocks
    hog = eng.cache.new_sequence()
    assert eng.cache.allocate(hog, 0, 10)
    for bucket, pool in eng.cache.pools.items():
        eng.cache._make_room(bucket, pool.num_available)
    taken = [pool.take(pool.num_free) for pool in eng.cache.pools.values()]
    monkeypatch.setattr(eng.scheduler, "has_room", lambda _: True)
    plan = eng.scheduler.schedule()
    assert seq not in dict(plan) and seq.saved is not None, "pages are short: the copy stays"
    for pool, pages in zip(eng.cache.pools.values(), taken, strict=True):
        pool.give_back(pages)
    eng.cache.free(hog)
    eng.abort("b")
    assert eng.swap.used_bytes == 0
    eng.abort("a")
    assert_drained(eng)


def test_copying_pays_for_long_sequences_as_far_as_there_is_memory(folder):
    eng = engine(folder)
    eng.add(EngineRequest("a", prompt(600, 1), greedy(5)))
    for _ in range(8):
        eng.step()
    seq = eng.scheduler.running[0]
    swap, size = eng.swap, sum(len(table.pages) for table in seq.cache.tables.values())
    assert size and seq.num_computed > 500
    swap._bytes_per_second, swap._tokens_per_second = 1e12, 10.0
    assert swap.pays(seq)
    swap._tokens_per_second = 1e12
    assert not swap.pays(seq), "computing is cheaper"
    swap._tokens_per_second, swap.max_bytes = 10.0, 1000
    assert not swap.pays(seq), "no memory for it"
    swap.max_bytes = 1 << 30
    swap._bytes_per_second = swap._bytes(seq.num_computed) * 2 * 10 / (seq.num_computed - 256)
    assert swap.pays(seq)
    seq.cache.blocks[0].num_users += 1
    assert not swap.pays(seq), "what another sequence uses need not be computed again"
    seq.cache.blocks[0].num_users -= 1
    swap._tokens_per_second = None
    assert not swap.pays(seq), "nothing measured yet"


def test_steps_of_some_size_are_measured(folder):
    eng = engine(folder)
    assert eng.swap._tokens_per_second is None
    eng.add(EngineRequest("a", prompt(20, 1), greedy(3)))
    drain(eng)
    assert eng.swap._tokens_per_second is None
    eng.add(EngineRequest("b", prompt(90, 1), greedy(3)))
    drain(eng)
    assert eng.swap._tokens_per_second is not None


def test_the_speed_follows_the_steps(folder):
    swap = engine(folder).swap
    swap.measure_step(100, 0.25)
    assert swap._tokens_per_second == pytest.approx(400)
    swap.measure_step(100, 1.0)
    assert swap._tokens_per_second == pytest.approx(400 + SMOOTHING * (100 - 400))


def test_a_copy_is_timed_without_the_step_in_front_of_it(folder, monkeypatch):
    """The device takes ten seconds for a chunk of another prompt, then one for the copy, which cannot begin before."""
    eng = engine(folder)
    eng.add(EngineRequest("a", prompt(300, 1), greedy(5)))
    for _ in range(4):
        eng.step()
    now, queued = [0.0], [10.0]

    def wait(_: KVCache) -> None:
        now[0] += queued.pop() if queued else 0.0

    def copy(cache, *args):
        wait(cache)
        now[0] += 1
        return export(cache, *args)

    seq = eng.scheduler.running[0]
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "wait", wait)
        patch.setattr(abyssal.engine.swap, "export", copy)
        patch.setattr(abyssal.engine.swap.time, "perf_counter", lambda: now[0])
        eng.swap.save(seq)
    assert seq.saved is not None and now == [11.0]
    expected = FIRST_BYTES_PER_SECOND + SMOOTHING * (seq.saved.payload_bytes - FIRST_BYTES_PER_SECOND)
    assert eng.swap._bytes_per_second == pytest.approx(expected)
