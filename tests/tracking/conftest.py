"""Isolation of the tracking tests from this machine's accounts."""

import pytest
from support.accounts import hide_accounts


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    hide_accounts(monkeypatch, tmp_path)
