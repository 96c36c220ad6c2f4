"""Settings of rollouts: sampling and rendering, engines and pools, environments, the schedule."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.common.settings import Settings, setting_error
from keel.config.secrets import secret_in_url, secret_names
from keel.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Sampling(Settings):
    """How tokens are drawn."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Logits are divided by it; the trainer's log-probs use the same. 0: the likeliest token, for evaluation only."""
    max_tokens: Count = 256
    """Tokens of one answer."""
    stop: tuple[str, ...] = ()
    """Texts after which an answer ends; the tokens that hold them are kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids after which an answer ends, beside the model's own end of turn."""
    seed: int | None = None
    """Of a request; equal requests with equal seeds give equal tokens on the same engine."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Evaluation only: sample from the likeliest tokens that together have this probability."""
    top_k: NonNegative = 0
    """Evaluation only: sample from so many of the likeliest tokens; 0: all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Evaluation only: leave out tokens less likely than this share of the likeliest."""

    @property
    def truncates_distribution(self) -> bool:
        """Whether what is sampled from is another distribution than the model's at this temperature."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.temperature == 0

    def check_trainable(self, table: str = "sampling") -> None:
        """Refuse what the trainer cannot replay: its log-probs are of the whole distribution.

        `table`: the dotted name of these settings, for the error.
        """
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise ConfigError(
                    f"{table}.{name} = {getattr(self, name)} cuts the distribution off, and the trainer's log-probs"
                    " are of the whole of it; use it for evaluation only"
                )
        if self.temperature == 0:
            raise ConfigError(f"{table}.temperature = 0 samples nothing; use it for evaluation only")


class RendererSettings(Settings):
    """How messages become tokens."""

    family: str = "auto"
    """A family of the `renderers` library, as "qwen3", for a model it does not know by name; "template": the model's
    own chat template; "auto": the family where the library knows the model, and the template elsewhere."""
    preserve_all_thinking: bool = False
    """Keep the thinking of every earlier turn in the prompt; off: the family's own habit."""
    preserve_thinking_between_tool_calls: bool = False
    """Keep the thinking of earlier turns while the assistant is still answering the same user message."""

    @model_validator(mode="after")
    def _check_thinking_options(self) -> Self:
        if self.preserve_all_thinking and self.preserve_thinking_between_tool_calls:
            raise setting_error(
                "{preserve_thinking_between_tool_calls} cannot act: preserve_all_thinking keeps more",
                preserve_thinking_between_tool_calls=True,
            )
        return self


class EpisodeLimits(Settings):
    """What one episode may use."""

    max_turns: Count = 16
    """Answers of the policy."""
    max_sequence_tokens: Count = 4096
    """Tokens of a training sample, prompt included."""
    on_overlength: Literal["drop", "truncate"] = "drop"
    """A sample that is longer is left out, or cut at the limit; both are counted."""
    timeout: Seconds = 600.0
    """Wall time."""


class EnvironmentSettings(Settings):
    """One environment of a run."""

    name: Annotated[str, Field(min_length=1)]
    """A built-in name, `reasoning_gym:TASK`, `verifiers:TASKSET`, or `module:attribute`."""
    options: dict[str, Any] = {}
    """Given to the environment when it is made."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of the groups, against the other environments of the run."""
    sampling: Sampling | None = None
    """How answers are drawn here; not given: as in the run's own table."""
    limits: EpisodeLimits = EpisodeLimits()

    @model_validator(mode="after")
    def _check_no_secrets(self) -> Self:
        for name in secret_names(self.options):
            shown = name.replace("{", "(").replace("}", ")")  # braces would stand for fields
            raise setting_error(
                f"option {shown} of an environment looks like a secret, and settings are written into the run's folder;"
                " let the environment read it from a file or a variable that an option names"
            )
        return self


class SchedulerSettings(Settings):
    """How groups are sampled and batches cut."""

    groups_per_step: Count = 8
    """Groups of a batch."""
    group_size: Count = 8
    """Rollouts of a group."""
    max_in_flight: Count = 128
    """Rollouts under way at once."""
    max_error_reschedule_attempts: NonNegative | None = None
    """How often the failed or empty rollouts of a group are tried again, counted once a round; not given: for ever."""
    min_group_size: Count | None = None
    """When attempts are used up, train the survivors if at least so many remain; not given: only whole groups."""
    max_off_policy_steps: NonNegative = 2
    """Versions that the oldest token of a group may be behind when its batch is cut; 0: synchronous."""
    on_stale: Literal["drop", "resample"] = "resample"
    """What becomes of a group that is older: its task is dropped, or sampled again."""
    window_batches: NonNegative = 1
    """Batches are cut in order of dispatch, and a group may overtake at most those of so many batches before it."""
    max_empty_steps: Count | None = 10
    """Stop after so many batches in a row with nothing to train on."""
    rollout_timeout: Seconds | None = None
    """Give up a rollout that has not come back after so many seconds, whatever runs it; not given: a minute after
    the longest limits.timeout of the run."""

    @model_validator(mode="after")
    def _check_min_group_size(self) -> Self:
        if self.min_group_size is not None:
            if self.max_error_reschedule_attempts is None:
                raise setting_error(
                    "{min_group_size} cannot act: failed rollouts are tried again for ever",
                    min_group_size=self.min_group_size,
                )
            if self.min_group_size > self.group_size:
                raise setting_error(
                    "{min_group_size} must not be above {group_size}",
                    min_group_size=self.min_group_size,
                    group_size=self.group_size,
                )
        return self


