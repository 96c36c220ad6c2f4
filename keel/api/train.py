"""`keel.train`: a training run as one call, in a program or a notebook.

The same settings, loop, folder and resume as `keel train`. The loop runs in its own thread, so the call works where an
event loop is running; the calling thread waits, shows the progress and handles interrupts. Rows and functions given
from Python are written into the folder of the run.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.api.notebook_display import NotebookDisplay, in_notebook
from keel.api.run_result import RunResult
from keel.api.train_request import ObjectiveLike, objective_table
from keel.config import LoadedSettings, load_settings
from keel.errors import ConfigError, KeelError
from keel.run.folder import RunFolder, unused_path
from keel.run.loop import TrainingRun
from keel.run.monitor.callbacks import NullCallback, RunCallback
from keel.run.monitor.progress import make_run_display
from keel.run.start.module_folders import add_module_folders
from keel.run.start.run_inputs import DatasetLike, RewardLike, RunInputs, flatten_settings
from keel.run.start.training_session import train_session

ENVIRONMENT = "dataset"
"""Name of the environment that `dataset` and `rewards` define, as in `keel train --dataset`."""
REFRESH_SECONDS = 0.25
"""Seconds between two updates of the display."""


def train(
    *,
    recipe: str | os.PathLike[str] | None = None,
    model: str | Mapping[str, Any] | None = None,
    dataset: DatasetLike | Mapping[str, Any] | None = None,
    eval_dataset: DatasetLike | None = None,
    rewards: Sequence[RewardLike] | RewardLike | None = None,
    objective: ObjectiveLike | None = None,
    steps: int | None = None,
    run: str | os.PathLike[str] | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Train a model and return the result when the run has ended.

    `recipe` is a TOML file or a packaged recipe whose settings the arguments change; without it they change the
    defaults. `model` is a name or a `[model]` table. `dataset` is a path, rows (a list of dicts or a Hugging Face
    `Dataset`), or a `[dataset]` table whose `path` is one of them; `eval_dataset` is a path or rows. `rewards` are
    names of built-in rewards, `module:function`, tables with `name` and `weight`, or functions, also async ones and
    lambdas.
    `objective` is a preset, a table or a composition and replaces the one of the recipe. All other settings are given
    by the name of their table: `trainer={"optimizer": {"lr": 1e-5}}`, or dotted: `**{"trainer.optimizer.lr": 1e-5}`.

    `run` is the folder of the run, by default a new one below `runs`. `resume=True` continues the run in it with its
    recorded settings; arguments that differ from them need `allow_changes=True`.

    An interrupt (Ctrl-C, or "interrupt" in a notebook) ends the run after the current step, and the result has the
    status "stopped"; a second one ends it immediately and raises KeyboardInterrupt. A run in which every rollout failed
    raises a KeelError. `progress=False` shows nothing.
    """
    with RunInputs() as inputs:
        values = _named_settings(inputs, model, dataset, eval_dataset, rewards, objective, steps, settings)
        if not resume and not (recipe or any(name.startswith("environments") for name, _ in values)):
            raise ConfigError("pass dataset and rewards, a recipe, environments, or resume=True with the run to resume")
        folder = _open_folder(inputs, recipe, run, resume, allow_changes, values)
    display: RunCallback = NullCallback()
    if progress:
        display = NotebookDisplay() if in_notebook() else make_run_display()
    return _RunThread(folder, display).wait()


