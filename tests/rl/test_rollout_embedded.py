"""The embedded engine: the contract of all engines, and what is its own."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from contracts.engine_contract import PROMPTS, SAMPLING, EngineContract, Weights
from torpor.errors import UnsupportedError, UsageError
from torpor.rl.models import tiny_model
from torpor.rl.rollout.base import RolloutEngine, SamplingParams, Tag
from torpor.rl.rollout.embedded import EmbeddedEngine

VOCABULARY, MAX_POSITIONS = 24, 64
SPREAD = 0.3
"""Standard deviation of test weights; at the usual 0.02 all tokens are about equally probable."""


def _model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return tiny_model(VOCABULARY, 32, 3, seed=0, dtype=dtype, max_positions=MAX_POSITIONS)


def small_engine(kv_cache_bytes: int = 2**20) -> EmbeddedEngine:
    return EmbeddedEngine(tiny_model(VOCABULARY, 32, 3, max_positions=MAX_POSITIONS), kv_cache_bytes=kv_cache_bytes)


def small_weights(seed: int, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1 + SPREAD * torch.randn(tensor.shape, generator=generator)).to(dtype)
        if tensor.ndim == 1
        else (SPREAD * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in _model().named_parameters()
    }


class TestEmbeddedEngine(EngineContract):
    def make_engine(self) -> RolloutEngine:
        return small_engine()

    def make_weights(self, seed: int) -> Weights:
        return small_weights(seed)

    def reference_logprobs(self, weights: Weights, token_ids: Sequence[int], temperature: float) -> torch.Tensor:
        model = _model(torch.float64)
        model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([token_ids])).logits[0]
        return (logits / temperature).log_softmax(-1)


class TestGqaEngine(TestEmbeddedEngine):
    """The same, where several query heads share a key-value head and attention is eager."""

    def make_engine(self) -> RolloutEngine:
        return EmbeddedEngine(_grouped_model("eager"), kv_cache_bytes=2**20)

    def make_weights(self, seed: int) -> Weights:
        shapes = {name: parameter.shape for name, parameter in _grouped_model("sdpa").named_parameters()}
        generator = torch.Generator().manual_seed(seed)
        return {name: SPREAD * torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def reference_logprobs(self, weights: Weights, token_ids: Sequence[int], temperature: float) -> torch.Tensor:
        model = _grouped_model("eager").double()
        model.load_state_dict({name: weight.double() for name, weight in weights.items()}, strict=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([token_ids])).logits[0]
        return (logits / temperature).log_softmax(-1)


def _grouped_model(attention: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).train(False)


def test_each_prompt_is_prefilled_once_for_its_group() -> None:
    engine = small_engine()
    engine.generate(PROMPTS, SAMPLING)
    assert engine.last_generation is not None
    assert engine.last_generation.num_prefilled_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("common", [15, 16, 20])
def test_what_all_prompts_begin_with_is_prefilled_once(common: int) -> None:
    """From 16 tokens on; log-probabilities stay those of a plain forward."""
    start = [3 + place % 7 for place in range(common)]
    prompts = [[*start, 11, 12], [*start, 13], start + [14] * 5]
    weights, engine = small_weights(1), small_engine()
    engine.load_weights(weights.items(), version=1)
    rollouts = engine.generate(prompts, replace(SAMPLING, stop_token_ids=(2, 3)))
    assert engine.last_generation is not None
    num_tokens = 2 + 1 + 5 + (common if common >= 16 else 3 * common)
    assert engine.last_generation.num_prefilled_tokens == num_tokens
    reference = TestEmbeddedEngine()
    for rollout in rollouts:
        expected = reference._expected(weights, rollout, temperature=1.0)
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_equal_prompts_keep_a_token_each() -> None:
    engine = small_engine()
    engine.load_weights(small_weights(1).items(), version=1)
    alone = engine.generate([[7] * 20], replace(SAMPLING, temperature=0))
    together = engine.generate([[7] * 20] * 2, replace(SAMPLING, temperature=0))
    assert [rollout.token_ids for rollout in together] == [rollout.token_ids for rollout in alone] * 2


def test_a_small_cache_changes_the_batches_and_not_the_samples() -> None:
    """Sampling noise belongs to the sequence, wherever it runs; logits agree up to rounding."""
    one_sequence = 2 * 3 * 4 * (7 + SAMPLING.max_new_tokens) * 8 * 4
    small, large = small_engine(3 * one_sequence), small_engine()
    for engine in (small, large):
        engine.load_weights(small_weights(1).items(), version=1)
    few, many = small.generate(PROMPTS, SAMPLING), large.generate(PROMPTS, SAMPLING)
    assert small.last_generation is not None
    assert small.last_generation.num_prefilled_tokens > sum(map(len, PROMPTS)), "it all fitted into one batch"
    for a, b in zip(few, many, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    engine = small_engine(kv_cache_bytes=40 * 2 * 3 * 32 * 4)
    with pytest.raises(UsageError, match=r"prompt 1 of 50 tokens .* raise kv_cache_bytes"):
        engine.generate([[5], [5] * 50], SamplingParams(max_new_tokens=3))
    with pytest.raises(UsageError, match=f"{MAX_POSITIONS} positions"):
        small_engine().generate([[5] * 60], SamplingParams(max_new_tokens=6))
    assert small_engine().generate([[5] * 60], SamplingParams(max_new_tokens=5))


def test_a_cache_below_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match="kv_cache_bytes is 100"):
        small_engine(kv_cache_bytes=100)


def test_sliding_windows_are_refused() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    with pytest.raises(UnsupportedError, match="sliding_attention"):
        EmbeddedEngine(Qwen2ForCausalLM(config))


def test_tied_weights_count_once_and_stay_tied() -> None:
    engine = small_engine()
    assert "lm_head.weight" not in engine.weight_specs()
    engine.sleep()
    engine.wake()
    weights = small_weights(1)
    engine.load_weights(weights.items(), version=1)
    before = engine.generate(PROMPTS, SAMPLING)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, 0)
    engine.load_weights(weights.items(), version=2)
    after = engine.generate(PROMPTS, SAMPLING)
    reference = TestEmbeddedEngine()
    assert after != before
    for rollout in after:
        expected = reference._expected(weights, rollout, temperature=1.0)
        assert rollout.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_bf16_stays_near_the_higher_precision() -> None:
    """Allowed: as much as a plain bf16 forward errs at worst, and as much again."""
    weights = small_weights(1, torch.bfloat16)
    engine = EmbeddedEngine(_model(torch.bfloat16), kv_cache_bytes=2**20)
    engine.load_weights(weights.items(), version=1)
    plain = _model(torch.bfloat16)
    plain.load_state_dict(weights, strict=False)
    reference = TestEmbeddedEngine()
    worst_engine, worst_plain = 0.0, 0.0
    for rollout in engine.generate(PROMPTS, replace(SAMPLING, stop_token_ids=(2, 3))):
        truth = reference._expected(weights, rollout, temperature=1.0)
        token_ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids[:-1]]])
        with torch.no_grad():
            table = plain(input_ids=token_ids).logits[0].float().log_softmax(-1)[len(rollout.prompt_ids) - 1 :]
        plainly = table.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        worst_engine = max(worst_engine, float((torch.tensor(rollout.logprobs) - truth).abs().max()))
        worst_plain = max(worst_plain, float((plainly - truth).abs().max()))
    assert worst_engine < 2 * worst_plain


_RESIDENT = """
import torch
from torpor.rl.models import tiny_model
from torpor.rl.rollout.base import SamplingParams
from torpor.rl.rollout.embedded import EmbeddedEngine

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

