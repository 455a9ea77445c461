"""`transformers serve` on a CPU answers OpenAI requests from a pruned Qwen3.5 with what `generate` gives.

Needs the extra `serving`. Server and `generate` are stock transformers in processes of their own, in which fla cannot
be imported: without a GPU transformers would call its kernels and fail.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main

pytestmark = pytest.mark.slow

NOT_INSTALLED = "not measured: the extra `serving` is not installed"
NEW_TOKENS = 24
AT_ONCE = 16
SUBJECTS = ["memory", "a river", "the station", "winter", "an old book", "the sea", "bread", "a garden"]
PROMPTS = [f"{beginning} {subject} is" for subject in SUBJECTS for beginning in ("The story of", "What we know about")]
CHATS = [[{"role": "user", "content": f"Tell me about {subject}."}] for subject in SUBJECTS[:4]]
# Of the form of Qwen's own: for these models the server looks for the last of these marks to see where an answer
# begins, and with other marks it answers with the prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SERVE = "import sys; sys.modules['fla'] = None; from transformers.cli.transformers import main; main()"


@dataclass(frozen=True)
class Server:
    """A running server: its client, the pruned folder that it serves, and what `generate` gives for every request."""

    client: Any
    model: str
    prompts: list[dict[str, Any]]
    chats: list[dict[str, Any]]


@pytest.fixture(scope="module")
def openai() -> Any:
    """The client's module, where everything is installed that the server needs as well."""
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason=NOT_INSTALLED)
    return pytest.importorskip("openai", reason=NOT_INSTALLED)


@pytest.fixture(scope="module")
def pruned(openai: Any, shared_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "half"
    words = [str(shared_models / "qwen35-18m"), "--ratio", "0.5", "--calibration", "demo", "--calibration-samples", "4"]
    words += ["--sequence-length", "512", "--retrieval-share", "0", "--no-refit", "--no-evaluate", "--no-verify"]
    assert main([*words, "--device", "cpu", "--output-dir", str(folder)]) == 0
    assert json.loads((folder / "config.json").read_text())["linear_key_head_dim"] == 64
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(openai: Any, pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("server")
    environment = os.environ | {"HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"}
    expected = generated(pruned, environment)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-c", SERVE, "serve", str(pruned), *options]
    log = place / "log"
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as child:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", child, log)
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300, max_retries=0)
            yield Server(client, str(pruned), expected["prompts"], expected["chats"])
        finally:
            child.terminate()


def generated(folder: Path, environment: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """What stock `generate` gives for every request."""
    script = Path(__file__).with_name("generate_process.py")
    request = json.dumps({"prompts": PROMPTS, "chats": CHATS, "new_tokens": NEW_TOKENS})
    command = [sys.executable, str(script), str(folder)]
    child = subprocess.run(command, env=environment, input=request, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    answers: dict[str, list[dict[str, Any]]] = json.loads(child.stdout.splitlines()[-1])
    return answers


def wait_for(address: str, child: subprocess.Popen[Any], log: Path) -> None:
    for _ in range(600):
        assert child.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(log.read_text())


def complete(server: Server, prompt: str) -> Any:
    return server.client.completions.create(model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0)


def test_completions_sixteen_at_once(server: Server) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    assert len(answers) == AT_ONCE
    assert [answer.choices[0].text for answer in answers] == [expected["text"] for expected in server.prompts]
    assert [answer.usage.prompt_tokens for answer in answers] == [e["prompt_tokens"] for e in server.prompts]
    assert [answer.usage.completion_tokens for answer in answers] == [e["new_tokens"] for e in server.prompts]
    assert len({answer.choices[0].text for answer in answers}) > AT_ONCE // 2


def test_streams_sixteen_at_once(server: Server) -> None:
    def streamed(prompt: str) -> list[str]:
        stream = server.client.completions.create(
            model=server.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True
        )
        return [chunk.choices[0].text or "" for chunk in stream]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        pieces = list(pool.map(streamed, PROMPTS))
    assert ["".join(texts) for texts in pieces] == [expected["text"] for expected in server.prompts]
    assert all(sum(bool(text) for text in texts) > 1 for texts in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_chats(stream: bool, server: Server) -> None:
    def asked(messages: list[dict[str, str]]) -> str:
        answer = server.client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=NEW_TOKENS, temperature=0, stream=stream
        )
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(asked, CHATS))
    assert answers == [expected["text"] for expected in server.chats]
