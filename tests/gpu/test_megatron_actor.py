"""The training actor on Megatron-Core and TransformerEngine: its numbers, its sleep, its checkpoints."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from torpor.errors import UnsupportedError
from torpor.rl.backends.base import Score
from torpor.rl.backends.megatron import GptBackend, MegatronBackend
from torpor.rl.config import MegatronConfig, OptimizerConfig
from torpor.rl.packing import Group

pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine.pytorch")

RECIPES = ["bf16", "blockwise", "current", "delayed"]
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
GROUPS = [
    Group(tuple(range(5, 17)), ((20, 21, 22), (23,), (24, 25, 26, 27, 28))),
    Group((7, 8, 9), ((1, 2), (3, 4, 5, 6))),
    Group(tuple(range(40, 60)), (tuple(range(100, 130)), (9, 9))),
]


def small_model(kind: str = "llama") -> Any:
    """A model of transformers with random weights far from zero, bf16."""
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE, tie_word_embeddings=kind != "qwen3")
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        mean, deviation = (0.0, 0.1) if parameter.ndim > 1 else (1.0, 0.1)
        torch.nn.init.normal_(parameter, mean, deviation)
    return model.to(torch.bfloat16)


def small_backend(model: Any, precision: str = "bf16", optimizer: str = "adamw", **options: Any) -> MegatronBackend:
    megatron = {key: options.pop(key) for key in list(options) if key in MegatronConfig.model_fields}
    return MegatronBackend(
        model.config,
        megatron=MegatronConfig(precision=precision, attention_backend="unfused", **megatron),
        optimizer=OptimizerConfig(name=optimizer, weight_decay=0.01),
        temperature=1.0,
        logit_chunk_tokens=32,
        weights=model.named_parameters(),
        **options,
    )


def train(backend: MegatronBackend) -> tuple[float, float]:
    """One step on two microbatches: loss and gradient norm."""

    def loss_of(index: int, scores: list[Score]) -> torch.Tensor:
        return -torch.cat([log_prob_T for log_prob_T, _ in scores]).sum() / 48

    return backend.accumulate([GROUPS[:2], GROUPS[2:]], loss_of), backend.step(1e-3, 1.0)


def digest(backend: GptBackend) -> dict[str, str]:
    """Hashes of the exact bits of parameters, masters and moments."""
    found = {name: _hash(parameter) for name, parameter in backend.chunk.named_parameters()}
    for name, optimizer in backend.optimizers.items():
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            found[f"{name}.{index}"] = _hash(parameter)
            for key, value in optimizer.state[parameter].items():
                found[f"{name}.{index}.{key}"] = _hash(value) if isinstance(value, torch.Tensor) else repr(value)
    return found


def _hash(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_log_probabilities_err_no_more_than_those_of_transformers(kind: str) -> None:
    model = small_model(kind)
    ours = torch.cat([log_prob_T for log_prob_T, _ in small_backend(model).score([GROUPS[:1], GROUPS[1:]])]).cpu()
    require_no_more_error_than_transformers(ours, model)


def require_no_more_error_than_transformers(ours: torch.Tensor, model: Any) -> None:
    """Log-probabilities in bf16, ours and those of `model`, both against the same weights in fp64."""
    from torpor.rl.scoring import Scorer

    plain = torch.cat([log_prob_T for log_prob_T, _ in Scorer(model.cuda(), 1.0, 32)(GROUPS)]).detach().cpu()
    truth = torch.cat([log_prob_T for log_prob_T, _ in Scorer(model.double().cpu(), 1.0, 32)(GROUPS)]).detach()
    assert ours.shape == truth.shape
    error, allowed = (ours - truth).abs(), (plain - truth).abs()
    assert error.mean() <= 1.5 * allowed.mean() + 1e-3, (error.mean(), allowed.mean())
    assert error.max() <= 2 * allowed.max() + 1e-2, (error.max(), allowed.max())


@pytest.mark.parametrize("precision", RECIPES)
def test_sleeps_between_steps_change_no_bit(precision: str) -> None:
    model = small_model()
    results = []
    for sleeps in (False, True):
        backend = small_backend(model, precision, snapshots=("reference",), rematerialize_param_from_master_weight=True)
        sleeper = backend.open_sleeper(rematerialize_param_from_master_weight=True)
        losses = []
        for _ in range(4):
            if sleeps:
                sleeper.sleep()
                sleeper.wake()
            losses.append(train(backend))
            list(backend.score([GROUPS], snapshot="reference"))
            if sleeps:
                sleeper.sleep()
                sleeper.wake(lazy=True)
        sleeper.finish()
        results.append((losses, digest(backend)))
        sleeper.close()
    assert results[0] == results[1]


def test_random_weights_follow_from_the_seed_whatever_was_built_before() -> None:
    config = small_model().config
    options: dict[str, Any] = {"megatron": MegatronConfig(), "optimizer": OptimizerConfig()}
    options |= {"temperature": 1.0, "logit_chunk_tokens": 32}
    first, same, other = (digest(MegatronBackend(config, seed=seed, **options)) for seed in (5, 5, 6))
    assert first == same
    assert first != other


def test_muon_asleep_changes_no_bit() -> None:
    pytest.importorskip("emerging_optimizers")
    model = small_model()
    results = []
    for sleeps in (False, True):
        backend = small_backend(model, "blockwise", "muon")
        with backend.open_sleeper() as sleeper:
            losses = []
            for _ in range(3):
                losses.append(train(backend))
                if sleeps:
                    sleeper.sleep()
                    sleeper.wake()
            results.append((losses, digest(backend)))
    assert results[0] == results[1]


@pytest.mark.parametrize("rematerialize", [False, True])
def test_weights_are_the_same_asleep_and_under_the_names_of_transformers(rematerialize: bool) -> None:
    model = small_model("qwen3")
    backend = small_backend(model, "blockwise")
    with backend.open_sleeper(rematerialize_param_from_master_weight=rematerialize) as sleeper:
        first = {name: tensor.cpu() for name, tensor in backend.weights(sleeper)}
        assert first.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(first[name], parameter) for name, parameter in model.named_parameters())
        train(backend)
        awake = {name: tensor.cpu() for name, tensor in backend.weights(sleeper)}
        assert any(not torch.equal(awake[name], first[name]) for name in first)
        sleeper.sleep()
        asleep = dict(backend.weights(sleeper))
        assert all(torch.equal(awake[name], asleep[name].cpu()) for name in awake)
        sleeper.wake("params")
        assert all(torch.equal(awake[name], tensor.cpu()) for name, tensor in backend.weights(sleeper))


def test_frozen_weights_score_as_they_did_and_the_live_ones_come_back() -> None:
    backend = small_backend(small_model(), "blockwise", snapshots=("reference",))
    before = [score[0].cpu() for score in backend.score([GROUPS])]
    for _ in range(2):
        train(backend)
    live = digest(backend)
    moved = [score[0].cpu() for score in backend.score([GROUPS])]
    frozen = [score[0].cpu() for score in backend.score([GROUPS], snapshot="reference")]
    assert all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))
    assert not torch.equal(torch.cat(moved), torch.cat(before))
    assert digest(backend) == live
    assert all(torch.equal(a, b[0].cpu()) for a, b in zip(moved, backend.score([GROUPS]), strict=True))


@pytest.mark.parametrize("precision", ["blockwise", "delayed"])
def test_a_checkpoint_loads_in_transformers_and_resumes_to_the_bit(precision: str) -> None:
    from torpor.rl.models import load_model

    model = small_model()
    backend = small_backend(model, precision)
    with TemporaryDirectory() as name, backend.open_sleeper() as sleeper:
        directory = Path(name)
        train(backend)
        sleeper.sleep()
        backend.save(sleeper, directory)
        sleeper.wake()
        again = load_model(directory, torch.bfloat16)
        ends = [(train(backend), train(backend), digest(backend))]
        other = small_backend(small_model(), precision)
        other.load(directory)
        ends.append((train(other), train(other), digest(other)))
    assert ends[0] == ends[1]
    ours = torch.cat([log_prob_T for log_prob_T, _ in small_backend(again).score([GROUPS])]).cpu()
    require_no_more_error_than_transformers(ours, again)


def test_a_sleep_drops_the_caches_and_copies_what_cannot_be_had_again() -> None:
    backend = small_backend(small_model(), "blockwise")
    parameters = sum(parameter.numel() for parameter in backend.chunk.parameters())
    with backend.open_sleeper(rematerialize_param_from_master_weight=True) as sleeper:
        train(backend)
        ledger = sleeper.sleep()
        dropped = sum(row.freed_bytes for row in ledger.rows if row.fate == "dropped")
        copied = sum(row.copied_bytes for row in ledger.rows)
        sleeper.wake()
    assert dropped > 0
    assert 12 * parameters <= copied <= 12.2 * parameters, (copied / parameters, ledger)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_a_precision_that_the_card_cannot_run_is_refused(precision: str) -> None:
    if torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("this card can")
    with pytest.raises(UnsupportedError, match=f"precision = {precision}: "):
        small_backend(small_model(), precision)


def test_a_gradient_that_is_not_finite_steps_nothing() -> None:
    backend = small_backend(small_model())
    train(backend)
    before = digest(backend)
    backend.accumulate([GROUPS], lambda index, scores: float("inf") * scores[0][0].sum())
    with pytest.raises(RuntimeError, match="nothing was stepped"):
        backend.step(1e-3, 1.0)
    assert digest(backend) == before


def test_a_critic_begins_at_zero_and_learns_asleep_between_steps() -> None:
    from torpor.rl.backends.megatron import MegatronCriticBackend

    model = small_model()
    ends = []
    for sleeps in (False, True):
        critic = MegatronCriticBackend(
            model.config,
            megatron=MegatronConfig(precision="blockwise", attention_backend="unfused"),
            optimizer=OptimizerConfig(),
            weights=model.named_parameters(),
        )
        values = torch.cat([value_T for (value_T,) in critic.score([GROUPS])])
        assert values.dtype is torch.float32
        assert not values.any()
        with critic.open_sleeper(rematerialize_param_from_master_weight=True) as sleeper:
            losses = []
            for _ in range(4):
                losses.append(critic.accumulate([GROUPS], lambda _, scores: ((scores[0][0] - 1) ** 2).mean()))
                critic.step(1e-3, 1.0)
                if sleeps:
                    sleeper.sleep()
                    sleeper.wake()
            ends.append((losses, [value_T.cpu().tolist() for (value_T,) in critic.score([GROUPS])]))
    assert ends[0] == ends[1]
    assert ends[0][0][-1] < ends[0][0][0]


@pytest.mark.parametrize("precision", ["blockwise", "delayed"])
def test_actor_and_critic_sleep_in_turn(precision: str) -> None:
    from torpor.rl.backends.megatron import MegatronCriticBackend

    model = small_model()
    ends = []
    for sleeps in (False, True):
        forget_scaling()
        actor = small_backend(model, precision)
        critic = MegatronCriticBackend(
            model.config,
            megatron=MegatronConfig(precision=precision, attention_backend="unfused"),
            optimizer=OptimizerConfig(),
            weights=model.named_parameters(),
        )
        with actor.open_sleeper() as actor_sleeper, critic.open_sleeper() as critic_sleeper:
            losses = []
            for _ in range(3):
                if sleeps:
                    actor_sleeper.sleep()
                losses.append(critic.accumulate([GROUPS], lambda _, scores: ((scores[0][0] - 1) ** 2).mean()))
                critic.step(1e-3, 1.0)
                if sleeps:
                    critic_sleeper.sleep()
                    actor_sleeper.wake()
                losses.append(train(actor))
                if sleeps:
                    critic_sleeper.wake(lazy=True)
            ends.append((losses, digest(actor), digest(critic)))
        del actor, critic
        gc.collect()
    assert ends[0] == ends[1]


def forget_scaling() -> None:
    """As in a new process: delayed scaling updates every module that ever ran in this one."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
