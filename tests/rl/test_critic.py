"""The critic: what it makes of answers, what it learns from them, and its states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_actors import VOCABULARY, make_actor, make_critic, make_rollouts, value_model_of
from small_jobs import assert_same_tensors

from torpor.errors import AsleepError
from torpor.ledger import Ledger
from torpor.rl.actor import REFERENCE
from torpor.rl.advantages import generalized_advantages
from torpor.rl.backends.base import World
from torpor.rl.backends.local import LocalCriticBackend
from torpor.rl.batch import Batch, group_rollouts
from torpor.rl.checkpoint import save_checkpoint
from torpor.rl.config import AlgorithmConfig, CriticConfig, OptimizerConfig
from torpor.rl.critic import Critic, standardize
from torpor.rl.models import ValueModel, tiny_model, value_model
from torpor.rl.packing import Group

REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 0.0)
ADAMW = CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-2))


@pytest.fixture
def critic(tmp_path: Path) -> Iterator[Critic]:
    with make_critic(tmp_path) as critic:
        yield critic


def batch_of(version: int = 0) -> Batch:
    return group_rollouts(make_rollouts(tiny_model(VOCABULARY, hidden_size=32), version), REWARDS, 3)


def plain_values(model: ValueModel, group: Group) -> list[torch.Tensor]:
    """Values of each answer without packing: one pass a sequence, at the positions that predict its tokens."""
    values = []
    for answer in group.completions:
        ids = torch.tensor([[*group.prompt_ids, *answer]])
        hidden = model.backbone(ids).last_hidden_state[0, len(group.prompt_ids) - 1 : -1]
        values.append((hidden @ model.head.weight.T + model.head.bias).squeeze(-1))
    return values


def awaken_head(critic: Critic) -> ValueModel:
    """A head that is not zero, so that values differ from token to token."""
    model = value_model_of(critic)
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-0.3, 0.3, model.head.weight.numel()).view_as(model.head.weight))
        model.head.bias.fill_(0.1)
    return model


def test_it_begins_with_the_policys_backbone_and_expects_nothing() -> None:
    policy = tiny_model(VOCABULARY, hidden_size=32)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model = value_model(policy)
    assert torch.equal(torch.rand(1), expected)
    theirs, ours = dict(policy.get_decoder().named_parameters()), dict(model.backbone.named_parameters())  # type: ignore[no-untyped-call]
    assert_same_tensors(theirs, ours)
    assert not {t.data_ptr() for t in theirs.values()} & {t.data_ptr() for t in ours.values()}
    assert not any(parameter.any() for parameter in model.head.parameters())


def test_a_critic_that_expects_nothing_passes_rewards_on(tmp_path: Path) -> None:
    whole = CriticConfig(gae_lambda=1.0, optimizer=OptimizerConfig())
    with make_critic(tmp_path, config=whole) as critic:
        appraisal = critic.appraise(batch_of())
    for group in appraisal.batch.groups:
        for reward, advantages in zip(group.rewards, group.advantages, strict=True):
            assert advantages == (reward,) * len(advantages)


def test_advantages_are_those_of_the_plain_values(critic: Critic) -> None:
    model = awaken_head(critic)
    appraisal = critic.appraise(batch_of())
    for group, judged in zip(appraisal.batch.groups, appraisal.judged, strict=True):
        values = [value_T.tolist() for value_T in plain_values(model, group.tokens)]
        expected = [
            generalized_advantages([0.0] * (len(answer) - 1) + [reward], answer, discount=1.0, gae_lambda=0.95)
            for reward, answer in zip(group.rewards, values, strict=True)
        ]
        assert [list(answer) for answer in group.advantages] == [pytest.approx(answer, abs=1e-5) for answer in expected]
        returns = [
            a + v
            for advantages, answer in zip(expected, values, strict=True)
            for a, v in zip(advantages, answer, strict=True)
        ]
        assert judged.return_T.tolist() == pytest.approx(returns, abs=1e-5)


def test_the_gap_to_the_reference_is_taken_off_each_token(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(advantages="gae", normalize_std=False, kl_coefficient=0.5, kl_in="reward")
    plain = CriticConfig(gae_lambda=0.0)  # with values of 0 an advantage is the token's own reward
    with make_critic(tmp_path, algorithm=algorithm, config=plain) as critic:
        batch = batch_of()
        gaps = [torch.arange(float(sum(group.lengths))) for group in batch.groups]
        appraisal = critic.appraise(batch, gaps)
    outcomes = [
        [0.0] * (length - 1) + [reward]
        for group in batch.groups
        for length, reward in zip(group.lengths, group.rewards, strict=True)
    ]
    expected = torch.tensor([r for answer in outcomes for r in answer]) - 0.5 * torch.cat(gaps)
    assert torch.cat([group.advantage_T() for group in appraisal.batch.groups]).tolist() == expected.tolist()


def test_normalized_advantages_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    with make_critic(tmp_path, algorithm=AlgorithmConfig(advantages="gae")) as critic:
        awaken_head(critic)
        appraisal = critic.appraise(batch_of())
    every = torch.cat([group.advantage_T() for group in appraisal.batch.groups])
    assert every.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert every.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)


def test_normalization_spans_the_ranks() -> None:
    class Pair(World):
        """Two ranks that hold the same values but for their sign."""

        def sum(self, values: list[float]) -> list[float]:  # type: ignore[override]
            return [0.0, 2 * values[1]] if len(values) == 2 else [2 * values[0]]

    (found,) = standardize([torch.tensor([3.0, 1.0])], Pair())
    assert found.tolist() == pytest.approx([3 / 5**0.5, 1 / 5**0.5])  # mean 0, deviation sqrt((9 + 1) / 2)


def test_the_update_is_the_gradient_of_the_clipped_square(tmp_path: Path) -> None:
    """Against autograd through unpacked sequences, with values from before the update that are partly out of reach."""
    config = CriticConfig(
        value_clip=0.05, optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, betas=(0, 0), max_grad_norm=None)
    )
    with make_critic(tmp_path, config=config) as critic:
        model = awaken_head(critic)
        appraisal = critic.appraise(batch_of())
        with torch.no_grad():
            model.head.bias += 0.1  # the critic has moved since it judged
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss, count = torch.zeros(()), 0
        for item in appraisal.judged:
            value_T = torch.cat(plain_values(model, item.group.tokens))
            held_T = item.value_T + (value_T - item.value_T).clamp(-0.05, 0.05)
            loss = loss + 0.5 * torch.maximum((value_T - item.return_T) ** 2, (held_T - item.return_T) ** 2).sum()
            count += len(value_T)
        expected = torch.autograd.grad(loss / count, list(model.parameters()))
        metrics = critic.train(appraisal).values()
        assert metrics["critic/loss"] == pytest.approx(loss.item() / count, rel=1e-5)
        assert 0 < metrics["critic/clip_fraction"] < 1
        for (name, parameter), grad in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), before[name] - 0.1 * grad, rtol=1e-4, atol=1e-7)


def test_accumulation_is_exact(tmp_path: Path) -> None:
    weights = []
    for microbatch_tokens in (1, 2048):
        with make_critic(tmp_path, microbatch_tokens=microbatch_tokens) as critic:
            model = awaken_head(critic)
            critic.train(critic.appraise(batch_of()))
            weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-7)


def test_values_come_to_foretell_the_returns(tmp_path: Path) -> None:
    config = ADAMW.model_copy(update={"gae_lambda": 1.0, "epochs_per_rollout": 4, "updates_per_rollout": 2})
    with make_critic(tmp_path, config=config) as critic:
        metrics = [critic.train(critic.appraise(batch_of())).values() for _ in range(8)]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0)
    assert metrics[-1]["critic/explained_variance"] > 0.5
    assert metrics[-1]["critic/loss"] < 0.5 * metrics[0]["critic/loss"]
    assert (critic.num_updates, critic.weight_version) == (64, 8)


@pytest.mark.parametrize("lazy_wake", [True, False])
def test_sleep_changes_no_bit(tmp_path: Path, lazy_wake: bool) -> None:
    states = []
    for sleeps in (False, True):
        with make_critic(tmp_path, config=ADAMW, lazy_wake=lazy_wake) as critic:
            for version in range(3):
                appraisal = critic.appraise(batch_of(version))
                if sleeps:
                    critic.sleep()
                critic.train(appraisal)
                if sleeps:
                    critic.sleep()
            critic.wake_up()
            states.append({name: t.clone() for name, t in critic.sleeper.state_dict().items()})
    assert_same_tensors(*states)


def test_a_sleeping_critic_does_not_compute(critic: Critic) -> None:
    critic.sleep()
    with pytest.raises(AsleepError):
        list(critic.backend.score([[group.tokens for group in batch_of().groups]]))


def test_a_released_critic_holds_nothing(tmp_path: Path) -> None:
    with make_critic(tmp_path, config=ADAMW) as critic:
        model = value_model_of(critic)
        critic.train(critic.appraise(batch_of()))
        critic.sleep()
        critic.release()
    assert not sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    assert isinstance(critic.backend, LocalCriticBackend)
    assert not critic.backend.optimizers["adamw"].state
    assert not list(tmp_path.glob("**/*.torpor"))


@pytest.mark.parametrize("asleep", [True, False])
def test_saves_and_loads_to_the_bit(tmp_path: Path, asleep: bool) -> None:
    with make_critic(tmp_path / "a", config=ADAMW) as critic:
        critic.train(critic.appraise(batch_of()))
        if asleep:
            critic.sleep()
        checkpoint = save_checkpoint(tmp_path, 1, critic.save, keep=1)
        final = critic.train(critic.appraise(batch_of())).values()
        expected = {name: p.detach().clone() for name, p in value_model_of(critic).named_parameters()}
    with make_critic(tmp_path / "b", seed=9, config=ADAMW) as other:
        other.load(checkpoint)
        assert other.train(other.appraise(batch_of())).values() == final
        assert_same_tensors(expected, dict(value_model_of(other).named_parameters()))


def test_only_the_reference_wakes_for_the_penalty_and_its_sleep_is_free(tmp_path: Path) -> None:
    ledgers: list[Ledger] = []
    algorithm = AlgorithmConfig(advantages="gae", kl_coefficient=0.5, kl_in="reward")
    reference = {REFERENCE: tiny_model(VOCABULARY, hidden_size=32)}
    with make_actor(tmp_path, snapshots=reference, algorithm=algorithm, on_ledger=ledgers.append) as actor:
        batch = batch_of()
        actor.sleep()
        ledgers.clear()
        gaps = actor.reference_gaps(batch)
        assert actor.is_asleep
        assert actor.sleeper.components()["params"] != "awake"
        assert [{row.component for row in ledger.rows} for ledger in ledgers] == [{REFERENCE}, {REFERENCE}]
        actor.wake_up()  # learning has no use for it
        assert (actor.sleeper.components()["params"], actor.sleeper.components()[REFERENCE]) == ("awake", "asleep")
    assert [bool(ledger.copied_bytes) for ledger in ledgers[:2]] == [True, False]
    # The rollouts were sampled from the same weights as the reference has.
    assert torch.cat(gaps).abs().max().item() < 1e-5
    assert [len(gap_T) for gap_T in gaps] == [10, 10]
