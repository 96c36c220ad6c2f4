"""TRL's side of benchmarks/end_to_end.py. Runs in the environment that has TRL, and imports nothing of keel."""

import sys

sys.path.pop(0)  # this folder, whose signal.py is not the standard library's

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def main() -> None:
    given = json.loads(sys.argv[1])
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            times.append(time.perf_counter())

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [re.search(r"-?\d+", completion[0]["content"]) for completion in completions]
        return [float(match is not None and match[0] == want) for match, want in zip(found, answer, strict=True)]

    rows = given["groups"] * given["group_size"]
    settings = GRPOConfig(
        output_dir=given["scratch"] + "/trl",
        max_steps=given["steps"],
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=given["group_size"],
        max_completion_length=given["max_tokens"],
        temperature=given["temperature"],
        gradient_checkpointing=given["gradient_checkpointing"],
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(given["model"]),
        reward_funcs=right,
        args=settings,
        train_dataset=Dataset.from_list(json.loads(Path(given["tasks"]).read_text())),
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"seconds": [b - a for a, b in pairwise(times)], "rewards": rewards}))


if __name__ == "__main__":
    main()
