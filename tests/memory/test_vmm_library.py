"""The C part of `vmm` over a driver made of ordinary memory: contents, addresses, every call failing in turn."""

import ctypes
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from fake_gpu import MIB, PAGE, SAMPLE, SOURCE, Rig, needs_cc

from torpor.errors import DriverError, UnsupportedError
from torpor.memory.vmm_library import VmmLibrary, vmm_library

pytestmark = needs_cc


def test_pages_go_and_come_back_at_the_same_addresses(rig: Rig) -> None:
    addresses = [rig.malloc(PAGE * n - 5) for n in (1, 3, 2)]
    for address in addresses:
        ctypes.memset(address, 0xAB, SAMPLE)
    assert rig.held() == (6 * PAGE, 3, 3)
    assert rig.vmm.unmap(addresses[:2], 0) == 4 * PAGE
    assert rig.held() == (2 * PAGE, 1, 1)
    assert ctypes.string_at(addresses[2], SAMPLE) == b"\xab" * SAMPLE
    assert rig.vmm.map(addresses, 0) == 4 * PAGE
    assert ctypes.string_at(addresses[0], SAMPLE) == bytes(SAMPLE), "new pages"
    assert ctypes.string_at(addresses[2], SAMPLE) == b"\xab" * SAMPLE, "an extent with pages is left as it is"
    assert [int(row["address"]) for row in rig.vmm.extents()] == sorted(addresses)


def test_unmapping_and_mapping_twice_changes_nothing(rig: Rig) -> None:
    address = rig.malloc(PAGE)
    assert [rig.vmm.unmap([address, address], 0), rig.vmm.unmap([address], 0)] == [PAGE, 0]
    assert [rig.vmm.map([address, address], 0), rig.vmm.map([address], 0)] == [PAGE, 0]
    assert rig.held() == (PAGE, 1, 1)


def test_freed_while_asleep(rig: Rig) -> None:
    first, second = rig.malloc(PAGE), rig.malloc(PAGE)
    shared = [rig.malloc(MIB) for _ in range(2)]
    rig.free(shared[0])
    rig.free(shared[1])
    rig.vmm.unmap([first, second], 0)
    rig.free(first)
    assert rig.held() == (0, 0, 0)
    with pytest.raises(DriverError, match="not an extent"):
        rig.vmm.map([first], 0)
    rig.vmm.map([second], 0)
    rig.free(second)
    assert rig.held() == (0, 0, 0)
    assert len(rig.vmm.extents()) == 0


def test_free_waits_for_the_device_as_cudafree_does(rig: Rig) -> None:
    address = rig.malloc(PAGE)
    before = rig.driver.fake_synchronized()
    rig.free(address)
    assert rig.driver.fake_synchronized() == before + 1


def test_addresses_are_used_again_serials_are_not(rig: Rig) -> None:
    rig.malloc(PAGE)
    gone = rig.malloc(PAGE)
    rig.malloc(PAGE)
    serial = int(rig.vmm.extents()["serial"][1])
    rig.free(gone)
    assert rig.malloc(PAGE) == gone
    assert int(rig.vmm.extents()["serial"][1]) > serial


