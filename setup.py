"""The one compiled part: a small C library, loaded with ctypes. Everything else is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Optional: without a C compiler the package installs all the same; `torpor.memory.vmm` says what it lacks.
VMM = Extension(
    "torpor.memory._vmm",
    sources=["src/torpor/memory/_vmm.c"],
    extra_compile_args=["-O2", "-fvisibility=hidden"],
    libraries=["dl", "pthread"],
    optional=True,
)

setup(ext_modules=[VMM] if sys.platform.startswith("linux") else [])
