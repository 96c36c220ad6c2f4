"""Other projects' clients against a real `keel serve`; `make check-clients` installs them and runs these tests."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.config import ModelSettings
from keel.training import load_model
from keel.training.model.model_source import resolve_model
from tests.support.paths import ROOT
from tests.support.serve_processes import servers

pytestmark = pytest.mark.process

MODEL = "tiny"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers(1, MODEL, tmp_path_factory.mktemp("weights")) as (server,):
        yield f"{server.ready()}/v1"


def run_client(package: str, module: str, script: str, *args: str) -> Any:
    """Run an example as a user would, and return the JSON that it prints; skip if its package is not installed."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{package} is not installed; run `make check-clients`, or pip install {package}")
    command = [sys.executable, str(ROOT / "examples" / "clients" / script), *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if "PrerequisiteError" in ended.stderr:
        pytest.skip(f"{package} needs another version of a package: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


@torch.inference_mode()
def continuation_logprob(prompt: str, continuation: str) -> float:
    """Return the log-prob of a continuation with the model's own code."""
    model = load_model(ModelSettings(name=MODEL))
    start = model.tokenizer(prompt)["input_ids"]
    token_ids = model.tokenizer(prompt + continuation)["input_ids"]
    logits = model.network(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
    chosen = logits.double().log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return float(chosen[len(start) - 1 :].sum())


def test_lm_evaluation_harness_scores_multiple_choice(url: str) -> None:
    folder = str(resolve_model(MODEL).folder)
    result = run_client("lm-eval[api]", "lm_eval", "lm_eval_choice.py", url, folder)
    assert 0 <= result["scores"]["acc,none"] <= 1
    for sample in result["samples"]:
        # the harness puts a space before each choice
        expected = [continuation_logprob(sample["question"], f" {choice}") for choice in sample["choices"]]
        assert sample["logprobs"] == pytest.approx(expected, abs=1e-3)


def test_inspect_ai_evaluates_a_task(url: str) -> None:
    result = run_client("inspect-ai", "inspect_ai", "inspect_task.py", url)
    assert len(result["completions"]) == 2
    assert result["top_logprobs"] == [2, 2]


def test_langchain_chats_and_streams(url: str) -> None:
    result = run_client("langchain-openai", "langchain_openai", "langchain_chat.py", url)
    assert result["completion"] == result["streamed"]
    assert result["usage"] == len(result["tokens"])
    assert all(count == 2 for _, count in result["tokens"])


def test_litellm_chats_streams_and_completes(url: str) -> None:
    result = run_client("litellm", "litellm", "litellm_chat.py", url)
    assert result["completion"] == result["streamed"]
    assert result["top_logprobs"] == 2 and result["usage"] > 0


def test_every_example_names_a_client_that_is_tested() -> None:
    tested = (Path(__file__)).read_text()
    assert all(script.name in tested for script in (ROOT / "examples" / "clients").glob("*.py"))
