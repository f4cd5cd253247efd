"""How a sequence is cut must not matter: the handed cases B01, B03, C01, C03, C05 and C07, against transformers.

The model is small and random, with every layer kind, a window of 128, a selection that bites at 64 tokens, and a clamp that acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.small_model import config_dict

pytest.importorskip("transformers", minversion="5.24", reason="transformers knows DeepSeek V4 from 5.24 on")
from transformers import DeepseekV4ForCausalLM

from abyssal import LLM, SamplingParams
from abyssal.kv.batch import Batch, Chunk, build_batch
from abyssal.kv.pool import SequenceCache
from tests.support import oracle

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
VOCAB = 160
BOS = 0
LENGTHS = [
    *range(1, 10),
    *range(63, 66),
    *range(126, 134),
    *range(255, 258),
    *range(383, 386),
    *range(511, 514),
    *range(1023, 1026),
]
LONG_LENGTHS = [*range(2047, 2050), *range(4095, 4098)]
CONFIG = config_dict(
    [0, 0, 4, 128, 4, 128, 0],
    num_hidden_layers=6,
    sliding_window=128,
    index_topk=16,
    num_hash_layers=1,
    n_routed_experts=8,
    max_position_embeddings=8192,
    rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
)


def _model() -> DeepseekV4ForCausalLM:
    model = oracle.random_model(CONFIG, seed=11)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj *= 4  # beyond the clamp at 10
            layer.mlp.experts.down_proj /= 4
        model.lm_head.weight[BOS] = 0  # its logit is 0, far below the largest: no right forward ever chooses it
    return model


class Reference:
    """The model in transformers, and one long prompt whose prefixes are the prompts of the cases."""

    def __init__(self, tokens: int, seed: int, margin: float) -> None:
        self.model = _model()
        self.ids, self.logits = oracle.draw_prompt(self.model, tokens, seed, margin)

    def load(self, folder: Path, **options: object) -> LLM:
        oracle.save_model(self.model, CONFIG, folder, "released")
        return LLM(folder, device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=128 << 20, **options)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(1025 + 40, seed=2, margin=oracle.MIN_MARGIN)


@pytest.fixture(scope="module")
def long_reference() -> Reference:
    return Reference(4097 + 40, seed=14, margin=2e-6)  # longer prompts come closer to ties; this one not too close


@pytest.fixture(scope="module")
def llm(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with reference.load(tmp_path_factory.mktemp("chunking")) as llm:
        yield llm


def assert_same(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def greedy(llm: LLM, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def assert_greedy(model: DeepseekV4ForCausalLM, prompt: list[int], output: list[int]) -> None:
    """Every token has the largest logit of the oracle, or one as large but for rounding."""
    rows = oracle.oracle_logits(model, prompt + output)[len(prompt) - 1 : -1]
    chosen = rows[range(len(output)), output]
    assert (rows.amax(1) - chosen <= 2 * TOLERANCE).all(), f"{len(prompt)} tokens: {output}"


def test_the_clamp_fires(reference: Reference) -> None:
    for layer in reference.model.model.layers:
        layer.mlp.experts.limit = 1e9
    moved = (oracle.oracle_logits(reference.model, reference.ids[:100]) - reference.logits[:100]).abs().max()
    for layer in reference.model.model.layers:
        layer.mlp.experts.limit = CONFIG["swiglu_limit"]
    assert moved > 100 * TOLERANCE


def test_b01_five_greedy_tokens_at_every_length(reference: Reference, llm: LLM) -> None:
    """The first compressed row at four tokens, and every other boundary: never BOS, always the oracle's choice."""
    prompts = [reference.ids[:length] for length in LENGTHS]
    outputs = greedy(llm, prompts, 5)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert BOS not in output
        assert_greedy(reference.model, prompt, output)


