"""OpenMP worker threads are released after work, and cores are shared between trainer and engine."""

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from keel import ModelSettings, load_model
from keel.common.openmp import OpenMPReleasingExecutor, release_openmp_threads
from keel.training.step.core_sharing import share_cores


def thread_count() -> int:
    """Return the number of threads of this process, as the kernel sees them."""
    return len(os.listdir("/proc/self/task"))


def falls_to(limit: int) -> bool:
    """Return whether the thread count falls to `limit` within 10 s: ended threads disappear with a delay."""
    deadline = time.monotonic() + 10
    while thread_count() > limit and time.monotonic() < deadline:
        time.sleep(0.01)
    return thread_count() <= limit


def multiply() -> None:
    torch.set_num_threads(3)
    torch.ones(512, 512) @ torch.ones(512, 512)
    torch.ones(1 << 20).mul_(2.0)


def run_in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc/self/task")
def test_worker_threads_exist_after_a_product_and_not_after_release() -> None:
    results = []

    def work() -> None:
        before = thread_count()
        multiply()
        results.append(thread_count() - before)
        release_openmp_threads()
        results.append(falls_to(before))

    run_in_thread(work)
    started, released = results
    assert started >= 1
    assert released


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc/self/task")
def test_the_executor_keeps_no_worker_threads_between_calls() -> None:
    before = thread_count()
    with OpenMPReleasingExecutor(1) as executor:
        for _ in range(3):
            executor.submit(multiply).result()
        assert falls_to(before + 1)


def test_the_executor_returns_results_and_raises_errors() -> None:
    with OpenMPReleasingExecutor(1) as executor:
        assert executor.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 7, 0).result()


def test_the_thread_count_is_set_before_each_layer_and_changes_no_gradient() -> None:
    model = load_model(ModelSettings(name="tiny"))
    ids = torch.arange(12)[None]

    def gradients() -> list[torch.Tensor]:
        model.network.zero_grad(set_to_none=True)
        model.network(input_ids=ids, use_cache=False).logits.square().sum().backward()
        return [weight.grad.clone() for weight in model.network.parameters() if weight.grad is not None]

    threads, plain, calls = torch.get_num_threads(), gradients(), []

    def next_thread_count() -> int:
        calls.append(torch.get_num_threads())
        return 1 + len(calls) % 2

    try:
        with share_cores(model.network, next_thread_count):
            shared = gradients()
    finally:
        torch.set_num_threads(threads)
    layers = model.network.config.num_hidden_layers
    assert len(calls) == 2 * layers
    assert set(calls[1:]) == {1, 2}
    for gradient, expected in zip(shared, plain, strict=True):
        torch.testing.assert_close(gradient, expected)
    gradients()
    assert len(calls) == 2 * layers
