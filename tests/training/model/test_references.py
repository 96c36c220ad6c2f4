"""References: each gives exactly the log-probs of what it names, and the policy comes back exactly as it was."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch

from keel.config.trainer import CheckpointSettings, LoraSettings, ModelSettings, ReferenceSettings
from keel.errors import ModelError
from keel.training.model.checkpoint import Checkpoints
from keel.training.model.model import Model, load_model
from keel.training.model.model_source import suppress_hf_output
from keel.training.model.references import References, load_references

LORA = LoraSettings(rank=4, alpha=8)
TOKENS = torch.tensor([[257, 72, 101, 108, 108, 111, 258, 10, 52, 50, 33, 258]])


def tiny(name: str = "tiny", lora: LoraSettings | None = None, seed: int = 0) -> Model:
    return load_model(ModelSettings(name=name, lora=lora, device="cpu"), seed)


def adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters().values(), lr=1e-2)


def train(model: Model, steps: int = 2) -> None:
    optimizer = adamw(model)
    for _ in range(steps):
        optimizer.zero_grad()
        (-logits(model).log_softmax(-1)[0, :-1].gather(1, TOKENS[0, 1:, None]).mean()).backward()
        optimizer.step()
    optimizer.zero_grad()


def logits(model: Model) -> torch.Tensor:
    result: torch.Tensor = model.network(input_ids=TOKENS).logits
    return result


def logprobs(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return logits(model).log_softmax(-1)


def references(sources: dict[str, str], model: Model, checkpoints: Checkpoints | None = None) -> References:
    return load_references(
        {name: ReferenceSettings(source=source) for name, source in sources.items()}, model, checkpoints
    )


def run_of(model: Model, folder: Path, steps: int = 3) -> tuple[Checkpoints, list[torch.Tensor]]:
    """A run with a checkpoint of each step, and the policy's log-probs at each."""
    kept, at = Checkpoints(folder, CheckpointSettings(keep_last=9)), []
    for step in range(steps):
        kept.save(step, model, adamw(model), {})
        at.append(logprobs(model))
        train(model)
    return kept, at


def state_of(model: Model) -> dict[str, object]:
    """Everything about the policy that a reference could disturb."""
    found: dict[str, object] = {
        name: (weight.requires_grad, weight.detach().clone().numpy().tobytes())
        for name, weight in model.network.named_parameters()
        if ".reference_" not in name
    }
    layers = [layer for layer in model.network.modules() if isinstance(layer, peft.tuners.lora.LoraLayer)]
    found["active"] = [(tuple(layer.active_adapters), layer.disable_adapters) for layer in layers]
    modules = [(name, module) for name, module in model.network.named_modules() if "reference_" not in name]
    found["mode"] = {name: module.training for name, module in modules}
    found["parameters"] = list(model.parameters())
    return found


# what they compute


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-gpt-oss", "tiny-mixtral"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_each_reference_gives_the_logprobs_of_what_it_names(
    name: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    policy, base = tiny(name, lora), logprobs(tiny(name))
    kept, at = run_of(policy, tmp_path)
    other = tiny(name, seed=5)
    with suppress_hf_output():
        other.network.save_pretrained(tmp_path / "other")
        other.tokenizer.save_pretrained(tmp_path / "other")
    now, before = logprobs(policy), state_of(policy)
    sources = {"base": "base", "one": "step:1", "two": "step:2", "other": f"model:{tmp_path / 'other'}"}
    prepared = references(sources, policy, kept)
    wanted = {"base": base, "one": at[1], "two": at[2], "other": logprobs(other)}
    assert len(prepared) == 4
    for _ in range(2):
        for label, _, context in prepared.each():
            with context as model:
                assert torch.equal(logprobs(model), wanted[label]), label
            assert torch.equal(logprobs(policy), now)
    assert state_of(policy) == before
    assert len({tensor.numpy().tobytes() for tensor in [*wanted.values(), now]}) == 5


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_adapter_by_its_path_gives_its_logprobs(lora: LoraSettings | None, tmp_path: Path) -> None:
    trained = tiny(lora=LoraSettings(rank=2, targets=["q_proj", "down_proj"]))
    train(trained)
    folder = Checkpoints(tmp_path, CheckpointSettings()).save(1, trained, adamw(trained), {})
    policy = tiny(lora=lora)
    train(policy)
    now, before = logprobs(policy), state_of(policy)
    prepared = references({"adapter": f"adapter:{folder}", "base": "base"}, policy)
    wanted = {"adapter": logprobs(trained), "base": logprobs(tiny())}
    for label, _, context in prepared.each():
        with context as model:
            assert torch.equal(logprobs(model), wanted[label]), label
            assert (model is policy) == (lora is not None)
    assert torch.equal(logprobs(policy), now) and state_of(policy) == before


