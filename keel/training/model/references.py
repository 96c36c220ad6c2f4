"""Load frozen references for KL terms: the base model, a checkpoint of this run, an adapter or another model.

Every reference is resolved, checked against the policy, fingerprinted and loaded before training starts, so that a
wrong path fails immediately. With LoRA the base is the policy with its adapter disabled, and a step or an adapter is a
second, frozen adapter in the same network, without a copy of the weights. With full training the base and all adapters
share one frozen copy; a step or another model is a separate copy. No parameter of a reference requires a gradient, and
leaving a reference's context, also by an exception, restores the policy exactly.

Log-probs of references are computed by the same forward pass as the policy's, not in this module.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.common import atomic_files
from keel.config.trainer import LoraSettings, ModelSettings, ReferenceSettings
from keel.errors import ModelError
from keel.training.model.checkpoint import Checkpoints
from keel.training.model.model import Model, load_model
from keel.training.model.weights_io import ADAPTER_CONFIG_FILE, ADAPTER_FILE, IDENTITY_FILE, check_identity, dtype_name

# keys that do not affect the function the adapter computes
_IGNORED_CONFIG_KEYS = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")


@dataclass(frozen=True)
class Reference:
    """One frozen model to compare the policy with."""

    name: str
    weight: float
    """Normalised weight: the weights of all references sum to one."""
    fingerprint: str
    """Digest of its weights."""
    model: Model
    """The model to run inside `active`: the policy itself if the reference is its base or another adapter."""
    adapter_context: Callable[[], AbstractContextManager[None]]

    @contextmanager
    def active(self) -> Iterator[Model]:
        """Yield the model that computes this reference's log-probs, without gradients, until the block ends."""
        with torch.no_grad(), self.adapter_context():
            yield self.model


