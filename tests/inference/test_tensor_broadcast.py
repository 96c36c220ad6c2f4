"""A broadcast of tensors between real process groups: all of them arrive as they were, or nobody is held up."""

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

HERE, CPU = "127.0.0.1", torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def take(port: int, rank: int, fits: Any = lambda _table: None) -> dict[str, Tensor]:
    return receive_broadcast(BroadcastSlot(port, rank), HERE, HERE, CPU, fits)


shapes = st.lists(st.integers(0, 5), max_size=3)
tables = st.lists(st.tuples(st.sampled_from(TYPES), shapes), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(tables, st.integers(1, 3))
def test_every_receiver_gets_every_tensor_bit_for_bit(table: list[tuple[torch.dtype, list[int]]], count: int) -> None:
    tensors = {
        f"model.layers.{number // 3}.part{number}.weight": torch.randn(shape).mul(9).to(kind)
        for number, (kind, shape) in enumerate(table)
    }
    sender = BroadcastSender(HERE, tensors, CPU)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, count)
        found = [threads.submit(take, sender.port, rank + 1) for rank in range(count)]
        assert sending.result(60) == count
        for one in found:
            got = one.result(60)
            assert list(got) == list(tensors)
            assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, t in tensors.items())


def test_who_refuses_or_stays_away_is_left_out_and_the_others_get_everything() -> None:
    tensors = {"weight": torch.randn(50, 3)}

    def refuse(table: dict[str, Tensor]) -> None:
        assert table["weight"].is_meta and table["weight"].shape == (50, 3)
        raise EngineError("weights are of another model")

    sender = BroadcastSender(HERE, tensors, CPU)
    sender.mark_absent(4)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, 4)
        found = [threads.submit(take, sender.port, rank, refuse if rank == 2 else lambda _: None) for rank in (1, 2, 3)]
        assert sending.result(60) == 2
        assert all(torch.equal(found[place].result(60)["weight"], tensors["weight"]) for place in (0, 2))
        with pytest.raises(EngineError, match="of another model"):
            found[1].result(60)


def test_a_broadcast_without_receivers_is_over_at_once() -> None:
    sender = BroadcastSender(HERE, {"weight": torch.zeros(3)}, CPU)
    sender.mark_absent(1)
    assert sender.send(1) == 0


def test_a_port_that_nobody_listens_on_is_an_error_at_once() -> None:
    sender = BroadcastSender(HERE, {"weight": torch.zeros(3)}, CPU)
    sender.mark_absent(1)
    port = sender.port
    sender.send(1)
    with pytest.raises(EngineError, match="broke off"):
        take(port, 1)


def test_a_sender_that_vanishes_before_it_begins_ends_its_receivers() -> None:
    sender = BroadcastSender(HERE, {"weight": torch.zeros(3)}, CPU)
    gone = threading.Event()

    def unwelcome(_table: dict[str, Tensor]) -> None:
        sender.mark_absent(1)  # counted out while it was still looking
        gone.wait(20)

    with ThreadPoolExecutor() as threads:
        late = threads.submit(take, sender.port, 1, unwelcome)
        assert sender.send(1) == 0
        gone.set()
        with pytest.raises(EngineError, match=r"too late|broke off"):
            late.result(60)


def test_an_address_of_another_machine_is_refused_by_the_setting() -> None:
    with pytest.raises(EngineError, match=r"publish\.bind_address = 192\.0\.2\.1"):
        BroadcastSender("192.0.2.1", {}, CPU)


def test_tensors_of_a_layer_travel_together() -> None:
    names = ["model.embed.weight", "model.layers.0.q", "model.layers.0.mlp.1.w", "model.layers.1.q", "norm.weight"]
    cut = group_by_layer([TensorSpec(name, torch.float32, (2,)) for name in names])
    assert [[each.name for each in layer] for layer in cut] == [names[:1], names[1:3], names[3:4], names[4:]]
