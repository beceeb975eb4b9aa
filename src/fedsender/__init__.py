"""A federation sender daemon for Matrix homeservers."""


def version() -> str:
    """The version of the installed package, such as "0.3.0"; "unreleased" without an install."""
    # Here, because most commands need neither it nor what it imports.
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return version_of("fedsender")
    except PackageNotFoundError:
        return "unreleased"
