"""Fixtures for the tests of the page: a running explorer, and a browser."""

import pytest

import explorer


@pytest.fixture(scope="module")
def url():
    with explorer.served() as served:
        yield served.url


@pytest.fixture(scope="module")
def opened():
    with explorer.browser() as browser:
        yield browser
