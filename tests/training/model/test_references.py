"""Test that each reference has exactly the log-probs of the model it names and leaves the policy unchanged."""

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


def train_with_checkpoints(model: Model, folder: Path, steps: int = 3) -> tuple[Checkpoints, list[torch.Tensor]]:
    """Train with a checkpoint of each step; return the checkpoints and the policy's log-probs at each."""
    checkpoints, step_logprobs = Checkpoints(folder, CheckpointSettings(keep_last=9)), []
    for step in range(steps):
        checkpoints.save(step, model, adamw(model), {})
        step_logprobs.append(logprobs(model))
        train(model)
    return checkpoints, step_logprobs


def policy_state(model: Model) -> dict[str, object]:
    """Return everything about the policy that a reference could change."""
    state: dict[str, object] = {
        name: (weight.requires_grad, weight.detach().clone().numpy().tobytes())
        for name, weight in model.network.named_parameters()
        if ".reference_" not in name
    }
    layers = [layer for layer in model.network.modules() if isinstance(layer, peft.tuners.lora.LoraLayer)]
    state["active"] = [(tuple(layer.active_adapters), layer.disable_adapters) for layer in layers]
    modules = [(name, module) for name, module in model.network.named_modules() if "reference_" not in name]
    state["mode"] = {name: module.training for name, module in modules}
    state["parameters"] = list(model.parameters())
    return state


# log-probs


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-gpt-oss", "tiny-mixtral"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_each_reference_has_the_logprobs_of_the_model_it_names(
    name: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    policy, base = tiny(name, lora), logprobs(tiny(name))
    checkpoints, step_logprobs = train_with_checkpoints(policy, tmp_path)
    other = tiny(name, seed=5)
    with suppress_hf_output():
        other.network.save_pretrained(tmp_path / "other")
        other.tokenizer.save_pretrained(tmp_path / "other")
    now, before = logprobs(policy), policy_state(policy)
    sources = {"base": "base", "one": "step:1", "two": "step:2", "other": f"model:{tmp_path / 'other'}"}
    loaded = references(sources, policy, checkpoints)
    expected = {"base": base, "one": step_logprobs[1], "two": step_logprobs[2], "other": logprobs(other)}
    assert len(loaded) == 4
    for _ in range(2):
        for label, _, context in loaded.each():
            with context as model:
                assert torch.equal(logprobs(model), expected[label]), label
            assert torch.equal(logprobs(policy), now)
    assert policy_state(policy) == before
    assert len({tensor.numpy().tobytes() for tensor in [*expected.values(), now]}) == 5


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_adapter_reference_has_the_logprobs_of_the_adapter(lora: LoraSettings | None, tmp_path: Path) -> None:
    trained = tiny(lora=LoraSettings(rank=2, targets=["q_proj", "down_proj"]))
    train(trained)
    folder = Checkpoints(tmp_path, CheckpointSettings()).save(1, trained, adamw(trained), {})
    policy = tiny(lora=lora)
    train(policy)
    now, before = logprobs(policy), policy_state(policy)
    loaded = references({"adapter": f"adapter:{folder}", "base": "base"}, policy)
    expected = {"adapter": logprobs(trained), "base": logprobs(tiny())}
    for label, _, context in loaded.each():
        with context as model:
            assert torch.equal(logprobs(model), expected[label]), label
            assert (model is policy) == (lora is not None)
    assert torch.equal(logprobs(policy), now) and policy_state(policy) == before


def test_an_adapter_written_by_peft_can_be_a_reference(tmp_path: Path) -> None:
    trained = tiny(lora=LORA)
    train(trained)
    assert trained.peft is not None
    trained.peft.peft_config["default"].base_model_name_or_path = "somewhere/else/tiny"
    trained.peft.save_pretrained(str(tmp_path), save_embedding_layers=False)
    policy = tiny(lora=LORA)
    for _, _, context in references({"a": f"adapter:{tmp_path}"}, policy):
        with context as model:
            assert torch.equal(logprobs(model), logprobs(trained))


# memory


