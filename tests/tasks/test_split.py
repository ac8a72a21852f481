import hashlib

from hypothesis import given
from hypothesis import strategies as st

from rz.tasks.split import is_held_out


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_share_zero_holds_out_none_and_one_all(question):
    assert not is_held_out(question, share=0.0)
    assert is_held_out(question, share=1.0)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_keeps_what_was_held_out(question, a, b):
    assert is_held_out(question, share=min(a, b)) <= is_held_out(question, share=max(a, b))


def test_share_is_compared_with_the_hash():  # the first 8 bytes of BLAKE2b, as a fraction of 2**64
    place = int(hashlib.blake2b(b"1+2", digest_size=8).hexdigest(), 16) / 2**64
    assert is_held_out("1+2", share=place + 1e-9)
    assert not is_held_out("1+2", share=place - 1e-9)


def test_the_share_is_met_on_average():  # 10,000 draws at 1/4: standard deviation 43
    assert 2300 < sum(is_held_out(str(i), share=0.25) for i in range(10_000)) < 2700
