"""Megatron argument files: the same model, layout and recipe, and no flag passed over in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from torpor.errors import UnsupportedError, UsageError
from torpor.forecast.config import read_config
from torpor.forecast.families import build_model
from torpor.forecast.megatron import MegatronPlan, is_argument_file, read_arguments
from torpor.forecast.optimizers import Kind
from torpor.forecast.recipes import Format, Recompute

LLAMA = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --kv-channels 128 --vocab-size 128256 --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights --position-embedding-type rope --bf16
"""
DEEPSEEK = """
MODEL_ARGS=(--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
   --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
   --v-head-dim 128 --qk-layernorm --num-experts 256 --moe-ffn-hidden-size 2048 --moe-layer-freq "([0]*3+[1]*58)"
   --moe-shared-expert-intermediate-size 2048 --moe-router-enable-expert-bias --vocab-size 129280 --swiglu
   --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
   --position-embedding-type rope --bf16)
torchrun pretrain.py "${MODEL_ARGS[@]}" --train-iters 10
"""


def read(tmp_path: Path, text: str, ignore: tuple[str, ...] = ()) -> MegatronPlan:
    path = tmp_path / "arguments.sh"
    path.write_text(text, encoding="utf-8")
    return read_arguments(str(path), ignore)


@pytest.mark.parametrize(("text", "name"), [(LLAMA, "llama-3.1-8b"), (DEEPSEEK, "deepseek-v3")])
def test_same_model_as_the_config(tmp_path: Path, text: str, name: str) -> None:
    found, known = read(tmp_path, text).model, build_model(read_config(name))
    assert [layer.weights for layer in found.layers] == [layer.weights for layer in known.layers]
    assert [layer.buffers for layer in found.layers] == [layer.buffers for layer in known.layers]
    assert (found.parameters, found.tied) == (known.parameters, known.tied)


def test_layout_recipe_and_optimizer(tmp_path: Path) -> None:
    plan = read(
        tmp_path,
        LLAMA
        + """
    --tensor-model-parallel-size 2 \\
    --pipeline-model-parallel-size=4  # a comment
    --num-layers-per-virtual-pipeline-stage 4 --use-distributed-optimizer --fp8-format hybrid --fp8-recipe mxfp8
    --first-last-layers-bf16 --num-layers-at-end-in-bf16 2 --recompute-granularity full --recompute-method uniform
    --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --grad-reduce-in-bf16
    --cuda-graph-impl local""",
    )
    layout = plan.layout
    assert (layout["tp"], layout["pp"], layout["vpp"]) == (2, 4, 2)
    assert layout["distributed_optimizer"]
    assert plan.recipe["format"] is Format.MXFP8
    assert (plan.recipe["first_layers_bf16"], plan.recipe["last_layers_bf16"]) == (1, 2)
    assert plan.recipe["recompute"] is Recompute.FULL
    assert plan.optimizer["kind"] is Kind.PRECISION_AWARE_ADAM
    assert (plan.optimizer["exp_avg_bytes"], plan.optimizer["exp_avg_sq_bytes"]) == (2, 1)
    assert plan.optimizer["grad_bytes"] == 2
    assert plan.options == {"cuda_graphs": True}


def test_megatron_s_own_defaults(tmp_path: Path) -> None:
    bare = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --max-position-embeddings 32 --bf16"
    )
    plan = read(tmp_path, bare)
    sizes = {
        "word and position embeddings": (512 + 32) * 64,
        "qkv, proj and biases": 2 * (4 * 64 * 64 + 4 * 64),
        "fc1, fc2 and biases": 2 * (2 * 256 * 64 + 256 + 64),
        "LayerNorm weights and biases": 5 * 2 * 64,
    }
    assert plan.model.tied
    assert plan.model.parameters == sum(sizes.values())
    assert not plan.layout["distributed_optimizer"]


@pytest.mark.parametrize(
    ("modules", "expected"), [("core_attn", Recompute.NONE), ("core_attn moe", Recompute.SELECTIVE)]
)
def test_selective_recompute_counts_where_it_wraps_linears(tmp_path: Path, modules: str, expected: Recompute) -> None:
    text = f"--recompute-granularity selective --recompute-modules {modules} {LLAMA}"
    assert read(tmp_path, text).recipe["recompute"] is expected


def test_variables_are_filled_in(tmp_path: Path) -> None:
    plan = read(tmp_path, f"TP=4\nSIZE=${{TP}}\n{LLAMA} --tensor-model-parallel-size $SIZE")
    assert plan.layout["tp"] == 4


def test_a_variable_without_a_value(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--tensor-model-parallel-size \$TP: no value here"):
        read(tmp_path, f"{LLAMA} --tensor-model-parallel-size $TP")


def test_unknown_flags_are_refused_by_name(tmp_path: Path) -> None:
    text = f"{LLAMA} --use-megatron-fsdp --fp8-output-proj --lr 1e-5 --log-interval 1"
    with pytest.raises(UnsupportedError, match=r"--fp8-output-proj, --use-megatron-fsdp might change bytes") as caught:
        read(tmp_path, text)
    assert caught.value.flags == ["--fp8-output-proj", "--use-megatron-fsdp"]
    assert read(tmp_path, text, ("use-megatron-fsdp", "fp8-output-proj")).model.parameters > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LLAMA.replace("--bf16", ""), "no --bf16"),
        (LLAMA.replace("--hidden-size 4096", ""), "--hidden-size is missing"),
        (LLAMA.replace("--num-layers 32", "--num-layers many"), "not a whole number"),
        (LLAMA + "--fp8-format e4m3 --fp8-recipe custom", "--fp8-recipe custom is not known"),
        (LLAMA + "--optimizer soap", "--optimizer soap is not known"),
        (LLAMA + "--fp8-format e4m3 --transformer-impl local", "no low-precision recipes"),
        (LLAMA + "--num-experts 8 --moe-layer-freq [1]*31", "describes 31 layers"),
        (LLAMA + "--num-experts 8 --moe-layer-freq [1]*x", "a number or a sum"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=words):
        read(tmp_path, text)


def test_what_an_argument_file_is(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"--num-layers": 2}', encoding="utf-8")
    script = tmp_path / "run.sh"
    script.write_text("python train.py --num-layers 2", encoding="utf-8")
    assert not is_argument_file(str(config))
    assert is_argument_file(str(script))
    assert not is_argument_file("qwen3-4b")
