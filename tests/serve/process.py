"""`abyssal serve` in a process group of its own, as a terminal would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.serve.live import MODEL, PATIENCE, until

KEY = "key-of-the-test"
OPTIONS = ("--device", "cpu", "--kv-cache-bytes", "128MiB", "--num-threads", "1", "--max-model-len", "4096", "--port", "0")


class Process:
    """`abyssal serve` and what it printed."""

    def __init__(self, *options: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("ABYSSAL_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "abyssal.cli", "serve", *OPTIONS, *options],
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**env, "ABYSSAL_API_KEY": KEY, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    @property
    def url(self) -> str:
        found = re.search(rf"{MODEL} at (http://\S+),", self.output)
        assert self.process.poll() is None, self.output
        return found[1] if found else ""

    def engine(self) -> int | None:
        """Process id of the engine, once there is one."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and b"abyssal.serve.engine_process" in (folder / "cmdline").read_bytes():
                    return int(folder.name)
            except OSError:  # it has just ended
                continue
        return None

    def press(self, sig: signal.Signals) -> None:
        """As a terminal does: to all processes of the group."""
        os.killpg(self.process.pid, sig)

    def wait(self) -> tuple[int, str]:
        """Exit code, and everything printed."""
        try:
            code = self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code, self.output


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_clean(process: Process, engine: int | None) -> None:
    code, output = process.wait()
    assert code == 0 and "Traceback" not in output and "exception" not in output.lower(), output
    assert engine is not None
    until(lambda: is_gone(engine), "the engine ended")


def start(*options: str) -> Process:
    process = Process(*options)
    until(lambda: process.url, "serving")
    return process
