"""What every test and doctest may use: names for doctests, profiles for property tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("thorough", max_examples=500, deadline=None, suppress_health_check=_QUIET, print_blob=True)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace.update(torch=torch, nn=nn)
