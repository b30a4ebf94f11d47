"""Addresses of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from gear_loader.utils.arrays import data_address


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "int64"])
def test_the_address_of_an_array_is_that_of_its_first_element(dtype: str) -> None:
    array = np.zeros((7, 5), dtype=dtype)
    for view in (array, array[3:], array[:, 2], array[::-1], array[2:2], array.reshape(-1)[11:]):
        assert data_address(view) == view.ctypes.data == view.__array_interface__["data"][0]
