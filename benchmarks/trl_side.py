"""TRL's side of benchmarks/end_to_end.py. Runs in the environment with TRL and does not import keel."""

import sys

sys.path.pop(0)  # this folder: its signal.py would shadow the standard library's

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def main() -> None:
    config = json.loads(sys.argv[1])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            times.append(time.perf_counter())

    def is_correct(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        matches = [re.search(r"-?\d+", completion[0]["content"]) for completion in completions]
        pairs = zip(matches, answer, strict=True)
        return [float(match is not None and match[0] == expected) for match, expected in pairs]

    rows = config["groups"] * config["group_size"]
    settings = GRPOConfig(
        output_dir=config["scratch"] + "/trl",
        max_steps=config["steps"],
        learning_rate=config["lr"],
        lr_scheduler_type="constant",
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=config["group_size"],
        max_completion_length=config["max_tokens"],
        temperature=config["temperature"],
        gradient_checkpointing=config["gradient_checkpointing"],
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
        model=AutoModelForCausalLM.from_pretrained(config["model"], dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(config["model"]),
        reward_funcs=is_correct,
        args=settings,
        train_dataset=Dataset.from_list(json.loads(Path(config["tasks"]).read_text())),
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"seconds": [b - a for a, b in pairwise(times)], "rewards": rewards}))


if __name__ == "__main__":
    main()
