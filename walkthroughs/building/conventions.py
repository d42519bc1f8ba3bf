"""The table of conventions."""


def setup(app):
    pass
