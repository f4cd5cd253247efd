"""V4.1 in the running engine: steps of many sequences, prefix reuse, preemption, memory, n-gram tables larger than memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from abyssal import LLM, SamplingParams
from abyssal.errors import ConfigError
from abyssal.kv.batch import Chunk
from tests.support.v41_model import VOCABULARY, write_byte_tokenizer, write_v41

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v41")
    write_v41(folder, seed=4)
    return folder


def load(folder: Path, **options: object) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "kv_layout": "fp32", "kv_cache_bytes": 64 << 20, "max_model_len": 4096}
    return LLM(folder, **(defaults | options))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def greedy(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


PROMPTS = [prompt(n, n) for n in (1, 2, 3, 17, 40, 255, 256, 300, 513)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What each prompt gives alone."""
    with load(folder, enable_prefix_caching=False) as llm:
        return [greedy(llm, [ids], 8)[0] for ids in PROMPTS]


def test_together_as_alone(folder: Path, expected: list[list[int]]) -> None:
    """Prefills cut by a small budget, decoding beside them: every sequence keeps its own history for the n-gram hashes."""
    with load(folder, max_num_batched_tokens=48) as llm:
        assert greedy(llm, PROMPTS, 8) == expected
        assert not any(llm.engine.stats().pages_by_kind.values())


@pytest.mark.parametrize("layouts", [("fp32", "same"), ("bf16", "same")])
def test_prefix_hits_give_the_same_logits(folder: Path, layouts: tuple[str, str]) -> None:
    """The windows, the open pair and the history for the hashes are all there after a hit."""
    ids = prompt(700, 1)
    with load(folder, kv_layout=layouts[0], compressed_kv_layout=layouts[1]) as llm:
        whole = llm.logits(ids)
        for end, reused in ((256, 0), (257, 256), (600, 512), (700, 512)):
            logits = llm.logits(ids[:end], reuse_prefix=True)
            assert logits[:reused].isnan().all()
            if layouts[0] == "fp32":
                torch.testing.assert_close(logits[reused:], whole[reused:end], rtol=0, atol=TOLERANCE)
            else:
                p, q = whole[reused:end].log_softmax(-1), logits[reused:].log_softmax(-1)
                assert (p.exp() * (p - q)).sum(-1).mean() < 0.005
        assert llm.logits([5, *ids[1:300]], reuse_prefix=True).isfinite().all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_h05_steps_of_more_than_256_sequences(folder: Path, device: str) -> None:
    """200 to 512 requests of 8 tokens: no fault, and each answers as in a small batch."""
    few = [prompt(8, seed) for seed in range(8)]
    with load(
        folder, device=device, max_num_seqs=512, kv_cache_bytes=512 << 20, max_model_len=64, enable_prefix_caching=False
    ) as llm:
        alone = greedy(llm, few, 3)
        for count in (200, 256, 257, 300, 512) if device == "cuda" else (257,):
            answers = greedy(llm, [few[i % 8] for i in range(count)], 3)
            assert all(answer == alone[i % 8] for i, answer in enumerate(answers)), count


def test_a_model_with_n_gram_tables_needs_its_tokenizer(tmp_path: Path) -> None:
    write_v41(tmp_path, seed=4)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"n-gram tables.*tokenizer\.json is missing"):
        load(tmp_path)


def test_missing_history_is_noticed(folder: Path) -> None:
    with load(folder) as llm:
        cache = llm.engine.cache.new_sequence()
        assert llm.engine.cache.allocate(cache, 0, 5)
        with pytest.raises(AssertionError, match="1 ids before position 4"):
            llm.engine.runner([Chunk([5], 4, cache, [3])], [0])
        llm.engine.cache.free(cache)


def test_pages_of_a_sequence_are_those_of_the_arithmetic(tmp_path: Path) -> None:
    """Default records at the released widths: what a prompt holds grows by 288 + 68 bytes per entry, without padding."""
    write_v41(tmp_path, 1, head_dim=512, qk_rope_head_dim=64, index_head_dim=128, index_n_heads=8)
    with load(tmp_path, kv_layout="v41", max_num_batched_tokens=512) as llm:
        cache = llm.engine.cache
        seq, ids, tokens = cache.new_sequence(), prompt(1024, 1), 0
        while tokens < 1024:
            assert cache.allocate(seq, tokens, tokens + 512)
            llm.engine.runner([llm.engine.runner.chunk(ids, tokens, tokens + 512, seq)], [511])
            tokens += 512
            cache.commit(seq, ids, tokens)
            cache.release_unneeded(seq, tokens)
        held = {
            n: cache.used_by_kind[n] * cache.pools[s.bucket].page_bytes for n, s in cache.specs.items() if s.lifetime == "context"
        }
        cache.free(seq)
    # one source of ratio 2 and one of ratio 1
    assert held == {"c2": 512 * 288, "c2_index": 512 * 68, "c1": 1024 * 288, "c1_index": 1024 * 68}


GROWTH = """
import random, sys
from pathlib import Path
from abyssal import LLM

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

llm = LLM(sys.argv[1], device="cpu", kv_cache_bytes=32 << 20, engram_cache_bytes=int(sys.argv[2]), max_num_batched_tokens=512, num_threads=1)
ids = random.Random(0).choices(range(3, 259), k=20_010)
llm.logits(ids[:10], positions=[9])
before = resident()
llm.logits(ids[10:], positions=[19_999])
print(resident() - before)
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_tables_of_20_gb_stay_on_the_disk(tmp_path: Path) -> None:
    """20,000 tokens through a model with 20 GB of tables: memory grows by the cache and what a step needs.

    Through a memory map the 160,000 rows would be 0.6 GB.
    """
    config = write_v41(
        tmp_path, 1, num_hidden_layers=2, compress_ratios=[0, 0], kv_source_layer_ids=[], index_source_layer_ids=[],
        candidate_source_layer_id=-1, engram_layer_ids=[0, 1], engram_head_dim=256,
    )  # fmt: skip
    config["engram_vocab_size"] = 9_500_000
    write_byte_tokenizer(tmp_path, config)
    file = tmp_path / "model.safetensors"
    append_tables(file, config["engram_num_embeddings"])
    assert file.stat().st_size > 20e9
    cache = 16 << 20
    run = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path), str(cache)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert cache // 2 < int(run.stdout) < cache + (64 << 20)


def append_tables(file: Path, rows: list[int]) -> None:
    """Put tables of zeros in place of the checkpoint's own, at the end of the file, where they take no room on the disk."""
    save_file({name: value for name, value in load_file(file).items() if "engram.embed" not in name}, file)
    stored = file.read_bytes()
    length = int.from_bytes(stored[:8], "little")
    header, data = json.loads(stored[8 : 8 + length]), stored[8 + length :]
    end = len(data)
    for layer, count in enumerate(rows):
        for part, kind, width in (("weight", "F8_E4M3", 256), ("scale", "F8_E8M0", 8)):
            place = [end, end := end + count * width]
            header[f"layers.{layer}.engram.embed.{part}"] = {"dtype": kind, "shape": [count, width], "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    os.truncate(file, 8 + len(text) + end)
