"""What a launch decides: its plan, what it refuses, what it does when parts die; on a scripted cluster and clock."""

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
from keel.tools.launch.ray_cluster import check_resources
from keel.tools.launch.supervisor import ComponentFailed, ComponentState, NodeLost, Supervisor
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "cluster"
RECIPE = """
[model]
name = "tiny"
[environments.larger_number]
"""


def plan_of(folder: Path, *overrides: str, recipe: str = RECIPE) -> LaunchPlan:
    file = folder / "recipe.toml"
    file.write_text(recipe)
    made = make_plan(file, overrides, folder / "run")
    made.launch_folder.mkdir(parents=True, exist_ok=True)
    return made


# the plan


def test_the_run_samples_from_the_servers_of_the_launch_behind_a_key_in_a_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--launch.engines=2", "--pool.poll_interval=0.5")
    assert plan.settings.engine.kind == "pool" and plan.settings.pool is not None
    assert plan.settings.pool.file == str(tmp_path / "run/launch/engines.txt")
    assert plan.settings.pool.api_key_file == str(tmp_path / "run/launch/key")
    assert plan.settings.pool.poll_interval == 0.5
    command = plan.engine_command("10.0.0.5", 8123)
    assert command.argv[command.argv.index("--api-key-file") + 1] == str(tmp_path / "run/launch/key")
    assert command.argv[command.argv.index("--host") + 1] == "10.0.0.5"
    assert command.health_url == "http://10.0.0.5:8123/health"


