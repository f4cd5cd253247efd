"""The repository keeps its own rules: names pair up, docs name what exists, one place per fact."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import abyssal
from abyssal.cli import COMMANDS, cli
from abyssal.config import EngineConfig, ServerConfig
from abyssal.kv import layouts
from abyssal.options import OTHER_VARIABLES, option_specs
from abyssal.serve.app import ROUTES

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "abyssal"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def own_files() -> list[Path]:
    """Every text file of the repository, as far as its folders are ours."""
    tops = [ROOT / name for name in ("src", "tests", "bench", "docs", ".ci")]
    files = [path for top in tops for path in top.rglob("*") if path.suffix in {".py", ".md", ".json", ".toml", ".txt", ""}]
    files += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".gitignore")]
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]


@functools.cache
def ops() -> dict[str, list[Path]]:
    """Op -> its files; an op is a module or a folder of `ops/` with public functions."""
    found: dict[str, list[Path]] = {}
    for path in (SRC / "ops").iterdir():
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if path.name.startswith("_") or not files:
            continue
        bodies = [node for file in files for node in ast.parse(file.read_text()).body]
        if any(isinstance(node, ast.FunctionDef) and not node.name.startswith("_") for node in bodies):
            found[path.stem] = files
    return found


def test_every_op_has_a_test_and_every_kernel_a_benchmark() -> None:
    assert len(ops()) > 8
    for op, files in ops().items():
        assert (ROOT / "tests" / "ops" / f"test_{op}.py").is_file(), f"op {op!r} has no tests/ops/test_{op}.py"
        if any(re.search(r"^\s*(import|from) triton", file.read_text(), re.MULTILINE) for file in files):
            assert (ROOT / "bench" / "ops" / f"bench_{op}.py").is_file(), f"kernel {op!r} has no bench/ops/bench_{op}.py"
    for test in (ROOT / "tests" / "ops").glob("test_*.py"):
        assert test.stem.removeprefix("test_") in ops(), f"{test.name} tests no op of that name"


# Docs


def code_spans(text: str) -> Iterator[str]:
    """Inline code, lines of fenced blocks, and link targets."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        yield from block.splitlines()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", prose)
    yield from re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_docs_name_only_paths_that_exist(doc: Path) -> None:
    for span in code_spans(doc.read_text()):
        for word in re.findall(r"(?<![\w/.~-])(?:\.\./|\./)?[\w.-]+(?:/[\w.-]+)*/?", span):
            first = word.split("/")[0]
            is_path = first in {"src", "tests", "bench", "docs", ".ci"} and "/" in word
            is_path |= bool(re.fullmatch(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|txt)", word))
            if is_path and not re.match(r"https?:", span):
                bases = (ROOT, doc.parent, SRC)
                assert any((base / word).exists() for base in bases), f"{doc.name} names {word!r}, which does not exist"


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_docs_name_only_commands_that_exist(doc: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    flags = {flag for name in COMMANDS for p in cli.get_command(None, name).params for flag in (*p.opts, *p.secondary_opts)}
    for span in code_spans(doc.read_text()):
        for target in re.findall(r"(?:^|&& )make ([\w-]+)", span):
            assert target in targets, f"{doc.name}: no target {target!r} in the Makefile"
        for command in re.findall(r"(?:^|&& )abyssal ([a-z]\w*)", span):
            assert command in COMMANDS, f"{doc.name}: no command `abyssal {command}`"
        if span.startswith(("abyssal ", "make serve", "--")):
            for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span):
                assert flag in flags | {"--version", "--help"}, f"{doc.name}: no option {flag}"


def test_serving_doc_lists_the_routes() -> None:
    table = (ROOT / "docs" / "serving.md").read_text().partition("## Routes")[2].partition("##")[0]
    assert set(re.findall(r"`([A-Z]+) ([^`]+)`", table)) == {(r.method, r.path.replace(":path", "")) for r in ROUTES}


def test_testing_doc_lists_the_cases_that_tests_name() -> None:
    """A case listed as covered is named by a test in the files beside it; one that waits is named by none."""
    covered, _, waiting = (ROOT / "docs" / "testing.md").read_text().partition("## Waiting")
    listed = {
        case: set(re.findall(r"`([^`]+)`", files))
        for case, files in re.findall(r"^\| ([A-O]\d\d) \|.*\|(.*)\|$", covered, re.MULTILINE)
    }
    waits = set(re.findall(r"^\| ([A-O]\d\d) \|", waiting, re.MULTILINE))
    assert len(listed) > 20 and waits
    named: dict[str, set[str]] = {}
    for path in set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__).resolve()}:
        for case in re.findall(r"(?i)(?<![a-z0-9])([a-o]\d\d)(?![a-z0-9])", _test_texts(path)):
            if case.upper() in waits | listed.keys():
                named.setdefault(case.upper(), set()).add(path.relative_to(ROOT).as_posix())
    assert listed == named


def _test_texts(path: Path) -> str:
    """Names and docstrings of the tests of one file, and the file's own docstring."""
    tree = ast.parse(path.read_text())
    texts = [ast.get_docstring(tree) or ""]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            texts.append(node.name.removeprefix("test_") + "_ " + (ast.get_docstring(node) or ""))
    return "\n".join(texts)


