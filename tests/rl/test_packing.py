"""Packing: the same log-probabilities and gradients as one plain forward for each completion."""

from __future__ import annotations

import pytest
import torch

from torpor.errors import UnsupportedError, UsageError
from torpor.rl.models import tiny_model
from torpor.rl.packing import Group, common_prefix_length, pack, predicting_hidden

VOCABULARY = 20
GROUPS = [
    Group([5, 6, 7, 8], [[9, 2], [8], [4, 4, 4, 2]]),
    Group([3], [[11, 12, 13], [2]]),
    Group([1, 2, 3, 4, 5, 6, 7], [[7, 7]]),
]
START = [5, 6, 7, 8, 9, 10, 11, 12]
SHARED_GROUPS = [
    Group([*START, 3], [[9, 2], [8]]),
    Group([*START, 4, 5], [[4, 4, 2]]),
    Group(START, [[6, 2], [7]]),
]
"""Prompts with a common start; the last one is nothing else."""
TOLERANCE = 1e-5
"""Nats and gradient units, fp32: masked and plain attention sum in a different order."""


def _model() -> torch.nn.Module:
    model = tiny_model(VOCABULARY, 32, 3, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)  # far from uniform, so that a wrong mask shows
    return model


def _packed_logprobs(model: torch.nn.Module, groups: list[Group]) -> torch.Tensor:
    batch = pack(groups)
    logits = predicting_hidden(model, batch) @ model.get_output_embeddings().weight.T
    return logits.log_softmax(-1).gather(-1, batch.target_N[:, None])[:, 0]


def _plain_logprobs(model: torch.nn.Module, groups: list[Group]) -> torch.Tensor:
    parts = []
    for group in groups:
        for completion in group.completions:
            token_ids = torch.tensor([[*group.prompt_ids, *completion]])
            table = model(input_ids=token_ids[:, :-1]).logits[0].log_softmax(-1)[len(group.prompt_ids) - 1 :]
            parts.append(table.gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("groups", [GROUPS, SHARED_GROUPS], ids=["rows", "one row"])
def test_logprobs_and_gradients_equal_unpacked(groups: list[Group]) -> None:
    model = _model()
    weights = torch.randn(
        sum(len(c) for g in groups for c in g.completions), generator=torch.Generator().manual_seed(0)
    )
    results = []
    for logprobs in (_packed_logprobs, _plain_logprobs):
        model.zero_grad()
        values = logprobs(model, groups)
        (values * weights).sum().backward()
        results.append((values.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (packed, packed_grads), (plain, plain_grads) = results
    torch.testing.assert_close(packed, plain, atol=TOLERANCE, rtol=0)
    for name, grad in plain_grads.items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(packed_grads[name] / scale, grad / scale, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("groups", [GROUPS, SHARED_GROUPS], ids=["rows", "one row"])
def test_a_group_does_not_depend_on_its_neighbours(groups: list[Group]) -> None:
    model = _model()
    with torch.no_grad():
        alone = torch.cat([_packed_logprobs(model, [group]) for group in groups])
        torch.testing.assert_close(_packed_logprobs(model, groups), alone, atol=TOLERANCE, rtol=0)


def test_a_common_start_is_computed_once() -> None:
    batch = pack(SHARED_GROUPS)
    assert batch.token_ids_BT.tolist() == [[*START, 3, 9, 4, 5, 4, 4, 6]]
    assert batch.position_ids_BT.tolist() == [[*range(8), 8, 9, 8, 9, 10, 11, 8]]
    assert batch.predictor_N.tolist() == [8, 9, 8, 11, 12, 13, 7, 14, 7]


def test_a_short_common_start_is_not_worth_a_long_row() -> None:
    groups = [Group([5, 6, first, 9, 9], [[1, 2]]) for first in (3, 4)]
    assert pack(groups).token_ids_BT.shape == (2, 6)


@pytest.mark.parametrize(
    ("sequences", "length"),
    [([[1, 2, 3]], 3), ([[1, 2], [1, 2, 3], [1, 2]], 2), ([[1, 2], [2, 2]], 0), ([[1, 3, 9], [1, 2, 9], [1, 3]], 1)],
)
def test_common_prefix_length(sequences: list[list[int]], length: int) -> None:
    assert common_prefix_length(sequences) == length


def test_layout() -> None:
    batch = pack(GROUPS[:2])
    assert batch.token_ids_BT.tolist() == [[5, 6, 7, 8, 9, 4, 4, 4], [3, 11, 12, 0, 0, 0, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert batch.predictor_N.tolist() == [3, 4, 3, 3, 5, 6, 7, 8, 9, 10, 8]
    assert batch.target_N.tolist() == [9, 2, 8, 4, 4, 4, 2, 11, 12, 13, 2]
    assert batch.lengths == (2, 1, 4, 3, 1)
    assert [part.tolist() for part in batch.split(batch.target_N)] == [[9, 2], [8], [4, 4, 4, 2], [11, 12, 13], [2]]
    assert batch.num_tokens == 16
    assert [group.num_tokens for group in GROUPS] == [8, 3, 8]


def test_every_query_sees_something() -> None:
    for groups in (GROUPS, SHARED_GROUPS):
        assert pack(groups).mask_B1TT.any(-1).all()


@pytest.mark.parametrize("group", [Group([], [[1]]), Group([1], []), Group([1], [[1], []])])
def test_empty_parts_are_refused(group: Group) -> None:
    with pytest.raises(UsageError, match="group 1"):
        pack([GROUPS[0], group])
    with pytest.raises(UsageError, match="no group"):
        pack([])


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = _model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="flash_attention_2"):
        predicting_hidden(model, pack(GROUPS))
