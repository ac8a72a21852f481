import platform
import subprocess
import sys

import pytest

from rz import heap

FAULTS = """
import ctypes, resource, torch
from rz.heap import keep_freed_memory
{call}
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for number in range(30):
    before = faults()
    tensors = [torch.ones(1 << 18) for _ in range(200)]  # 200 MB
    del tensors
print(faults() - before)
"""


def faults(call):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again():  # 200 MB are 51,200 pages of 4 kB; huge pages would take 100 faults
    assert faults("assert keep_freed_memory()") < 20
    # As glibc begins, blocks of more than 128 kB go back at once; by itself it may raise that, if it comes to it.
    assert faults("ctypes.CDLL(None).mallopt(-3, 1 << 17)") >= 50


class Library:
    """A C library whose mallopt refuses a threshold of mmap above `limit` bytes."""

    def __init__(self, limit):
        self.limit, self.values = limit, {}

    def mallopt(self, name, value):
        if name == heap.MMAP_THRESHOLD and value > self.limit:
            return 0
        self.values[name] = value
        return 1


@pytest.mark.parametrize(("limit", "made"), [(16 << 20, set()), (32 << 20, {heap.TRIM_THRESHOLD, heap.MMAP_THRESHOLD})])
def test_both_settings_are_made_or_none(limit, made, monkeypatch):
    """One alone stops the threshold of mmap from growing by itself: more memory would be handed back than before."""
    library = Library(limit)
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: library)
    assert heap.keep_freed_memory() == bool(made)
    assert library.values.keys() == made
