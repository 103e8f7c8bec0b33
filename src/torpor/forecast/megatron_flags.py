"""Megatron-LM's flags, sorted by what a flag does to bytes (Megatron-Core 0.19 `training/arguments.py`).

A flag that is in none of these tables is refused by name: it might change bytes.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Flags with one whole number that the forecast uses.
INTEGERS = _names(
    """
    context-parallel-size decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
    expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size fp8-amax-history-len
    hidden-size kv-channels kv-lora-rank make-vocab-size-divisible-by max-position-embeddings
    moe-ffn-hidden-size moe-shared-expert-intermediate-size mtp-num-layers num-attention-heads
    num-distributed-optimizer-instances num-experts num-layers num-layers-at-end-in-bf16
    num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage num-query-groups
    num-virtual-stages-per-pipeline-rank pipeline-model-parallel-size q-lora-rank qk-head-dim
    qk-pos-emb-head-dim tensor-model-parallel-size v-head-dim vocab-size
    """
)

#: Flags with one word, or one number, that the forecast uses.
WORDS = _names(
    """
    cuda-graph-impl exp-avg-dtype exp-avg-sq-dtype fp4-format fp8-format fp8-recipe fp4-recipe
    main-grads-dtype main-params-dtype moe-layer-freq normalization optimizer optimizer-offload-fraction
    position-embedding-type recompute-granularity sgd-momentum softmax-type transformer-impl
    """
)

#: Flags with one word or more.
LISTS = frozenset(["recompute-modules"])

#: Switches that the forecast uses.
SWITCHES = _names(
    """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split add-qkv-bias
    attention-output-gate bf16 disable-bias-linear disable-parameter-transpose-cache enable-cuda-graph
    external-cuda-graph first-last-layers-bf16 fp4-param-gather fp8-param-gather grad-reduce-in-bf16
    group-query-attention moe-router-enable-expert-bias moe-shared-expert-gate multi-latent-attention
    optimizer-cpu-offload qk-layernorm swiglu untie-embeddings-and-output-weights
    use-distributed-optimizer use-layer-wise-distributed-optimizer use-precision-aware-optimizer
    use-rotary-position-embeddings
    """
)

#: Flags that change no byte of what is counted; with any number of values.
HARMLESS = _names(
    """
    accumulate-allreduce-grads-in-fp32 apply-layernorm-1p apply-query-key-layer-scaling
    attention-backend attention-dropout attention-softmax-in-fp32 async-save bias-activation-fusion
    calculate-per-token-loss clip-grad cp-comm-type cross-entropy-fusion-impl cross-entropy-loss-fusion
    dataloader-type deterministic-mode empty-unused-memory-level eod-mask-loss finetune
    fp8-amax-compute-algo fp8-interval fp8-margin fp8-wgrad global-batch-size hidden-dropout hysteresis
    init-method-std initial-loss-scale layernorm-epsilon loss-scale loss-scale-window manual-gc
    manual-gc-interval micro-batch-size min-loss-scale min-lr mock-data moe-apply-probs-on-input
    moe-aux-loss-coeff moe-deepep-num-sms moe-enable-deepep moe-expert-capacity-factor
    moe-flex-dispatcher-backend moe-grouped-gemm moe-input-jitter-eps moe-pad-expert-input-to-capacity
    moe-per-layer-logging moe-permute-fusion moe-router-bias-update-rate moe-router-dtype
    moe-router-force-load-balancing moe-router-fusion moe-router-group-topk
    moe-router-load-balancing-type moe-router-num-groups moe-router-padding-for-fp8
    moe-router-padding-for-quantization moe-router-pre-softmax moe-router-score-function moe-router-topk
    moe-router-topk-scaling-factor moe-shared-expert-overlap moe-token-dispatcher-type
    moe-token-drop-policy moe-token-dropping moe-use-upcycling moe-z-loss-coeff mscale mscale-all-dim
    mtp-loss-scaling-factor norm-epsilon num-workers override-opt-param-scheduler rampup-batch-size
    recompute-activations recompute-method recompute-num-layers seed seq-length sequence-parallel split
    tp-only-amax-red use-checkpoint-opt-param-scheduler use-cpu-initialization use-dist-ckpt
    use-flash-attn use-mcore-models use-torch-optimizer-for-cpu-offload weight-decay
    weight-decay-incr-style
    """
)

#: Beginnings of flags that change no byte of what is counted.
HARMLESS_PREFIXES = (
    "adam-",
    "ckpt-",
    "data-",
    "ddp-",
    "dist-ckpt-",
    "distributed-",
    "eval-",
    "exit-",
    "load",
    "log-",
    "lr",
    "merge-file",
    "muon-",
    "no-",
    "one-logger-",
    "overlap-",
    "profile",
    "rope-",
    "rotary-",
    "save",
    "start-weight-decay",
    "end-weight-decay",
    "tensorboard-",
    "timing-",
    "tokenizer-",
    "tp-comm-",
    "train-",
    "vocab-file",
    "wandb-",
    "yarn-",
)

#: Exceptions to the prefixes: these do change bytes, or say which optimizer has the state.
NOT_HARMLESS = frozenset(["muon-scalar-optimizer", "no-position-embedding", "no-use-layer-wise-param-layout"])


def is_harmless(flag: str) -> bool:
    """Whether a flag (without its dashes) is known to change no byte of what is counted."""
    if flag in NOT_HARMLESS:
        return False
    return flag in HARMLESS or flag.startswith(HARMLESS_PREFIXES)
