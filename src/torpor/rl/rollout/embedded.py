"""The embedded engine: batched generation with a transformers model, in the process of its caller.

    model = load_model(directory)
    engine = EmbeddedEngine(model, kv_cache_bytes=512 * 1024**2)
    rollouts = engine.generate(prompts, SamplingParams(num_samples=8, max_new_tokens=16, seed=1))

What all prompts of a batch begin with goes through the model once, the rest of each prompt once for its whole
group. Then all sequences advance together, one token a step, and those that end leave the batch.

Letters: R sequences in flight, P prompts, N sequences of one forward pass (1, P or R), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import UsageError
from torpor.rl.packing import additive_mask, common_prefix_length
from torpor.rl.rollout.arena import Arena, move_parameters
from torpor.rl.rollout.base import (
    FinishReason,
    GenerationStats,
    Rollout,
    RolloutEngine,
    SamplingParams,
    Tag,
    WeightSpec,
)
from torpor.rl.rollout.kv_cache import CacheShape, GroupCache
from torpor.rl.rollout.sampling import sample, uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_KV_CACHE_BYTES = 512 * 1024**2
_MIN_SHARED_TOKENS = 16
"""A shorter common start of the prompts is not worth a forward pass of its own."""


@dataclass(slots=True)
class _Sequence:
    """One completion while it grows."""

    prompt_index: int
    sample_index: int
    number: int
    """Position in the whole call; picks its column of random numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_stopped: bool = False


class EmbeddedEngine(RolloutEngine):
    """Generates with a transformers causal language model whose layers all attend to every token before.

    The engine takes the model over: its parameters move into one block of memory that the engine gives back
    and retakes. Buffers (rotary frequencies and the like) are small, are not part of a weight update, and
    stay.
    """

    name = "embedded"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES,
        weight_version: int | None = 0,
    ) -> None:
        """`weight_version` is that of the model's weights; None if they mean nothing yet.

        Raises:
            UnsupportedError: a model whose attention the engine's cache cannot serve.
            UsageError: a cache too small for one token of one sequence.
        """
        super().__init__(weight_version=weight_version)
        self._model = model.requires_grad_(False)
        self._model.train(False)
        self._device = next(model.parameters()).device
        self._max_positions: int = model.config.max_position_embeddings
        self._vocab_size: int = model.config.vocab_size
        self._cache_shape = CacheShape.of(model.config, model.dtype)
        if self._cache_shape.nbytes(1, 1) > kv_cache_bytes:
            raise UsageError(
                f"kv_cache_bytes is {kv_cache_bytes}, one token takes {self._cache_shape.nbytes(1, 1)}",
                kv_cache_bytes=kv_cache_bytes,
            )
        self._arenas = {
            Tag.WEIGHTS: move_parameters(model),
            Tag.KV_CACHE: Arena(kv_cache_bytes, self._device),
        }

    # --- memory and weights ------------------------------------------------------------------------

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return {
            name: WeightSpec(tuple(parameter.shape), parameter.dtype)
            for name, parameter in self._model.named_parameters()
        }

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def _load_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in stream:
                parameters[name].copy_(tensor)

    def _sleep(self, tag: Tag) -> None:
        self._arenas[tag].release()

    def _wake(self, tag: Tag) -> None:
        self._arenas[tag].restore()

    def _held_bytes(self, tag: Tag) -> int:
        return self._arenas[tag].held_bytes

    def _close(self) -> None:
        for arena in self._arenas.values():
            arena.release()

    # --- generation --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, weight_version: int
    ) -> tuple[list[Rollout], GenerationStats]:
        start = time.perf_counter()
        sequences = [
            _Sequence(prompt, sample, prompt * sampling.num_samples + sample)
            for prompt in range(len(prompts))
            for sample in range(sampling.num_samples)
        ]
        noise = uniforms(sampling, len(sequences)).to(self._device)
        num_prefilled_tokens, prefill_s = 0, 0.0
        for batch in self._batches(prompts, sequences, sampling.max_new_tokens):
            decoding = _Decoding(self._model, batch, prompts, sampling, noise)
            began = time.perf_counter()
            num_prefilled_tokens += decoding.prefill(self._arenas[Tag.KV_CACHE], self._cache_shape)
            prefill_s += time.perf_counter() - began
            decoding.run()
        total_s = time.perf_counter() - start
        stats = GenerationStats(
            num_prompts=len(prompts),
            num_completions=len(sequences),
            num_prefilled_tokens=num_prefilled_tokens,
            num_generated_tokens=sum(len(sequence.token_ids) for sequence in sequences),
            prefill_s=prefill_s,
            decode_s=total_s - prefill_s,
            total_s=total_s,
        )
        return [_rollout(sequence, prompts, weight_version) for sequence in sequences], stats

    def _batches(
        self, prompts: Sequence[Sequence[int]], sequences: Sequence[_Sequence], max_new_tokens: int
    ) -> Iterator[list[_Sequence]]:
        """Runs of consecutive sequences that fit into the cache together."""
        batch: list[_Sequence] = []
        num_slots = 0
        for sequence in sequences:
            needed = self._slots(prompts, sequence.prompt_index, max_new_tokens)
            longest = max(num_slots, needed)
            if self._cache_shape.nbytes(len(batch) + 1, longest) > self._arenas[Tag.KV_CACHE].capacity_bytes:
                yield batch
                batch, longest = [], needed
            batch.append(sequence)
            num_slots = longest
        yield batch

    def _slots(self, prompts: Sequence[Sequence[int]], prompt_index: int, max_new_tokens: int) -> int:
        """Slots that a sequence of this prompt needs: the last sampled token is never fed back."""
        num_slots = len(prompts[prompt_index]) + max_new_tokens - 1
        fits = self._cache_shape.nbytes(1, num_slots) <= self._arenas[Tag.KV_CACHE].capacity_bytes
        if num_slots <= self._max_positions and fits:
            return num_slots
        limit = (
            f"its cache of {self._arenas[Tag.KV_CACHE].capacity_bytes} bytes (one sequence takes "
            f"{self._cache_shape.nbytes(1, num_slots)}); raise kv_cache_bytes"
            if num_slots <= self._max_positions
            else f"the model's {self._max_positions} positions"
        )
        raise UsageError(
            f"prompt {prompt_index} of {len(prompts[prompt_index])} tokens and max_new_tokens "
            f"{max_new_tokens} do not fit into {limit}, or shorten one of them",
            prompt_index=prompt_index,
        )