class References:
    """The references of a run, in the order of the settings."""

    def __init__(self, references: list[Reference]) -> None:
        self._references = references

    def __len__(self) -> int:
        return len(self._references)

    def __iter__(self) -> Iterator[tuple[str, float, AbstractContextManager[Model]]]:
        return self.each()

    def each(self) -> Iterator[tuple[str, float, AbstractContextManager[Model]]]:
        """Yield name, weight and context of each reference; the context yields the model to run."""
        for reference in self._references:
            yield reference.name, reference.weight, reference.active()

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints by name; they are recorded, and a resumed run compares them."""
        return {reference.name: reference.fingerprint for reference in self._references}


def load_references(
    settings: Mapping[str, ReferenceSettings], model: Model, checkpoints: Checkpoints | None = None, seed: int = 0
) -> References:
    """Resolve, check, fingerprint and load every reference. `seed` selects the weights of built-in tiny models."""
    total = sum(reference.weight for reference in settings.values())
    needs_adapters = any(reference.source.startswith("adapter:") for reference in settings.values())
    loader = _ReferenceLoader(model, checkpoints, seed, needs_adapters)
    references = []
    for name, reference in settings.items():
        try:
            fingerprint, reference_model, adapter_context = loader.load(reference.source)
        except ModelError as error:
            raise ModelError(f'references.{name}.source = "{reference.source}": {error}') from error
        references.append(Reference(name, reference.weight / total, fingerprint, reference_model, adapter_context))
    return References(references)


LoadedReference = tuple[str, Model, Callable[[], AbstractContextManager[None]]]
"""Fingerprint, the model to run, and the context manager that selects its adapter."""


class _ReferenceLoader:
    """Load each source once, even if several references name it."""

    def __init__(self, policy: Model, checkpoints: Checkpoints | None, seed: int, needs_adapters: bool) -> None:
        self.policy = policy
        self.checkpoints = checkpoints
        self.seed = seed
        self.needs_adapters = needs_adapters
        self.loaded: dict[str, LoadedReference] = {}
        self.frozen_base: Model | None = None

    def load(self, source: str) -> LoadedReference:
        kind, _, value = source.partition(":")
        if kind == "adapter":
            value = str(Path(value).expanduser().resolve())
        key = f"{kind}:{value}"
        if key not in self.loaded:
            if kind == "base":
                self.loaded[key] = self._load_base()
            elif kind == "step":
                self.loaded[key] = self._load_step(int(value))
            elif kind == "adapter":
                self.loaded[key] = self._load_adapter(Path(value))
            else:
                self.loaded[key] = self._load_other_model(value)
        return self.loaded[key]

    def _load_base(self) -> LoadedReference:
        host = self._get_base_model()
        switch = host.without_adapter if host.peft is not None else nullcontext
        return self.policy.source.fingerprint, host, switch

    def _load_step(self, step: int) -> LoadedReference:
        if self.checkpoints is None:
            raise ModelError("step:N needs a run with checkpoints, and none was given")
        self.checkpoints.verify(step)
        folder = self.checkpoints.path(step)
        check_identity(folder, self.policy)
        # a resumed run needs this checkpoint again, so it must not be removed to free space
        self.checkpoints.pin(step)
        if self.policy.peft is not None:
            return self.load(f"adapter:{folder}")
        copy = self._load_frozen(str(folder))
        return copy.source.fingerprint, copy, nullcontext

    def _load_adapter(self, folder: Path) -> LoadedReference:
        check_adapter_base(folder, self.policy)
        fingerprint = _adapter_fingerprint(folder, self.policy.source.fingerprint)
        host = self._get_base_model()
        assert host.peft is not None
        names = (f"reference_{index}" for index in itertools.count())
        name = next(name for name in names if name not in host.peft.peft_config)
        training = host.network.training
        host.add_adapter(name, folder)
        # peft puts the network in eval mode, which disables gradient checkpointing
        host.network.train(training)
        return fingerprint, host, lambda: host.with_adapter(name)

    def _load_other_model(self, name: str) -> LoadedReference:
        copy = self._load_frozen(name)
        ours, theirs = self.policy.tokenizer.get_vocab(), copy.tokenizer.get_vocab()
        if ours != theirs:
            differing = sum(theirs.get(token) != token_id for token, token_id in ours.items())
            raise ModelError(
                f"its tokenizer ({len(theirs):,} tokens) differs from that of {self.policy.source.name} "
                f"({len(ours):,} tokens, of which {differing:,} have another id or none), so log-probs cannot be"
                " compared"
            )
        if copy.head.weight.shape[0] < max(ours.values()) + 1:
            raise ModelError(f"it has {copy.head.weight.shape[0]:,} logits for {len(ours):,} tokens")
        return copy.source.fingerprint, copy, nullcontext

    def _get_base_model(self) -> Model:
        """Return the model with the base weights: the policy with LoRA, otherwise one frozen copy, loaded lazily."""
        if self.policy.peft is not None:
            return self.policy
        if self.frozen_base is None:
            # peft needs a first adapter before others can be added: rank 1, never active, never trained
            lora = LoraSettings(rank=1) if self.needs_adapters else None
            copy = self._load_frozen(str(self.policy.source.folder), lora)
            if copy.source.fingerprint != self.policy.source.fingerprint:
                raise ModelError(f"the weights in {self.policy.source.folder} changed since the policy was loaded")
            copy.source = self.policy.source
            self.frozen_base = copy
        return self.frozen_base

    def _load_frozen(self, name: str, lora: LoraSettings | None = None) -> Model:
        settings = ModelSettings.model_validate(
            {
                "name": name,
                "lora": lora,
                "dtype": dtype_name(self.policy.dtype),
                "device": self.policy.device.type if self.policy.world is not None else str(self.policy.device),
            }
        )
        copy = load_model(settings, self.seed, world=self.policy.world)
        copy.network.requires_grad_(False)
        return copy


def check_adapter_base(folder: Path, model: Model) -> None:
    """Raise if an adapter is missing, corrupt, or was trained on another base; name both bases."""
    if not folder.is_dir():
        raise ModelError(f"{folder} {'is a file, not a folder' if folder.exists() else 'does not exist'}")
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        raise ModelError(f"{folder} is not an adapter: it has no {ADAPTER_CONFIG_FILE}")
    if (folder / atomic_files.MANIFEST_FILE).is_file():
        atomic_files.verify_manifest(folder)
    if (folder / IDENTITY_FILE).is_file():
        identity = atomic_files.read_json(folder / IDENTITY_FILE)
        theirs, ours = str(identity.get("base_fingerprint")), model.source.fingerprint
        if theirs != ours:
            raise ModelError(
                f"{folder} is an adapter of {identity.get('base')} (fingerprint {theirs[:12]}), the model is"
                f" {model.source.name} (fingerprint {ours[:12]})"
            )


def _adapter_fingerprint(folder: Path, base: str) -> str:
    config = atomic_files.read_json(folder / ADAPTER_CONFIG_FILE)
    kept = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    try:
        weights_hash = atomic_files.hash_file(folder / ADAPTER_FILE)
    except OSError as error:
        raise ModelError(f"{folder / ADAPTER_FILE} cannot be read: {error.strerror}") from error
    text = json.dumps([base, kept, weights_hash], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
