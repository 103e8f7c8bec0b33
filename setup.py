"""The compiled parts: two small C libraries, loaded with ctypes. Everything else is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Optional: without a C compiler the package installs all the same. `torpor.memory.vmm` says what it lacks, and
# host memory is copied one by one.
VMM = Extension(
    "torpor.memory._vmm",
    sources=["src/torpor/memory/_vmm.c"],
    extra_compile_args=["-O2", "-fvisibility=hidden"],
    libraries=["dl", "pthread"],
    optional=True,
)

COPY = Extension(
    "torpor._copy",
    sources=["src/torpor/_copy.c"],
    extra_compile_args=["-O2", "-fvisibility=hidden"],
    optional=True,
)

setup(ext_modules=[VMM, COPY] if sys.platform.startswith("linux") else [])
