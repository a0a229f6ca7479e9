"""System limits are reported as ResourceError with instructions for raising them."""

import errno

import pytest

from xvcomm.errors import ResourceError, StoreError
from xvcomm.system import limits


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "fs.file-max")])
def test_reached_limits_are_named(number, remedy):
    said = f"^cannot do this: too many open files; .*{remedy}"
    with pytest.raises(ResourceError, match=said) as caught, limits.told("do this"):
        raise OSError(number, "refused")
    assert caught.value.__cause__.errno == number


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "none"), StoreError("lost"), ValueError("wrong")])
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as caught, limits.told("do this"):
        raise error
    assert caught.value is error and limits.named(error, "do this") is error