def test_an_adapter_that_peft_wrote_is_a_reference_too(tmp_path: Path) -> None:
    trained = tiny(lora=LORA)
    train(trained)
    assert trained.peft is not None
    trained.peft.peft_config["default"].base_model_name_or_path = "somewhere/else/tiny"
    trained.peft.save_pretrained(str(tmp_path), save_embedding_layers=False)
    policy = tiny(lora=LORA)
    for _, _, context in references({"a": f"adapter:{tmp_path}"}, policy):
        with context as model:
            assert torch.equal(logprobs(model), logprobs(trained))


# what they cost


def test_with_adapters_nothing_of_the_base_is_copied(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    kept, _ = run_of(policy, tmp_path)
    base = {weight.data_ptr() for name, weight in policy.network.named_parameters() if "lora" not in name}
    count = sum(1 for _ in policy.network.named_parameters())
    sources = {"a": "base", "b": "step:1", "c": f"adapter:{kept.path(1)}", "d": "step:1"}
    prepared = references(sources, policy, kept)
    assert all(model is policy for _, _, context in prepared.each() for model in [_entered(context)])
    assert {weight.data_ptr() for name, weight in policy.network.named_parameters() if "lora" not in name} == base
    # b, c and d are one adapter, as many tensors as the trained one has
    assert sum(1 for _ in policy.network.named_parameters()) == count + len(policy.parameters())
    assert len(set(prepared.fingerprints().values())) == 2


def _entered(context: object) -> Model:
    with context as model:  # type: ignore[attr-defined]
        assert isinstance(model, Model)
        return model


def test_with_full_training_one_copy_of_the_base_serves_all_that_need_it(tmp_path: Path) -> None:
    trained = tiny(lora=LORA)
    folder = Checkpoints(tmp_path, CheckpointSettings()).save(1, trained, adamw(trained), {})
    policy = tiny()
    prepared = references({"a": "base", "b": "base", "c": f"adapter:{folder}"}, policy)
    models = [_entered(context) for _, _, context in prepared.each()]
    assert models[0] is models[1] is models[2] is not policy


# frozen, and given back


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_no_parameter_of_a_reference_takes_a_gradient(lora: LoraSettings | None, tmp_path: Path) -> None:
    policy = tiny(lora=lora)
    kept, _ = run_of(policy, tmp_path)
    trained = {id(weight) for weight in policy.parameters().values()}
    for _, _, context in references({"a": "base", "b": "step:1", "c": "model:tiny-qwen3"}, policy, kept):
        with context as model:
            frozen = [weight for weight in model.network.parameters() if id(weight) not in trained]
            assert frozen and not any(weight.requires_grad for weight in frozen)
            assert not logits(model).requires_grad
    logits(policy).sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters().values())
    assert all(weight.requires_grad == (id(weight) in trained) for weight in policy.network.parameters())


