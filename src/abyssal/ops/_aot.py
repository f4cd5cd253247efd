"""Compile every kernel ahead of time, without a GPU, and report registers, shared memory and spills.

`python -m abyssal.ops._aot [OP ...]` prints the table; a spill without a stated reason is an error. Kernels are listed by the
function `aot_cases` of each op's kernel module. Where Triton is not of the release that they are made with, Gluon kernels are left out
and spills, which differ from release to release, are no error; both is said.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from abyssal.config import GLUON_RELEASES, is_gluon_release

HOPPER, BLACKWELL = 90, 100


@dataclass(frozen=True)
class AotCase:
    """One kernel with one set of compile-time constants."""

    name: str
    kernel: Any  # triton.jit or gluon.jit function
    signature: dict[str, str]  # runtime argument -> Triton type, such as "*bf16", "*u8", "i32", "fp32"
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = ()  # arguments that are multiples of 16, as Triton finds out at launch
    archs: tuple[int, ...] = (HOPPER, BLACKWELL)
    spill_reason: str | None = None
    max_registers: int | None = None  # per thread


@dataclass(frozen=True)
class AotReport:
    name: str
    arch: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    spill_reason: str | None


def compile_case(case: AotCase, arch: int) -> AotReport:
    """Compile one kernel for `arch` (90 or 100) and read its resources from the binary."""
    import triton
    from triton.backends.compiler import GPUTarget

    names = case.kernel.arg_names
    missing = [n for n in names if n not in case.signature and n not in case.constants]
    assert not missing, f"{case.name}: no type and no value for {missing}"
    signature = {n: "constexpr" if n in case.constants else case.signature[n] for n in names}
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in case.aligned}
    source = _source_class(case.kernel)(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    idle = idle_barriers(compiled.asm["ttgir"])
    assert not idle, f"{case.name}: barriers {', '.join(idle)} are made ready and not used; make them only where a role uses them"
    registers, stack, local = _resources(compiled.asm["cubin"])
    return AotReport(case.name, arch, registers, compiled.metadata.shared, stack + local, case.spill_reason)


def idle_barriers(ttgir: str) -> list[str]:
    """Names of barriers in shared memory that are made ready, but neither used where roles run (or at all, without roles) nor invalidated.

    For the compiler their life ends there: other data gets their memory. The hardware still takes it for barriers, and on a GPU that
    several processes take turns on their bits turned up in that data.
    """
    lines = ttgir.splitlines()
    roles = next((i for i, line in enumerate(lines) if "ttg.warp_specialize(" in line), 0)
    idle = []
    for name in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)*i64,", ttgir):
        views = {name, *re.findall(rf"(%\w+) = ttg\.memdesc_index {name}\[", ttgir)}
        uses = [(i, line) for i, line in enumerate(lines) if views.intersection(re.findall(r"%\w+", line))]
        ready = any("ttng.init_barrier" in line for _, line in uses)
        if ready and not any(
            "ttng.inval_barrier" in line or (i >= roles and not re.search("local_alloc|memdesc_index|init_barrier", line))
            for i, line in uses
        ):
            idle.append(name)
    return idle


def _source_class(kernel: Any) -> Callable[..., Any]:
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource if _is_gluon(kernel) else ASTSource


def _is_gluon(kernel: Any) -> bool:
    from triton.experimental.gluon._runtime import GluonJITFunction

    return isinstance(kernel, GluonJITFunction)


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers per thread, and bytes of stack and local memory per thread, which only spills and indexed arrays need."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, f"cuobjdump printed no resources: {text}"
    registers, stack, local = map(int, found.groups())
    return registers, stack, local


def all_cases(ops: list[str]) -> Iterator[tuple[str, int, AotCase]]:
    """Module, index in its list, and case, of every kernel module below `abyssal.ops`, or of the ops named."""
    import abyssal.ops as package

    for module in pkgutil.walk_packages(package.__path__, "abyssal.ops."):
        if ops and module.name.split(".")[2] not in ops:
            continue
        cases: list[AotCase] = getattr(importlib.import_module(module.name), "aot_cases", list)()
        yield from ((module.name, index, case) for index, case in enumerate(cases))


def _compile(job: tuple[str, int, int]) -> AotReport:
    module, index, arch = job
    return compile_case(importlib.import_module(module).aot_cases()[index], arch)


def main(ops: list[str]) -> int:
    import triton

    cases, at_home = list(all_cases(ops)), is_gluon_release(triton.__version__)
    if not at_home:
        cases = [found for found in cases if not _is_gluon(found[2].kernel)]
        made_with = ", ".join(GLUON_RELEASES)
        print(f"triton is {triton.__version__}, kernels are made with {made_with}: Gluon's are left out, spills are not judged")
    jobs = [(module, index, arch) for module, index, case in cases for arch in case.archs]
    bad = 0
    print(f"{'kernel':56} {'sm':>4} {'registers':>9} {'shared':>8} {'spill':>6}")
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for report in pool.map(_compile, jobs):
            note = "" if not report.spill_bytes else f"  {report.spill_reason or 'SPILLS without a stated reason'}"
            bad += bool(at_home and report.spill_bytes and report.spill_reason is None)
            print(
                f"{report.name:56} {report.arch:>4} {report.registers:>9} {report.shared_bytes:>8} {report.spill_bytes:>6}{note}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
