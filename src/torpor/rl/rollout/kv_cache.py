"""The key-value cache of the embedded engine: static, filled once for each prompt, read by its whole group.

Letters: R rows (sequences in flight), P prompts, N sequences of one forward pass (1, P or R), K key-value
heads, D head size, T slots (tokens of a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor.errors import UnsupportedError
from torpor.rl.rollout.arena import Arena, aligned


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token of one sequence takes. Example: `CacheShape(30, 3, 64, torch.float32)`."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> CacheShape:
        """From a transformers configuration.

        Raises:
            UnsupportedError: some layer attends to anything else than all tokens before.
        """
        fields = config.to_dict()  # which of them exist differs from model to model
        types = set(fields.get("layer_types") or ())
        if types - {"full_attention"}:
            raise UnsupportedError(
                f"the embedded engine serves models with full attention in every layer; {config.model_type} "
                f"has {', '.join(sorted(types))}"
            )
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=fields.get("num_key_value_heads") or config.num_attention_heads,
            head_size=fields.get("head_dim") or config.hidden_size // config.num_attention_heads,
            dtype=dtype,
        )

    def nbytes(self, num_rows: int, num_slots: int) -> int:
        """Bytes of the cache of `num_rows` sequences of up to `num_slots` tokens."""
        elements = num_rows * self.num_heads * num_slots * self.head_size
        return 2 * self.num_layers * aligned(elements * self.dtype.itemsize)


class GroupCache:
    """Keys and values of R sequences; the part of transformers' `Cache` that a decoder layer uses.

    It is filled in up to three kinds of pass, each of which writes the next slots of every row:

        what all prompts begin with      N = 1, goes into all rows
        the rest of each prompt          N = P, goes into all rows of its group
        one sampled token a row          N = R

    All rows are filled equally far, so prompts are padded on the left of what is theirs alone. Rows that are
    done are overwritten by the last ones (`move_rows`): the rows in use are always the first.
    """

    def __init__(self, arena: Arena, shape: CacheShape, prompt_of_row: Sequence[int], num_slots: int) -> None:
        """Takes its memory from the start of `arena`.

        `prompt_of_row` is the place of each row's prompt; rows of a prompt are neighbours, in order.
        """
        arena.reset()
        size = (len(prompt_of_row), shape.num_heads, num_slots, shape.head_size)
        layers = range(shape.num_layers)
        self._keys = [arena.take(size, shape.dtype) for _ in layers]
        self._values = [arena.take(size, shape.dtype) for _ in layers]
        device = self._keys[0].device
        self._prompt_of_row = torch.tensor(prompt_of_row, device=device)
        first_rows = [prompt_of_row.index(prompt) for prompt in range(prompt_of_row[-1] + 1)]
        self._first_row_of_prompt = torch.tensor(first_rows, device=device)
        self._num_rows = len(prompt_of_row)
        self._num_filled = 0
        self._is_prefilling = True

    @property
    def num_filled(self) -> int:
        """Slots that are filled, in every row."""
        return self._num_filled

    def advance(self, num_slots: int) -> None:
        """Say that all layers have written `num_slots` more."""
        self._num_filled += num_slots

    def end_prefill(self) -> None:
        """Say that every later pass has one sequence for each row."""
        self._is_prefilling = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots filled so far (a method of transformers' `Cache`)."""
        return self._num_filled

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new `[N, K, new T, D]` keys and values; return all `[N, K, T, D]` that attention reads.

        A method of transformers' `Cache`.
        """
        return self._store(self._keys[layer_idx], keys), self._store(self._values[layer_idx], values)

    def _store(self, store: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        begin, end = self._num_filled, self._num_filled + new.shape[2]
        if not self._is_prefilling:
            store[: self._num_rows, :, begin:end] = new
            return store[: self._num_rows, :, :end]
        is_for_all = new.shape[0] == 1
        store[:, :, begin:end] = new if is_for_all else new[self._prompt_of_row]
        if begin == 0:
            return new
        return store[:1, :, :end] if is_for_all else store[self._first_row_of_prompt, :, :end]

    def move_rows(self, sources: torch.Tensor, targets: torch.Tensor, num_rows: int) -> None:
        """Copy rows `sources` over rows `targets` (int64, same length); only the first `num_rows` remain."""
        for store in (*self._keys, *self._values):
            filled = store[:, :, : self._num_filled]
            filled[targets] = filled[sources]
        self._num_rows = num_rows
