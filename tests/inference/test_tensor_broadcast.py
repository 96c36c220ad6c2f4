"""Tensor broadcasts between real process groups: all tensors arrive intact, and no failure blocks the others."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keel.inference.protocol import BroadcastSlot, EngineError
from keel.inference.tensor_broadcast import BroadcastSender, TensorSpec, group_by_layer, receive_broadcast

LOCALHOST, CPU = "127.0.0.1", torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def receive(port: int, rank: int, check_table: Any = lambda _table: None) -> dict[str, Tensor]:
    return receive_broadcast(BroadcastSlot(port, rank), LOCALHOST, LOCALHOST, CPU, check_table)


shapes = st.lists(st.integers(0, 5), max_size=3)
tables = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(tables, st.integers(1, 3))
def test_every_receiver_gets_every_tensor_bit_for_bit(table: list[tuple[torch.dtype, list[int]]], count: int) -> None:
    tensors = {
        f"model.layers.{number // 3}.part{number}.weight": torch.randn(shape).mul(9).to(dtype)
        for number, (dtype, shape) in enumerate(table)
    }
    sender = BroadcastSender(LOCALHOST, tensors, CPU)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, count)
        receivers = [threads.submit(receive, sender.port, rank + 1) for rank in range(count)]
        assert sending.result(60) == count
        for receiver in receivers:
            received = receiver.result(60)
            assert list(received) == list(tensors)
            assert all(
                received[name].dtype == t.dtype and torch.equal(received[name], t) for name, t in tensors.items()
            )


def test_a_receiver_that_rejects_the_table_or_is_absent_is_left_out_and_the_others_get_all_tensors() -> None:
    tensors = {"weight": torch.randn(50, 3)}

    def reject(table: dict[str, Tensor]) -> None:
        assert table["weight"].is_meta and table["weight"].shape == (50, 3)
        raise EngineError("the weights belong to another model")

    sender = BroadcastSender(LOCALHOST, tensors, CPU)
    sender.mark_absent(4)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, 4)
        receivers = [
            threads.submit(receive, sender.port, rank, reject if rank == 2 else lambda _: None) for rank in (1, 2, 3)
        ]
        assert sending.result(60) == 2
        assert all(torch.equal(receivers[index].result(60)["weight"], tensors["weight"]) for index in (0, 2))
        with pytest.raises(EngineError, match="belong to another model"):
            receivers[1].result(60)


def test_a_broadcast_without_receivers_ends_immediately() -> None:
    sender = BroadcastSender(LOCALHOST, {"weight": torch.zeros(3)}, CPU)
    sender.mark_absent(1)
    assert sender.send(1) == 0


def test_a_closed_port_is_an_error_without_a_wait() -> None:
    sender = BroadcastSender(LOCALHOST, {"weight": torch.zeros(3)}, CPU)
    sender.mark_absent(1)
    port = sender.port
    sender.send(1)
    with pytest.raises(EngineError, match=r"the broadcast from 127\.0\.0\.1 failed"):
        receive(port, 1)


def test_a_receiver_fails_if_the_sender_ends_before_the_transfer() -> None:
    sender = BroadcastSender(LOCALHOST, {"weight": torch.zeros(3)}, CPU)
    sender_ended = threading.Event()

    def check_slowly(_table: dict[str, Tensor]) -> None:
        sender.mark_absent(1)  # declared absent while it still checks the table
        sender_ended.wait(20)

    with ThreadPoolExecutor() as threads:
        late = threads.submit(receive, sender.port, 1, check_slowly)
        assert sender.send(1) == 0
        sender_ended.set()
        with pytest.raises(EngineError, match=r"too late|the broadcast from .* failed"):
            late.result(60)


def test_an_address_of_another_machine_raises_an_error_that_names_the_setting() -> None:
    with pytest.raises(EngineError, match=r"publish\.bind_address = 192\.0\.2\.1"):
        BroadcastSender("192.0.2.1", {}, CPU)


def test_tensors_of_a_layer_are_sent_together() -> None:
    names = ["model.embed.weight", "model.layers.0.q", "model.layers.0.mlp.1.w", "model.layers.1.q", "norm.weight"]
    layers = group_by_layer([TensorSpec(name, torch.float32, (2,)) for name in names])
    assert [[spec.name for spec in layer] for layer in layers] == [names[:1], names[1:3], names[3:4], names[4:]]
