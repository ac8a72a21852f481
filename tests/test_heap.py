import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from rz.heap import keep_freed_memory
{call}
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for number in range(3):
    before = faults()
    tensor = torch.ones(64 << 18)  # 64 MB, more than glibc's own threshold ever keeps
    del tensor
print(faults() - before)
"""


def faults(call):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True, timeout=120
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again():  # 64 MB are 16,384 pages of 4 kB; huge pages would take 32 faults
    assert faults("assert keep_freed_memory()") < 20
    assert faults("") >= 32
