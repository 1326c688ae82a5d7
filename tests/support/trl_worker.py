"""What is sent to a rollout worker has to be importable there: a reward, an environment, a model's server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlsandbox_trl import SandboxEnvironment


class Worker(SandboxEnvironment):
    """An environment with a tool of its own."""

    def more(self) -> str:
        """More.

        Returns:
            str: a word.
        """
        return self._sandbox.run("echo more").text


def upper(text: str) -> str | None:
    """The answer in a completion."""
    return text.upper() or None


def whole(text: str) -> str | None:
    """A completion as it is; the tools' calls have no text."""
    return text or "x"


def score(function: Any, completions: list[str], **row: Any) -> tuple[list[float | None], list[bool]]:
    """In a process of its own: what the rewards are, and which are missing."""
    import asyncio

    prompts = ["p"] * len(completions)
    return asyncio.run(function(prompts=prompts, completions=completions, **row)), function.missing


@contextmanager
def model_server(words: Any, answers: list[str]) -> Iterator[str]:
    """An HTTP server that completes prompts with *answers*, by turns; gives its address."""
    turn = iter(range(1 << 30))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            text = answers[next(turn) % len(answers)]
            ids = [*words.encode(text, add_special_tokens=False), words.eos_token_id]
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
