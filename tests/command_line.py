"""What a command line shows, or the sentence that it is refused with; ``run`` is a fixture."""


def shown(run, line, *more):
    """Return what is printed, after exit 0 and nothing on stderr."""
    status, out, err = run(line, *more)
    assert (status, err) == (0, "")
    return out


def refused(run, line, *more):
    """Return the one line on stderr, after exit 2 and nothing printed."""
    status, out, err = run(line, *more)
    assert (status, out, err.count("\n")) == (2, "", 1)
    return err
