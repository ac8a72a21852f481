import copy

import pytest

from rz.certificate import certificate, check_certificate
from rz.ops.probe import ProbeResult

PROBES = [ProbeResult(name="linear", passed=True, detail=""), ProbeResult(name="rope", passed=True, detail="")]


def test_a_certificate_of_this_machine_passes_and_says_what_it_rests_on():
    now = certificate(PROBES, engine="plain", dtype="float32")
    check_certificate(copy.deepcopy(now), now)
    assert now["libraries"]["torch"].startswith("2.") and now["processor"]["name"]
    assert now["probes"] == {"linear": True, "rope": True}


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("engine",), "vllm", r"engine must be as the run began with \(vllm\), got plain"),
        (("libraries", "torch"), "1.0", r"libraries torch must be as the run began with \(1.0\), got 2"),
        (("processor", "name"), "abacus", r"processor name must be as the run began with \(abacus\), got"),
        (("probes", "rope"), False, r"probes rope must be as the run began with \(False\), got True"),
        (("flags", "MKL_CBWR"), "COMPATIBLE", r"flags MKL_CBWR must be as the run began with \(COMPATIBLE\), got"),
    ],
)
def test_each_difference_is_named(path, value, rule):
    now = certificate(PROBES, engine="plain", dtype="float32")
    saved = copy.deepcopy(now)
    place = saved
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=rule):
        check_certificate(saved, now)
