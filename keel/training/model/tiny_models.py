"""Build tiny causal language models for tests and CI, one per supported architecture.

Each has at most a few hundred thousand parameters, a byte-level tokenizer with a ChatML template, and weights that
depend only on a seed: the same seed gives the same bits. Optionally the model is warmed up by supervised training on
single-digit comparisons, so that some of its completions earn a reward. The models are useful for tests only.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FORMAT = 2
"""Version of the written folder; increase it whenever the same seed would give different weights or files."""

PAD_TOKEN, IM_START, IM_END, END_OF_TEXT = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# id b is byte b, and every id is a valid token, so any sampled sequence can be decoded
SPECIAL_TOKENS = {PAD_TOKEN: 256, IM_START: 257, IM_END: 258, END_OF_TEXT: 259}
VOCAB_SIZE = 260

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_BASE_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    # the usual 0.02 gives an almost uniform distribution at this width, which would hide errors in log-probs
    "initializer_range": 0.15,
    "pad_token_id": SPECIAL_TOKENS[PAD_TOKEN],
    "bos_token_id": SPECIAL_TOKENS[IM_START],
    "eos_token_id": SPECIAL_TOKENS[IM_END],
}
_TRANSFORMER_CONFIG: dict[str, Any] = _BASE_CONFIG | {
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
# shorter than any conversation, so that a wrong window changes the results
_SLIDING_CONFIG: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

_CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "tiny": lambda: transformers.LlamaConfig(**_TRANSFORMER_CONFIG, tie_word_embeddings=True),
    "tiny-llama-untied": lambda: transformers.LlamaConfig(**_TRANSFORMER_CONFIG, tie_word_embeddings=False),
    "tiny-qwen2": lambda: transformers.Qwen2Config(**_TRANSFORMER_CONFIG, tie_word_embeddings=True),
    "tiny-qwen3": lambda: transformers.Qwen3Config(**_TRANSFORMER_CONFIG, tie_word_embeddings=True),
    "tiny-mistral": lambda: transformers.MistralConfig(
        **_TRANSFORMER_CONFIG, sliding_window=8, tie_word_embeddings=False
    ),
    "tiny-gemma2": lambda: transformers.Gemma2Config(
        **_TRANSFORMER_CONFIG,
        **_SLIDING_CONFIG,
        query_pre_attn_scalar=16,
        # low enough to affect the logits and scores of such a small model
        final_logit_softcapping=5.0,
        attn_logit_softcapping=4.0,
    ),
    "tiny-gemma3": lambda: transformers.Gemma3TextConfig(
        **_TRANSFORMER_CONFIG, **_SLIDING_CONFIG, query_pre_attn_scalar=16
    ),
    "tiny-gpt-oss": lambda: transformers.GptOssConfig(
        **_TRANSFORMER_CONFIG | {"intermediate_size": 64},
        **_SLIDING_CONFIG,
        num_local_experts=4,
        num_experts_per_tok=2,
        # the default scales positions for contexts of 128k tokens
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "tiny-mixtral": lambda: transformers.MixtralConfig(
        **_TRANSFORMER_CONFIG | {"intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2
    ),
    "tiny-qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_TRANSFORMER_CONFIG, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "tiny-mamba": lambda: transformers.MambaConfig(**_BASE_CONFIG, state_size=8, tie_word_embeddings=True),
}
MODEL_NAMES = tuple(_CONFIGS)


def write_model(name: str, seed: int, sft_warmup_steps: int, folder: Path) -> None:
    """Write the model of that name and seed, warmed up if requested, and its tokenizer as a Hugging Face folder."""
    network, tokenizer = build_model(name, seed), build_tokenizer()
    if sft_warmup_steps:
        sft_warmup(network, tokenizer, sft_warmup_steps, seed)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_model(name: str, seed: int) -> transformers.PreTrainedModel:
    """Return the network in float32 on the CPU with weights drawn from the seed, leaving the global RNG unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        auto_model = transformers.AutoModelForCausalLM
        network: transformers.PreTrainedModel = auto_model.from_config(_CONFIGS[name]())  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() == 1:
                    # biases start at zero and norms at one; code that ignores them would not be noticed
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    network.train(False)
    return network


def build_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Return a tokenizer with one token per UTF-8 byte and four special tokens; it round-trips any text exactly."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        bos_token=IM_START,
        eos_token=IM_END,
        additional_special_tokens=[END_OF_TEXT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHATML
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the printable character that represents each byte in the ByteLevel alphabet (as in GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    replacements = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]


def comparison_question(rng: random.Random) -> tuple[str, str, str]:
    """Return a question whose answer is one digit, the correct answer and the incorrect one."""
    first, second = rng.sample(range(10), 2)
    return f"Which is larger, {first} or {second}?", str(max(first, second)), str(min(first, second))


def sft_warmup(
    network: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, steps: int, seed: int
) -> None:
    """Take supervised steps on comparisons: cross entropy on the answer and the end token.

    Four answers in ten are deliberately wrong. The model learns the answer format and a preference for the correct
    answer, so that reinforcement learning gets groups with mixed rewards and room to improve after any number of steps.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0)
    threads = torch.get_num_threads()
    # one thread makes the summation order the same on every machine; matrices this small do not benefit from more
    torch.set_num_threads(1)
    try:
        for _ in range(steps):
            inputs, labels = _sft_examples(tokenizer, rng, 8)
            logits = network(input_ids=inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    network.zero_grad()


def _sft_examples(
    tokenizer: transformers.PreTrainedTokenizerBase, rng: random.Random, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = [], []
    for _ in range(count):
        question, right, wrong = comparison_question(rng)
        answer = right if rng.random() < 0.6 else wrong
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        completion = tokenizer.encode(answer + IM_END)
        inputs.append(torch.tensor([*prompt, *completion]))
        labels.append(torch.tensor([*[-100] * len(prompt), *completion]))
    # every question has the same length in bytes, so no padding is needed
    return torch.stack(inputs), torch.stack(labels)
