"""Chunked log-probabilities against a float64 truth, and the policy loss against its formula."""

from __future__ import annotations

import pytest
import torch

from torpor.rl.losses import policy_terms, sequence_weights, token_statistics, value_terms

NUM_TOKENS, WIDTH, VOCABULARY = 37, 16, 211
FP32_SLACK = 2e-6
"""Nats; what the chunked way may err more than the plain fp32 way."""


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
    target = torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)
    grad = torch.randn(NUM_TOKENS, generator=generator)
    return hidden, weight, target, grad


def _plain(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = ((hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def _with_grads(way, hidden, weight, target, grad, **options):  # type: ignore[no-untyped-def]
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_prob, entropy = way(hidden, weight, target, **options)
    log_prob.backward(grad.to(log_prob.dtype))
    return [t.detach().double() for t in (log_prob, entropy, hidden.grad, weight.grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 64])
def test_errs_no_more_than_the_plain_way(dtype: torch.dtype, chunk_tokens: int) -> None:
    hidden, weight, target, grad = _inputs(dtype)
    truth = _with_grads(_plain, hidden.double(), weight.double(), target, grad, temperature=0.7)
    plain = _with_grads(_plain, hidden, weight, target, grad, temperature=0.7)
    chunked = _with_grads(token_statistics, hidden, weight, target, grad, temperature=0.7, chunk_tokens=chunk_tokens)
    for name, exact, reference, ours in zip(
        ("log_prob", "entropy", "grad_hidden", "grad_weight"), truth, plain, chunked, strict=True
    ):
        scale = exact.abs().max()
        reference_error = (reference - exact).abs().max() / scale
        assert (ours - exact).abs().max() / scale <= 1.1 * reference_error + FP32_SLACK, name


def test_gradients_of_a_double_model_are_exact() -> None:
    hidden, weight, target, _ = _inputs(torch.float64)
    hidden, weight = hidden[:5].requires_grad_(), weight[:, :].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: token_statistics(h, w, target[:5], temperature=1.3, chunk_tokens=2)[0], (hidden, weight)
    )


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, target, grad = _inputs(torch.float32)
    hidden.requires_grad_()
    token_statistics(hidden, weight, target)[0].backward(grad)
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_full_vocabulary_tensor_of_the_batch_is_made() -> None:
    hidden, weight, target, grad = _inputs(torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[1:] == (VOCABULARY,) and len(result) != WIDTH:
                largest = max(largest, result.numel())
            return result

    hidden.requires_grad_()
    with Watch():
        token_statistics(hidden, weight, target, chunk_tokens=4)[0].backward(grad)
    assert largest == 4 * VOCABULARY


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("token", [1 / 6, 1 / 6]),
        ("sequence", [1 / (2 * 2), 1 / (2 * 4)]),
        ("constant", [1 / (2 * 10), 1 / (2 * 10)]),
    ],
)
def test_sequence_weights(normalization, expected) -> None:  # type: ignore[no-untyped-def]
    assert sequence_weights([2, 4], normalization, max_tokens=10) == pytest.approx(expected)


def test_the_policy_loss_follows_its_formula() -> None:
    log_prob = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.5, -0.5, -1.5])
    advantage = torch.tensor([2.0, 1.0, -1.0, -1.0])
    terms = policy_terms(log_prob, old, advantage, clip_low=0.2, clip_high=0.3)
    e = torch.tensor(0.5).exp().item()
    assert terms.loss_T.tolist() == pytest.approx([-2.0, -1.3, 0.8, e])
    assert terms.clipped_T.tolist() == [0.0, 1.0, 1.0, 0.0]
    terms.loss_T.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0, e])


def test_k3_is_never_negative_and_pulls_towards_the_reference() -> None:
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-2.0, -1.0])
    terms = policy_terms(
        log_prob,
        log_prob.detach(),
        torch.zeros(2),
        clip_low=0.2,
        clip_high=0.2,
        reference_log_prob_T=reference,
        kl_coefficient=0.5,
    )
    assert (terms.kl_T > 0).all()
    terms.loss_T.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad[0] > 0 > log_prob.grad[1]


def test_importance_weights_scale_the_surrogate_only() -> None:
    log_prob, advantage = torch.tensor([-1.0]), torch.tensor([3.0])
    options = {"clip_low": 0.2, "clip_high": 0.2}
    plain = policy_terms(log_prob, log_prob, advantage, **options)
    weighted = policy_terms(log_prob, log_prob, advantage, importance_T=torch.tensor([0.5]), **options)
    assert weighted.loss_T.item() == pytest.approx(0.5 * plain.loss_T.item())


def test_the_value_loss_follows_its_formula() -> None:
    """Free, held while still too far off (no gradient), held on the other side (the larger loss wins), and inside."""
    value = torch.tensor([0.5, 0.9, 0.9, 0.1], requires_grad=True)
    old = torch.tensor([0.5, 0.5, 0.5, 0.0])
    returns = torch.tensor([1.0, 1.5, 0.2, 0.4])
    terms = value_terms(value, old, returns, clip=0.2)
    assert terms.loss_T.tolist() == pytest.approx([0.5 * 0.25, 0.5 * 0.64, 0.5 * 0.49, 0.5 * 0.09])
    assert terms.clipped_T.tolist() == [0.0, 1.0, 0.0, 0.0]
    terms.loss_T.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == pytest.approx([-0.5, 0.0, 0.7, -0.3])


def test_without_a_clip_the_value_loss_is_half_the_square() -> None:
    terms = value_terms(torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([1.0]), clip=None)
    assert (terms.loss_T.item(), terms.clipped_T.item()) == (2.0, 0.0)
