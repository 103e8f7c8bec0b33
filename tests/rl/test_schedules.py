"""Learning-rate schedules at the steps that matter."""

from __future__ import annotations

import pytest

from torpor.rl.schedules import learning_rate_factor


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.868198, 0.55, 0.231802, 0.1]),
    ],
)
def test_warms_up_and_decays(name, expected) -> None:  # type: ignore[no-untyped-def]
    factors = [learning_rate_factor(name, step, total_steps=7, warmup_steps=2, final_factor=0.1) for step in range(7)]
    assert factors == pytest.approx(expected, abs=1e-6)


def test_one_step_runs_at_the_peak() -> None:
    assert learning_rate_factor("cosine", 0, total_steps=1) == 1.0
