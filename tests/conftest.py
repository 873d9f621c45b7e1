"""What every test needs: the same numbers on every run and on every machine."""

import hypothesis
import pytest
import torch

# As in the workers of `run_workers`: sums made by more threads have other bits.
torch.set_num_threads(1)

# The first call of a torch function may take a second; pytest-timeout limits the rest.
hypothesis.settings.register_profile("lowcomm", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lowcomm")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