def test_an_exception_inside_gives_the_policy_back_exactly(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    kept, _ = run_of(policy, tmp_path)
    prepared = references({"a": "base", "b": "step:1"}, policy, kept)
    now, before = logprobs(policy), state_of(policy)
    for _, _, context in prepared.each():
        with pytest.raises(KeyError), context:
            raise KeyError("in the middle of a pass")
        assert torch.equal(logprobs(policy), now) and state_of(policy) == before
        assert torch.is_grad_enabled()


def test_training_goes_on_bit_for_bit_with_references_beside_it(tmp_path: Path) -> None:
    alone, beside = tiny(lora=LORA), tiny(lora=LORA)
    kept, _ = run_of(alone, tmp_path / "a")
    kept, _ = run_of(beside, tmp_path / "b")
    for _, _, context in references({"a": "base", "b": "step:1"}, beside, kept):
        with context as model:
            logprobs(model)
    train(alone)
    train(beside)
    assert torch.equal(logprobs(alone), logprobs(beside))
    # and what is saved is the trained adapter alone
    folder = kept.save(9, beside, adamw(beside), {})
    fresh = tiny(lora=LORA)
    kept.load(9, fresh, adamw(fresh))
    assert torch.equal(logprobs(fresh), logprobs(alone))
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["adapter_model.safetensors"]


def test_gradient_checkpointing_stays_on_beside_a_second_adapter(tmp_path: Path) -> None:
    policy = load_model(ModelSettings(name="tiny", lora=LORA, gradient_checkpointing=True))
    kept, _ = run_of(policy, tmp_path)
    before = state_of(policy)
    for _, _, context in references({"a": "base", "b": "step:1"}, policy, kept):
        with context as model:
            logprobs(model)
    assert policy.network.training and state_of(policy) == before


def test_weights_add_up_to_one_and_order_is_kept() -> None:
    policy = tiny(lora=LORA)
    settings = {"b": ReferenceSettings(weight=3), "a": ReferenceSettings(weight=1)}
    assert [(name, weight) for name, weight, _ in load_references(settings, policy)] == [("b", 0.75), ("a", 0.25)]
    assert len(load_references({}, policy)) == 0


# fingerprints


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_fingerprints_are_those_of_the_weights(lora: LoraSettings | None, tmp_path: Path) -> None:
    policy = tiny(lora=lora)
    kept, _ = run_of(policy, tmp_path)
    sources = {"base": "base", "one": "step:1", "two": "step:2", "other": "model:tiny-qwen3"}
    found = references(sources, policy, kept).fingerprints()
    assert found["base"] == policy.source.fingerprint and len(set(found.values())) == 4
    again = tiny(lora=lora)
    assert references(sources, again, kept).fingerprints() == found


def test_a_step_that_is_referred_to_is_not_removed_to_make_room(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    run_of(policy, tmp_path)
    thrifty = Checkpoints(tmp_path, CheckpointSettings(keep_last=1))
    references({"a": "step:1"}, policy, thrifty)
    thrifty.save(7, policy, adamw(policy), {})
    assert thrifty.steps() == [1, 7]


# what is refused


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_missing_step_lists_those_that_exist(lora: LoraSettings | None, tmp_path: Path) -> None:
    policy = tiny(lora=lora)
    kept, _ = run_of(policy, tmp_path)
    with pytest.raises(ModelError, match=r'references\.old\.source = "step:8": .*steps that exist: 0, 1, 2'):
        references({"old": "step:8"}, policy, kept)
    with pytest.raises(ModelError, match="no run whose checkpoints"):
        references({"old": "step:8"}, policy, None)


def test_a_damaged_step_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    kept, _ = run_of(policy, tmp_path)
    (kept.path(1) / "adapter_model.safetensors").write_bytes(b"")
    for source in ("step:1", f"adapter:{kept.path(1)}"):
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors has 0 bytes"):
            references({"a": source}, policy, kept)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_adapter_of_another_base_is_refused_and_both_are_named(lora: LoraSettings | None, tmp_path: Path) -> None:
    other = tiny("tiny-qwen3", LORA)
    folder = Checkpoints(tmp_path, CheckpointSettings()).save(1, other, adamw(other), {})
    with pytest.raises(ModelError, match=r"an adapter of tiny-qwen3 .* the model is tiny "):
        references({"a": f"adapter:{folder}"}, tiny(lora=lora))
    for file in ("keel.json", "manifest.json"):
        (folder / file).unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/big-model"}))
    with pytest.raises(ModelError, match=r"org/big-model, and this is tiny"):
        references({"a": f"adapter:{folder}"}, tiny(lora=lora))


def test_a_step_of_another_run_is_refused(tmp_path: Path) -> None:
    kept, _ = run_of(tiny("tiny-qwen3", LORA), tmp_path, steps=1)
    with pytest.raises(ModelError, match=r"an adapter of tiny-qwen3 .*, the model is an adapter of tiny "):
        references({"a": "step:0"}, tiny(lora=LORA), kept)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    with pytest.raises(ModelError, match=r"is no adapter: it has no adapter_config\.json"):
        references({"a": f"adapter:{tmp_path}"}, policy)
    with pytest.raises(ModelError, match=r"references\.a\.source.*does not exist"):
        references({"a": f"model:{tmp_path / 'absent'}"}, policy)


def test_a_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    words = copy.deepcopy(policy.tokenizer)
    words.add_tokens(["<extra>"])
    policy.network.base_model.config.save_pretrained(tmp_path)
    load_model(ModelSettings(name="tiny")).network.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"its tokenizer \(261 tokens\) is not that of tiny \(260 tokens"):
        references({"a": f"model:{tmp_path}"}, policy)
