"""The actor: learning in the right direction, exact accumulation, versions, and its states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_actors import VOCABULARY, batch_for, make_actor, make_rollouts, model_of
from small_jobs import assert_same_tensors

from torpor.errors import StateError, UsageError
from torpor.kinds import Fate
from torpor.ledger import Ledger
from torpor.rl.actor import REFERENCE, Actor
from torpor.rl.batch import make_batch, microbatches
from torpor.rl.config import AlgorithmConfig, OptimizerConfig
from torpor.rl.models import tiny_model
from torpor.rl.rollout.embedded import EmbeddedEngine
from torpor.rl.scoring import Scorer


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Actor]:
    with make_actor(tmp_path) as actor:
        yield actor


def test_good_answers_become_likelier_and_bad_ones_less_likely(actor: Actor) -> None:
    batch = batch_for(actor)
    before = [log_prob_T for log_prob_T, _ in Scorer(model_of(actor), 1.0, 64)([g.tokens for g in batch.groups])]
    metrics = actor.train(batch).values()
    after = [log_prob_T for log_prob_T, _ in Scorer(model_of(actor), 1.0, 64)([g.tokens for g in batch.groups])]
    gain = sum(
        (group.advantage_T() * (b - a)).sum().item() for group, a, b in zip(batch.groups, before, after, strict=True)
    )
    assert gain > 0.01
    assert metrics["rollout/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/tokens"] == 20
    assert 0 < metrics["policy/entropy"] < torch.tensor(float(VOCABULARY)).log()


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_accumulation_is_exact(tmp_path: Path, normalization: Any) -> None:
    algorithm = AlgorithmConfig(length_normalization=normalization)
    losses, weights = [], []
    for microbatch_tokens in (1, 2048):
        with make_actor(tmp_path, microbatch_tokens=microbatch_tokens, algorithm=algorithm) as actor:
            losses.append(actor.train(batch_for(actor)).values()["policy/loss"])
            weights.append({name: p.detach().clone() for name, p in model_of(actor).named_parameters()})
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-7)


def test_the_first_update_is_the_plain_policy_gradient(actor: Actor) -> None:
    """With ratio 1 nothing is clipped: the gradient is that of -mean(A * log p), computed here without packing."""
    batch = batch_for(actor)
    rollouts = make_rollouts(model_of(actor))
    advantages = [answer[0] for group in batch.groups for answer in group.advantages]
    total = sum(len(r.token_ids) for r in rollouts)
    loss = torch.zeros(())
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
        logits = model_of(actor)(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])
        loss = loss - advantage * log_probs.sum() / total
    expected = torch.autograd.grad(loss, list(model_of(actor).parameters()))
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in expected]))
    before = [p.detach().clone() for p in model_of(actor).parameters()]
    metrics = actor.train(batch).values()
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    scale = 0.1 * min(1.0, 1.0 / norm.item())  # learning rate times clipping
    for old, grad, new in zip(before, expected, model_of(actor).parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old - scale * grad, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_no_number_steps_nothing(actor: Actor) -> None:
    batch = batch_for(actor)
    with torch.no_grad():
        model_of(actor).get_input_embeddings().weight[batch.groups[0].tokens.prompt_ids[0]] = torch.nan
    before = {name: p.detach().clone() for name, p in model_of(actor).named_parameters()}
    with pytest.raises(RuntimeError, match="gradient norm is nan; nothing was stepped"):
        actor.train(batch)
    for name, parameter in model_of(actor).named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_a_group_with_equal_rewards_counts_but_is_not_computed(tmp_path: Path) -> None:
    """Against the same batch whose idle group got rewards that differ by less than the loss can show."""
    weights = []
    for rewards in ((1, 0, 0, 1, 1, 1), (1, 0, 0, 1, 1, 1 - 1e-7)):
        with make_actor(tmp_path) as actor:
            metrics = actor.train(batch_for(actor, rewards, normalize_std=False)).values()
            weights.append({name: p.detach().clone() for name, p in model_of(actor).named_parameters()})
            assert metrics["policy/teaching_groups"] == (0.5 if rewards[-1] == 1 else 1.0)
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-5, atol=1e-7)


def test_a_batch_that_teaches_nothing_changes_nothing(actor: Actor) -> None:
    before = {name: p.detach().clone() for name, p in model_of(actor).named_parameters()}
    metrics = actor.train(batch_for(actor, (1,) * 6)).values()
    assert_same_tensors(before, dict(model_of(actor).named_parameters()))
    assert (metrics["policy/loss"], metrics["train/tokens"]) == (0.0, 0)
    assert (actor.weight_version, actor.num_updates) == (1, 1)


def test_a_reference_pulls_back_and_is_clean_in_the_second_sleep(tmp_path: Path) -> None:
    ledgers: list[Ledger] = []
    reference = tiny_model(VOCABULARY, hidden_size=32, seed=1)
    algorithm = AlgorithmConfig(kl_coefficient=1.0)
    with make_actor(tmp_path, snapshots={REFERENCE: reference}, algorithm=algorithm, on_ledger=ledgers.append) as actor:
        kls = []
        for version in range(3):
            batch = batch_for(actor, rewards=(0.0,) * 6, version=version)
            kls.append(actor.train(batch).values()["policy/kl_reference"])
            actor.sleep()
    assert kls[0] > kls[1] > kls[2] > 0
    sleeps = [ledger for ledger in ledgers if ledger.kind == "sleep"]
    fates = [{row.fate for row in ledger.rows if row.component == "reference"} for ledger in sleeps]
    assert Fate.MOVED in fates[0]
    assert Fate.MOVED not in fates[1]
    assert Fate.CLEAN in fates[1]


def test_sleep_and_wake_are_idempotent(tmp_path: Path) -> None:
    ledgers: list[Ledger] = []
    with make_actor(tmp_path, on_ledger=ledgers.append) as actor:
        actor.train(batch_for(actor))
        actor.sleep()
        actor.sleep()
        assert actor.is_asleep
        assert [bool(ledger.copied_bytes) for ledger in ledgers] == [True, False]
        actor.wake_up()
        actor.wake_up()
        assert not actor.is_asleep
        assert [ledger.kind for ledger in ledgers] == ["sleep", "sleep", "wake"]


@pytest.mark.parametrize("lazy_wake", [True, False])
def test_train_wakes_by_itself(tmp_path: Path, lazy_wake: bool) -> None:
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "lazy_wake": lazy_wake}
    states = []
    for sleeps in (False, True):
        with make_actor(tmp_path, **options) as actor:
            batches = [batch_for(actor, version=version) for version in range(2)]
            for batch in batches:
                actor.train(batch)
                if sleeps:
                    actor.sleep()
            actor.wake_up()
            states.append({name: t.clone() for name, t in actor.sleeper.state_dict().items()})
    assert_same_tensors(*states)


def test_a_lazy_wake_is_accounted_for_in_full(tmp_path: Path) -> None:
    ledgers: list[Ledger] = []
    options = {"optimizer": OptimizerConfig(learning_rate=1e-3), "on_ledger": ledgers.append}
    with make_actor(tmp_path, **options) as actor:
        batches = [batch_for(actor, version=version) for version in range(2)]
        actor.train(batches[0])
        actor.sleep()
        actor.train(batches[1])
    slept, *woken = ledgers
    assert [ledger.kind for ledger in woken] == ["wake", "wake"]
    assert slept.copied_bytes == sum(ledger.copied_bytes for ledger in woken) > 0
    assert {row.component for row in woken[1].rows} == {"optimizer"}


def test_a_penalty_without_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"kl_coefficient is 0\.5"):
        make_actor(tmp_path, algorithm=AlgorithmConfig(kl_coefficient=0.5))


def test_without_offload_nothing_sleeps(tmp_path: Path) -> None:
    with make_actor(tmp_path, offload=False) as actor:
        actor.sleep()
        assert not actor.is_asleep
        assert not actor.sleeper.is_asleep


def test_weights_reach_the_engine_while_the_actor_sleeps(actor: Actor) -> None:
    actor.train(batch_for(actor))
    expected = {name: p.detach().clone() for name, p in model_of(actor).named_parameters()}
    engine_model = tiny_model(VOCABULARY, hidden_size=32, seed=5)
    with EmbeddedEngine(engine_model, kv_cache_bytes=2**20, weight_version=None) as engine:
        engine.sleep()
        actor.sleep()
        engine.wake(["weights"])
        actor.update_weights(engine)
        assert actor.is_asleep
        assert engine.weight_version == actor.weight_version == 1
        assert_same_tensors(expected, dict(engine_model.named_parameters()))


def test_an_engine_that_keeps_its_old_version_is_refused(actor: Actor) -> None:
    class Forgetful(EmbeddedEngine):
        weight_version = 3  # type: ignore[assignment]

    with (
        Forgetful(tiny_model(VOCABULARY, hidden_size=32), kv_cache_bytes=2**20) as engine,
        pytest.raises(StateError, match="version 3 after an update to 0"),
    ):
        actor.update_weights(engine)


def test_a_batch_of_other_weights_is_refused(actor: Actor) -> None:
    stale = batch_for(actor)
    actor.train(stale)
    with pytest.raises(StateError, match=r"version 0, the actor has 1"):
        actor.train(stale)


def test_rollouts_of_two_versions_make_no_batch(actor: Actor) -> None:
    mixed = [*make_rollouts(model_of(actor), 0)[:3], *make_rollouts(model_of(actor), 1)[3:]]
    with pytest.raises(UsageError, match=r"versions \[0, 1\]"):
        make_batch(mixed, [0.0] * 6, 3, normalize_std=True)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([3, 3, 3], 6, [(0, 2), (2, 3)]),
        ([3, 4, 3], 6, [(0, 1), (1, 2), (2, 3)]),
        ([9, 1, 1], 6, [(0, 1), (1, 3)]),
        ([1, 5, 1], 9, [(0, 1), (1, 2), (2, 3)]),
        ([], 6, []),
    ],
)
def test_microbatches_count_padding(sizes: list[int], limit: int, expected: list[tuple[int, int]]) -> None:
    assert [(run.start, run.stop) for run in microbatches(sizes, limit)] == expected
