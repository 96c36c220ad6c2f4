"""Call a model behind `keel serve` through litellm: a chat completion, a stream and a text completion.

    keel serve smollm2-135m
    python examples/clients/litellm_chat.py http://127.0.0.1:8000/v1

Prints one JSON object.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # do not fetch the table of prices


def main(base_url: str, model: str = "") -> None:
    import httpx
    import litellm

    model = model or httpx.get(f"{base_url}/models", timeout=60).json()["data"][0]["id"]
    server = {"api_base": base_url, "api_key": "unused", "temperature": 0, "max_tokens": 12}
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    answer = litellm.completion(model=f"openai/{model}", messages=messages, logprobs=True, top_logprobs=2, **server)
    stream = litellm.completion(model=f"openai/{model}", messages=messages, stream=True, **server)
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="The capital of France is", **server)
    result = {
        "completion": answer.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "text": text.choices[0].text,
        "top_logprobs": len(answer.choices[0].logprobs.content[0].top_logprobs),
        "usage": answer.usage.completion_tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