class _Decoding:
    """A batch of sequences on its way from prompts to completions."""

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequence[_Sequence],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        noise: torch.Tensor,
    ) -> None:
        self._model = model
        # transformers renamed the fourth argument from `past_key_values` to `cache`; its place is the same.
        self._forward: Any = model
        self._device = noise.device
        self._sampling = sampling
        self._noise = noise
        self._rows = list(sequences)
        self._prompts, self._prompt_of_row = _distinct_prompts(sequences, prompts)
        self._num_shared = _num_shared(self._prompts)
        self._num_padding = torch.empty(0, dtype=torch.int64)
        self._cache: GroupCache

    def prefill(self, arena: Arena, shape: CacheShape) -> int:
        """Run the prompts and sample the first tokens; return the number of tokens that went through."""
        longest = max(map(len, self._prompts))
        num_slots = longest + self._sampling.max_new_tokens - 1
        self._cache = GroupCache(arena, shape, self._prompt_of_row, num_slots)
        if self._num_shared:
            shared = torch.tensor([self._prompts[0][: self._num_shared]], device=self._device)
            self._logits(shared, torch.zeros(1, dtype=torch.int64, device=self._device))
        rests = [prompt[self._num_shared :] for prompt in self._prompts]
        token_ids = _left_padded(rests, longest - self._num_shared).to(self._device)
        num_padding = torch.tensor([longest - len(prompt) for prompt in self._prompts], device=self._device)
        logits = self._logits(token_ids, num_padding)
        self._cache.end_prefill()
        prompt_of_row = torch.tensor(self._prompt_of_row, device=self._device)
        self._num_padding = num_padding[prompt_of_row]
        self._append(logits[prompt_of_row])
        return self._num_shared + sum(map(len, rests))

    def run(self) -> None:
        """Decode until every sequence has ended."""
        for _ in range(1, self._sampling.max_new_tokens):
            if not self._rows:
                return
            last = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self._device)
            self._append(self._logits(last, self._num_padding))

    def _logits(self, token_ids: torch.Tensor, num_padding: torch.Tensor) -> torch.Tensor:
        """Logits `[N, V]` after the last of `token_ids` `[N, new]`, all of which go into the cache."""
        begin, num_new = self._cache.num_filled, token_ids.shape[1]
        slots = torch.arange(begin, begin + num_new, device=self._device)
        position_ids = (slots - num_padding[:, None]).clamp(min=0)
        mask = additive_mask(self._model, _attention_mask(slots, num_padding, self._num_shared))
        output = self._forward(token_ids, mask, position_ids, self._cache, use_cache=True, logits_to_keep=1)
        self._cache.advance(num_new)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _append(self, logits: torch.Tensor) -> None:
        """Sample one token for each row, then let go of the rows that ended."""
        step = len(self._rows[0].token_ids)
        numbers = torch.tensor([row.number for row in self._rows], device=self._device)
        tokens, logprobs = sample(logits, self._noise[step, numbers], self._sampling)
        stop_token_ids = self._sampling.stop_token_ids
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if token in stop_token_ids:
                row.has_stopped = True
        self._drop_finished()

    def _drop_finished(self) -> None:
        """Fill the places of ended rows with the last rows, so that few rows move."""
        alive = [index for index, row in enumerate(self._rows) if not row.has_stopped]
        num_alive = len(alive)
        if num_alive == len(self._rows):
            return
        sources = [index for index in alive if index >= num_alive]
        targets = sorted(set(range(num_alive)) - set(alive))
        for source, target in zip(sources, targets, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[num_alive:]
        from_rows = torch.tensor(sources, dtype=torch.int64, device=self._device)
        to_rows = torch.tensor(targets, dtype=torch.int64, device=self._device)
        self._num_padding[to_rows] = self._num_padding[from_rows]
        self._num_padding = self._num_padding[:num_alive]
        self._cache.move_rows(from_rows, to_rows, num_alive)


def _distinct_prompts(
    sequences: Sequence[_Sequence], prompts: Sequence[Sequence[int]]
) -> tuple[list[Sequence[int]], list[int]]:
    """The prompts of a batch, each once, and for each row the position of its own."""
    positions: dict[int, int] = {}
    for sequence in sequences:
        positions.setdefault(sequence.prompt_index, len(positions))
    rows = [positions[sequence.prompt_index] for sequence in sequences]
    return [prompts[index] for index in positions], rows


def _left_padded(prompts: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """Token ids int64 `[P, length]`, each at the end of its row; what stands before is masked."""
    padded = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[length - len(prompt) :] = torch.tensor(prompt)
    return padded


def _attention_mask(slots: torch.Tensor, num_padding: torch.Tensor, num_shared: int) -> torch.Tensor:
    """Who sees what, bool `[N, 1, new, T]`: every slot up to its own, but for the padding after the shared start.

    Padding sees itself: a row of the mask without a single True would make the softmax undefined.
    """
    keys = torch.arange(int(slots[-1]) + 1, device=slots.device)
    is_real = (keys < num_shared) | (keys >= num_shared + num_padding[:, None, None, None])
    is_itself = keys == slots[:, None]
    return (is_real & (keys <= slots[:, None])) | is_itself


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with, if there are several and it pays; each keeps one for itself."""
    if len(prompts) == 1:
        return 0
    num_shared = min(common_prefix_length(prompts), min(map(len, prompts)) - 1)
    return num_shared if num_shared >= _MIN_SHARED_TOKENS else 0


def _rollout(sequence: _Sequence, prompts: Sequence[Sequence[int]], weight_version: int) -> Rollout:
    return Rollout(
        prompt_index=sequence.prompt_index,
        sample_index=sequence.sample_index,
        prompt_ids=tuple(prompts[sequence.prompt_index]),
        token_ids=tuple(sequence.token_ids),
        logprobs=tuple(sequence.logprobs),
        finish_reason=FinishReason.STOP if sequence.has_stopped else FinishReason.LENGTH,
        weight_version=weight_version,
    )