model = tiny_model(16384, 256, 2, 4)
weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
engine = EmbeddedEngine(model, kv_cache_bytes=26 * 2**20)
prompts, sampling = [[5 + i] * 125 for i in range(8)], SamplingParams(num_samples=6, max_new_tokens=4)
def step(version):
    engine.wake()
    engine.load_weights(weights.items(), version)
    engine.generate(prompts, sampling)
engine.generate(prompts, sampling)
held = engine.held_bytes()
for cycle in range(4):
    awake = resident()
    engine.sleep(["weights"])
    no_weights = resident()
    engine.sleep(["kv_cache"])
    nothing = resident()
    print(held["weights"], held["kv_cache"], awake, no_weights, nothing)
    step(cycle)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_sleep_gives_resident_memory_back() -> None:
    """Judged by the kernel, in a process of its own: what each tag held is gone, and cycles add nothing."""
    done = subprocess.run([sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True, timeout=150)
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(rows) == 4
    for weights, kv_cache, awake, no_weights, nothing in rows:
        assert weights > 20 * 2**20
        assert awake - no_weights > 0.97 * weights
        assert no_weights - nothing > 0.9 * kv_cache  # what the batch did not need was never touched
    floors = [row[4] for row in rows[1:]]
    assert max(floors) - min(floors) < 2 * 2**20


def test_the_engine_releases_its_memory_with_itself() -> None:
    engine = small_engine()
    arena = engine._arenas[Tag.WEIGHTS]
    engine.close()
    del engine
    gc.collect()
    assert arena.held_bytes == 0
