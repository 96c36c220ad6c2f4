"""Evaluate a model behind `keel serve` with inspect-ai: a task whose data set is in the file.

    keel serve smollm2-135m
    python examples/clients/inspect_task.py http://127.0.0.1:8000/v1

Prints one JSON object.
"""

import json
import sys
import tempfile


def main(base_url: str, model: str = "") -> None:
    import httpx
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    model = model or httpx.get(f"{base_url}/models", timeout=60).json()["data"][0]["id"]
    task = Task(
        name="capitals",
        dataset=[
            Sample(input="What is the capital of France? Answer with one word.", target="Paris"),
            Sample(input="What is the capital of Italy? Answer with one word.", target="Rome"),
        ],
        solver=generate(),
        scorer=includes(),
    )
    config = GenerateConfig(temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)
    served = get_model(f"openai-api/keel/{model}", base_url=base_url, api_key="unused", config=config)
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=served, display="none", log_dir=logs)
        if log.status != "success":
            raise SystemExit(str(log.error))
        outputs = [sample.output for sample in log.samples]
        result = {
            "accuracy": log.results.scores[0].metrics["accuracy"].value,
            "completions": [output.completion for output in outputs],
            "top_logprobs": [len(output.choices[0].logprobs.content[0].top_logprobs) for output in outputs],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
