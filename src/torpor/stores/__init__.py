"""One file for each place where bytes wait."""

from __future__ import annotations

from pathlib import Path

import torch

from torpor.errors import UsageError
from torpor.stores.base import Store


def open_store(store: str | Store | None, directory: str | Path | None) -> Store:
    """A store by name, or the one given.

    Args:
        store: `"file"`, `"pageable"`, `"pinned"`, or a `Store`. None: `"pinned"` once CUDA is in use, else `"file"`.
        directory: where the file store keeps its file; None for its default. For no other store.

    Raises:
        UsageError: an unknown name, or a directory for a store that has none.
        UnsafeStoreError: the directory must not be trusted.
    """
    if store is None:
        on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        store = "pinned" if on_gpus and directory is None else "file"
    if store == "file":
        from torpor.stores.file import FileStore

        return FileStore(directory)
    if directory is not None:
        raise UsageError(f"store_dir={str(directory)!r} goes with store='file'; this store is {store!r}")
    if store == "pageable":
        from torpor.stores.pageable import PageableStore

        return PageableStore()
    if store == "pinned":
        from torpor.stores.pinned import PinnedStore

        return PinnedStore()
    if not isinstance(store, Store):
        raise UsageError(f"store={store!r}: unknown; there are 'file', 'pageable', 'pinned', or a Store of your own")
    return store
