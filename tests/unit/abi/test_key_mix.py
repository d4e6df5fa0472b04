import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.abi.key_index import KeyMix

WORD = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
KEY = st.tuples(WORD, WORD, WORD, WORD).map(lambda words: b"".join(word.to_bytes(8, "little") for word in words))
SEED = st.tuples(WORD, WORD, WORD, WORD).map(lambda words: b"".join((word | 1).to_bytes(8, "little") for word in words))
GROUP = st.integers(0, 63)


@given(SEED, st.integers(1, 2**32 - 1), st.lists(KEY, min_size=1, max_size=20), GROUP)
def test_one_key_and_many_are_mixed_the_same(seed, buckets, keys, group):
    mix = KeyMix(seed, buckets)
    expected = [mix.one(key, group) for key in keys]
    assert all(0 <= first < buckets and 0 <= second < buckets and 0 <= tag < 2**32 for first, second, tag in expected)
    homes = mix.many(np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4), group)
    assert [tuple(map(int, row)) for row in zip(*homes, strict=True)] == expected


def test_what_somebody_counts_up_anywhere_in_a_key_is_spread_evenly():
    """Keys that are no hashes at all: only the lowest, or only the highest, bits of one word differ."""
    seed = np.random.default_rng(5).integers(0, 2**63, 4, np.uint64) * np.uint64(2) + np.uint64(1)
    mix = KeyMix(seed.tobytes(), 1000)
    for word in range(4):
        for shift in (0, 24, 48):
            keys = np.zeros((8000, 4), np.uint64)
            keys[:, word] = np.arange(8000, dtype=np.uint64) << np.uint64(shift)
            for home in mix.many(keys, 0)[:2]:
                counts = np.bincount(home.astype(np.int64), minlength=1000)
                assert counts.max() < 40, (word, shift)  # eight on average; of a million such draws none has 40


def test_a_key_stands_elsewhere_in_another_group_and_under_another_seed():
    keys = np.random.default_rng(1).integers(0, 2**64, (1000, 4), np.uint64)
    homes = [
        KeyMix(seed, 1 << 20).many(keys, group)[0].tolist()
        for seed, group in ((b"\1" * 32, 0), (b"\1" * 32, 1), (b"\3" * 32, 0))
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert sum(a == b for a, b in zip(homes[one], homes[other], strict=True)) < 10
