"""Settings of inference: the engine, how new weights are published to it, and the servers of a pool.

A setting that would have no effect in its table is an error. Rules between tables are in `keel.config.run`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.secrets import secret_in_url

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class EngineSettings(Settings):
    """The engine that samples completions."""

    kind: Literal["local", "process", "vllm", "pool"] = "local"
    """Where completions are sampled. local: in the training process; process: in a Keel server that the run starts as a
    separate process; vllm: in a vLLM server that the run starts; pool: in the servers listed in the table `pool`."""
    max_batch: Count = 64
    """Maximum number of completions decoded together. Used by local and process."""
    int8: bool = False
    """Run linear layers in int8 while sampling, with torch's kernels. Used by local and process. The sampler then
    differs slightly from the policy. On CPUs without VNNI instructions this is slower than float32 with the native
    kernels."""
    native_kernels: Literal["auto", "off"] = "auto"
    """Kernels for float32 sampling on CPU. Used by local and process. auto: Keel's native kernels if a C compiler is
    available, which keep a second copy of every linear layer's weights; off: torch's kernels, slower and with half the
    memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights that sample. auto: the type of the trained model. Any other type creates a mismatch between
    sampler and policy, which the gates see."""
    vllm_python: str = ".venv-vllm/bin/python"
    """Python interpreter of the environment in which vLLM is installed. Used by vllm."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        sampled_by_keel = self.kind in ("local", "process")
        has_effect = {"int8": sampled_by_keel, "native_kernels": sampled_by_keel, "dtype": self.kind != "pool"}
        for name, effective in has_effect.items():
            if getattr(self, name) != type(self).model_fields[name].default and not effective:
                flag = name.replace("_", "-")
                hint = f"; set it on the servers (keel serve --{flag})" if self.kind == "pool" else ""
                raise setting_error(
                    f"{{{name}}} has no effect with {{kind}}{hint}", {name: getattr(self, name)}, kind=self.kind
                )
        return self


class PublishSettings(Settings):
    """How new weights reach the engines; see docs/engines.md."""

    every: Count = 1
    """Optimizer steps between two publications. Above 1, samples are deliberately stale."""
    transport: Literal["auto", "adapter", "folder", "broadcast"] = "auto"
    """How weights are transferred. adapter: only the LoRA adapter, as a folder; folder: all weights, as a folder;
    broadcast: all weights through torch.distributed, to Keel servers; auto: adapter if model.lora is set, an in-memory
    copy if engine.kind = "local", and folder otherwise."""
    in_flight: Literal["continue", "drain"] = "continue"
    """What happens to completions in flight when new weights arrive. continue: they are not interrupted, and their
    remaining tokens are sampled by the new version; drain: they finish first while new requests wait, so that each
    completion has a single version."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder that adapter and folder write to. Every engine must be able to read it. Defaults to a folder inside the
    run folder."""
    bind_address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of this machine on which broadcast accepts connections from the servers. The connection is not
    authenticated."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        if self.path is not None and self.transport == "broadcast":
            raise setting_error(
                '{path} has no effect with transport = "broadcast", which writes no files', path=self.path
            )
        if self.bind_address != "127.0.0.1" and self.transport != "broadcast":
            raise setting_error(
                '{bind_address} has no effect: it belongs to transport = "broadcast"', bind_address=self.bind_address
            )
        return self


class PoolSettings(Settings):
    """Several engine servers used as one engine. Exactly one of urls, dns, file and discovery_url lists the servers."""

    urls: list[str] = []
    """A fixed list of server URLs."""
    dns: str | None = None
    """`host:port` to resolve; every address it resolves to is a server. Servers may join and leave during a run."""
    file: str | None = None
    """A file with one server URL per line. It is read again when it changes."""
    discovery_url: str | None = None
    """A URL that returns a JSON list of server URLs. Servers may join and leave during a run."""
    poll_interval: Seconds = 10.0
    """Seconds between two checks of the server list and of the health of each server."""
    health_timeout: Seconds = 10.0
    """Seconds a server may take to respond to a health check before it counts as unhealthy."""
    load_timeout: Seconds = 600.0
    """Seconds a server may take to load weights before it counts as unhealthy."""
    ready_timeout: Seconds = 300.0
    """Seconds a request waits for a ready server before it fails."""
    max_attempts: Count = 3
    """Maximum number of servers a request is sent to when servers fail while they process it."""
    api_key_file: str | None = None
    """File that holds the API key of the servers. The key itself is not allowed in settings."""
    backend: Literal["keel", "vllm"] = "keel"
    """Software of the servers, which determines how they load weights."""

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        sources = [name for name in ("urls", "dns", "file", "discovery_url") if getattr(self, name)]
        if len(sources) != 1:
            raise setting_error(
                "a pool needs exactly one of {urls}, dns, file and discovery_url; set: "
                + (", ".join(sources) or "none"),
                urls=self.urls,
            )
        for address in (*self.urls, self.discovery_url or ""):
            if secret := secret_in_url(address):
                raise setting_error(
                    f"a URL of the pool contains {secret}, and settings are written into the run's folder; remove it"
                )
        return self
