import warnings


class Mine(Exception):
    pass


def outer():
    try:
        {}["missing"]
    except KeyError as error:
        raise Mine("on purpose") from error


warnings.warn("careful", stacklevel=1)
outer()
