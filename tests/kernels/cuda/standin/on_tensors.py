"""A GPU test of tensors in a process with the stand-in, and with as much of torch as it uses."""

import pytest
from kernels.cuda.standin import tensors

tensors.install()

pytest.register_assert_rewrite("kernels.cuda.test_driver")

from kernels.cuda.test_driver import test_options_may_be_tensors, torch  # noqa: E402, F401
