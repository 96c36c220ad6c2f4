"""Evaluate a model behind `keel serve` on multiple choice with lm-evaluation-harness, from a local file.

    keel serve smollm2-135m
    python examples/clients/lm_eval_choice.py http://127.0.0.1:8000/v1 TOKENIZER_FOLDER

The harness tokenizes with the model's own tokenizer (a folder, or a hub name) and reads the log-probs of the prompt:
`echo` with `logprobs`. Prints one JSON object.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "unused"}

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "a banana", "seven"], "answer": 0},
    {"question": "Two plus two is", "choices": ["a river", "four", "Tuesday"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["purple", "fast", "cold"], "answer": 2},
    {"question": "Dogs and cats are", "choices": ["animals", "numbers", "planets"], "answer": 0},
]
TASK = """
task: keel_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def main(base_url: str, tokenizer: str, model: str = "") -> None:
    import httpx
    import lm_eval
    from lm_eval.tasks import TaskManager

    model = model or httpx.get(f"{base_url}/models", timeout=60).json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        file = Path(folder) / "questions.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
        (Path(folder) / "choices.yaml").write_text(TASK.format(file=file))
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={"model": model, "base_url": f"{base_url}/completions", "tokenizer": tokenizer},
            tasks=["keel_choices"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            batch_size=4,
            bootstrap_iters=0,
        )
    scores = {name: value for name, value in result["results"]["keel_choices"].items() if name.startswith("acc")}
    samples = [
        {
            "question": sample["doc"]["question"],
            "choices": sample["doc"]["choices"],
            "logprobs": [float(response[0]) for response in sample["filtered_resps"]],
        }
        for sample in sorted(result["samples"]["keel_choices"], key=lambda sample: sample["doc_id"])
    ]
    print(json.dumps({"scores": scores, "samples": samples}))


if __name__ == "__main__":
    main(*sys.argv[1:])
