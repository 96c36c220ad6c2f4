"""Train an agent with a tool in your own loop: answer, let a tool check the answer, answer again if it is wrong.

    python examples/agent.py                  tiny random model, a few seconds
    python examples/agent.py smollm2-135m     SmolLM2-135M, about two minutes per step on two CPU cores

The agent talks to the model with an ordinary OpenAI client; the endpoint records every sampled token for training.
"""

import asyncio
import json
import random
import re
import sys
import tempfile
from typing import Any

import keel

RULES = (
    "Answer with one number. A tool checks your answer; if it is wrong you get one more try. You may call the tool"
    ' yourself: <tool_call>{"name": "check", "arguments": {"number": 3}}</tool_call>'
)


def check(number: int, task: tuple[int, int]) -> str:
    """Check an answer; this is the tool."""
    return "right" if number == max(task) else f"{number} is wrong. Which is larger, {task[0]} or {task[1]}?"


def tool_call(message: Any) -> int | None:
    """Return the number to check, from a tool call or else the first number in the text: small models rarely call."""
    for call in message.tool_calls or []:
        number = json.loads(call.function.arguments).get("number")
        if isinstance(number, int):
            return number
    match = re.search(r"\d+", message.content or "")
    return int(match[0]) if match else None


async def attempt(model: keel.TrainableModel, task: tuple[int, int]) -> keel.Trajectory:
    """Play one episode of up to two answers: reward 1 if the first is correct, 0.5 if the second is."""
    client = model.openai_client()
    question = f"Which is larger, {task[0]} or {task[1]}?"
    messages = [{"role": "user", "content": question}]
    if not model.settings.sft_warmup_steps:
        messages.insert(0, {"role": "system", "content": RULES})
    trajectory = keel.Trajectory(messages_and_choices=messages, reward=0.0, name=question)
    for reward in (1.0, 0.5):
        response = await client.chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_tokens=8 if model.settings.sft_warmup_steps else 32
        )
        trajectory.messages_and_choices.append(response.choices[0])
        number = tool_call(response.choices[0].message)
        if number is not None and number == max(task):
            trajectory.reward = reward
            break
        feedback = "no number found" if number is None else check(number, task)
        trajectory.messages_and_choices.append({"role": "tool", "content": feedback, "tool_call_id": "check"})
    trajectory.metrics["answers"] = len(trajectory.choices)
    return trajectory


async def main(base: str, folder: str) -> None:
    tiny = base.startswith("tiny")
    steps, learning_rate = (6, 2e-3) if tiny else (10, 1e-5)
    rng = random.Random(0)
    tasks = [tuple(rng.sample(range(10) if tiny else range(10, 100), 2)) for _ in range(6)]
    model = keel.TrainableModel(name="agent-1", base=base, sft_warmup_steps=150 if tiny else 0)
    async with keel.LocalBackend(path=folder) as backend:
        await backend.register(model)
        for _ in range(steps):
            groups = await keel.gather_groups(
                (keel.TrajectoryGroup(attempt(model, task) for _ in range(8)) for task in tasks), max_exceptions=4
            )
            result = await backend.train(model, groups, objective="icepop", learning_rate=learning_rate)
            metrics = result.metrics
            print(
                f"step {result.step}: reward {metrics['reward']:.2f}, {metrics['metrics/answers']:.2f} answers"
                f" an attempt, {metrics['rollout/sampled_tokens']:.0f} tokens, {metrics['groups_zero_variance']:.0f} of"
                f" {metrics['groups']:.0f} groups without signal"
            )
        print(f"weights: {result.checkpoint_path.relative_to(folder)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "tiny", folder))
