"""The plan of a launch, its errors, and how the supervisor handles failures, on a scripted cluster and clock."""

import io
import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from keel.cli import build_parser, join_overrides, main
from keel.cli.display.launch_display import LogFollower, status_table
from keel.config.launch import Resources
from keel.errors import ConfigError
from keel.tools.launch.node_agent import Command, Probe
from keel.tools.launch.plan import Component, LaunchPlan, check_overrides, make_plan
from keel.tools.launch.process_guard import RUN_FAILED_EXIT
from keel.tools.launch.ray_cluster import check_resources
from keel.tools.launch.supervisor import ComponentFailed, ComponentState, NodeLost, Supervisor
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "cluster"
RECIPE = """
[model]
name = "tiny"
[environments.larger_number]
"""


def make_test_plan(folder: Path, *overrides: str, recipe: str = RECIPE) -> LaunchPlan:
    file = folder / "recipe.toml"
    file.write_text(recipe)
    plan = make_plan(file, overrides, folder / "run")
    plan.launch_folder.mkdir(parents=True, exist_ok=True)
    return plan


# the plan


def test_the_run_samples_from_the_launched_servers_with_a_key_from_a_file(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--launch.engines=2", "--pool.poll_interval=0.5")
    assert plan.settings.engine.kind == "pool" and plan.settings.pool is not None
    assert plan.settings.pool.file == str(tmp_path / "run/launch/engines.txt")
    assert plan.settings.pool.api_key_file == str(tmp_path / "run/launch/key")
    assert plan.settings.pool.poll_interval == 0.5
    command = plan.engine_command("10.0.0.5", 8123)
    assert command.argv[command.argv.index("--api-key-file") + 1] == str(tmp_path / "run/launch/key")
    assert command.argv[command.argv.index("--host") + 1] == "10.0.0.5"
    assert command.health_url == "http://10.0.0.5:8123/health"


def test_engine_settings_become_options_of_the_servers(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--engine.int8=true", "--engine.dtype=bfloat16", "--engine.native_kernels=off")
    argv = plan.engine_command("127.0.0.1", 1).argv
    assert "--int8" in argv and argv[argv.index("--dtype") + 1] == "bfloat16"
    assert argv[argv.index("--native-kernels") + 1] == "off"
    again = make_plan(_write_config(plan), [], plan.run_folder)
    assert again.engine_command("127.0.0.1", 1) == plan.engine_command("127.0.0.1", 1), "also when the run is resumed"


def test_a_vllm_server_gets_its_key_from_a_file_through_its_environment(tmp_path: Path) -> None:
    plan = make_test_plan(
        tmp_path, "--engine.kind=vllm", "--model.lora.rank=8", '--launch.engine.extra_args=["--seed", "1"]'
    )
    command = plan.engine_command("127.0.0.1", 8000)
    assert plan.settings.pool is not None and plan.settings.pool.backend == "vllm"
    assert command.secret_env == ("VLLM_API_KEY", str(plan.key_file))
    assert command.argv[command.argv.index("--max-lora-rank") + 1] == "8"
    assert command.argv[-2:] == ("--seed", "1")
    assert command.python is not None and command.python.endswith(".venv-vllm/bin/python")


def test_without_engines_the_run_samples_as_its_recipe_sets(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--launch.engines=0")
    assert plan.settings.engine.kind == "local" and plan.engines == []


def test_rank_0_also_gets_the_resources_of_the_orchestrator(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--trainer.ranks=2", "--launch.trainer.cpus=2", "--launch.orchestrator.memory_gb=3")
    first, second = plan.trainers
    assert first.bundle == {"CPU": 3.0, "memory": 3e9}
    assert second.bundle == {"CPU": 2.0}
    environment = plan.trainer_command(1, "10.0.0.1", 29500, attempt=2).environment
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("1", "2", "0")
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--engine.kind=pool", '--pool.urls=["http://10.0.0.1:1"]'], "set launch.engines = 0, or remove pool.urls"),
        (["--engine.kind=pool", '--pool.discovery_url="http://10.0.0.1:1"'], "or remove pool.discovery_url"),
        (["--launch.engine.gpus=1.5"], "launch.engine.gpus = 1.5 must be a whole number"),
        (["--launch.trainer.gpus=1", "--launch.orchestrator.gpus=0.5"], "are for one process, rank 0"),
        (["--launch.engnes=2"], "launch.engnes is not a setting; did you mean engines?"),
        (["--launch.engine.extra_args=['--api-key', 'x']"], "launch.engine.extra_args must not contain --api-key"),
        (["--engine.kind=vllm", "--launch.engine.int8=true"], "launch.engine.int8 = true has no effect"),
        (
            ["--engine.kind=vllm", "--launch.engine.native_kernels=off"],
            'launch.engine.native_kernels = "off" has no effect with vLLM servers',
        ),
    ],
)
def test_invalid_settings_are_errors_before_anything_starts(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as rejected:
        make_test_plan(tmp_path, *overrides)
    assert message in str(rejected.value)
    assert not (tmp_path / "run").exists()


def test_the_backend_of_a_pool_is_the_backend_of_the_launched_servers(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--engine.kind=pool", "--pool.backend=vllm")
    assert plan.backend == "vllm"


def test_a_resumed_run_may_change_its_launch_settings_only() -> None:
    check_overrides(["--launch.engines=4", "--launch.engine.gpus=1"], allow_changes=False)
    check_overrides(["--steps=9"], allow_changes=True)
    with pytest.raises(ConfigError, match="--steps would change the settings"):
        check_overrides(["--launch.engines=4", "--steps=9"], allow_changes=False)


def test_an_unreachable_cluster_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    argv = ["launch", str(tmp_path / "recipe.toml"), "--run", str(tmp_path / "run")]
    assert main([*argv, "--cluster", "127.0.0.1:1"]) == 2
    assert "--cluster 127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert main([*argv, "--cluster", "ray://127.0.0.1:10001"]) == 2
    assert "is not the address of a Ray head such as 10.0.0.1:6379" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_ray_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["launch", str(tmp_path / "recipe.toml")]) == 2
    assert "keel launch needs Ray: pip install 'keel-rl[ray]'" in capsys.readouterr().err


def test_the_cluster_examples_use_valid_arguments(tmp_path: Path) -> None:
    job, policy = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token" and policy["kind"] == "NetworkPolicy"
    kubernetes = shlex.split(shlex.split(job["spec"]["entrypoint"])[2].partition("else exec ")[2].rstrip("; fi"))
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=False).returncode == 0
    line = re.search(r"^keel launch .*(?= &$)", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE)
    assert line is not None
    slurm = shlex.split(line[0].replace('"${args[@]}"', "recipe.toml --run one").replace("$SLURM_NNODES", "3"))
    for argv in (kubernetes, slurm):
        args, overrides = build_parser().parse_known_args(join_overrides(argv[1:]))
        engines = [] if args.engines is None else [f"--launch.engines={args.engines}"]
        plan = make_test_plan(tmp_path, *overrides, *engines)
        assert plan.launch.nodes == {"auto": 5}.get(args.cluster, 3)
        assert args.folder is not None and args.recipe is not None


# resources


def component(name: str, **amounts: float) -> Component:
    role, index = name.split("-")
    return Component(role, int(index), Resources(**amounts), 3)  # type: ignore[arg-type]


NODES = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 4.0, "GPU": 2.0, "memory": 8e9}]


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([component("engine-0", cpus=5)], "engine-0 needs 5 CPUs, and no node of the cluster has that"),
        ([component("engine-0", gpus=3)], "engine-0 needs 1 CPUs and 3 GPUs, and no node"),
        ([component("trainer-0", memory_gb=9)], "launch.trainer and launch.orchestrator"),
        (
            [component(f"engine-{i}", cpus=3) for i in range(3)],
            "3 components need 9 CPUs in total, and the cluster has 8 CPUs",
        ),
    ],
)
def test_insufficient_resources_are_an_error_with_both_numbers(components: list[Component], message: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        check_resources(components, NODES)
    assert message in str(rejected.value)


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 5.0]), min_size=1, max_size=6))
def test_resources_are_rejected_only_if_they_exceed_a_node_or_the_cluster(cpus: list[float]) -> None:
    try:
        check_resources([component(f"engine-{i}", cpus=amount) for i, amount in enumerate(cpus)], NODES)
    except ConfigError:
        assert max(cpus) > 4.0 or sum(cpus) > 8.0
    else:
        assert max(cpus) <= 4.0 and sum(cpus) <= 8.0