def test_out_of_memory_is_null_for_torch_and_numbers_for_people(rig: Rig) -> None:
    rig.driver.fake_capacity(2 * PAGE)
    address = rig.malloc(2 * PAGE)
    assert rig.malloc(PAGE) == 0
    count, text = rig.vmm.background_failure()
    assert count == 1
    assert f"cuMemCreate of {PAGE} bytes" in text
    assert "out of memory" in text
    assert len(rig.vmm.extents()) == 1
    rig.vmm.unmap([address], 0)
    rig.driver.fake_capacity(PAGE)
    with pytest.raises(DriverError, match=f"cuMemCreate of {2 * PAGE} bytes.*code 2: out of memory") as caught:
        rig.vmm.map([address], 0)
    assert (caught.value.code, caught.value.call, caught.value.device) == (2, "cuMemCreate", "cuda:0")
    assert rig.held() == (0, 0, 0)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failing_map_takes_nothing(rig: Rig, call: str, nth: int) -> None:
    addresses = [rig.malloc(PAGE) for _ in range(5)]
    rig.vmm.unmap([addresses[0], addresses[2], addresses[4]], 0)  # three runs: each call happens three times
    before = rig.held()
    rig.fail(call, nth)
    with pytest.raises(DriverError, match=call):
        rig.vmm.map(addresses, 0)
    assert rig.held() == before
    assert rig.mapped() == [False, True, False, True, False]
    rig.vmm.map(addresses, 0)
    assert rig.mapped() == [True] * 5


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_unmap_gives_nothing_and_keeps_every_byte(rig: Rig, nth: int) -> None:
    addresses = [rig.malloc(PAGE) for _ in range(3)]
    for i, address in enumerate(addresses):
        ctypes.memset(address, i + 1, SAMPLE)
    before = rig.held()
    rig.fail("cuMemUnmap", nth)
    with pytest.raises(DriverError, match=r"cuMemUnmap.*asked to fail"):
        rig.vmm.unmap(addresses, 0)
    assert rig.held() == before
    assert [ctypes.string_at(address, SAMPLE) for address in addresses] == [bytes([i]) * SAMPLE for i in (1, 2, 3)]


def test_a_released_handle_that_stays_is_an_error_and_can_be_mapped_again(rig: Rig) -> None:
    addresses = [rig.malloc(PAGE) for _ in range(2)]
    rig.fail("cuMemRelease")
    with pytest.raises(DriverError, match="cuMemRelease"):
        rig.vmm.unmap(addresses, 0)
    assert rig.mapped() == [False, False]
    rig.vmm.map(addresses, 0)
    assert rig.mapped() == [True, True]


def test_where_few_addresses_are_left_a_smaller_region_will_do(rig: Rig) -> None:
    rig.fail("cuMemAddressReserve", 1)
    assert rig.malloc(PAGE) != 0


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_failing_malloc_leaves_nothing(rig: Rig, call: str) -> None:
    rig.fail(call)
    assert rig.malloc(PAGE) == 0
    assert rig.held() == (0, 0, 0)
    assert call in rig.vmm.background_failure()[1]
    assert rig.malloc(PAGE) != 0


def test_a_failing_free_keeps_the_segment_and_says_so(rig: Rig) -> None:
    address = rig.malloc(PAGE)
    rig.fail("cuCtxSynchronize")
    rig.free(address)
    assert rig.held() == (PAGE, 1, 1)
    assert "cuCtxSynchronize" in rig.vmm.background_failure()[1]
    rig.free(address)
    assert rig.held() == (0, 0, 0)


def test_an_unknown_device_is_an_error(rig: Rig) -> None:
    assert rig.malloc(PAGE, device=7) == 0
    assert "cuDevicePrimaryCtxRetain" in rig.vmm.background_failure()[1]
    assert rig.malloc(PAGE, device=99) == 0
    assert "no such device" in rig.vmm.background_failure()[1]


def test_each_device_has_its_own_addresses(rig: Rig) -> None:
    zero, one = rig.malloc(PAGE, 0), rig.malloc(PAGE, 1)
    assert rig.vmm.extents(1)["address"].tolist() == [one]
    rig.vmm.unmap([zero], 0)
    rig.vmm.unmap([one], 1)
    rig.vmm.map([one], 1)
    assert [row["mapped"] for row in rig.vmm.extents(1)] == [1]
    assert [row["mapped"] for row in rig.vmm.extents(0)] == [0]