# One place per fact


def test_no_machine_paths() -> None:
    """Nothing refers to the machine it was written on."""
    machine = re.compile(r"(?<![\w.~}/-])/(?:" + "|".join(("home", "root", "wo" + "rk", "mnt", "opt")) + r")/[\w.]")
    for path in own_files():
        if path.suffix == ".json" and path.stat().st_size > 100_000:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            assert not machine.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


# Numbers that are sizes of records and pages wherever they occur; in kv/ also two that elsewhere count values or processors.
SIZES = {584, 576, 528, 288, 68, 37440, 36864, 33792, 18432, 8704, 8640, 8448, 4608, 4352, 1728}
SIZES_IN_KV = {512, 132}


def test_byte_sizes_occur_in_layouts_only() -> None:
    home = SRC / "kv" / "layouts.py"
    for path in sources():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        sizes = SIZES | (SIZES_IN_KV if path.parent == home.parent else set())
        found = [f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}" for node in nodes if node.value in sizes]
        assert bool(found) == (path == home), f"take sizes from kv/layouts.py: {found}"
    assert {layouts.get(name).bytes_per_entry for name in ("v4", "v41", "v41_fp4", "index_mxfp4")} <= SIZES


def test_no_marks_of_unfinished_work() -> None:
    marks = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + "X)\\b")
    for path in own_files():
        if path.suffix in {".py", ".md"}:
            assert not marks.search(path.read_text()), f"{path.relative_to(ROOT)} has a mark of unfinished work"


def test_environment_is_read_in_one_place() -> None:
    """`os.environ` enters by the two front doors; every variable named anywhere is an option or declared beside them."""
    readers = {path for path in sources() if re.search(r"\bos\.(environ|getenv)\b", path.read_text())}
    assert readers <= {SRC / "cli" / "options.py", SRC / "llm.py"}, f"the environment is read in {readers}"
    known = {spec.env for cls in (EngineConfig, ServerConfig) for spec in option_specs(cls)} | set(OTHER_VARIABLES)
    for path in [*sources(), *DOCS, ROOT / "Makefile", *(ROOT / "bench").rglob("*.py")]:
        for name in re.findall(r"\bABYSSAL_[A-Z][A-Z_]*[A-Z]\b", path.read_text()):
            assert name in known or name == "ABYSSAL_NAME", f"{path.relative_to(ROOT)} names {name}, which is no option"


def imported(paths: list[Path]) -> set[str]:
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names) - {"abyssal"}


def test_dependencies_are_what_the_code_imports() -> None:
    homes = packages_distributions()
    extras = set(PROJECT["optional-dependencies"]) - {"dev"}  # an extra has the name of the package that it brings
    modules = imported(sources())
    assert extras <= modules, f"extras for packages that nothing imports: {extras - modules}"
    used = {canonicalize_name(homes[module][0]) for module in modules - extras}
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert used == declared, f"imported but not declared: {used - declared}; declared but not imported: {declared - used}"


def test_constraints_pin_versions_that_the_package_allows() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["optional-dependencies"]["dev"]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras]):
        if requirement.name != "triton":
            version = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"
    assert pins["torch"] == "2.13.0" and "triton" not in pins, "CUDA builds of torch bring their own triton"
    assert not any("+" in version for version in pins.values()), "a local build is not on the public index"


def test_version_is_one() -> None:
    assert abyssal.__version__ == PROJECT["version"]


def test_ci_runs_what_a_contributor_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert {"make lint", "make test"} <= set(script.read_text().splitlines())
    assert "make test" in (ROOT / "README.md").read_text()


# Imports

SERVER_ONLY = (
    "pydantic",
    "pydantic_settings",
    "fastapi",
    "uvicorn",
    "starlette",
    "msgspec",
    "zmq",
    "prometheus_client",
    "typer",
    "xgrammar",
)
LATE = ("click", "rich", "huggingface_hub", "transformers")
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"import of {{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
{body}
"""


def run_blocked(blocked: tuple[str, ...], body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK.format(blocked=blocked, body=body)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_blocker_blocks() -> None:
    body = "try:\n    import pydantic\nexcept ModuleNotFoundError:\n    print('blocked')"
    assert run_blocked(SERVER_ONLY, body) == "blocked\n"


def test_python_api_needs_no_server_package() -> None:
    run_blocked(SERVER_ONLY + LATE, "from abyssal import LLM, RequestOutput, SamplingParams")


def test_generation_needs_no_server_package() -> None:
    body = """
from abyssal import LLM, SamplingParams
with LLM("tiny", device="cpu", kv_cache_bytes=256 << 20, num_threads=1) as llm:
    print(len(llm.generate([2, 3, 4], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
    llm.chat([{"role": "user", "content": "Define harbor."}], SamplingParams(max_tokens=1))
"""
    assert run_blocked(SERVER_ONLY + ("click", "huggingface_hub", "transformers"), body).splitlines()[-1] == "3"


def test_plain_import_is_light() -> None:
    """`import abyssal` and the command line's help load neither torch nor the server."""
    body = "import abyssal, abyssal.cli, sys\nprint(sorted({'torch', 'numpy', 'fastapi', 'zmq'} & set(sys.modules)))"
    assert run_blocked((), body) == "[]\n"