# failures and restarts


@dataclass
class ScriptedCluster:
    """A cluster, a watcher and a clock in one; `script` maps a time to what happens then."""

    script: dict[float, Callable[["ScriptedCluster"], None]] = field(default_factory=dict)
    time: float = 0.0
    probes: dict[str, Probe] = field(default_factory=dict)
    started: list[tuple[float, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    exits_on_terminate: bool = True

    def allocate_address(self, name: str) -> tuple[str, int]:
        if name in self.lost:
            raise NodeLost("could not be placed")
        return "127.0.0.1", 1000 + len(self.started)

    def start(self, name: str, command: Command) -> None:
        self.started.append((round(self.time, 3), name))
        self.probes[name] = Probe()

    def probe_all(self, names: Iterable[str]) -> dict[str, Probe]:
        return {name: self.probes[name] for name in names}

    def terminate(self, names: Iterable[str]) -> None:
        for name in names:
            self.stopped.append(f"terminate {name}")
            if self.exits_on_terminate and name in self.probes:
                self.probes[name] = Probe(0, healthy=False)

    def kill(self, names: Iterable[str]) -> None:
        for name in names:
            self.stopped.append(f"kill {name}")
            if name in self.probes and self.probes[name].exit_code is None:
                self.probes[name] = Probe(137, healthy=False)

    def on_event(self, text: str) -> None:
        self.events.append(text)

    def on_status(self, states: list[ComponentState]) -> None:
        pass

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for at in sorted(at for at in self.script if at <= self.time):
            self.script.pop(at)(self)
        assert self.time < 10_000, "the supervisor waits indefinitely"

    def die(self, name: str, code: int = 137) -> None:
        self.probes[name] = Probe(code, healthy=False)

    def starts(self, name: str) -> list[float]:
        return [at for at, started in self.started if started == name]


def supervise(plan: LaunchPlan, cluster: ScriptedCluster) -> Supervisor:
    return Supervisor(plan, cluster, cluster, cluster.clock, cluster.sleep)


def finish(cluster: ScriptedCluster) -> None:
    cluster.die("trainer-0", 0)


def test_the_trainer_starts_when_an_engine_is_healthy_and_the_launch_ends_with_it(tmp_path: Path) -> None:
    plan, cluster = make_test_plan(tmp_path, "--launch.engines=2"), ScriptedCluster()

    def make_unhealthy(cluster: ScriptedCluster) -> None:
        cluster.probes |= {name: Probe(healthy=False) for name in ("engine-0", "engine-1")}

    def make_healthy(cluster: ScriptedCluster) -> None:
        cluster.probes["engine-1"] = Probe()
        cluster.script[8.0] = lambda cluster: engine_lists.append(plan.engines_file.read_text())

    engine_lists: list[str] = []
    supervisor = supervise(plan, cluster)
    start = cluster.start
    cluster.start = lambda name, command: (start(name, command), make_unhealthy(cluster))  # type: ignore[assignment,misc]
    cluster.script = {5.0: make_healthy, 20.0: finish}
    assert supervisor.run() == "finished"
    assert cluster.starts("trainer-0") == [5.0]
    assert engine_lists == [f"{supervisor.engines[1].url}\n"], "only the healthy engine is listed"
    assert cluster.stopped.index("kill trainer-0") < cluster.stopped.index("terminate engine-0")
    assert not any(probe.exit_code is None for probe in cluster.probes.values()), "no component is left running"


def test_a_run_in_which_every_rollout_failed_is_not_restarted(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--launch.trainer.restarts=3")
    plan.log_path("trainer-0").write_text("keel: no optimizer step was taken: 16 rollouts failed\n")
    cluster = ScriptedCluster(script={30.0: lambda cluster: cluster.die("trainer-0", RUN_FAILED_EXIT)})
    with pytest.raises(ComponentFailed, match=r"every rollout failed; it is not restarted(?s:.*)16 rollouts failed"):
        supervise(plan, cluster).run()
    assert len(cluster.starts("trainer-0")) == 1
    assert not any(probe.exit_code is None for probe in cluster.probes.values()), "no component is left running"


def test_a_crashing_engine_is_restarted_with_backoff_until_its_restarts_are_used_up(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--launch.engine.restarts=3", "--launch.backoff=4")
    plan.log_path("engine-0").write_text("loading\nout of memory\n")
    cluster = ScriptedCluster(script={})
    start = cluster.start

    def start_and_die(name: str, command: Command) -> None:
        start(name, command)
        if name == "engine-0":
            cluster.die(name, 1)

    cluster.start = start_and_die  # type: ignore[method-assign]
    with pytest.raises(ComponentFailed) as failed:
        supervise(plan, cluster).run()
    starts = cluster.starts("engine-0")
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == [4.0, 8.5, 16.5]
    assert "engine-0 ended with exit code 1, and all launch.engine.restarts = 3 are used up" in str(failed.value)
    assert "out of memory" in str(failed.value), "the end of its log is shown"


def test_when_a_launch_fails_the_trainer_finishes_its_step_first(tmp_path: Path) -> None:
    plan, cluster = (
        make_test_plan(tmp_path, "--launch.engine.restarts=0"),
        ScriptedCluster(script={3.0: lambda w: w.die("engine-0")}),
    )
    with pytest.raises(ComponentFailed, match="engine-0 was killed by SIGKILL"):
        supervise(plan, cluster).run()
    assert cluster.stopped[0] == "terminate trainer-0"


def test_if_one_rank_is_lost_all_ranks_are_restarted(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--trainer.ranks=3", "--launch.engines=0")

    def lose(cluster: ScriptedCluster) -> None:
        cluster.die("trainer-2", 137)
        cluster.die("trainer-0", 1)  # exited because rank 2 was lost

    cluster = ScriptedCluster(script={5.0: lose, 30.0: finish})
    supervisor = supervise(plan, cluster)
    assert supervisor.run() == "finished"
    assert [len(cluster.starts(f"trainer-{rank}")) for rank in range(3)] == [2, 2, 2]
    assert any("trainer-2 was killed by SIGKILL" in text for text in cluster.events), (
        "the rank that was killed is named"
    )
    assert supervisor.ranks[0].restarts == 1


def test_a_lost_node_is_handled_like_a_crash(tmp_path: Path) -> None:
    plan, cluster = make_test_plan(tmp_path, "--launch.backoff=1"), ScriptedCluster()

    def lose(cluster: ScriptedCluster) -> None:
        cluster.probes["engine-0"] = Probe(lost_reason="was lost with its node")
        cluster.lost.add("engine-0")

    cluster.script = {3.0: lose, 5.0: lambda w: w.lost.clear(), 30.0: finish}
    supervisor = supervise(plan, cluster)
    assert supervisor.run() == "finished"
    assert len(cluster.starts("engine-0")) == 2
    assert supervisor.engines[0].restarts == 2, "a start that cannot be placed counts too"


def test_an_engine_that_does_not_answer_is_killed_and_restarted(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--launch.health_timeout=20")

    def hang(cluster: ScriptedCluster) -> None:
        cluster.probes["engine-0"] = Probe(healthy=False)

    cluster = ScriptedCluster(script={5.0: hang, 60.0: finish})
    assert supervise(plan, cluster).run() == "finished"
    assert any("engine-0 did not answer for launch.health_timeout = 20 s; restart 1" in text for text in cluster.events)


def test_the_restart_count_is_reset_after_a_long_time_up(tmp_path: Path) -> None:
    plan = make_test_plan(tmp_path, "--launch.engine.restarts=1", "--launch.restart_reset_after=100")
    deaths = {float(at): (lambda w: w.die("engine-0")) for at in (10, 130, 250, 370)}
    cluster = ScriptedCluster(script={**deaths, 500.0: finish})
    assert supervise(plan, cluster).run() == "finished"
    assert len(cluster.starts("engine-0")) == 5


def test_stop_lets_the_trainer_finish_before_the_engines_are_stopped(tmp_path: Path) -> None:
    plan, cluster = make_test_plan(tmp_path), ScriptedCluster()
    supervisor = supervise(plan, cluster)
    cluster.script = {5.0: lambda w: supervisor.stop()}
    assert supervisor.run() == "stopped"
    assert cluster.stopped[0] == "terminate trainer-0" and "terminate engine-0" in cluster.stopped


def test_kill_waits_for_no_component(tmp_path: Path) -> None:
    plan, cluster = make_test_plan(tmp_path), ScriptedCluster(exits_on_terminate=False)
    supervisor = supervise(plan, cluster)
    cluster.script = {5.0: lambda w: supervisor.stop(), 9.0: lambda w: supervisor.kill()}
    assert supervisor.run() == "killed"
    assert cluster.time < 11.0
    assert not any(probe.exit_code is None for probe in cluster.probes.values())


def test_a_trainer_that_fails_while_stopping_is_not_restarted(tmp_path: Path) -> None:
    plan, cluster = make_test_plan(tmp_path), ScriptedCluster(exits_on_terminate=False)
    supervisor = supervise(plan, cluster)
    cluster.script = {5.0: lambda w: supervisor.stop(), 7.0: lambda w: w.die("trainer-0", 1)}
    assert supervisor.run() == "stopped"
    assert len(cluster.starts("trainer-0")) == 1


@given(st.lists(st.tuples(st.floats(1, 200), st.sampled_from(["engine-0", "engine-1", "trainer-0"])), max_size=12))
def test_every_launch_ends_and_leaves_no_process_whatever_crashes(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[float, str]]
) -> None:
    plan = make_test_plan(tmp_path_factory.mktemp("any"), "--launch.engines=2", "--launch.backoff=5")

    def crash(name: str) -> Callable[[ScriptedCluster], None]:
        return lambda w: w.die(name) if name in w.probes and w.probes[name].exit_code is None else None

    cluster = ScriptedCluster(script={at: crash(name) for at, name in deaths})
    cluster.script[900.0] = finish
    counts = {name: sum(dead == name for _, dead in deaths) for name in ("engine-0", "engine-1", "trainer-0")}
    try:
        assert supervise(plan, cluster).run() == "finished"
    except ComponentFailed:
        assert max(counts.values()) > 3
    assert not any(probe.exit_code is None for probe in cluster.probes.values())
    assert all(len(cluster.starts(name)) <= 4 for name in counts)


def _write_config(plan: LaunchPlan) -> Path:
    from keel.config.toml_writer import toml_lines

    file = plan.run_folder / "config.toml"
    file.write_text("".join(f"{line}{comment}\n" for line, comment in toml_lines(plan.loaded)))
    return file


# display


def test_a_log_is_followed_line_by_line_and_control_characters_are_escaped(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("of an earlier launch\n")
    follower = LogFollower(log)
    with log.open("a") as file:
        file.write("--- 2026-01-01 00:00:00 on node\nstep 1/2\nhalf")
        file.flush()
        assert follower.read_new_lines() == ["step 1/2"]
        file.write(" a line \x1b[2J\nstopped after step 1; resume with: keel train --resume x\n")
        file.flush()
    assert follower.read_new_lines() == ["half a line \\x1b[2J"], "the resume hint of keel train is hidden"


def test_the_table_shows_the_node_of_a_component_and_why_it_failed() -> None:
    up = ComponentState(component("engine-0"), "up", status_since=1.0, url="http://127.0.0.1:8000")
    down = ComponentState(
        component("trainer-0"), "down", status_since=60.0, restarts=2, last_error="was killed by SIGKILL"
    )
    screen = Console(width=100, file=io.StringIO())
    screen.print(status_table([up, down], lambda name: f"node-of-{name}", clock=lambda: 61.0))
    rows = [line.split() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert rows[1] == ["engine-0", "node-of-engine-0", "up", "1m00s", "http://127.0.0.1:8000"]
    assert rows[2][:5] == ["trainer-0", "node-of-trainer-0", "down", "1s", "2"]
    assert " ".join(rows[2][5:]) == "was killed by SIGKILL"
