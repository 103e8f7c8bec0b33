"""A driver made of ordinary memory, for the tests of `vmm`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_gpu import SOURCE, Rig, compile_c


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("vmm")
    fake = compile_c(Path(__file__).with_name("fake_driver.c"), folder / "libfake.so")
    return compile_c(SOURCE, folder / "_vmm.so"), fake


@pytest.fixture
def rig(compiled: tuple[Path, Path], tmp_path: Path) -> Iterator[Rig]:
    library, driver = (shutil.copy(path, tmp_path) for path in compiled)
    rig = Rig(Path(library), Path(driver))
    yield rig
    assert rig.driver.fake_pushed() == 0, "a context was pushed and not popped"