class EngineSettings(Settings):
    """What samples."""

    kind: Literal["local", "process", "vllm", "pool"] = "local"
    """local: in this process; process: a server of ours in a process of its own; vllm: a vLLM server that is started;
    pool: the servers of the table `pool`."""
    max_batch: Count = 64
    """local and process: answers that are decoded together."""
    int8: bool = False
    """local and process: linear layers in int8 while sampling, by torch: no longer quite the policy that is trained.
    Without VNNI instructions it is slower than float32 by the kernels in C."""
    native_kernels: Literal["auto", "off"] = "auto"
    """local and process, in float32 on CPU: auto: those in C where there is a compiler, for which every weight of a
    linear layer is held a second time; torch: torch's own, slower and in half the memory."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights that sample; auto: as the model that is trained. Another one is a mismatch, for the gates to
    see."""
    vllm_python: str = ".venv-vllm/bin/python"
    """vllm: the interpreter of the environment that vLLM is in."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        if self.int8 and self.kind not in ("local", "process"):
            raise setting_error('{int8} cannot act: kind = "' + self.kind + '" samples by itself', int8=self.int8)
        if self.native_kernels != "auto" and self.kind not in ("local", "process"):
            why = 'cannot act: kind = "' + self.kind + '" samples by itself; servers take keel serve --native-kernels'
            raise setting_error("{native_kernels} " + why, native_kernels=self.native_kernels)
        if self.dtype != "auto" and self.kind == "pool":
            raise setting_error(
                "{dtype} cannot act: the servers of a pool were started with their own", dtype=self.dtype
            )
        return self


class PublishSettings(Settings):
    """How new weights reach the engines; see docs/engines.md."""

    every: Count = 1
    """Optimizer steps between two publications; above 1 the samples are deliberately stale."""
    transport: Literal["auto", "adapter", "folder", "broadcast"] = "auto"
    """adapter: the adapter alone, as a folder; folder: all weights, as a folder; broadcast: all weights, by
    torch.distributed, to servers of ours; auto: adapter with model.lora, in one process a copy, else folder."""
    in_flight: Literal["continue", "drain"] = "continue"
    """What becomes of answers under way: their later tokens are of the new version; or they end first while new ones
    wait, and each answer is of one version."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """adapter and folder: where folders are written, on a path that every engine sees; not given: in the run's own."""
    bind_address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """broadcast: this machine's address for the servers. Weights travel there without a key."""

    @model_validator(mode="after")
    def _check_options_have_effect(self) -> Self:
        if self.path is not None and self.transport == "broadcast":
            raise setting_error('{path} cannot act: transport = "broadcast" writes nothing', path=self.path)
        if self.bind_address != "127.0.0.1" and self.transport != "broadcast":
            raise setting_error(
                '{bind_address} cannot act: it belongs to transport = "broadcast"', bind_address=self.bind_address
            )
        return self


class PoolSettings(Settings):
    """Several engine servers as one."""

    urls: list[str] = []
    """static: these members."""
    dns: str | None = None
    """elastic: `host:port`, of which every address is a member."""
    file: str | None = None
    """elastic: a file with one URL a line, watched."""
    discovery_url: str | None = None
    """elastic: an address that answers with a JSON list of URLs."""
    poll_interval: Seconds = 10.0
    """Seconds between two looks at members and their health."""
    health_timeout: Seconds = 10.0
    """A member that takes longer to say how it is doing counts as unhealthy."""
    load_timeout: Seconds = 600.0
    """A member that takes longer to load weights counts as unhealthy."""
    ready_timeout: Seconds = 300.0
    """How long a request waits for a member that is ready before it is an error."""
    max_attempts: Count = 3
    """How many times a request is handed out when the members that had it fail."""
    api_key_file: str | None = None
    """A file that holds the key that members ask for; the key itself may stand in no settings."""
    backend: Literal["keel", "vllm"] = "keel"
    """What the members are: they load weights in different ways."""

    @model_validator(mode="after")
    def _check_single_source(self) -> Self:
        given = [name for name in ("urls", "dns", "file", "discovery_url") if getattr(self, name)]
        if len(given) != 1:
            raise setting_error(
                f"a pool has one source of members; of {{urls}}, dns, file and discovery_url {', '.join(given) or 'none'} is"
                " given",
                urls=self.urls,
            )
        for address in (*self.urls, self.discovery_url or ""):
            if secret := secret_in_url(address):
                raise setting_error(
                    f"an address of the pool has {secret} in it, which would be written down; leave it out"
                )
        return self
