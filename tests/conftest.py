"""What every test shares: poisoned memory, reference data, and markers for what a machine lacks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.support.interpreter import repair_interpreter

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
POISON_LIMIT = 64 << 20  # bytes filled at most: page pools hand out their lowest pages first, the rest stays untouched memory

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: without a GPU, kernels run through the interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    repair_interpreter()

hypothesis.settings.register_profile("abyssal", deadline=None)  # no test depends on how busy the machine is
hypothesis.settings.load_profile("abyssal")

torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as the engine sets it: sums in fp32 (V4 spec 3.3)
torch.set_num_threads(1)  # the same sums on every machine; two threads on a busy machine wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def poison_(tensor: Tensor) -> Tensor:
    """Fill with what must never be read: bytes 0xff are NaN in every float format of the engine, e8m0 included."""
    if tensor.numel() and tensor.device.type in ("cpu", "cuda") and tensor.is_contiguous():
        if tensor.dtype in (torch.int16, torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).max // 2 + 1)
        elif tensor.dtype != torch.bool:
            tensor.view(-1).view(torch.uint8)[:POISON_LIMIT].fill_(0xFF)
    return tensor


def _filled(allocate: Callable[..., Tensor], fill_: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: object, **kwargs: object) -> Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return fill_(tensor) if caller.split(".")[0] == "abyssal" else tensor

    return wrapper


@contextmanager
def filling(fill_: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Uninitialised memory that the package asks for is filled by `fill_`, in place."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, _filled(getattr(torch, name), fill_))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(Tensor, name, _filled(getattr(Tensor, name), fill_))
        yield


@pytest.fixture(autouse=True, scope="session")
def poison() -> Iterator[None]:
    """Uninitialised memory inside the package holds NaN and wild integers, so an unwritten output cannot pass a test."""
    with filling(poison_):
        yield


def golden_folders() -> list[Path]:
    """Where reference models may lie, best first: $ABYSSAL_GOLDENS or ../shared/golden, then the small ones of this repository."""
    outside = os.environ.get("ABYSSAL_GOLDENS")
    return [Path(outside) if outside else ROOT.parent / "shared" / "golden", DATA / "golden"]


@pytest.fixture(scope="session")
def goldens() -> Callable[[str], Path]:
    """`goldens(name)` -> the folder of a reference model; the test is skipped, by name, where this machine lacks it."""

    def find(name: str) -> Path:
        for folder in golden_folders():
            if (folder / name).is_dir():
                return folder / name
        pytest.skip(f"reference model {name!r} is not here; set ABYSSAL_GOLDENS to the folder that holds it")

    return find


@pytest.fixture(scope="session")
def recall() -> Callable[[int], list[dict[str, Tensor]]]:
    """`recall(tokens)` -> the recall documents of that length, one dict per document; keys as in tiny-v4's model card."""
    outside = golden_folders()[0].parent / "tiny" / "recall.safetensors"

    def load(tokens: int) -> list[dict[str, Tensor]]:
        path = DATA / "recall_small.safetensors" if tokens in (512, 2048) else outside
        if not path.is_file():
            pytest.skip(
                f"recall documents of {tokens} tokens are not here; they lie beside the folder that ABYSSAL_GOLDENS names"
            )
        documents: dict[str, dict[str, Tensor]] = {}
        with safe_open(path, "pt") as file:
            for key in sorted(file.keys()):
                length, number, name = key.split(".")
                if length == f"d{tokens}":
                    documents.setdefault(number, {})[name] = file.get_tensor(key)
        assert documents, f"{path} has no documents of {tokens} tokens"
        return [documents[number] for number in sorted(documents, key=int)]

    return load