def _named_settings(
    inputs: RunInputs,
    model: str | Mapping[str, Any] | None,
    dataset: DatasetLike | Mapping[str, Any] | None,
    eval_dataset: DatasetLike | None,
    rewards: Any,
    objective: ObjectiveLike | None,
    steps: int | None,
    settings: Mapping[str, Any],
) -> list[tuple[str, Any]]:
    """Return the arguments of `train` as dotted settings; those that name settings directly come last."""
    named: dict[str, Any] = {}
    environment = f"environments.{ENVIRONMENT}"
    if dataset is not None:
        table: dict[str, Any] = dict(dataset) if isinstance(dataset, Mapping) else {"path": dataset}
        if "path" not in table:
            raise ConfigError(
                f'dataset has the keys {", ".join(map(str, table)) or "none"} and no "path"; pass a list of rows, one'
                ' split of a DatasetDict (dataset["train"]), or a [dataset] table with path'
            )
        named[f"{environment}.dataset"] = {**table, "path": inputs.add_dataset(table["path"], "train")}
    if eval_dataset is not None:
        named[f"{environment}.dataset.eval_path"] = inputs.add_dataset(eval_dataset, "eval")
    if rewards is not None:
        single = isinstance(rewards, str | Mapping) or callable(rewards)
        named[f"{environment}.rewards"] = [inputs.add_reward(reward) for reward in ([rewards] if single else rewards)]
    if model is not None:
        named["model"] = dict(model) if isinstance(model, Mapping) else {"name": model}
    if steps is not None:
        named["steps"] = steps
    pairs = flatten_settings(named)
    if objective is not None:
        pairs.append(("objective", objective_table(objective)))
    return [*pairs, *flatten_settings(settings)]


def _open_folder(
    inputs: RunInputs,
    recipe: str | os.PathLike[str] | None,
    run: str | os.PathLike[str] | None,
    resume: bool,
    allow_changes: bool,
    values: list[tuple[str, Any]],
) -> RunFolder:
    """Create the folder of a new run, or open that of a resumed one, with the inputs in it."""
    file = None if recipe is None else os.fspath(recipe)
    if resume:
        if run is None:
            raise ConfigError("resume=True needs run, the folder of the run to resume")
        folder = RunFolder.open(Path(run), file=file, values=values, allow_changes=allow_changes)
        try:
            inputs.write(folder.path)
        except BaseException:
            folder.close()
            raise
    else:
        if allow_changes:
            raise ConfigError("allow_changes=True has no effect without resume=True")
        loaded: LoadedSettings = load_settings(file, values=values)
        if file is None:
            loaded = replace(loaded, recipe_folder=Path.cwd())  # where modules of rewards and data sets are
        path = Path(run) if run is not None else unused_path(Path("runs"), Path(file or "train").stem)
        folder = RunFolder.create(path, loaded, inputs.write)
    add_module_folders(file, folder.path)
    return folder


class _RunThread:
    """A run in its own thread, with its own event loop."""

    def __init__(self, folder: RunFolder, display: RunCallback) -> None:
        self._folder, self._display = folder, display
        self._done = threading.Event()
        self._stopping = False
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._run: TrainingRun | None = None
        self._task: asyncio.Task[None] | None = None
        # a daemon: a run that hangs must not keep the program from exiting
        self._thread = threading.Thread(target=self._train, name="keel-train", daemon=True)

    def wait(self) -> RunResult:
        """Run to the end. The first interrupt stops after the step, the second immediately."""
        refresh: Callable[[], None] = getattr(self._display, "refresh", lambda: None)
        self._thread.start()
        interrupts = 0
        while not self._done.is_set():
            try:
                self._done.wait(REFRESH_SECONDS)
                refresh()
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 2:
                    raise  # it does not end; the folder stays locked until the process exits
                self._interrupt(cancel=interrupts == 2)
        refresh()
        if isinstance(self._error, asyncio.CancelledError):
            raise KeyboardInterrupt from None
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _interrupt(self, cancel: bool) -> None:
        self._stopping = True
        run, task = self._run, self._task
        if run is not None and task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel if cancel else run.stop)

    def _train(self) -> None:
        try:
            with self._folder as folder:
                ended = train_session(folder, self._display, self._drive, on_hang=self._hung)
                if ended.problem is not None:
                    raise KeelError(ended.problem)
                self._result = RunResult.from_folder(folder, ended.summary)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._error = self._error or error
        finally:
            self._done.set()

    async def _drive(self, run: TrainingRun) -> None:
        self._task, self._run = asyncio.current_task(), run
        if self._stopping:
            run.stop()
        await run.train()

    def _hung(self, reason: str) -> None:
        """Give up a run that hangs and cannot be ended: the caller gets the reason, the thread is abandoned."""
        self._error = KeelError(reason)
        self._done.set()
