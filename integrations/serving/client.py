"""Talks to `tieredkv serve`, or to any other OpenAI-compatible server, with the `openai` package.

    tieredkv serve HuggingFaceTB/SmolLM2-135M-Instruct --served-model-name smollm2
    python integrations/serving/client.py "What is a KV cache?"

Imports: openai.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from openai import OpenAI


def first_model(client: OpenAI) -> str:
    """The name of the model that the server has."""
    return client.models.list().data[0].id


def ask(client: OpenAI, model: str, question: str, most_tokens: int) -> Iterator[str]:
    """The answer, in pieces as they come.

    Args:
        client: of the server.
        model: what the server calls its model.
        question: a user's message.
        most_tokens: most tokens of the answer.
    """
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=most_tokens,
        stream=True,
    )
    for part in stream:
        if part.choices and part.choices[0].delta.content:
            yield part.choices[0].delta.content


def main(arguments: list[str] | None = None, client: OpenAI | None = None) -> None:
    """Ask what the command line says, and print the answer as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the one that the server has")
    parser.add_argument("--new-tokens", type=int, default=256, help="most tokens of the answer")
    chosen = parser.parse_args(arguments)
    # The key comes from the environment: a command line can be read by everybody on the machine.
    client = client or OpenAI(base_url=chosen.url, api_key=os.environ.get("TIEREDKV_API_KEY", "none"))
    for piece in ask(client, chosen.model or first_model(client), chosen.question, chosen.new_tokens):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
