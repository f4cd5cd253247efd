"""tiny-v4 on the recall documents on a GPU, by record layouts: right answers, time to first token, peak memory.

    python -m bench.recall DOCUMENTS [--tokens 32768 131072] [--records v4+fp8 v4+fp4] [--backend auto] [--json FILE]

DOCUMENTS is the file `recall.safetensors` that the checkpoint's model card describes. Records are main, compressed where it differs, and
index keys. A document is prefilled as a whole, its questions included; a question is right where all five digits of its answer are
the likeliest tokens. `stored` counts what a plain fp32 evaluator got right; the longest documents have none. The time is the median of the
prefills of one document; the first document goes twice and its first time, in which kernels are compiled, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from abyssal import LLM
from bench.gpus import require_gpus

TOKENS = (2048, 8192, 32768, 131072, 524288, 1048576)
RECORDS = ("bf16+bf16", "v4+fp8", "v4+fp4", "v41+v41_fp4+fp4")


def options_of(records: str) -> dict[str, str]:
    """`v41+v41_fp4+fp4` -> the options of the engine that store such records."""
    kv, *compressed, index = records.split("+")
    return {"kv_layout": kv, "compressed_kv_layout": "fp4" if compressed == ["v41_fp4"] else "same", "index_layout": index}


def load_documents(path: Path, tokens: int) -> list[dict[str, Tensor]]:
    documents: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            length, number, name = key.split(".")
            if length == f"d{tokens}":
                documents.setdefault(number, {})[name] = file.get_tensor(key)
    if not documents:
        raise SystemExit(f"{path} has no documents of {tokens} tokens")
    return [documents[number] for number in sorted(documents, key=int)]


def answer(llm: LLM, document: dict[str, Tensor]) -> tuple[int, float]:
    """Right answers of a document, and the seconds that it took."""
    rows = document["answer_at"].long()[:, None] + torch.arange(5)
    torch.cuda.synchronize()
    start = time.perf_counter()
    logits = llm.logits(document["input_ids"].tolist(), positions=rows.flatten().tolist())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return int((logits.argmax(-1).view_as(rows) == document["digits"]).all(1).sum()), seconds


def measure(llm: LLM, documents: list[dict[str, Tensor]]) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    first = answer(llm, documents[0])
    answers = [answer(llm, document) for document in documents]
    stored = [int(document["fp32_hits"].sum()) for document in documents if "fp32_hits" in document]
    return {
        "right": sum(right for right, _ in answers),
        "questions": 8 * len(documents),
        "stored": sum(stored) if stored else None,
        "seconds": statistics.median(seconds for _, seconds in answers),
        "first_seconds": first[1],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), choices=(512, *TOKENS))
    parser.add_argument("--records", nargs="+", default=list(RECORDS), choices=RECORDS)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-cache-bytes", type=int, default=4 << 30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpus(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; cache of {args.kv_cache_bytes / 2**30:.1f} GiB")
    print(f"{'tokens':>8} {'records':16} {'right':>7} {'stored':>6} {'first token s':>13} {'tokens/s':>9} {'peak GiB':>8}")
    results = []
    for tokens in args.tokens:
        documents = load_documents(args.documents, tokens)
        for records in args.records:
            row: dict[str, Any] = {"tokens": tokens, "records": records}
            try:
                with LLM("tiny", device="cuda", dtype="bfloat16", backend=args.backend, kv_cache_bytes=args.kv_cache_bytes,
                         max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=1, **options_of(records)) as llm:  # fmt: skip
                    row |= measure(llm, documents)
            except Exception as error:  # noqa: BLE001 - one row's failure must not hide the others
                row["error"] = f"{type(error).__name__}: {error}"[:90]
            results.append(row)
            if "error" in row:
                print(f"{tokens:>8} {records:16} {row['error']}", flush=True)
                continue
            right = f"{row['right']}/{row['questions']}"
            print(
                f"{tokens:>8} {records:16} {right:>7} {row['stored'] if row['stored'] is not None else '-':>6} "
                f"{row['seconds']:>13.3f} {tokens / row['seconds']:>9.0f} {row['peak_bytes'] / 2**30:>8.2f}",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
