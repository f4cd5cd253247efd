"""The command line as a user meets it: commands, options, errors in one line."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import abyssal
from abyssal.checkpoint.source import resolve_model
from abyssal.cli import COMMANDS, cli
from abyssal.config import EngineConfig, ServerConfig
from abyssal.options import option_specs
from tests.cli.conftest import Done, without_options

ENGINE = ("--device", "cpu", "--kv-cache-bytes", "256MiB", "--num-threads", "1")


def run(*args: str, stdin: str = "") -> Done:
    """`abyssal ARGS` in a process of its own, as commands that load a model need."""
    command = [sys.executable, "-m", "abyssal.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=without_options({}), input=stdin)
    return Done(done.returncode, done.stdout, done.stderr)


def options_of(name: str) -> dict[str, click.Parameter]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {flag: param for param in command.params for flag in param.opts}


def test_help_lists_what_exists_and_nothing_else() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    listed = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS) == ["serve", "generate", "chat", "plan", "bench", "doctor"]


def test_the_package_and_its_command_line_are_the_same_program() -> None:
    command = [sys.executable, "-m", "abyssal", "plan", "--context", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=without_options({}))
    assert Done(done.returncode, done.stdout, done.stderr) == run("plan", "--context", "0") and done.returncode == 2


def test_version() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == f"abyssal, version {abyssal.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_engine_option_is_an_option_of_every_command(name: str) -> None:
    options = options_of(name)
    for spec in option_specs(EngineConfig):
        if spec.name != "model":
            assert options[spec.flag].default is None, f"{spec.flag} repeats a default; the config class fills it"
            assert spec.help in (options[spec.flag].help or "")
    assert "model" in options


def test_server_options_belong_to_serve_alone() -> None:
    own = {spec.flag for spec in option_specs(ServerConfig)} - {"--thinking"}
    assert own <= options_of("serve").keys()
    for name in set(COMMANDS) - {"serve"}:
        assert not own & options_of(name).keys()


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["serve", "--device", "tpu"], {}, ["device='tpu'", "auto, cpu, cuda"]),
        (["serve", "--port", "65536"], {}, ["port", "65536", "65535"]),
        (["serve", "--max-num-seqs", "0"], {}, ["max_num_seqs", "0"]),
        (["generate", "In the beginning"], {}, ["'In the beginning' was taken as MODEL", "--prompt TEXT"]),
        (["generate"], {}, ["there is no prompt;", "--prompt TEXT"]),
        (["generate", "--prompt", "x", "--max-model-len", "many"], {}, ["max_model_len", "'many'", "integer"]),
        (["doctor", "--kv-cache-bytes", "4Gb"], {}, ["kv_cache_bytes", "'4Gb'", "4GiB"]),
        (["doctor"], {"ABYSSAL_KV_LAYUOT": "fp32"}, ["ABYSSAL_KV_LAYUOT", "ABYSSAL_KV_LAYOUT"]),
        (["doctor"], {"ABYSSAL_DTYPE": "float16"}, ["float16", "float32, bfloat16"]),
        (["doctor", "tiny", "--backend", "triton"], {}, ["backend 'triton'", "choose auto or reference"]),
        (["doctor", "tiny", "--kv-layout", "v4", "--compressed-kv-layout", "fp4"], {}, ["'fp4'", "kv_layout='v4'"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(
    call: Callable[..., Done], args: list[str], env: dict[str, str], words: list[str]
) -> None:
    done = call(*args, env=env)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line


@pytest.mark.parametrize("command", [["generate", "no-such-model", "--prompt", "x"], ["chat", "no-such-model"]])
def test_a_missing_model_is_one_line_and_exit_code_1(command: list[str]) -> None:
    done = run(*command)
    assert done.code == 1 and "Traceback" not in done.err
    (line,) = done.err.splitlines()
    assert line.startswith("error: ") and "'no-such-model'" in line


def test_the_command_line_wins_over_the_environment(call: Callable[..., Done]) -> None:
    env = {"ABYSSAL_DTYPE": "bfloat16", "ABYSSAL_KV_LAYOUT": "bf16"}
    text = " ".join(call("doctor", "tiny", "--device", "cpu", "--dtype", "float32", env=env).out.split())
    assert "device=cpu, dtype=float32, kv_layout=bf16" in text


def test_doctor_says_what_runs_here_and_what_does_not(call: Callable[..., Done]) -> None:
    text = " ".join(call("doctor").out.split())
    for words in ("PyTorch", "GPU", "kv_layout", "kernels", "reference"):
        assert words in text
    assert "Model" not in text


def test_doctor_checks_a_checkpoint_without_reading_weights(call: Callable[..., Done], tmp_path: Path) -> None:
    """j13: an empty folder and an empty shard are refused in one line."""
    text = " ".join(call("doctor", "tiny").out.split())
    assert "7: 2 window only, 3 of ratio 4, 2 of ratio 128" in text and "586 tensors" in text
    for word in ("config.json", "safetensors"):
        done = call("doctor", str(tmp_path))
        assert done.code in (1, 2) and word in done.err and len(done.err.splitlines()) == 1
        (tmp_path / "config.json").write_bytes((resolve_model("tiny") / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = call("doctor", str(tmp_path))
    assert done.code == 1 and "model.safetensors" in done.err and len(done.err.splitlines()) == 1


def test_generate_completes_a_prompt() -> None:
    options = ["--temperature", "0", "--max-tokens", "8", *ENGINE]
    direct = run("generate", "--prompt", "In the beginning God created", *options)
    piped = run("generate", "--prompt", "-", *options, stdin="In the beginning God created")
    assert direct.code == piped.code == 0, direct.err
    assert direct.out == piped.out and direct.out.strip()


def test_a_prompt_that_is_no_text_is_one_error(call: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"gr\xfcn"), encoding="utf-8"))
    done = call("generate", "--prompt", "-", *ENGINE)
    assert done.code == 1 and done.err.strip() == "error: standard input is not utf-8: byte 0xfc; convert it to utf-8"


def test_chat_answers_piped_lines() -> None:
    lines = "Define harbor.\n/reset\nDefine harbor.\n/exit\nnever read\n"
    done = run("chat", "--temperature", "0", "--max-tokens", "12", *ENGINE, stdin=lines)
    assert done.code == 0, done.err
    first, second = done.out.splitlines()
    assert first == second and first.strip()