def test_with_lora_no_base_weight_is_copied(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    base = {weight.data_ptr() for name, weight in policy.network.named_parameters() if "lora" not in name}
    count = sum(1 for _ in policy.network.named_parameters())
    sources = {"a": "base", "b": "step:1", "c": f"adapter:{checkpoints.path(1)}", "d": "step:1"}
    loaded = references(sources, policy, checkpoints)
    assert all(model is policy for _, _, context in loaded.each() for model in [_entered(context)])
    assert {weight.data_ptr() for name, weight in policy.network.named_parameters() if "lora" not in name} == base
    # b, c and d are the same adapter, with as many tensors as the trained one
    assert sum(1 for _ in policy.network.named_parameters()) == count + len(policy.parameters())
    assert len(set(loaded.fingerprints().values())) == 2


def _entered(context: object) -> Model:
    with context as model:  # type: ignore[attr-defined]
        assert isinstance(model, Model)
        return model


def test_with_full_training_references_share_one_copy_of_the_base(tmp_path: Path) -> None:
    trained = tiny(lora=LORA)
    folder = Checkpoints(tmp_path, CheckpointSettings()).save(1, trained, adamw(trained), {})
    policy = tiny()
    loaded = references({"a": "base", "b": "base", "c": f"adapter:{folder}"}, policy)
    models = [_entered(context) for _, _, context in loaded.each()]
    assert models[0] is models[1] is models[2] is not policy


# frozen references and an unchanged policy


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_no_parameter_of_a_reference_requires_a_gradient(lora: LoraSettings | None, tmp_path: Path) -> None:
    policy = tiny(lora=lora)
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    trained = {id(weight) for weight in policy.parameters().values()}
    for _, _, context in references({"a": "base", "b": "step:1", "c": "model:tiny-qwen3"}, policy, checkpoints):
        with context as model:
            frozen = [weight for weight in model.network.parameters() if id(weight) not in trained]
            assert frozen and not any(weight.requires_grad for weight in frozen)
            assert not logits(model).requires_grad
    logits(policy).sum().backward()
    assert all(weight.grad is not None for weight in policy.parameters().values())
    assert all(weight.requires_grad == (id(weight) in trained) for weight in policy.network.parameters())


def test_an_exception_inside_a_reference_context_restores_the_policy_exactly(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    loaded = references({"a": "base", "b": "step:1"}, policy, checkpoints)
    now, before = logprobs(policy), policy_state(policy)
    for _, _, context in loaded.each():
        with pytest.raises(KeyError), context:
            raise KeyError("in the middle of a pass")
        assert torch.equal(logprobs(policy), now) and policy_state(policy) == before
        assert torch.is_grad_enabled()


def test_training_with_references_is_bit_identical_to_training_without(tmp_path: Path) -> None:
    plain, with_references = tiny(lora=LORA), tiny(lora=LORA)
    checkpoints, _ = train_with_checkpoints(plain, tmp_path / "a")
    checkpoints, _ = train_with_checkpoints(with_references, tmp_path / "b")
    for _, _, context in references({"a": "base", "b": "step:1"}, with_references, checkpoints):
        with context as model:
            logprobs(model)
    train(plain)
    train(with_references)
    assert torch.equal(logprobs(plain), logprobs(with_references))
    # only the trained adapter is saved
    folder = checkpoints.save(9, with_references, adamw(with_references), {})
    fresh = tiny(lora=LORA)
    checkpoints.load(9, fresh, adamw(fresh))
    assert torch.equal(logprobs(fresh), logprobs(plain))
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["adapter_model.safetensors"]


def test_gradient_checkpointing_stays_enabled_with_a_second_adapter(tmp_path: Path) -> None:
    policy = load_model(ModelSettings(name="tiny", lora=LORA, gradient_checkpointing=True))
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    before = policy_state(policy)
    for _, _, context in references({"a": "base", "b": "step:1"}, policy, checkpoints):
        with context as model:
            logprobs(model)
    assert policy.network.training and policy_state(policy) == before


def test_reference_weights_sum_to_one_in_the_order_of_the_settings() -> None:
    policy = tiny(lora=LORA)
    settings = {"b": ReferenceSettings(weight=3), "a": ReferenceSettings(weight=1)}
    assert [(name, weight) for name, weight, _ in load_references(settings, policy)] == [("b", 0.75), ("a", 0.25)]
    assert len(load_references({}, policy)) == 0


# fingerprints


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_fingerprints_depend_on_the_weights(lora: LoraSettings | None, tmp_path: Path) -> None:
    policy = tiny(lora=lora)
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    sources = {"base": "base", "one": "step:1", "two": "step:2", "other": "model:tiny-qwen3"}
    fingerprints = references(sources, policy, checkpoints).fingerprints()
    assert fingerprints["base"] == policy.source.fingerprint and len(set(fingerprints.values())) == 4
    again = tiny(lora=lora)
    assert references(sources, again, checkpoints).fingerprints() == fingerprints


def test_the_checkpoint_of_a_reference_is_never_removed(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    train_with_checkpoints(policy, tmp_path)
    keep_one = Checkpoints(tmp_path, CheckpointSettings(keep_last=1))
    references({"a": "step:1"}, policy, keep_one)
    keep_one.save(7, policy, adamw(policy), {})
    assert keep_one.steps() == [1, 7]


# errors


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_error_for_a_missing_step_lists_the_existing_ones(lora: LoraSettings | None, tmp_path: Path) -> None:
    policy = tiny(lora=lora)
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    with pytest.raises(ModelError, match=r'references\.old\.source = "step:8": .*steps that exist: 0, 1, 2'):
        references({"old": "step:8"}, policy, checkpoints)
    with pytest.raises(ModelError, match="step:N needs a run with checkpoints"):
        references({"old": "step:8"}, policy, None)


def test_the_error_for_a_damaged_step_names_the_file(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    checkpoints, _ = train_with_checkpoints(policy, tmp_path)
    (checkpoints.path(1) / "adapter_model.safetensors").write_bytes(b"")
    for source in ("step:1", f"adapter:{checkpoints.path(1)}"):
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors has 0 bytes"):
            references({"a": source}, policy, checkpoints)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_error_for_an_adapter_of_another_base_names_both(lora: LoraSettings | None, tmp_path: Path) -> None:
    other = tiny("tiny-qwen3", LORA)
    folder = Checkpoints(tmp_path, CheckpointSettings()).save(1, other, adamw(other), {})
    with pytest.raises(ModelError, match=r"an adapter of tiny-qwen3 .* the model is tiny "):
        references({"a": f"adapter:{folder}"}, tiny(lora=lora))
    for file in ("keel.json", "manifest.json"):
        (folder / file).unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/big-model"}))
    with pytest.raises(ModelError, match=r"org/big-model, not tiny"):
        references({"a": f"adapter:{folder}"}, tiny(lora=lora))


def test_a_step_of_another_model_raises(tmp_path: Path) -> None:
    checkpoints, _ = train_with_checkpoints(tiny("tiny-qwen3", LORA), tmp_path, steps=1)
    with pytest.raises(ModelError, match=r"an adapter of tiny-qwen3 .*, the model is an adapter of tiny "):
        references({"a": "step:0"}, tiny(lora=LORA), checkpoints)


def test_a_missing_adapter_or_model_raises(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    with pytest.raises(ModelError, match=r"is not an adapter: it has no adapter_config\.json"):
        references({"a": f"adapter:{tmp_path}"}, policy)
    with pytest.raises(ModelError, match=r'references\.a\.source = "adapter:.*/absent": .*/absent does not exist$'):
        references({"a": f"adapter:{tmp_path / 'absent'}"}, policy)
    with pytest.raises(ModelError, match=r"references\.a\.source.*does not exist"):
        references({"a": f"model:{tmp_path / 'absent'}"}, policy)


def test_a_model_with_another_tokenizer_raises(tmp_path: Path) -> None:
    policy = tiny(lora=LORA)
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.add_tokens(["<extra>"])
    policy.network.base_model.config.save_pretrained(tmp_path)
    load_model(ModelSettings(name="tiny")).network.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"its tokenizer \(261 tokens\) differs from that of tiny \(260 tokens"):
        references({"a": f"model:{tmp_path}"}, policy)