@pytest.mark.parametrize("length", range(1, 10))
def test_b01_short_prompts_alone(length: int, reference: Reference, llm: LLM) -> None:
    """As above, without company in the batch."""
    prompt = reference.ids[:length]
    (output,) = greedy(llm, [prompt], 5)
    assert BOS not in output
    assert_greedy(reference.model, prompt, output)


def test_b01_trained_model_does_not_fall_to_bos() -> None:
    with LLM("tiny", device="cpu", dtype="float32", kv_layout="fp32", kv_cache_bytes=64 << 20) as tiny:
        words = tiny.tokenizer.encode("In the beginning God created the heaven and the earth.")
        outputs = greedy(tiny, [words[:length] for length in range(1, 10)], 5)
    assert all(len(output) == 5 and BOS not in output for output in outputs)


@pytest.fixture
def facts(llm: LLM) -> Callable[[list[tuple[int, int]]], Batch]:
    """`facts([(start, end), ...])` -> the engine's facts of a step that computes these tokens of as many sequences."""
    cache, held = llm.engine.cache, []

    def build(spans: list[tuple[int, int]]) -> Batch:
        chunks = []
        for start, end in spans:
            held.append(cache.new_sequence())
            held[-1].num_tokens = held[-1].folded = start
            assert cache.allocate(held[-1], start, end)
            chunks.append(Chunk([5] * (end - start), start, held[-1]))
        return build_batch(llm.engine.runner.model_config, cache, chunks, [0], torch.device("cpu"))

    yield build
    for sequence in held:
        cache.free(sequence)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("chunk", [1024, 1, 7, 64, 129])
