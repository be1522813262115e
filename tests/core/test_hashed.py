"""A tuple that is hashed once is the tuple that it is, here and in another process."""

import pickle

from omnikv.core.hashed import Hashed


def test_it_is_found_by_the_plain_tuple():
    assert {Hashed(("key", 1)): "found"}["key", 1] == "found"
    assert hash(Hashed(())) == hash(())


def test_a_copy_in_another_process_does_not_bring_its_hash_from_here():
    hashed = Hashed(("key", 1))
    assert hash(hashed) == hash(("key", 1))
    copy = pickle.loads(pickle.dumps(hashed))
    assert (type(copy), copy) == (Hashed, hashed)
    assert vars(copy) == {}
