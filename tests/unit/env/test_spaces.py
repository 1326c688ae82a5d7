from __future__ import annotations

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given
from hypothesis import strategies as st

from rlsandbox.env.spaces import Alphabet, UnicodeText, fit
from rlsandbox.errors import ConfigError

small = UnicodeText(40)


@given(st.binary(max_size=40))
def test_decoded_output_is_a_member_whatever_the_bytes(raw: bytes) -> None:
    assert small.contains(raw.decode("utf-8", "replace"))


def test_what_is_no_member() -> None:
    assert not small.contains("x" * 41)
    assert not small.contains("\ud800")
    assert not small.contains("ok \udfff")
    assert not small.contains(b"bytes")
    assert not small.contains(None)
    assert small.contains("\0")
    assert not UnicodeText(40, nul=False).contains("a\0b")
    assert not UnicodeText(5, min_length=2).contains("a")
    assert small.contains(np.str_("numpy"))


@pytest.mark.parametrize("nul", [True, False])
def test_the_alphabet_is_every_character_once(nul: bool) -> None:
    alphabet = Alphabet(nul)
    text = UnicodeText(5, nul=nul).characters
    assert len(alphabet) == len(text) == len(set(text))
    assert len(text) == 0x110000 - 0x800 - (not nul)
    assert ("\0" in alphabet) is nul
    for i in (0, 1, 0xD7FE, 0xD7FF, 0xD800, len(alphabet) - 1):
        assert alphabet[i] == text[i]
        assert alphabet.index(text[i]) == i
    assert alphabet[-1] == "\U0010ffff"
    assert alphabet[1:3] == list(text[1:3])
    with pytest.raises(IndexError):
        alphabet[len(alphabet)]
    for wrong in ("\ud800", "ab", "", 3):
        assert wrong not in alphabet
        with pytest.raises(ValueError, match="no character"):
            alphabet.index(wrong)


def test_samples_are_members_and_repeat_with_their_seed() -> None:
    for space in (UnicodeText(1 << 20), UnicodeText(3, min_length=3, nul=False), UnicodeText(0)):
        space.seed(7)
        first = [space.sample() for _ in range(200)]
        assert all(space.contains(text) for text in first)
        space.seed(7)
        assert [space.sample() for _ in range(200)] == first
    assert any(not text.isascii() for text in (small.sample() for _ in range(50)))


def test_samples_with_a_mask() -> None:
    mask = np.zeros(len(small.character_set), dtype=np.int8)
    assert small.sample(mask=(4, mask)) == ""
    mask[small.character_index("é")] = 1
    assert small.sample(mask=(4, mask)) == "éééé"
    assert small.sample(probability=(2, mask / mask.sum())) == "éé"
    assert len(small.sample(mask=(5, None))) == 5
    with pytest.raises(ConfigError, match="length"):
        small.sample(mask=(41, None))
    with pytest.raises(ConfigError, match="only one"):
        small.sample(mask=(1, None), probability=(1, None))
    with pytest.raises(ConfigError, match="weights"):
        small.sample(mask=(1, np.ones(3)))
    with pytest.raises(ConfigError, match="masked out"):
        UnicodeText(4, min_length=1).sample(mask=(None, np.zeros(len(small.character_set))))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_flattening_and_back(text: str) -> None:
    flat = spaces.flatten(small, text)
    assert spaces.flatten_space(small).contains(flat)
    assert spaces.unflatten(small, flat) == text
    assert spaces.flatdim(small) == 40


def test_equality_copies_and_the_other_text_space() -> None:
    assert small == UnicodeText(40)
    assert small != UnicodeText(41)
    assert small != UnicodeText(40, nul=False)
    assert small != spaces.Text(40, min_length=0)
    assert spaces.Text(40, min_length=0) != small
    for again in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert again == small
        assert again.sample() == copy.deepcopy(small).sample()
    assert repr(small) == "UnicodeText(0, 40, Unicode)"
    assert len(pickle.dumps(small)) < 2000


def test_batches() -> None:
    batched = batch_space(small, 3)
    texts = ("a", "\0", "é")
    assert batched.contains(texts)
    assert tuple(iterate(batched, texts)) == texts
    assert concatenate(small, texts, create_empty_array(small, 3)) == texts
    assert create_empty_array(small, 2) == ("", "")
    batched.seed(1)
    assert batched.contains(batched.sample())
    assert isinstance(gym.spaces.Dict({"x": small}).sample()["x"], str)


@given(st.text(st.characters(), max_size=90), st.integers(0, 60), st.booleans())
def test_any_text_is_fitted_into_its_space(text: str, length: int, nul: bool) -> None:
    space = UnicodeText(length, nul=nul)
    fitted = fit(text, space)
    assert space.contains(fitted)
    if space.contains(text):
        assert fitted == text


def test_a_text_that_is_too_long_keeps_head_and_tail() -> None:
    fitted = fit("head" + "x" * 10_000 + "tail", UnicodeText(200))
    assert fitted.startswith("head")
    assert fitted.endswith("tail")
    assert "left out" in fitted


def test_bounds_that_make_no_sense() -> None:
    with pytest.raises(ConfigError):
        UnicodeText(3, min_length=4)
    with pytest.raises(ConfigError):
        UnicodeText(-1)
