"""Three training steps with the real 135M model: right answers become likelier, a wrong one less likely."""

import dataclasses

import keel

trainer = keel.Trainer("smollm2-135m", keel.TrainerSettings(optimizer=keel.OptimizerSettings(lr=1e-5)))
tokenizer = trainer.model.tokenizer


def sample(question: str, answer: str, advantage: float, group: int) -> keel.Sample:
    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    wrote = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    trainable = [False] * len(prompt) + [True] * len(wrote)
    return keel.Sample(token_ids=prompt + wrote, trainable=trainable, advantage=advantage, group=group, name=answer)


samples = [
    sample("Which is larger, 3 or 8?", "8", 0.5, group=0),
    sample("Which is larger, 3 or 8?", "3", -0.5, group=0),
    sample("Which is larger, 71 or 64?", "71", 0.5, group=1),
    sample("Which is larger, 71 or 64?", "The answer is 64.", -0.5, group=1),
]
for step in range(3):
    # what the sampler recorded; here the policy itself, so nothing is stale
    recorded = trainer.logprobs(samples)
    rollouts = [dataclasses.replace(s, sampler_logprobs=r) for s, r in zip(samples, recorded, strict=True)]
    report = trainer.step(rollouts, "icepop")
    sums = {s.name: round(float(r.nansum()), 1) for s, r in zip(samples, recorded, strict=True)}
    print(f"step {step}: loss {report.loss:+.3f}, {report.kept_tokens} of {len(report.tokens)} tokens trained,", sums)
print(f"{report.computed_tokens} tokens computed instead of {report.unshared_tokens}")
