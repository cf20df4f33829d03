"""`tieredkv serve` as a process: what it prints, ports, signals, and prefixes that outlive it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tieredkv.cli import app
from tieredkv.errors import ConfigError
from tieredkv.serving.endpoint.server import take_port

from .conftest import needs_packages

pytestmark = needs_packages

SECONDS = 120
SYSTEM = "a system prompt that everybody shares, of five blocks and a bit more, and of some more words. "


class Server:
    """A server in a process of its own, at a port that is free."""

    def __init__(self, log: Path, *options: str) -> None:
        command = [sys.executable, "-m", "tieredkv.cli", "serve", *options, "--port", "0", "--drain-seconds", "60"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        self._url: str | None = None

    @property
    def printed(self) -> str:
        """All it has printed."""
        return self._log.read_text()

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        while self._url is None:
            assert self.process.poll() is None, self.printed
            found = re.search(r"at (http://127\.0\.0\.1:\d+),", self.printed)
            self._url = None if found is None else found[1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        return self._url

    def complete(self, prompt: str, **fields: Any) -> Any:
        """The response to a prompt, as it comes."""
        import httpx2

        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=body, timeout=SECONDS) as response:
            assert response.status_code == 200, response.read()
            yield from response.iter_lines()

    def metric(self, name: str) -> float:
        """The value of a metric, 0 where there is none yet."""
        import httpx2

        text = httpx2.get(f"{self.url}/metrics", timeout=SECONDS).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def end(self, by: int) -> int:
        """Send a signal, and wait for the exit code."""
        self.process.send_signal(by)
        return self.process.wait(SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(*options: str) -> Server:
        servers.append(Server(tmp_path / f"log{len(servers)}", *options))
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def test_signals_and_what_outlives_them(start: Callable[..., Server], model_folder: Path, cold_dir: Path) -> None:
    """Killed, its prefixes are found by the next two servers, which share a cold folder; a signal lets them finish."""
    options = [str(model_folder), "--served-model-name", "tiny", "--block-size", "16", "--max-model-len", "1024"]
    options += ["--hot", "4MiB", "--warm", "1MiB", "--cold", str(cold_dir), "--cold-cap", "64MiB"]
    killed = start(*options)
    (first,) = (json.loads(line) for line in killed.complete(SYSTEM + "one"))
    assert killed.metric("tieredkv_attached_tokens_total") == 0
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL

    servers = [start(*options), start(*options)]
    for server in servers:
        (again,) = (json.loads(line) for line in server.complete(SYSTEM + "one"))
        assert again["choices"] == first["choices"]
        assert server.metric("tieredkv_attached_tokens_total") == len(SYSTEM + "one") // 16 * 16

    draining, idle = servers
    leaving = idle.complete("go on ", stream=True, max_tokens=900)
    next(leaving)
    leaving.close()
    while not idle.metric('tieredkv_requests_finished_total{reason="cancelled"}'):
        pass  # a server that does not notice runs into the test's time limit, or ends with "length"
    assert idle.metric('tieredkv_requests_finished_total{reason="length"}') == 1

    stream = draining.complete("go on ", stream=True, max_tokens=300)
    lines = [next(stream)]
    draining.process.send_signal(signal.SIGTERM)
    lines += stream
    assert [line for line in lines if line][-1] == "data: [DONE]"
    objects = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert objects[-1]["usage"]["completion_tokens"] == 300
    assert objects[-1]["choices"][0]["finish_reason"] == "length"
    assert draining.process.wait(SECONDS) == 0, draining.printed
    assert idle.end(signal.SIGINT) == 0, idle.printed
    for server in servers:
        assert SYSTEM[:20] not in server.printed
        assert "Error" not in server.printed and "Warning" not in server.printed
    assert "stopped    2 requests, 2 length\n" in draining.printed
    assert "stopped    2 requests, 1 cancelled, 1 length\n" in idle.printed
    printed = re.sub(r" +", " ", idle.printed)
    assert "KV 512 B per token, codec raw" in printed
    assert re.search(r"^hot [\d,]+ tokens$", printed, re.MULTILINE)
    assert re.search(r"^warm 2,\d{3} tokens$", printed, re.MULTILINE)
    assert re.search(r"^cold 1\d\d,\d{3} tokens$", printed, re.MULTILINE)
    assert re.search(r"^sequences \d{3} of 1,024 tokens at once$", printed, re.MULTILINE)


def test_a_port_that_is_in_use_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "absent"), "--port", str(port)])
    assert result.exit_code == 2
    assert "The port is in use." in result.output and f"127.0.0.1:{port}" in result.output


def test_an_address_that_is_not_ours_is_told() -> None:
    for host in ("203.0.113.1", "no such host"):
        with pytest.raises(ConfigError, match="cannot be listened at"):
            take_port(host, 0)
    with take_port("127.0.0.1", 0) as taken:
        assert taken.getsockname()[1] > 0


@pytest.mark.slow
def test_a_real_model_answers_a_stock_client(start: Callable[..., Server], cold_dir: Path) -> None:
    """SmolLM2 out of its GGUF file, with documents in int8; asked again, the document is not computed again."""
    import openai

    from tieredkv.cli.model import packaged_model

    file = packaged_model()
    sizes = ["--hot", "256MiB", "--warm", "256MiB", "--cold", str(cold_dir), "--max-model-len", "2048"]
    server = start(str(file.parent), "--gguf-file", file.name, "--preset", "documents", "--api-key", "secret", *sizes)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    name = client.models.list().data[0].id
    facts = " ".join(f"The number of house {number} in Elm Street is {number * 7}." for number in range(1, 40))
    for _ in range(2):
        answer = client.chat.completions.create(
            model=name,
            messages=[
                {"role": "system", "content": facts},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            max_tokens=24,
            temperature=0,
            stop=["."],
        )
        assert answer.choices[0].message.content == "The capital of France is Paris"
    assert server.metric("tieredkv_attached_tokens_total") > 500
    assert server.end(signal.SIGTERM) == 0, server.printed
