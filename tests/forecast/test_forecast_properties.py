"""What must hold for any model and any layout."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.forecast.actor import forecast
from torpor.forecast.blocks import GQA, MoE, dense_mlp, embedding, vector
from torpor.forecast.fates import Options
from torpor.forecast.layout import Layout
from torpor.forecast.optimizers import Kind, Optimizer
from torpor.forecast.recipes import Architecture, Format, Recipe, Scope
from torpor.forecast.segments import segment_bytes
from torpor.forecast.shapes import Layer, Model
from torpor.kinds import Fate

ROLES_OF_OPTIONS = [field.name for field in dataclasses.fields(Options) if field.name != "cuda_graphs"]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Small models whose sizes every split below divides."""
    hidden = 128 * draw(st.integers(1, 4))
    heads = 8 * draw(st.integers(1, 2))
    attention = GQA(hidden=hidden, heads=heads, kv_heads=8, head_dim=32, qk_norm=draw(st.booleans()))
    ffn = 256 * draw(st.integers(1, 4))
    layers = []
    for index in range(draw(st.integers(1, 3)) * 4):
        moe = MoE(hidden=hidden, experts=8, ffn=256, shared_ffn=draw(st.sampled_from([0, 256])))
        mlp = moe.weights() if draw(st.booleans()) else dense_mlp(hidden, ffn)
        layers.append(Layer(f"decoder.layers.{index}", tuple(attention.weights() + mlp), (), index))
    vocab = draw(st.integers(100, 5000))
    return Model(
        name="drawn",
        architecture="drawn",
        hidden=hidden,
        tied=draw(st.booleans()),
        embedding=Layer("embedding", (embedding("word_embeddings", vocab, hidden),)),
        layers=tuple(layers),
        head=Layer("head", (vector("final_layernorm", hidden), embedding("output_layer", vocab, hidden))),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, ep, etp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2, 4], [1, 2, 4, 8], [1, 2]))
    gpus = max(tp, ep * etp) * pp * draw(st.sampled_from([1, 2]))
    return Layout(gpus=gpus, tp=tp, pp=pp, ep=ep, etp=etp, distributed_optimizer=draw(st.booleans()))


def recipes() -> st.SearchStrategy[Recipe]:
    return st.builds(
        Recipe,
        format=st.sampled_from(Format),
        architecture=st.just(Architecture.BLACKWELL),
        scope=st.sampled_from(Scope),
        primary_weights=st.booleans(),
    )


def optimizers() -> st.SearchStrategy[Optimizer]:
    return st.builds(Optimizer, kind=st.sampled_from(Kind), grad_bytes=st.sampled_from([2, 4]))


@given(models(), layouts(), recipes(), optimizers())
@settings(max_examples=60, deadline=None)
def test_the_job_is_the_sum_of_its_ranks(model: Model, layout: Layout, recipe: Recipe, optimizer: Optimizer) -> None:
    account = forecast(model, layout, recipe, optimizer)
    ranks = list(account.by_rank())
    assert len(ranks) == layout.gpus
    assert account.awake_bytes == sum(line.nbytes for rank in ranks for line in rank.lines)
    assert account.copied_bytes == sum(rank.copied_bytes for rank in ranks)
    assert account.restored_bytes == sum(rank.restored_bytes for rank in ranks)
    assert account.fullest.awake_bytes == max(rank.awake_bytes for rank in ranks)


@given(models(), layouts(), recipes(), optimizers())
@settings(max_examples=60, deadline=None)
def test_bytes_never_fall_when_layers_are_added(
    model: Model, layout: Layout, recipe: Recipe, optimizer: Optimizer
) -> None:
    more = dataclasses.replace(model, layers=model.layers + model.layers[-layout.pp :])
    before, after = (forecast(each, layout, recipe, optimizer) for each in (model, more))
    assert after.awake_bytes > before.awake_bytes
    assert after.copied_bytes >= before.copied_bytes
    if layout.pp == 1:  # more stages share the layers out anew, and the heavy ones may part
        assert after.fullest.awake_bytes >= before.fullest.awake_bytes


@given(models(), recipes(), optimizers())
@settings(max_examples=60, deadline=None)
def test_splitting_over_tensor_parallelism_never_raises_a_rank_s_share(
    model: Model, recipe: Recipe, optimizer: Optimizer
) -> None:
    shares = [
        forecast(model, Layout(gpus=8, tp=tp, vocab_multiple=8 // tp), recipe, optimizer).fullest.awake_bytes
        for tp in (1, 2, 4, 8)
    ]
    assert all(later <= earlier for earlier, later in pairwise(shares))


@given(models(), layouts(), recipes(), optimizers(), st.sampled_from(ROLES_OF_OPTIONS))
@settings(max_examples=60, deadline=None)
def test_an_option_never_makes_a_sleep_copy_more(
    model: Model, layout: Layout, recipe: Recipe, optimizer: Optimizer, name: str
) -> None:
    account = forecast(model, layout, recipe, optimizer)
    without = account.with_options(dataclasses.replace(Options(), **{name: False}))
    assert account.copied_bytes <= without.copied_bytes
    assert account.awake_bytes == without.awake_bytes
    nothing = account.with_options(Options.off())
    kept = sum(line.nbytes for rank in nothing.by_rank() for line in rank.lines if line.fate is Fate.KEPT)
    assert nothing.copied_bytes == nothing.awake_bytes - kept


@given(st.lists(st.integers(1, 64 * 1024**2), max_size=60))
@settings(max_examples=100, deadline=None)
def test_segments_hold_their_tensors_and_little_more(sizes: list[int]) -> None:
    taken = segment_bytes(sizes)
    assert taken >= sum(sizes)
    assert taken % (2 * 1024**2) == 0
    # Each tensor alone costs at most its own segment.
    assert taken <= sum(segment_bytes([size]) for size in sizes)
