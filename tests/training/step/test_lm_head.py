"""Test that the LM head equals the naive formula in float64 while allocating logits for one chunk only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.training.step import lm_head as module
from keel.training.step.lm_head import LMHead, backward_into, logprobs

VOCAB_SIZE, WIDTH = 37, 6
SHAPES = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "everything": {"bias": True, "softcap": 1.5, "scale": 1.7},
}


@pytest.fixture(
    params=[(10**9, 10**9), (5 * VOCAB_SIZE * 8, 2 * VOCAB_SIZE * 8), (1, 1)], ids=["one chunk", "chunks", "rows"]
)
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one chunk; chunks of five rows in slices of two, neither of which divides the rows; or single rows."""
    monkeypatch.setattr(module, "CHUNK_BYTES", request.param[0])
    monkeypatch.setattr(module, "SLICE_BYTES", request.param[1])


class Case:
    """A head and its input rows; everything that trains is a leaf."""

    def __init__(self, shape: dict[str, Any], rows: int = 13, seed: int = 0, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.hidden, weight, bias = normal(rows, WIDTH), normal(VOCAB_SIZE, WIDTH), normal(VOCAB_SIZE)
        self.head = LMHead(**({"weight": weight} | shape | ({"bias": bias} if shape.get("bias") else {})))
        self.targets = torch.randint(0, VOCAB_SIZE, (rows,), generator=generator)
        self.temperature = 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype)
        self.logprob_grad = torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)
        self.logprob_grad[::3] = 0.0

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden, self.head.weight, self.head.bias) if leaf is not None]

    def full_logprobs(self) -> Tensor:
        """Return [n, V]: log-probs of the full vocabulary by the textbook formula."""
        head = self.head
        logits = self.hidden @ head.weight.T
        logits = head.scale * (logits if head.bias is None else logits + head.bias)
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return torch.log_softmax(logits / self.temperature[:, None], -1)

    def naive(self) -> Tensor:
        return self.full_logprobs()[torch.arange(len(self.targets)), self.targets]

    def naive_gradients(self) -> list[Tensor]:
        return list(torch.autograd.grad((self.naive() * self.logprob_grad).sum(), self.leaves))


def close(actual: Tensor | None, expected: Tensor, tolerance: float = 1e-12) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected.detach(), rtol=tolerance, atol=tolerance)


# values


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.usefixtures("_sizes")
def test_logprobs_entropy_and_top_k_are_those_of_log_softmax(shape: dict[str, Any]) -> None:
    case = Case(shape)
    scores = case.head.score(case.hidden, case.targets, case.temperature, entropy=True, top_k=4)
    full = case.full_logprobs().detach()
    close(scores.logprobs, case.naive())
    close(scores.entropy, -(full.exp() * full).sum(-1))
    close(scores.top_logprobs, full.sort(-1, descending=True).values[:, :4])
    assert scores.top_ids is not None
    close(full.gather(1, scores.top_ids), full.sort(-1, descending=True).values[:, :4])


def test_a_scalar_temperature_equals_the_same_temperature_per_row() -> None:
    case = Case({"softcap": 2.0})
    case.temperature = torch.full_like(case.temperature, 0.7)
    close(case.head.score(case.hidden, case.targets, 0.7).logprobs, case.naive())