def test_small_pieces_share_pages_and_little_of_them_lies_idle(rig: Rig) -> None:
    addresses = [rig.malloc(2 * MIB) for _ in range(600)]
    assert len(set(addresses)) == 600
    extents = rig.vmm.extents()
    assert len(extents) < 100
    held, _, _ = rig.held()
    assert held == int(extents["nbytes"].sum())
    assert 1200 * MIB <= held <= 1200 * MIB * 17 // 16
    for address in addresses[::2]:
        rig.free(address)
    assert 600 * MIB < rig.held()[0] < held, "pages go with the last piece of their extent"
    again = [rig.malloc(2 * MIB) for _ in range(300)]
    assert len({*again, *addresses[1::2]}) == 600
    assert rig.held()[0] <= held + 64 * MIB, "gaps are filled"
    for address in addresses[1::2] + again:
        rig.free(address)
    assert rig.held() == (0, 0, 0)
    assert len(rig.vmm.extents()) == 0


def test_nothing_is_placed_in_extents_that_are_sealed_or_sleep(rig: Rig) -> None:
    for _ in range(40):
        rig.malloc(MIB)
    addresses = rig.vmm.extents()["address"].tolist()
    rig.vmm.seal(0, True)
    later = rig.malloc(MIB)
    assert later in rig.vmm.extents()["address"].tolist()
    assert later not in addresses
    rig.vmm.unmap(addresses, 0)
    rig.vmm.seal(0, False)
    last = rig.malloc(MIB)
    ctypes.memset(last, 1, SAMPLE)
    rig.vmm.map(addresses, 0)


def test_where_memory_is_short_a_piece_gets_no_more_than_it_asked_for(rig: Rig) -> None:
    for _ in range(100):
        rig.malloc(MIB)
    spare = int((rig.vmm.extents()["nbytes"] - rig.vmm.extents()["used_bytes"]).sum())
    for _ in range(spare // MIB):
        rig.malloc(MIB)
    rig.driver.fake_capacity(rig.held()[0] + MIB)
    assert rig.malloc(MIB) != 0
    assert rig.malloc(MIB) == 0


def test_threads_may_allocate_free_and_sleep_at_once(rig: Rig) -> None:
    mine = [rig.malloc(PAGE) for _ in range(20)]
    wrong: list[str] = []

    def work(value: int) -> None:
        for _ in range(60):
            address = rig.malloc(2 * PAGE)
            ctypes.memset(address, value, SAMPLE)
            if ctypes.string_at(address, SAMPLE) != bytes([value]) * SAMPLE:
                wrong.append(f"thread {value}")
            rig.free(address)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        rig.vmm.unmap(mine, 0)
        rig.vmm.map(mine, 0)
    for thread in threads:
        thread.join()
    assert wrong == []
    assert rig.held() == (20 * PAGE, 20, 20)


def test_a_missing_driver_is_said(compiled: tuple[Path, Path], tmp_path: Path) -> None:
    library = Path(shutil.copy(compiled[0], tmp_path))
    with pytest.raises(UnsupportedError, match=r"libnothing.so.*NVIDIA driver|NVIDIA driver.*libnothing.so"):
        VmmLibrary(library, "libnothing.so.1")
    with pytest.raises(UnsupportedError, match="cuInit"):
        VmmLibrary(library, "libc.so.6")


def test_without_the_compiled_part_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.memory.vmm_library.__file__", str(tmp_path / "vmm_library.py"))
    vmm_library.cache_clear()
    with pytest.raises(UnsupportedError, match=r"C compiler.*pip install"):
        vmm_library()
    vmm_library.cache_clear()


def test_the_build_goes_on_without_a_compiler(tmp_path: Path) -> None:
    root = SOURCE.parents[3]
    if not (root / "setup.py").is_file():
        pytest.skip("runs from a checkout")
    script = textwrap.dedent(
        """
        import runpy, sys
        sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", sys.argv[1], "--build-temp", sys.argv[1]]
        runpy.run_path("setup.py", run_name="__main__")
        """
    )
    for compiler, expected in (("cc", 1), ("/nonexistent/cc", 0)):
        target = tmp_path / str(expected)
        subprocess.run(
            [sys.executable, "-c", script, str(target)],
            cwd=root,
            env={"CC": compiler, "PATH": "/usr/bin:/bin"},
            check=True,
            capture_output=True,
        )
        assert len(list(target.rglob("_vmm*.so"))) == expected
