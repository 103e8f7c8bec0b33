from __future__ import annotations

from pathlib import Path

import torch

from torpor.shelf import Shelf
from torpor.stores.file import FileStore

_NBYTES = 4096


def _storage() -> torch.UntypedStorage:
    return torch.zeros(_NBYTES, dtype=torch.uint8).untyped_storage()


def test_what_is_gone_gives_its_slot_back(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    shelf, kept, gone = Shelf(store), _storage(), _storage()
    (first, _), _ = shelf.reserve([(kept, _NBYTES), (gone, _NBYTES)])
    assert store.reserved_bytes == 2 * _NBYTES
    del gone
    places, new = shelf.reserve([(kept, _NBYTES)])
    assert places[0] is first
    assert new == []
    assert store.reserved_bytes == _NBYTES
    store.close()


def test_what_is_not_asked_for_and_alive_keeps_its_place(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    shelf, one, other = Shelf(store), _storage(), _storage()
    (first,), _ = shelf.reserve([(one, _NBYTES)])
    shelf.reserve([(other, _NBYTES)])
    assert shelf.reserve([(one, _NBYTES)]) == ([first], [])
    store.close()


def test_no_storage_gets_the_place_of_one_that_is_gone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    shelf = Shelf(store)
    for _ in range(50):  # freed and allocated in turn, addresses would come again
        storage = _storage()
        (place,), new = shelf.reserve([(storage, _NBYTES)])
        assert place.digest is None
        assert new == [storage._cdata]
        place.digest = b"of another"
        del storage
    store.close()
