"""Helper threads are given back by whoever waits, and cores are dealt between trainer and engine."""

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from keel import ModelSettings, load_model
from keel.common.openmp import OpenMPReleasingExecutor, release_openmp_threads
from keel.training.step.core_sharing import share_cores


def count() -> int:
    """Threads of this process, as the system sees them."""
    return len(os.listdir("/proc/self/task"))


def comes_down_to(wanted: int) -> bool:
    """Whether so few are left before long: a thread that has ended is gone a moment later."""
    until = time.monotonic() + 10
    while count() > wanted and time.monotonic() < until:
        time.sleep(0.01)
    return count() <= wanted


def multiply() -> None:
    torch.set_num_threads(3)
    torch.ones(512, 512) @ torch.ones(512, 512)
    torch.ones(1 << 20).mul_(2.0)


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads where Linux lists them")
def test_helpers_are_there_after_a_product_and_gone_after_release() -> None:
    found = []

    def work() -> None:
        before = count()
        multiply()
        found.append(count() - before)
        release_openmp_threads()
        found.append(comes_down_to(before))

    in_a_thread(work)
    assert found[0] >= 1
    assert found[1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads where Linux lists them")
def test_workers_keep_no_helpers_between_two_pieces_of_work() -> None:
    before = count()
    with OpenMPReleasingExecutor(1) as workers:
        for _ in range(3):
            workers.submit(multiply).result()
        assert comes_down_to(before + 1)


def test_workers_hand_on_answers_and_errors() -> None:
    with OpenMPReleasingExecutor(1) as workers:
        assert workers.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            workers.submit(divmod, 7, 0).result()


def test_cores_are_asked_for_before_each_layer_forward_and_backward_and_change_nothing() -> None:
    model = load_model(ModelSettings(name="tiny"))
    ids = torch.arange(12)[None]

    def gradients() -> list[torch.Tensor]:
        model.network.zero_grad(set_to_none=True)
        model.network(input_ids=ids, use_cache=False).logits.square().sum().backward()
        return [weight.grad.clone() for weight in model.network.parameters() if weight.grad is not None]

    threads, plain, asked = torch.get_num_threads(), gradients(), []

    def some() -> int:
        asked.append(torch.get_num_threads())
        return 1 + len(asked) % 2

    try:
        with share_cores(model.network, some):
            shared = gradients()
    finally:
        torch.set_num_threads(threads)
    layers = model.network.config.num_hidden_layers
    assert len(asked) == 2 * layers
    assert set(asked[1:]) == {1, 2}
    for one, other in zip(plain, shared, strict=True):
        torch.testing.assert_close(one, other)
    gradients()
    assert len(asked) == 2 * layers
