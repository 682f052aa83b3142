"""Fixtures of the training tests: a base model saved in a folder."""

import pytest
from tiny_models import random_lm, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("base")
    random_lm(context=64).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)