@given(st.integers(0, 10**6), st.integers(0, 9), st.integers(1, 12), st.sampled_from(sorted(SHAPES)))
def test_values_and_gradients_do_not_depend_on_the_chunk_size(seed: int, rows: int, chunk: int, shape: str) -> None:
    case = Case(SHAPES[shape], rows, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk * VOCAB_SIZE * 8)
        patch.setattr(module, "SLICE_BYTES", (chunk + 1) // 2 * VOCAB_SIZE * 8)
        scores, gradients = case.head.score_and_grad(
            case.hidden.detach(), case.targets, case.temperature, lambda _, at: case.logprob_grad[at]
        )
    close(scores.logprobs, case.naive())
    for actual, expected in zip(vars(gradients).values(), case.naive_gradients(), strict=False):
        close(actual, expected, 1e-10)


def test_no_rows_give_no_scores_and_zero_gradients() -> None:
    case = Case(SHAPES["everything"], rows=0)
    scores = case.head.score(case.hidden, case.targets, case.temperature, entropy=True, top_k=3)
    assert scores.logprobs.shape == (0,) and scores.entropy is not None and scores.entropy.shape == (0,)
    assert scores.top_logprobs is not None and scores.top_logprobs.shape == (0, 3)
    gradients = case.head.backward(case.hidden, case.targets, case.temperature, case.logprob_grad)
    assert gradients.hidden.shape == (0, WIDTH)
    assert gradients.weight is not None and not gradients.weight.any()
    assert gradients.bias is not None and not gradients.bias.any()


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_stay_finite_and_exact(size: float, dtype: torch.dtype) -> None:
    case = Case({}, rows=4, dtype=dtype)
    with torch.no_grad():
        case.hidden.mul_(size)
    scores = case.head.score(case.hidden, case.targets, case.temperature, entropy=True)
    exact = Case({}, rows=4)
    exact.hidden = case.hidden.detach().double()
    exact.head = LMHead(case.head.weight.detach().double())
    exact.temperature = case.temperature.double()
    assert scores.logprobs.isfinite().all() and scores.entropy is not None and scores.entropy.isfinite().all()
    torch.testing.assert_close(scores.logprobs.double(), exact.naive(), rtol=1e-5, atol=1e-2)
    gradients = case.head.backward(case.hidden.detach(), case.targets, case.temperature, case.logprob_grad)
    assert gradients.hidden.isfinite().all() and gradients.weight is not None and gradients.weight.isfinite().all()


def test_half_precision_weights_give_float32_logprobs_near_the_exact_ones() -> None:
    case = Case({}, rows=64, dtype=torch.bfloat16)
    temperature = case.temperature.float()
    scores, gradients = case.head.score_and_grad(
        case.hidden.detach(), case.targets, temperature, lambda _, rows: case.logprob_grad.float()[rows], entropy=True
    )
    assert scores.logprobs.dtype == torch.float32 and scores.entropy is not None
    assert gradients.hidden.dtype == torch.bfloat16 and gradients.weight is not None
    exact = Case({}, rows=64, dtype=torch.bfloat16)
    exact.hidden = case.hidden.detach().double().requires_grad_()
    exact.head = LMHead(case.head.weight.detach().double().requires_grad_())
    exact.temperature, exact.logprob_grad = temperature.double(), case.logprob_grad.double()
    # in bfloat16 a logit of size 8 has an error of 8 / 2^8, and a temperature of 0.5 doubles it
    assert (scores.logprobs.double() - exact.naive()).abs().max() < 0.1
    for actual, expected in zip([gradients.hidden, gradients.weight], exact.naive_gradients(), strict=True):
        assert (actual.double() - expected).norm() < 0.02 * expected.norm()


# gradients

Gradients = Callable[[Case], list[Tensor | None]]


def fused(case: Case) -> list[Tensor | None]:
    gradients = case.head.score_and_grad(
        case.hidden.detach(), case.targets, case.temperature, lambda _, rows: case.logprob_grad[rows]
    )[1]
    return list(vars(gradients).values())


def backward(case: Case) -> list[Tensor | None]:
    return list(
        vars(case.head.backward(case.hidden.detach(), case.targets, case.temperature, case.logprob_grad)).values()
    )


def differentiable(case: Case) -> list[Tensor | None]:
    values = logprobs(case.head, case.hidden, case.targets, case.temperature)
    return list(torch.autograd.grad((values * case.logprob_grad).sum(), case.leaves))


@pytest.mark.parametrize("compute", [fused, backward, differentiable], ids=["fused", "backward", "logprobs"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.usefixtures("_sizes")
def test_gradients_are_those_of_autograd_through_log_softmax(compute: Gradients, shape: dict[str, Any]) -> None:
    case = Case(shape)
    gradients = compute(case)
    for actual, expected in zip(gradients, case.naive_gradients(), strict=False):
        close(actual, expected, 1e-11)
    assert all(extra is None for extra in gradients[len(case.leaves) :])


def test_gradients_agree_with_finite_differences() -> None:
    case = Case(SHAPES["everything"], rows=5)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = LMHead(weight, bias, case.head.scale, case.head.softcap)
        return logprobs(head, hidden, case.targets, case.temperature)

    assert torch.autograd.gradcheck(loss, case.leaves)


def test_a_logprob_gradient_that_depends_on_the_logprob_matches_autograd() -> None:
    case = Case({"softcap": 2.0})
    _, gradients = case.head.score_and_grad(
        case.hidden.detach(), case.targets, case.temperature, lambda values, _: values.exp()
    )
    expected = torch.autograd.grad(case.naive().exp().sum(), case.leaves)
    close(gradients.hidden, expected[0])
    close(gradients.weight, expected[1])


def test_a_tied_weight_gets_the_sum_of_both_gradients() -> None:
    case, inputs = Case({}), torch.arange(13) % VOCAB_SIZE

    def gradient(run_backward: Callable[[Tensor], Tensor]) -> Tensor:
        case.head.weight.grad = None
        hidden = torch.tanh(torch.nn.functional.embedding(inputs, case.head.weight))
        run_backward(hidden)
        assert case.head.weight.grad is not None
        return case.head.weight.grad

    def with_autograd(hidden: Tensor) -> None:
        case.hidden = hidden
        (case.naive() * case.logprob_grad).sum().backward()

    def with_head(hidden: Tensor) -> None:
        gradients = case.head.backward(hidden.detach(), case.targets, case.temperature, case.logprob_grad)
        backward_into(case.head, hidden, gradients)

    close(gradient(with_head), gradient(with_autograd))


def test_a_frozen_weight_gets_no_gradient_but_hidden_states_do() -> None:
    case = Case({"bias": True})
    for leaf in case.leaves[1:]:
        leaf.requires_grad_(False)
    gradients = case.head.backward(case.hidden.detach(), case.targets, case.temperature, case.logprob_grad)
    assert gradients.weight is None and gradients.bias is None
    close(gradients.hidden, torch.autograd.grad((case.naive() * case.logprob_grad).sum(), case.hidden)[0])


def test_a_row_with_zero_logprob_gradient_has_exactly_zero_hidden_gradient() -> None:
    case = Case(SHAPES["everything"])
    for compute in (fused, backward):
        hidden = compute(case)[0]
        assert hidden is not None and not hidden[::3].any() and hidden[1::3].any(1).all()


# cost


class OpRecorder(TorchDispatchMode):
    """Record the largest tensor with a vocabulary dimension and the sizes of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, list[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.largest = max([self.largest, *(leaf.numel() for leaf in tensors if VOCAB_SIZE in leaf.shape)])
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
            first, second = [arg for arg in args if isinstance(arg, Tensor)][-2:]
            self.products.append((*first.shape, second.shape[1]))
        return out

    def multiplications(self) -> int:
        return sum(rows * inner * columns for rows, inner, columns in self.products)


@pytest.mark.parametrize("compute", [fused, backward, differentiable], ids=["fused", "backward", "logprobs"])
def test_no_tensor_with_a_vocabulary_dimension_has_more_rows_than_a_chunk(
    compute: Gradients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 8 * VOCAB_SIZE * 8)
    case = Case(SHAPES["everything"], rows=200)
    with OpRecorder() as recorder:
        compute(case)
        case.head.score(case.hidden, case.targets, case.temperature, entropy=True, top_k=5)
    assert recorder.largest == 8 * VOCAB_SIZE


def test_dropped_rows_cost_nothing_in_the_backward() -> None:
    case = Case({}, rows=40)
    case.logprob_grad[:] = 0.0
    case.logprob_grad[[3, 17, 18, 30]] = 1.0
    per_row = VOCAB_SIZE * WIDTH
    with OpRecorder() as recorder:
        backward(case)
    assert recorder.multiplications() == 4 * 3 * per_row
    with OpRecorder() as recorder:
        fused(case)
    assert recorder.multiplications() == (40 + 4 * 2) * per_row
    case.logprob_grad[:] = 0.0
    with OpRecorder() as recorder:
        backward(case)
    assert recorder.multiplications() == 0
    with OpRecorder() as recorder:
        fused(case)
    assert recorder.multiplications() == 40 * per_row


def test_a_pass_with_gradients_is_three_matrix_products() -> None:
    case = Case(SHAPES["everything"])
    case.logprob_grad[:] = 1.0
    with OpRecorder() as recorder:
        fused(case)
    assert len(recorder.products) == 3


def test_temperatures_may_have_a_wider_dtype_than_the_weights() -> None:
    case = Case({}, dtype=torch.float32)
    wide = logprobs(case.head, case.hidden, case.targets, case.temperature.double())
    close(wide, logprobs(case.head, case.hidden, case.targets, case.temperature), 1e-6)
    gradients = torch.autograd.grad((wide * case.logprob_grad).sum(), case.leaves)
    for actual, expected in zip(gradients, case.naive_gradients(), strict=True):
        close(actual, expected, 1e-4)