def test_how_the_local_engine_computes_is_how_the_servers_do(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--engine.int8=true", "--engine.dtype=bfloat16", "--engine.native_kernels=off")
    words = plan.engine_command("127.0.0.1", 1).argv
    assert "--int8" in words and words[words.index("--dtype") + 1] == "bfloat16"
    assert words[words.index("--native-kernels") + 1] == "off"
    again = make_plan(_written(plan), [], plan.run_folder)
    assert again.engine_command("127.0.0.1", 1) == plan.engine_command("127.0.0.1", 1), "also when it is gone on with"


def test_a_vllm_server_gets_its_key_by_its_environment_from_a_file(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--engine.kind=vllm", "--model.lora.rank=8", '--launch.engine.extra_args=["--seed", "1"]')
    command = plan.engine_command("127.0.0.1", 8000)
    assert plan.settings.pool is not None and plan.settings.pool.backend == "vllm"
    assert command.secret_env == ("VLLM_API_KEY", str(plan.key_file))
    assert command.argv[command.argv.index("--max-lora-rank") + 1] == "8"
    assert command.argv[-2:] == ("--seed", "1")
    assert command.python is not None and command.python.endswith(".venv-vllm/bin/python")


def test_without_engines_the_run_samples_as_its_recipe_says(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--launch.engines=0")
    assert plan.settings.engine.kind == "local" and plan.engines == []


def test_the_first_rank_is_given_what_the_loop_needs_too(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--trainer.ranks=2", "--launch.trainer.cpus=2", "--launch.orchestrator.memory_gb=3")
    first, second = plan.trainers
    assert first.bundle == {"CPU": 3.0, "memory": 3e9}
    assert second.bundle == {"CPU": 2.0}
    place = plan.trainer_command(1, "10.0.0.1", 29500, attempt=2).environment
    assert (place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"]) == ("1", "2", "0")
    assert (place["MASTER_ADDR"], place["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--engine.kind=pool", '--pool.urls=["http://10.0.0.1:1"]'], "set launch.engines = 0, or leave pool.urls out"),
        (["--launch.engine.gpus=1.5"], "launch.engine.gpus = 1.5 must be a whole number"),
        (["--launch.trainer.gpus=1", "--launch.orchestrator.gpus=0.5"], "are for one process, rank 0"),
        (["--launch.engnes=2"], "launch.engnes is not a setting; did you mean engines?"),
        (["--launch.engine.extra_args=['--api-key', 'x']"], "launch.engine.extra_args must not contain --api-key"),
        (["--engine.kind=vllm", "--launch.engine.int8=true"], "launch.engine.int8 = true cannot act"),
        (
            ["--engine.kind=vllm", "--launch.engine.native_kernels=off"],
            'launch.engine.native_kernels = "torch" cannot act',
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(tmp_path, *overrides)
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_where_parts_live_may_change_and_the_run_may_not() -> None:
    check_overrides(["--launch.engines=4", "--launch.engine.gpus=1"], allow_changes=False)
    check_overrides(["--steps=9"], allow_changes=True)
    with pytest.raises(ConfigError, match="--steps would change the settings"):
        check_overrides(["--launch.engines=4", "--steps=9"], allow_changes=False)


def test_a_cluster_that_cannot_be_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ["launch", str(tmp_path / "recipe.toml"), "--run", str(tmp_path / "run")]
    assert main([*words, "--cluster", "127.0.0.1:1"]) == 2
    assert "--cluster 127.0.0.1:1 cannot be reached" in capsys.readouterr().err
    assert main([*words, "--cluster", "ray://127.0.0.1:10001"]) == 2
    assert "is not the address of a head, such as 10.0.0.1:6379" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_ray_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["launch", str(tmp_path / "recipe.toml")]) == 2
    assert "keel launch needs Ray: pip install 'keel-rl[ray]'" in capsys.readouterr().err


def test_the_examples_launch_by_words_that_the_command_knows(tmp_path: Path) -> None:
    job, policy = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token" and policy["kind"] == "NetworkPolicy"
    kubernetes = shlex.split(shlex.split(job["spec"]["entrypoint"])[2].partition("else exec ")[2].rstrip("; fi"))
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sbatch")], check=False).returncode == 0
    line = re.search(r"^keel launch .*(?= &$)", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE)
    assert line is not None
    slurm = shlex.split(line[0].replace('"${words[@]}"', "recipe.toml --run one").replace("$SLURM_NNODES", "3"))
    for words in (kubernetes, slurm):
        args, overrides = build_parser().parse_known_args(join_overrides(words[1:]))
        engines = [] if args.engines is None else [f"--launch.engines={args.engines}"]
        plan = plan_of(tmp_path, *overrides, *engines)
        assert plan.launch.nodes == {"auto": 5}.get(args.cluster, 3)
        assert args.folder is not None and args.recipe is not None


# what fits


def part(name: str, **amounts: float) -> Component:
    role, index = name.split("-")
    return Component(role, int(index), Resources(**amounts), 3)  # type: ignore[arg-type]


NODES = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 4.0, "GPU": 2.0, "memory": 8e9}]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part("engine-0", cpus=5)], "engine-0 asks for 5 CPUs, and no node of the cluster has that"),
        ([part("engine-0", gpus=3)], "engine-0 asks for 1 CPUs and 3 GPUs, and no node"),
        ([part("trainer-0", memory_gb=9)], "launch.trainer and launch.orchestrator"),
        ([part(f"engine-{i}", cpus=3) for i in range(3)], "3 parts ask for 9 CPUs in all, and the cluster has 8 CPUs"),
    ],
)
def test_more_than_the_cluster_has_is_refused_with_both_numbers(parts: list[Component], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_resources(parts, NODES)
    assert message in str(refused.value)


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 5.0]), min_size=1, max_size=6))
def test_what_is_refused_really_exceeds_a_node_or_the_whole(cpus: list[float]) -> None:
    try:
        check_resources([part(f"engine-{i}", cpus=amount) for i, amount in enumerate(cpus)], NODES)
    except ConfigError:
        assert max(cpus) > 4.0 or sum(cpus) > 8.0
    else:
        assert max(cpus) <= 4.0 and sum(cpus) <= 8.0


# what happens when parts die


