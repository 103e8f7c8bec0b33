"""What every rollout engine must do.

Inherit `EngineContract` in the test of a new engine and say how to make one and what a plain forward pass of
its model gives. The engine is small: a vocabulary of at least 16 tokens, prompts of up to 8, answers of up to 8.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from torpor.errors import AsleepError, ClosedError, StateError, UsageError
from torpor.rl.rollout.base import FinishReason, Rollout, RolloutEngine, SamplingParams, Tag, WeightStreamError

Weights = dict[str, torch.Tensor]

PROMPTS = [[5, 6, 7], [3], [9, 8, 7, 6, 5, 4, 3], [3, 9]]
"""Of different lengths, so that padding and positions matter."""
SAMPLING = SamplingParams(num_samples=3, max_new_tokens=7, seed=11)


class EngineContract(ABC):
    """The promises of `torpor.rl.rollout.base.RolloutEngine`."""

    logprob_tolerance = 1e-5
    """Nats between an engine's log-probability and the reference."""

    @abstractmethod
    def make_engine(self) -> RolloutEngine:
        """A new engine, awake, with complete weights of version 0."""

    @abstractmethod
    def make_weights(self, seed: int) -> Weights:
        """A complete set of weights for such an engine, the same for the same seed."""

    @abstractmethod
    def reference_logprobs(self, weights: Weights, token_ids: Sequence[int], temperature: float) -> torch.Tensor:
        """fp64 `[len(token_ids), vocabulary]`: after each token, the log-probabilities of the next."""

    @pytest.fixture
    def engine(self) -> Iterator[RolloutEngine]:
        engine = self.make_engine()
        yield engine
        engine.close()

    # --- generation ----------------------------------------------------------------------------------

    def test_a_group_for_each_prompt_in_order(self, engine: RolloutEngine) -> None:
        rollouts = engine.generate(PROMPTS, SAMPLING)
        places = [(rollout.prompt_index, rollout.sample_index) for rollout in rollouts]
        assert places == list(itertools.product(range(len(PROMPTS)), range(SAMPLING.num_samples)))
        for rollout in rollouts:
            assert list(rollout.prompt_ids) == PROMPTS[rollout.prompt_index]
            assert len(rollout.logprobs) == len(rollout.token_ids) == SAMPLING.max_new_tokens
            assert rollout.finish_reason is FinishReason.LENGTH
            assert rollout.weight_version == 0

    def test_no_prompts_no_rollouts(self, engine: RolloutEngine) -> None:
        assert engine.generate([], SAMPLING) == []

    def test_a_stop_token_ends_a_completion_and_belongs_to_it(self, engine: RolloutEngine) -> None:
        free = engine.generate(PROMPTS, SAMPLING)
        stops = (free[0].token_ids[2], free[-1].token_ids[4])
        for before, after in zip(free, engine.generate(PROMPTS, replace(SAMPLING, stop_token_ids=stops)), strict=True):
            places = [place for place, token in enumerate(before.token_ids) if token in stops]
            assert after.token_ids == before.token_ids[: places[0] + 1 if places else None]
            assert after.finish_reason is (FinishReason.STOP if places else FinishReason.LENGTH)

    @pytest.mark.parametrize("temperature", [1.0, 0.5])
    def test_logprobs_are_those_of_a_plain_forward(self, engine: RolloutEngine, temperature: float) -> None:
        """With rows that leave early, which is when positions and masks go wrong."""
        weights = self.make_weights(1)
        engine.load_weights(weights.items(), version=1)
        sampling = replace(SAMPLING, temperature=temperature, num_samples=6, stop_token_ids=(2, 3, 4, 5))
        rollouts = engine.generate(PROMPTS, sampling)
        assert len({len(rollout.token_ids) for rollout in rollouts}) > 2, "all ended together: choose another seed"
        for rollout in rollouts:
            torch.testing.assert_close(
                torch.tensor(rollout.logprobs, dtype=torch.float64),
                self._expected(weights, rollout, temperature),
                atol=self.logprob_tolerance,
                rtol=0,
            )

    def test_greedy_takes_the_most_probable_token(self, engine: RolloutEngine) -> None:
        weights = self.make_weights(1)
        engine.load_weights(weights.items(), version=1)
        for rollout in engine.generate(PROMPTS, replace(SAMPLING, temperature=0, num_samples=1)):
            table = self._table(weights, rollout, temperature=1.0)
            best = table.max(-1).values
            got = torch.tensor(rollout.logprobs, dtype=torch.float64)
            torch.testing.assert_close(got, best, atol=self.logprob_tolerance, rtol=0)

    def test_same_seed_same_bits(self, engine: RolloutEngine) -> None:
        first = engine.generate(PROMPTS, SAMPLING)
        assert engine.generate(PROMPTS, replace(SAMPLING, seed=12)) != first
        assert engine.generate(PROMPTS, SAMPLING) == first

    def test_says_what_it_did(self, engine: RolloutEngine) -> None:
        assert engine.last_generation is None
        rollouts = engine.generate(PROMPTS, SAMPLING)
        stats = engine.last_generation
        assert stats is not None
        assert (stats.num_prompts, stats.num_completions) == (len(PROMPTS), len(rollouts))
        assert stats.num_generated_tokens == sum(len(rollout.token_ids) for rollout in rollouts)
        assert stats.total_s >= stats.prefill_s + stats.decode_s > 0
        assert stats.tokens_per_s == pytest.approx(stats.num_generated_tokens / stats.total_s)

    @pytest.mark.parametrize("prompts", [[[5], []], [[5, 10**9]], [[-1]]])
    def test_refuses_prompts_that_cannot_be(self, engine: RolloutEngine, prompts: list[list[int]]) -> None:
        with pytest.raises(UsageError, match="prompt"):
            engine.generate(prompts, SAMPLING)

    # --- sleep and wake ------------------------------------------------------------------------------

    @pytest.mark.parametrize("tag", list(Tag))
    def test_sleep_frees_a_tag_and_wake_takes_it_again(self, engine: RolloutEngine, tag: Tag) -> None:
        before = engine.held_bytes()
        assert min(before.values()) > 0
        slept = engine.sleep([tag])
        assert (slept.tags, slept.freed_bytes, slept.taken_bytes) == ((tag,), before[tag], 0)
        assert engine.held_bytes() == {**before, tag: 0} == slept.held_bytes
        assert engine.asleep == {tag}
        woken = engine.wake([tag])
        assert (woken.tags, woken.freed_bytes, woken.taken_bytes) == ((tag,), 0, before[tag])
        assert engine.held_bytes() == before
        assert engine.asleep == frozenset()

    @pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
    def test_twice_is_a_no_op(self, engine: RolloutEngine, tags: list[str] | None) -> None:
        assert engine.wake(tags).tags == ()
        assert engine.weight_version == 0, "waking what is awake must not touch the weights"
        for change in (engine.sleep, engine.wake):
            assert change(tags).tags
            again = change(tags)
            assert (again.tags, again.freed_bytes, again.taken_bytes) == ((), 0, 0)

    @pytest.mark.parametrize("order", list(itertools.permutations(Tag)))
    def test_tags_sleep_and_wake_in_any_order(self, engine: RolloutEngine, order: tuple[Tag, ...]) -> None:
        weights = self.make_weights(1)
        engine.load_weights(weights.items(), version=1)
        before = engine.generate(PROMPTS, SAMPLING)
        for tag in order:
            engine.sleep([tag])
        for tag in order:
            engine.wake([tag])
        engine.load_weights(weights.items(), version=1)
        assert engine.generate(PROMPTS, SAMPLING) == before

    def test_a_slept_cache_does_not_cost_the_weights(self, engine: RolloutEngine) -> None:
        before = engine.generate(PROMPTS, SAMPLING)
        engine.sleep([Tag.KV_CACHE])
        engine.wake([Tag.KV_CACHE])
        assert engine.generate(PROMPTS, SAMPLING) == before

    @pytest.mark.parametrize("tag", list(Tag))
    def test_generating_asleep_names_the_tag(self, engine: RolloutEngine, tag: Tag) -> None:
        engine.sleep([tag])
        with pytest.raises(AsleepError, match=f"'{tag}' is asleep") as caught:
            engine.generate(PROMPTS, SAMPLING)
        assert caught.value.component == tag

    def test_an_unknown_tag_is_named(self, engine: RolloutEngine) -> None:
        with pytest.raises(UsageError, match="unknown tag 'weight'"):
            engine.sleep(["weight"])
        assert engine.asleep == frozenset()

    # --- weights ---------------------------------------------------------------------------------------

    def test_loaded_weights_are_used_and_their_version_is_told(self, engine: RolloutEngine) -> None:
        before = engine.generate(PROMPTS, SAMPLING)
        weights = self.make_weights(1)
        report = engine.load_weights(weights.items(), version=7)
        assert (report.version, report.num_tensors) == (7, len(weights))
        assert report.loaded_bytes == sum(weight.nbytes for weight in weights.values())
        after = engine.generate(PROMPTS, SAMPLING)
        assert {rollout.weight_version for rollout in after} == {7} == {engine.weight_version}
        assert [rollout.token_ids for rollout in after] != [rollout.token_ids for rollout in before]

    def test_loading_holds_one_tensor_of_the_stream_at_a_time(self, engine: RolloutEngine) -> None:
        handed_out: list[weakref.ref[torch.Tensor]] = []

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name in engine.weight_specs():
                alive = sum(ref() is not None for ref in handed_out)
                assert alive <= 1, f"{alive} tensors are still held when {name} is asked for"
                tensor = self.make_weights(1)[name].clone()
                handed_out.append(weakref.ref(tensor))
                yield name, tensor
                del tensor

        held = engine.held_bytes()
        engine.load_weights(stream(), version=1)
        assert engine.held_bytes() == held

    def test_woken_weights_must_be_loaded(self, engine: RolloutEngine) -> None:
        engine.sleep()
        engine.wake()
        assert engine.weight_version is None
        with pytest.raises(StateError, match="load_weights"):
            engine.generate(PROMPTS, SAMPLING)

    def test_loading_into_sleeping_weights_is_refused(self, engine: RolloutEngine) -> None:
        engine.sleep([Tag.WEIGHTS])
        with pytest.raises(AsleepError) as caught:
            engine.load_weights(self.make_weights(1).items(), version=1)
        assert caught.value.component == Tag.WEIGHTS

    def test_loading_needs_no_cache(self, engine: RolloutEngine) -> None:
        engine.sleep()
        engine.wake([Tag.WEIGHTS])
        engine.load_weights(self.make_weights(1).items(), version=1)
        engine.wake([Tag.KV_CACHE])
        assert engine.generate(PROMPTS, SAMPLING)[0].weight_version == 1

    @pytest.mark.parametrize("fault", ["missing", "unexpected", "repeated", "shape", "dtype"])
    def test_a_bad_stream_is_refused_by_name(self, engine: RolloutEngine, fault: str) -> None:
        weights = self.make_weights(1)
        name = list(weights)[1]
        stream, attribute = _spoil(weights, name, fault)
        with pytest.raises(WeightStreamError) as caught:
            engine.load_weights(stream, version=1)
        culprit = "nonsense.weight" if fault == "unexpected" else name
        assert culprit in str(caught.value)
        assert list(getattr(caught.value, attribute)) == [culprit]
        self._must_be_loaded_anew(engine)

    def test_an_error_of_the_stream_comes_through(self, engine: RolloutEngine) -> None:
        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield next(iter(self.make_weights(1).items()))
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="the disk is gone"):
            engine.load_weights(stream(), version=1)
        self._must_be_loaded_anew(engine)

    # --- health and close --------------------------------------------------------------------------------

    def test_health_in_every_state(self, engine: RolloutEngine) -> None:
        assert engine.health().can_generate
        engine.sleep([Tag.WEIGHTS])
        health = engine.health()
        assert (health.asleep, health.weight_version, health.held_bytes[Tag.WEIGHTS]) == ({Tag.WEIGHTS}, None, 0)
        assert "weights" in str(health.cannot_generate_because)
        engine.wake()
        assert "load_weights" in str(engine.health().cannot_generate_because)
        engine.close()
        assert engine.health().is_closed
        assert set(engine.health().held_bytes.values()) == {0}
        assert not engine.health().can_generate

    def test_closed_for_good(self, engine: RolloutEngine) -> None:
        engine.close()
        engine.close()
        calls = (
            lambda: engine.generate(PROMPTS, SAMPLING),
            engine.sleep,
            engine.wake,
            lambda: engine.load_weights(self.make_weights(1).items(), version=1),
        )
        for call in calls:
            with pytest.raises(ClosedError):
                call()

    def test_closes_while_asleep(self, engine: RolloutEngine) -> None:
        engine.sleep()
        engine.close()
        assert engine.health().is_closed

    # --- helpers -------------------------------------------------------------------------------------------

    def _must_be_loaded_anew(self, engine: RolloutEngine) -> None:
        assert engine.weight_version is None
        with pytest.raises(StateError, match="load_weights"):
            engine.generate(PROMPTS, SAMPLING)
        engine.load_weights(self.make_weights(2).items(), version=2)
        assert engine.generate(PROMPTS, SAMPLING)[0].weight_version == 2

    def _table(self, weights: Weights, rollout: Rollout, temperature: float) -> torch.Tensor:
        """fp64 `[completion, vocabulary]`: the distribution each token of the completion came from."""
        token_ids = [*rollout.prompt_ids, *rollout.token_ids[:-1]]
        return self.reference_logprobs(weights, token_ids, temperature)[len(rollout.prompt_ids) - 1 :]

    def _expected(self, weights: Weights, rollout: Rollout, temperature: float) -> torch.Tensor:
        table = self._table(weights, rollout, temperature)
        return table.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]


def _spoil(weights: Weights, name: str, fault: str) -> tuple[list[tuple[str, torch.Tensor]], str]:
    """A stream with one fault, and the attribute of the error that names it."""
    items = list(weights.items())
    others = [item for item in items if item[0] != name]
    tensor = weights[name]
    match fault:
        case "missing":
            return others, "missing"
        case "unexpected":
            return [*items, ("nonsense.weight", tensor)], "unexpected"
        case "repeated":
            return [*items, (name, tensor)], "repeated"
        case "shape":
            return [*others, (name, tensor[..., :-1])], "mismatched"
        case _:
            return [*others, (name, tensor.to(torch.float16))], "mismatched"
