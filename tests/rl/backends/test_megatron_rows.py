"""Answers as rows under a causal mask: what each hidden state predicts, and how rows are padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.errors import UsageError
from torpor.rl.backends.megatron_rows import lay_out
from torpor.rl.packing import Group
from torpor.rl.scoring import Scorer

CPU = torch.device("cpu")
GROUPS = [Group((5, 6, 7), ((1, 2), (3,))), Group((8,), ((4, 5, 6, 7),))]


def test_rows_hold_prompt_and_answer_without_its_last_token() -> None:
    rows = lay_out(GROUPS, CPU)
    assert rows.token_ids_BT.tolist() == [[5, 6, 7, 1], [5, 6, 7, 0], [8, 4, 5, 6]]
    assert rows.position_ids_BT.tolist() == [[0, 1, 2, 3]] * 3
    assert rows.target_N.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert rows.lengths == (3, 4)
    # [T * B]: place 2 and 3 of row 0, place 2 of row 1, places 0 to 3 of row 2
    assert rows.predictor_N.tolist() == [6, 9, 7, 2, 5, 8, 11]


@given(answers=st.integers(1, 9), multiple=st.sampled_from([1, 16, 32, 128]))
def test_the_tokens_of_a_microbatch_are_a_multiple(answers: int, multiple: int) -> None:
    rows = lay_out([Group((1, 2), [(3, 4, 5)] * answers)], CPU, multiple)
    assert rows.token_ids_BT.numel() % multiple == 0
    assert rows.token_ids_BT.shape[1] < 4 + multiple


def test_scores_are_those_of_a_prompt_shared_by_its_answers() -> None:
    from torpor.rl.losses import token_statistics
    from torpor.rl.models import tiny_model

    model = tiny_model(16, hidden_size=32, dtype=torch.float64)
    rows = lay_out(GROUPS, CPU, multiple=16)
    hidden_BTD = model.get_decoder()(input_ids=rows.token_ids_BT, use_cache=False).last_hidden_state
    hidden_ND = hidden_BTD.transpose(0, 1).flatten(0, 1)[rows.predictor_N]
    log_prob_N, entropy_N = token_statistics(hidden_ND, model.get_output_embeddings().weight, rows.target_N)
    expected = Scorer(model, 1.0, 256)(GROUPS)
    torch.testing.assert_close(log_prob_N, torch.cat([log_prob_T for log_prob_T, _ in expected]))
    torch.testing.assert_close(entropy_N, torch.cat([entropy_T for _, entropy_T in expected]))


@pytest.mark.parametrize("groups", [[], [Group((), ((1,),))], [Group((1,), ((),))]])
def test_an_empty_answer_is_refused(groups: list[Group]) -> None:
    with pytest.raises(UsageError, match="empty"):
        lay_out(groups, CPU)