@dataclass
class World:
    """A cluster, a watcher and a clock in one: what happens is written in a script by time."""

    script: dict[float, Callable[["World"], None]] = field(default_factory=dict)
    time: float = 0.0
    looks_of: dict[str, Probe] = field(default_factory=dict)
    started: list[tuple[float, str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    obedient: bool = True

    def allocate_address(self, name: str) -> tuple[str, int]:
        if name in self.lost:
            raise NodeLost("has no place")
        return "127.0.0.1", 1000 + len(self.started)

    def start(self, name: str, command: Command) -> None:
        self.started.append((round(self.time, 3), name))
        self.looks_of[name] = Probe()

    def probe_all(self, names: Iterable[str]) -> dict[str, Probe]:
        return {name: self.looks_of[name] for name in names}

    def terminate(self, names: Iterable[str]) -> None:
        for name in names:
            self.ended.append(f"end {name}")
            if self.obedient and name in self.looks_of:
                self.looks_of[name] = Probe(0, healthy=False)

    def kill(self, names: Iterable[str]) -> None:
        for name in names:
            self.ended.append(f"kill {name}")
            if name in self.looks_of and self.looks_of[name].exit_code is None:
                self.looks_of[name] = Probe(137, healthy=False)

    def on_event(self, text: str) -> None:
        self.told.append(text)

    def on_status(self, states: list[ComponentState]) -> None:
        pass

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for at in sorted(at for at in self.script if at <= self.time):
            self.script.pop(at)(self)
        assert self.time < 10_000, "it waits for ever"

    def die(self, name: str, code: int = 137) -> None:
        self.looks_of[name] = Probe(code, healthy=False)

    def starts(self, name: str) -> list[float]:
        return [at for at, one in self.started if one == name]


def supervise(plan: LaunchPlan, world: World) -> Supervisor:
    return Supervisor(plan, world, world, world.clock, world.sleep)


def finish(world: World) -> None:
    world.die("trainer-0", 0)


def test_the_trainer_begins_when_an_engine_answers_and_its_end_is_the_end(tmp_path: Path) -> None:
    plan, world = plan_of(tmp_path, "--launch.engines=2"), World()

    def silent(world: World) -> None:
        world.looks_of |= {name: Probe(healthy=False) for name in ("engine-0", "engine-1")}

    def answers(world: World) -> None:
        world.looks_of["engine-1"] = Probe()
        world.script[8.0] = lambda world: members.append(plan.engines_file.read_text())

    members: list[str] = []
    supervisor = supervise(plan, world)
    start = world.start
    world.start = lambda name, command: (start(name, command), silent(world))  # type: ignore[assignment,misc]
    world.script = {5.0: answers, 20.0: finish}
    assert supervisor.run() == "finished"
    assert world.starts("trainer-0") == [5.0]
    assert members == [f"{supervisor.engines[1].url}\n"], "only the engine that answers is a member"
    assert world.ended.index("kill trainer-0") < world.ended.index("end engine-0")
    assert not any(look.exit_code is None for look in world.looks_of.values()), "nothing is left"


def test_an_engine_that_dies_is_started_again_later_each_time_and_then_no_more(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--launch.engine.restarts=3", "--launch.backoff=4")
    plan.log_path("engine-0").write_text("loading\nout of memory\n")
    world = World(script={})
    start = world.start

    def start_and_die(name: str, command: Command) -> None:
        start(name, command)
        if name == "engine-0":
            world.die(name, 1)

    world.start = start_and_die  # type: ignore[method-assign]
    with pytest.raises(ComponentFailed) as failed:
        supervise(plan, world).run()
    starts = world.starts("engine-0")
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == [4.0, 8.5, 16.5]
    assert "engine-0 ended with exit code 1, and launch.engine.restarts = 3 are used up" in str(failed.value)
    assert "out of memory" in str(failed.value), "its last lines are shown"


def test_when_a_launch_fails_the_trainer_may_finish_its_step_first(tmp_path: Path) -> None:
    plan, world = plan_of(tmp_path, "--launch.engine.restarts=0"), World(script={3.0: lambda w: w.die("engine-0")})
    with pytest.raises(ComponentFailed, match="engine-0 was killed by SIGKILL"):
        supervise(plan, world).run()
    assert world.ended[0] == "end trainer-0"


def test_a_lost_rank_takes_the_others_down_and_all_go_on_together(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--trainer.ranks=3", "--launch.engines=0")

    def lose(world: World) -> None:
        world.die("trainer-2", 137)
        world.die("trainer-0", 1)  # gave up because of the other

    world = World(script={5.0: lose, 30.0: finish})
    supervisor = supervise(plan, world)
    assert supervisor.run() == "finished"
    assert [len(world.starts(f"trainer-{rank}")) for rank in range(3)] == [2, 2, 2]
    assert any("trainer-2 was killed by SIGKILL" in text for text in world.told), "the one that was killed is named"
    assert supervisor.ranks[0].restarts == 1


def test_a_node_that_is_lost_is_a_death_like_any_other(tmp_path: Path) -> None:
    plan, world = plan_of(tmp_path, "--launch.backoff=1"), World()

    def lose(world: World) -> None:
        world.looks_of["engine-0"] = Probe(lost_reason="is lost with its node")
        world.lost.add("engine-0")

    world.script = {3.0: lose, 5.0: lambda w: w.lost.clear(), 30.0: finish}
    supervisor = supervise(plan, world)
    assert supervisor.run() == "finished"
    assert len(world.starts("engine-0")) == 2
    assert supervisor.engines[0].restarts == 2, "a start that finds no place counts too"


def test_an_engine_that_runs_and_does_not_answer_is_killed_and_started_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--launch.health_timeout=20")

    def hang(world: World) -> None:
        world.looks_of["engine-0"] = Probe(healthy=False)

    world = World(script={5.0: hang, 60.0: finish})
    assert supervise(plan, world).run() == "finished"
    assert any("engine-0 did not answer for launch.health_timeout = 20 s; restart 1" in text for text in world.told)


def test_a_part_that_was_up_for_long_has_all_its_restarts_again(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "--launch.engine.restarts=1", "--launch.restart_reset_after=100")
    deaths = {float(at): (lambda w: w.die("engine-0")) for at in (10, 130, 250, 370)}
    world = World(script={**deaths, 500.0: finish})
    assert supervise(plan, world).run() == "finished"
    assert len(world.starts("engine-0")) == 5


def test_asked_to_stop_the_trainer_finishes_and_then_all_end(tmp_path: Path) -> None:
    plan, world = plan_of(tmp_path), World()
    supervisor = supervise(plan, world)
    world.script = {5.0: lambda w: supervisor.stop()}
    assert supervisor.run() == "stopped"
    assert world.ended[0] == "end trainer-0" and "end engine-0" in world.ended


def test_asked_twice_nobody_is_waited_for(tmp_path: Path) -> None:
    plan, world = plan_of(tmp_path), World(obedient=False)
    supervisor = supervise(plan, world)
    world.script = {5.0: lambda w: supervisor.stop(), 9.0: lambda w: supervisor.kill()}
    assert supervisor.run() == "killed"
    assert world.time < 11.0
    assert not any(look.exit_code is None for look in world.looks_of.values())


def test_a_trainer_that_fails_while_it_is_stopped_is_not_started_again(tmp_path: Path) -> None:
    plan, world = plan_of(tmp_path), World(obedient=False)
    supervisor = supervise(plan, world)
    world.script = {5.0: lambda w: supervisor.stop(), 7.0: lambda w: w.die("trainer-0", 1)}
    assert supervisor.run() == "stopped"
    assert len(world.starts("trainer-0")) == 1


@given(st.lists(st.tuples(st.floats(1, 200), st.sampled_from(["engine-0", "engine-1", "trainer-0"])), max_size=12))
def test_whatever_dies_whenever_every_launch_ends_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[float, str]]
) -> None:
    plan = plan_of(tmp_path_factory.mktemp("any"), "--launch.engines=2", "--launch.backoff=5")

    def dies(name: str) -> Callable[[World], None]:
        return lambda w: w.die(name) if name in w.looks_of and w.looks_of[name].exit_code is None else None

    world = World(script={at: dies(name) for at, name in deaths})
    world.script[900.0] = finish
    counts = {name: sum(one == name for _, one in deaths) for name in ("engine-0", "engine-1", "trainer-0")}
    try:
        assert supervise(plan, world).run() == "finished"
    except ComponentFailed:
        assert max(counts.values()) > 3
    assert not any(look.exit_code is None for look in world.looks_of.values())
    assert all(len(world.starts(name)) <= 4 for name in counts)


def _written(plan: LaunchPlan) -> Path:
    from keel.config.toml_writer import toml_lines

    file = plan.run_folder / "config.toml"
    file.write_text("".join(f"{line}{comment}\n" for line, comment in toml_lines(plan.loaded)))
    return file


# what is shown


def test_a_log_is_followed_by_whole_lines_and_escape_sequences_are_written_out(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("of an earlier launch\n")
    follower = LogFollower(log)
    with log.open("a") as file:
        file.write("--- 2026-01-01 00:00:00 on node\nstep 1/2\nhalf")
        file.flush()
        assert follower.read_new_lines() == ["step 1/2"]
        file.write(" a line \x1b[2J\nstopped after step 1; go on with: keel train --resume x\n")
        file.flush()
    assert follower.read_new_lines() == ["half a line \\x1b[2J"], "and the trainer's own advice is not that of a launch"


def test_the_table_shows_where_a_part_is_and_why_it_died() -> None:
    up = ComponentState(part("engine-0"), "up", status_since=1.0, url="http://127.0.0.1:8000")
    down = ComponentState(part("trainer-0"), "down", status_since=60.0, restarts=2, last_error="was killed by SIGKILL")
    screen = Console(width=100, file=io.StringIO())
    screen.print(status_table([up, down], lambda name: f"node-of-{name}", clock=lambda: 61.0))
    rows = [line.split() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert rows[1] == ["engine-0", "node-of-engine-0", "up", "1m00s", "http://127.0.0.1:8000"]
    assert rows[2][:5] == ["trainer-0", "node-of-trainer-0", "down", "1s", "2"]
    assert " ".join(rows[2][5:]) == "was killed by SIGKILL"
