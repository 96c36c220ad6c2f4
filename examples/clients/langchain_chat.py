"""Chat with a model behind `keel serve` through langchain-openai: complete, streamed, and with log-probs.

    keel serve smollm2-135m
    python examples/clients/langchain_chat.py http://127.0.0.1:8000/v1

Prints one JSON object.
"""

import json
import sys


def main(base_url: str, model: str = "") -> None:
    import httpx
    from langchain_openai import ChatOpenAI

    model = model or httpx.get(f"{base_url}/models", timeout=60).json()["data"][0]["id"]
    chat = ChatOpenAI(model=model, base_url=base_url, api_key="unused", temperature=0, max_tokens=12)
    question = "What is the capital of France? Answer with one word."
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
    content = answer.response_metadata["logprobs"]["content"]
    result = {
        "completion": answer.content,
        "streamed": "".join(chunk.content for chunk in chat.stream(question)),
        "tokens": [[entry["token"], len(entry["top_logprobs"])] for entry in content],
        "usage": answer.usage_metadata["output_tokens"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
