#!/bin/bash
# The model that was measured on one H200: 8 layers of 4096 x 14336, 2.013e9 parameters, blockwise FP8.
TP=1
MODEL_ARGS=(
    --num-layers 8
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --vocab-size 32768
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
)
TRAINING_ARGS=(
    --bf16
    --fp8-format e4m3 --fp8-recipe blockwise
    --optimizer adam
    --use-distributed-optimizer
    --tensor-model-parallel-size ${TP}
    --micro-batch-size 1  # harmless
    --lr 1e-5
)
torchrun pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