def test_b03_visible_entries(ratio: int, chunk: int, facts: Callable[[list[tuple[int, int]]], Batch]) -> None:
    """A query at position p sees (p + 1) // ratio entries, wherever its chunk starts and ends."""
    for start in range(0, 1024, chunk) if chunk > 1 else (0, 2, 3, 4, 126, 127, 128, 511, 1023):
        for group in facts([(start, min(start + chunk, 1024))]).groups:
            assert torch.equal(group.visible[ratio], (group.positions + 1) // ratio)
            assert group.max_visible[ratio] == group.visible[ratio].max()


@pytest.mark.parametrize("query", [2, 3, 4, 67, 68, 126, 127, 128, 255])
def test_b03_selection_does_not_depend_on_the_end_of_the_chunk(query: int, reference: Reference, llm: LLM) -> None:
    """Tokens that follow in the same chunk, or in the next, complete entries that this query must not see."""
    for after in range(8):
        ids = reference.ids[: query + 1 + after]
        for sizes in ([len(ids)], [query + 1, *[1] * after], [query, 1, *([after] if after else [])]):
            assert_same(llm.logits(ids, sizes, positions=[query])[0], reference.logits[query])


@pytest.mark.parametrize("length", LENGTHS)
def test_c01_decode_equals_prefill(length: int, reference: Reference, llm: LLM) -> None:
    """Prefill, then 40 given tokens one at a time: at every position what one prefill of all of them gives."""
    ids = reference.ids[: length + 40]
    assert_same(llm.logits(ids, [length, *[1] * 40]), reference.logits[: length + 40])


@pytest.mark.long
@pytest.mark.parametrize("length", LONG_LENGTHS)
def test_c01_decode_equals_prefill_long(length: int, long_reference: Reference, tmp_path: Path) -> None:
    """As above. Over 4,000 rows each of the two strays up to 7e-5 from an fp64 run, so they may be twice as far apart."""
    ids = long_reference.ids[: length + 40]
    with long_reference.load(tmp_path, max_num_batched_tokens=4096) as llm:
        logits = llm.logits(ids, [length - 1, *[1] * 41])
    torch.testing.assert_close(logits, long_reference.logits[: length + 40], rtol=0, atol=2 * TOLERANCE)


def test_c03_short_prompt_after_a_long_one(reference: Reference, tmp_path: Path) -> None:
    """State of an earlier request must not show: the same bits on a fresh engine and after 660 tokens of another."""
    with reference.load(tmp_path) as llm:
        short = [reference.ids[:length] for length in (60, 1, 3, 127)]
        before = [llm.logits(ids) for ids in short]
        outputs = greedy(llm, short[:1], 20)
        (long,) = greedy(llm, [reference.ids[:500]], 160)
        assert_greedy(reference.model, reference.ids[:500], long)
        after = [llm.logits(ids) for ids in short]
        assert greedy(llm, short[:1], 20) == outputs
    for ids, first, again in zip(short, before, after, strict=True):
        assert torch.equal(first, again)
        assert_same(first, reference.logits[: len(ids)])


@pytest.mark.parametrize("length", [1, 3, 60, 127, 128])
def test_c03_entries_of_short_sequences(length: int, llm: LLM, facts: Callable[[list[tuple[int, int]]], Batch]) -> None:
    """Below 128 tokens a ratio-128 layer has no entry, computed, seen or stored."""
    batch = facts([(0, length)])
    for ratio in (4, 128):
        assert batch.compress[ratio].num_entries == length // ratio
        assert max(group.max_visible[ratio] for group in batch.groups) == length // ratio
    sequence: SequenceCache = llm.engine.cache.new_sequence()
    assert llm.engine.cache.allocate(sequence, 0, length)
    assert bool(sequence.tables["c128"].pages.size) == (length >= 128)
    llm.engine.cache.free(sequence)


TURNS = (310, 50, 61, 128, 77, 126, 55, 130, 52, 76)  # tokens that ten turns of a chat add


def test_c05_ten_turns_fp32(reference: Reference, llm: LLM) -> None:
    """No turn is further from the oracle than rounding."""
    assert sum(TURNS) == len(reference.ids)
    logits = llm.logits(reference.ids, TURNS)
    for turn, (rows, expected) in enumerate(zip(logits.split(TURNS), reference.logits.split(TURNS), strict=True)):
        assert (rows - expected).abs().max() <= TOLERANCE, f"turn {turn}"


def test_c05_ten_turns_bf16(recall: Callable[[int], list[dict[str, Tensor]]]) -> None:
    """A bf16 cache extended turn by turn against a cold prefill: mean KL per turn far below 0.005, in the last as in the first."""
    ids = recall(2048)[0]["input_ids"].tolist()
    turns = [300, 50, 500, 61, 128, 277, 126, 55, 130]
    turns.append(len(ids) - sum(turns))
    with LLM("tiny", device="cpu", dtype="float32", kv_layout="bf16", kv_cache_bytes=256 << 20) as tiny:
        warm, cold = (tiny.logits(ids, sizes).log_softmax(-1) for sizes in (turns, None))
    divergence = (cold.exp() * (cold - warm)).sum(-1)
    means = torch.stack([rows.mean() for rows in divergence.split(turns)])
    assert means.max() < 0.005, means


def check_greedy_runs(reference: Reference, llm: LLM, tokens: int, runs: int) -> None:
    prompt = reference.ids[:40]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    outputs = [llm.generate([prompt], params)[0].outputs[0] for _ in range(runs)]
    assert all(output.token_ids == outputs[0].token_ids for output in outputs)
    ids = outputs[0].token_ids
    assert_greedy(reference.model, prompt, ids)
    expected = oracle.oracle_logits(reference.model, prompt + ids).log_softmax(-1)[len(prompt) - 1 : -1][range(tokens), ids]
    assert_same(torch.tensor([entry.logprob for entry in outputs[0].logprobs]), expected)  # at every position: it does not grow


def test_c07_greedy_runs(reference: Reference, llm: LLM) -> None:
    """The same tokens every time, with the oracle's logprobs from the first to the last."""
    check_greedy_runs(reference, llm, tokens=200, runs=2)


@pytest.mark.long
def test_c07_five_greedy_runs_of_600(reference: Reference, llm: LLM) -> None:
    check_greedy_runs(reference, llm, tokens=600, runs=5)
